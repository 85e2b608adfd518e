"""Policies, storages and selections as text: names, calls, combinations, files of one's own."""

import importlib
import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import kvjax
from experiments import fields, specs
from experiments.config import PolicyConfig
from experiments.programs import run, sweep
from experiments.runs import resolve
from kvjax import policies, selection, storage
from kvjax.errors import ConfigError, KvjaxError, PolicyError
from kvjax.specs import parse, user_files
from tests.conftest import ROOT
from tests.tiny import random_tokens, tiny


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("h2o", lambda: policies.h2o(budget=9)),
        ("h2o(recent=2)", lambda: policies.h2o(budget=9, recent=2)),
        ("h2o(budget=0.5)", lambda: policies.h2o(budget=0.5)),
        ("h2o(7, group_reduce=max)", lambda: policies.h2o(budget=7, group_reduce="max")),
        ("h2o(budget=(4, 0.5))", lambda: policies.h2o(budget=(4, 0.5))),
        ("tova(share_heads=False)", lambda: policies.tova(budget=9, share_heads=False)),
        ("h2o(merge=d2o(beta=0.5))", lambda: policies.h2o(budget=9, merge=policies.d2o(beta=0.5))),
        ("h2o(merge=d2o(0.5))", lambda: policies.h2o(budget=9, merge=policies.d2o(beta=0.5))),
        ("h2o(merge=anchors)", lambda: policies.h2o(budget=9, merge=policies.anchors())),
        ("tova(share_heads=false)", lambda: policies.tova(budget=9, share_heads=False)),
        ("counter(saturate=None)", lambda: policies.counter(budget=9, saturate=None)),
        ("from_layer(lru(recent=2), first=2)", lambda: policies.from_layer(policies.lru(9, recent=2), first=2)),
        ("by_page(h2o, page=4)", lambda: policies.by_page(policies.h2o(budget=9), page=4)),
        ("value_norm(roco)", lambda: policies.value_norm(policies.roco(budget=9))),
        ("razor_attention(((1, 0),))", lambda: policies.razor_attention([[True, False]], budget=9)),
        (
            "split_heads(((1, 0),), chosen=h2o, others=window(sinks=1))",
            lambda: policies.split_heads([[1, 0]], policies.h2o(budget=9), policies.window(budget=9, sinks=1)),
        ),
        (
            "with_heavy_hitters(strided(stride=4, local=1), fraction=0.25)",
            lambda: policies.with_heavy_hitters(policies.strided(budget=9, stride=4, local=1), fraction=0.25),
        ),
        (
            "after_prefill(snapkv(window=4, pooling='max'), then=h2o(budget=5))",
            lambda: policies.after_prefill(
                policies.snapkv(budget=9, window=4, pooling="max"), then=policies.h2o(budget=5)
            ),
        ),
    ],
)
def test_a_text_is_a_policy(text, same):
    built = parse.build("policy", text, budget=9)
    assert built == same()
    assert built.name == text
    assert pickle.loads(pickle.dumps(built)).name == text
    assert built is parse.build("policy", text, budget=9)


@pytest.mark.parametrize(
    ("axis", "text", "same"),
    [
        ("storage", "dense", storage.dense()),
        ("storage", "int8", storage.int8()),
        ("storage", "int4(residual=32)", storage.int4(residual=32)),
        ("storage", "integer(4, key_bits=8)", storage.integer(4, key_bits=8)),
        ("selection", "everything", selection.everything()),
        ("selection", "quest(page=16, budget=512)", selection.quest(page=16, budget=512)),
        ("selection", "optimal(8)", selection.optimal(8)),
        ("selection", "infinigen(5, ratio=0.5, cap=64)", selection.infinigen(5, ratio=0.5, cap=64)),
        ("selection", "infinigen(columns=union)", selection.infinigen(columns="union")),
        ("selection", "lserve(budget=512)", selection.lserve(budget=512)),
        ("selection", "retrieval(8, 64, every=4)", selection.retrieval(8, 64, every=4)),
        ("selection", "tokenselect(64, reuse=None)", selection.tokenselect(64, reuse=None)),
        ("selection", "shadowkv(budget=64, local=1)", selection.shadowkv(budget=64, local=1)),
        ("merge", "d2o(beta=0.5)", policies.d2o(beta=0.5)),
    ],
)
def test_a_text_is_a_storage_or_a_selection(axis, text, same):
    built = parse.build(axis, text)
    assert (built, built.name, hash(built)) == (same, text, hash(same))
    assert pickle.loads(pickle.dumps(built)) == same
    assert parse.accepts("storage", "int8") == {"group", "residual", "memory"}


