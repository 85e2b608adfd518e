"""An editable install, as `make` and `pip install -e .` make it, and a wheel."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile

import pytest

from kvjax.products.libraries import LIBRARIES
from kvjax.version import __version__
from tests.conftest import ROOT

BUILD = "import sys; sys.path.insert(0, 'backend'); import kvjax_build as build; build.build_{}('..')"
#: Without the environment's packages, in which kvjax may be installed too. An interpreter looks in the working folder
#: first, and then where `site` finds packages.
FIND = """
import importlib.util, site, sys
sys.path.insert(0, "")
site.addsitedir(sys.argv[1])
print(importlib.util.find_spec("kvjax").origin)
"""


def build(outside, kind: str, **variables: str) -> str:
    """Builds a clone named kvjax; the folder gets its packages. Returns the name of the wheel."""
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "kvjax_command.py"):
        (outside / "kvjax").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, outside / "kvjax")
    for name in ("kvjax", "experiments", "configs", "backend"):
        ignored = shutil.ignore_patterns("training" if name == "kvjax" else "measured", "__pycache__")
        shutil.copytree(ROOT / name, outside / "kvjax" / name, ignore=ignored)
    (outside / "kvjax" / "experiments" / "measured").mkdir(exist_ok=True)
    (outside / "kvjax" / "experiments" / "measured" / "README.md").write_text("Results, which no wheel has.")
    command, environment = [sys.executable, "-c", BUILD.format(kind)], os.environ | variables
    subprocess.run(command, cwd=outside / "kvjax", check=True, capture_output=True, env=environment)
    (wheel,) = outside.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(outside / "packages")
    return wheel.name


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with a clone named kvjax, and the folder of packages of an editable install of the clone."""
    outside = tmp_path_factory.mktemp("outside")
    return outside, build(outside, "editable")


@pytest.mark.parametrize("inside", [".", "kvjax", "kvjax/experiments"])
def test_kvjax_is_found_from_every_folder(installed, inside):
    """Also in the folder that has the clone, which is no package of that name."""
    outside, _ = installed
    command = [sys.executable, "-I", "-S", "-c", FIND, str(outside / "packages")]
    found = subprocess.run(command, cwd=outside / inside, check=True, capture_output=True, text=True).stdout.strip()
    assert (outside / inside / found).resolve() == (outside / "kvjax" / "kvjax" / "__init__.py").resolve()


def test_version(installed):
    assert installed[1].startswith(f"kvjax-{__version__}-")
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


LOAD = """
from kvjax import host
from kvjax.products import native
if {plain}:
    host.instructions = lambda: frozenset(("sse2",))
native.await_native()
targets = native.TARGET, native.ATTEND, native.CODED_VECTORS, native.CODED_WEIGHTS
print(*(native.load(target) is None for target in targets))
"""


@pytest.mark.sampled(0)
@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="wheels for x86-64 Linux alone")
def test_a_wheel_brings_the_libraries(tmp_path):
    """They need no compiler where kvjax is used, but the instructions that they were built for."""
    name = build(tmp_path, "wheel", CXXFLAGS="-O0")
    assert name == f"kvjax-{__version__}-py3-none-linux_x86_64.whl"
    assert len(list((tmp_path / "packages/kvjax/products/prebuilt").glob("*.so"))) == len(LIBRARIES)
    assert not (tmp_path / "kvjax/kvjax/products/prebuilt").exists(), "the clone is as it was"
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "packages"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "/bin/false",
    }  # fmt: skip
    for plain, answer in ((False, "True True True True"), (True, "False False False False")):
        command = [sys.executable, "-c", LOAD.format(plain=plain)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == answer


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with a clone, with what an earlier build has left, and with the packages of a wheel of the clone."""
    outside = tmp_path_factory.mktemp("wheel")
    (outside / "kvjax" / "build" / "lib" / "kvjax").mkdir(parents=True)
    (outside / "kvjax" / "build" / "lib" / "kvjax" / "removed.py").touch()
    assert build(outside, "wheel", CXX="/bin/false") == f"kvjax-{__version__}-py3-none-any.whl"
    return outside


def files(folder, name: str) -> set[str]:
    """The files of a package, without byte code, which the build may have left in the sources."""
    found = (path for path in (folder / name).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix() for path in found}


def test_a_wheel_without_a_compiler_brings_sources_alone(wheel):
    assert (wheel / "packages/kvjax/products/native.cc").exists()
    assert not (wheel / "packages/kvjax/products/prebuilt").exists()


def test_a_wheel_brings_every_file_of_the_packages(wheel):
    """A file of another kind than those that pyproject.toml names would be absent."""
    clone, packages = wheel / "kvjax", wheel / "packages"
    assert files(packages, "kvjax") == files(clone, "kvjax")
    assert {"kvjax/py.typed", "kvjax/pretrained/kvjax-tiny/model.safetensors"} <= files(packages, "kvjax")
    configs = {f"experiments/{name}" for name in files(clone, "configs")}
    measured = {"experiments/measured/README.md"}
    assert files(packages, "experiments") == files(clone, "experiments") - measured | configs
    assert "experiments/configs/h2o_opt30b.py" in configs
    own = {"kvjax", "experiments", "kvjax_command.py", f"kvjax-{__version__}.dist-info"}
    assert {path.name for path in packages.iterdir()} == own


MINE = """
from experiments.config import ExperimentConfig

def get_config():
    return ExperimentConfig(name="mine")
"""


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--help"], 0, "usage: kvjax COMMAND"),
        (["run", "--help"], 0, "h2o_opt30b"),
        (["demo", "--nothing=1"], 2, "error: unknown flag --nothing; known flags: "),
        (["run", "--config=h2o_tiny", "--nothing=1"], 2, "error: unknown flag --nothing; known flags: "),
        (["run", "--config=./mine.py", "--nothing=1"], 2, "error: unknown flag --nothing; known flags: "),
        (["run", "--config=mine"], 2, "error: --config=mine: unknown config 'mine'; known configs: "),
    ],
)
def test_the_command_of_a_wheel_runs_in_any_folder(arguments, status, says, wheel, tmp_path):
    """With the configs of the wheel by name, and one's own by path; the clone is not looked for."""
    (tmp_path / "mine.py").write_text(MINE)
    packages = wheel / "packages"
    (script,) = packages.glob("*.dist-info/entry_points.txt")
    assert "kvjax = kvjax_command:main" in script.read_text()
    program = "import sys, kvjax_command as command; print(command.__file__); sys.exit(command.main())"
    environment = os.environ | {"PYTHONPATH": str(packages)}
    line = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, str(packages) in done.stdout) == (status, True)
    assert says in (done.stderr if status else done.stdout) and "Traceback" not in done.stderr
