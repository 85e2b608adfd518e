"""A page that shows a text with the tokens that caches hold of it, for notebooks, for files, and as a part of reports.

The page is one file without any network access. It has the text once, and of each cache, layer and KV head a bit per
token; texts reach the page as JSON, and JavaScript writes them as text, never as HTML. The templates are those of the
standard library: nothing in them is repeated or conditional, and the page needs no package that kvjax does not.
"""

import base64
import dataclasses
import functools
import html
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.held import HeldTokens, check_row, held_tokens, in_words, shades
from kvjax.checkpoint.encoding import Tokenizer
from kvjax.errors import InputError, shown
from kvjax.generation.detokenize import Detokenizer
from kvjax.generation.generate import Generation
from kvjax.generation.text import TextGeneration
from kvjax.inputs import check_no_text
from kvjax.summary import one_line
from kvjax.typing import JsonObject

TITLE = "Tokens that the cache holds"
FULL = "full"  # the name of the cache that others are compared with
FRAME_HEIGHT = 720  # pixels, in a notebook
#: Characters that end a script or an attribute, or that JavaScript takes for the end of a line.
ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&'\u2028\u2029"}

Result = Generation | TextGeneration


@dataclasses.dataclass(frozen=True)
class CacheView:
    """One cache on the page.

    Attributes:
      name: of the cache.
      held: the tokens that it holds.
      answer: the text of each token that was generated with it, the last of which it has not seen.
    """

    name: str
    held: HeldTokens
    answer: Sequence[str]

    def __repr__(self) -> str:
        return one_line(self)


@dataclasses.dataclass(frozen=True)
class Viewer:
    """A page of a text with the tokens that some caches hold; notebooks display it.

    Attributes:
      prompt: the text of each token of the prompt.
      caches: the caches, all of the same layers and KV heads.
      title: of the page.
      answers: the word for what was generated.
    """

    prompt: Sequence[str]
    caches: Sequence[CacheView]
    title: str = TITLE
    answers: str = "Answer"

    def __repr__(self) -> str:
        return f"Viewer({', '.join(each.name for each in self.caches)}; {len(self.prompt):,} tokens of a prompt)"

    def data(self) -> JsonObject:
        """Returns the data that is embedded in the page.

        ``blobs`` are base64. Of caches, ``held[layer][head]`` is the number of a blob with a bit per token, the lowest
        bit of a byte first, and ``shades[layer][head]`` maps statistics to blobs with a byte per held token in the
        order of positions. Blobs that are equal are one.
        """
        blobs: dict[str, int] = {}

        def blob(values: np.ndarray) -> int:
            return blobs.setdefault(base64.b64encode(values.tobytes()).decode(), len(blobs))

        caches = [_cache_data(each, blob) for each in self.caches]
        first = self.caches[0].held
        full = next((number for number, each in enumerate(self.caches) if each.name == FULL), None)
        return {
            "prompt": list(self.prompt), "answers": self.answers, "layers": list(first.layers), "heads": first.heads,
            "full": full, "caches": caches, "blobs": list(blobs),
        }  # fmt: skip

    def fragment(self) -> str:
        """Returns the part of a page that shows the text: HTML with its own style, script and data."""
        data = json.dumps(self.data(), separators=(",", ":")).translate(ESCAPED)
        return _template("viewer.html").substitute(
            style=_text("viewer.css"), script=_text("viewer.js"), data=data, answers=html.escape(self.answers)
        )

    def html(self) -> str:
        """Returns the whole page."""
        return _template("page.html").substitute(title=html.escape(self.title), viewer=self.fragment())

    def save(self, path: str | Path) -> None:
        """Writes the page.

        Args:
          path: of the file, whose folder exists.

        Raises:
          InputError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None

    def _repr_html_(self) -> str:
        """Returns a frame with the page, so that its style and the notebook's do not change each other."""
        return (
            f'<iframe title="{html.escape(self.title)}" sandbox="allow-scripts" srcdoc="{html.escape(self.html())}" '
            f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
        )


