"""An editable install, as `make` and `pip install -e .` make it."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from kvjax.version import __version__
from tests.conftest import ROOT

BUILD = "import setuptools.build_meta as build; build.build_editable('..')"
#: Without the environment's packages, in which kvjax may be installed too. An interpreter looks in the working folder
#: first, and then where `site` finds packages.
FIND = """
import importlib.util, site, sys
sys.path.insert(0, "")
site.addsitedir(sys.argv[1])
print(importlib.util.find_spec("kvjax").origin)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with a clone named kvjax, and the folder of packages of an editable install of the clone."""
    pytest.importorskip("setuptools")
    outside = tmp_path_factory.mktemp("outside")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (outside / "kvjax").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, outside / "kvjax")
    for name in ("kvjax", "experiments", "configs"):
        shutil.copytree(
            ROOT / name,
            outside / "kvjax" / name,
            ignore=shutil.ignore_patterns("pretrained", "measured", "__pycache__"),
        )
    subprocess.run([sys.executable, "-c", BUILD], cwd=outside / "kvjax", check=True, capture_output=True)
    (wheel,) = outside.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(outside / "packages")
    return outside, wheel.name


@pytest.mark.parametrize("inside", [".", "kvjax", "kvjax/experiments"])
def test_kvjax_is_found_from_every_folder(installed, inside):
    """Also in the folder that has the clone, which is no package of that name."""
    outside, _ = installed
    command = [sys.executable, "-I", "-S", "-c", FIND, str(outside / "packages")]
    found = subprocess.run(command, cwd=outside / inside, check=True, capture_output=True, text=True).stdout.strip()
    assert (outside / inside / found).resolve() == (outside / "kvjax" / "kvjax" / "__init__.py").resolve()


def test_version(installed):
    assert installed[1].startswith(f"kvjax-{__version__}-")
