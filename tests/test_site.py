"""The site: what its generator makes, links between pages, and docstrings of public names. Sphinx itself is not run."""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import kvjax
from experiments.leaderboards import page, pareto, scores
from kvjax import policies, selection, storage
from tests.conftest import ROOT
from tests.laws import test_products

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import kvjax_site  # noqa: E402
from kvjax_site import (  # noqa: E402
    combine,
    combine_page,
    docstrings,
    entries,
    leaderboard,
    links,
    pages,
    reading,
    reference,
    survivors,
)

SITE = kvjax_site.site_of(ROOT)
ENTRIES = entries.all_entries()
ARRAYS = re.compile(r"\b(Array|ArrayLike|ndarray)\b")


# Docstrings.


def public() -> list[tuple[str, object]]:
    """Every public function and class, with its full name; each once."""
    found: dict[int, tuple[str, object]] = {}
    for package in reference.PACKAGES:
        for name in reference.importable(package):
            value = getattr(importlib.import_module(package), name)
            if inspect.isclass(value) or inspect.isroutine(value):
                found.setdefault(id(value), (f"{package}.{name}", value))
    return list(found.values())


def test_public_names_have_docstrings():
    without = []
    for full, value in public():
        doc = inspect.getdoc(value) or ""
        made_up = doc.startswith(f"{getattr(value, '__name__', '')}(")  # dataclasses write one of their own
        if not doc or made_up or doc == inspect.getdoc(object):
            without.append(full)
    assert not without


def lacks_shapes(thing) -> list[str]:
    """The arguments, the result or the attributes that are arrays and whose description has no shape, such as [B, T].

    A description that refers to another function's is left to that one.

    Args:
      thing: a function, or a class, whose attributes are described.
    """
    doc = inspect.getdoc(thing) or ""
    found = []
    for name, hint in inspect.get_annotations(inspect.unwrap(thing)).items():
        if not ARRAYS.search(f"{hint}"):
            continue
        described = name != "return" and re.search(r"^(Args|Attributes):$", doc, re.MULTILINE)
        said = "".join(re.findall(rf"^  \*?{name}: (.*(?:\n    .*)*)", doc, re.MULTILINE)) if described else doc
        together = inspect.isclass(thing) and re.search(r"\[[^\]]*\]", docstrings.summary(doc))  # for all attributes
        if not together and not re.search(r"\[[^\]]*\]|see `", said):
            found.append(name)
    return found


def documented() -> list[tuple[str, object]]:
    """Every public function and class, and the methods of these that have docstrings of their own."""
    found = []
    for full, value in public():
        found.append((full, value))
        if inspect.isclass(value):
            own = {name: each for name, each in vars(value).items() if inspect.isfunction(each) and name[0] != "_"}
            found += [(f"{full}.{name}", each) for name, each in own.items() if each.__doc__]
    return found


def test_docstrings_say_shapes():
    without = [f"{full}: {name}" for full, value in documented() for name in lacks_shapes(value)]
    assert not without


def test_a_docstring_without_shapes_is_seen():
    def good(x: "Array") -> "Array":  # noqa: F821
        """Doubles.

        Args:
          x: [B, T] float32.

        Returns:
          [B, T].
        """

    def bad(x: "Array", scale: float) -> float:  # noqa: F821
        """Adds up.

        Args:
          x: what is added.
          scale: a factor.
        """

    assert lacks_shapes(good) == [] and lacks_shapes(bad) == ["x"]


# Pages of the registries.


