"""Everything that only a GPU or a TPU can say: one command, its parts in child processes, and a report.

This process must not touch the accelerator: on a GPU a part would find its memory taken, on a TPU the chip itself.
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from experiments import cli, results
from experiments.bench.accelerator import children, marked, report
from experiments.bench.accelerator import parts as known_parts
from experiments.bench.accelerator.parts import Part
from experiments.bench.names import MINUTES
from experiments.runs import identity
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("kvjax", "experiments", "tests")  # folders whose code a result depends on
FOLDER = "results/accelerator"  # unless --output says otherwise
PROBE_SECONDS = 90
BENCH = ("-m", "experiments.bench")
RESERVE = 5  # seconds that are left for a child to end and for the report
MIN_SECONDS = 10  # seconds: with less, no part is begun
SHOWN = 2000  # characters of an error that are kept
#: A process that must run on the accelerator does not fall back to the CPU.
PLATFORMS = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}
MEASURED, REFUSED, FAILED = "measured", "refused", "failed"
Outcome = JsonObject


def run(values: flags.FlagValues) -> int:
    """Runs the parts that a folder does not have yet, and writes its report.

    Returns:
      0 if every part has been measured, or refused for a reason that another call would not change; else 1.

    Raises:
      ConfigError: no accelerator, or a folder that cannot be written or that another call is writing.
    """
    until = time.monotonic() + 60 * values.minutes - RESERVE
    # An installed package has no place for results beside it.
    folder = Path(values.output or (ROOT if (ROOT / ".git").exists() else Path()) / FOLDER).absolute()
    results.make_folder(folder)
    with _alone(folder):
        environment = probe(folder, values.tiny)
        about = {name: environment[name] for name in ("jax", "platform", "device", "devices")}
        about["sources"] = digest()
        plan = known_parts.of(environment["platform"], values.tiny)
        print(f"{environment['devices']} {environment['device']}, jax {environment['jax']}; results in {folder}")

        def outcomes() -> dict[str, Outcome]:
            read = {part.name: results.read_json(_file(folder, part)) for part in plan}
            return {
                part.name: read[part.name]
                for part in plan
                if (read[part.name] or {}).get("about") == about | {"command": list(part.command)}
            }

        had = outcomes()
        # What failed is tried again after what has not been tried.
        left = [part for part in plan if part.name not in had]
        left += [part for part in plan if had.get(part.name, {}).get("state") == FAILED]
        scale = max(values.minutes / MINUTES, 1)
        for part in left:
            remaining = until - time.monotonic()
            if remaining < MIN_SECONDS:
                break
            print(f"{part.name}: {part.about} ...", flush=True)
            outcome = measure(part, min(scale * part.seconds, remaining), folder, environment, values)
            if outcome["state"] == FAILED and outcome["stopped"] and remaining < scale * part.seconds:
                print("  time limit reached")
                break
            outcome["about"] = about | {"command": list(part.command)}
            results.write(_file(folder, part), results.to_json(outcome))
            print(f"  {outcome['state']} in {outcome['seconds']:.0f} s", flush=True)
            if outcome["reason"]:
                print("  " + report.brief(outcome))
            results.write(folder / "report.md", report.write(environment, plan, outcomes()))
        done = outcomes()
        results.write(folder / "report.md", report.write(environment, plan, done))
    print(report.summary(environment, done), f"report: {folder / 'report.md'}", sep="\n\n")
    missing = [part.name for part in plan if done.get(part.name, {}).get("state") not in (MEASURED, REFUSED)]
    if missing:
        print(f"not measured: {', '.join(missing)}; run the same command again to measure these")
    return int(bool(missing))


def probe(folder: Path, tiny: bool) -> JsonObject:
    """Describes the accelerator, by a child process.

    Raises:
      ConfigError: jax sees none, or cannot start; without `tiny`.
    """
    answer, log = folder / "device.json", folder / "logs" / "probe.txt"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.bench.accelerator.probe", str(answer)]
    extra = {"JAX_PLATFORMS": "cpu"} if tiny else {}
    status = children.run(command, PROBE_SECONDS, log, _environment(extra), ROOT)
    found: JsonObject | None = results.read_json(answer)
    if status != 0 or found is None:
        raise ConfigError(f"jax cannot find the device: {_tail(log, 400)} (full log: {log})")
    if found["platform"] == "cpu" and not tiny:
        raise ConfigError(
            "jax finds no accelerator, only a CPU; --tiny checks that every part runs, with small arrays."
        )
    return found


def measure(part: Part, seconds: float, folder: Path, environment: JsonObject, values: flags.FlagValues) -> Outcome:
    """Runs one part, and says how it ended: its rows, or why there are none."""
    log, rows_file = folder / "logs" / f"{part.name}.txt", folder / f".unfinished-{part.name}.json"
    platform: str = environment["platform"]
    where = "rocm,cpu" if "rocm" in environment["platform_version"].lower() else PLATFORMS.get(platform, platform)
    variables = _environment({"JAX_PLATFORMS": where})
    outcome: Outcome = {"state": MEASURED, "reason": None, "stopped": False, "command": "", "rows": []}
    began = time.monotonic()
    if part.command[0] == "tests":
        marker = None if platform == "tpu" else "gpu"
        outcome["rows"] = marked.run(
            part.command[1:], marker, seconds, log, variables, ROOT, concurrent=platform == "gpu"
        )
        outcome["command"] = " ".join(["pytest", *(["-m", marker] if marker else []), *part.command[1:]])
        if any(row["stopped"] for row in outcome["rows"]):
            outcome |= {"state": FAILED, "stopped": True, "reason": "the tests were stopped at their time limit"}
        return outcome | {"seconds": time.monotonic() - began}
    rows_file.unlink(missing_ok=True)
    command = [*BENCH, *part.command]
    outcome["command"] = " ".join(["python", *(f"'{each}'" if " " in each else each for each in command)])
    if (cache := values[cli.CACHE_FLAG].value) is not None:
        command.append(f"--{cli.CACHE_FLAG}={cache}")
    status = children.run([sys.executable, *command, f"--output={rows_file}"], seconds, log, variables, ROOT)
    made: JsonObject | None = results.read_json(rows_file)
    rows_file.unlink(missing_ok=True)
    outcome |= {"seconds": time.monotonic() - began, "stopped": status is None}
    if status == 0 and made is not None and made["environment"]["device"] == environment["device"]:
        return outcome | {"rows": made[part.command[0]], "environment": made["environment"]}
    if status == cli.USAGE_ERROR:
        reason = _tail(log, SHOWN).rpartition("error: ")[2]
        return outcome | {"state": REFUSED, "reason": reason}
    ending = "it reached its time limit" if status is None else f"it exited with status {status}"
    return outcome | {"state": FAILED, "reason": f"{ending} after {outcome['seconds']:.0f} s:\n{_tail(log, SHOWN)}"}


def digest() -> str:
    """A number for the code of this checkout, whether it is committed or not."""
    return identity.of_sources([ROOT / folder for folder in SOURCES])


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a folder against another call."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is writing to {str(folder)!r}; wait until it has finished.") from None
        yield


def _environment(extra: dict[str, str]) -> dict[str, str]:
    """A child's variables: those of this process, and most of a GPU's memory."""
    own = dict(os.environ) | {"PYTHONUNBUFFERED": "1"} | extra
    own.setdefault(marked.FRACTION, own.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"))
    return own


def _file(folder: Path, part: Part) -> Path:
    return folder / "parts" / f"{part.name}.json"


def _tail(log: Path, size: int) -> str:
    """The end of what a child wrote."""
    return log.read_text(errors="replace").strip()[-size:]
