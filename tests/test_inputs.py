"""Invalid arguments of calls are refused at the edge, in one paragraph, before anything is traced."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
import kvjax.analysis
from kvjax import contexts, devices, policies
from kvjax.cache import CacheSpec
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower, max_positions
from kvjax.contexts import extend
from kvjax.errors import InputError, KvjaxError, PolicyError
from kvjax.generation import prefill as loop
from kvjax.inputs import check_batch, check_count, warn_beyond_context
from kvjax.serve import Request, Runner
from tests.tiny import random_weights, tiny

CONFIG = tiny().model.config
LEARNED = dataclasses.replace(
    CONFIG, family="opt", rope=None, learned_positions=True, position_offset=2, max_positions=16
)


@pytest.mark.parametrize(
    ("tokens", "lengths", "match"),
    [
        ([], None, "at least one token"),
        ([[]], None, "at least one token"),
        (np.zeros((0, 4), int), None, "at least one token"),
        ([[[1]]], None, r"\[batch, length\]"),
        (7, None, r"\[batch, length\]"),
        ([[1.0, 2.0]], None, "whole numbers"),
        ("ab", None, "generate_text"),
        (["ab"], None, "generate_text"),
        ([[1, 2], "ab"], None, "generate_text"),
        ([[1], ["ab"]], None, "generate_text"),
        (np.array(["a", "b"]), None, "generate_text"),
        ([{"role": "user", "content": "Hello"}], None, "generate_text"),
        ([[True, False]], None, "whole numbers"),
        ([[1, 2], []], None, "row 1 has none"),
        ([[1, 2], 3], None, "list of rows"),
        ([[1, [2]], [3]], None, "list of rows"),
        ([[1.5], [1, 2]], None, "list of rows"),
        ([[1, 2], [64]], None, "token 64 .*0 to 63"),
        ([[1, 2], [3]], [2, 2], "row 1 has 1 tokens"),
        ((np.ones((2, 3), int), np.array([3, 2])), None, "batch.lengths"),
        ([[1, 64]], None, "token 64 .*0 to 63"),
        ([[1, -1]], None, "token -1 "),
        ([[1, 2**40]], None, "vocabulary"),
        ([[1, 2]], [3], "between 1 and 2"),
        ([[1, 2]], [0], "between 1 and 2"),
        ([[1, 2]], [-1], "between 1 and 2"),
        ([[1, 2]], [1, 2], "1 whole numbers"),
        ([[1, 2]], 2, "lengths"),
        ([[1, 2]], [2.0], "lengths"),
        ([[1, 2]], "2", "lengths"),
    ],
)
def test_refused(tokens, lengths, match):
    with pytest.raises(InputError, match=match) as caught:
        check_batch(CONFIG, tokens, lengths, new_tokens=1)
    assert "\n" not in str(caught.value)


def test_accepted():
    batch = check_batch(CONFIG, np.array([[1, 2, 99], [3, -5, -5]], np.int64), [2, 1], new_tokens=5)
    np.testing.assert_array_equal(batch.tokens, [[1, 2], [3, 0]])  # padding may be anything, and is cut off
    np.testing.assert_array_equal(batch.lengths, [2, 1])
    assert batch.tokens.dtype == batch.lengths.dtype == np.int32
    assert check_batch(CONFIG, [1, 2], None, new_tokens=0).tokens.shape == (1, 2)
    assert check_batch(CONFIG, jax.numpy.array([[1, 2]]), None, new_tokens=0).tokens.shape == (1, 2)
    assert check_batch(CONFIG, np.array([[1]], np.uint8), None, new_tokens=0).tokens.dtype == np.int32


@pytest.mark.parametrize("rows", [[[5, 6, 7], [8]], ([5, 6, 7], (8,)), [np.array([5, 6, 7]), np.array([8], np.uint8)]])
def test_rows_of_any_lengths(rows):
    for lengths, expected in ((None, [3, 1]), ([2, 1], [2, 1])):
        batch = check_batch(CONFIG, rows, lengths, new_tokens=0)
        np.testing.assert_array_equal(batch.lengths, expected)
        np.testing.assert_array_equal(batch.tokens, np.array([[5, 6, 7], [8, 0, 0]])[:, : max(expected)])
        assert batch.tokens.dtype == batch.lengths.dtype == np.int32


def test_rows_of_any_lengths_are_those_alone():
    """In every function that takes tokens: a list of rows is the padded array and its lengths."""
    model, policy = tiny(layers=1).model, policies.h2o(8)
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
    padded, lengths = np.zeros((3, 11), int), [11, 3, 1]
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids

    def same(function):
        made = (jax.tree.leaves(function(*each)) for each in ((rows, None), (padded, lengths)))
        for got, expected in zip(*made, strict=True):
            np.testing.assert_array_equal(got, expected)

    same(lambda ids, sizes: kvjax.generate(model, ids, policy, lengths=sizes, max_new_tokens=3)[:3])
    same(lambda ids, sizes: loop.prefill(model, ids, policy, lengths=sizes, max_new_tokens=3).logits)
    same(lambda ids, sizes: kvjax.log_likelihood(model, ids, policy, lengths=sizes, prompt_length=2).logprobs)
    asked = [[[1, 2], [3]], [[4]], [[5]]]
    same(lambda ids, sizes: [tuple(each) for own in kvjax.score_choices(model, ids, asked, policy, lengths=sizes)
                             for each in own])  # fmt: skip
    started = loop.prefill(model, rows, policy, max_new_tokens=16)
    same(lambda ids, sizes: extend(model, started, ids, lengths=sizes).logits)
    same(lambda ids, sizes: kvjax.analysis.sparsity(model, ids, lengths=sizes))


def test_texts_where_tokens_should_be():
    """A request, a prefix and a choice are checked before their own shapes are."""
    model = tiny().model
    runner = Runner(model, policies.full(), rows=1, limits=kvjax.Limits(prompt=8, new_tokens=8))
    for tokens in ([[1, 2], [3]], [[1, 2]], 3):
        for call in (lambda ids: runner.submit(Request(tokens=ids, max_new_tokens=1)), runner.prefix):
            with pytest.raises(InputError, match="one row of tokens"):
                call(tokens)
    for call in (
        lambda: runner.submit(Request(tokens="It was", max_new_tokens=1)),
        lambda: runner.prefix("It was"),
        lambda: kvjax.score_choices(model, [[1, 2]], [["one", "two"]], policies.full()),
    ):
        with pytest.raises(InputError, match="generate_text"):
            call()


MODEL, FULL = tiny().model, policies.full()
PROMPT = [[1, 2, 3]]
RUNNER = {"rows": 1, "limits": kvjax.Limits(prompt=8, new_tokens=8)}
TEXT = dataclasses.replace(MODEL, tokenizer=object())
#: Calls with an argument of another type, and what the error says.
WRONG = {
    "a model by name": (lambda: kvjax.generate("kvjax-tiny", PROMPT, FULL, max_new_tokens=1), "model must be a model"),
    "a model and a text": (lambda: kvjax.generate_text("kvjax-tiny", "Once", FULL), "got 'kvjax-tiny'"),
    "no model": (lambda: kvjax.log_likelihood(None, PROMPT, FULL, prompt_length=1), "model must be .*; got None"),
    "a model to save": (lambda: kvjax.save("kvjax-tiny", "folder"), "model must be"),
    "a model to quantize": (lambda: kvjax.quantize_weights("kvjax-tiny"), "model must be"),
    "a model to calibrate": (lambda: kvjax.calibrate("kvjax-tiny", PROMPT, FULL), "model must be"),
    "a model of drafts": (
        lambda: kvjax.speculate(MODEL, PROMPT, max_new_tokens=1, draft=FULL, draft_model="tiny"), "draft_model must be",
    ),
    "a model to serve": (lambda: Runner("kvjax-tiny", FULL, **RUNNER), "model must be"),
    "a policy by name": (lambda: kvjax.generate(MODEL, PROMPT, "h2o", max_new_tokens=1), "'h2o' is not a policy"),
    "options as a dict": (
        lambda: kvjax.generate(MODEL, PROMPT, FULL, max_new_tokens=1, options={"prefill_block": 8}), "options must be",
    ),
    "a calibration by name": (lambda: kvjax.calibrated(MODEL, FULL, "file"), "calibration=str is not valid"),
    "what is calibrated": (lambda: kvjax.calibrate(MODEL, PROMPT, "low_rank"), "what is calibrated must be a storage"),
    "a stream": (lambda: kvjax.generate(MODEL, PROMPT, FULL, max_new_tokens=1, stream=True), "stream must be"),
    "no choices": (lambda: kvjax.score_choices(MODEL, PROMPT, None, FULL), "choices must be for each context"),
    "choices that are no lists": (lambda: kvjax.score_choices(MODEL, PROMPT, [5], FULL), "the choices of context 0"),
    "tokens as texts": (lambda: kvjax.generate_text(TEXT, [5, 6], FULL), "text 0 must be a string, or a conversation"),
    "bytes as texts": (lambda: kvjax.generate_text(TEXT, ["a", b"b"], FULL), "text 1 must be"),
    "a context by name": (lambda: contexts.extend(MODEL, "folder", PROMPT), "context must be a context"),
    "a context and a model": (lambda: contexts.extend(FULL, MODEL, PROMPT), "model must be a model"),
    "no context": (lambda: contexts.rows(None, [0]), "context must be a context"),
    "one context to join": (lambda: contexts.join(None, None), "first must be a context"),
    "a folder to save": (lambda: contexts.save("folder", "context"), "context must be a context"),
    "a folder to load": (lambda: contexts.load(5, MODEL), "folder must be a path"),
    "a codec by name": (lambda: contexts.load("folder", MODEL, codec="cachegen"), "codec must be a codec such as"),
    "a cartridge of no context": (lambda: kvjax.cartridge(MODEL, "context", PROMPT), "prefilled must be a context"),
    "a chat with a name": (lambda: kvjax.chat("kvjax-tiny", "Hello", FULL), "start must be a model"),
    "a list of texts to chat": (lambda: kvjax.chat(MODEL, ["Hello"], FULL), "message must be a text"),
    "a request of tokens": (lambda: Runner(MODEL, FULL, **RUNNER).submit([1, 2]), "a request must be"),
    "an end of a request": (
        lambda: Runner(MODEL, FULL, **RUNNER).submit(Request(tokens=[1], max_new_tokens=1, until="x")), "until must be",
    ),
    "bytes of a store": (lambda: kvjax.PrefixStore("1GB"), "max_bytes must be a number"),
    "a store of bytes": (lambda: Runner(MODEL, FULL, **RUNNER, prefix_store=10**9), "prefix_store must be"),
    "a path": (lambda: kvjax.load(None), "path_or_name must be a path"),
    "a path of a calibration": (lambda: kvjax.load_calibration(5), "must be a path"),
    "a path of programs": (lambda: kvjax.keep_programs(5), "folder must be a path"),
    "rules as text": (lambda: kvjax.load("kvjax-tiny", rules="mlp=model"), "rules must be a kvjax.Rules"),
    "weights as a list": (lambda: kvjax.load("kvjax-tiny", weights=["int4"]), r"weights=\['int4'\] is unknown"),
    "a mesh of a number": (lambda: kvjax.make_mesh(4), "axes must be the axes of a mesh"),
    "a mesh of no devices": (lambda: kvjax.make_mesh({"data": 0}), "'data' must be a whole number of at least 1; got"),
    "a rule of a number": (lambda: kvjax.Rules(batch=3), "rule batch must be axes of a mesh"),
    "no devices": (lambda: devices.local_device([]), "devices is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_other_types(name):
    call, match = WRONG[name]
    with pytest.raises(KvjaxError, match=match):
        call()


def test_what_a_function_of_the_caller_returns():
    with pytest.raises(InputError, match="until must return which of the 1 rows have ended"):
        kvjax.generate(MODEL, PROMPT, FULL, max_new_tokens=9, until=lambda tokens: None)


@pytest.mark.parametrize("value", [0, -3, 1.0, True, "2", None])
def test_counts(value):
    with pytest.raises(InputError, match="steps must be a whole number of at least 1"):
        check_count("steps", value)


@pytest.mark.parametrize(
    ("prompt", "new", "fits"), [(16, 1, True), (16, 2, False), (10, 7, True), (10, 8, False), (17, 1, False)]
)
def test_the_end_of_a_learned_position_table(prompt, new, fits):
    tokens = np.ones((1, prompt), int)
    if fits:
        check_batch(LEARNED, tokens, None, new_tokens=new)
    else:
        with pytest.raises(InputError, match="position table ends at 16"):
            check_batch(LEARNED, tokens, None, new_tokens=new)
    check_batch(CONFIG, np.ones((1, 600), int), None, new_tokens=1)  # RoPE has no end


def test_the_last_learned_position_works():
    """The exact boundary runs, and gives numbers: a table read past its end would give NaN."""
    model = kvjax.Model(LEARNED, random_weights(LEARNED))
    tokens = np.arange(16)[None]
    got = kvjax.log_likelihood(model, tokens, policies.h2o(budget=4), prompt_length=15)
    assert np.isfinite(got.logprobs).all() and int(got.state.length[0]) == 16
    with pytest.raises(InputError, match="position table"):
        kvjax.log_likelihood(model, np.arange(17)[None], policies.h2o(budget=4), prompt_length=8)
    with pytest.raises(KvjaxError, match="learned"):
        kvjax.generate(model, tokens[:, :4], policies.window(budget=4, positions="cache"), max_new_tokens=2)


def test_nothing_is_traced_before_a_refusal(monkeypatch):
    """Fractions that protect too much are known once the lengths are."""

    def traced(*args, **kwargs):
        raise AssertionError("traced")

    monkeypatch.setattr(loop, "prefill_steps", traced)
    tokens = np.ones((2, 20), int)
    with pytest.raises(PolicyError, match="protects 5 slots, more than its budget of 2"):
        kvjax.generate(tiny().model, tokens, policies.h2o(budget=0.2, recent=5), max_new_tokens=2, lengths=[20, 10])
    with pytest.raises(PolicyError, match=r"3 budgets .* 2 layers"):
        kvjax.generate(tiny().model, tokens, policies.h2o(budget=(4, 4, 4)), max_new_tokens=2)
    with pytest.raises(InputError, match="vocabulary"):
        kvjax.log_likelihood(tiny().model, tokens + 63, policies.full(), prompt_length=2)


def positions(policy, block=None, prompt=(20, 9), new=8):
    lengths = np.array(prompt)
    sizes = sizes_for(lengths, new, width=max(prompt), block=block, limits=None, last_fed=True)
    return max_positions(lower(CacheSpec(policy), CONFIG, sizes, lengths), lengths, lengths + new, block)


def test_positions_that_rope_tells_apart():
    """Tokens; or ranks, of a prompt in one shot too."""
    ranked = {"positions": "cache"}
    assert positions(policies.h2o(6)) == positions(policies.full(**ranked)) == 28
    assert positions(policies.h2o(6, **ranked)) == 20
    assert positions(policies.h2o(6, **ranked), block=4) == 10
    assert positions(policies.h2o(6, **ranked), block=1, prompt=(6, 3)) == 7
    assert positions(policies.snapkv(12, window=2, **ranked), block=4) == 20
    assert positions(policies.snapkv(18, window=2, **ranked), block=4) == 26
    chosen = policies.split_heads([[1, 0], [0, 0]], policies.h2o(15, **ranked), policies.h2o(6, **ranked))
    assert positions(chosen, block=4) == 19


def test_texts_beyond_the_trained_context_are_said(recwarn):
    rope = CONFIG.rope
    for config, said in (
        (CONFIG, 1),
        (dataclasses.replace(CONFIG, rope=dataclasses.replace(rope, scaling="dynamic", original_max_positions=512)), 0),
        (LEARNED, 0),
    ):
        recwarn.clear()
        warn_beyond_context(config, CONFIG.max_positions)
        assert not recwarn
        warn_beyond_context(config, CONFIG.max_positions + 1)
        assert len(recwarn) == said
    warn_beyond_context(CONFIG, 999)
    warning = recwarn.pop()
    assert "longer than the 512 tokens of context that this model was trained with" in str(warning.message)
    assert warning.filename == __file__


def test_what_the_last_token_of_a_scored_text_predicts_is_not_used(recwarn):
    """lm_eval's windows of a text have one token more than the context: nothing is said of these."""
    model = dataclasses.replace(tiny().model, config=dataclasses.replace(CONFIG, max_positions=10))
    for width, said in ((11, 0), (12, 1)):
        for scored in (
            lambda tokens: kvjax.log_likelihood(model, tokens, policies.full(), prompt_length=tokens.shape[1]),
            lambda tokens: kvjax.score_choices(model, tokens[:, :1], [[tokens[0, 1:].tolist()]], policies.full()),
        ):
            recwarn.clear()
            scored(np.ones((1, width), np.int32))
            assert len([each for each in recwarn if "tokens of context" in str(each.message)]) == said
