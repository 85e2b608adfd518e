"""The page of published systems around key-value caches; `systems_keep` and others have its entries.

`tests/test_systems.py` compares them with the registries, the code, the tests and the measured files.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from kvjax_site import entries, pages, reference
from kvjax_site.docstrings import escaped
from kvjax_site.system import FIGURES, System
from kvjax_site.systems_hold import HOLD, LOOK
from kvjax_site.systems_keep import KEEP
from kvjax_site.systems_out import OUT
from kvjax_site.systems_serve import REUSE, SERVE, SHARE

#: All entries, in the order of the page.
SYSTEMS: tuple[System, ...] = (*KEEP, *HOLD, *LOOK, *REUSE, *SHARE, *SERVE, *OUT)

PACKAGE = "kvjax."  # which the page leaves out of names
TESTS = "tests/"
UP = "../../"  # from the folder of generated pages to that of the repository
TITLES = {
    "keep": ("Keep: which tokens stay", "Policies, merges, and what finds budgets for them."),
    "hold": ("Hold: in what form", "Storages."),
    "look": ("Look: which slots a query reads", "Selections."),
    "reuse": ("Reuse: caches after other texts", "Chunks, edits, turns, and contexts as bytes."),
    "share": ("Share: what requests have in common", "States of prompts that begin alike."),
    "serve": ("Serve: memory, devices and schedules", "Plans are closed forms and simulations; they measure nothing."),
}


def systems() -> str:
    """Returns the generated part of docs/systems.md."""
    parts = []
    for asks, (title, about) in TITLES.items():
        parts += [f"## {title}", about, _table([each for each in SYSTEMS if each.asks == asks and each.is_there])]
    left_out = [each for each in SYSTEMS if not each.is_there]
    rows = [f"| {_title(each)} | {each.asks} | {escaped(each.reason)} |" for each in left_out]
    parts += ["## Not in kvjax", "\n".join(["| system | about | why not |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def resolve(name: str) -> Any:
    """Returns the object of a full name.

    Args:
      name: such as ``kvjax.policies.snapkv``.

    Raises:
      AttributeError, ModuleNotFoundError: there is none.
    """
    package, _, own = name.rpartition(".")
    return getattr(importlib.import_module(package), own)


def _table(own: Sequence[System]) -> str:
    lines = ["| system | in kvjax | where it differs, or which part it is | test, measured |", "|---|---|---|---|"]
    links = _pages()
    for each in own:
        names = [f"[`{_short(name)}`]({links[name]})" if name in links else f"`{_short(name)}`" for name in each.names]
        parts = [" and ".join(f"`{text}`" for _, text in each.spec), f"`{each.command}`" if each.command else ""]
        shown = "; ".join(part for part in (", ".join(names), *parts) if part)
        checked = [f"[`{each.test.removeprefix(TESTS)}`]({UP}{each.test})"]
        checked += [f"[{each.figure}]({UP}{FIGURES[each.figure]})"] if each.figure else []
        lines.append(f"| {_title(each)} | {shown} | {escaped(each.form)} | {', '.join(checked)} |")
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.removeprefix(PACKAGE)


def _title(each: System) -> str:
    title = escaped(each.title)
    return f"{title}, [{each.paper}](https://arxiv.org/abs/{each.paper})" if each.paper else title


def _pages() -> dict[str, str]:
    """Returns the full name of what has a page -> the page, relative to the folder of generated pages."""
    found = {
        f"{package}.{name}": reference.page_name(package)
        for package in reference.PACKAGES
        for name in reference.importable(package)
    }
    return found | {each.full_name: pages.page_name(each) for each in entries.all_entries()}
