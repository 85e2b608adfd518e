"""Where generated answers end: at texts that may be or hold special tokens, also after thoughts."""

from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import CacheSpec
from kvjax.errors import InputError
from kvjax.generation import generate as loop
from kvjax.lm_eval.runner import Runner
from tests import scripted
from tests.scripted import VOCABULARY, ids
from tests.tiny import tiny

MARK = "<|im_end|>"
WHOLE = ids("▁the", "▁end", MARK, "▁Once", "▁upon", "a", "▁time", "</s>")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> kvjax.Model:
    return scripted.load(tmp_path_factory.mktemp("scripted"))


@pytest.mark.sampled(0)
def test_the_runner_stops_after_a_stop_text(model, monkeypatch):
    monkeypatch.setattr(loop, "UNTIL_EVERY", 1)
    runner = Runner(model, CacheSpec(policies.full()), rows=2, max_length=64)
    contexts = [[1, *ids("x")], [1, *ids("b")], [1, *ids("▁the")]]
    plain = runner.texts(contexts, new_tokens=12, stop=[2])
    assert plain[0].tolist() == WHOLE and plain[2].tolist() == WHOLE[1:]
    found = runner.texts(contexts, new_tokens=12, stop=[2], ended=[f"d{MARK}"])
    assert found[0].tolist() == WHOLE[:3] and found[2].tolist() == WHOLE[1:3]
    np.testing.assert_array_equal(found[1], plain[1])
    # A text of two tokens, of which the first ends the question.
    answers = runner.answers([[1, *ids("a")]], [[ids("x"), ids("▁the")]], new_tokens=12, stop=[2], ended=[" the end"])
    assert [len(each) for each in answers[0]] == [2, len(WHOLE) - 1]
    with pytest.raises(InputError, match="the model has no tokenizer"):
        Runner(tiny(layers=1).model, CacheSpec(policies.full())).texts([[1]], new_tokens=2, ended=["x"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("until", "think", "text"),
    [
        (["</s>"], None, " the end Once upona time"),
        ([MARK], None, " the end"),
        ([f"end{MARK} Once"], None, " the "),
        (["upon", MARK], None, " the end"),
        ([" time", "e"], MARK, "Onc"),
        ([" end", "never"], MARK, "Once upona time"),
        ([MARK], "never", "the end"),
        ([], "Once", "upona time"),
    ],
)
def test_generate_until(model, until, think, text):
    pytest.importorskip("lm_eval", reason="needs kvjax[lm-eval]")
    from kvjax.lm_eval.model import KVJaxLM

    lm = KVJaxLM(model, policy="full", batch_size=2, max_length=64, think_end_token=think)
    request = SimpleNamespace(args=("x", {"until": list(until), "max_gen_toks": 12}))
    assert lm.generate_until([request], disable_tqdm=True) == [text]
    assert VOCABULARY[MARK] not in model.eos_token_ids
