"""A Sphinx extension: makes the pages that follow from kvjax's registries, docstrings and measured files.

Pages are written into `docs/_generated` before Sphinx looks for sources. `generated` returns them as text, so that
tests need neither Sphinx nor a folder.
"""

import hashlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax_site import docstrings
from kvjax_site.links import Site, included, rewritten

FOLDER = "_generated"
PICTURES = "pictures"  # below it; kept from one build to the next
LONGEST_WORD = 28  # letters of code that fit into a line of a nested list on a phone
MEASURED = {
    "experiments/measured/notes.md": "notes",
    "experiments/measured/capacity/README.md": "capacity",
    "experiments/measured/papers/README.md": "papers",
    "experiments/measured/papers-smollm2/README.md": "papers-smollm2",
    "experiments/measured/leaderboard/smollm2.md": "leaderboard",
    "experiments/measured/leaderboard/policies_tiny.md": "policies_tiny",
    "kvjax/pretrained/kvjax-tiny/README.md": "kvjax-tiny",
    "kvjax/pretrained/kvjax-tiny-gate/README.md": "kvjax-tiny-gate",
}
#: What decides which tokens a policy keeps, and which a selection reads.
DRAWN_BY = ("kvjax/policies", "kvjax/selection", "kvjax/cache", "kvjax/numerics", "kvjax/pretrained")


def site_of(root: Path, repository: str = "") -> Site:
    """Returns where the files of the repository are shown on the site."""
    pages = {source: f"{FOLDER}/measured/{name}.md" for source, name in MEASURED.items()}
    pages |= {
        "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "experiments/measured/README.md": "measured.md",
        "experiments/measured": "measured.md", "docs": "index.md",
    }  # fmt: skip
    for path in sorted((root / "colab").glob("*.ipynb")):
        pages[f"colab/{path.name}"] = f"{FOLDER}/notebooks/{path.name}"
    return Site(root, pages, repository)


def generated(site: Site, drawn: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the generated pages: name, relative to `docs/_generated`, -> text.

    Args:
      site: where files are.
      drawn: name of a policy or a selection -> its pictures, relative to the folder of its page.
    """
    from kvjax_site import combine_page, entries, notebooks, pages, reference, systems  # which import kvjax, and so jax

    found: dict[str, str] = {
        "combinations.inc": combine_page.combinations(), "reference.inc": reference.index(),
        "systems.inc": systems.systems(),
    }  # fmt: skip
    axes = (entries.policy_entries(), entries.storage_entries(), entries.selection_entries())
    for own in axes:
        found[f"{own[0].axis}/index.md"] = pages.overview(own[0].axis, own)
        found |= {pages.page_name(entry): pages.page(entry, site.root, drawn) for entry in own}
    found |= {reference.page_name(package): reference.page(package) for package in reference.PACKAGES}
    for source, name in MEASURED.items():
        text = without_front_matter((site.root / source).read_text())
        found[f"measured/{name}.md"] = rewritten(text, source, f"{FOLDER}/measured/{name}.md", site)
    return found | notebooks.pages(site)


def without_front_matter(text: str) -> str:
    """Returns the text of a model card without the block of YAML that it begins with."""
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)


def digest(root: Path, folders: tuple[str, ...] = DRAWN_BY) -> str:
    """Returns a digest of the Python files of some folders."""
    found = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def write(folder: Path, found: Mapping[str, str]) -> None:
    """Writes the pages that have changed, and removes those that are no longer made."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in found and not name.startswith(f"{PICTURES}/"):
            path.unlink()
    for name, text in found.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def draw_all(root: Path, folder: Path) -> dict[str, list[str]]:
    """Draws what each policy keeps and what each selection reads.

    Args:
      root: the folder of the repository.
      folder: of the pictures; those that are no longer made are removed.

    Returns:
      Name of a policy or a selection -> its pictures, relative to the folder of its page.
    """
    from kvjax_site import entries, reading, survivors

    sources = digest(root)
    drawn = [entry for entry in entries.policy_entries() if survivors.can_draw(entry)]
    found = {entry.name: survivors.picture(entry, folder, sources) for entry in drawn}
    found |= {entry.name: reading.picture(entry, folder, sources) for entry in entries.selection_entries()}
    made = {file for files in found.values() for file in files}
    for path in folder.glob("*.png"):
        if path.name not in made:
            path.unlink()
    return {name: [f"../{PICTURES}/{file}" for file in files] for name, files in found.items()}


def compile_quickly() -> None:
    """Lets XLA compile without optimising: each picture is a program that runs once, in a fraction of that time."""
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    # As in tests/conftest.py: the newer emitter takes twice as long, and later versions have no such switch.
    flags += ["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version("jax").startswith("0.10.")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    import jax  # whose backend reads the flags when it is first used

    jax.config.update("jax_disable_most_optimizations", True)


def _generate(app: Any) -> None:
    compile_quickly()
    folder = Path(app.srcdir) / FOLDER
    site = site_of(Path(app.srcdir).parent, app.config.repository)
    drawn = draw_all(site.root, folder / PICTURES) if app.config.maps else {}
    write(folder, generated(site, drawn))


def _read(app: Any, name: str, source: list[str]) -> None:
    """Expands includes of Markdown pages, and rewrites links to files of the repository."""
    if Path(app.env.doc2path(name)).suffix != ".md" or name.startswith(FOLDER):
        return
    page, site = f"{name}.md", site_of(Path(app.srcdir).parent, app.config.repository)
    text = rewritten(source[0], f"docs/{page}", page, site)
    source[0], files = included(text, page, site)
    for file in files:
        app.env.note_dependency(str(site.root / file))


def _docstring(app: Any, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Escapes what reStructuredText would take for markup, and links no argument to what else has its name."""
    try:
        arguments = set(inspect.signature(value).parameters) if callable(value) else set()
    except (TypeError, ValueError):
        arguments = set()
    text = docstrings.escaped_rst(docstrings.literal("\n".join(lines), arguments))
    lines[:] = docstrings.without_accidents(text).split("\n")


def _mark_long(app: Any, doctree: Any) -> None:
    """Marks code with a word that may be wider than a phone; the style sheet lets such words break."""
    from docutils import nodes

    for node in doctree.findall(nodes.literal):
        if max(map(len, node.astext().split()), default=0) > LONGEST_WORD:
            node["classes"].append("long")


def setup(app: Any) -> dict[str, Any]:
    """Connects the extension to Sphinx."""
    root = str(Path(app.srcdir).parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    app.add_config_value("repository", "", "env")
    app.add_config_value("maps", True, "env", bool)
    app.connect("builder-inited", _generate)
    app.connect("source-read", _read)
    app.connect("doctree-read", _mark_long)
    app.connect("autodoc-process-docstring", _docstring, priority=100)  # before napoleon
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
