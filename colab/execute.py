"""Runs quickstart.ipynb, writes its outputs into it, and makes h2o_survivors.png of one of them: ``make notebooks``.

Both files name the weights that they are of, so that tests/test_shipped_outputs.py fails when kvjax-tiny has others.
"""

import base64
import io
from pathlib import Path

import nbclient
import nbformat
from PIL import Image, PngImagePlugin

from experiments.reports.plots import WEIGHTS
from experiments.runs import identity

FOLDER = Path(__file__).resolve().parent
NOTEBOOK, PICTURE = FOLDER / "quickstart.ipynb", FOLDER / "h2o_survivors.png"
MODEL = "kvjax-tiny"
DRAWN = "plot-h2o"  # the cell whose output is the picture


def execute() -> None:
    """Writes both files."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        # The times of its execution.
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    weights = identity.of_weights(MODEL)
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kvjax"] = {WEIGHTS: weights}
    nbformat.write(notebook, NOTEBOOK)
    (cell,) = (each for each in notebook.cells if each["id"] == DRAWN)
    (drawn,) = (each.data["image/png"] for each in cell.outputs if "image/png" in each.get("data", {}))
    about = PngImagePlugin.PngInfo()
    about.add_text(WEIGHTS, weights)
    with Image.open(io.BytesIO(base64.b64decode(drawn))) as image:
        image.save(PICTURE, "PNG", pnginfo=about)


if __name__ == "__main__":
    execute()
