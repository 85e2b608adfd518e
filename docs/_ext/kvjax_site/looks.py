"""Faults that a reader would see on the built site: pages wider than a phone, pictures missing, text too faint."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvjax_site.chromium import Browser

WIDTHS = (1280, 390)  # pixels: a laptop's window, a phone
THEMES = ("light", "dark")
CONTRAST = 4.5  # the least between text and its background (WCAG 2, level AA)
#: One page of each kind.
PAGES = (
    "index.html", "policies.html", "combinations.html", "_generated/policies/h2o.html",
    "_generated/storages/int4.html", "_generated/selections/quest.html",
)  # fmt: skip

#: Colours change at once, and pictures that are out of sight are loaded too.
PREPARE = """
(async () => {
  const style = document.createElement("style");
  style.textContent = "* { transition: none !important; animation: none !important }";
  document.head.append(style);
  for (const image of document.images) image.loading = "eager";
  await Promise.allSettled([...document.images].map((image) => image.decode()));
})()
"""
#: The pictures of the site itself that were not loaded.
MISSING = """
[...document.images].filter((image) => !image.naturalWidth && !image.src.startsWith("http"))
  .map((image) => image.getAttribute("src"))
"""
#: The width that the page needs, and the elements of its text that stick out and do not scroll by themselves.
WIDTH = """
((given) => {
  const scrolls = (element) => {
    for (let each = element.parentElement; each && each !== document.body; each = each.parentElement)
      if (getComputedStyle(each).overflowX !== "visible") return true;
    return false;
  };
  const wide = [...document.querySelectorAll("article *")]
    .filter((element) => element.getBoundingClientRect().right > given + 1 && !scrolls(element))
    .map((element) => element.tagName.toLowerCase() + " " + element.textContent.trim().slice(0, 40));
  return [document.scrollingElement.scrollWidth, wide.slice(0, 3)];
})(%d)
"""
SHOW = "document.documentElement.dataset.mode = document.documentElement.dataset.theme = {theme!r}"
#: [contrast, text, colour, colour of the background] of the faintest text of each kind in the page's article.
FAINT = """
(() => {
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
    .getContext("2d", { willReadFrequently: true });
  const colours = new Map();
  const rgba = (text) => {  // of any CSS colour: [red, green, blue] from 0 to 255, and the opacity from 0 to 1
    if (!colours.has(text)) {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = text;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      colours.set(text, [r, g, b, a / 255]);
    }
    return colours.get(text);
  };
  const over = (top, below) => below.map((value, i) => top[3] * top[i] + (1 - top[3]) * value);
  const behind = new Map();
  const background = (element) => {  // what an element is drawn on, itself included
    if (!element) return [255, 255, 255];
    if (!behind.has(element))
      behind.set(element, over(rgba(getComputedStyle(element).backgroundColor), background(element.parentElement)));
    return behind.get(element);
  };
  const opacity = (element) => element ? +getComputedStyle(element).opacity * opacity(element.parentElement) : 1;
  const luminance = (colour) => {
    const [r, g, b] = colour.map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faintest = new Map();
  const seen = new Set();
  const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    if (!text || seen.has(element) || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true }))
      continue;
    seen.add(element);
    const style = getComputedStyle(element), below = background(element), colour = rgba(style.color);
    const drawn = over([...colour.slice(0, 3), colour[3] * opacity(element)], below);
    const [dark, light] = [luminance(drawn), luminance(below)].sort((a, b) => a - b);
    const contrast = (light + 0.05) / (dark + 0.05), kind = style.color + " on " + below.map(Math.round);
    if (!faintest.has(kind)) faintest.set(kind, [contrast, text.slice(0, 40), style.color, below.map(Math.round)]);
  }
  return [...faintest.values()].sort((a, b) => a[0] - b[0]);
})()
"""


class Text(NamedTuple):
    """Text of one colour on one background.

    Attributes:
      contrast: from 1 to 21.
      example: the beginning of such a text.
      colour: as in CSS.
      background: red, green and blue.
    """

    contrast: float
    example: str
    colour: str
    background: Sequence[int]


def too_wide(browser: Browser, page: Path) -> list[str]:
    """Opens a page without its scripts at the width of a phone; returns a line if it is wider."""
    browser.resize(WIDTHS[-1])
    browser.open(page, scripts=False)
    return _width(browser, WIDTHS[-1])


def _width(browser: Browser, width: int) -> list[str]:
    needed, wide = browser.run(WIDTH % width)
    return [f"at {width} pixels it is {needed} wide, because of {wide or 'its frame'}"] if needed > width else []


def amiss(browser: Browser, page: Path, pictures: Path | None = None) -> list[str]:
    """Opens a page in every width and theme.

    Args:
      browser: any.
      page: a file.
      pictures: a folder for a PNG of each; None = none are taken.

    Returns:
      A line for each thing that is amiss.
    """
    browser.open(page)
    browser.run(PREPARE)
    found = [f"the picture {source} is missing" for source in browser.run(MISSING)]
    for width in WIDTHS:
        browser.resize(width)
        found += _width(browser, width)
        for theme in THEMES:
            browser.run(SHOW.format(theme=theme))
            for text in map(Text._make, browser.run(FAINT)):
                if text.contrast < CONTRAST:
                    found.append(
                        f"at {width} pixels in the {theme} theme, {text.example!r} has a contrast of "
                        f"{text.contrast:.1f}: {text.colour} on {tuple(text.background)}"
                    )
            if pictures is not None:
                pictures.mkdir(parents=True, exist_ok=True)
                (pictures / f"{page.stem}-{width}-{theme}.png").write_bytes(browser.picture())
    return found
