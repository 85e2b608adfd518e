"""The front page: short, with links that lead somewhere, and a first example that prints what the page says."""

import re

from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
WORDS = 1200


def test_it_is_short():
    assert len(TEXT.split()) <= WORDS


def test_links():
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXT)
    assert len(targets) > 20
    for target in targets:
        assert (ROOT / target).exists(), target
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    # The site's own frame.
    unlinked = (
        pages
        - set(targets)
        - {f"docs/{name}.md" for name in ("index", "measured", "contributing", "reference", "combinations")}
    )
    assert not unlinked


def example(text):
    """The code of the first example, and what it prints."""
    return re.search(r"```python\n(import kvjax\n.*?)```\n\n```text\n(.*?)```", text, re.DOTALL).groups()


def test_the_first_example_prints_what_the_page_says(capsys):
    code, printed = example(TEXT)
    assert example((ROOT / "docs" / "index.md").read_text()) == (code, printed), "the site's first page has the same"
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == printed
