"""The reads of selections, and the inputs of consecutive layers, against a float64 decoder that selects."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, policies, selection
from kvjax.analysis import rows, selection_quality
from kvjax.errors import InputError, SelectionError
from kvjax.models import skew
from tests.reference import selection as looks
from tests.reference.decoder import _to_float64
from tests.reference.layers import linear, rms_norm
from tests.reference.step import rotate
from tests.tiny import HEADS, random_tokens, tiny

PROMPTS, LENGTHS = np.array([18, 11]), np.array([36, 24])
TOKENS = random_tokens(2, 36, seed=6)
SAMPLE = random_tokens(1, 30, seed=7)
FIRST = 1  # layer that selects; the one before reads everything
SCALE = 8**-0.5
NEAR = 1e-5  # choices nearer than this demand another seed
GUESS = {"alpha": 1.0, "ratio": 0.5, "cap": 0.5, "sinks": 1, "recent": 2}
SPECS = {
    "infinigen": selection.infinigen(first_layer=FIRST, **GUESS),
    "infinigen, all columns": selection.infinigen(first_layer=FIRST, **(GUESS | {"ratio": 1.0})),
    "optimal": selection.optimal(5, first_layer=FIRST),
    "all": selection.infinigen(math.inf, cap=1.0, first_layer=FIRST),
}


class Query(NamedTuple):
    """The tokens that a query of one KV head could read, and those it read, of the tokens up to its own."""

    probability: np.ndarray  # [G, t + 1] float64 over everything
    chosen: np.ndarray  # positions
    always: np.ndarray  # positions, the query's own among them


class Run(NamedTuple):
    queries: dict[tuple[int, int, int], Query]  # (layer, KV head, t), after the prompt and where layers select
    streams: dict[str, np.ndarray]  # name -> [L, T, hidden]


def reference_look(name: str, matrices: np.ndarray | None = None) -> looks.Look | None:
    match name:
        case "optimal":
            return looks.EachHead(looks.optimal(5, SCALE))
        case "everything":
            return None
    given = GUESS if name == "infinigen" else GUESS | {"ratio": 1.0}
    return looks.InfiniGen(SCALE, **given, skew=matrices)


def decode(params: Any, config: Any, tokens: np.ndarray, prompt: int, choosers: list[looks.Look | None]) -> Run:
    """Decodes one text: the prompt at once, then token by token, in which layers read what `choosers` choose."""
    params, queries, streams = _to_float64(params), {}, {name: [] for name in analysis.InputCosine._fields}
    kv_heads, dim = config.num_kv_heads, config.head_dim
    held: list[list[np.ndarray]] = [[np.zeros((0, kv_heads, dim))] * 2 for _ in choosers]
    for at in [np.arange(prompt), *np.arange(prompt, len(tokens))[:, None]]:
        x, before = params["embed"]["tokens"][tokens[at]], None
        seen: dict[str, list[np.ndarray]] = {name: [] for name in streams}
        for index, chooser in enumerate(choosers):
            layer = params[f"layer_{index}"]
            attention, mlp = layer["attention"], layer["mlp"]

            def heads(x, name, attention=attention, at=at):
                return linear(x, attention[name]).reshape(len(at), kv_heads, -1, dim)

            h = rms_norm(x, layer["attention_norm"], config.norm_eps)
            # [n, K, G, D] and [n, K, D]
            query, plain, value = heads(h, "query"), heads(h, "key")[:, :, 0], heads(h, "value")[:, :, 0]
            query, key = rotate(query, at, config.rope_theta), rotate(plain, at, config.rope_theta)
            held[index] = [np.concatenate(pair) for pair in zip(held[index], (key, value), strict=True)]
            keys, values = held[index]
            choices = None
            if chooser is not None and len(at) > 1:
                chooser.begin(query, key, plain)
            elif chooser is not None:
                guess = rotate(heads(before, "query"), at, config.rope_theta)
                by = guess if isinstance(chooser, looks.InfiniGen) else query
                choices = chooser.choose(
                    by[0], [keys[:, head] for head in range(kv_heads)], [np.arange(len(keys))] * kv_heads
                )
            output = np.zeros(query.shape)
            for row, t in enumerate(at):
                for head in range(kv_heads):
                    read = np.arange(t + 1)
                    if choices is not None:
                        choice = choices[head]
                        assert choice.gap > NEAR, "a choice of the reference is a near-tie: use another seed"
                        true = looks.attend(query[row, head], keys[:, head], SCALE)
                        queries[index, head, int(t)] = Query(true, choice.chosen, choice.always)
                        read = np.sort(np.concatenate([choice.chosen, choice.always]))
                    output[row, head] = looks.attend(query[row, head], keys[read, head], SCALE) @ values[read, head]
            attended = linear(output.reshape(len(at), -1), attention["out"])
            inner = rms_norm(x + attended, layer["mlp_norm"], config.norm_eps)
            gate = linear(inner, mlp["gate"])
            added = linear(gate / (1 + np.exp(-gate)) * linear(inner, mlp["up"]), mlp["down"])
            for name, own in zip(streams, (h, x, attended, added), strict=True):
                seen[name].append(own)
            before, x = h, x + attended + added
        for name in streams:
            streams[name].append(np.stack(seen[name]))
    return Run(queries, {name: np.concatenate(parts, axis=1) for name, parts in streams.items()})


@functools.cache
def matrices(heads: str) -> np.ndarray:
    return skew.find_skew(tiny(heads).model, SAMPLE)


@functools.cache
def reference(heads: str, name: str, with_skew: bool = False) -> list[Run]:
    """A run for each row."""
    own, found = tiny(heads), []
    for row, length in enumerate(LENGTHS):
        chooser = reference_look(name, matrices(heads)[FIRST] if with_skew else None)
        text, prompt = TOKENS[row, :length], int(PROMPTS[row])
        found.append(decode(own.params, own.config, text, prompt, [None, chooser]))
    return found


@functools.cache
def measured(heads: str, name: str, with_skew: bool = False) -> analysis.Selected:
    model = tiny(heads).model
    model = skew.skewed(model, matrices(heads)) if with_skew else model
    spec = kvjax.CacheSpec(policies.full(), selection=SPECS[name])
    return analysis.selected(model, TOKENS, spec, prompt_length=PROMPTS, lengths=LENGTHS)


MUTATIONS = {
    "the new token is a candidate", "what is always read is a candidate", "probabilities of what is read",
    "the largest of the query heads", "mass of what is chosen",
}  # fmt: skip


def expected(query: Query, mutation: str | None = None) -> tuple[int, float, float, float]:
    """The fields of `Selected` by their definitions, or with a mistake."""
    size, chosen = query.probability.shape[1], set(query.chosen.tolist())
    read = chosen | set(query.always.tolist())
    m = query.probability.mean(axis=0)
    mass = sum(m[j] for j in (chosen if mutation == "mass of what is chosen" else read))
    if mutation == "the largest of the query heads":
        m = query.probability.max(axis=0)
    if mutation == "probabilities of what is read":
        mass = 1.0
    candidates = set(range(size)) - (read - chosen)
    if mutation == "the new token is a candidate":
        candidates |= {size - 1}
    if mutation == "what is always read is a candidate":
        candidates = set(range(size - 1))
    order = sorted(candidates, key=lambda j: (m[j], j), reverse=True)
    n = len(chosen)
    if mutation is None and n < len(order):
        assert m[order[n - 1]] - m[order[n]] > NEAR * m[order[n]], "the best are a near-tie: use another seed"
    return n, len(chosen & set(order[:n])) / n, mass, len(read) / size


def fields_at(got: analysis.Selected, layer: int, row: int, head: int, t: int) -> list[float]:
    return [float(field[layer, row, head, t]) for field in got]


CASES = [*((heads, "infinigen") for heads in HEADS), ("gqa", "optimal")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "name"), CASES)
def test_selected(heads, name):
    got, found = measured(heads, name), reference(heads, name)
    kv_heads = HEADS[heads][1]
    assert all(field.shape == (2, 2, kv_heads, 36) for field in got) and got.number.dtype == np.int32
    differs = dict.fromkeys(MUTATIONS, False)
    for layer, row, head, t in np.ndindex(got.number.shape):
        if layer < FIRST or not PROMPTS[row] <= t < LENGTHS[row]:
            assert got.number[layer, row, head, t] == -1 and np.isnan(fields_at(got, layer, row, head, t)[1:]).all()
            continue
        query, fields = found[row].queries[layer, head, t], fields_at(got, layer, row, head, t)
        np.testing.assert_allclose(fields, expected(query), atol=2e-5)
        for mutation in MUTATIONS:
            differs[mutation] |= not np.allclose(fields, expected(query, mutation), atol=1e-3)
    numbers = got.number[FIRST][got.number[FIRST] >= 0]
    if name == "optimal":
        assert np.nanmin(got.overlap) == 1 and (numbers == 5).all()
    else:
        assert np.nanmean(got.overlap) < 1 and len(set(numbers.tolist())) > 1
        # With a single query head the mean over heads is their largest.
        same = {"the largest of the query heads"} if heads == "mha" else set()
        assert {mutation for mutation, seen in differs.items() if not seen} == same


@pytest.mark.sampled(0)
def test_nothing_of_n_slots_covers_more_than_the_best():
    """Both runs have the same queries: the layer before reads everything."""
    model, most = tiny("gqa").model, 5
    spec = kvjax.CacheSpec(
        policies.full(), selection=selection.infinigen(math.inf, ratio=0.5, cap=most, first_layer=FIRST)
    )
    other = analysis.selected(model, TOKENS, spec, prompt_length=PROMPTS, lengths=LENGTHS)
    best = measured("gqa", "optimal")
    at = best.number >= 0
    np.testing.assert_array_equal(other.number[at], most)
    assert (best.mass[at] >= other.mass[at] - 1e-6).all()
    fewer = at & (other.overlap < 1)
    assert fewer.any() and (best.mass[fewer] > other.mass[fewer]).all()


def test_everything_chosen_covers_everything():
    got = measured("gqa", "all")
    at = got.number >= 0
    t = np.broadcast_to(np.arange(36), at.shape)
    np.testing.assert_array_equal(got.number[at], t[at])
    np.testing.assert_allclose([got.overlap[at], got.mass[at], got.share[at]], 1, atol=1e-6)


@pytest.mark.sampled(0)
def test_split_heads_are_in_the_model_s_order():
    """KV heads that stream read all that they hold; numbers and shares are those of the record."""
    policy = policies.duo_attention([[1, 0], [0, 1]], sinks=1, recent=6)
    spec = kvjax.CacheSpec(policy, selection=selection.optimal(4))
    model = tiny("gqa").model
    got = analysis.selected(model, TOKENS, spec, prompt_length=PROMPTS, lengths=LENGTHS)
    record = kvjax.log_likelihood(model, TOKENS, spec, prompt_length=PROMPTS, lengths=LENGTHS, record=True).record
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        # [L, K, steps]
        number, read, live = (np.moveaxis(x[: length - prompt, :, row], 0, -1) for x in record[1:4])
        own = np.s_[:, row, :, prompt:length]
        np.testing.assert_array_equal(got.number[own], number)
        np.testing.assert_allclose(got.share[own], np.where(number >= 0, read / live, np.nan), rtol=1e-6)
    assert (got.number[0, :, 0, 20] == 4).all() and (got.number[0, :, 1] == -1).all()


def one_query(choice: list[int], always: list[int], size: int = 6, outside: int = 0) -> list[float]:
    """The measure of a query at `size - 1` whose logits are all equal; a window hides the oldest tokens."""
    chosen, read = (jnp.array([t in those for t in range(size)]) for those in (choice, choice + always))
    held = jnp.arange(size) >= outside
    shaped = [each[None, None, None, None] for each in (read, held, chosen)]
    given = rows.Rows(
        probability=None, seen=shaped[0], query=None, logits=jnp.zeros((1, 1, 2, 1, size)), held=shaped[1],
        choice=shaped[2], selects=np.array([True]),
    )  # fmt: skip
    return [float(x[0, 0, 0, 0]) for x in selection_quality._compare_with_best((), (given,))[1]]


def test_of_equal_candidates_the_newer_is_better():
    assert one_query([4], [5]) == pytest.approx([1, 1, 1 / 3, 1 / 3])
    assert one_query([3], [5]) == pytest.approx([1, 0, 1 / 3, 1 / 3])
    assert one_query([2, 3], [4, 5]) == pytest.approx([2, 1, 2 / 3, 2 / 3])
    assert one_query([3, 4], [5], outside=2) == pytest.approx([2, 1, 3 / 4, 3 / 4])
    assert one_query([], [4, 5]) == pytest.approx([0, math.nan, 1 / 3, 1 / 3], nan_ok=True)


# --- inputs of consecutive layers ---


def cosine(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return (one * two).sum(axis=-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(two, axis=-1)


def test_input_cosine():
    got = analysis.input_cosine(tiny("gqa").model, TOKENS, lengths=LENGTHS)
    for row, run in enumerate(reference("gqa", "everything")):
        for name, field in zip(got._fields, got, strict=True):
            assert field.shape == (2, 2) and np.isnan(field[0, row])
            later = "attention_input" if name == "attention_input" else "block_input"
            wanted = cosine(run.streams[name][0], run.streams[later][1]).mean()
            np.testing.assert_allclose(field[1, row], wanted, atol=1e-5)
    assert len({round(float(field[1, 0]), 5) for field in got}) == 4


def test_layers_that_add_nothing_have_equal_inputs():
    model = tiny("gqa").model
    params = dict(model.params)
    for index in range(2):
        layer = dict(params[f"layer_{index}"])
        for part, last in (("attention", "out"), ("mlp", "down")):
            layer[part] = layer[part] | {last: jax.tree.map(jnp.zeros_like, layer[part][last])}
        params[f"layer_{index}"] = layer
    got = analysis.input_cosine(kvjax.Model(model.config, params), TOKENS, lengths=LENGTHS)
    np.testing.assert_allclose(got.block_input[1], 1, atol=1e-6)
    assert (got.attention_output[1] == 0).all() and (got.mlp_output[1] == 0).all()
    # Scales of the two norms differ.
    assert (got.attention_input[1] < 0.999).all()


# --- skews ---


@pytest.mark.sampled(0)
def test_skew_effect():
    """Means of `selected` of the model and of the skewed one, whose choices are the reference's."""
    got = analysis.skew_effect(
        tiny("gqa").model, TOKENS, kvjax.CacheSpec(policies.full(), selection=SPECS["infinigen"]), ratios=[0.5, 1.0],
        sample=SAMPLE, prompt_length=PROMPTS, lengths=LENGTHS,
    )  # fmt: skip
    np.testing.assert_array_equal(got.ratios, [0.5, 1.0])
    assert got.overlap.shape == got.mass.shape == (2, 2, 2) and np.isnan([got.overlap[..., 0], got.mass[..., 0]]).all()
    for kind in (False, True):
        runs = reference("gqa", "infinigen", kind)
        wanted = np.mean([expected(query)[1:3] for run in runs for query in run.queries.values()], axis=0)
        np.testing.assert_allclose([got.overlap[0, int(kind), FIRST], got.mass[0, int(kind), FIRST]], wanted, atol=2e-5)
    assert got.overlap[0, 0, FIRST] != got.overlap[0, 1, FIRST]
    # With every column, a rotation of the columns changes no product.
    np.testing.assert_allclose(got.overlap[1, 0], got.overlap[1, 1])
    np.testing.assert_allclose(got.mass[1, 0], got.mass[1, 1], rtol=1e-5)


