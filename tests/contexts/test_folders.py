"""Contexts in folders: to the bit, written behind, and refused where they belong to something else."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, storage
from kvjax.cache.layer_stack import stacked_runs
from kvjax.contexts import folders, spec_text
from kvjax.errors import CheckpointError
from kvjax.models import digest
from tests.contexts.test_contexts import LENGTHS, TOKENS, assert_equal
from tests.examples import POLICIES, SELECTIONS, STORAGES, chosen, combined, held, planned, policy
from tests.tiny import in_stacks, tiny

SPECS = {
    "h2o": policies.h2o(8),
    "grown": policies.full(),
    "codes on the host": kvjax.CacheSpec(policies.h2o(9), storage.int8(memory="host")),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_a_loaded_context_is_the_context(name, tmp_path):
    """And what follows it is equal to the bit; layers that run as a loop do so again."""
    model = in_stacks(tiny().model) if name == "h2o" else tiny().model
    context = contexts.prefill(model, TOKENS, SPECS[name], lengths=LENGTHS)
    assert bool(stacked_runs(context.state.layers)) == (name == "h2o")
    if name == "grown":
        context = contexts.extend(model, context, np.zeros((3, 330), np.int32))
    # The copy is taken before the loop overwrites the cache.
    saving = contexts.save(tmp_path / "c", context, wait=False)
    answer = contexts.decode(model, context, max_new_tokens=4, donate=True)
    saving.result()
    # A program that saves without asking for results does not hold them all.
    assert not folders._unfinished
    mask = os.umask(0o022)
    os.umask(mask)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o777 & ~mask
    assert saving.done and [path.name for path in tmp_path.iterdir()] == ["c"]
    loaded = contexts.load(tmp_path / "c", model)
    assert_equal(loaded, contexts.load(tmp_path / "c", model, SPECS[name]))
    assert loaded.layout.groups == context.layout.groups and loaded.boundaries == context.boundaries
    again = contexts.decode(model, loaded, max_new_tokens=4)
    np.testing.assert_array_equal(again.logprobs, answer.logprobs)
    assert_equal(again.context, answer.context)
    for one, two in zip(*(jax.tree.leaves(each.state.layers) for each in (again, answer)), strict=True):
        assert one.sharding.memory_kind == two.sharding.memory_kind


def test_every_spec_is_read_from_its_text():
    """Policies, storages and selections, and their combinations; and nothing else is read."""
    specs = [kvjax.CacheSpec(each) for each in (*map(policy, POLICIES), *combined().values(), *planned().values())]
    specs += [kvjax.CacheSpec(policies.full(), held(name)) for name in STORAGES]
    specs += [kvjax.CacheSpec(policies.full(), selection=chosen(name)) for name in SELECTIONS]
    for spec in specs:
        assert spec_text.read(repr(spec)) == spec
    for text in ("__import__('os')", "CacheSpec(open('x'))", "Slots(count=8)", repr(specs[0]) + " ", "CacheSpec(**{})"):
        with pytest.raises((ValueError, TypeError)):
            spec_text.read(text)


def test_contexts_of_others_are_refused(tmp_path, monkeypatch):
    model, other = tiny(layers=1).model, tiny(layers=1, seed=1).model
    context = contexts.prefill(model, TOKENS, policies.h2o(8))
    folder = tmp_path / "c"
    contexts.save(folder, context)
    with pytest.raises(CheckpointError, match="exists already"):
        contexts.save(folder, context)
    # The model's parameters are hashed once.
    with monkeypatch.context() as patched:
        patched.setattr(digest, "_hashed", None)
        assert contexts.load(folder, model).num_rows == 3
    with pytest.raises(CheckpointError, match=r"saved with another policy: .*; storage: .*, and here"):
        contexts.load(folder, model, policies.h2o(9), storage=storage.int8())
    own = policies.evict(
        importance=policies.Importance(needs={"mass"}, score=lambda stats, view: stats["mass"]), budget=8
    )
    contexts.save(tmp_path / "own", contexts.prefill(model, TOKENS, own))
    assert contexts.load(tmp_path / "own", model, own).num_rows == 3
    with pytest.raises(CheckpointError, match=r"policy of .* cannot be read.* give the policy"):
        contexts.load(tmp_path / "own", model)
    shutil.rmtree(tmp_path / "own")
    with pytest.raises(CheckpointError, match="saved with another model"):
        contexts.load(folder, other, policies.h2o(8))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    with pytest.raises(
        CheckpointError,
        match=r"another dtype: 'float32', and here 'bfloat16'; model: .* kvjax.load\(\.\.\., dtype='float32'\)",
    ):
        contexts.load(folder, dataclasses.replace(model, params=half), policies.h2o(8))
    # Keys are stored rotated, so that other angles would read them wrong. Fields late in a long text are shown too.
    for name, saved, other in (
        ("theta", 10000.0, 500000.0),
        ("scaling", "'default'", "'linear'"),
        ("attention_factor", 1.0, 0.5),
    ):
        rope = dataclasses.replace(model.config.rope, **{name: other.strip("'") if isinstance(other, str) else other})
        turned = dataclasses.replace(model, config=dataclasses.replace(model.config, rope=rope))
        with pytest.raises(
            CheckpointError,
            match=rf"another config.rope: .*{name}={saved}.*, and here .*{name}={other}.* was saved with, or",
        ):
            contexts.load(folder, turned, policies.h2o(8))
    on_mesh = dataclasses.replace(model, mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
    with pytest.raises(CheckpointError, match=r"saved with another mesh: None, and here \{.data.: 1\}"):
        contexts.load(folder, on_mesh, policies.h2o(8))
    with pytest.raises(CheckpointError, match="there is no context in"):
        contexts.load(tmp_path, model, policies.h2o(8))
    about = folder / folders.ABOUT
    text = about.read_text()
    fields = json.loads(text)
    for changed in (
        {"rows": 2},
        {"runs": [[0, 99]]},
        {"slots": [[[9.5]]]},
        {"sizes": fields["sizes"] | {"prompt": -3}},
    ):
        about.write_text(json.dumps(fields | changed))
        with pytest.raises(CheckpointError, match=r"damaged: context\.json is not as it was saved"):
            contexts.load(folder, model, policies.h2o(8))
    about.write_text(text)
    with np.load(folder / folders.ARRAYS) as arrays:
        damaged = {**arrays, "logits": arrays["logits"] + 1}
    np.savez(folder / folders.ARRAYS, **damaged)
    with pytest.raises(CheckpointError, match="its arrays are not those that were saved"):
        contexts.load(folder, model, policies.h2o(8))

    def fails(*args, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.np, "savez", fails)
    saving = contexts.save(tmp_path / "d", context, wait=False)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        saving.result()
    # Nothing is left of it.
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


#: Saves a context, and writes another one behind, in the middle of which the process may stop.
SAVES = """
import sys, time
from pathlib import Path
from kvjax import contexts
from kvjax.contexts import folders
from tests.contexts import test_folders