def test_every_entry_gets_a_page(monkeypatch):
    """With its definition, what it costs, and where it is in the overview of its axis."""
    monkeypatch.setattr(combine_page, "section", lambda entry: ["## What it combines with", ""])
    named = {entry.name for entry in ENTRIES}
    registries = (
        policies.POLICIES, policies.HEAD_PLANS, policies.COMBINATORS, policies.MERGES, storage.STORAGES,
        selection.SELECTIONS,
    )  # fmt: skip
    assert named == set().union(*registries)
    names = [pages.page_name(entry) for entry in ENTRIES]
    assert len(names) == len(set(names))
    for entry in ENTRIES:
        text = pages.page(entry, ROOT, {entry.name: (f"../pictures/{entry.name}-0.png", "../pictures/other.png")})
        assert f"autofunction:: {entry.full_name}\n" in text and text.startswith(f"# {entry.name}\n")
        assert {"policies": "## What it costs", "storages": "## What a slot takes"}.get(entry.axis, "reads") in text
        drawn = re.findall(r"^!\[([^\]]{20,})\]\(\.\./pictures/", text, re.MULTILINE)
        (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        exec(compile(example, pages.page_name(entry), "exec"), {})
        assert len(set(drawn)) == (0 if entry.axis == "storages" else 2), "each picture has its own alternative text"
    for own in (entries.policy_entries(), entries.storage_entries(), entries.selection_entries()):
        text = pages.overview(own[0].axis, own)
        assert all(f"[`{entry.name}`]({entry.name}.md)" in text for entry in own)


def test_bytes_are_those_of_a_slot():
    (entry,) = (entry for entry in ENTRIES if entry.name == "int4")
    assert pages.bytes_of(entry, "int4()", "bfloat16") == 2 * (128 // 2 + 2 * 2 * 2)
    assert "| `int4()` | 144 | 160 | 4.5 |" in pages.storage_facts(entry, ROOT, {})


def test_the_leaderboard_is_quoted():
    (entry,) = (entry for entry in ENTRIES if entry.name == "roco")
    rows = [line for line in pages.policy_facts(entry, ROOT, {}) if line.startswith("| `roco` | ")]
    assert [row.split(" | ")[1] for row in rows] == ["5 %", "10 %", "20 %", "50 %"]
    assert rows[1].startswith("| `roco` | 10 % | 8 % | +19.2 % (")


def test_a_selection_is_quoted_and_the_full_cache_that_it_reads_is_not():
    lines = leaderboard.section("quest", ROOT)
    assert sum(line.startswith("| `full + quest(") for line in lines) == 4
    assert any(" | 5 % | 106 % | 15 % | +105.5 % " in line for line in lines), "what is held and what is read"
    assert not leaderboard.section("full", ROOT) and not leaderboard.section("int2", ROOT)


def test_the_leaderboard_of_the_documentation_is_the_measured_one():
    found = leaderboard.measured(ROOT)
    text = (ROOT / leaderboard.FOLDER / "smollm2.md").read_text()
    assert text == page.files(found)[page.PAGE].replace("(leaderboard.png)", "(smollm2.png)")
    rows = page.over_budgets([scores.with_means(row) for row in found["rows"] if row["status"] == "ok"])
    caches = [row["cache"].strip("`") for row in rows]
    labels = pareto.labels_of(caches)
    expected = [[labels[cache], *list(row.values())[2:]] for cache, row in zip(caches, rows, strict=True)]
    table = (ROOT / "docs" / "leaderboard.md").read_text().partition("*Held* is")[0]
    shown = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert [[name, *(number.strip() for number in numbers.split(" | "))] for name, numbers in shown] == expected


def test_the_table_of_ruler_in_the_documentation_is_the_measured_one():
    found = json.loads((ROOT / leaderboard.FOLDER / "ruler_smollm2.json").read_text())
    text = (ROOT / leaderboard.FOLDER / "ruler_smollm2.md").read_text()
    assert text == page.files(found)[page.PAGE].replace("(leaderboard.png)", "(ruler_smollm2.png)")
    cells = [list(page.cells_of(row, {task: task for task in row["tasks"]}).values())
             for row in map(scores.with_means, found["rows"])]  # fmt: skip
    _, _, table = (ROOT / "docs" / "leaderboard.md").read_text().partition("### All of RULER")
    shown = re.findall(r"^\| `(\w+)[^|]* \| (.*) \|$", table.partition("\n- ")[0], re.MULTILINE)
    assert len(shown) == len(cells) == 6
    for name, numbers in shown:
        (row,) = (row for row in cells if re.search(rf"[`\s]{name}\b", row[0]))
        # Held, perplexity, needles, RULER; footprint and read are on the page alone.
        assert numbers.split(" | ") == [row[1], *row[4:]]


def test_policies_are_drawn_after_prompts_that_they_shorten():
    made = {entry.name: survivors.spec_of(entry) for entry in entries.policy_entries()}
    assert {name for name, spec in made.items() if survivors.compresses(spec)} == {
        "snapkv", "pyramidkv", "knorm", "keydiff", "expected_attention", "lagkv", "leverage", "cur", "adakv", "chunkkv",
        "matched", "compactor",
        "kvzip", "kvgrad", "qfilters",
        "after_prefill",
    }  # fmt: skip


@pytest.mark.sampled(0)
def test_pictures_show_what_a_selection_reads():
    """Quest reads whole pages of the slots that are held: as many as its budget has, and the newest among them."""
    (entry,) = (entry for entry in ENTRIES if entry.name == "quest")
    made = entry.build(reading.example_of(entry))
    cells, steps = reading.measure(entry), np.arange(survivors.LENGTH - survivors.LONG_PROMPT)
    read, held, position = cells == 2, cells > 0, np.arange(survivors.LENGTH)
    assert (held == (position <= survivors.LONG_PROMPT + steps[:, None])).all() and len(cells) == 2
    pages = read.reshape(*read.shape[:2], -1, made.page).any(axis=3)
    assert (pages.sum(axis=2) == made.pages + 1).all()
    assert (read == held & pages.repeat(made.page, axis=2)).all()
    assert read[:, steps, survivors.LONG_PROMPT + steps].all() and (read[0] != read[1]).any()


# What combines.


@pytest.mark.parametrize("block", [None, 16])
def test_products_are_those_that_are_tested(block):
    """A sample of the cells of docs/combinations.md, against what the tests of products lower."""
    read, held = combine.selection_rows(), combine.storage_rows()
    refused = 0
    for number, (name, policy) in enumerate(combine.policy_rows().items()):
        for step in range(0, 60, 7):
            stored, chosen = (list(table)[(number + step) % len(table)] for table in (held, read))

            def make(policy=policy, stored=stored, chosen=chosen):
                return kvjax.CacheSpec(policy, held[stored], read[chosen])

            try:
                spec = make()
                if spec.selection.whole_text and block:
                    continue  # there, such texts are not divided
                test_products.lowered_for(spec, block)
                expected = None
            except kvjax.KvjaxError as error:
                expected = combine.reason_of(str(error))
            if expected is not None and "raise the budget" in expected:
                continue  # a budget of half of the shorter prompts there
            assert combine.refusal(make, block) == expected, (name, stored, chosen)
            refused += expected is not None
    assert refused > 50


def test_pairs_and_exceptions():
    """A triple that is refused although each two of its values go with each other is an exception."""
    rows = ("full", "h2o"), ("dense", "int4"), ("everything", "quest")
    one_shot = {(a, b, c): None for a in rows[0] for b in rows[1] for c in rows[2]}
    one_shot |= {("h2o", b, "quest"): "single slots" for b in rows[1]}
    found = combine.Products(one_shot, {})
    assert found.pair((0, "h2o"), (2, "quest")) == "single slots" and found.pair((1, "int4"), (2, "quest")) is None
    assert found.pair((0, "h2o"), (1, "int4")) is None and not found.exceptions()
    odd = combine.Products(one_shot | {("full", "int4", "quest"): "odd"}, {})
    # full and dense go with quest, so that only the triple can say why.
    assert odd.pair((0, "full"), (2, "quest")) is None


def test_reasons_are_of_no_single_cache():
    given = "policy h2o with selection=Quest(page=4, sub=(1, 2)): the policy h2o evicts, selection=Quest(a=(1,)) not"
    assert combine.reason_of(given) == "the policy evicts, the selection not"
    reasons = combine_page.Reasons()
    cell = combine_page.cell("it cannot", None, reasons)
    assert 'href="#reason-1"' in cell and '<li id="reason-1">It cannot.</li>' in reasons.listed()


# Links.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/meshes.md#rules)", "[a](meshes.md#rules)"),
        ("[a](CONTRIBUTING.md)", "[a](contributing.md)"),
        ("[a](experiments/measured/README.md#x)", "[a](measured.md#x)"),
        ("![a](colab/h2o_survivors.png)", "![a](../colab/h2o_survivors.png)"),
        ("[a](https://x.org/y.md) and [b](#c)", "[a](https://x.org/y.md) and [b](#c)"),
        ("[native.cc](kvjax/products/native.cc)", "native.cc"),
        ("[the code](kvjax/products/native.cc)", "the code (`kvjax/products/native.cc`)"),
        ("```\n[a](docs/meshes.md)\n```", "```\n[a](docs/meshes.md)\n```"),
    ],
)
def test_links_are_rewritten(text, expected):
    assert links.rewritten(text, "README.md", "index.md", SITE) == expected


