"""A file of requests in, a file of results out: each once and in order, however often the program is killed."""

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from experiments import fields
from experiments.batch.__main__ import main
from experiments.batch.contexts import Contexts
from experiments.batch.journal import Journal
from experiments.config import ExperimentConfig
from experiments.programs import batch
from experiments.runs.session import Session
from kvjax import policies
from kvjax.cache.shared_prefix import PARAM
from kvjax.errors import ConfigError, InputError
from kvjax.serve import Runner
from tests.conftest import ROOT
from tests.tiny import spoiled

CONFIG = """
import dataclasses
from experiments.config import ExperimentConfig, PolicyConfig
from kvjax.models import shapes
from kvjax.numerics.rope import Rope

shapes.SHAPES["tiny"] = dataclasses.replace(
    shapes.SHAPES["tiny"], hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16,
    embed_size=16, rope=Rope(dim=8), windows=(None,),
)


def get_config():
    return ExperimentConfig(name="small", policy=PolicyConfig(name="window", budget=8, sinks=2))
"""
# A program that is slow enough to be killed while it runs.
SLOWLY = """
import time
from kvjax.serve import Runner

step = Runner.step
Runner.step = lambda self: (time.sleep(0.02), step(self))[1]
"""
COUNT = 60


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and requests; nothing stays changed by the config."""
    from kvjax.models import shapes

    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.SHAPES["tiny"])
    rng = np.random.default_rng(3)
    lines = [
        {"prompt": rng.integers(1, 200, rng.integers(8, 40)).tolist(), "max_new_tokens": int(rng.integers(1, 60))}
        | ({"temperature": 0.8, "top_k": 20} if number % 2 else {})
        | ({"seed": 5, "id": f"seeded {number}"} if number % 5 == 3 else {})
        for number in range(COUNT)
    ]
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "slow.py").write_text(CONFIG + SLOWLY)
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def command(folder: Path, output: str, config: str = "config.py", *more: str) -> list[str]:
    return [
        "batch", f"--config={folder / config}", f"--requests={folder / 'requests.jsonl'}",
        f"--output={folder / output}", "--rows=4", *more,
    ]  # fmt: skip


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_killed_and_begun_again(folder, capsys):
    """Results are those of generate; after a kill the program goes on, and the file is the same byte for byte."""
    assert main(command(folder, "whole.jsonl")) == 0
    asked, found = read(folder / "requests.jsonl"), read(folder / "whole.jsonl")
    assert [each["id"] for each in found] == [each.get("id", number + 1) for number, each in enumerate(asked)]
    model = Session().model(fields.by_name(str(folder / "config.py"), ExperimentConfig))
    for number in (0, 1, 3, 8, 13, 59):
        request, result = asked[number], found[number]
        sampler = kvjax.Sample(temperature=0.8, top_k=20) if number % 2 else kvjax.Greedy()
        expected = kvjax.generate(
            model, request["prompt"], policies.window(8, sinks=2), max_new_tokens=request["max_new_tokens"],
            sampler=sampler, key=jax.random.key(request.get("seed", 0)),
            requests=[0 if "seed" in request else number], stop=model.eos_token_ids,
        )  # fmt: skip
        assert result["tokens"] == expected.tokens[0, : expected.lengths[0]].tolist()
        assert (result["prompt_tokens"], result["new_tokens"]) == (len(request["prompt"]), len(result["tokens"]))
    shown = capsys.readouterr().out
    assert f"{COUNT} results in" in shown and "% of" in shown
    # The same command has nothing left to do.
    assert main(command(folder, "whole.jsonl")) == 0
    assert "already has all 60 results" in capsys.readouterr().out

    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "experiments.batch", *command(folder, "killed.jsonl", "slow.py")[1:]]
    enough = random.Random().randint(1, COUNT // 3)
    child = subprocess.Popen(run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        while child.poll() is None and written(folder / "killed.jsonl") < enough:
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL and enough <= written(folder / "killed.jsonl") < COUNT
    assert main(command(folder, "killed.jsonl")) == 0
    assert (folder / "killed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


def written(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_prompts_that_begin_alike(folder, capsys, monkeypatch):
    """One after the other, with what they share computed once; results are those of requests that share nothing."""
    (folder / "config.py").write_text(CONFIG.replace('name="window", budget=8, sinks=2', 'name="full"'))
    rng = np.random.default_rng(4)
    systems = rng.integers(1, 200, (2, 130)).tolist()
    # In turns, so that in their own order no two neighbours begin alike; one cannot be answered.
    prompts = [systems[number % 2] + rng.integers(1, 200, 4).tolist() for number in range(8)] + [[99999]]
    lines = [{"prompt": prompt, "max_new_tokens": 5} for prompt in prompts]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(command(folder, "alone.jsonl", "config.py", "--prefix_cache=0")) == 1
    assert "begin alike" not in capsys.readouterr().out
    asked, submit, put = [], Runner.submit, Journal.put

    def recorded(self, request):
        asked.append([*request.tokens])
        return submit(self, request)

    monkeypatch.setattr(Runner, "submit", recorded)
    # Interrupted after the first result, it goes on with the rest.

    def interrupted(self, index, result):
        put(self, index, result)
        if index == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(command(folder, "shared.jsonl"))
    shown = capsys.readouterr().out
    assert "2 groups of prompts begin alike: 780 of 1,072 prompt tokens need not be computed again" in shown
    assert "prefix store: every beginning of an earlier prompt" in shown
    assert asked == [[99999], *prompts[0:8:2], *prompts[1:8:2]]
    monkeypatch.setattr(Journal, "put", put)
    assert main(command(folder, "shared.jsonl")) == 1
    assert read(folder / "shared.jsonl") == read(folder / "alone.jsonl")
    assert "prompt tokens found" in capsys.readouterr().out


def test_slots_that_a_group_holds_once(folder, capsys, monkeypatch):
    """Results are those of slots of their own; an interrupted run goes on with the same groups."""
    (folder / "config.py").write_text(CONFIG.replace('name="window", budget=8, sinks=2', 'name="full"'))
    rng = np.random.default_rng(4)
    texts = rng.integers(1, 200, (3, 70)).tolist()
    prompts = [texts[number % 2] + rng.integers(1, 200, number).tolist() for number in range(6)] + [texts[2], [99999]]
    lines = [{"prompt": prompt, "max_new_tokens": 5} for prompt in prompts]
    # Draws depend on positions and penalties on tokens of the whole prompt; one is too long.
    lines[2] |= {"repetition_penalty": 5.0}
    lines[3] |= {"temperature": 0.8, "seed": 5}
    lines.append({"prompt": [*texts[0], *texts[1]], "max_new_tokens": 5})
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    limited = ("config.py", "--longest_prompt=80")
    assert main(command(folder, "alone.jsonl", *limited)) == 1
    asked, runners, submit, put = [], [], Runner.submit, Journal.put

    def recorded(self, request):
        asked.append([*request.tokens])
        runners.append(weakref.ref(self))
        return submit(self, request)

    def interrupted(self, index, result):
        put(self, index, result)
        if index == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "submit", recorded)
    monkeypatch.setattr(Journal, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(command(folder, "once.jsonl", *limited, "--shared_slots"))
    # A prompt that is the text itself has its last token for itself.
    assert asked[:3] == [prompt[69:] for prompt in prompts[0:6:2]]
    monkeypatch.setattr(Journal, "put", put)
    asked.clear()
    assert main(command(folder, "once.jsonl", *limited, "--shared_slots")) == 1
    assert asked[:5] == [prompts[2][69:], prompts[4][69:], *(prompt[70:] for prompt in prompts[1:6:2])]
    assert sorted(map(len, asked[5:])) == [1, 70, 140]
    found = read(folder / "once.jsonl")
    assert found == read(folder / "alone.jsonl") and "80 tokens" in found[-1]["error"]
    # A runner of a group is gone when the next one begins.
    gc.collect()
    assert not any(each() for each in runners)
    with pytest.raises(ConfigError, match=r"--shared_slots is for --config.policy.name=full with exact storage"):
        main(command(folder, "other.jsonl", "config.py", "--shared_slots", "--config.storage=int8"))
    with pytest.raises(ConfigError, match="cannot keep or continue contexts"):
        main(command(folder, "other.jsonl", "config.py", "--shared_slots", f"--contexts={folder}"))


@pytest.mark.sampled(0)
def test_rows_that_fit_in_bytes(folder, capsys, monkeypatch):
    """A row of the window has 9 slots of a key and a value of 8 float32 numbers."""
    assert main(command(folder, "whole.jsonl")) == 0
    rows, made = [], Runner.__init__

    def recorded(self, *args, **options):
        rows.append(options["rows"])
        made(self, *args, **options)

    monkeypatch.setattr(Runner, "__init__", recorded)
    assert main(command(folder, "few.jsonl", "config.py", "--cache_bytes=2kB")) == 0
    assert main(command(folder, "many.jsonl", "config.py", "--cache_bytes=1MB")) == 0
    assert rows == [2000 // (9 * 2 * 8 * 4), 4]
    assert read(folder / "few.jsonl") == read(folder / "whole.jsonl")
    with pytest.raises(ConfigError, match=r"--cache_bytes=100 B is too small: a row of 38 \+ 59 tokens takes"):
        main(command(folder, "none.jsonl", "config.py", "--cache_bytes=100"))


def test_a_run_that_is_refused_leaves_nothing(folder):
    """Neither empty files nor folders for them; what is there already stays."""
    (folder / "there").mkdir()
    for where in ("new/inner", "there"):
        refused = command(folder, f"{where}/none.jsonl", "config.py", f"--contexts={folder / 'kept' / where}")
        with pytest.raises(ConfigError, match="is too small"):
            main([*refused, "--cache_bytes=100"])
        with pytest.raises(ConfigError, match="--codec='none' must be"):
            main([*refused, "--codec=none"])
    assert not (folder / "new").exists() and not (folder / "kept").exists() and not [*(folder / "there").iterdir()]


def test_a_text_that_rows_share_counts_once(folder, monkeypatch):
    """Rows are as many as fit beside the text, by the bytes of the arrays; where none fits, no text is shared."""
    (folder / "config.py").write_text(CONFIG.replace('name="window", budget=8, sinks=2', 'name="full"'))
    rng = np.random.default_rng(4)
    # A long text with short questions, and a short one with long questions, 12 each.
    texts = [(rng.integers(1, 200, size).tolist(), own) for size, own in ((150, 2), (64, 100))]
    lines = [
        {"prompt": [*text, number, *[7] * (own - 1)], "max_new_tokens": 3}
        for text, own in texts
        for number in range(12)
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = []
    monkeypatch.setattr(batch, "answer", lambda runner, asked, *args, rows, **options: made.append((runner, rows)))
    arguments = ("config.py", "--rows=32", "--shared_slots")
    main(command(folder, "many.jsonl", *arguments, "--cache_bytes=60kB"))
    *shared, (others, whole) = made
    assert len(shared) == 2 and others.prompts.layout.bytes(whole + 1) > 60_000
    for behind, rows in shared:
        prefix = behind.model.params[PARAM]
        held = sum(leaf.nbytes for layer in prefix.layers for group in layer for leaf in (group.key, group.value))
        bytes_of = behind.prompts.layout.bytes
        assert held + bytes_of(rows) <= 60_000 < held + bytes_of(rows + 1) and whole < rows < 12
    made.clear()
    # A row of the longest prompt fits, and none that has the longest question behind the longer text.
    main(command(folder, "few.jsonl", *arguments, "--cache_bytes=11kB"))
    assert [rows for _, rows in made] == [1, 1] and PARAM in made[0][0].model.params


def test_lines_that_cannot_be_answered(folder, capsys):
    good = {"prompt": [5, 6, 7], "max_new_tokens": 2}
    bad = {
        '{"prompt": [1, 2': "not valid JSON",
        "[]": "must be a JSON object; got list",
        '{"prompt": "text"}': "the model has no tokenizer",
        '{"prompt": [1, 2, 99999]}': "outside the model's vocabulary",
        '{"prompt": []}': "at least one token",
        '{"prompt": [1], "max_tokens": 3}': "unknown field 'max_tokens'",
        '{"prompt": [1], "max_new_tokens": "3"}': "max_new_tokens must be a whole number",
        '{"prompt": [1], "top_p": 2, "temperature": 1}': "top_p must be from",
        f'{{"prompt": [1], "temperature": {10**400}}}': "temperature must be from",
        f'{{"prompt": [1], "repetition_penalty": {10**400}}}': "repetition_penalty must be from",
        '{"prompt": [1], "id": 1}': "id 1 is already used in line 1.",
        '{"prompt": [1], "id": "\\ud800"}': "contains an unpaired surrogate",
        f'{{"prompt": {"[" * 100_000}': "not valid JSON",
        '{"prompt": [1], "stop": [""]}': "stop must be a non-empty string",
        '{"prompt": [1], "seed": -1}': "seed must be a whole number",
    }
    lines = [json.dumps(good), *bad, "", json.dumps(good)]
    (folder / "requests.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    assert main(command(folder, "results.jsonl", "config.py", "--new_tokens=4")) == 1
    found, said = read(folder / "results.jsonl"), capsys.readouterr().err
    last = len(bad) + 1
    assert len(found) == last + 2 and found[0]["tokens"] == found[last]["tokens"] and "error" in found[last + 1]
    for number, (message, result) in enumerate(zip(bad.values(), found[1:], strict=False), 2):
        assert message in result["error"] and f"requests.jsonl, line {number}: " in said
    # What was wrong then is wrong when it is asked for again.
    assert main(command(folder, "results.jsonl", "config.py", "--new_tokens=4")) == 1
    with pytest.raises(ConfigError, match="belongs to a run with different --new_tokens"):
        main(command(folder, "results.jsonl", "config.py", "--new_tokens=5"))
    (folder / "mine.jsonl").write_text("not of this program\n")
    with pytest.raises(ConfigError, match="exists, but not from an unfinished run"):
        main(command(folder, "mine.jsonl"))
    with pytest.raises(ConfigError, match="--requests='none' cannot be read"):
        main(["batch", "--config=h2o_tiny", "--requests=none", "--output=x"])
    with pytest.raises(ConfigError, match="give --output"):
        main(["batch", "--config=h2o_tiny", "--requests=none"])
    for flag in ("--min_p=0", "--top_p=2", "--repetition_penalty=0"):
        with pytest.raises(InputError, match="must be from"):
            main(command(folder, "sampled.jsonl", "config.py", flag))
    assert not (folder / "sampled.jsonl").exists()


def test_a_request_of_nan_is_an_error_and_others_go_on(folder, capsys, monkeypatch):
    lines = [{"prompt": [5, 6, 7], "max_new_tokens": 4}, {"prompt": [5, 9], "max_new_tokens": 4}] * 3
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = Session.model
    assert main(command(folder, "good.jsonl")) == 0
    monkeypatch.setattr(Session, "model", lambda *arguments: spoiled(whole(*arguments), 9))
    assert main(command(folder, "bad.jsonl")) == 1
    good, found = read(folder / "good.jsonl"), read(folder / "bad.jsonl")
    assert found[::2] == good[::2]
    said = capsys.readouterr().err
    for number, each in enumerate(found[1::2]):
        assert each.keys() == {"id", "error"} and "not finite, after 0 new tokens" in each["error"]
        assert f"requests.jsonl, line {2 * number + 2}: the log-probability" in said


@pytest.mark.sampled(0)
def test_what_results_depend_on(folder):
    """Lines that are moved, and other contents of files, make another run of it."""
    (folder / "mine.py").write_text("from kvjax.policies import h2o\n\n\ndef own(budget):\n    return h2o(budget)\n")
    lines = (folder / "requests.jsonl").read_text().splitlines(keepends=True)[:2]
    (folder / "requests.jsonl").write_text("".join(lines))
    asked = command(folder, "own.jsonl", "config.py", f"--config.policy.name={folder}/mine.py:own")
    asked.append("--config.policy.sinks=none")
    assert main(asked) == 0
    (folder / "requests.jsonl").write_text("\n" + "".join(lines))
    with pytest.raises(ConfigError, match="belongs to a run with different requests"):
        main(asked)
    (folder / "requests.jsonl").write_text("".join(lines))
    assert main(asked) == 0
    (folder / "mine.py").write_text((folder / "mine.py").read_text().replace("h2o", "window"))
    with pytest.raises(ConfigError, match=r"belongs to a run with different contents of files .*mine\.py"):
        main(asked)
    # The number of a line is not the id of another one.
    entries = [{"id": 2, "prompt": [5]}, {"prompt": [5]}]
    (folder / "requests.jsonl").write_text("".join(json.dumps(each | {"max_new_tokens": 1}) + "\n" for each in entries))
    assert main(command(folder, "ids.jsonl")) == 1
    assert "a line without an id has its line number as its id" in read(folder / "ids.jsonl")[1]["error"]


def test_the_journal_survives_any_cut(tmp_path, monkeypatch):
    """Files that end within a line, as a kill leaves them, in any order of results."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    about, results = {"requests": "abc"}, [{"id": i, "text": "é\u2028" * i} for i in range(9)]
    expected = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in results)
    chance = random.Random(1)
    for turn in range(40):
        output = tmp_path / f"{turn}.jsonl"
        while True:
            with Journal(output, about) as journal:
                missing = [number for number in range(9) if number not in journal]
                if not missing:
                    break
                chance.shuffle(missing)
                for number in missing[: chance.randint(1, 4)]:
                    journal.put(number, results[number])
            torn = chance.choice([output, tmp_path / f"{turn}.jsonl.journal"])
            content = torn.read_bytes()
            last = content[:-1].rfind(b"\n") + 1
            # The journal's first line is there before any result.
            if content and (torn == output or last):
                torn.write_bytes(content[: chance.randint(last, len(content))])
        assert output.read_text() == expected
        assert journal.written == 9 and journal.failed == 0