def test_what_cannot_work_is_refused():
    model, guesses = tiny("gqa").model, kvjax.CacheSpec(policies.full(), selection=SPECS["infinigen"])
    arguments = {"sample": SAMPLE, "prompt_length": PROMPTS, "lengths": LENGTHS}
    with pytest.raises(InputError, match="leaves no query to measure: the longest row has 36 tokens"):
        analysis.selected(model, TOKENS, guesses, prompt_length=36)
    with pytest.raises(
        InputError, match=r"affects only the selection kvjax.selection.infinigen; got a spec with Optimal"
    ):
        analysis.skew_effect(
            model, TOKENS, kvjax.CacheSpec(policies.full(), selection=SPECS["optimal"]), ratios=[0.5], **arguments
        )
    with pytest.raises(InputError, match=r"ratios must be a non-empty list of .*; got \[\]"):
        analysis.skew_effect(model, TOKENS, guesses, ratios=[], **arguments)
    with pytest.raises(SelectionError, match="ratio must be"):
        analysis.skew_effect(model, TOKENS, guesses, ratios=[0.5, 1.5], **arguments)
    with pytest.raises(InputError, match="the model is already skewed"):
        analysis.skew_effect(skew.skewed(model, matrices("gqa")), TOKENS, guesses, ratios=[0.5], **arguments)
