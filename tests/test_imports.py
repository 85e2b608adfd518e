"""Importing kvjax, ``--help`` and errors in a command do without jax, which takes a second of CPU time to import."""

import ast
import importlib
import json
import os
import pickle
import subprocess
import sys

import pytest

import kvjax
from tests.conftest import ROOT

#: Packages that take long to import.
HEAVY = ("chex", "flax", "jax", "jaxlib", "matplotlib", "optax", "orbax", "tokenizers", "torch", "transformers")
#: Runs a program in a process, and says at its end which of these are there.
WATCHED = """
import atexit, json, os, sys
atexit.register(lambda: open(os.environ["FOUND"], "w").write(json.dumps([m for m in {heavy} if m in sys.modules])))
{program}
"""
MODULE = """
import runpy
sys.argv = {argv}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
#: What jax sets when it is imported where there is no TPU, and what kvjax then sets for libtpu.
NO_TPU, SILENT = "TPU_SKIP_MDS_QUERY", "TPU_LOG_DIR"


def run(program, tmp_path, **variables):
    """Runs a program; returns the finished process, and the packages of `HEAVY` that it has imported."""
    found = tmp_path / "found.json"
    unset = {NO_TPU, SILENT, "XLA_FLAGS"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"FOUND": str(found), "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", WATCHED.format(heavy=HEAVY, program=program)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    return done, json.loads(found.read_text())


def entry_points():
    """The modules that are run with ``python -m`` and have ``--help``."""
    files = [*ROOT.glob("experiments/*.py"), *ROOT.glob("experiments/*/__main__.py"), *ROOT.glob("kvjax/*/__main__.py")]
    programs = [path for path in files if 'if __name__ == "__main__":' in path.read_text()]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in programs)


def test_entry_points_are_found():
    assert len(entry_points()) == 25 and {"experiments.run", "experiments.bench", "kvjax.serve"} <= {*entry_points()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("module", entry_points())
def test_help_imports_nothing_that_takes_long(module, tmp_path):
    done, found = run(MODULE.format(argv=[module, "--help"], module=module), tmp_path)
    assert done.returncode == 0 and "--" in done.stdout and not done.stderr
    assert not found


@pytest.mark.parametrize("argument", ["--config=nothing", "--nothing=1"])
def test_errors_in_a_command_import_nothing_that_takes_long(argument, tmp_path):
    done, found = run(MODULE.format(argv=["run", argument], module="experiments.run"), tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not found


def test_kvjax_imports_nothing_that_takes_long(tmp_path):
    """The environment variables that XLA reads are set all the same."""
    program = "import kvjax, kvjax.serve\nprint(kvjax.__version__, os.environ['XLA_FLAGS'], 'generate' in dir(kvjax))"
    done, found = run(program, tmp_path)
    assert done.stdout.split()[0] == kvjax.__version__ and done.stdout.split()[2] == "True"
    assert "xla_cpu_disable_loop_unrolling" in done.stdout and not found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "program",
    [
        "import jax, kvjax",
        "import kvjax, jax\nkvjax.keep_programs",
        "from kvjax.generation.generate import generate",
        "from kvjax.serve import Runner",
    ],
)
def test_libtpu_is_silent_where_there_is_no_tpu(program, tmp_path):
    """Whenever jax is imported, before kvjax or with it, as long as kvjax is used before the backend is made."""
    shown = f"\nprint(os.environ.get({NO_TPU!r}), os.environ.get({SILENT!r}))"
    done, found = run(program + shown, tmp_path)
    assert "jax" in found
    no_tpu, silent = done.stdout.split()
    assert silent == ("disabled" if no_tpu == "1" else "None")


@pytest.mark.parametrize("package", ["kvjax", "kvjax.serve"])
def test_names_are_those_that_type_checkers_see(package):
    module = importlib.import_module(package)
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = {name.name: node.module for node in block.body for name in node.names}
    eager = {name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(module.__all__) <= imports.keys() | eager and imports.keys() <= set(module.__all__)
    for name, source in imports.items():
        others = importlib.import_module(source)
        assert getattr(module, name) is getattr(others, name) and name in dir(module)


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="module 'kvjax' has no attribute 'generat'"):
        kvjax.generat  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'generat'"):
        from kvjax import generat  # noqa: F401
    assert not hasattr(kvjax, "__wrapped__")


@pytest.mark.sampled(0)
def test_a_pickle_is_read_where_kvjax_is_not_imported(tmp_path):
    spec = kvjax.CacheSpec(kvjax.policies.h2o(0.2), kvjax.storage.int8(), kvjax.selection.everything())
    (tmp_path / "spec").write_bytes(pickle.dumps(spec))
    program = f"import pickle, pathlib\nprint(pickle.loads(pathlib.Path({str(tmp_path / 'spec')!r}).read_bytes()).name)"
    done, _ = run(program, tmp_path)
    assert done.stdout.strip() == spec.name


@pytest.mark.sampled(0)
def test_threads_that_use_their_first_names_at_once(tmp_path):
    """Each import is finished before another thread's begins: jax's modules import each other."""
    program = """
import threading, kvjax
names = ("load", "generate_text", "CacheSpec", "policies", "Model", "storage", "log_likelihood", "save")
barrier, failed = threading.Barrier(len(names)), []

def use(name):
    barrier.wait()
    try:
        getattr(kvjax, name)
    except BaseException as error:
        failed.append((name, repr(error)))

threads = [threading.Thread(target=use, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_dir_has_every_public_name():
    import kvjax

    assert set(kvjax.__all__) <= set(dir(kvjax))