folder, savez = Path(sys.argv[1]), folders.np.savez
context = test_folders.small_context()
contexts.save(folder / "old", context)

def half(path, **arrays):
    savez(path, **arrays)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])
    print("stopped", flush=True)
    time.sleep(60)

if sys.argv[2] == "stops":
    folders.np.savez = half
contexts.save(folder / "new", context, wait=False)
"""


def small_context():
    return contexts.prefill(tiny(layers=1).model, TOKENS, policies.h2o(8))


def test_a_process_that_is_killed_while_it_saves_leaves_no_context(tmp_path):
    """And no other one is harmed: a folder is there whole or not at all."""
    command = [sys.executable, "-c", SAVES, tmp_path, "stops"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGKILL)
    model = tiny(layers=1).model
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match="there is no context in"):
        contexts.load(tmp_path / "new", model)
    # The unfinished folder is not a context, and is damaged if a description is added.
    (left,) = tmp_path.glob(".unfinished-new-*/new")
    assert {path.name for path in left.iterdir()} == {folders.STATE, folders.ARRAYS}
    with pytest.raises(CheckpointError, match="there is no context in"):
        contexts.load(left, model)
    shutil.copy(tmp_path / "old" / folders.ABOUT, left)
    with pytest.raises(CheckpointError, match="is damaged"):
        contexts.load(left, model)
    context = small_context()
    assert_equal(contexts.load(tmp_path / "old", model), context)
    contexts.save(tmp_path / "new", context)
    assert_equal(contexts.load(tmp_path / "new", model), context)


def test_a_program_that_ends_while_a_context_is_written_finishes_it(tmp_path):
    done = subprocess.run([sys.executable, "-c", SAVES, tmp_path, "ends"], capture_output=True, text=True, check=True)
    assert not done.stderr and sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
    assert_equal(contexts.load(tmp_path / "new", tiny(layers=1).model), small_context())


FORKS = """
import multiprocessing
from concurrent.futures import Future
from kvjax.contexts import folders

folders._unfinished.add(Future())  # of a thread that the child does not have
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join(30)
print(child.exitcode, len(folders._unfinished))
child.kill()
folders._unfinished.clear()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_does_not_wait_for_the_saves_of_its_parent():
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    assert done.stdout.split() == ["child", "0", "1"]
