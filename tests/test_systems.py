"""docs/systems.md: its published systems, against the registries, the code, the tests and what was measured."""

import dataclasses
import inspect
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvjax
from experiments.simulate import SUBJECTS
from experiments.training.config import TrainConfig
from kvjax import policies
from kvjax.specs import parse
from tests.conftest import ROOT
from tests.test_site import ENTRIES, SITE, anchors, generated_names, slug

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

from kvjax_site import links, pages, systems  # noqa: E402
from kvjax_site.system import FIGURES, System  # noqa: E402

SYSTEMS = systems.SYSTEMS
THERE = [each for each in SYSTEMS if each.is_there]
LEFT_OUT = [each for each in SYSTEMS if not each.is_there]
BUDGET = 64
TRAINING = {field.name for field in dataclasses.fields(TrainConfig)}
#: What a text of the table names in full.
CODE = re.compile(r"`(kvjax\.[\w.]+)`")


def named(each: System) -> str:
    return each.title


def last(name: str) -> str:
    return name.rpartition(".")[2]


def mentions(word: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def section(path: Path, anchor: str) -> str:
    """The part of a page below a heading, up to the next one of its level or above; all of it without an anchor."""
    text = path.read_text()
    if not anchor:
        return text
    headings = list(re.finditer(r"^(#+) (.*)$", text, re.MULTILINE))
    (number,) = (i for i, each in enumerate(headings) if slug(each[2]) == anchor)
    after = (each.start() for each in headings[number + 1 :] if len(each[1]) <= len(headings[number][1]))
    return text[headings[number].start() : next(after, len(text))]


# What each entry says.


def test_no_system_is_there_twice():
    titles, papers = [each.title for each in SYSTEMS], [each.paper for each in SYSTEMS if each.paper]
    assert len(titles) == len(set(titles))
    assert len(papers) == len(set(papers))
    assert all(re.fullmatch(r"\d{4}\.\d{4,5}", paper) for paper in papers)


@pytest.mark.parametrize("each", LEFT_OUT, ids=named)
def test_what_is_left_out_has_a_reason_and_nothing_else(each):
    assert len(each.reason) > 40 and each.reason.endswith(".")
    assert not (each.names or each.form or each.spec or each.command or each.test or each.figure)


@pytest.mark.parametrize("each", THERE, ids=named)
def test_what_is_there_has_a_test_and_no_reason(each):
    assert each.test and not each.reason and each.asks in systems.TITLES
    assert not each.form.endswith("."), "a phrase"


@pytest.mark.parametrize("each", SYSTEMS, ids=named)
def test_names_are_those_of_objects(each):
    for name in (*each.names, *CODE.findall(each.form + each.reason)):
        assert systems.resolve(name) is not None, name


@pytest.mark.parametrize("each", [each for each in THERE if each.spec], ids=named)
def test_expressions_are_those_of_a_command_line(each):
    """They are parsed, name what the entry names, and make one cache."""
    made = {
        axis: parse.build(axis, text, **({"budget": BUDGET} if axis == "policy" else {})) for axis, text in each.spec
    }
    assert len(made) == len(each.spec)
    policy = made.pop("policy", policies.full())
    kvjax.CacheSpec(policy, **made)
    if not any(mentions(last(name), text) for name in each.names for _, text in each.spec):
        assert each.title == "MInference", "its class is an attribute of a selection of pages"
        assert isinstance(made["selection"].prompt, systems.resolve(each.names[0]))


@pytest.mark.parametrize("each", THERE, ids=named)
def test_the_test_is_about_it(each):
    """The file is there, and has the main name, or the command's module."""
    word = last(each.names[0]) if each.names else each.title.lower()
    assert mentions(word, (ROOT / each.test).read_text()), f"{each.test} has no {word}"


@pytest.mark.parametrize("each", [each for each in THERE if each.command], ids=named)
def test_commands_are_there(each):
    python, option, module, *rest = shlex.split(each.command)
    assert (python, option) == ("python", "-m") and find_spec(module) is not None
    for argument in rest:
        if argument.startswith("--config="):
            assert (ROOT / "configs" / f"{argument.partition('=')[2]}.py").exists()
        elif argument.startswith("--config."):
            field, _, value = argument.removeprefix("--config.").partition("=")
            assert module == "experiments.train" and value and field in TRAINING
        else:
            assert module == "experiments.simulate" and argument in SUBJECTS


@pytest.mark.parametrize("each", [each for each in THERE if each.figure], ids=named)
def test_what_was_measured_is_about_it(each):
    path, _, anchor = FIGURES[each.figure].partition("#")
    text = section(ROOT / path, anchor)
    words = [last(name) for name in each.names] + [each.title.partition(" (")[0]]
    assert any(mentions(word, text) for word in words), f"{path} has none of {words}"


def test_figures_are_used_and_there():
    assert {each.figure for each in THERE if each.figure} == set(FIGURES)
    for target in FIGURES.values():
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists() and (not anchor or anchor in anchors(ROOT / path)), target


# The table against the registries.


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.full_name)
def test_every_paper_of_a_registry_is_in_the_table(entry):
    """A factory that names papers, or whose module does, is an entry's name, and that entry has one of these papers."""
    papers = set(pages.papers_of(entry))
    rows = [each for each in THERE if entry.full_name in each.names]
    assert not papers or any(each.paper in papers for each in rows), f"{entry.full_name} ({papers}) is in {rows}"


@pytest.mark.parametrize("each", THERE, ids=named)
def test_another_paper_than_the_code_names_is_another_form(each):
    found = (inspect.unwrap(systems.resolve(name)) for name in each.names)
    sources = [inspect.getsource(sys.modules[value.__module__]) for value in found]
    assert each.form or not each.paper or any(each.paper in source for source in sources), "say how it differs"


# The page.


def test_every_entry_is_on_the_page():
    text = systems.systems()
    there, _, left_out = text.partition("\n## Not in kvjax\n")
    rows, reasons = (
        re.findall(r"^\| (?!system |-)(.*?)(?:, \[\d|  ?\|| \|)", part, re.MULTILINE) for part in (there, left_out)
    )
    assert sorted(rows) == sorted(each.title for each in THERE)
    assert sorted(reasons) == sorted(each.title for each in LEFT_OUT)
    assert len(re.findall(r"^## ", there, re.MULTILINE)) == len(systems.TITLES)


def test_links_lead_to_pages_and_files():
    made, wrong = generated_names(), []
    for link in links.links(systems.systems()):
        if not links.ELSEWHERE.match(link.target):
            file, _, anchor = link.target.partition("#")
            path = (DOCS / "_generated" / file).resolve()
            if file not in made and not (path.exists() and (not anchor or anchor in anchors(path))):
                wrong.append(link.target)
    assert not wrong


def test_the_page_has_the_table():
    assert "```{include} _generated/systems.inc\n```" in (DOCS / "systems.md").read_text()
    text = links.rewritten(systems.systems(), "docs/_generated/systems.inc", "systems.md", SITE)
    assert "](_generated/policies/snapkv.md)" in text and "](_generated/measured/policies_tiny.md)" in text
    assert systems.UP not in text, "as links of the page itself"
