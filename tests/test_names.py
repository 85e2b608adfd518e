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


def forbidden(source: str) -> list[str]:
    """What a file has of the names and docstrings that are not allowed."""
    tree = ast.parse(source)
    found = sorted(name for name in names(tree) if words(name) & FORBIDDEN)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            found += [text.splitlines()[0]] if re.match(r"(What|Of)\b", text) else []
    return found


def test_names_and_docstrings():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): forbidden(path.read_text()) for path in files}
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
