"""Fixtures shared by all tests."""

from __future__ import annotations

import collections
import contextlib
import gc
import hashlib
import importlib.metadata
import os
import platform
import sys
import threading
from pathlib import Path

# With the TPU compiler installed, jax would look for a TPU; a machine with an accelerator may name it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The TPU compiler, where `make test` has put it. Processes that tests start find it by the variable.
LIBTPU = Path(sys.prefix) / "libtpu"
if LIBTPU.is_dir():
    sys.path.append(str(LIBTPU))
    os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBTPU / "libtpu" / "libtpu.so"))

# Products in a form that does not depend on the machine's speed; tests/products has the others.
os.environ.setdefault("KVJAX_PRODUCTS", "fixed")

# The interpreter of GPU kernels holds one of XLA's threads for every warpgroup, also while that waits. By default there
# are as many threads as processors: with two, three warpgroups would wait for each other for ever.
os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 8)))

# Threads of torch wait for each other by counting, on processors that other workers need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A program is cut into parts that LLVM compiles side by side, which is quicker where processors are idle. Here workers
# keep them busy, and to cut and to link is a quarter of all compiling.
ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
# jax 0.10 emits fused loops for CPUs in a way that takes twice as long to compile; what they compute is the same. Newer
# versions have no such switch, and no process starts with one that is unknown.
OTHER_EMITTER = ["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version("jax").startswith("0.10.")
# Workers and the programs that tests start inherit the flags, including those that are added here.
GIVEN = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in (ONE_PART, *OTHER_EMITTER)]
XLA_FLAGS = " ".join([*GIVEN, ONE_PART, *OTHER_EMITTER])
os.environ["XLA_FLAGS"] = XLA_FLAGS

# Hundreds of tiny programs: compiling them is most of the time, in the processes that tests start too. What is left out
# is the optimisation of machine code: the HLO that tests read, and the memory that it takes, are the same.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Everything that is made until the tests begin stays, so that to look for garbage then (a third of the time in which
# tests are collected) finds little: `pytest_collection_finish` begins to.
gc.disable()

import jax  # noqa: E402
import pytest  # noqa: E402

from kvjax import products  # noqa: E402
from kvjax.products import native, used_slots  # noqa: E402

# An accidental float64 or int32 -> float32 promotion is an error here.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# To say of each operation from where it was called takes a fifteenth of the time; no test reads it.
jax.config.update("jax_traceback_in_locations_limit", 0)

#: Programs that are lowered in one MLIR context. jax makes one for each program and loads all dialects into it, a tenth
#: of the time; one for all would hold what all of them need.
PROGRAMS_OF_A_CONTEXT = 200


def share_contexts() -> None:
    """Programs of a thread are lowered in the same MLIR context, and after some in another one.

    A program that is lowered within the lowering of another one gets a new context: in the shared one, its operations
    would be inserted into the outer program.
    """
    from jax._src.interpreters import mlir  # jax has no public way
    from jax._src.lib.mlir import ir

    make, own = mlir.make_ir_context, threading.local()

    def lowering():
        try:
            return ir.Context.current is not None
        except ValueError:
            return False

    def shared():
        if lowering():
            return make()
        own.programs = getattr(own, "programs", 0) + 1
        if own.programs % PROGRAMS_OF_A_CONTEXT == 1:
            own.context = make()
        return own.context

    mlir.make_ir_context = shared


share_contexts()

# A test must not depend on how long the compiler of kvjax's own products takes.
products.await_native()

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def optimised():
    """Programs are compiled as users compile them: for tests of what optimisations could change, or of long runs.

    With optimisations, the emitter that is slow without is several times faster than the other one.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    with pytest.MonkeyPatch.context() as patch:
        if OTHER_EMITTER:
            from jax._src import compiler  # jax has no public way to give all programs an option

            plain, emitter = compiler.get_compile_options, {"xla_cpu_use_fusion_emitters": True}

            def options(*args, env_options_overrides=None, **more):
                return plain(*args, env_options_overrides=emitter | dict(env_options_overrides or {}), **more)

            patch.setattr(compiler, "get_compile_options", options)
        yield
    jax.config.update("jax_disable_most_optimizations", before)


#: Tests that read what the compiler made, or compile for devices that are absent: their programs are not kept.
READ_PROGRAMS = {"test_compiled.py", "test_context.py", "test_make_plan.py", "kernels"}


def kept_programs() -> Path:
    """The folder of compiled programs that the workers share, and the next run uses.

    One per processor and version of jax: machine code of one processor need not run on another.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    about = [line for line in info.splitlines() if line.startswith(("model name", "flags"))][:2]
    machine = hashlib.sha256("".join(about).encode()).hexdigest()[:8] if about else platform.machine()
    return cache / "kvjax" / "tests" / f"{machine}-jax-{jax.__version__}"


