"""One command for an accelerator: what it runs, resumes, survives and reports; most of it on parts that do nothing."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from absl import flags

from experiments import cli, results
from experiments.bench import __main__ as bench
from experiments.bench import accelerator, contestants, device, kernels, transfers
from experiments.bench.accelerator import children, marked, parts, report
from experiments.bench.accelerator.parts import Part
from experiments.programs.bench import TASKS
from kvjax.errors import ConfigError
from tests.conftest import ROOT

ENVIRONMENT = {
    "jax": "0.0", "jaxlib": "0.0", "kvjax": "0.1", "python": "3", "platform": "gpu", "device": "a GPU", "devices": 1,
    "platform_version": "cuda", "device_memory_gb": 80.0, "cpu": "a CPU", "cores": 2, "memory_gb": 16.0,
    "commit": "c0ffee", "uncommitted_changes": False,
}  # fmt: skip

#: In place of ``python -m experiments.bench``: notes that it ran, and ends in the way that its task's name says.
FAKE = """
import json, os, pathlib, sys, time
task, *rest = sys.argv[1:]
here = pathlib.Path(__file__).parent
with open(here / "ran", "a") as file:
    file.write(f"{task} {os.getpid()} {os.environ['JAX_PLATFORMS']}\\n")
if task.startswith("hang") and not (here / "quick").exists():
    time.sleep(60)
if task == "fail":
    sys.exit("Traceback: out of memory\\nRESOURCE_EXHAUSTED | 17 GB")
if task == "refuse":
    print("measured on a GPU", flush=True)
    print("error: it does not fit: it needs 27 GB", file=sys.stderr)
    sys.exit(2)
