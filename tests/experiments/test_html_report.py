"""A run's report as one page: what report.md has, the plots inside of it, and the tokens that caches hold."""

import base64
import html
import json
import re

import numpy as np
import pytest

from experiments.programs import run
from experiments.reports import html_report, tables
from experiments.runs import text_view
from kvjax.analysis.held import HeldTokens
from kvjax.analysis.viewer import CacheView, Viewer
from tests import browser
from tests.tiny import tiny


def page(**changes) -> str:
    own = HeldTokens((0,), [[np.array([0])]], [[{}]], 2, 2)
    given = {
        "title": "a run", "paragraphs": ["A model & <its> text."], "command": "python -m x --y='<z>'",
        "rows": [{"policy": "h2o(<a>)", "KV held": "1 MB"}], "plots": {"Plot of a run": b"\x89PNG"},
        "sections": [tables.Section("Bytes <held>", "About.", [{"policy": "full", "codes": "-"}])],
        "texts": [("full", "it </dd> was")], "viewer": Viewer(["<b>", "c"], [CacheView("full", own, ["d"])]),
    }  # fmt: skip
    return html_report.page(given.pop("title"), given.pop("paragraphs"), **given | changes)


def test_everything_that_is_given_is_on_the_page_and_escaped():
    text = page()
    assert text.startswith("<!doctype html>")
    for part in (
        "<h1>a run</h1>", "<p>A model &amp; &lt;its&gt; text.</p>", ">h2o(&lt;a&gt;)</td>", "<td>1 MB</td>",
        "--y=&#39;&lt;z&gt;&#39;", "<h2>Bytes &lt;held&gt;</h2>", "it &lt;/dd&gt; was", "<em>Perplexity</em> is of the",
        f'alt="Plot of a run" src="data:image/png;base64,{base64.b64encode(bytes([137]) + b"PNG").decode()}"',
        'class="kvjax-viewer"',
    ):  # fmt: skip
        assert part in text, part
    assert "<its>" not in text and "<b>" not in text.split("<script")[0]


def test_without_a_command_or_a_viewer():
    text = page(viewer=None, command="", sections=[])
    assert "kvjax-viewer" not in text and "<code>" not in text and "<script" not in text


def test_a_page_asks_no_network_for_anything():
    assert not re.search(r"""(?:src|href)=["'](?!data:)|https?:|url\(|@import|fetch\(""", page())
    assert "default-src 'none'" in page()


@pytest.mark.sampled(0)
def test_a_run_writes_it_whole(small, tmp_path):
    small.repeats = 0
    folder = run.run(small, command="the command")
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>") and len(text) < 1 << 20
    plot = base64.b64encode((folder / "report.png").read_bytes()).decode()
    assert plot in text and "the command" in text
    rows = [line.split("|")[1:-1] for line in (folder / "report.md").read_text().splitlines() if line.startswith("| ")]
    for name, _, perplexity, *_ in rows:
        assert f">{name.strip()}</t" in text and f">{perplexity.strip()}</t" in text
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    data = json.loads(found)
    assert len(data["prompt"]) == 16 and data["full"] == 0 and data["answers"] == "Continuation"
    full, window = data["caches"]
    assert len(full["answer"]) == len(window["answer"]) == 6
    blobs = [np.frombuffer(base64.b64decode(each), np.uint8) for each in data["blobs"]]
    held = [np.unpackbits(blobs[each["held"][0][0]], bitorder="little") for each in (full, window)]
    assert np.flatnonzero(held[0]).tolist() == list(range(21))
    assert np.flatnonzero(held[1]).tolist() == [0, 1, *range(15, 21)]  # two sinks, and the newest
    if browser.PROGRAM is not None:  # tests/analysis/test_viewer.py says so
        shown = browser.opened(folder / "report.html", "cache=1&layer=0&head=0")
        assert not shown.messages and 'data-held="8"' in shown.dom
        texts = re.findall(r"<span[^>]*>(.*?)</span>", shown.inside("full"), re.S)
        assert [html.unescape(each) for each in texts] == [each or "·" for each in full["answer"]]


@pytest.mark.parametrize(
    ("room", "layers"), [(1 << 22, (0, 1)), (2 * 100 * 3 * 2, (0, 1)), (2 * 100 * 3, (0,)), (1, (0,))]
)
def test_layers_are_left_out_where_a_page_would_be_too_large(monkeypatch, room, layers):
    monkeypatch.setattr(text_view, "MOST_SLOTS", room)
    assert text_view.shown_layers(tiny().model, 100, 3) == layers
