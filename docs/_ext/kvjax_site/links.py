"""Links between pages of the site and files of the repository.

Files such as CONTRIBUTING.md are read on the repository's own pages too, where links are relative to the file. A page
of the site that includes such a file lies elsewhere, and the file that a link names may have no page at all.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

#: ``[text](target)`` or ``![text](target)``; a text may have brackets and may go over several lines.
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^```\{include\} +(\S+)\n```$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#|//")  # a scheme, or a place on the same page


class Site(NamedTuple):
    """Where files are.

    Attributes:
      root: the folder of the repository.
      pages: file of the repository -> page of the site, both relative, the latter to `docs`.
      repository: address below which the files of the repository are shown, such as
        ``https://github.com/OWNER/NAME/blob/main``; empty if there is none.
    """

    root: Path
    pages: Mapping[str, str]
    repository: str = ""


class Link(NamedTuple):
    """A link of a text: its target, and whether it is a picture."""

    target: str
    picture: bool


def links(text: str) -> Iterator[Link]:
    """Yields the links of a Markdown text, those in code blocks aside."""
    for found in LINK.finditer(FENCE.sub("", text)):
        yield Link(found[3], bool(found[1]))


def page_of(path: str, site: Site) -> str | None:
    """Returns the page, relative to `docs`, that shows a file of the repository; None if there is none."""
    if path in site.pages:
        return site.pages[path]
    inside = PurePosixPath(path)
    return (
        str(inside.relative_to("docs")) if inside.parts[:1] == ("docs",) and inside.suffix in (".md", ".rst") else None
    )


def rewritten(text: str, source: str, page: str, site: Site) -> str:
    """Returns a Markdown text whose links lead to the same files from a page of the site.

    A file without a page is named as text, or linked to where the repository is shown.

    Args:
      text: Markdown.
      source: the file that it was written in, relative to the repository.
      page: the page that shows it, relative to `docs`.
      site: where files are.
    """

    def replaced(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        if ELSEWHERE.match(target):
            return found[0]
        file, _, place = target.partition("#")
        path = os.path.normpath(PurePosixPath(source).parent / file)
        anchor = f"#{place}" if place else ""
        own = PurePosixPath("docs", page).parent
        if picture:
            return f"![{label}]({_relative(path, own)})"
        if (shown := page_of(path, site)) is not None:
            return f"[{label}]({_relative(f'docs/{shown}', own)}{anchor})"
        if site.repository:
            return f"[{label}]({site.repository}/{path}{anchor})"
        return label if path in label or PurePosixPath(path).name in label else f"{label} (`{path}`)"

    return _outside_fences(text, lambda part: LINK.sub(replaced, part))


def included(text: str, page: str, site: Site) -> tuple[str, list[str]]:
    """Returns a page with the files that it includes, and their names; their links are rewritten.

    Args:
      text: of the page.
      page: its name, relative to `docs`.
      site: where files are.
    """
    files: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        path = os.path.normpath(PurePosixPath("docs", page).parent / found[1])
        files.append(path)
        return rewritten((site.root / path).read_text(), path, page, site).strip()

    return INCLUDE.sub(replaced, text), files


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Applies a function to the parts of a text that are not code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _relative(path: str, folder: PurePosixPath) -> str:
    return PurePosixPath(os.path.relpath(path, folder)).as_posix()
