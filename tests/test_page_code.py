"""Every block of code of README, CONTRIBUTING and docs/: a test runs its Python, and its commands exist."""

import ast
import dataclasses
import importlib
import itertools
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from typing import Any

import numpy as np
import pytest

import kvjax
import kvjax_command
from experiments import cli
from experiments.programs.sweep import parse_axis, product
from experiments.runs.resolve import specs_of
from kvjax import policies
from kvjax.errors import KvjaxError
from kvjax.serve.__main__ import parser as server_flags
from kvjax.specs import parse
from tests.conftest import ROOT
from tests.test_docs import TEXT as SELECTIONS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: The tests that run the Python blocks of a page, one for each block in the order of the page; a single one runs all.
RUN_BY = {
    "README.md": (
        "tests/test_readme.py::test_the_first_example_prints_what_the_page_says",
        "tests/experiments/test_spec_text.py::test_a_policy_in_a_users_own_file",
    ),
    "CONTRIBUTING.md": ("tests/test_page_code.py::test_a_policy_of_contributing",),
    "docs/index.md": ("tests/test_readme.py::test_the_first_example_prints_what_the_page_says",),
    "docs/budgets.md": "tests/test_guides.py::test_blocks_run",
    "docs/contexts.md": "tests/test_guides.py::test_blocks_run",
    "docs/generation.md": "tests/test_guides.py::test_blocks_run",
    "docs/how_it_works.md": "tests/test_guides.py::test_blocks_run",
    "docs/meshes.md": "tests/test_guides.py::test_blocks_run",
    "docs/migrating.md": "tests/test_guides.py::test_migrating_runs",
    "docs/policies.md": "tests/test_guides.py::test_what_the_page_makes",
    "docs/reuse.md": "tests/test_guides.py::test_blocks_run",
    "docs/simulations.md": "tests/test_guides.py::test_blocks_run",
    "docs/speculation.md": "tests/test_guides.py::test_blocks_run",
    "docs/selections.md": "tests/test_docs.py::test_blocks_run",
    "docs/storages.md": "tests/storage/test_page.py::test_blocks_run",
    "docs/tasks.md": "tests/experiments/test_tasks.py::test_a_task_of_your_own",
    "docs/lm_eval.md": ("tests/test_page_code.py::test_lm_eval_as_a_library",),
    # It is compiled and not run: it needs a cluster of Ray. The command in it is checked as those of the page are.
    "docs/clusters.md": ("tests/experiments/test_sharing.py::test_the_page",),
}
#: The tests that check blocks in other languages.
CHECKED_BY = {
    ("README.md", "text"): "tests/test_readme.py::test_the_first_example_prints_what_the_page_says",
    ("docs/index.md", "text"): "tests/test_readme.py::test_the_first_example_prints_what_the_page_says",
    ("docs/experiments.md", "json"): "tests/experiments/test_batch.py::test_the_lines_of_the_page",
    ("docs/troubleshooting.md", "text"): "tests/test_guides.py::test_troubleshooting_messages",
    ("docs/clusters.md", "yaml"): "tests/experiments/test_sharing.py::test_the_page",
}
#: Commands of others, and why no test runs them. The commands of kvjax that they are given are checked.
OTHERS = {
    "sbatch": "tests/experiments/test_sharing.py runs it with a stub of SLURM",
    "kubectl": "needs a cluster", "xpk": "needs a cluster", "sky": "needs a cloud", "ray": "needs a cluster",
    "gcloud": "needs a Cloud TPU", "curl": "tests/serve sends such requests to a server of its own",
}  # fmt: skip
OF_THE_SHELL = {"cd", "for", "do", "done"}
ENDS = {"&&", "&", ";", "|"}  # of a command


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path, language):
    return [block for found, block in FENCE.findall(path.read_text()) if found == language]


def exists(test: str) -> bool:
    file, _, function = test.partition("::")
    return f"\ndef {function}(" in (ROOT / file).read_text()


# Python.


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_python_block_runs(path):
    """A test of another file runs it; a page with a new block is added to `RUN_BY`."""
    found, run_by = blocks(path, "python"), RUN_BY.get(name_of(path), ())
    assert bool(found) == bool(run_by)
    if isinstance(run_by, tuple):
        assert len(found) == len(run_by)
    assert all(map(exists, (run_by,) if isinstance(run_by, str) else run_by))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_other_blocks_are_checked(path):
    """Directives of MyST are Sphinx's, which `make docs` runs."""
    for language in {found for found, _ in FENCE.findall(path.read_text())} - {"python", "bash"}:
        assert language.startswith("{") or exists(CHECKED_BY[name_of(path), language]), language


