"""Prefixes: loaded, forked, extended and recomputed ones are equal bit for bit, and requests continue them."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, selection, storage, transport
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import CheckpointError, InputError
from kvjax.generation.generate import decode
from kvjax.generation.likelihood import score_continuation
from kvjax.generation.sampling import Greedy, Sample
from kvjax.models.decoder_layer import POLICY
from kvjax.policies import LinearGate
from kvjax.serve import Request, Runner
from kvjax.serve.prefix import length_of, room_of
from kvjax.specs import user_files
from tests.parameters import with_parameters
from tests.tiny import kept, random_tokens, tiny

LIMITS = Limits(prompt=40, new_tokens=30)
CONTEXT = random_tokens(1, 40, seed=3)[0]
QUESTIONS = [[5, 6], [], [7], list(range(10, 30)), [5, 6]]
SPECS = {
    "h2o-int8-host": CacheSpec(policies.h2o(0.5), storage.int8(memory="host")),
    "expected": CacheSpec(policies.expected_attention(12, sinks=1)),
    "kvzip": CacheSpec(policies.kvzip(12, chunk=7, sinks=1)),
    "matched": CacheSpec(policies.matched(8)),
    "snapkv-quest": CacheSpec(policies.snapkv(12, window=4), selection=selection.quest(page=4, budget=12)),
}


def runner_for(name, **options):
    return Runner(tiny(layers=1).model, SPECS[name], **({"rows": 2, "limits": LIMITS} | options))


def assert_equal(one, other):
    """The same bits, in the same memory."""
    np.testing.assert_array_equal(one.logits, other.logits)
    leaves = [jax.tree_util.tree_flatten_with_path(each.state)[0] for each in (one, other)]
    for (path, a), (_, b) in zip(*leaves, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
        assert a.sharding.memory_kind == b.sharding.memory_kind and a.dtype == b.dtype


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_requests_continue_a_prefix(name, tmp_path):
    runner = runner_for(name)
    prefix = runner.prefix(CONTEXT)
    runner.save_prefix(tmp_path / "context", prefix)
    # Another process would have another runner.
    again = runner_for(name)
    loaded = again.load_prefix(tmp_path / "context")
    assert_equal(loaded, prefix)
    assert_equal(again.prefix(CONTEXT), prefix)
    assert (length_of(loaded), room_of(loaded, LIMITS.new_tokens)) == (40, 30)
    np.testing.assert_array_equal(loaded.text[0], CONTEXT)
    samplers = [Greedy(), Sample(top_k=9)]
    for number, question in enumerate(QUESTIONS):
        again.submit(Request(tokens=question, max_new_tokens=10, prefix=loaded, sampler=samplers[number % 2], number=7))
    # Another request in between, which has none.
    again.submit(Request(tokens=CONTEXT[:9], max_new_tokens=5))
    found = {result.id: result for result in again}
    for number, question in enumerate(QUESTIONS):
        asked = contexts.extend(runner.model, prefix, question, block=1) if question else contexts.rows(prefix, [0])
        expected = decode(runner.model, asked, max_new_tokens=10, sampler=samplers[number % 2], requests=[7])
        np.testing.assert_array_equal(found[number].tokens, expected.tokens[0])
        np.testing.assert_allclose(found[number].logprobs, expected.logprobs[0], atol=1e-5)
        assert found[number].prompt == 40 + len(question)
    # The prefix is as it was, and was never consumed.
    assert_equal(loaded, prefix)


@pytest.mark.sampled(0)
def test_a_trained_prefix_is_saved_and_continued(tmp_path):
    runner = runner_for("matched")
    plain = runner.prefix(CONTEXT)
    text = list(range(10, 30))
    prefix = kvjax.cartridge(runner.model, plain, [text], steps=15, learning_rate=3e-2).prefilled
    runner.save_prefix(tmp_path / "trained", prefix)
    again = runner_for("matched")
    loaded = again.load_prefix(tmp_path / "trained")
    assert_equal(loaded, prefix)
    assert length_of(loaded) == length_of(plain)
    again.submit(Request(tokens=text[:9], max_new_tokens=8, prefix=loaded))
    (found,) = again
    expected = decode(runner.model, contexts.extend(runner.model, prefix, text[:9], block=1), max_new_tokens=8)
    np.testing.assert_array_equal(found.tokens, expected.tokens[0])
    # The text has become more likely, under the prefix that was trained alone.
    before, after = (
        score_continuation(runner.model, contexts.rows(each, [0]), np.array([text])) for each in (plain, prefix)
    )
    assert after[:, 1:].mean() > before[:, 1:].mean() + 0.5


def test_extended_in_parts_and_at_once():
    runner = runner_for("h2o-int8-host")
    prefix, more = runner.prefix(CONTEXT[:20]), [4, 5, 6, 7, 8]
    parts = whole = prefix
    for part in (more[:2], more[2:]):
        parts = contexts.extend(runner.model, parts, part, block=1)
    whole = contexts.extend(runner.model, prefix, more, block=1)
    assert_equal(parts, whole)
    assert parts.boundaries == whole.boundaries
    assert (length_of(whole), room_of(whole, LIMITS.new_tokens)) == (25, 30)
    forked = contexts.rows(whole, [0] * 3)
    assert kept(forked.state, 2) == kept(whole.state, 0)
    # Its slots are those of a text whose first 20 tokens are the prompt.
    text = [*CONTEXT[:20], *more]
    scored = kvjax.log_likelihood(runner.model, text, SPECS["h2o-int8-host"], prompt_length=20)
    assert kept(whole.state, 0) == kept(scored.state, 0)


def test_a_context_in_blocks():
    """It is that of the prompt of a request in blocks."""
    runner = runner_for("snapkv-quest", prefill_block=16)
    prefix = runner.prefix(CONTEXT)
    runner.submit(Request(tokens=CONTEXT, max_new_tokens=8))
    runner.submit(Request(tokens=[], max_new_tokens=8, prefix=prefix))
    alone, continued = sorted(runner, key=lambda result: result.id)
    np.testing.assert_array_equal(alone.tokens, continued.tokens)
    np.testing.assert_array_equal(alone.logprobs, continued.logprobs)


OWN = """
from kvjax.policies import Importance, evict, protect_newest

