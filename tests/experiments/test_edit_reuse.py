"""Edits that put a text right: how they are made, keys that are not rotated, and a small run from the command line."""

import json

import numpy as np
import pytest

import experiments.edit_reuse
from experiments.programs.edit_reuse import unrotated, with_edits
from kvjax import contexts, policies, reuse
from kvjax.errors import ConfigError
from tests.tiny import random_tokens, tiny

TEXT = "It was late in the autumn, and the road lay deep in mud. " * 60


def made(count, span=4):
    tokens = random_tokens(2, 60, seed=4)
    return with_edits(tokens[0], tokens[1], count, span, np.random.default_rng(0))


@pytest.mark.parametrize("count", [1, 3, 6])
def test_edits_make_the_right_text(count):
    passage = made(count)
    text, moved = passage.before, 0
    for start, stop, tokens in passage.edits:
        text = np.concatenate([text[: start + moved], tokens, text[stop + moved :]])
        moved += len(tokens) - (stop - start)
        assert len(tokens) == 4 and stop - start in (2, 3, 5, 6)
    np.testing.assert_array_equal(text, passage.after)
    assert len(passage.edits) == count


def test_too_many_edits_are_refused():
    with pytest.raises(ConfigError, match="8 edits of 4 tokens do not fit into 60"):
        made(8)


def test_keys_that_are_not_rotated_are_those_of_before():
    """But for the new tokens, and for the last one, which is computed again."""
    model, passage = tiny(layers=1).model, made(2)
    before = contexts.prefill(model, passage.before, policies.full())
    after = unrotated(model, before, passage.edits)
    np.testing.assert_array_equal(after.text[0], passage.after)

    def keys(context):
        """[T, K, D], by position."""
        (own,) = context.state.layers[0]
        order = np.argsort(np.where(own.position[0, 0] < 0, 1 << 20, own.position[0, 0]))
        return np.asarray(own.key)[0, :, order[: len(context.text[0])]]

    held, given, moved = keys(after), keys(before), 0
    compared = 0
    for index, (start, stop, tokens) in enumerate(passage.edits):
        moved += len(tokens) - (stop - start)
        end = passage.edits[index + 1].start if index + 1 < len(passage.edits) else len(given) - 1
        np.testing.assert_allclose(held[stop + moved : end + moved], given[stop:end], atol=1e-5)
        rotated = keys(reuse.edit(model, before, *passage.edits))[stop + moved : end + moved]
        assert moved == 0 or np.abs(rotated - given[stop:end]).max() > 0.01
        compared += moved != 0
    assert compared


@pytest.mark.sampled(0)
def test_a_small_run(tmp_path, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "made.json"
    text.write_text(TEXT)
    arguments = ["--rows=2", "--tokens=64", "--scored=8", "--edits=1,2"]
    assert experiments.edit_reuse.main(["edit_reuse", f"--text={text}", f"--output={output}", *arguments]) == 0
    printed, kept = capsys.readouterr().out, json.loads(output.read_text())
    methods = [(each["method"], each["edits"]) for each in kept["results"]]
    assert methods == [
        ("prefill", 0), ("unedited", 1), ("unrotated", 1), ("edit", 1), ("repair", 1), ("unedited", 2),
        ("unrotated", 2), ("edit", 2),
    ]  # fmt: skip
    assert all(len(each["nats"]) == 2 and each["method"] in printed for each in kept["results"])
    assert str(tmp_path) not in output.read_text()
    with pytest.raises(ConfigError, match="do not fit"):
        experiments.edit_reuse.main(["edit_reuse", f"--text={text}", "--rows=2", "--tokens=64", "--edits=16"])