def test_a_policy_of_contributing():
    """The block defines what kvjax's own `mean_attention` is."""
    (block,) = blocks(ROOT / "CONTRIBUTING.md", "python")
    module = importlib.import_module(policies.mean_attention.__wrapped__.__module__)
    names = {**vars(policies), **vars(module), "Any": Any, "__name__": "contributing"}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    own, known = names["mean_attention"](budget=8, recent=2), policies.mean_attention(8, recent=2)
    assert own is not known and (own.name, own.scope, own.budget) == (known.name, known.scope, known.budget)
    stats = {"mass": 6.0, "count": 4}
    assert own.importance.score(stats, None) == known.importance.score(stats, None) == 1.5


def test_lm_eval_as_a_library(monkeypatch):
    """All but the evaluation, which downloads the questions of a task; tests/lm_eval evaluates tasks of files."""
    lm_eval = pytest.importorskip("lm_eval")
    asked = []
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda model, tasks: asked.append((model, tasks)))
    (block,) = blocks(ROOT / "docs" / "lm_eval.md", "python")
    exec(compile(block, "docs/lm_eval.md", "exec"), {"__name__": "page"})
    ((model, tasks),) = asked
    assert isinstance(model, importlib.import_module("kvjax.lm_eval").KVJaxLM) and tasks == ["piqa"]


def examples_of_docstrings() -> dict[str, str]:
    """The literal blocks of docstrings, which pages of the reference show: name of what they describe -> code."""
    found = {}
    texts = {file: file.read_text() for file in sorted((ROOT / "kvjax").rglob("*.py"))}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text if "::\n" in text else "")):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) else None
            for block in re.findall(r"::\n\n((?:[ ]+\S.*(?:\n+|$))+)", doc or ""):
                found[f"{file.relative_to(ROOT).as_posix()}: {getattr(node, 'name', '')}"] = textwrap.dedent(block)
    return found


EXAMPLES = examples_of_docstrings()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings(name):
    """With one layer of kvjax-tiny and a text of 520 tokens."""
    model = kvjax.load("kvjax-tiny")
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, num_layers=1, windows=()))
    names = {"kvjax": kvjax, "policies": policies, "model": model, "tokens": np.arange(1, 521)[None]}
    exec(compile(EXAMPLES[name], name, "exec"), names)


def test_there_are_examples_of_docstrings():
    assert {name.partition(": ")[2] for name in EXAMPLES} >= {"padded", "reuse_prompts"}


# Commands.


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, as words: without comments, assignments, and words of the shell itself."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars="&;|")
        reader.whitespace_split = True
        for ends, group in itertools.groupby(reader, ENDS.__contains__):
            words = list(group)
            while words and re.fullmatch(r"\w+=.*|do", words[0]):
                words = words[1:]
            if words and not ends and words[0] not in OF_THE_SHELL:
                found.append(words)
    return found


def inner(words: list[str]) -> list[list[str]]:
    """A command, and the commands that it is given to start: after srun's own flags, or as the text of --command."""
    texts = [word.partition("=")[2] for word in words if word.startswith("--command=")]
    if words[0] == "srun":
        rest = [index for index, word in enumerate(words) if index and not word.startswith("-")]
        return inner(words[rest[0] :])
    return [words, *(each for text in texts for each in commands(text))]


