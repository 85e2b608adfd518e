"""Checks the built site, as `make docs` does: every local link, and in Chromium how some pages look.

    python docs/check.py [FOLDER] [--pictures=FOLDER]

FOLDER is docs/_build/html unless it is given. Some pages are opened at the width of a laptop and of a phone, in both
themes: a page must fit the window, show all of its pictures, and have no text of too little contrast. --pictures writes
PNGs of these. All others must fit a phone. Where Chromium is not installed, only links are checked.
"""

import argparse
import sys
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "_ext"))

from kvjax_site import chromium, hrefs, looks  # noqa: E402


def main() -> int:
    """Returns the exit status: 1 if something is amiss."""
    about, _, more = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(description=about, epilog=more, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS / "_build" / "html", help="the built site")
    parser.add_argument("--pictures", type=Path, help="folder for PNGs of the pages that are opened")
    given = parser.parse_args()
    if not (given.folder / "index.html").exists():
        parser.error(f"{given.folder} has no index.html: run `make docs` first")
    began = time.monotonic()
    found, opened = hrefs.broken(given.folder), "Chromium, which would open pages, is not installed"
    if chromium.PROGRAM is not None:
        try:
            seen, opened = look(given.folder, given.pictures)
            found += seen
        except chromium.BrowserError as error:
            # The browser or the machine failed, such as a sandbox that Chromium may not create; the site did not.
            opened = f"Chromium failed, so that no page was looked at: {error}"
    print(*found, sep="\n", end="\n" * bool(found), file=sys.stderr)
    print(f"{len(found)} faults: all local links were checked, {opened} ({time.monotonic() - began:.0f} s)")
    return bool(found)


def look(folder: Path, pictures: Path | None) -> tuple[list[str], str]:
    """Opens pages in Chromium; returns a line for each fault, and what was opened."""
    found, in_full = [], [folder / name for name in looks.PAGES]
    others = [page for page in hrefs.pages(folder) if page not in in_full]
    with chromium.Browser() as browser:
        for page in in_full:
            amiss = looks.amiss(browser, page, pictures) if page.exists() else ["there is no such page"]
            found += [f"{page.relative_to(folder)}: {line}" for line in amiss]
        for page in others:
            found += [f"{page.relative_to(folder)}: {line}" for line in looks.too_wide(browser, page)]
    return found, f"Chromium opened {len(in_full)} pages in full and {len(others)} at the width of a phone"


if __name__ == "__main__":
    sys.exit(main())
