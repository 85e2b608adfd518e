"""Builds distributions of kvjax: setuptools, with the configs of experiments in wheels, and in wheels for x86-64 Linux
the C++ libraries of its products.

A clone has the configs in the folder `configs`. A wheel has them as data of the package `experiments`: installed beside
it, they would take the name ``configs`` from every other package, and a mapping of setuptools (``package-dir``) would
turn an editable install into an import hook; see pyproject.toml.

A wheel that is built where there is a C++ compiler brings the libraries, so that the first use does not wait for them;
one that is built elsewhere brings their sources alone, and so does an editable install. ``CXX`` names the compiler, and
``CXXFLAGS`` are further flags.
"""

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.build_py import build_py

__all__ = [
    "BuildPy",
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, PACKAGE = "configs", "experiments"  # the folder in a clone, and the package that has it in a wheel
HEADERS = "jax>=0.10.2"  # has the headers of custom calls
TAG = "linux_x86_64"


class BuildPy(build_py):
    """Copies the packages into a wheel, and the configs; pyproject.toml names it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the package is the clone's, whose configs lie beside it
            return
        folder = Path(self.build_lib) / PACKAGE / CONFIGS
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted((ROOT / CONFIGS).glob("*.py")):
            shutil.copyfile(path, folder / path.name)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Returns what setuptools needs, and jax for its headers where libraries are built."""
    needed: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    return [*needed, HEADERS] if _compiler() else needed


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds a wheel; see PEP 517."""
    with _libraries() as built:
        settings = dict(config_settings or {})
        if built:
            options = settings.get("--build-option", [])
            options = [options] if isinstance(options, str) else list(options)
            settings["--build-option"] = [*options, f"--plat-name={TAG}"]
        name: str = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
        return name


def _compiler() -> str | None:
    """Returns the command of the C++ compiler, or None if there is none or libraries are for other systems."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@contextlib.contextmanager
def _libraries() -> Iterator[bool]:
    """Builds the libraries beside their sources, where setuptools finds them, and removes them afterwards."""
    compiler, known = _compiler(), _known()
    # setuptools adds to a wheel what an earlier build has left in its folder.
    for folder in (known.PREBUILT_FOLDER, ROOT / "build" / "lib"):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield compiler is not None and _build(compiler, known)
    finally:
        shutil.rmtree(known.PREBUILT_FOLDER, ignore_errors=True)


def _build(compiler: str, known: ModuleType) -> bool:
    """Builds all libraries; returns whether the compiler and jax's headers could."""
    try:
        import jax
    except ImportError:
        print("kvjax: no jax to build with: the wheel brings sources alone", file=sys.stderr)
        return False
    known.PREBUILT_FOLDER.mkdir()
    optimisation, *others = known.PREBUILT_FLAGS
    # These others come last: a library must run on every processor on which it is loaded.
    shared = [*compiler.split(), optimisation, *os.environ.get("CXXFLAGS", "").split(), *others]
    shared.append(f"-I{jax.ffi.include_dir()}")
    commands = [[*shared, str(each.path), "-o", str(each.prebuilt)] for each in known.LIBRARIES]
    try:
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"kvjax: the libraries were not built, so the wheel brings sources alone: {error}", file=sys.stderr)
        shutil.rmtree(known.PREBUILT_FOLDER)
        return False
    return True


def _known() -> ModuleType:
    """Returns kvjax.products.libraries, without kvjax, whose dependencies are not here."""
    spec = importlib.util.spec_from_file_location("libraries", ROOT / "kvjax" / "products" / "libraries.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
