"""The benchmark of first use: what its processes find, what they print, and what becomes of it."""

import json
import shutil

import pytest

from experiments.bench import first_call, first_use
from experiments.bench.first_call import Call
from experiments.bench.first_use import Process, Sizes, Taken
from kvjax.errors import ConfigError
from kvjax.products import build

# It computes for longer than the unit in which systems count a process's CPU time.
FIND = "import os, pathlib; sum(range(3_000_000)); home = pathlib.Path(os.environ['XDG_CACHE_HOME']); "


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_the_library_is_built_for_all_others(tmp_path, monkeypatch):
    monkeypatch.delenv("KVJAX_PRODUCTS", raising=False)
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    # Without optimisations: nothing is computed with what is built here, and with them it takes half a minute.
    plain = tmp_path / "plain"
    plain.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    plain.chmod(0o755)
    monkeypatch.setenv("CXX", str(plain))
    plan = first_use.processes(("full",), {}, [], Sizes())
    first_use.measure(plan[0], tmp_path)
    assert len(list((tmp_path / first_use.LIBRARY / "kvjax/native").glob("*.so"))) == 3


def test_processes_find_the_library_and_what_the_first_of_their_name_kept(tmp_path):
    build = FIND + "(home / 'kvjax/native').mkdir(parents=True); (home / 'kvjax/native/a.so').touch()"
    keep = FIND + "assert (home / 'kvjax/native/a.so').exists(); (home / 'kept').touch()"
    alone = FIND + "assert (home / 'kvjax/native/a.so').exists() and not (home / 'kept').exists()"
    again = FIND + "assert (home / 'kept').exists()"
    plan = [
        Process("build", "kvjax", ("-c", build), first_use.LIBRARY),
        Process("first", "h2o", ("-c", keep), "h2o"),
        Process("first", "full", ("-c", alone)),
        Process("second", "h2o", ("-c", again), "h2o"),
    ]
    for process in plan:
        taken = first_use.measure(process, tmp_path)
        assert taken.wall > 0 and taken.cpu > 0 and taken.calls == []
    script = "import sys; print('no model', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ConfigError, match="first, full: it exited with status 3: no model"):
        first_use.measure(Process("first", "full", ("-c", script)), tmp_path)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("policy", ["full", "razor_attention"])
def test_a_process_says_what_its_runs_took(policy, capsys):
    first_call.main(Call("kvjax", "kvjax-tiny", policy, (6, 7), prompt=8, tokens=2, again=True))
    (first, second) = json.loads(capsys.readouterr().out)
    assert all(cpu > 0 and wall > 0 for cpu, wall in (first, second))
    # Nothing is compiled the second time.
    assert second[1] < first[1]
    first_call.main(Call("kvjax", "kvjax-tiny", "h2o", (6,), prompt=8, tokens=2, scores=True))
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_rows_are_medians_and_compilation_is_what_the_second_time_did_without():
    process = Process("eight budgets", "h2o", ())
    taken = [Taken(9, 8, [(7, 6), (2, 1)]), Taken(5, 4, [(4, 3), (1, 1)]), Taken(6, 5, [(5, 4), (1, 1)])]
    assert first_use.row(process, taken) == {
        "work": "eight budgets", "side": "h2o", "cpu s": 5, "wall s": 4, "of it compiling": 4, "process cpu s": 6,
        "process wall s": 5,
    }  # fmt: skip
    alone = first_use.row(process, [Taken(2, 1, [])])
    assert (alone["cpu s"], alone["of it compiling"], alone["process cpu s"]) == (None, None, 2)


def test_every_work_is_there_once_and_the_library_comes_first():
    plan = first_use.processes(
        ("full", "h2o"), {first_use.TINY: first_use.TINY, "6 layers": "/a"}, ["transformers", "kvpress"], Sizes(),
        {"kvpress": "/b/python"},
    )  # fmt: skip
    assert {each.side: each.python for each in plan if each.python} == {"kvpress": "/b/python"}
    assert len(set(plan)) == len(plan) and plan[0].cache == first_use.LIBRARY
    kept = [process for process in plan if process.cache not in (None, first_use.LIBRARY)]
    assert [process.work.split(", ")[1] for process in kept] == [
        "first generate",
        "first generate",
        "second process",
        "second process",
        "first generate",
        "second process",
    ]
    peers = {"transformers", "kvpress"}
    assert {process.side for process in plan} == {"kvjax", "jax", "experiments.run", "full", "h2o"} | peers