def test_files_are_shown_where_the_repository_is():
    site = SITE._replace(repository="https://x.org/tree")
    assert links.rewritten("[a](../kvjax/attention.py)", "docs/x.md", "x.md", site).endswith(
        "(https://x.org/tree/kvjax/attention.py)"
    )


def test_includes_are_expanded():
    text, files = links.included((DOCS / "contributing.md").read_text(), "contributing.md", SITE)
    assert files == ["CONTRIBUTING.md"] and text.startswith("# Contributing") and "](glossary.md)" in text


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = links.FENCE.sub("", path.read_text())
    return {slug(each) for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} | set(
        re.findall(r'(?:id|name)="([^"]+)"', text)
    )


SOURCES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    made = {f"_generated/{name}" for name in generated_names()}
    wrong = []
    for link in links.links(path.read_text()):
        if links.ELSEWHERE.match(link.target) and not link.target.startswith("#"):
            continue
        file, _, anchor = link.target.partition("#")
        target = (path.parent / file).resolve() if file else path
        if path.parent == DOCS and file in made:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link.target)
    assert not wrong


def generated_names() -> set[str]:
    """The names of the generated pages, relative to their folder."""
    found = {pages.page_name(entry) for entry in ENTRIES} | {f"{axis}/index.md" for axis in pages.ABOUT}
    found |= {reference.page_name(package) for package in reference.PACKAGES}
    found |= {page.partition("/")[2] for page in SITE.pages.values() if page.startswith("_generated/")}
    return found | {"notebooks/index.md"}


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for path in DOCS.glob("*.md"):
        for fence in re.findall(r"^```\{toctree\}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            listed |= {line.strip() for line in fence.splitlines() if line.strip() and not line.startswith(":")}
    own = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert own <= listed, f"add to a toctree of docs/index.md: {sorted(own - listed)}"
    absent = {name for name in listed - own if f"{name}.md".removeprefix("_generated/") not in generated_names()}
    assert not absent, f"in a toctree, and not there: {sorted(absent)}"


# Text of docstrings.


def test_papers_of_docstrings():
    assert docstrings.papers("X (arXiv:2404.14469, 2406.02069; arXiv:2404.14469)") == ["2404.14469", "2406.02069"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("|q·k| and *args", r"\|q·k\| and \*args"),
        ("the *new* token, ``*name`` and `|x|`", "the *new* token, ``*name`` and `|x|`"),
    ],
)
def test_formulas_are_no_markup(text, expected):
    assert docstrings.escaped_rst(text) == expected


def test_text_is_no_structure():
    """Napoleon would take one line for the type of a result, and reStructuredText another for a numbered list."""
    doc = "Gathers.\n\nArgs:\n  width: W.\n  size: S. All.\n\nReturns:\n  slots: [B, K, W] int32.\n  More."
    assert docstrings.without_accidents(doc) == (
        "Gathers.\n\nArgs:\n  width: W\\.\n  size: S\\. All.\n\nReturns:\n  \\ \n  slots: [B, K, W] int32.\n  More."
    )


def test_arguments_are_no_links():
    text = docstrings.literal("the `window` newest, see `evict` and ``window``", {"window"})
    assert text == "the ``window`` newest, see `evict` and ``window``"