output = pathlib.Path(rest[-1].removeprefix("--output="))
made = "a CPU" if task == "elsewhere" else "a GPU"
output.write_text(json.dumps({"environment": {"device": made}, task: [{"work": task, "figure": 1.5, "none": None}]}))
"""


def fakes(*tasks: str, seconds: float = 30) -> list[Part]:
    return [Part(task, f"What {task} does", (task, "--flag=a b"), seconds) for task in tasks]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Runs fake parts; returns a function that makes a call, and one that lists what ran since the last time."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(accelerator, "BENCH", (str(tmp_path / "fake.py"),))
    monkeypatch.setattr(accelerator, "probe", lambda folder, tiny: ENVIRONMENT)
    monkeypatch.setattr(children, "GRACE", 0.2)
    for name in ("RESERVE", "MIN_SECONDS"):
        monkeypatch.setattr(accelerator, name, 0)

    def call(plan, minutes=8.0) -> int:
        monkeypatch.setattr(parts, "of", lambda platform, tiny: plan)
        values = flags.FlagValues()
        bench.define(values)
        cli.define_compilation_cache(values)
        values(["bench", f"--output={tmp_path / 'out'}", f"--minutes={minutes}"])
        return accelerator.run(values)

    def ran() -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            lines = (tmp_path / "ran").read_text().splitlines()
            (tmp_path / "ran").unlink()
            return [line.split()[0] for line in lines]
        return []

    return SimpleNamespace(call=call, ran=ran, out=tmp_path / "out", folder=tmp_path)


def outcome(fake, name: str) -> dict:
    return json.loads((fake.out / "parts" / f"{name}.json").read_text())


def test_parts_end_in_their_own_ways_and_only_what_is_missing_runs_again(fake, capsys):
    plan = [*fakes("first", "fail", "refuse"), *fakes("hang", seconds=0.5), *fakes("elsewhere", "last")]
    assert fake.call(plan) == 1
    assert fake.ran() == ["first", "fail", "refuse", "hang", "elsewhere", "last"]
    states = {part.name: outcome(fake, part.name)["state"] for part in plan}
    assert states == {
        "first": "measured", "fail": "failed", "refuse": "refused", "hang": "failed", "elsewhere": "failed",
        "last": "measured",
    }  # fmt: skip
    assert outcome(fake, "first")["rows"] == [{"work": "first", "figure": 1.5, "none": None}]
    assert outcome(fake, "first")["command"].endswith("fake.py first '--flag=a b'")
    assert outcome(fake, "refuse")["reason"] == "it does not fit: it needs 27 GB"
    assert "RESOURCE_EXHAUSTED" in outcome(fake, "fail")["reason"]
    assert outcome(fake, "hang")["reason"].startswith("it reached its time limit after ")
    text = (fake.out / "report.md").read_text()
    assert text.startswith("# 1 a GPU\n") and "commit c0ffee." in text and "--tiny" not in text
    assert "## fail\n\nWhat fail does." in text and "RESOURCE_EXHAUSTED | 17 GB" in text
    assert "| work   | figure   |\n|--------|----------|\n| first  | 1.50     |" in text
    assert "not measured: fail, hang, elsewhere; run the same command again" in capsys.readouterr().out

    # What was never tried comes before what failed.
    (fake.out / "parts" / "last.json").unlink()
    (fake.folder / "quick").touch()
    # With a limit that a process keeps on a busy machine too.
    plan = [part._replace(seconds=60) if part.name == "hang" else part for part in plan]
    assert fake.call(plan) == 1
    assert fake.ran() == ["last", "fail", "hang", "elsewhere"]
    assert outcome(fake, "hang")["state"] == "measured"
    assert fake.call(fakes("first", "last", "hang")) == 0 and not fake.ran()


def test_what_there_is_no_time_for_is_left_to_another_call(fake):
    plan = fakes("first", "hang", "last", seconds=60)
    assert fake.call(plan, minutes=0) == 1
    assert not fake.ran() and (fake.out / "report.md").read_text().count("Not measured: no time was left.") == 3
    assert fake.call(plan[:1]) == 0
    # The second part is cut short by the whole limit, and not by its own: it did not fail.
    assert fake.call(plan, minutes=1 / 60) == 1
    assert os.listdir(fake.out / "parts") == ["first.json"]
    fake.ran()
    (fake.folder / "quick").touch()
    assert fake.call(plan) == 0
    assert fake.ran() == ["hang", "last"]


def test_other_code_or_another_device_is_measured_again(fake, monkeypatch):
    plan = fakes("first")
    assert fake.call(plan) == 0
    monkeypatch.setattr(accelerator, "digest", lambda: "another")
    assert fake.call(plan) == 0
    monkeypatch.setattr(accelerator, "probe", lambda folder, tiny: ENVIRONMENT | {"jax": "0.1"})
    assert fake.call(plan) == 0 and fake.call(plan) == 0
    assert fake.ran() == ["first"] * 3


def test_a_digest_is_of_the_code(monkeypatch, tmp_path):
    monkeypatch.setattr(accelerator, "ROOT", tmp_path)
    seen = set()
    for name, text in (("kvjax/a.py", "1"), ("kvjax/a.py", "2"), ("tests/b.py", "2"), ("kvjax/products/n.cc", "")):
        results.write(tmp_path / name, text)
        seen.add(accelerator.digest())
    results.write(tmp_path / "experiments/measured/page.md", "figures")
    assert len(seen) == 4 and accelerator.digest() in seen


@pytest.mark.sampled(0)
def test_killed_in_the_middle_it_goes_on(fake):
    """Nothing tells the parent that it ends; its child ends too, and a second call has what was measured."""
    plan = fakes("first", "hang", "last")
    driver = f"""
import pathlib
from absl import flags
from jax._src import xla_bridge
from experiments import cli
from experiments.bench import __main__ as bench, accelerator
from experiments.bench.accelerator import parts
accelerator.BENCH = ({str(fake.folder / "fake.py")!r},)
def probe(folder, tiny):
    (folder.parent / "holds").write_text(str(xla_bridge.backends_are_initialized()))
    return {ENVIRONMENT!r}
accelerator.probe = probe
parts.of = lambda platform, tiny: [parts.Part(*each) for each in {[tuple(each) for each in plan]!r}]
values = flags.FlagValues()
bench.define(values)
cli.define_compilation_cache(values)
values(["bench", "--output={fake.out}"])
accelerator.run(values)
"""
    parent = subprocess.Popen([sys.executable, "-c", driver], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        began = wait_for(lambda: [line for line in text_of(fake.folder / "ran").splitlines() if "hang" in line])
        with pytest.raises(ConfigError, match="another process is writing to"):
            fake.call(plan)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert began[0].split()[2] == "cuda,cpu", "it must not run on another device"
    assert text_of(fake.folder / "holds") == "False", "the parent has taken the accelerator"
    child = int(began[0].split()[1])
    wait_for(lambda: not alive(child))
    fake.ran()
    (fake.folder / "quick").touch()
    assert fake.call(plan) == 0
    assert fake.ran() == ["hang", "last"]


def wait_for(condition, seconds: float = 120):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def text_of(path) -> str:
    return path.read_text() if path.exists() else ""


def alive(process: int) -> bool:
    """Whether it runs; one that has ended may wait for an init process that never asks."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_takes_what_it_left_behind_with_it(tmp_path):
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    assert children.run([sys.executable, "-c", child], 30, tmp_path / "log", os.environ, tmp_path) == 0
    left = int((tmp_path / "log").read_text())
    wait_for(lambda: not alive(left), 10)


