"""Facts in chunks: the questions, and a small run from the command line."""

import json

import numpy as np
import pytest

import experiments.chunk_reuse
import kvjax
from experiments.tasks.chunked_facts import make_questions
from kvjax.errors import ConfigError

TEXT = "It was late in the autumn, and the road lay deep in mud. " * 60


@pytest.fixture(scope="module")
def tokenizer():
    return kvjax.load("kvjax-tiny").tokenizer


def test_facts_are_whole_or_divided(tokenizer):
    made = make_questions(tokenizer.encode, TEXT, count=6, chunks=4, tokens=64, seed=3)
    assert [each.kind for each in made] == ["whole", "divided"] * 3
    for each in made:
        assert [len(own) for own in each.chunks] == [64] * 4 and sorted(each.other_order) == [0, 1, 2, 3]
        texts = [tokenizer.decode(own) for own in each.chunks]
        opening = tokenizer.decode(each.question).strip()
        fact = f"{opening} {each.answer}."
        assert sum(fact in text for text in texts) == (each.kind == "whole")
        assert fact in "".join(texts)
        # In the other order, a chunk with a beginning stands before the one with its end too.
        assert fact in "".join(texts[place] for place in each.other_order)
    again = make_questions(tokenizer.encode, TEXT, count=6, chunks=4, tokens=64, seed=3)
    np.testing.assert_array_equal(again[5].chunks[0], made[5].chunks[0])
    with pytest.raises(ConfigError, match="even"):
        make_questions(tokenizer.encode, TEXT, count=1, chunks=3, tokens=64, seed=0)
    with pytest.raises(ConfigError, match="tokens"):
        make_questions(tokenizer.encode, "Short.", count=1, chunks=2, tokens=64, seed=0)


@pytest.mark.sampled(0)
def test_variants_of_blend_recompute_as_much(tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "made.json"
    text.write_text(TEXT)
    arguments = ["--requests=2", "--chunks=2", "--tokens=64", "--shares=0.25", "--distances=0"]
    arguments.append("--methods=blend,gradual,both,linked")
    assert experiments.chunk_reuse.main(["chunk_reuse", f"--text={text}", f"--output={output}", *arguments]) == 0
    shares = {each["method"]: each["shares"] for each in json.loads(output.read_text())["methods"]}
    for method in experiments.chunk_reuse.VARIANTS:
        # Shares are rounded to tokens.
        assert shares[method] == pytest.approx(shares["blend"], abs=0.01)


@pytest.mark.sampled(0)
def test_a_small_run(tmp_path, capsys):
    text, output, plot = tmp_path / "text.txt", tmp_path / "made.json", tmp_path / "made.png"
    text.write_text(TEXT)
    arguments = ["--requests=2", "--chunks=2", "--tokens=64", "--shares=0.2", "--distances=1"]
    argv = ["chunk_reuse", f"--text={text}", f"--output={output}", f"--plot={plot}", *arguments]
    assert experiments.chunk_reuse.main(argv) == 0
    printed = capsys.readouterr().out
    made = json.loads(output.read_text())
    methods = {each["method"]: each for each in made["methods"]}
    assert list(methods) == list(experiments.chunk_reuse.METHODS) and all(name in printed for name in methods)
    assert methods["prefill"]["shares"] == [1.0, 1.0] and methods["reused"]["shares"] == [0.0, 0.0]
    assert methods["random"]["shares"] == pytest.approx([0.2, 0.2], abs=0.02)
    assert all(len(each["right"][kind]) == 1 for each in methods.values() for kind in ("whole", "divided"))
    assert methods["blend"]["distances"]["value"][0] < methods["reused"]["distances"]["value"][0]
    assert str(tmp_path) not in output.read_text() and plot.read_bytes().startswith(b"\x89PNG")
    assert experiments.chunk_reuse.main(["chunk_reuse", f"--input={output}"]) == 0
    shown = capsys.readouterr().out
    assert "divided facts" in shown and "with answers relative to the prefill's of at least 95 %" in shown
    made["methods"] = [each for each in made["methods"] if each["method"] != "craft"]
    for factor, answers in ((1.0, [True]), (0.5, [False]), (0.0, [False])):
        right = {"whole": [True], "divided": answers}
        far = {"key": [], "value": [0.02 if factor else 0.1], "attention": [], "rank_correlation": []}
        made["methods"].append({"name": f"craft {factor:g}", "method": "craft", "setting": factor, "shares": [0.1],
                                "right": right, "distances": far, "seconds": []})  # fmt: skip
    made["methods"][0]["right"] = {"whole": [True], "divided": [True]}
    output.write_text(json.dumps(made))
    drawn = tmp_path / "alphas.png"
    assert experiments.chunk_reuse.main(["chunk_reuse", f"--input={output}", f"--alpha_plot={drawn}"]) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "The factor 1 of craft is the smallest with answers relative to the prefill's of at least 95 %." in shown
    assert "The factor 0.5 of craft is the smallest with 1 - distance of values of at least 95 %." in shown
    made["methods"] = made["methods"][:1]
    output.write_text(json.dumps(made))
    with pytest.raises(ConfigError, match="answers of prefill and craft"):
        experiments.chunk_reuse.main(["chunk_reuse", f"--input={output}", f"--alpha_plot={drawn}"])
    with pytest.raises(ConfigError, match="not written by"):
        experiments.chunk_reuse.main(["chunk_reuse", f"--input={text}"])


@pytest.mark.parametrize(
    ("flags", "message"), [
        (["--alpha_plot=made.png", "--methods=craft"], "--alpha_plot needs.* prefill and craft among --methods"),
        (["--methods=blend,gradual", "--shares=0.3,0.7"], "--shares of gradual must be at most 2/3.* got 0.7"),
    ],
)  # fmt: skip
def test_what_is_refused_before_the_model_is_loaded(tmp_path, flags, message):
    (tmp_path / "text.txt").write_text(TEXT)
    argv = ["chunk_reuse", "--model=nowhere", f"--text={tmp_path}/text.txt", *flags]
    with pytest.raises(ConfigError, match=message):
        experiments.chunk_reuse.main(argv)
