"""The reference: every public name, a page for each package, in reStructuredText."""

import importlib
import inspect
from types import ModuleType
from typing import Any

from kvjax_site.docstrings import escaped_rst, markdown, summary

#: Public packages, in the order of the reference; a name that two of them have is described where it is first.
PACKAGES = (
    "kvjax", "kvjax.policies", "kvjax.storage", "kvjax.selection", "kvjax.presets", "kvjax.cache", "kvjax.contexts",
    "kvjax.reuse", "kvjax.transport", "kvjax.speculation", "kvjax.speculation.rules",
    "kvjax.serve", "kvjax.analysis", "kvjax.analysis.plots", "kvjax.analysis.submodular", "kvjax.training",
    "kvjax.planning", "kvjax.planning.capacity", "kvjax.planning.served_model", "kvjax.planning.serving_costs",
    "kvjax.planning.memory_layouts",
    "kvjax.planning.preemption", "kvjax.planning.attention_traffic", "kvjax.planning.offload_shares",
    "kvjax.planning.memory_pool", "kvjax.planning.cache_phases", "kvjax.planning.storage_attention",
    "kvjax.planning.kernel_traffic",
    "kvjax.lm_eval", "kvjax.numerics.statistics",
    "kvjax.generation.prefill", "kvjax.generation.generate", "kvjax.models.skew", "kvjax.products",
    "kvjax.errors",
)  # fmt: skip
#: Packages without ``__all__`` whose own public functions and classes are not all meant for users.
NAMES = {
    "kvjax.presets": ("infinigen", "by_name", "accepts", "names"),
    "kvjax.generation.prefill": ("prefill",),
    "kvjax.generation.generate": ("decode",),
}
INTRODUCED = ("kvjax",)  # whose docstring is not shown whole, since it is written for a terminal


def public_names(package: str) -> list[str]:
    """Returns the public names of a package, in the order of ``__all__`` or of its source."""
    module = importlib.import_module(package)
    if package in NAMES:
        return list(NAMES[package])
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == package
            and (inspect.isfunction(value) or inspect.isclass(value))
        ]  # fmt: skip
    return [name for name in names if not inspect.ismodule(getattr(module, name)) and name != "__version__"]


def described() -> dict[int, str]:
    """Returns the identity of every public function and class -> the full name under which it is described."""
    found: dict[int, str] = {}
    for package in PACKAGES:
        for name in importable(package):
            value = getattr(importlib.import_module(package), name)
            if inspect.isclass(value) or callable(value):
                found.setdefault(id(value), f"{package}.{name}")
    return found


def importable(package: str) -> list[str]:
    """Returns the public names of a package that can be imported here: not the model of an lm_eval that is absent."""
    module, found = importlib.import_module(package), []
    for name in _all(module, package):
        try:
            getattr(module, name)
        except ImportError:
            continue
        found.append(name)
    return found


def _all(module: ModuleType, package: str) -> list[str]:
    if package == "kvjax.lm_eval":
        return list(module.__all__)
    return public_names(package)


def page_name(package: str) -> str:
    """Returns the name of a package's page, relative to the folder of generated pages."""
    return f"reference/{package}.rst"


def index() -> str:
    """Returns the list of packages, for docs/reference.md."""
    lines = ["| package | |", "|---|---|"]
    for package in PACKAGES:
        about = summary(inspect.getdoc(importlib.import_module(package)) or "")
        lines.append(f"| [{package}]({page_name(package)}) | {markdown(about)} |")
    names = "\n".join(f"_generated/{page_name(package).removesuffix('.rst')}" for package in PACKAGES)
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", names, "```", ""])


def page(package: str) -> str:
    """Returns the page of a package."""
    module, full = importlib.import_module(package), described()
    lines = [package, "=" * len(package), ""]
    doc = escaped_rst(inspect.getdoc(module) or "")
    lines += [summary(doc) if package in INTRODUCED else doc, "", f".. py:currentmodule:: {package}", ""]
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Objects": []}
    for name in importable(package):
        value = getattr(module, name)
        kind = "Classes" if inspect.isclass(value) else "Functions" if callable(value) else "Objects"
        kinds[kind] += _described(module, name, value, full)
    for title, own in kinds.items():
        if own:
            lines += [title, "-" * len(title), "", *own]
    return "\n".join(lines) + "\n"


def _described(module: ModuleType, name: str, value: Any, full: dict[int, str]) -> list[str]:
    package = module.__name__
    own = f"{package}.{name}"
    first = full.get(id(value), own)
    if first != own:
        return [f".. py:data:: {name}", "", f"   The same as :py:obj:`{first}`.", ""]
    if inspect.isclass(value):
        return [f".. autoclass:: {own}", "   :members:", "   :show-inheritance:", ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {own}", ""]
    return [f".. py:data:: {name}", "", f"   {_object(module, value)}", ""]


def _object(module: ModuleType, value: Any) -> str:
    """Returns what an object is, from its type."""
    kind = type(value)
    text = repr(value)
    if kind.__module__.startswith("kvjax"):
        name = f"{module.__name__}.{kind.__name__}"
        public = hasattr(module, kind.__name__)
        about = escaped_rst(summary(inspect.getdoc(kind) or ""))
        return f"An instance of :py:obj:`{name if public else kind.__name__}`: {about}"
    shown = f"``{text}``" if len(text) < 100 and "`" not in text else f"A {kind.__name__}."
    return shown