#: To keep programs pays from the second run on a machine on. Within one run 2 of 100 are found, and to look for all and
#: to write those that took long is a twentieth of the time: `.ci/run` keeps none.
KEPT = os.environ.get("KVJAX_TEST_PROGRAMS", "kept") == "kept"
jax.config.update("jax_enable_compilation_cache", KEPT)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(kept_programs()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def find_shared() -> Path | None:
    """The shared data folder: $KVJAX_SHARED, or `shared` in or beside the project's root."""
    named = os.environ.get("KVJAX_SHARED")
    candidates = [Path(named)] if named else [ROOT / "shared", ROOT.parent / "shared"]
    return next((path for path in candidates if (path / "data").is_dir()), None)


#: Files that take long, the longest first: a worker that took one of them up last would keep the others waiting.
LONG = (
    "test_bench.py", "test_guides.py", "test_layer_loop.py", "test_parity.py", "test_models.py", "test_choices.py",
    "test_pretrained.py", "test_speculate.py", "test_runner.py", "test_products.py", "test_server.py",
    "test_forms.py", "test_prompt_reuse.py", "test_objectives.py", "test_make_plan.py", "test_docs.py",
    "test_sweep.py", "test_attention.py", "test_gradients.py", "test_slots.py", "test_train.py", "test_compare.py",
    "test_step_tpu.py", "test_formats.py", "test_contexts.py", "test_worked_examples.py", "test_prefill_tpu.py",
    "test_run.py", "test_offload.py", "test_heads.py", "test_tune.py", "test_smollm2.py", "test_host_memory.py",
    "test_matched.py", "test_scores.py", "test_storage_conformance.py", "test_generate_tpu.py",
    "test_conformance.py", "test_calibration.py", "test_documented_shapes.py", "test_decode_tpu.py",
    "test_generate.py", "test_prompt_replay.py", "test_public.py", "test_compiled.py", "test_install.py",
    "test_batch.py", "test_context.py", "test_task_runs.py", "test_readme.py", "test_selection_quality.py",
    "test_codecs.py", "test_gear.py", "test_blocks.py", "test_pairs.py", "test_finite.py", "test_kvarn.py",
    "test_compositions.py", "test_tiers.py", "test_coded.py", "test_used_slots.py", "test_joint.py",
    "test_prefix.py", "test_orbax.py", "test_segments.py", "test_quantize.py", "test_reference.py",
    "test_layers.py", "test_imports.py", "test_gated_attention.py", "test_parameters.py", "test_gates.py",
    "test_score_function.py", "test_sharding.py", "test_accelerator.py", "test_notebook.py",
)  # fmt: skip


#: Files that the run on the newest jax leaves out, by what they test: jax has no part in it, or other files call the
#: same functions of jax. A file that is not here has at least one test in that run.
OTHER_THAN_JAX = {
    "text in and out": ("checkpoint/test_chat.py", "checkpoint/test_tokenizer.py", "experiments/test_texts.py"),
    "names, settings and their errors": (
        "checkpoint/test_generation_config.py", "checkpoint/test_names.py", "experiments/test_config.py",
        "experiments/test_read_fraction.py", "experiments/test_spec_text.py", "experiments/test_sweep.py",
        "models/test_families.py", "models/test_shapes.py", "test_inputs.py", "test_install.py", "test_names.py",
        "policies/test_policies.py",
    ),
    "data made and scored in NumPy": (
        "experiments/test_mixture.py", "experiments/test_multiple_choice.py", "experiments/test_ngrams.py",
        "experiments/test_recall.py",
    ),
    "reports, pages and plots": (
        "analysis/test_plots.py", "analysis/test_viewer.py", "experiments/test_command.py",
        "experiments/test_html_report.py", "experiments/test_report.py", "storage/test_page.py", "test_docs.py",
        "test_guides.py", "test_notebook.py", "test_page_code.py", "test_readme.py", "test_site.py",
        "test_site_check.py", "test_structure.py",
    ),
    "processes and their memory": (
        "checkpoint/test_memory.py", "experiments/test_accelerator.py", "experiments/test_claims.py",
        "experiments/test_peers.py", "experiments/test_sharing.py",
    ),
    "what is made of generation and scores, which other files run": (
        "analysis/test_budgets.py", "analysis/test_compare.py", "analysis/test_gates.py",
        "analysis/test_selection_quality.py", "analysis/test_submodular.py", "contexts/test_choices.py",
        "experiments/test_after_prompt.py",
        "experiments/test_batch.py", "experiments/test_bench.py", "experiments/test_conversations.py",
        "experiments/test_measure.py", "experiments/test_run.py", "experiments/test_tune.py",
        "generation/test_score_continuation.py", "generation/test_text.py",
        "laws/test_large_numbers.py", "laws/test_worked_examples.py", "lm_eval/test_runner.py",
        "lm_eval/test_stops.py", "models/test_stories.py", "policies/test_heads.py", "policies/test_layers.py",
        "serve/test_clients.py", "serve/test_connections.py", "serve/test_hostile.py", "serve/test_prefix.py",
        "serve/test_server.py",
    ),
}  # fmt: skip


#: The line of a file with which all of its tests are marked.
WHOLLY_THOROUGH = "\npytestmark = pytest.mark.thorough"


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="the largest number of cases of a parametrised test")
    parser.addoption("--sampled", action="store_true", help="a sample of the cases of tests that are marked so")
    parser.addoption("--tests", type=int, help="the largest number of tests of a file, except those of kernels; "
                     "none of OTHER_THAN_JAX")  # fmt: skip


