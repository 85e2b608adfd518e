"""LOOK: measures of attention by `kvjax.analysis`, reduced to what figures and claims need."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.papers.parts import Lab, Part, Result
from experiments.papers.settings import Settings
from kvjax import analysis
from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_tiles
from kvjax.models.model import Model
from kvjax.typing import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look(Part):
    """A measure of the full cache's attention on rows of a text.

    Attributes:
      measure_name: a key of `MEASURES`, which says what the result has.
      text: a key of `TEXTS`.
      rows: of the text.
      length: tokens of each.
    """

    measure_name: str
    text: str
    rows: int
    length: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        tokens = lab.rows(self, self.text, self.rows, self.length)
        return MEASURES[self.measure_name](lab.model(self.model), tokens)


def look(
    settings: Settings, measure: str, *, text: str = "book", rows: int | None = None, length: int | None = None
) -> Look:
    """A part of the scale's sizes, unless others are given."""
    scale = settings.scale
    return Look(measure_name=measure, text=text, rows=rows or scale.look_rows, length=length or scale.length)


def by_layer(values: np.ndarray) -> np.ndarray:
    """[L, ...] -> [L] float64: the mean of what is not NaN."""
    return np.asarray(np.nanmean(values.reshape(len(values), -1).astype(np.float64), axis=1))


def mass_by_token(model: Model, tokens: np.ndarray) -> np.ndarray:
    """The attention that each token receives from all queries, [L, B, H, T] float32, in the order of the text."""
    run = over_tiles(model, tokens, None, _add_mass, lambda *shape: jnp.zeros(shape, jnp.float32))
    return np.asarray(run.carried)


def _add_mass(carry: PyTree, attention: tuple[Rows]) -> tuple[PyTree, PyTree]:
    (rows,) = attention
    return carry + jnp.sum(rows.probability, axis=-2), ()


def exponent_of(mass: np.ndarray) -> np.ndarray:
    """The exponents of `kvjax.analysis.accumulated_attention`, of masses [..., T] in any order."""
    rank = np.log(np.arange(1, mass.shape[-1] + 1))
    logs = np.log(np.maximum(-np.sort(-mass, axis=-1), np.finfo(np.float32).tiny).astype(np.float64))
    rank -= rank.mean()
    return np.asarray(-(logs @ rank) / (rank @ rank))


def uniform_mass(length: int) -> np.ndarray:
    """The attention that tokens receive where each query attends to all before it alike, [length] float64."""
    share = 1 / np.arange(1, length + 1)
    return np.asarray(np.cumsum(share[::-1])[::-1])


def _sparsity(model: Model, tokens: np.ndarray) -> Result:
    """``sparsity`` [L, B, H]: the share of attention below 1 % of its row's maximum."""
    return {"sparsity": analysis.sparsity(model, tokens)}


def _accumulated(model: Model, tokens: np.ndarray) -> Result:
    """``mass`` [L, T] by rank, of a mean row and head, ``exponent`` [L, B, H], and ``fit`` [L, B, H], its R²."""
    found = analysis.accumulated_attention(model, tokens)
    rank = np.log(np.arange(1, found.mass.shape[-1] + 1))
    logs = np.log(np.maximum(found.mass, np.finfo(np.float32).tiny).astype(np.float64))
    spread = logs - logs.mean(axis=-1, keepdims=True)
    left = spread + found.exponent[..., None] * (rank - rank.mean())
    fit = 1 - np.sum(left**2, axis=-1) / np.sum(spread**2, axis=-1)
    return {"mass": found.mass.mean(axis=(1, 2)), "exponent": found.exponent, "fit": fit}


def _keys_for_mass(model: Model, tokens: np.ndarray) -> Result:
    """``keys`` [L, B, H, T] uint16: the keys that hold 0.9 of each query's attention."""
    return {"keys": analysis.keys_for_mass(model, tokens, share=0.9).astype(np.uint16)}


#: Measure -> (model, tokens) -> result.
MEASURES: Mapping[str, Callable[[Model, np.ndarray], Result]] = {
    "sparsity": _sparsity,
    "accumulated": _accumulated,
    "keys_for_mass": _keys_for_mass,
}


def top_share(result: Result, share: float) -> np.ndarray:
    """The share of the accumulated attention on the heaviest `share` of the tokens, [L] float64."""
    # [L, T]
    mass = result["mass"].astype(np.float64)
    count = max(1, round(share * mass.shape[-1]))
    return np.asarray(mass[:, :count].sum(axis=-1) / mass.sum(axis=-1))


def accumulated(result: Result) -> Any:
    """The figure of `kvjax.analysis.plots.plot_accumulated_attention`, of the mean row and head."""
    made = analysis.AccumulatedAttention(result["mass"][:, None, None], by_layer(result["exponent"])[:, None, None])
    return analysis.plots.plot_accumulated_attention(made)
