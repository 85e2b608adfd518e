"""Plans of serving from the command line."""

import json

import pytest

import experiments.simulate
from kvjax.errors import ConfigError, KvjaxError
from kvjax.units import size

ARGUMENTS = ["--shape=llama2-7b", "--topology=h100:1"]


def run(*argv):
    return experiments.simulate.main(["simulate", *argv])


@pytest.mark.parametrize("subject", experiments.simulate.SUBJECTS)
def test_a_table_and_a_file(subject, tmp_path, capsys):
    file = tmp_path / "made.json"
    small = ["--users=6", "--turns=2", "--rate=100", "--requests=12", "--long=4000", "--flash_rate=12e9"]
    assert run(subject, *ARGUMENTS, *small, f"--output_file={file}") == 0
    made = json.loads(file.read_text())
    assert (made["subject"], made["shape"], made["topology"]) == (subject, "llama2-7b", "h100:1")
    printed = capsys.readouterr().out
    assert "nothing was measured" in printed
    for row in made["rows"]:
        assert str(next(iter(row.values()))) in printed
    if subject == "serving":
        full, slots = made["rows"]
        assert full["rows"] < slots["rows"] and full["prompt, s"] < slots["prompt, s"]
    if subject == "pool":
        assert [row["memory"] for row in made["rows"]] == ["own", "pool"] * 2
        assert all(row["finished"] == 12 for row in made["rows"])
    if subject == "phases":
        # Without --overlap, the link is faster than computing again.
        assert [row["phase"] for row in made["rows"]].count("recomputed") == 0 < made["rows"][-1]["on the host"]
    if subject == "traffic":
        passes = [row["moved"] for row in made["rows"] if row["unit"] == "passes"]
        assert passes == [1, 2, 3]
    if subject == "blend":
        (row,) = made["rows"]
        assert 15 <= row["computed again, %"] < 100 and row["TTFT, s"] < row["of a whole prefill, s"]
    if subject == "transfer":
        *chunks, whole = made["rows"]
        assert [row["tokens"] for row in chunks] == [1500, 1500, 1096] and whole["in time"]
        assert {row["sent as"] for row in chunks} == {"text"}, "an H100 computes them within a second"
    if subject == "activations":
        shares = [row["offloaded, %"] for row in made["rows"]]
        assert shares == sorted(shares) and 0 < shares[0] < 100


def test_slots_by_layer_and_bytes_of_a_storage(tmp_path):
    """A quarter of the layers full, the others with 512 slots: of LLaMA 2 7B, 8 and 24 of 32."""
    file = tmp_path / "made.json"
    by_layer = ["--policy=split_layers(full(), h2o(512), shares=(1, 3))", "--tokens=4096"]
    found = {}
    for storage, slot in ((None, 2 * 32 * 128 * 2), ("int8", 2 * 32 * (128 + 4 * 2))):
        more = [] if storage is None else [f"--storage={storage}"]
        assert run("serving", *ARGUMENTS, *by_layer, *more, f"--output_file={file}") == 0
        full, split = json.loads(file.read_text())["rows"]
        assert split["cache"] == by_layer[0].removeprefix("--policy=")
        assert full["bytes of a row"] == size(32 * 4096 * slot)
        assert split["bytes of a row"] == size((8 * 4096 + 24 * 512) * slot)
        found[storage] = split["rows"]
    assert found["int8"] > found[None]
    for subject in ("layouts", "preemption", "pool"):
        assert run(subject, *ARGUMENTS, *by_layer, "--users=3", "--requests=4", "--turns=2") == 0


@pytest.mark.parametrize("subject", experiments.simulate.SUBJECTS)
def test_flags_that_a_subject_does_not_take_are_refused(subject):
    options = [*ARGUMENTS, "--users=3", "--requests=4", "--turns=2", "--flash_rate=12e9", "--tokens=600"]
    taken = {"--policy=h2o(64)": experiments.simulate.BY_LAYER, "--storage=int8": experiments.simulate.BY_BYTES}
    for flag, subjects in taken.items():
        if subject in subjects:
            assert run(subject, *options, flag) == 0
        else:
            with pytest.raises(ConfigError, match=f"{flag.split('=')[0]} is for serving, .*; {subject}"):
                run(subject, *options, flag)