def spread(items: list, most: int) -> list:
    step = max(len(items) / max(most, 1), 1)
    return [items[int(i * step)] for i in range(min(most, len(items)))]


def pytest_ignore_collect(collection_path, config):
    """Files all of whose tests a run leaves out are not imported: some take seconds to list their cases."""
    if collection_path.suffix != ".py" or config.getoption("--tests") is None:
        return None
    name = collection_path.relative_to(ROOT / "tests").as_posix()
    other = any(name in names for names in OTHER_THAN_JAX.values())
    left_out = config.getoption("markexpr") == "not thorough" and WHOLLY_THOROUGH in collection_path.read_text()
    return other or left_out or None


def sampled(items: list) -> list:
    """Returns the items with a sample of the cases of each test that is marked `sampled`.

    The sample is the same in every run, so that what fails can be run again. A test of a sample of 0 runs only with all
    cases: whole commands and trainings, of whose parts there are tests that are quick.
    """
    groups = collections.defaultdict(list)
    for item in items:
        one = item.nodeid if item.get_closest_marker("sampled") is None else getattr(item, "originalname", item.name)
        groups[item.path, getattr(item, "cls", None), one].append(item)
    found = []
    for group in groups.values():
        mark = group[0].get_closest_marker("sampled")
        found += group if mark is None else spread(group, *mark.args)
    return found


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    """Keeps `--cases` of each test, all of one that only the newest jax can run, and of each file `--tests`."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    kept = sampled(items) if config.getoption("--sampled") else list(items)
    if config.getoption("--tests") is not None:
        left_out = {ROOT / "tests" / name for names in OTHER_THAN_JAX.values() for name in names}
        if missing := [path for path in left_out if not path.is_file()]:
            raise pytest.UsageError(f"OTHER_THAN_JAX names files that are not here: {missing}")
        kept = [item for item in kept if item.path not in left_out]
    for option, of in (("--cases", lambda item: getattr(item, "originalname", item.name)), ("--tests", lambda _: "")):
        most = config.getoption(option)
        if most is None:
            continue
        groups = collections.defaultdict(list)
        for item in kept:
            whole = item.get_closest_marker("newest") or (option == "--tests" and "kernels" in item.path.parts)
            one = item.nodeid if whole else of(item)
            groups[item.path, None if option == "--tests" else getattr(item, "cls", None), one].append(item)
        kept = [item for group in groups.values() for item in spread(group, most)]
    own = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in own])
    items[:] = [item for item in items if id(item) in own]


def pytest_collection_finish(session):
    """Objects of modules stay: the collector need not walk through them each time that traces fill its youngest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
    """Compiled programs hold memory maps, of which a process may have 65,530; without any the compiler crashes."""
    jax.config.update("jax_enable_compilation_cache", KEPT and not READ_PROGRAMS & set(request.node.path.parts))
    yield
    jax.clear_caches()
    gc.collect()


@contextlib.contextmanager
def native_code(target: str):
    """Products by kvjax's own code; a test is skipped where this custom call cannot be built."""
    if reason := native.load(target):
        pytest.skip(reason)
    before = products.setting()
    products.use("native")
    try:
        yield
    finally:
        products.use(before)


@pytest.fixture(scope="module")
def native_products():
    """Products by kvjax's own code, for the tests of a module."""
    with native_code(native.TARGET):
        yield


@pytest.fixture
def native_attention(monkeypatch):
    """Attention by kvjax's own code, over the slots in use of caches of any size."""
    monkeypatch.setattr(used_slots, "MIN_CACHE", 1)
    with native_code(native.ATTEND):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The shared data folder; a test that asks for it is skipped where there is none."""
    folder = find_shared()
    if folder is None:
        pytest.skip("no shared data folder: set KVJAX_SHARED to the folder that holds data/")
    return folder
