"""Sweeps that several workers share: each run once, none lost, one report; and the recipes of docs/clusters.md."""

import builtins
import os
import re
import shlex
import subprocess
import threading
import time
import types

import pytest
import yaml

import experiments.sweep
from experiments import cli, fields
from experiments.config import ExperimentConfig
from experiments.programs import sweep
from experiments.runs import identity
from experiments.sweeps import claims, sharing
from experiments.sweeps.sharing import Shard, parse_shard
from kvjax.errors import ConfigError
from kvjax.parallel import distributed
from kvjax.products import native
from tests.conftest import ROOT
from tests.experiments.test_claims import elsewhere

PAGE = (ROOT / "docs" / "clusters.md").read_text()
AXES = [("policy.budget", [2, 3, 4, 5]), ("policy.name", ["h2o", "window", "tova"])]
FAILS = (3, "tova")


@pytest.fixture
def runs(monkeypatch):
    """The runs that were made, each of which takes a moment and measures nothing."""
    made = []

    def attempt(session, config, swept, contents, capacity):
        point = config.policy.budget, config.policy.name
        made.append(point)
        time.sleep(0.002)
        row = {"policy": config.policy.name, "perplexity": 3.0, "budget": point[0], "kv_bytes": 1, "full_kv_bytes": 4,
               "slots": 8, "least_slots": 8, "keeps_all": False, "agreement": 0.5, "same_until": 2.0, "new_tokens": 4,
               "prefill_tokens_per_second": 1.0, "decode_tokens_per_second": None, "recall": {}}  # fmt: skip
        about = {"config": fields.to_dict(config), "environment": {"code": identity.code()}, "swept": swept}
        if point == FAILS:
            return about | {"status": "failed", "error": "out of luck"}
        return about | {"status": "ok", "model": "a model", "text": "a text", "rows": [row]}

    monkeypatch.setattr(sweep, "_attempt", attempt)
    return made


def test_workers_share_the_runs(small, runs):
    found = []

    def work():
        found.append(sweep.sweep(small, AXES, progress=False)[1])

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(runs) == len(set(runs)) == 12
    # The last one has them all.
    statuses = [{result["status"] for result in each} for each in found]
    assert {"ok", "failed"} in statuses
    folder, again = sweep.sweep(small, AXES, progress=False)
    assert [result["status"] for result in again].count("ok") == 11
    # Only what failed before the call was tried again, once.
    assert runs[12:] == [FAILS]
    assert not [path for path in folder.iterdir() if path.suffix != ".json"]


def test_results_are_of_the_c_code_too():
    assert {path.suffix for path in (*native.SOURCES, *native.HEADERS)} < set(identity.CODE)


def test_a_worker_leaves_what_others_have(small, runs, monkeypatch, capsys):
    folder = sweep.Path(small.output) / "small-sweep"
    folder.mkdir(parents=True)
    name = identity.digest(sweep.product(small, AXES[:1])[1][1])
    elsewhere(folder, name=name)
    beats = iter(range(2, 100))
    asleep = types.SimpleNamespace(sleep=lambda _: elsewhere(folder, next(beats), name=name))
    monkeypatch.setattr(sharing, "time", asleep)
    monkeypatch.setattr(builtins, "small", small, raising=False)
    config = folder.parent.parent / "mine.py"
    config.write_text("import builtins\ndef get_config():\n    return builtins.small\n")
    command = ["sweep", f"--config={config}", "--sweep=policy.budget=2,3,4,5"]
    assert experiments.sweep.main(command) == 0
    out, err = capsys.readouterr()
    assert "3 of 4 runs done, 1 left to other workers" in out and "on node7, or for 180 s without a sign of life" in err
    assert [budget for budget, _ in runs] == [2, 4, 5] and not (folder / "sweep.md").exists()

    # One that waits takes over what the other leaves, and writes the report.
    asleep.sleep = lambda _: sweep.results.shutil.rmtree(folder / f".claim-{name}-1")
    assert experiments.sweep.main([*command, "--wait"]) == 0
    assert [budget for budget, _ in runs] == [2, 4, 5, 3] and (folder / "sweep.md").is_file()


def test_a_result_of_a_worker_that_was_believed_dead_counts(small, runs, tmp_path):
    folder = sharing.Folder(tmp_path, ["a.json"], rerun=True)
    shared = sharing.Sharing(folder, shard=None, wait=False)

    def run():
        sharing.results.write(tmp_path / "a.json", '{"status": "ok", "by": "another"}')
        return {"status": "ok", "by": "this one"}

    assert shared.attempt(0, "a.json", run)["by"] == "another"
    assert sharing.results.read_json(tmp_path / "a.json")["by"] == "another"


def test_shards(small, runs):
    assert parse_shard("2/8") == Shard(2, 8)
    for wrong in ("0/2", "3/2", "1", "1/", "a/b", "1/0"):
        with pytest.raises(ConfigError, match="as in --shard=2/8"):
            parse_shard(wrong)
    axes = AXES[:1]
    _, first = sweep.sweep(small, axes, shard=Shard(1, 3), progress=False)
    assert [result["status"] for result in first] == ["ok", "missing", "missing", "ok"]
    sweep.sweep(small, axes, shard=Shard(2, 3), progress=False)
    _, last = sweep.sweep(small, axes, shard=Shard(3, 3), progress=False)
    assert [result["status"] for result in last] == ["ok"] * 4
    assert [budget for budget, _ in runs] == [2, 5, 3, 4]
    # Everything anew is everything of the shard.
    _, again = sweep.sweep(small, axes, shard=Shard(1, 3), rerun=True, progress=False)
    assert [budget for budget, _ in runs[4:]] == [2, 5] and [result["status"] for result in again] == ["ok"] * 4