def test_slots_in_host_memory(tmp_path):
    """A row takes none of the device's memory: rows are as many as fit in the host's."""
    file = tmp_path / "made.json"
    host = ["--storage=dense(memory=host)", "--host_memory=64GB"]
    assert run("serving", *ARGUMENTS, *host, "--tokens=4096", f"--output_file={file}") == 0
    full, slots = json.loads(file.read_text())["rows"]
    assert full["bytes of a row"] == full["on the host"] == size(2_147_483_648)
    assert full["rows"] == 64 * 10**9 // 2_147_483_648 and slots["rows"] == 64 * 10**9 // 268_435_456
    assert run("preemption", *ARGUMENTS, host[0], "--users=3", "--turns=2", f"--output_file={file}") == 0
    assert {row["moved"] for row in json.loads(file.read_text())["rows"]} == {size(0)}
    for subject in ("layouts", "pool", "phases", "blend"):
        with pytest.raises(KvjaxError, match="slots are in the device's memory; this model's storage holds 524288 of"):
            run(subject, *ARGUMENTS, host[0], "--users=3", "--requests=4")


def test_a_share_is_of_each_prompt_of_a_trace(tmp_path):
    """Whatever --tokens says; layouts have the slots of the longest prompt."""
    file, found = tmp_path / "made.json", {}
    small = ["--users=4", "--turns=2", "--requests=6", "--rate=100", "--long=4000", "--policy=h2o(0.5)"]
    for subject in ("preemption", "pool", "layouts"):
        for tokens in (256, 4096):
            assert run(subject, *ARGUMENTS, *small, f"--tokens={tokens}", f"--output_file={file}") == 0
            found[subject, tokens] = json.loads(file.read_text())["rows"]
    for subject in ("preemption", "pool"):
        assert found[subject, 256] == found[subject, 4096]
    # LLaMA 2 7B: half of 8,192 slots, and one for the newest token, in 32 layers.
    *_, slots = found["layouts", 256]
    assert slots["bytes of 256 tokens"] == size(32 * 4097 * 2 * 32 * 128 * 2)


def test_slots_of_a_policy_that_keeps_the_prompt(tmp_path):
    """Those of the prompt and its own: at the end of a prompt, as many bytes as a full cache."""
    file = tmp_path / "made.json"
    policy = "--policy=phases(full(), random(128, every=64))"
    assert run("serving", *ARGUMENTS, "--tokens=4096", policy, f"--output_file={file}") == 0
    full, kept = json.loads(file.read_text())["rows"]
    assert kept["bytes of a row"] == full["bytes of a row"] == size(2_147_483_648)
    assert kept["rows"] == full["rows"]


def test_chunks_are_sent_at_levels_if_there_is_no_time_to_compute(tmp_path):
    file = tmp_path / "made.json"
    late = ["--tokens=3000", "--chunk=1500", "--slo=0.03", "--trace=0:2e10", "--bits=2,4"]
    assert run("transfer", *ARGUMENTS, *late, f"--output_file={file}") == 0
    *chunks, whole = json.loads(file.read_text())["rows"]
    # 1,500 tokens of 32 layers, 2 * 32 * 128 numbers each: 98 MB at 2 bits of a number, 5 ms; 10 ms at 4 bits.
    assert [row["sent as"] for row in chunks] == ["level 2", "level 2"]
    assert [row["bytes"] for row in chunks] == ["197 MB", "197 MB"]
    assert whole["in time"] and whole["s"] == pytest.approx(2 * 1500 * 32 * 2 * 32 * 128 * 4 / 8 / 2e10)


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        ([], "give what to simulate: serving"),
        (["weather"], "give what to simulate"),
        (["serving", "--shape=llama2-7b"], "--topology"),
        (["serving", *ARGUMENTS[1:]], "--shape"),
        (["storage", *ARGUMENTS], "--flash_rate"),
        (["phases", *ARGUMENTS, "--host_memory=much"], "--host_memory='much' is not valid"),
        (["pool", *ARGUMENTS, "--percentiles=90"], "--percentiles=90 is not computed; computed: 50, 95, 99, 99.9"),
        (["blend", *ARGUMENTS, "--load_rates=fast"], "--load_rates=fast is not valid"),
        (["transfer", *ARGUMENTS, "--bits=abc"], "--bits=abc is not valid; give numbers above 0, such as 2.5"),
        (["transfer", *ARGUMENTS, "--bits="], "--bits needs a number for each level"),
        (["transfer", *ARGUMENTS, "--trace=1e9"], "--trace=1e9 is not valid; give SECONDS:BYTES/S"),
        (["serving", *ARGUMENTS, "--policy=h2o(64)", "--budget=64"], "--budget=64 is not valid with it"),
        (["phases", "--shape=llama2-70b", "--topology=h100:1"], "do not fit"),
        (["layouts", "--shape=llama2-70b", "--topology=h100:1"], "do not fit"),
    ],
)
def test_what_is_refused(argv, match):
    with pytest.raises(ConfigError, match=match):
        run(*argv)