ALL = [
    pytest.param(path, words, id=f"{name_of(path)}: {' '.join(words)[:60]}")
    for path in PAGES
    for block in blocks(path, "bash")
    for command in commands(block)
    for words in inner(command)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the file that pages call mine.py."""
    made = tmp_path_factory.mktemp("pages")
    policy = re.search(r"```python\n(# mine\.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    found = re.findall(r"^```python\n(.*?)^```$", SELECTIONS, re.MULTILINE | re.DOTALL)
    imports = "".join(f"{line}\n" for line in "".join(found).splitlines() if re.match(r"import |from ", line))
    (selection,) = (block for block in found if "def mean_pages(" in block)
    (made / "mine.py").write_text(f"{policy}\n{imports}\n{selection}")
    return made


@pytest.fixture
def started(monkeypatch, folder):
    """Runs a module with its program's work left out; returns (config, flags) that it was started with."""
    asked = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "prepare_programs", lambda values: None)
    monkeypatch.setattr(cli, "start_processes", lambda values: None)

    def start(module: str, argv: list[str]):
        package, _, name = module.partition(".")
        assert package == "experiments", module
        program = importlib.import_module(f"experiments.programs.{name}")
        if name in ("train", "tune", "train_gate", "train_merge", "train_reuse"):
            monkeypatch.setattr(program, name, lambda config, **_: asked.append((config, None)) or "folder")
        else:
            monkeypatch.setattr(program, "start", lambda *given: asked.append(given) or 0)
        found = importlib.import_module(module)
        main = getattr(found, "main", None) or importlib.import_module(f"{module}.__main__").main
        assert main([name, *argv]) == 0
        first, *rest = asked.pop()
        return first, rest

    return start


def check_caches(module: str, config, flags) -> None:
    """Builds the caches that a run, or each run of a sweep, compares."""
    if module == "experiments.run":
        specs_of(config)
    elif module == "experiments.sweep":
        for _, each in product(config, [parse_axis(axis) for axis in flags["sweep"].value]):
            specs_of(each)


def check_module(module: str, argv: list[str], started) -> None:
    if module == "kvjax.serve":
        given = server_flags().parse_args(argv)
        parse.build("policy", given.policy, budget=given.budget)
    elif module == "kvjax.lm_eval":
        pytest.importorskip("lm_eval")
        from lm_eval._cli.harness import HarnessCLI

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["lm_eval", *argv])
            assert HarnessCLI().parse_args().model == "kvjax"
    elif module == "pytest":
        assert all((ROOT / word.partition("::")[0]).exists() for word in argv if not word.startswith("-"))
    else:
        config, rest = started(module, argv)
        check_caches(module, config, rest[0] if rest else None)


@pytest.mark.parametrize(("path", "words"), ALL)
def test_every_command_is_one(path, words, started, monkeypatch):
    """Its program, its flags, its config and the caches of it exist; only the work is left out."""
    program, *argv = words
    if program in ("python", ".venv/bin/python"):
        if argv[0] == "-m":
            check_module(argv[1], argv[2:], started)
        else:
            assert f"`{argv[0]}`" in path.read_text(), "a script that the page shows"
    elif program == "kvjax":
        if argv != ["--help"]:
            run = []
            monkeypatch.setattr("sys.argv", ["kvjax"])
            monkeypatch.setattr(runpy, "run_module", lambda module, run_name: run.append(module))
            if any(word == "--config=./my_config.py" for word in argv):
                argv = [word.replace("./my_config.py", str(ROOT / "configs" / "h2o_tiny.py")) for word in argv]
            assert kvjax_command.main(argv) == 0
            check_module(run[0], sys.argv[1:], started)
    elif program == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
        assert argv[0] in targets
    elif program == "pip":
        check_pip(argv)
    else:
        assert program in OTHERS, program


def check_pip(argv: list[str]) -> None:
    """Checks the extras of kvjax, and the file of constraints."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert argv[0] in ("install", "wheel")
    for word in argv[1:]:
        for names in re.findall(r"(?:^\.|kvjax|\.whl\))\[([\w,-]+)\]", word):
            assert set(names.split(",")) <= set(known), word
    if "-c" in argv:
        assert (ROOT / argv[argv.index("-c") + 1]).exists()


def test_what_does_not_exist_would_be_noticed(started):
    for command in (
        "python -m experiments.run --config=h2o_tinny",
        "python -m experiments.run --config=h2o_tiny --config.policy.bugdet=3",
        "python -m experiments.sweep --config=h2o_tiny --sweep=policy.name=h3o",
        "python -m experiments.run --config=h2o_tiny --config.storage=int9",
        "python -m experiments.bench decode --agains=transformers",
    ):
        (words,) = commands(command)
        with pytest.raises(KvjaxError, match=r"(?i)unknown"):
            check_module(words[2], words[3:], started)
    with pytest.raises(SystemExit):
        check_module("kvjax.serve", ["--model=kvjax-tiny", "--rowz=3"], started)
    with pytest.raises(AssertionError):
        check_pip(["install", "kvjax[experimentz]"])