# The page.

SBATCH = r"""#!/bin/bash
# A stub: runs every task of a job's array at the same time, each in the environment that SLURM gives it.
count=$(sed -n 's/^#SBATCH --array=1-\([0-9]*\)$/\1/p' "$1")
for task in $(seq "$count"); do
  SLURM_SUBMIT_DIR="$PWD" SLURM_ARRAY_TASK_ID="$task" SLURM_ARRAY_TASK_COUNT="$count" SLURM_PROCID=0 bash "$1" &
done
wait
"""
PYTHON = '#!/bin/bash\nprintf "%s\\0" "$@" >"call-$SLURM_ARRAY_TASK_ID"\n'


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shards", [False, True])
def test_slurm(small, runs, tmp_path, monkeypatch, shards):
    """The script, given to sbatch, starts workers that do everything between them."""
    (script,) = [block for block in blocks("bash") if "#SBATCH" in block]
    script = script.replace("--config=h2o_tiny --config.output=results", "--config=mine.py")
    if shards:
        (option,) = re.findall(r"`(--shard=\"\$SLURM[^`]*)`", PAGE)
        script = script.replace("--config=mine.py", f"--config=mine.py {option}")
    for name, text in {
        "bin/sbatch": SBATCH,
        "bin/srun": '#!/bin/bash\nexec "$@"\n',
        ".venv/bin/python": PYTHON,
    }.items():
        executable(tmp_path / name, text)
    (tmp_path / "sweep.sh").write_text(script)
    (submit,) = [block for block in blocks("bash") if block.startswith("sbatch ")]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    subprocess.run(submit, shell=True, check=True, cwd=tmp_path, env=os.environ | {"PATH": path}, timeout=60)
    calls = [each.read_text().split("\0")[:-1] for each in sorted(tmp_path.glob("call-*"))]
    assert len(calls) == 8 and all(call[:2] == ["-m", "experiments.sweep"] for call in calls)

    (tmp_path / "mine.py").write_text("import builtins\ndef get_config():\n    return builtins.small\n")
    monkeypatch.setattr(builtins, "small", small, raising=False)
    monkeypatch.chdir(tmp_path)
    small.policy.budget = 4
    assert {experiments.sweep.main(["sweep", *call[2:]]) for call in calls} == {0}
    assert sorted(runs) == sorted((budget, name) for budget in (0.1, 0.2, 0.5) for name in ("h2o", "window"))
    assert (sweep.Path(small.output) / "small-sweep" / "sweep.md").is_file()


def test_every_command_of_the_page_is_one(monkeypatch):
    """Each names a config, fields and flags that there are."""
    monkeypatch.setattr(sweep, "sweep", lambda base, axes, **_: (len(sweep.product(base, axes)), []))
    asked = []
    monkeypatch.setattr(sweep, "cells", lambda found: [])
    monkeypatch.setattr(cli, "prepare_programs", lambda values: None)
    monkeypatch.setattr(sweep, "write", lambda folder, base, found, command: asked.append(command))
    text = PAGE.replace("\\\n", " ")
    commands = re.findall(r"-m experiments\.sweep (.*)", text) + re.findall(
        r'^    "(--config=.*)"$', text, re.MULTILINE
    )
    for command in commands:
        plain = re.sub(r'--shard="\$[^"]*"', "--shard=2/8", command).split('"')[0].rstrip("',")
        if plain.startswith("--config"):
            assert experiments.sweep.main(["sweep", *shlex.split(plain)]) == 0
    assert len(asked) == 7


def test_commands_of_several_processes(monkeypatch):
    joined, text = [], PAGE.replace("\\\n", " ")
    monkeypatch.setattr(distributed, "initialize", lambda *given: joined.append(given))
    monkeypatch.setattr(cli, "prepare_programs", lambda values: None)
    commands = re.findall(r"-m experiments\.run (.*)", text)
    meshes = [cli.parse(["run", *shlex.split(each.strip(' "&'))], about="")[0].mesh for each in commands]
    assert meshes == ["data:2,model:8"] * 2 + ["data:2"] * 2
    assert joined == [(None, None, None)] * 2 + [("localhost:1234", 2, number) for number in (1, 0)]
    # Without a flag nothing is joined.
    cli.parse(["run", "--config=h2o_tiny"], about="")
    assert len(joined) == 4


def test_the_page():
    for document in map(yaml.safe_load, blocks("yaml")):
        assert document.get("kind") == "Job" or set(document) >= {"run", "num_nodes", "resources"}
    for block in blocks("python"):
        compile(block, "docs/clusters.md", "exec")
    assert "docs/clusters.md" in (ROOT / "README.md").read_text()
    assert f"{claims.TIMEOUT:.0f} seconds" in PAGE and claims.HEARTBEAT == 10
    assert ExperimentConfig().output == "results"