def test_a_gate_is_an_argument_of_a_policy():
    text = "learned(budget=8, gate=mlp(width=4, output=log_sigmoid), age=True)"
    gate = policies.MlpGate(4, output="log_sigmoid")
    assert parse.build("policy", text) == policies.learned(8, gate=gate, age=True)
    assert parse.build("policy", "learned(budget=8, gate=sink)").importance.gate == policies.SinkGate()


def test_a_name_is_that_of_one_text():
    texts = ("quest(16, 512)", "quest(page=16, budget=512)")
    built = [parse.build("selection", text) for text in texts]
    assert built[0] == built[1] == selection.quest(16, 512)
    assert [each.name for each in (*built, selection.quest(16, 512))] == [*texts, "quest"]


def test_one_slot_is_not_the_whole_prompt():
    built = [parse.build("policy", "h2o", budget=b).budget for b in (1, 1.0)]
    assert built == [policies.Slots(1), policies.Fraction(1.0)]


@pytest.mark.parametrize(
    ("axis", "text", "message"),
    [
        ("policy", "h3o", "unknown policy 'h3o'; did you mean 'h2o'.*combinators: adakv"),
        ("policy", "h2o(", "is not a policy's name, a call such as h2o_decay"),
        ("policy", "h2o.roco", "h2o.roco is not the name of a policy"),
        ("policy", "value_norm(h2o + roco)", "h2o \\+ roco is not a number, a name or a policy"),
        ("policy", "h2o(**x)", "is not supported here"),
        ("policy", "h2o(merge=d2o(**x))", "is not supported here"),
        ("policy", "h2o(recnt=2)", "it accepts budget, recent"),
        ("policy", "h2o(merge=d3o())", "did you mean 'd2o'.*merges: anchors, cam"),
        ("policy", "d2o", "unknown policy 'd2o'"),
        ("policy", "int8", "unknown policy 'int8'"),
        ("policy", "value_norm(strided(stride=2))", "only orders the slots"),
        ("policy", "nowhere.py:mine", "there is no file nowhere.py"),
        ("storage", "int9", "unknown storage 'int9'; did you mean 'int8'.*known storages: .*dense, .*FILE.py:factory"),
        ("storage", "int8(", "is not a storage's name, a call such as int8"),
        ("storage", "int8(groups=2)", "it accepts group, residual"),
        ("storage", "integer(9)", "bits must be a whole number from 1 to 8"),
        ("storage", "nowhere.py:mine", "storage nowhere.py:mine: there is no file"),
        ("selection", "qest(budget=4)", "unknown selection 'qest'; did you mean 'quest'.*known selections: a2ats"),
        ("selection", "quest(pages=4)", "it accepts page, budget, first_layer"),
        ("selection", "infinigen(alpha=-1)", "alpha must be a number of at least 0"),
        ("selection", "shadowkv(budget=9)", "chunk=8 does not divide budget=9"),
        ("selection", "quest(budget=h2o)", "budget must be a whole number"),
    ],
)
def test_what_is_wrong_with_a_text(axis, text, message):
    with pytest.raises(KvjaxError, match=message) as caught:
        parse.build(axis, text, **({"budget": 9} if axis == "policy" else {}))
    assert "\n" not in str(caught.value)


def test_config_fields_go_to_every_policy_that_takes_them():
    config = PolicyConfig(name="after_prefill(knorm, then=h2o)", budget=9, recent=2)
    assert specs.build_policy(config).decode.protects(9) == 2
    with pytest.raises(ConfigError, match=r"policy value_norm\(tova.* does not take policy.recent=2"):
        specs.build_policy(PolicyConfig(name="value_norm(tova(share_heads=False))", budget=9, recent=2))


def test_commas_inside_of_a_call_are_its_own():
    assert fields.split("full,roco(protect=2, guard=1),h2o(budget=(1,2))") == [
        "full", "roco(protect=2, guard=1)", "h2o(budget=(1,2))",
    ]  # fmt: skip
    for path, text in (("policy.name", "roco(protect=2, guard=1)"), ("selection", "quest(page=2, budget=8)")):
        assert sweep.parse_axis(f"{path}=h2o,{text}") == (path, ["h2o", text])


