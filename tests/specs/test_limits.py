"""Spec texts from anywhere: whatever a text is, it is read in linear time or refused by a `KvjaxError`."""

import contextlib
import time

import pytest

from experiments import config as configs
from experiments import fields
from kvjax.errors import ConfigError, KvjaxError
from kvjax.specs.expressions import MAX_DEPTH
from kvjax.specs.parse import accepts, axis_of, build, files

TEXTS = {
    "name": lambda n: "a" * n,
    "spaces": lambda n: f"h2o({' ' * n}budget=4)",
    "dots": lambda n: "h2o" + ".b" * (n // 2),
    "signs": lambda n: f"h2o(budget={'-' * n}1)",
    "sums": lambda n: f"h2o(budget=1{'+1' * (n // 2)})",
    "brackets": lambda n: "(" * n,
    "calls in calls": lambda n: "h2o(" * (n // 4),
    "calls of calls": lambda n: "h2o" + "()" * (n // 2),
    "items": lambda n: f"h2o(budget=({'1,' * (n // 2)}))",
    "arguments": lambda n: f"h2o({'1,' * (n // 2)})",
    "ends of files": lambda n: ".py" * (n // 3),
    "beginnings of factories": lambda n: ".py:" * (n // 4),
    "no files": lambda n: "x.py:f," * (n // 7),
    "a long file": lambda n: f"{'a' * n}.py:f",
    "digits": lambda n: f"h2o(budget={'9' * n})",
    "hexadecimal digits": lambda n: f"h2o(budget=0x{'f' * n})",
    "formatted": lambda n: "h2o(budget=f'" + "{1}" * (n // 3) + "')",
    "adjacent texts": lambda n: f"h2o(name={chr(39) * n})",
    "comments": lambda n: "#" * n,
    "lines": lambda n: "h2o" + "\n" * n,
    "characters": lambda n: "\U0001f600" * n,
    "letters that are composed": lambda n: "\ufb01" * n,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", TEXTS)
def test_a_million_characters_take_linear_time(kind):
    """A quadratic step takes 100 times as long for ten times as many characters, and many minutes for a million."""

    def seconds(n):
        text, start = TEXTS[kind](n), time.perf_counter()
        for read in (lambda: build("policy", text, budget=4), lambda: accepts("policy", text), lambda: files(text)):
            with contextlib.suppress(KvjaxError):
                read()
        return time.perf_counter() - start

    small = seconds(100_000)
    assert seconds(1_000_000) < 40 * max(small, 0.1)


@pytest.mark.parametrize("character", "a(,")
def test_a_million_characters_of_a_field_take_linear_time(character):
    start = time.perf_counter()
    parts = fields.split(character * 1_000_000)
    assert len(parts) == (1_000_001 if character == "," else 1) and time.perf_counter() - start < 3
    with pytest.raises(ConfigError, match="unknown config"):
        configs.by_name(character * 1_000_000)


def test_commas_in_parentheses_divide_nothing():
    assert fields.split("h2o, roco(protect=4, [1, 2]),,x") == ["h2o", " roco(protect=4, [1, 2])", "", "x"]


@pytest.mark.parametrize(
    "text",
    [
        "h2o\0", "a\0.py:f", "\ud800", "\ud800.py:f", "h2o(\ud800)", "h2o(budget='\ud800')", "__file0",
        f"{'a' * 300}.py:f",
        "h2o(budget=1j)", "h2o(budget=b'x')", "h2o(budget=...)", "h2o(budget=1e999)", "h2o(budget=-1e999)",
        f"h2o(budget={2**65})", f"h2o(budget={'9' * 5000})", f"h2o(budget=0x{'f' * 5000})", "h2o(budget={1})",
        "h2o(budget={[]: 1})", "h2o(*[4])", "h2o(**{})", "h2o()()", "(h2o := 3)", "h2o if 1 else h2o", "lambda: h2o",
        "h2o(budget=[[[]]])", "h2o(4, budget=4)", "h2o(4, 4, 4, 4, 4, 4, 4, 4)", "h2o(recent='many')", "", " ", "()",
        "after_prefill(1, 2)", "split_heads(4)", "h2o(merge=4)", "h2o(4, variant=[])", "strided(stride=None)",
        "after_prefill(" * 40 + "h2o" + ")" * 40,
    ],
)  # fmt: skip
def test_every_failure_is_an_error_of_kvjax(text):
    for read in (lambda: build("policy", text), lambda: axis_of(text, ("storage", "selection"))):
        with pytest.raises(KvjaxError):
            read()


def test_what_is_nested_is_refused_beyond_a_depth():
    def nested(depth):
        return "h2o(budget=" + "[" * depth + "4" + "]" * depth + ")"

    with pytest.raises(ConfigError, match=f"is nested more than {MAX_DEPTH} deep"):
        build("policy", nested(MAX_DEPTH))
    with pytest.raises(ConfigError, match=r"is nested more than|is not an expression|too deeply"):
        build("policy", nested(100_000))


def test_a_factory_that_raises_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def broken(budget=4):\n    return 1 // 0\n\nalso = {}.update\n")
    with pytest.raises(KvjaxError, match=r"its factory raised ZeroDivisionError: .*mine.py, line 2\)"):
        build("policy", f"{tmp_path}/mine.py:broken")
    with pytest.raises(KvjaxError, match="its factory returned None, not a policy"):
        build("policy", f"{tmp_path}/mine.py:also")


def test_texts_only():
    with pytest.raises(ConfigError, match="a policy must be a string here; got 4"):
        build("policy", 4)
