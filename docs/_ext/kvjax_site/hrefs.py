"""Links of the built site: whether every file and every anchor that a page refers to exists."""

import html.parser
import re
import urllib.parse
from pathlib import Path
from typing import NamedTuple

ADDRESSES = {"href", "src"}
SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//")


class Found(NamedTuple):
    """The links and anchors of a page.

    Attributes:
      anchors: the fragments that lead into the page.
      targets: the addresses that it refers to, each once.
    """

    anchors: set[str]
    targets: dict[str, None]


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Found(set(), {})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.found.anchors.add(value)
            elif name in ADDRESSES and not SCHEME.match(value):
                self.found.targets[value] = None


def read(page: Path) -> Found:
    """Returns the anchors and the local targets of a page."""
    reader = _Reader()
    reader.feed(page.read_text())
    reader.close()
    return reader.found


def pages(root: Path) -> list[Path]:
    """Returns the pages below a folder, without the templates that themes have in `_static`."""
    return [path for path in sorted(root.rglob("*.html")) if "_static" not in path.relative_to(root).parts]


def broken(root: Path) -> list[str]:
    """Returns a line for each link of the pages below a folder that leads to no file, or to no anchor of a page."""
    known = {path.resolve(): read(path) for path in pages(root)}
    found = []
    for page, has in known.items():
        for target in has.targets:
            address, _, fragment = target.partition("#")
            address = urllib.parse.unquote(address.partition("?")[0])
            path = (page.parent / address).resolve() if address else page
            if path.is_dir():
                path = path / "index.html"
            if not path.exists():
                found.append(f"{page.relative_to(root.resolve())}: {target} leads to no file")
            elif fragment and path in known and urllib.parse.unquote(fragment) not in known[path].anchors:
                found.append(f"{page.relative_to(root.resolve())}: {target} leads to no anchor")
    return found
