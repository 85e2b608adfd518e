"""Capacities on the command line, from shapes alone; their prices, and the page of results."""

import json

import pytest

import experiments.capacity
from experiments.reports import capacity_page, prices
from kvjax.devices import DEVICES
from kvjax.errors import ConfigError
from tests.conftest import ROOT

MEASURED = ROOT / "experiments" / "measured" / "capacity"
ARGUMENTS = ["capacity", "--config=capacity", "--config.model.shape=tiny", "--topology=h100:2"]


def test_every_price_has_a_day_and_a_source():
    for kind, price in prices.table().items():
        assert kind in DEVICES and price.device == kind
        assert price.amount > 0 and price.currency == "USD" and price.provider and price.region
        assert price.date.year >= 2024 and price.source.startswith("https://")


def test_results_and_their_page(tmp_path, capsys):
    assert experiments.capacity.main([*ARGUMENTS, f"--output={tmp_path}/tiny.json"]) == 0
    printed = capsys.readouterr().out
    kept = json.loads((tmp_path / "tiny.json").read_text())
    assert [each["policy"] for each in kept["caches"]] == ["full", "h2o", "roco", "full + int8", "h2o + int8"]
    assert kept["price"] == prices.table()["NVIDIA H100 80GB HBM3"].as_dict()
    assert kept["command"] == f"python -m experiments.{' '.join(ARGUMENTS)}"
    assert f"{kept['price']['amount']:.2f} USD for an hour of a chip on demand" in printed
    # A cost is the price of both GPUs for as long as a million tokens take.
    for each in kept["caches"]:
        hourly = each["dollars_per_million"] / 1e6 * each["tokens_per_second"] * 3600
        assert hourly == pytest.approx(2 * kept["price"]["amount"])
    assert experiments.capacity.main(["capacity", f"--page={tmp_path}"]) == 0
    page = (tmp_path / "README.md").read_text()
    assert page == capacity_page.page(tmp_path)
    for line in [line for line in printed.splitlines() if line.startswith("|")]:
        assert line in page
    assert f"at most {kept['caches'][-1]['batch']:,}" in page and kept["price"]["source"] in page


def test_a_price_of_ones_own(tmp_path, capsys):
    assert experiments.capacity.main([*ARGUMENTS, "--config.baselines=none", "--price=1.5"]) == 0
    assert "1.50 USD for an hour of a chip, by --price." in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"h100:9.*1 to 8 GPUs"):
        experiments.capacity.main([*ARGUMENTS[:-1], "--topology=h100:9"])


def test_the_page_is_of_the_results():
    assert (MEASURED / "README.md").read_text() == capacity_page.page(MEASURED)
