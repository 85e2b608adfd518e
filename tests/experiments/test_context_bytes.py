"""Contexts as bytes, from the command line."""

import json

import numpy as np
import pytest

import experiments.context_bytes
from experiments.runs import data
from kvjax.errors import ConfigError


@pytest.mark.sampled(0)
def test_a_small_table(tmp_path, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "made.json"
    text.write_text(data.generated_text(6000))
    arguments = ["--rows=2", "--calibration=2", "--prompt=96", "--scored=16", "--ratios=4", "--generated=8"]
    arguments.append("--storages=int8;int2(32);low_rank(16, 16);mikv")
    argv = ["context_bytes", f"--text={text}", f"--output={output}", *arguments]
    assert experiments.context_bytes.main(argv) == 0
    shown, made = capsys.readouterr(), json.loads(output.read_text())
    found = {each["name"]: each for each in made["results"]}
    assert found["exact, float32"]["bits"] == 32 and found["float16"]["bits"] == 16
    assert found["storage int8"]["bits"] == 9 and "mikv" in shown.err
    levels = [found[f"CacheGen {level}, no differences"] for level in (1, 2, 3)]
    assert [each["bits"] for each in levels] == sorted(each["bits"] for each in levels)
    assert all(each["bits"] >= each["ideal"] for each in found.values() if each["ideal"] is not None)
    assert found["KVTC 4, no recent tokens"]["bits"] < found["KVTC 4"]["bits"]
    assert found["storage int2(32)"]["bits"] == 4 and found["storage low_rank(16, 16)"]["bits"] == 8  # 16 of 64 numbers
    assert list(made["refused"]) == ["mikv"]  # a full cache has no low tier
    kinds = [each["kind"] for each in made["results"]]
    assert sorted(set(kinds)) == ["codec", "numbers", "storage"] and kinds.count("storage") == 3
    assert all(each["kind"] == "codec" for each in found.values() if each["ideal"] is not None)
    coded = {name: each["bits"] for name, each in found.items() if each["kind"] == "codec"}
    for name, nearest in made["nearest"].items():
        ratios = {codec: max(bits / found[name]["bits"], found[name]["bits"] / bits) for codec, bits in coded.items()}
        assert ratios[nearest] == min(ratios.values())
    assert set(found["KVTC 4, no recent tokens"]["parts"]) == {"exact", "codes"}
    assert set(found["KVTC 4"]["parts"]) == {"exact"}  # the newest 128 tokens are exact, which are all
    assert set(found["CacheGen 1"]["parts"]) == {"ranges", "codes"}
    assert found["storage int8"]["parts"]["codes"] == 8 * found["storage int8"]["parts"]["parameters"]
    assert found["exact, float32"]["agreement"] == [1.0, 1.0]
    for each in found.values():
        assert sum(each["parts"].values()) == each["bytes"] == pytest.approx(each["bits"] * made["numbers"] / 8)
        assert all(0 <= share <= 1 for share in each["agreement"])
        assert len(each["nats"]) == 2 and np.abs(np.subtract(each["nats"], found["exact, float32"]["nats"])).max() < 1
        assert each["name"] in shown.out
    assert str(tmp_path) not in output.read_text()


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--text"):
        experiments.context_bytes.main(["context_bytes"])
    (tmp_path / "text.txt").write_text("It was late.")
    arguments = ["context_bytes", f"--text={tmp_path}/text.txt"]
    with pytest.raises(ConfigError, match="may have 1024 tokens"):
        experiments.context_bytes.main([*arguments, "--prompt=1000", "--scored=100"])
    with pytest.raises(ConfigError, match="must be numbers"):
        experiments.context_bytes.main([*arguments, "--ratios=many"])


@pytest.mark.parametrize("storages", ["int8,int4", "int8;nothing", "int8;kivi(bits=none)"])
def test_names_of_storages_are_read_before_the_model(tmp_path, storages):
    (tmp_path / "text.txt").write_text("It was late.")
    arguments = ["context_bytes", "--model=nowhere", f"--text={tmp_path}/text.txt", f"--storages={storages}"]
    with pytest.raises(ConfigError, match=r"--storages.*separated by semicolons, such as int8;kivi\(2\)"):
        experiments.context_bytes.main(arguments)
