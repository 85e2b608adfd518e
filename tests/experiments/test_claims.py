"""Claims: one worker has a run, the claim of a dead one is taken over by one other, and nothing is left behind."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments.sweeps import claims
from experiments.sweeps.claims import Claims, Life
from tests.conftest import ROOT

#: Claims every name without a result, as long as there are some, and counts what it did.
WORKER = """
import os, pathlib, sys, time
from experiments.sweeps.claims import Claims
folder, names = pathlib.Path(sys.argv[1]), [f"{i:02}" for i in range(40)]
own, left = Claims(folder), set(names)
while left:
    for name in sorted(left):
        done = folder / f"{name}.done"
        claim = None if done.exists() else own.take(name)
        if claim is not None:
            with claim:
                if not done.exists():
                    done.touch()
                    (folder / f"{name}.{os.getpid()}.ran").touch()
        if done.exists():
            left.remove(name)
"""
#: Claims one name, says so, and does nothing more.
HOLDER = """
import pathlib, sys, time
from experiments.sweeps.claims import Claims
with Claims(pathlib.Path(sys.argv[1])).take("a"):
    print("taken", flush=True)
    time.sleep(60)
"""


def start(script, folder, **options):
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=ROOT, **options)


def test_each_name_is_run_by_one_of_many_processes(tmp_path):
    workers = [start(WORKER, tmp_path) for _ in range(4)]
    assert [worker.wait(timeout=60) for worker in workers] == [0] * 4
    assert len(list(tmp_path.glob("*.ran"))) == len(list(tmp_path.glob("*.done"))) == 40
    assert not list(tmp_path.glob(f"{claims.PREFIX}*"))


@pytest.fixture
def holder(tmp_path):
    process = start(HOLDER, tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.communicate()


def test_the_claim_of_a_killed_process_is_taken_over_by_one(tmp_path, holder):
    here = Claims(tmp_path)
    life, worker = here.holder("a")
    assert (life, worker.pid) == (Life.ALIVE, holder.pid)
    assert here.take("a") is None and here.take("b") is not None
    holder.send_signal(signal.SIGSTOP)  # it does nothing, and lives
    assert here.take("a") is None
    holder.kill()
    holder.wait()
    assert here.holder("a")[0] is Life.DEAD
    found, barrier = [], threading.Barrier(8)

    def take():
        own = Claims(tmp_path)
        barrier.wait()
        found.append(own.take("a"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (claim,) = [each for each in found if each is not None] or [here.take("a")]
    assert sorted(path.name for path in tmp_path.glob(".claim-a-*")) == [".claim-a-1", ".claim-a-2"]
    with claim:
        pass
    assert not list(tmp_path.glob(".claim-a-*"))


def test_where_processes_of_others_are_hidden(monkeypatch):
    me = claims.this_worker()
    assert claims.lives(me) and not claims.lives(dataclasses.replace(me, started="0"))
    monkeypatch.setattr(claims, "_status", lambda pid: None)
    assert claims.lives(dataclasses.replace(me, started="0"))
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not claims.lives(dataclasses.replace(me, pid=gone.pid))


def elsewhere(folder, beats=1, name="a", number=1):
    """A claim of a process of another machine."""
    owner = dataclasses.replace(claims.this_worker(), machine="another", host="node7")
    path = folder / f".claim-{name}-{number}"
    path.mkdir(exist_ok=True)
    (path / "token").write_text(f"{beats:012d} {json.dumps(dataclasses.asdict(owner))}\n")
    return path


def test_a_worker_on_another_machine_lives_while_it_gives_signs(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(claims.time, "monotonic", lambda: now)
    here = Claims(tmp_path, timeout=100)
    elsewhere(tmp_path)
    life, worker = here.holder("a")
    assert life is Life.UNKNOWN and str(worker).endswith("on node7")
    now += 60
    assert here.take("a") is None
    elsewhere(tmp_path, beats=2)
    assert here.holder("a")[0] is Life.ALIVE
    now += 99
    assert here.take("a") is None
    now += 1
    claim = here.take("a")
    assert claim is not None and (tmp_path / ".claim-a-2").is_dir()
    # What the slow one does when it goes on harms nobody.
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / ".claim-a-1" / "token").open("r+").close()
    assert Claims(tmp_path).take("a") is None
    claim.remove()
    assert not list(tmp_path.glob(".claim-*"))
    # One that was taken over removes nothing of its successors.
    claim.remove()
    later = here.take("a")
    claim.remove()
    assert here.holder("a")[0] is Life.ALIVE
    later.remove()


def test_a_claim_whose_owner_never_said_who_it_is(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(claims.time, "monotonic", lambda: now)
    (tmp_path / ".claim-a-1").mkdir()
    here = Claims(tmp_path, timeout=100)
    assert here.holder("a") == (Life.UNKNOWN, None)
    now += 100
    here.take("a").remove()
    assert not list(tmp_path.iterdir())


def test_two_that_saw_different_claims_do_not_both_have_one(tmp_path, monkeypatch):
    """One looks before a claim is given up, the other after: they make folders of different numbers."""
    here, seen = Claims(tmp_path), []
    listed = Claims._claims

    def late(self, name):
        seen.append(name)
        found = list(listed(self, name))
        if len(seen) == 1:  # just after the first look another one claims a higher number
            elsewhere(tmp_path, number=2)
        return found

    monkeypatch.setattr(Claims, "_claims", late)
    assert here.take("a") is None
    assert [path.name for path in tmp_path.iterdir()] == [".claim-a-2"]


def test_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT", 0.005)
    with Claims(tmp_path).take("a"):
        (path,) = tmp_path.glob(".claim-a-1/*")
        first, end = path.read_bytes(), time.monotonic() + 10
        while path.read_bytes() == first and time.monotonic() < end:
            time.sleep(0.005)
        assert path.read_bytes() != first
    assert not list(tmp_path.iterdir())
