"""The check of the built site, on small pages with and without faults."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from kvjax_site import chromium, hrefs, looks

needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="opens pages in Chromium, which is not installed")
DOT = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' width='8' height='8'/%3E"
PAGE = """<!DOCTYPE html><html data-theme="light"><head><meta name="viewport" content="width=device-width">
<style>
  html[data-theme="dark"] {{ color: white; background: black }}
  .box {{ overflow-x: auto }} .box div {{ width: 900px }}
  {style}
</style></head><body><article>{text}</article></body></html>"""


@pytest.fixture
def site(tmp_path):
    """Writes a page of a site, and returns its file."""

    def write(text: str, style: str = "", name: str = "index.html"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PAGE.format(text=text, style=style))
        return path

    return write


def test_links(site, tmp_path):
    site('<p id="a b"><a href="sub/other.html#there">x</a> <a href="#a%20b">y</a> <a href="https://x.org/z">z</a></p>')
    site('<h1 id="there"><a href="../index.html?q=1">back</a> <a href="">here</a></h1>', name="sub/other.html")
    assert hrefs.broken(tmp_path) == []
    site('<a href="gone.html">x</a> <a href="../index.html#gone">y</a> <img src="no.png">', name="sub/other.html")
    assert hrefs.broken(tmp_path) == [
        "index.html: sub/other.html#there leads to no anchor",
        "sub/other.html: gone.html leads to no file",
        "sub/other.html: ../index.html#gone leads to no anchor",
        "sub/other.html: no.png leads to no file",
    ]


@pytest.fixture(scope="module")
def browser():
    with chromium.Browser() as made:
        yield made


@needs_browser
def test_a_page_without_faults(browser, site, tmp_path):
    """A table that scrolls in its own box, and text that is hidden, are no faults."""
    hidden = '<p style="visibility: hidden; color: white">x</p>'
    page = site(f'<p>Text.</p><div class="box"><div>Wide.</div></div><img src="{DOT}">{hidden}')
    assert looks.amiss(browser, page, tmp_path / "pictures") == []
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {f"index-{width}-{theme}.png" for width in (1280, 390) for theme in ("light", "dark")}


@needs_browser
@pytest.mark.parametrize(
    ("text", "style", "message"),
    [
        ('<div style="width: 900px">Wide.</div>', "", r"at 390 pixels it is 9\d\d wide, because of \['div Wide"),
        ('<img src="gone.png">', "", "the picture gone.png is missing"),
        ("<p>Faint.</p>", "p { color: rgb(140 140 140) }", "in the light theme, 'Faint.' has a contrast of 3.4"),
        ("<p>Faint.</p>", "p { color: color-mix(in srgb, black 40%, transparent) }", "a contrast of 2.8"),
        ("<p>Faint.</p>", "p { opacity: 0.4 }", "in the dark theme, 'Faint.' has a contrast of 3.7"),
        (
            "<p><b>Dark.</b></p>",
            "b { background: rgb(0 0 0 / 90%) }",
            "in the light theme, 'Dark.' has a contrast of 1",
        ),
    ],
)
def test_faults_are_found(browser, site, text, style, message):
    found = looks.amiss(browser, site(text, style))
    assert any(re.search(message, line) for line in found), found


@needs_browser
def test_a_page_too_wide_for_a_phone(browser, site):
    """Its scripts do not run, and those of the next page do."""
    page = site('<p>Text.</p><script>document.querySelector("p").style.width = "900px"</script>')
    assert looks.too_wide(browser, page) == []
    assert any("at 390 pixels it is 9" in line for line in looks.amiss(browser, page))
    assert "because of ['div Wide." in looks.too_wide(browser, site('<div style="width: 900px">Wide.</div>'))[0]


def test_the_command(site, tmp_path):
    """It names every fault, and fails."""
    site('<a href="gone.html">x</a>')
    command = [sys.executable, "docs/check.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "index.html: gone.html leads to no file\n" in done.stderr
    done = subprocess.run([*command[:2], str(tmp_path / "gone")], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "run `make docs` first" in done.stderr
