"""The notebooks in colab/: each runs from top to bottom, shows what it promises, and is shipped clean.

quickstart.ipynb is shipped with its outputs, infinigen.ipynb without.
"""

import base64
import json
import os
import re
import struct
import sys

import pytest

from tests.conftest import ROOT

nbformat = pytest.importorskip("nbformat", reason="the notebook needs nbformat: pip install 'kvjax[notebook]'")

NOTEBOOK = ROOT / "colab" / "quickstart.ipynb"
INFINIGEN = ROOT / "colab" / "infinigen.ipynb"
POLICIES = ("full", "window", "h2o", "mean_h2o")
MAPS = ("plot", "plot-h2o", "own")  # the cells that draw which positions survived
#: A path from the root or a home folder, Windows' too, that is not part of an address.
MACHINE_PATH = re.compile(r"(?<![\w:/.])(?:~?/\w[\w.-]*/|[A-Z]:\\)")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return execute(NOTEBOOK, tmp_path_factory, JAX_DISABLE_MOST_OPTIMIZATIONS="1")


@pytest.fixture(scope="module")
def infinigen(tmp_path_factory):
    """Seven programs are compiled once and run for a second, so that they are compiled as fast as can be."""
    return execute(INFINIGEN, tmp_path_factory, JAX_DISABLE_MOST_OPTIMIZATIONS="1")


def execute(path, tmp_path_factory, **variables):
    """The notebook after one run, in an empty folder, by this very interpreter, with environment variables."""
    nbclient = pytest.importorskip(
        "nbclient", reason="running the notebook needs nbclient: pip install 'kvjax[notebook]'"
    )
    pytest.importorskip("ipykernel", reason="running the notebook needs ipykernel: pip install 'kvjax[notebook]'")
    pytest.importorskip("matplotlib", reason="the notebook draws with matplotlib: pip install 'kvjax[experiments]'")
    folder = tmp_path_factory.mktemp("notebook")
    # An environment may hold no kernelspec, or one of another interpreter: this one comes first, under its own name.
    spec = folder / "jupyter" / "kernels" / "kvjax-test" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(
        json.dumps(
            {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "kvjax test",
                "language": "python",
            }
        )
    )
    work = folder / "work"
    work.mkdir()
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.delenv("KVJAX_MODEL", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="kvjax-test", resources={"metadata": {"path": str(work)}}
        )
        return client.execute()  # raises what a cell raises


def cell(notebook, name):
    return next(cell for cell in notebook.cells if cell["id"] == name)


def printed(notebook) -> str:
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "stream"]
    return "".join(o.text for o in outputs if o.name == "stdout")


def drawn(notebook, name) -> list[bytes]:
    data = [output.get("data", {}) for output in cell(notebook, name).outputs]
    return [base64.b64decode(d["image/png"]) for d in data if "image/png" in d]


def texts(notebook) -> dict[str, str]:
    """Returns the lines that each policy wrote: those indented below its name."""
    pattern = r"^(\w+): \d+ slots a head.*\n(?:the first .*\n)?((?:    .*\n)+)"
    return dict(re.findall(pattern, printed(notebook), re.MULTILINE))


def slots_and_bytes(notebook) -> dict[str, tuple[int, int]]:
    found = re.findall(r"^(\w+): (\d+) slots a head, ([\d,]+) bytes", printed(notebook), re.MULTILINE)
    return {name: (int(slots), int(held.replace(",", ""))) for name, slots, held in found}


def test_shows_every_policy(executed):
    assert tuple(texts(executed)) == POLICIES
    assert all(text.strip() for text in texts(executed).values())
    perplexities = re.findall(r"^(\w+) +perplexity of .*: ([\d,.]+)$", printed(executed), re.MULTILINE)
    assert [name for name, _ in perplexities] == ["full", "window", "h2o"]


def test_budget_is_held(executed):
    prompt = int(re.search(r"prompt: (\d+) tokens", printed(executed)).group(1))
    held = slots_and_bytes(executed)
    assert held["full"][0] > prompt
    for name in POLICIES[1:]:
        assert held[name][0] == prompt // 5
        assert held[name][1] < held["full"][1] / 4


def test_says_which_model_it_is_and_who_still_knows(executed):
    assert "Loaded kvjax-tiny: llama" in printed(executed)
    told = texts(executed)
    assert told["full"].split("5318")[0].strip() == "'"
    assert "5318" not in told["window"]


@pytest.mark.parametrize("name", MAPS)
def test_draws_the_survivors(executed, name):
    assert_drawn(executed, name)


def assert_drawn(notebook, name):
    (image,) = drawn(notebook, name)
    assert image.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", image[16:24])
    assert width > 600
    assert height > 200


@pytest.mark.parametrize("name", ["executed", "infinigen"])
def test_warns_of_nothing(request, name):
    notebook = request.getfixturevalue(name)
    streams = [o for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "stream"]
    # matplotlib says so in an environment's first minute
    loud = [o.text for o in streams if o.name == "stderr" and "font cache" not in o.text]
    assert loud == []


WROTE = re.compile(r"^([\w ]+) wrote (.*)\n +and read of the slots that it held (.*)$", re.MULTILINE)


def test_infinigen_finds_what_h2o_has_evicted(infinigen):
    found = {name: (text, shares.split(", ")) for name, text, shares in WROTE.findall(printed(infinigen))}
    assert list(found) == ["full", "h2o", "infinigen", "no cap", "everything chosen"]
    assert {name for name, (text, _) in found.items() if "38062" in text} == set(found) - {"h2o"}
    shares = {name: [float(share.rstrip("%")) for share in own] for name, (_, own) in found.items()}
    assert shares["infinigen"][:2] == [100, 100] and all(0 < share < 3 for share in shares["infinigen"][2:])
    assert shares["full"] == shares["everything chosen"] == [100] * 6
    assert min(shares["no cap"]) < 95
    assert "some head still holds 0 of the 5 digits" in printed(infinigen)


def test_infinigen_counts_bytes(infinigen):
    number = r"([\d,.]+)"
    rows = re.findall(rf"^([\w ]+?) +moved +{number} kB a step, needed +{number}$", printed(infinigen), re.MULTILINE)
    moved, needed = ({row[0]: float(row[i].replace(",", "")) for row in rows} for i in (1, 2))
    assert moved["infinigen"] < moved["full"] / 2 and needed["no cap"] < moved["no cap"]
    formula, planned = re.search(
        rf"4 layers: {number} GB a step by this formula, {number}", printed(infinigen)
    ).groups()
    assert formula == planned
    assert "same tokens: True" in printed(infinigen)
    assert float(re.search(r"log-probabilities: (\S+)", printed(infinigen)).group(1)) < 1e-4


@pytest.mark.parametrize("name", ["chosen", "counts", "bytes"])
def test_infinigen_draws(infinigen, name):
    assert_drawn(infinigen, name)


def read_clean(path):
    """The notebook as it is shipped, after checks of what any must be."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000
    assert set(notebook.metadata) - {"kvjax"} == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert [c for c in notebook.cells if c.metadata] == []
    text = printed(notebook) + "".join(c.source for c in notebook.cells)
    assert MACHINE_PATH.findall(text) == []
    return notebook


def test_infinigen_is_shipped_without_outputs():
    notebook = read_clean(INFINIGEN)
    assert [c for c in notebook.cells if c.get("outputs") or c.get("execution_count")] == []


def test_shipped_outputs_are_clean():
    notebook = read_clean(NOTEBOOK)
    assert tuple(texts(notebook)) == POLICIES
    for name in MAPS:
        assert len(drawn(notebook, name)) == 1
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