def test_one_process_at_a_time(tmp_path):
    output = tmp_path / "results.jsonl"
    with Journal(output, {}) as journal:
        journal.note("name", [1])
        with pytest.raises(ConfigError, match="being written by another process"):
            Journal(output, {})
    with Journal(output, {}) as journal:
        assert journal.notes == {"name": [1]}


def test_contexts_are_kept_and_continued(folder, capsys, monkeypatch):
    """A later run continues the texts of an earlier one, as one text of both; its results do not depend on kills."""
    rng = np.random.default_rng(6)
    prompts, turns = rng.integers(1, 200, (3, 30)).tolist(), rng.integers(1, 200, (3, 7)).tolist()

    def write(lines: list[dict]) -> None:
        (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    names = ["a/1", 2, "c"]
    more = {"max_new_tokens": 4, "keep_context": True}
    write([{"id": name, "prompt": prompt} | more for name, prompt in zip(names, prompts, strict=True)])
    first = [f"--contexts={folder / 'kept'}", "--most_new_tokens=24"]
    put = Journal.put

    def interrupted(self, index, result):
        raise KeyboardInterrupt

    # A call that is killed before the first result has saved a context, in whose place the next call puts its own.
    monkeypatch.setattr(Journal, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(command(folder, "first.jsonl", "config.py", *first))
    monkeypatch.setattr(Journal, "put", put)
    assert len([*(folder / "kept").glob("*/context.json")]) == 1
    assert main(command(folder, "first.jsonl", "config.py", *first)) == 0
    with pytest.raises(ConfigError, match=r"line 1: .*already has the context of a request 'a/1'"):
        main(command(folder, "again.jsonl", "config.py", *first))
    asked = zip([*names, "d"], [*turns, [1]], strict=True)
    write([{"context": name, "prompt": turn, "max_new_tokens": 5} for name, turn in asked])
    # The sizes are those of the first run, and nothing else can be asked for.
    with pytest.raises(ConfigError, match="--most_new_tokens=25 is not that of the first run"):
        main(command(folder, "more.jsonl", "config.py", first[0], "--most_new_tokens=25"))
    assert main(command(folder, "second.jsonl", "config.py", first[0])) == 1
    found = read(folder / "second.jsonl")
    assert "has no context of a request 'd'" in found.pop()["error"]
    model = Session().model(fields.by_name(str(folder / "config.py"), ExperimentConfig))
    for prompt, before, turn, result in zip(prompts, read(folder / "first.jsonl"), turns, found, strict=True):
        given = [*prompt, *before["tokens"]]
        context = kvjax.contexts.prefill(model, [prompt], policies.window(8, sinks=2), room=64)
        context = kvjax.contexts.extend(model, context, [[*before["tokens"], *turn]], block=1)
        expected = kvjax.contexts.decode(model, context, max_new_tokens=5)
        assert result["tokens"] == expected.tokens[0].tolist()
        assert result["prompt_tokens"] == len(given) + len(turn)
    write([{"context": 2, "prompt": [1], "max_new_tokens": 5}])
    assert main(command(folder, "none.jsonl")) == 1
    assert "give --contexts=FOLDER" in read(folder / "none.jsonl")[0]["error"]
    assert main(command(folder, "coded.jsonl", "config.py", first[0], "--codec=cachegen:2")) == 1
    assert "was saved with no codec; got codec cachegen" in read(folder / "coded.jsonl")[0]["error"]


@pytest.mark.sampled(0)
def test_contexts_in_fewer_bytes(folder, capsys):
    """A codec, by its level or as a file; what cannot be one is refused before the model is loaded."""
    (folder / "config.py").write_text(CONFIG.replace('name="window", budget=8, sinks=2', 'name="full"'))
    prompt = np.random.default_rng(7).integers(1, 200, 60).tolist()
    lines = [{"id": "a", "prompt": prompt, "max_new_tokens": 3, "keep_context": True}]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = Session().model(fields.by_name(str(folder / "config.py"), ExperimentConfig))
    kvjax.transport.make_tables([kvjax.contexts.prefill(model, [prompt], policies.full(), room=64)], level=3).save(
        folder / "tables.npz"
    )
    for number, codec in enumerate(("cachegen:3", f"{folder / 'tables.npz'}")):
        flags = [f"--contexts={folder / str(number)}", "--most_new_tokens=16", f"--codec={codec}"]
        (folder / "requests.jsonl").write_text(json.dumps(lines[0]) + "\n")
        assert main(command(folder, f"first{number}.jsonl", "config.py", *flags)) == 0
        assert [each.name for each in (folder / str(number)).glob("*/*.bin")] == ["context.bin"]
        (folder / "requests.jsonl").write_text(json.dumps({"context": "a", "prompt": [5], "max_new_tokens": 3}) + "\n")
        assert main(command(folder, f"second{number}.jsonl", "config.py", *flags)) == 0
        assert len(read(folder / f"second{number}.jsonl")[0]["tokens"]) == 3
    for codec, message in (("zip", "must be cachegen:1"), (f"{folder / 'config.py'}", "must be cachegen:1")):
        with pytest.raises(ConfigError, match=message):
            main(command(folder, "bad.jsonl", "config.py", "--contexts=x", f"--codec={codec}"))
    with pytest.raises(ConfigError, match="give --contexts=FOLDER"):
        main(command(folder, "bad.jsonl", "config.py", "--codec=cachegen:1"))
    asked = [f"--contexts={folder / 'codes'}", "--codec=cachegen:1", "--config.storage=int8"]
    with pytest.raises(ConfigError, match="held as they are, not int8"):
        main(command(folder, "bad.jsonl", "config.py", *asked))
    bad = {
        '{"prompt": [1], "keep_context": 1}': "keep_context must be true or false",
        '{"prompt": [1], "context": [1]}': "context must be a string or an integer",
        '{"prompt": [1], "context": "\\ud800"}': "contains an unpaired surrogate",
        '{"prompt": [1], "keep_context": true, "stop": "a"}': "keep_context needs stop_tokens",
    }
    (folder / "requests.jsonl").write_text("\n".join(bad))
    assert main(command(folder, "bad.jsonl", "config.py", f"--contexts={folder / 'new'}")) == 1
    for message, result in zip(bad.values(), read(folder / "bad.jsonl"), strict=True):
        assert message in result["error"]


def test_names_and_room_of_contexts(folder, capsys):
    """Ids of any kind have contexts of their own; requests without a number of tokens take what there is room for."""
    # A cache that evicts has room for any number of tokens.
    (folder / "config.py").write_text(CONFIG.replace('name="window", budget=8, sinks=2', 'name="full"'))
    tokens = np.random.default_rng(8).integers(1, 200, 12).tolist()
    names = ["5", 5, "é" * 200, "../a", ""]
    keeping = [{"id": name, "prompt": [*tokens, i], "keep_context": True} for i, name in enumerate(names)]

    def write(lines: list[dict]) -> None:
        (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(keeping)
    kept = f"--contexts={folder / 'kept'}"
    with pytest.raises(ConfigError, match="give --most_new_tokens"):
        main(command(folder, "first.jsonl", "config.py", kept))
    assert not (folder / "kept" / "sizes.json").exists()
    assert main(command(folder, "first.jsonl", "config.py", kept, "--most_new_tokens=20", "--new_tokens=6")) == 0
    first = read(folder / "first.jsonl")
    assert [each["new_tokens"] for each in first] == [6] * 5
    assert {each.parent.parent for each in (folder / "kept").glob("**/context.json")} == {folder / "kept"}
    write(
        [
            *({"id": i, "prompt": [7], "context": name} for i, name in enumerate(names)),
            {"id": "much", "prompt": [7], "context": 5, "max_new_tokens": 14},
            {"id": "long", "prompt": tokens * 2, "max_new_tokens": 1},
            {"id": "both", "prompt": [7], "max_new_tokens": 1, "keep_context": True},
            {"id": "too soon", "prompt": [7], "context": "both"},
        ]
    )
    # Without a flag, they have as many as there is room for.
    assert main(command(folder, "second.jsonl", "config.py", kept)) == 1
    found = read(folder / "second.jsonl")
    assert [each["new_tokens"] for each in found[:5]] == [14, 14, 14, 14, 14]
    assert [each["prompt_tokens"] for each in found[:5]] == [13 + 6 + 1] * 5
    assert found[5]["new_tokens"] == 14 and found[7]["new_tokens"] == 1
    assert "have at most 13, as its first run has decided" in found[6]["error"]
    assert "is continued in another run" in found[8]["error"]
    write([{"prompt": [7], "context": 5, "max_new_tokens": 15}])
    assert main(command(folder, "third.jsonl", "config.py", kept)) == 1
    assert "1 tokens and 15 new ones do not fit" in read(folder / "third.jsonl")[0]["error"]
    assert "there is room for 15" in read(folder / "third.jsonl")[0]["error"]


def test_no_run_replaces_the_contexts_of_another(folder, monkeypatch):
    """Not even one that was killed before it kept its own, while another run has kept one of that name."""
    (folder / "requests.jsonl").write_text(
        json.dumps({"id": "a", "prompt": [5, 6, 7], "max_new_tokens": 2, "keep_context": True}) + "\n"
    )
    flags = [f"--contexts={folder / 'kept'}", "--most_new_tokens=9"]
    save = Runner.save_prefix

    def killed(self, *arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "save_prefix", killed)
    with pytest.raises(KeyboardInterrupt):
        main(command(folder, "first.jsonl", "config.py", *flags))
    monkeypatch.setattr(Runner, "save_prefix", save)
    assert main(command(folder, "second.jsonl", "config.py", *flags)) == 0
    (context,) = (folder / "kept").glob("*/context.json")
    before = context.stat().st_mtime_ns
    with pytest.raises(ConfigError, match=r"line 1: .*already has the context of a request 'a'"):
        main(command(folder, "first.jsonl", "config.py", *flags))
    assert context.stat().st_mtime_ns == before
    with Contexts(str(folder / "kept"), None), pytest.raises(ConfigError, match="is being used by another process"):
        main(command(folder, "third.jsonl", "config.py", *flags))


def test_the_lines_of_the_page(tmp_path):
    (block,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "experiments.md").read_text(), re.DOTALL)
    for number, line in enumerate(block.splitlines(), 1):
        (tmp_path / "requests.jsonl").write_text(line + "\n")
        flags = [f"--contexts={tmp_path / 'kept'}", *["--most_new_tokens=64"][: 2 - number]]
        assert main(command(tmp_path, f"{number}.jsonl", str(ROOT / "configs" / "h2o_tiny.py"), *flags)) == 0
    (result,) = read(tmp_path / "2.jsonl")
    assert result["new_tokens"] == 32 and result["text"]