@pytest.mark.parametrize(
    ("status", "platform", "message"),
    [(0, "cpu", "jax finds no accelerator, only a CPU"), (1, "gpu", "jax cannot find the device: no driver")],
)
def test_without_an_accelerator_it_says_so(monkeypatch, tmp_path, status, platform, message):
    def run(command, seconds, log, environment, folder):
        results.write(log, "no driver")
        results.write(tmp_path / "device.json", json.dumps({"platform": platform}))
        return status

    monkeypatch.setattr(children, "run", run)
    with pytest.raises(ConfigError, match=message):
        bench.main(["bench", "accelerator", f"--output={tmp_path}"])


def test_one_call_at_a_time(fake):
    fake.out.mkdir()
    with (fake.out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process is writing to .*out'; wait"):
            fake.call(fakes("first"))
    assert fake.call(fakes("first")) == 0


TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("name", ["(1, 2) a b", "[x]"])
def test_passes(name): pass
def test_fails(): raise ValueError("off by 3")
def test_skips(): pytest.skip("needs a device")
def test_shares(): assert os.environ["XLA_CLIENT_MEM_FRACTION"] == {share!r}
@pytest.mark.parametrize("how", ["the end"])
def test_ends(how):
    if {how!r} == "aborts": os.abort()
"""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("concurrent", [False, True])
def test_marked_tests_are_counted_however_they_end(monkeypatch, tmp_path, concurrent):
    monkeypatch.setattr(children, "GRACE", 0.2)
    for how in ("ends", "aborts"):
        (tmp_path / f"test_{how}.py").write_text(TESTS.format(how=how, share="0.300" if concurrent else "0.9"))
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1", marked.FRACTION: "0.9"}
    names = ["test_ends.py", "test_aborts.py", "test_none.py"]
    rows = marked.run(names, None, 360, tmp_path / "log.txt", environment, tmp_path, concurrent=concurrent)
    # One that hangs has written as much as one that aborts, and does not end.
    rows.append(marked.counts((tmp_path / "log.1.txt").read_text().partition("Fatal Python error")[0], None))
    counted = [(row["passed"], row["failed"], row["skipped"], row["stopped"]) for row in rows]
    assert counted == [(4, 1, 1, False), (3, 1, 1, False), (0, 0, 0, False), (3, 1, 1, True)]
    ended, aborted, none, hung = (row["notes"] for row in rows)
    assert ended == "test_ends.py::test_fails - ValueError: off by 3; skipped: needs a device"
    assert aborted == "ended with status -6, in test_aborts.py::test_ends[the end]"
    assert hung == "stopped, as its time was up, in test_aborts.py::test_ends[the end]"
    assert "ended with status 4: " in none and "test_none.py" in none


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
@pytest.mark.parametrize("tiny", [False, True])
def test_every_command_line_is_one(platform, tiny):
    plan = parts.of(platform, tiny)
    assert sum(part.seconds for part in plan) < 2 * 60 * accelerator.MINUTES
    assert {part.name for part in plan} == {figure.part for figure in report.FIGURES}
    for part in plan:
        if part.command[0] == "tests":
            for target in part.command[1:]:
                path, *names = target.split("::")
                assert all(f" {name}" in (ROOT / path).read_text() for name in names), target
            continue
        values = flags.FlagValues()
        bench.define(values)
        (task,) = values(["bench", *part.command])[1:]
        assert task in TASKS and values.tiny == tiny
        assert values.dtype == ("float32" if tiny or task == "transfers" else "bfloat16")


@pytest.mark.sampled(0)
def test_every_part_in_the_smallest_sizes(small, monkeypatch, tmp_path):
    """In this process, on one layer; TPU kernels interpreted. The report has a figure for every part."""
    for module, name in ((contestants, "READ_BYTES"), (transfers, "SIZES"), (device, "SQUARE")):
        value = getattr(module, name)
        monkeypatch.setattr(module, name, dict(value) if isinstance(value, dict) else value)
    done = {}
    for part in (plan := parts.of("cpu", tiny=True)):
        rows = [{"tests": "a file", "passed": 2, "failed": 1, "skipped": 0, "stopped": False, "notes": None}]
        if part.command[0] != "tests":
            output = tmp_path / f"{part.name}.json"
            assert bench.main(["bench", *part.command, f"--output={output}"]) == 0
            rows = json.loads(output.read_text())[part.command[0]]
        done[part.name] = {"state": "measured", "reason": None, "command": "", "seconds": 1.0, "rows": rows}
    (step,) = (row for row in done["step"]["rows"] if row["implementation"] == "pallas_tpu")
    assert step["kernel"] == "step/pallas_tpu" and step["% of a copy"] > 0
    text = report.write(ENVIRONMENT | {"platform": "cpu"}, plan, done)
    assert "**With --tiny: " in text and "| 2 passed, 1 failed, 0 skipped " in text
    table = report.summary(ENVIRONMENT | {"platform": "cpu"}, done).splitlines()[2:]
    cells = {figure.part: line.split("|") for figure, line in zip(report.FIGURES, table, strict=True)}
    assert all(each[3].strip() and each[4].strip() == f"parts/{part}.json" for part, each in cells.items())
    assert {"int8", "int4", "fp8"} <= set(cells["storages"][3].split())
    assert "quest, on host" in cells["host"][3] and "full, on host" in cells["host"][3]


@pytest.mark.sampled(0)
def test_a_part_in_a_process_of_its_own(monkeypatch, tmp_path):
    """The command as a user gives it, with the real question what device there is, and one real part."""
    every = parts.of
    # With as much time as it wants: other work may have the processor.
    monkeypatch.setattr(
        parts, "of", lambda *given: [part._replace(seconds=300) for part in every(*given) if part.name == "transfers"]
    )
    assert bench.main(["bench", "accelerator", "--tiny", f"--output={tmp_path}", "--compilation_cache=none"]) == 0
    made = json.loads((tmp_path / "parts" / "transfers.json").read_text())
    assert made["state"] == "measured" and len(made["rows"]) == 4 and made["about"]["platform"] == "cpu"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "device.json", "logs", "parts", "report.md"]


def kernel_row(share: float | None, **more) -> dict:
    own = {"statistics": kernels.STEP, "implementation": "pallas_gpu", "kernel": "step/pallas_gpu", "GB/s": 2400.0}
    return own | {"% of a copy": share, "not run because": None} | more


@pytest.mark.parametrize(
    ("platform", "share", "shown"),
    [("gpu", 87.0, "**87 % (step/pallas_gpu, 2,400 GB/s)**"), ("gpu", 91.0, "91 % (step/pallas_gpu, 2,400 GB/s)"),
     ("tpu", 87.0, "87 % (step/pallas_tpu, 2,400 GB/s)")],
)  # fmt: skip
def test_what_is_short_of_what_is_wanted_is_bold(platform, share, shown):
    name = f"pallas_{platform}"
    rows = [kernel_row(99.0, implementation="xla"), kernel_row(share, implementation=name, kernel=f"step/{name}")]
    done = {"step": {"state": "measured", "rows": rows}}
    cells = report.summary(ENVIRONMENT | {"platform": platform}, done).splitlines()[2].split("|")
    assert cells[2].strip() == ("90 %" if platform == "gpu" else "86 %") and cells[3].strip() == shown


def test_without_a_figure_the_table_says_why():
    refused = kernel_row(None, **{"not run because": "ValueError: needs a | Hopper GPU"})
    done = {
        "step": {"state": "measured", "rows": [kernel_row(9.0, implementation="xla"), refused]},
        "opt-6.7b": {"state": "refused", "rows": [], "reason": "it does not fit"},
    }
    lines = report.summary(ENVIRONMENT, done).splitlines()[2:]
    cells = {figure.part: line.split("|")[3:5] for figure, line in zip(report.FIGURES, lines, strict=True)}
    assert [each.strip() for each in cells["step"]] == ["", "ValueError: needs a / Hopper GPU"]
    assert [each.strip() for each in cells["opt-6.7b"]] == ["", "refused: it does not fit"]
    assert [each.strip() for each in cells["prefill"]] == ["", report.NOT_RUN]
