"""Runs the notebooks of this folder and writes their outputs into them: ``make notebooks``.

    python colab/execute.py                       # all of them
    python colab/execute.py quickstart serving    # some

It also writes what all of them begin with: the badge, and the cell that installs kvjax. `REPOSITORY` is the only place
that says where kvjax is. h2o_survivors.png is made of an output of quickstart.ipynb. Notebooks and picture name the
weights that they were made with, so that tests/test_shipped_outputs.py fails when kvjax-tiny has others.
"""

import base64
import io
import sys
from collections.abc import Mapping
from pathlib import Path

import nbclient
import nbformat
from PIL import Image, PngImagePlugin

from experiments.reports.plots import WEIGHTS
from experiments.runs import identity

REPOSITORY, BRANCH = "kvjax/kvjax", "main"  # on GitHub

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = (
    "quickstart",
    "own_policy",
    "own_storage",
    "heavy_hitters",
    "infinigen",
    "quality_against_bytes",
    "serving",
)
PICTURE = FOLDER / "h2o_survivors.png"
MODEL = "kvjax-tiny"
DRAWN = "plot-h2o"  # the cell of quickstart.ipynb whose output is the picture
TITLE, INSTALL = "title", "install"  # the cells that every notebook has
SECONDS = 300  # for one cell

BADGE = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{repository}/blob/{branch}/colab/{name}.ipynb)"""

INSTALL_SOURCE = """\
REPOSITORY = "https://github.com/{repository}"
MEASURE = False  # @param {{type: "boolean"}}

import importlib.util
import warnings
from importlib.metadata import distributions
from pathlib import Path

if getattr(importlib.util.find_spec("kvjax"), "origin", None) is None:
    # Colab's jax fits its accelerator: pip may add packages, but no other jax. kvjax needs jax 0.10.2 or newer; where
    # it is older, pip says so and installs nothing.
    held = [f"{{each.name}}=={{each.version}}\\n" for each in distributions() if each.name in ("jax", "jaxlib")]
    Path("constraints.txt").write_text("".join(held))
    %pip install -q -c constraints.txt "kvjax[experiments,serve] @ git+{{REPOSITORY}}"
warnings.filterwarnings("ignore", message="IProgress not found")  # progress bars are text where ipywidgets is missing

# kvjax has been measured on few accelerators. If this runtime has one, set MEASURE before anything else uses it.
devices = [each for name in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*") for each in Path("/dev").glob(name)]
if MEASURE:
    !git clone -q {{REPOSITORY}} kvjax-clone
    !cd kvjax-clone && python -m experiments.bench accelerator --output=../accelerator
if devices:
    print("This runtime has an accelerator. To measure kvjax on it, in eight minutes, set MEASURE = True, restart, and")
    print(f"run this cell. Please send accelerator/report.md as a new issue: {{REPOSITORY}}/issues")
"""


def badge(name: str) -> str:
    """Returns the Markdown of a notebook's badge."""
    return BADGE.format(repository=REPOSITORY, branch=BRANCH, name=name)


def install_source() -> str:
    """Returns the source of the cell that installs kvjax, without a newline at its end."""
    return INSTALL_SOURCE.format(repository=REPOSITORY).rstrip("\n")


def write_common_cells(name: str, notebook: nbformat.NotebookNode) -> None:
    """Writes the badge above the title, and the cell that installs kvjax."""
    cells: Mapping[str, nbformat.NotebookNode] = {each["id"]: each for each in notebook.cells}
    *before, text = cells[TITLE].source.partition("# ")[1:]
    cells[TITLE].source = f"{badge(name)}\n\n{''.join(before)}{text}"
    cells[INSTALL].source = install_source()


def execute(name: str) -> nbformat.NotebookNode:
    """Runs a notebook in this folder, writes its outputs into it, and returns it."""
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    write_common_cells(name, notebook)
    nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        # The times of its execution.
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kvjax"] = {WEIGHTS: identity.of_weights(MODEL)}
    nbformat.write(notebook, path)
    return notebook


def write_picture(quickstart: nbformat.NotebookNode) -> None:
    """Writes the map of what H2O keeps, which the README shows."""
    (cell,) = (each for each in quickstart.cells if each["id"] == DRAWN)
    (drawn,) = (each.data["image/png"] for each in cell.outputs if "image/png" in each.get("data", {}))
    about = PngImagePlugin.PngInfo()
    about.add_text(WEIGHTS, identity.of_weights(MODEL))
    with Image.open(io.BytesIO(base64.b64decode(drawn))) as image:
        image.save(PICTURE, "PNG", pnginfo=about)


def main(names: list[str]) -> None:
    """Runs the notebooks of these names; all, if there are none."""
    if unknown := sorted(set(names) - set(NOTEBOOKS)):
        sys.exit(f"no notebook is named {', '.join(unknown)}; there are {', '.join(NOTEBOOKS)}")
    for name in names or NOTEBOOKS:
        notebook = execute(name)
        if name == "quickstart":
            write_picture(notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