def show(
    results: Result | Sequence[Result] | Mapping[str, Result],
    tokenizer: Tokenizer | Callable[[int], str] | None = None,
    *,
    tokens: ArrayLike | Sequence[Sequence[int]] | None = None,
    row: int = 0,
    layers: Sequence[int] | None = None,
    title: str = TITLE,
) -> Viewer:
    """Shows a text with the tokens that one or several caches hold of it, and what was generated with each.

    A reader chooses a cache, a layer and a KV head. Held tokens are shaded by a statistic that the policy keeps, such
    as accumulated attention, and evicted ones are grey. The answer is shown next to that of the cache that is named
    ``full``, if it is among the results.

    Args:
      results: of `kvjax.generate` or `kvjax.generate_text`, of one model and the same prompts; or a dict of them by
        the name of the cache.
      tokenizer: ``model.tokenizer``; or a function from a token id to its text; None to show token ids.
      tokens: the prompts, as they were given to `kvjax.generate`. `kvjax.generate_text` returns its own.
      row: the row that is shown.
      layers: the numbers of the layers that are shown; None = all.
      title: of the page.

    Returns:
      A `Viewer`, which a notebook shows, and whose ``save(path)`` writes one HTML file.

    Raises:
      InputError: if results, tokenizer, tokens, row or layers are not valid, or the results are not of the same
        prompts and of models of one shape.
    """
    named = _named(results)
    if not (tokenizer is None or isinstance(tokenizer, Tokenizer) or _is_function(tokenizer)):
        raise InputError(
            "tokenizer must be model.tokenizer of kvjax, or a function from a token id to its text; got "
            f"{shown(tokenizer)}."
        )
    if layers is not None and (not np.ndim(layers) or not len(layers)):
        raise InputError(f"layers must be a non-empty sequence of layer indices, or None for all; got {layers!r}.")
    views, prompts = [], []
    for name, result in named.items():
        generation = result.generation if isinstance(result, TextGeneration) else result
        own = check_row(row, len(generation.tokens))
        held = held_tokens(generation.layout, generation.state, own, layers)
        prompt = _prompt(result, tokens, own, held.prompt)
        new = generation.tokens[own][: generation.lengths[own]].tolist()
        views.append(CacheView(name, held, token_texts(tokenizer, prompt, new)))
        prompts.append(prompt)
    if len({tuple(each) for each in prompts}) > 1:
        raise InputError("the results are for different prompts; give results for the same prompts.")
    if len({(each.held.layers, each.held.heads) for each in views}) > 1:
        raise InputError("the results are from models with different numbers of layers or KV heads; give those of one.")
    return Viewer(token_texts(tokenizer, (), prompts[0]), views, title)


def token_texts(
    tokenizer: Tokenizer | Callable[[int], str] | None, before: Sequence[int], tokens: Sequence[int]
) -> list[str]:
    """Returns the text that each token adds; a special token's name.

    A token has no text that is a part of a character which a later token completes.

    Args:
      tokenizer: see `show`.
      before: the ids of the tokens before.
      tokens: token ids.
    """
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    if callable(tokenizer):
        return [str(tokenizer(token)) for token in tokens]
    detokenizer = Detokenizer(tokenizer, before)
    return [added.special or added.text for added in map(detokenizer.add, tokens)]


def _is_function(value: object) -> bool:
    """Whether a value can be called; tokenizers of other libraries can, and return something else."""
    return callable(value) and not hasattr(value, "decode")


def _named(results: Result | Sequence[Result] | Mapping[str, Result]) -> dict[str, Result]:
    """Returns results by name: that of their caches, with a number where several are alike."""
    if isinstance(results, Mapping):
        found = {str(name): each for name, each in results.items()}
    else:
        # A result is a tuple too.
        listed: list[Any] = [results] if isinstance(results, Generation | TextGeneration) else list(results)
        found = {}
        for each in listed:
            generation = each.generation if isinstance(each, TextGeneration) else each
            layout = generation.layout if isinstance(generation, Generation) else None
            base = type(each).__name__ if layout is None else layout.name
            name, number = base, 1
            while name in found:
                number += 1
                name = f"{base} ({number})"
            found[name] = each
    wrong = [type(each).__name__ for each in found.values() if not isinstance(each, Generation | TextGeneration)]
    if wrong or not found:
        raise InputError(
            "results must be one or several results of kvjax.generate or kvjax.generate_text; got "
            f"{wrong[0] if wrong else 'none'}."
        )
    return found


def _prompt(result: Result, tokens: ArrayLike | Sequence[Sequence[int]] | None, row: int, length: int) -> list[int]:
    """Returns the token ids of a row's prompt, which has `length` tokens.

    Raises:
      InputError: the prompts are not given, or are others.
    """
    if isinstance(result, TextGeneration):
        tokens = result.prompts.tokens
    if tokens is None:
        raise InputError("a Generation does not store its prompts; pass the same tokens= as to kvjax.generate.")
    check_no_text("tokens", tokens)
    given: Any = tokens
    try:
        rows = [np.asarray(each) for each in (given if np.ndim(given[0]) else [given])]
    except (TypeError, ValueError, IndexError):
        rows = []
    if row >= len(rows) or rows[row].ndim != 1 or len(rows[row]) < length or rows[row].dtype.kind not in "iu":
        raise InputError(
            f"row {row} had a prompt of {length} tokens, which does not match tokens={shown(tokens)}; pass the same "
            "tokens= as to kvjax.generate."
        )
    return [int(token) for token in rows[row][:length]]


def _cache_data(view: CacheView, blob: Callable[[np.ndarray], int]) -> JsonObject:
    """Returns what the page has of one cache; `blob` returns the number of a blob."""
    held = view.held

    def bits(positions: np.ndarray) -> np.ndarray:
        marks = np.zeros(held.length, bool)
        marks[positions] = True
        return np.packbits(marks, bitorder="little")

    names = dict.fromkeys(name for layer in held.statistics for head in layer for name in head)
    return {
        "name": view.name,
        "answer": list(view.answer),
        "length": held.length,
        "held": [[blob(bits(head)) for head in layer] for layer in held.positions],
        "shades": [
            [{name: blob(shades(values)) for name, values in head.items()} for head in layer]
            for layer in held.statistics
        ],
        "statistics": {name: in_words(name) for name in names},
    }


@functools.cache
def _text(name: str) -> str:
    return (resources.files("kvjax.analysis") / "templates" / name).read_text(encoding="utf-8")


def _template(name: str) -> Template:
    return Template(_text(name))


__all__ = ["CacheView", "Viewer", "show", "token_texts"]
