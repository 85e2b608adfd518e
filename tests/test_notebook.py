"""The notebooks in colab/: each runs from top to bottom, shows what it promises, and is shipped clean with its outputs.

Here they run with fewer prompts and policies: `SMALLER` changes the constants of their cell `sizes`. All of them run in
one process, one after the other, so that jax is imported once; names are forgotten in between.
"""

import base64
import json
import os
import re
import struct
import sys

import pytest

from tests.conftest import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat: pip install 'kvjax[notebook]'")

FOLDER = ROOT / "colab"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
#: What each notebook's cell `sizes` says in these tests.
SMALLER = {
    "quickstart": {"PROMPTS": 2, "NEW_TOKENS": 16},
    "own_policy": {"PROMPTS": 2, "NEW_TOKENS": 16},
    "own_storage": {"REFERENCES": ("dense",), "PROMPTS": 2, "NEW_TOKENS": 16},
    "heavy_hitters": {"TOKENS": 160, "POLICIES": ("h2o",)},
    "quality_against_bytes": {
        "POLICIES": ("h2o",), "STORAGES": ("dense", "int8"), "BUDGETS": (0.2,), "PROMPTS": 2, "NEW_TOKENS": 16,
    },
    "serving": {"ROWS": 2, "REQUESTS": 4, "PROMPT": 256},
}  # fmt: skip
#: A path from the root or a home folder, Windows' too, that is not part of an address.
MACHINE_PATH = re.compile(r"(?<![\w:/.])(?:~?/\w[\w.-]*/|[A-Z]:\\)")
#: All notebooks together; an image of a plot takes 10 to 30 kB.
MAX_BYTES = 3_000_000


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A process of this very interpreter, in an empty folder, that runs the notebooks; yields its manager."""
    pytest.importorskip("ipykernel", reason="running the notebook needs ipykernel: pip install 'kvjax[notebook]'")
    pytest.importorskip("matplotlib", reason="the notebook draws with matplotlib: pip install 'kvjax[experiments]'")
    client = pytest.importorskip(
        "jupyter_client", reason="running the notebook needs nbclient: pip install 'kvjax[notebook]'"
    )
    folder = tmp_path_factory.mktemp("notebook")
    # An environment may hold no kernelspec, or one of another interpreter: this one comes first, under its own name.
    spec = folder / "jupyter" / "kernels" / "kvjax-test" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "kvjax test", "language": "python"}))
    work = folder / "work"
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        patch.setenv("JAX_PLATFORMS", "cpu")
        manager = client.KernelManager(kernel_name="kvjax-test")
        manager.start_kernel(cwd=str(work))
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def executed(kernel):
    """Returns a function: the name of a notebook -> the notebook after one run, which is the same for all tests."""
    nbclient = pytest.importorskip(
        "nbclient", reason="running the notebook needs nbclient: pip install 'kvjax[notebook]'"
    )
    done = {}

    def run(name):
        if name not in done:
            notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
            for each in notebook.cells:
                if each.cell_type == "code":
                    each.outputs = []
            lower(notebook, SMALLER.get(name, {}))
            forget = nbformat.v4.new_code_cell("%reset -f")
            own = nbformat.v4.new_notebook(cells=[forget, *notebook.cells], metadata=notebook.metadata)
            nbclient.NotebookClient(own, timeout=300, km=kernel).execute()  # raises what a cell raises
            done[name] = notebook
        return done[name]

    return run


def lower(notebook, sizes):
    """Changes constants of the cell `sizes`, which has one per line."""
    for name, value in sizes.items():
        own = cell(notebook, "sizes")
        own.source, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value!r}  ", own.source, flags=re.MULTILINE)
        assert count == 1, f"the cell `sizes` has no line for {name}"


def cell(notebook, name):
    return next(cell for cell in notebook.cells if cell["id"] == name)


def printed(notebook, name=None) -> str:
    """Returns the text that the notebook, or one of its cells, printed."""
    cells = notebook.cells if name is None else [cell(notebook, name)]
    outputs = [o for each in cells for o in each.get("outputs", ()) if o.output_type == "stream"]
    return "".join(o.text for o in outputs if o.name == "stdout")


def drawn(notebook) -> dict[str, bytes]:
    """Returns the picture of each cell that has one."""
    found = {}
    for each in notebook.cells:
        for output in each.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                found[each["id"]] = base64.b64decode(output.data["image/png"])
    return found


def assert_drawn(notebook, *names):
    pictures = drawn(notebook)
    for name in names:
        assert pictures[name].startswith(b"\x89PNG")
        width, height = struct.unpack(">II", pictures[name][16:24])
        assert width > 300
        assert height > 200


@pytest.mark.sampled(0)  # each takes half a minute; the README's example and the guides run the same calls
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_without_warnings(executed, name):
    streams = [o for each in executed(name).cells for o in each.get("outputs", ()) if o.output_type == "stream"]
    # matplotlib says so in an environment's first minute
    loud = [o.text for o in streams if o.name == "stderr" and "font cache" not in o.text]
    assert loud == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_shipped_outputs_are_whole_and_clean(name):
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "kvjax"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert [each for each in notebook.cells if each.metadata] == []
    code = [each for each in notebook.cells if each.cell_type == "code"]
    assert [each.execution_count for each in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    outputs = [output for each in code for output in each.outputs]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    shown = [o.get("data", {}).get(kind, "") for o in outputs for kind in ("text/plain", "text/html")]
    text = printed(notebook) + "".join(each.source for each in notebook.cells) + re.sub(r"</\w+>", "", "".join(shown))
    assert MACHINE_PATH.findall(text) == []


def test_all_notebooks_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < MAX_BYTES


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_says_in_one_way_where_kvjax_is(name):
    pytest.importorskip("nbclient", reason="colab/execute.py runs notebooks by nbclient: pip install 'kvjax[notebook]'")
    from colab import execute

    assert tuple(NOTEBOOKS) == tuple(sorted(execute.NOTEBOOKS))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert cell(notebook, "install").source == execute.install_source()
    assert cell(notebook, "title").source.startswith(f"{execute.badge(name)}\n\n# ")
    elsewhere = [each.source for each in notebook.cells if each["id"] not in ("install", "title")]
    assert "github" not in "".join(elsewhere)


FOUND = re.compile(r"^([\w +]+): (\d) of (\d) codes found, ([\d.]+)% of", re.MULTILINE)


@pytest.mark.sampled(0)
def test_quickstart_ends_on_a_cache_that_wins(executed):
    notebook = executed("quickstart")
    found = {name: (int(codes) / int(of), float(share)) for name, codes, of, share in FOUND.findall(printed(notebook))}
    assert list(found) == ["full", "window", "h2o", "razor + int8"]
    assert found["full"] == (1, 100) and found["razor + int8"][0] == 1
    assert found["window"][0] == found["h2o"][0] == 0
    assert found["razor + int8"][1] < found["window"][1] == found["h2o"][1] < 25
    assert_drawn(notebook, "plot", "plot-h2o", "plot-razor")


SCORE = re.compile(r"^(\w+) +(\d+)% of the codes, perplexity ([\d.]+)$", re.MULTILINE)


@pytest.mark.sampled(0)
def test_own_policy_finds_what_others_have_evicted(executed):
    notebook = executed("own_policy")
    found = {name: (int(codes), float(perplexity)) for name, codes, perplexity in SCORE.findall(printed(notebook))}
    assert list(found) == ["full", "window", "h2o", "tova", "peak", "near_peak"]
    assert found["near_peak"][0] == found["full"][0] == 100
    assert max(found[name][0] for name in ("window", "h2o", "tova")) == 0
    assert found["near_peak"][1] < found["h2o"][1]
    assert "expected a jax array of float32" in printed(notebook, "errors")
    assert_drawn(notebook, "plot")


WROTE = re.compile(r"^([\w ]+) wrote (.*)\n +and read of the slots that it held (.*)$", re.MULTILINE)


@pytest.mark.sampled(0)
def test_infinigen_finds_what_h2o_has_evicted(executed):
    notebook = executed("infinigen")
    found = {name: (text, shares.split(", ")) for name, text, shares in WROTE.findall(printed(notebook))}
    assert list(found) == ["full", "h2o", "infinigen", "no cap", "everything chosen"]
    assert {name for name, (text, _) in found.items() if "38062" in text} == set(found) - {"h2o"}
    shares = {name: [float(share.rstrip("%")) for share in own] for name, (_, own) in found.items()}
    assert shares["infinigen"][:2] == [100, 100] and all(0 < share < 3 for share in shares["infinigen"][2:])
    assert shares["full"] == shares["everything chosen"] == [100] * 6
    assert min(shares["no cap"]) < 95
    assert "some head still holds 0 of the 5 digits" in printed(notebook)
    assert_drawn(notebook, "chosen", "counts", "bytes")


@pytest.mark.sampled(0)
def test_infinigen_counts_bytes(executed):
    text = printed(executed("infinigen"))
    number = r"([\d,.]+)"
    rows = re.findall(rf"^([\w ]+?) +moved +{number} kB a step, needed +{number}$", text, re.MULTILINE)
    moved, needed = ({row[0]: float(row[i].replace(",", "")) for row in rows} for i in (1, 2))
    assert moved["infinigen"] < moved["full"] / 2 and needed["no cap"] < moved["no cap"]
    formula, planned = re.search(rf"infinigen: {number} GB by this formula, {number} GB by the plan", text).groups()
    assert formula == planned
    assert "same tokens: True" in text
    assert float(re.search(r"log-probabilities: (\S+)", text).group(1)) < 1e-4


STORED = re.compile(r"^([\w, ]+?) +(\d+) kB a prompt, +(\d+)% of the codes, perplexity ([\d.]+)$", re.MULTILINE)


@pytest.mark.sampled(0)
def test_own_storage_is_measured(executed):
    notebook = executed("own_storage")
    found = {name: tuple(map(float, rest)) for name, *rest in STORED.findall(printed(notebook))}
    assert list(found) == ["dense", "signs", "mixed", "mixed, 16 exact"]
    sizes = [found[name][0] for name in ("signs", "mixed", "mixed, 16 exact", "dense")]
    assert sizes == sorted(sizes)
    assert found["dense"][1] == 100 and found["signs"][1] < 100
    assert found["mixed, 16 exact"][2] < found["mixed"][2] < found["signs"][2]
    assert_drawn(notebook, "plot")


@pytest.mark.sampled(0)
def test_heavy_hitters_are_seen(executed):
    notebook = executed("heavy_hitters")
    top, share = map(int, re.search(r"the (\d+) tokens that receive most hold (\d+)% of", printed(notebook)).groups())
    assert 100 * top / SMALLER["heavy_hitters"]["TOKENS"] < 25 and share > 50
    missed = dict(re.findall(r"^(\w+) +misses ([\d.]+)% of the attention", printed(notebook), re.MULTILINE))
    assert list(missed) == ["h2o"] and 0 < float(missed["h2o"]) < 50
    (shaded,) = (output.data["text/html"] for output in cell(notebook, "which").outputs if "data" in output)
    assert shaded.count("<span") == SMALLER["heavy_hitters"]["TOKENS"]
    assert_drawn(notebook, "sparsity", "accumulated", "kept", "missed", "heads")


@pytest.mark.sampled(0)
def test_quality_is_drawn_against_bytes(executed):
    notebook = executed("quality_against_bytes")
    row = re.compile(r"^(\w+) +(\w+) +(\d+)% +([\d.]+) +(\d+)$", re.MULTILINE)
    found = {(name, held): (int(codes), int(size)) for name, held, codes, _, size in row.findall(printed(notebook))}
    assert set(found) == {(name, held) for name in ("full", "h2o") for held in ("dense", "int8")}
    assert found["full", "dense"][0] == 100 and found["h2o", "dense"][0] == 0
    assert found["full", "int8"][1] < found["full", "dense"][1] / 3
    assert found["h2o", "dense"][1] < found["full", "dense"][1] / 3
    assert_drawn(notebook, "plot")


@pytest.mark.sampled(0)
def test_serving_answers_requests_as_generate_does(executed):
    notebook = executed("serving")
    text = printed(notebook)
    assert "the same tokens: True" in text
    assert "Clara: ' 5318'" in text and "Hugo: ' 2907'" in text
    assert len(re.findall(r"^ *\d+: +\d+ tokens, +\d+ new: ", text, re.MULTILINE)) == SMALLER["serving"]["REQUESTS"]
    sizes = [float(size) for size in re.findall(r"^\S.*? +([\d.]+) +\d+$", printed(notebook, "memory"), re.MULTILINE)]
    assert len(sizes) == 3 and sizes == sorted(sizes, reverse=True)


@pytest.mark.sampled(0)
def test_serving_starts_a_server(executed):
    notebook = executed("serving")
    assert "'completion_tokens': 24" in printed(notebook, "call")
    assert re.search("the same text: True|not installed", printed(notebook, "client"))
    assert "'status': 'ok'" in printed(notebook, "end")
    assert printed(notebook, "end").endswith("the server has ended\n")
