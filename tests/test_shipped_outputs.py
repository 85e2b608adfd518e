"""Outputs of kvjax-tiny that are shipped are of the weights that are shipped."""

import json

import pytest

from experiments.reports import plots
from experiments.runs import identity
from tests.conftest import ROOT

HINT = "made with other weights; `make notebooks` makes those of colab/ anew, and demo.png is report.png of `make demo`"


def weights_of(path):
    if path.suffix == ".ipynb":
        return json.loads(path.read_text())["metadata"]["kvjax"][plots.WEIGHTS]
    Image = pytest.importorskip("PIL.Image", reason="pictures need kvjax[experiments]")
    with Image.open(path) as image:
        return image.text[plots.WEIGHTS]


NOTEBOOKS = sorted(f"colab/{path.name}" for path in (ROOT / "colab").glob("*.ipynb"))


@pytest.mark.parametrize("name", [*NOTEBOOKS, "colab/h2o_survivors.png", "experiments/measured/demo.png"])
def test_an_output_names_the_weights(name):
    assert weights_of(ROOT / name) == identity.of_weights("kvjax-tiny"), HINT


def test_other_weights_have_another_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert identity.of_weights(str(tmp_path)) == "", "no weights, no name"
    names = {identity.of_weights("kvjax-tiny")}
    for weights in (b"some", b"others"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        names.add(identity.of_weights(str(tmp_path)))
    assert len(names) == 3
    assert identity.of_weights("no-such-model") == ""
