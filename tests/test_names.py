"""Names and docstrings: no words of everyday speech that stand for many things, no noun clauses."""

import ast
import re

import pytest

from tests.conftest import ROOT

#: Words that no name of the library or of experiments may have as a part.
FORBIDDEN = {"told", "gone", "goes", "lent", "apart", "beside", "together"}
FOLDERS = ("kvjax", "experiments")


def names(tree: ast.AST) -> set[str]:
    """The names that a file binds: of functions, classes, arguments, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                found.add(name)
    return found


def words(name: str) -> set[str]:
    return {each.lower() for each in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)}


def forbidden(source: str, in_tests: bool = False) -> list[str]:
    """Returns the names and docstrings of a file that are not allowed; tests have sentences as names."""
    tree = ast.parse(source)
    found = [] if in_tests else sorted(name for name in names(tree) if words(name) & FORBIDDEN)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            found += [text.splitlines()[0]] if re.match(r"(What|Of)\b", text) else []
    return found


def test_names_and_docstrings():
    files = {path: folder == "tests" for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py")}
    found = {path.relative_to(ROOT).as_posix(): forbidden(path.read_text(), each) for path, each in files.items()}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "source",
    [
        "def f(told): pass",
        "x.goes = 1",
        "gone = 2",
        "class SlotsApart: pass",
        '"""What it is."""',
        'def f():\n  """Of."""',
    ],
)
def test_they_would_be_seen(source):
    assert forbidden(source)
    assert not forbidden('"""Gathers the slots that are together."""\nleaving = gathered = 1')


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/glossary.md"])
def test_files_that_a_page_names_are_there(page):
    """A file that was renamed is named anew where it is described."""
    named = set(re.findall(r"`([\w/]+\.(?:py|toml|cc|h))`", (ROOT / page).read_text()))
    known = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.*") if ".venv" not in path.parts]
    assert named and not [name for name in named if not any(f"/{each}".endswith(f"/{name}") for each in known)]
