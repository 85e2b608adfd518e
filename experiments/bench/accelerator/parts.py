"""Parts of a run on an accelerator, in order of worth: command lines of the benchmarks, and the marked tests."""

from typing import NamedTuple

KERNELS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
SLOTS, PAIRS = 2048, 1024  # of the decode kernel's shape: slots, and batch times heads

HALF = "--dtype=bfloat16"
LARGE = ("decode", "--fill", "--against=none", "--policies=h2o")
LARGE_SHAPE = ("--shape=opt-6.7b", "--batch=64", "--context=2048", "--tokens=128", "--rounds=3", HALF)
LONG = ("--batch=8", "--context=16384", "--tokens=32", "--rounds=3", HALF)
ON_HOST = ("--caches=quest, on host", "--caches=full, on host")
CODED = tuple(f"--caches=h2o, {storage}" for storage in ("int8", "int4", "fp8"))
#: Sizes of every command with --tiny.
SMALL = ("--tiny", "--shape=tiny", "--tokens=4", "--rounds=1")
SMALL_STEP = ("--batch=2", "--context=20")

GPU_TESTS = tuple(f"tests/kernels/test_{op}_gpu.py" for op in ("decode", "step", "prefill"))
TPU_TESTS = (
    "tests/kernels/test_decode_tpu.py::TestDecode",
    "tests/kernels/test_step_tpu.py::test_a_step_over_several_tiles_is_that_of_the_cache",
    "tests/kernels/test_step_tpu.py::test_a_step_is_that_of_the_cache",
    "tests/kernels/test_prefill_tpu.py::TestPrefill",
)


class Part(NamedTuple):
    """One command.

    Attributes:
      name: of its files.
      about: one line for the report.
      command: arguments of ``python -m experiments.bench``; of a list of tests, ``tests`` and what pytest is given,
        each in a process of its own.
      seconds: that it may take of eight minutes.
    """

    name: str
    about: str
    command: tuple[str, ...]
    seconds: float


def of(platform: str, tiny: bool) -> list[Part]:
    """The parts for a platform; with `tiny`, the same ones in sizes that only show that they run."""
    implementation = KERNELS.get(platform, "xla")
    own = f"--implementation={implementation}"
    # On a CPU the kernels for TPUs are interpreted.
    interpreted = ("--implementation=pallas_tpu", "--interpret=tpu", *SMALL)
    tests = TPU_TESTS if platform == "tpu" else GPU_TESTS

    def part(name: str, about: str, seconds: float, command: tuple[str, ...], small: tuple[str, ...]) -> Part:
        return Part(name, about, small if tiny else command, seconds)

    return [
        part("device", "What the device does at most", 30, ("device", HALF), ("device", *SMALL)),
        part(
            "step", "A layer's whole decoding step: attention, statistics and the victim", 60,
            ("kernels", "--kinds=step", f"--grid={PAIRS}x{SLOTS}x128", HALF, own),
            ("kernels", "--kinds=step", "--grid=4x16x8", *interpreted),
        ),
        part(
            "opt-6.7b", "A decoding step of OPT-6.7B's shape, batch 64, 2,048 + 2,048 tokens, h2o at 20 %", 110,
            (*LARGE, *LARGE_SHAPE, own), (*LARGE, *SMALL_STEP, *SMALL),
        ),
        part(
            "attention", "Decode attention alone, with statistics and without", 60,
            ("kernels", "--kinds=mass,none", f"--grid={PAIRS}x{SLOTS}x128", HALF, own),
            ("kernels", "--kinds=mass,none", "--grid=4x16x8", *interpreted),
        ),
        part(
            "tests", "The kernels' tests, run by the device", 150,
            ("tests", *tests), ("tests", GPU_TESTS[0]),
        ),
        part(
            "prefill", "Prompts of OPT-1.3B's shape, as a share of the device's FLOPs", 75,
            ("prefill", "--against=none", "--shape=opt-1.3b", "--batch=8", "--context=2048", HALF, own),
            ("prefill", "--against=none", *SMALL_STEP, *SMALL),
        ),
        part(
            "storages", "Storages, OPT-125M's shape, batch 32, 1,024 slots", 80,
            ("storages", *CODED, "--batch=32", "--slots=1024", "--tokens=64", "--rounds=3", HALF),
            ("storages", *CODED, "--slots=64", *SMALL),
        ),
        part("transfers", "The link between device and host", 25, ("transfers",), ("transfers", *SMALL)),
        part(
            "selections", "A selection of a full cache, OPT-125M's shape, batch 8, 16,384 tokens", 50,
            ("selections", "--caches=quest", *LONG), ("selections", "--caches=quest", "--context=64", *SMALL),
        ),
        part(
            "host", "The same caches in host memory, read whole and by a selection", 70,
            ("selections", *ON_HOST, *LONG), ("selections", *ON_HOST, "--context=64", *SMALL),
        ),
        part(
            "opt-6.7b-xla", "The same step of OPT-6.7B's shape by XLA alone", 90,
            (*LARGE, *LARGE_SHAPE, "--implementation=xla"),
            (*LARGE, *SMALL_STEP, *SMALL, "--implementation=xla"),
        ),
    ]  # fmt: skip
