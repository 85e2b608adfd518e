"""Pages of docs/ for users: their blocks run, what they name exists, and the messages that they quote are raised."""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import xml.etree.ElementTree
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments import fields
from experiments.config import ExperimentConfig
from kvjax import policies, selection, storage
from kvjax.errors import ConfigError, KvjaxError, PolicyError
from kvjax.generation.options import CacheOptions
from kvjax.models.quantize import WEIGHTS
from kvjax.numerics import statistics
from kvjax.specs import parse
from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = (
    "policies", "how_it_works", "peers", "migrating", "troubleshooting", "generation", "contexts", "budgets", "memory",
    "speculation", "methods", "experiments", "install",
)  # fmt: skip
LAYERS = 2  # of kvjax-tiny's, which compile in half the time


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def run(page: str) -> dict[str, Any]:
    """Runs the blocks of a page, one after the other, with some layers of kvjax-tiny; returns the names they define."""
    load = kvjax.load

    def shorter(name: str, **options: Any) -> kvjax.Model:
        model = load(name, **options)
        return dataclasses.replace(model, config=dataclasses.replace(model.config, num_layers=LAYERS, windows=()))

    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvjax, "load", shorter)
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page}.md, block {number}", "exec"), names)
    return names


def rows(page: str, *, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    _, _, rest = text_of(page).partition(f"\n{heading}\n")
    assert rest, heading
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.group().splitlines()[2:]
    ]  # fmt: skip


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    text = text_of(page)
    assert text.startswith("# ") and len(re.findall(r"^# ", re.sub(r"```.*?```", "", text, flags=re.S), re.M)) == 1
    for target in re.findall(r"\]\(([^):]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (DOCS / file) if file else DOCS / f"{page}.md"
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if path.suffix == ".md" else []
        assert not anchor or anchor in map(anchor_of, headings), target


def anchor_of(heading: str) -> str:
    """As GitHub does, and MyST."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("generation", "finished"),
        ("contexts", "answer"),
        ("reuse", "edited"),
        ("simulations", "made"),
        ("speculation", "made"),
        ("budgets", "result"),
        ("how_it_works", "other"),
        ("meshes", "made"),
    ],
)
def test_blocks_run(page, name):
    assert blocks(page) and name in run(page)


def test_drawings():
    drawn = sorted((DOCS / "images").glob("*.svg"))
    shown = {target for page in PAGES for target in re.findall(r"!\[[^\]]+\]\(images/([\w.]+)\)", text_of(page))}
    assert drawn and {path.name for path in drawn} >= shown and len(shown) >= 2
    for path in drawn:
        assert path.stat().st_size < 200_000
        assert xml.etree.ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


# Policies.


@pytest.fixture(scope="module")
def page():
    return run("policies")


def test_tables_of_policies():
    named = [span for row in rows("policies", heading="## The policies that there are") for span in spans(row[0])]
    assert sorted(named) == sorted(policies.POLICIES)
    _, _, rest = text_of("policies").partition("Functions make a policy of policies:\n")
    made = re.findall(r"^\| (`.*?) \|", rest.split("On a command line")[0], re.MULTILINE)
    calls = [re.split(r"\(", span)[0] for cell in made for span in spans(cell)]
    assert sorted(calls) == sorted({*policies.COMBINATORS, *policies.HEAD_PLANS})


def test_table_of_statistics():
    assert [spans(row[0])[0] for row in rows("policies", heading="## Statistics")] == list(statistics.NAMED)
    for name in ("decayed", "prompt_tail", "recent_above", "saturating_fetched"):
        made = getattr(statistics, name)(1)
        assert isinstance(made, statistics.Statistic) and f"`{name}(" in text_of("policies")
    for field in ("Transform", "Accumulate"):
        for value in getattr(statistics, field).__args__:
            assert f"`{value}`" in text_of("policies"), value


def test_table_of_the_view():
    named = {
        re.split(r"[.(]", span)[1]
        for row in rows("policies", heading="## What a score sees")
        for span in spans(row[0])
    }  # fmt: skip
    assert named == {*policies.View._fields, "live", "recent", "rotated", "unrotated"} - {"heads", "frame"}


@pytest.mark.sampled(0)
def test_what_the_page_makes(page):
    assert {"narrow", "halved", "merged", "missed"} <= page.keys()
    held = [page["generate"](page["loudest"](32)).kept(layer)[0][0] for layer in range(LAYERS)]
    assert [len(each) for each in held] == [32] * LAYERS and not np.array_equal(*held)
    assert 0 < np.nanmean(page["missed"].mass) < 1


@pytest.mark.sampled(0)
def test_the_merge_adds_what_is_evicted(page):
    """In float64: a tenth of the evicted value, in equal parts, to both sinks, and to nothing else."""
    position, victim = np.array([[[1, 7, 0, -1, 3]]], np.int32), np.array([[[False, True, False, False, False]]])
    value = np.random.default_rng(0).normal(size=(1, 1, 5, 4)).astype(np.float32)
    row = jnp.zeros(1, jnp.int32)
    view = policies.View(jnp.asarray(position), None, None, row, row, row, 0, True)
    folded = page["IntoSinks"](sinks=2, share=0.1).fold(value, value, victim, {}, view, 1)
    expected = value.astype(np.float64)
    expected[0, 0, [0, 2]] += 0.1 / 2 * expected[0, 0, 1]
    np.testing.assert_allclose(folded.value, expected, rtol=1e-6)


@pytest.mark.sampled(0)
def test_the_reference_notices(page):
    """A score that is not the definition's keeps other slots; so do another budget and another scope."""
    differences, loudest, by_definition = (page[name] for name in ("differences", "loudest", "by_definition"))
    forgetful = policies.Importance(  # the sum, of which a part is lost for every token that a slot is older
        needs={"mass", "above"},
        score=lambda stats, view: (
            stats["mass"]
            * jnp.sqrt(stats["above"])
            * 0.98 ** (view.newest[:, None, None] - view.position).astype(jnp.float32)
        ),
        reads=(),
    )
    mutated = policies.evict(importance=forgetful, scope=policies.protect_newest(4), budget=12)
    assert differences(mutated, by_definition, 12, 4, seed=0) > 0
    assert differences(loudest(12, recent=4), by_definition, 12, 5, seed=0) > 0


def test_policies_by_their_file(page, tmp_path):
    (block,) = (block for block in blocks("policies") if "def loudest(budget" in block)
    file = tmp_path / "mine.py"
    file.write_text(block)
    made = parse.build("policy", f"{file}:loudest(recent=16)", budget=64)
    assert (made.name, made.budget, made.scope) == ("loudest(recent=16)", policies.Slots(64), policies.Newest(16))
    assert made.needs == page["loudest"](64).needs


def test_messages_of_policies():
    """Each message of the table is raised by a small example."""

    def by(score=lambda stats, view: stats["mass"], needs=("mass",), reads=()):
        return policies.Importance(needs=set(needs), score=score, reads=reads)

    def run_with(importance, **options):
        arrays = tuple(np.ones((1, 1, 6, 4), np.float32) for _ in range(3))
        policy = policies.evict(importance=importance, budget=4, name="mine", **options)
        storage.replay(storage.dense(), arrays, tuple(x[:, :, :1] for x in arrays), np.array([6]), policy=policy)

    recall = statistics.Statistic("mass", transform="square")
    examples = [
        lambda: policies.evict(importance=by(needs=("mas",)), budget=4),
        lambda: run_with(by(lambda stats, view: stats["above"])),
        lambda: run_with(by(lambda stats, view: view.key[..., 0])),
        lambda: run_with(by(lambda stats, view: stats["mass"] > 0)),
        lambda: run_with(by(lambda stats, view: stats["mass"] + "1")),
        lambda: policies.h2o(32, recent=40),
        lambda: policies.compress(importance=by(), budget=None),
        lambda: policies.by_page(policies.h2o(64, merge=policies.d2o()), page=8),
        lambda: policies.value_norm(policies.strided(64, stride=4)),
        lambda: run_with(by(needs=("mass", recall))),
    ]
    quoted = [spans(row[0])[0] for row in rows("policies", heading="## Messages")]
    assert len(quoted) == len(examples)
    for message, example in zip(quoted, examples, strict=True):
        with pytest.raises(PolicyError) as raised:
            example()
        # The number of slots in a shape is that of the example.
        pattern = re.escape(message).replace(r"\[2,\ 2,\ 64\]", r"\[[\d, ]+\]")
        assert re.search(pattern, str(raised.value)), (message, str(raised.value))


# From other programs.


def test_migrating_runs():
    names = run("migrating")
    assert len(names["answers"]) == 2 and all(names["answers"].values())


TABLES = ("## From kvpress", "## From transformers", "## From llama.cpp")
#: Keyword arguments that a table may name: of generate, load and factories of policies.
KEYWORDS = {"budget", "positions", *inspect.signature(kvjax.generate).parameters}
KEYWORDS |= {*inspect.signature(kvjax.load).parameters, *(field.name for field in dataclasses.fields(CacheOptions))}


def resolves(span: str) -> bool:
    """Whether a dotted name of kvjax or experiments exists."""
    parts = span.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(lambda each, part: getattr(each, part, None), parts[end:], found) is not None
    return False


def builds(span: str) -> bool:
    """Whether a text is a policy, a storage, a selection or codes of weights."""
    for axis in ("policy", "storage", "selection", "weights"):
        defaults = {"budget": 0.5} if axis == "policy" else {}
        try:
            parse.build(axis, span, **defaults)
            return True
        except KvjaxError:
            continue
    return False


def exists(span: str) -> bool:
    if span.startswith("kvjax."):
        return resolves(re.split(r"\(", span)[0])
    if span.startswith("python -m "):
        return resolves(span.split()[2])
    if span.startswith("--"):
        source = (ROOT / "kvjax/serve/__main__.py").read_text()
        return all(f'"{flag}"' in source for flag in re.findall(r"--([\w-]+)", span))
    if keyword := re.match(r"(\w+)=", span):
        calls = re.findall(r"kvjax[\w.]+", span)
        return keyword[1] in KEYWORDS and all(map(resolves, calls))
    return builds(span) or span in ("save_prefix", "prefix")


@pytest.mark.parametrize("heading", TABLES)
def test_migrating_names(heading):
    named = [span for row in rows("migrating", heading=heading) for span in spans(row[1])]
    assert len(named) >= 15
    assert not [span for span in named if not exists(span)]
    assert "h2o" in named or heading != "## From kvpress"


def test_what_does_not_exist_would_be_noticed():
    assert not any(
        map(exists, ("h3o", "snapkv(windw=64)", "kvjax.generat", "--row", "budgets=3", "python -m kvjax.serv"))
    )
    assert all(map(exists, ("snapkv(window=4)", "int4(64, residual=128)", "kvjax.serve.Runner", "budget=0.2")))
    assert "int8" in WEIGHTS and "quest" in selection.SELECTIONS


# Troubleshooting.


def is_raised(message: str) -> bool:
    """Whether a text of the source has a message, with ... in place of values."""
    words = set(re.findall(r"[A-Za-z]{3,}", message))
    for file in itertools.chain.from_iterable((ROOT / folder).rglob("*.py") for folder in ("kvjax", "experiments")):
        source = file.read_text()
        if all(word in source for word in words):
            for node in ast.walk(ast.parse(source)):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                if message in "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts):
                    return True
    return False


def test_troubleshooting_messages():
    shown = re.findall(r"^```text\n(.*?)^```$", text_of("troubleshooting"), re.M | re.S)
    quoted = [message for lines in shown for message in lines.splitlines() if message not in (*OF_JAX, FIELD)]
    assert len(quoted) >= 20
    assert not [message for message in quoted if not is_raised(message)]
    assert not is_raised("it protects many ... slots, more than its budget of ...")


OF_JAX = (
    "RESOURCE_EXHAUSTED",
    "Termination timeout for `all reduce RendezvousKey{...}` of 40 seconds exceeded",
)
FIELD = "unknown field 'policy.bugdet': policy has name, budget, ...; did you mean 'policy.budget'?"


def test_troubleshooting_examples():
    assert f"\n{FIELD}\n" in text_of("troubleshooting")
    with pytest.raises(ConfigError) as raised:
        fields.kind_of("policy.bugdet", ExperimentConfig)
    before, after = FIELD.split("...; ")
    assert str(raised.value).startswith(before) and str(raised.value).endswith(after)


# Peers.


def test_peers_names_tests():
    text = text_of("peers")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 5
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), (file, name)
    assert len(text.split()) < 1_000


def test_how_it_works_length():
    assert 700 < len(text_of("how_it_works").split()) < 1_300