def made(sign):
    importance = Importance(needs=frozenset(), score=lambda stats, view: sign * view.position.astype("float32"))
    return evict(importance=importance, scope=protect_newest(2), budget=12, name="mine")
"""


def test_a_prefix_under_functions_of_ones_own(tmp_path):
    """It is told from one under functions of the same names that enclose something else, or whose file has changed."""
    mine = tmp_path / "mine.py"
    mine.write_text(OWN)

    def runner(sign):
        return Runner(tiny().model, user_files.load(mine).made(sign), rows=1, limits=LIMITS)

    first = runner(1.0)
    first.save_prefix(tmp_path / "saved", first.prefix(CONTEXT[:20]))
    assert length_of(runner(1.0).load_prefix(tmp_path / "saved")) == 20
    with pytest.raises(CheckpointError, match="saved with another policy"):
        runner(-1.0).load_prefix(tmp_path / "saved")
    mine.write_text(OWN + "# Changed.\n")
    with pytest.raises(CheckpointError, match="saved with another policy"):
        runner(1.0).load_prefix(tmp_path / "saved")


def test_a_prefix_in_codes(tmp_path):
    """A saved prefix takes a codec of contexts: what is loaded is what the codec decodes, and requests continue it."""
    runner = runner_for("matched")
    prefix, codec = runner.prefix(CONTEXT[:20]), transport.CacheGen(level=3)
    runner.save_prefix(tmp_path / "coded", prefix, codec=codec)
    found = runner.load_prefix(tmp_path / "coded", codec=codec)
    expected = transport.decode(transport.encode(prefix, codec=codec), runner.model, SPECS["matched"], codec=codec)
    assert_equal(found, expected)
    assert length_of(found) == 20
    runner.submit(Request(tokens=[5, 6], max_new_tokens=4, prefix=found))
    (done,) = runner
    assert len(done.tokens) == 4
    with pytest.raises(CheckpointError, match="saved with codec cachegen; got no codec"):
        runner.load_prefix(tmp_path / "coded")


def test_prefixes_that_cannot_be_used(tmp_path):
    runner = runner_for("h2o-int8-host")
    prefix = runner.prefix(CONTEXT[:20])
    with pytest.raises(InputError, match="31 tokens were requested after a prefix that has room for 30"):
        runner.submit(Request(tokens=[1] * 20, max_new_tokens=11, prefix=prefix))
    other = Runner(runner.model, policies.h2o(9), rows=2, limits=LIMITS)
    with pytest.raises(InputError, match="made under h2o"):
        other.submit(Request(tokens=[1], max_new_tokens=1, prefix=prefix))
    another = Runner(tiny(layers=1, seed=1).model, SPECS["h2o-int8-host"], rows=2, limits=LIMITS)
    with pytest.raises(InputError, match="belongs to another model"):
        another.submit(Request(tokens=[1], max_new_tokens=1, prefix=prefix))
    with pytest.raises(InputError, match="must be one row of tokens"):
        runner.prefix([[1, 2], [3, 4]])
    # The weights are the same arrays, but a gate has other ones.
    gate = LinearGate()
    gated = policies.learned(8, gate=gate)
    models = [with_parameters(tiny(layers=1).model, [gate])]
    models.append(dataclasses.replace(models[0], params=jax.tree.map(lambda leaf: leaf, models[0].params)))
    for each in models[1].params["layer_0"]["attention"][POLICY].values():
        each.update({part: -leaf for part, leaf in each.items()})
    one, two = (Runner(each, gated, rows=2, limits=LIMITS) for each in models)
    with pytest.raises(InputError, match="another calibration"):
        two.submit(Request(tokens=[1], max_new_tokens=1, prefix=one.prefix(CONTEXT[:20])))
    for wrong in (contexts.rows(prefix, [0, 0]), prefix._replace(made=None)):
        with pytest.raises(InputError, match="must be a context of one row"):
            runner.submit(Request(tokens=[1], max_new_tokens=1, prefix=wrong))
    smaller = Runner(runner.model, SPECS["h2o-int8-host"], rows=2, limits=Limits(LIMITS.prompt, 16))
    with pytest.raises(InputError, match="17 tokens were requested after a prefix that has room for 16;"):
        smaller.submit(Request(tokens=[1] * 16, max_new_tokens=1, prefix=prefix))
    shorter = Runner(runner.model, SPECS["h2o-int8-host"], rows=2, limits=Limits(20, LIMITS.new_tokens))
    folder = tmp_path / "saved"
    runner.save_prefix(folder, prefix)
    with pytest.raises(CheckpointError, match="exists already"):
        runner.save_prefix(folder, prefix)
    with pytest.raises(CheckpointError, match="saved with another model"):
        another.load_prefix(folder)
    with pytest.raises(CheckpointError, match="saved with another policy"):
        other.load_prefix(folder)
    with pytest.raises(CheckpointError, match=r"saved with another cache: it was made .* up to 40 tokens"):
        shorter.load_prefix(folder)
    with pytest.raises(CheckpointError, match="there is no context in"):
        runner.load_prefix(tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