@pytest.fixture
def mine(tmp_path):
    """The README's example, as a file of a user's own."""
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(# mine\.py\n.*?)```", readme, re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 16
    path = tmp_path / "mine.py"
    path.write_text(code)
    return path


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_a_policy_in_a_users_own_file(mine, small, capsys):
    name = f"{mine}:loudest"
    loudest = parse.build("policy", name, budget=6)
    model, tokens = tiny().model, random_tokens(2, 20)
    got = kvjax.generate(model, tokens, loudest, max_new_tokens=5)
    assert all(np.asarray(layer.position >= 0).sum(axis=2).max() == 6 for layer in got.state.layers)

    small.policy, small.baselines = PolicyConfig(name=name, budget=6), ("full", "window(sinks=2)")
    folder = run.run(small)
    assert "| loudest " in (folder / "report.md").read_text()
    assert "window(sinks=2)" in capsys.readouterr().out
    _, results = sweep.sweep(
        small, [("policy.budget", [5, 6]), ("policy.name", [name, "roco(guard=2)"])], progress=False
    )
    assert [result["status"] for result in results] == ["ok"] * 4
    with pytest.raises(ConfigError, match="no factory and no policy of that name; it defines"):
        parse.build("policy", f"{mine}:quietest", budget=6)


NAMED = """
from kvjax.policies import evict, h2o, mass, protect_newest

def mine(budget, recent=1):
    return evict(importance=mass, scope=protect_newest(recent), budget=budget, name="my method")

def plain(budget):
    return evict(importance=mass, budget=budget)

def passed_on(budget):
    return h2o(budget, recent=3)
"""


def test_reports_use_the_name_that_a_policy_has(tmp_path, small):
    """A policy of a file that has no name of its own, or that of a policy of kvjax, is told from others by its file."""
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text(NAMED)
    two.write_text(NAMED.replace("protect_newest(recent)", "protect_newest(2)"))
    texts = {
        f"{one}:mine": "my method",
        f"{one}:mine(recent=2)": "my method(recent=2)",
        f"after_prefill(snapkv(window=2), then={one}:mine)": "after_prefill(snapkv(window=2), then=my method)",
        f"{one}:plain": f"{one}:plain",
        f"value_norm({one}:passed_on)": f"value_norm({one}:passed_on)",
    }
    assert [parse.build("policy", text, budget=6).name for text in texts] == list(texts.values())
    # Two files may give one name: a table has both.
    small.policy, small.baselines = PolicyConfig(name=f"{one}:mine", budget=6), ("full", f"{two}:mine", f"{one}:mine")
    assert [spec.name for spec in resolve.specs_of(small)] == ["full", f"{two}:mine", "my method"]
    found = [{"policy": "my method + int8", "config": {"policy": {"name": f"{file}:mine"}}} for file in (one, two, one)]
    assert [each["label"] for each in sweep._with_labels(found)] == [
        f"{one}:mine + int8", f"{two}:mine + int8", f"{one}:mine + int8",
    ]  # fmt: skip
    assert [each["label"] for each in sweep._with_labels(found[::2])] == ["my method + int8"] * 2


OWN = """
from __future__ import annotations
import dataclasses
from kvjax.selection import Selection, optimal
from kvjax.storage import Integer, Storage

def coarse(bits=3):
    return Storage(key=Integer(8), value=Integer(bits), name="mine")

best = optimal(4)

def few(n):
    return optimal(n)

def nothing():
    return 3
"""


def test_storages_and_selections_in_a_users_own_file(tmp_path, small):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    made = parse.build("storage", f"{path}:coarse(bits=4)")
    assert made == storage.integer(4, key_bits=8)
    assert parse.build("selection", f"{path}:best") == selection.optimal(4)
    small.policy, small.baselines = PolicyConfig(name="full"), ("full",)
    small.storage, small.selection = f"{path}:coarse", f"{path}:few(4)"
    found = resolve.specs_of(small)
    assert [spec.name for spec in found] == ["full", f"full + {path}:coarse + {path}:few(4)"]
    for axis, text, message in (
        ("storage", f"{path}:few(4)", "its factory returned Optimal.*not a storage; see kvjax.storage"),
        ("selection", f"{path}:nothing", "its factory returned 3, not a selection; see kvjax.selection"),
        ("selection", f"{path}:best(n=1)", "takes no arguments"),
        ("storage", f"{path}:thick", "no factory and no storage of that name"),
        ("storage", f"{path}:coarse(bit=3)", "unexpected keyword argument 'bit'"),
    ):
        with pytest.raises(KvjaxError, match=message):
            parse.build(axis, text)
    small.policy = PolicyConfig(name="h2o(variant=masked)", budget=8)
    with pytest.raises(PolicyError, match="has a selection of its own"):
        resolve.specs_of(small)


def test_a_file_of_the_same_length_and_second_is_another(tmp_path, monkeypatch):
    """Python's own bytecode tells files apart by whole seconds and lengths."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for number in (1, 2, 3):
        file.write_text(f"X = {number}")
        os.utime(file, ns=(10**18 + number, 10**18 + number))
        assert number == user_files.load(file).X


def test_what_an_own_file_imports_is_found_beside_it(tmp_path, monkeypatch):
    """As with a script; modules of one name in two folders are two."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number, name in enumerate(("one", "two")):
        folder = tmp_path / name
        (folder / "package_of_mine").mkdir(parents=True)
        (folder / "module_of_mine.py").write_text(f"X = {number}")
        (folder / "package_of_mine" / "__init__.py").write_text("")
        (folder / "package_of_mine" / "inner.py").write_text(f"Y = {10 * number}")
        (folder / "mine.py").write_text("from module_of_mine import X\nfrom package_of_mine.inner import Y\nZ = X + Y")
    assert [user_files.load(tmp_path / name / "mine.py").Z for name in ("one", "two")] == [0, 11]
    (tmp_path / "one" / "module_of_mine.py").write_text("X = 500")
    assert [user_files.load(tmp_path / name / "mine.py").Z for name in ("one", "two")] == [500, 11]


def test_what_is_imported_inside_of_functions_is_loaded_too(tmp_path, monkeypatch):
    """So that an edit within `pinned` changes nothing; two modules of one name are refused, since either may come."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("def get():\n    import late_module\n    return late_module.X\n")
        (tmp_path / name / "late_module.py").write_text("X = 1")
    mine = tmp_path / "one" / "mine.py"
    with user_files.pinned():
        before = user_files.digests(mine)
        (tmp_path / "one" / "late_module.py").write_text("X = 22")
        assert user_files.load(mine).get() == 1 and user_files.digests(mine) == before
    assert user_files.load(mine).get() == 22
    with pytest.raises(ConfigError, match=r"two modules named late_module, one inside a function"):
        user_files.load(tmp_path / "two" / "mine.py")


def test_files_that_cannot_be_imported_as_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "colorsys.py").write_text("X = 1")
    (tmp_path / "mine.py").write_text("from colorsys import X")
    importlib.import_module("colorsys")
    with pytest.raises(ConfigError, match="colorsys is the name of another module here"):
        user_files.load(tmp_path / "mine.py")
    (tmp_path / "writes.py").write_text(
        f"import pathlib, written\npath = pathlib.Path({str(tmp_path)!r}, 'written.py')\n"
        "path.write_text(path.read_text() + '#')\n"
    )
    (tmp_path / "written.py").write_text("#")
    with pytest.raises(ConfigError, match="changes each time it is loaded"):
        user_files.load(tmp_path / "writes.py")


def test_contents_are_named_as_the_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import beside_mine")
    (tmp_path / "beside_mine.py").write_text("X = 1")
    for _ in range(2):
        with user_files.pinned():
            absolute = user_files.digests(tmp_path / "mine.py")
            relative = user_files.digests("mine.py")
        assert set(relative) == {Path("mine.py"), Path("beside_mine.py")}
        assert set(absolute) == {tmp_path / path for path in relative}
        assert user_files.digests("mine.py") == relative


def test_blocks_of_threads_that_overlap(tmp_path):
    """None is left when the last has ended, whichever began first."""
    mine = tmp_path / "mine.py"
    mine.write_text("X = 1")
    first, second = user_files.pinned(), user_files.pinned()
    first.__enter__()
    second.__enter__()
    assert user_files.load(mine).X == 1
    first.__exit__(None, None, None)
    mine.write_text("X = 22")
    assert user_files.load(mine).X == 1
    second.__exit__(None, None, None)
    assert user_files.load(mine).X == 22


def test_digests_are_of_what_was_loaded(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("X = 1")
    user_files.load(mine)
    mine.write_text("X = 22")
    with user_files.pinned():
        # Files stay as they are when they are first loaded in the block, not as they were before it.
        assert user_files.load(mine).X == 22
        first = user_files.digests(mine)
        mine.write_text("X = 333")
        with user_files.pinned():
            assert user_files.load(mine).X == 22 and user_files.digests(mine) == first
        assert user_files.load(mine).X == 22
    assert list(first) == [mine] and user_files.digests(mine) != first and user_files.load(mine).X == 333
