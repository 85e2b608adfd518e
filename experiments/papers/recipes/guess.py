"""InfiniGen's guess by hand: its columns and its choice on drawn numbers, beside a few lines of NumPy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes.speculation import ALPHA, FIRST, RATIO
from kvjax.selection import InfiniGen
from kvjax.selection.base import Held, SelectView

Array = jax.Array
CLOSE = 1e-5  # scores that are nearer to the threshold than this decide by rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess(Part):
    """Draws queries and keys of one layer, makes the index of a prompt, and chooses for one query.

    Columns have unequal sizes, as outlier channels do. The result has ``columns`` [B, K, D] bool, those that kvjax
    chose, and ``expected`` of NumPy; ``sums`` [D] of the first head; ``chosen`` [B, K, S] bool; ``weight`` [B, K, S],
    the
    largest guessed weight of a slot, relative to that of its head's largest, over the query heads; and ``near`` [B,
    K, S],
    the slots that are too close to the threshold to say.

    Attributes:
      heads: KV heads, of two query heads each.
      slots: tokens of the prompt.
      alpha: of the threshold.
      ratio: of the columns.
    """

    heads: int
    slots: int = 64
    alpha: float = ALPHA
    ratio: float = RATIO

    def measure(self, lab: Lab) -> Result:
        rng = np.random.default_rng([lab.settings.seed, self.heads])
        batch, group, dim = 4, 2, 64
        size = rng.lognormal(0.0, 1.0, (batch, self.heads, 1, dim))
        key = (rng.normal(size=(batch, self.heads, self.slots, dim)) * size).astype(np.float32)
        query = (rng.normal(size=(batch, self.heads, group, self.slots, dim)) * size[:, :, None]).astype(np.float32)
        # No cap, so that the threshold alone decides.
        look = InfiniGen(self.alpha, self.ratio, cap=1.0, first_layer=FIRST)
        shape = (batch, self.heads)
        taken, marks = _choose(jnp.asarray(query), jnp.asarray(key), look)
        chosen = np.asarray(marks)
        columns = np.zeros((*shape, dim), bool)
        np.put_along_axis(columns, np.asarray(taken), True, axis=-1)
        # NumPy, in float64.
        wide_query, wide_key = query.astype(np.float64), key.astype(np.float64)
        total = np.abs(wide_query).mean(axis=2).sum(axis=2) + np.abs(wide_key).sum(axis=2)
        count = int(np.ceil(self.ratio * dim - 1e-9))
        expected = np.zeros_like(columns)
        np.put_along_axis(expected, np.argsort(-total, axis=-1, kind="stable")[..., :count], True, axis=-1)
        score = np.einsum("bkgd,bksd->bkgs", wide_query[:, :, :, -1] * expected[:, :, None], wide_key) * dim**-0.5
        gap = (score - score[..., :-1].max(axis=-1, keepdims=True)).max(axis=2)
        return {
            "columns": columns, "expected": expected, "sums": total[0, 0], "chosen": chosen[..., :-1],
            "weight": np.exp(gap[..., :-1]), "near": np.abs(gap[..., :-1] + self.alpha) < CLOSE,
        }  # fmt: skip


@functools.partial(jax.jit, static_argnames="look")
def _choose(query: Array, key: Array, look: InfiniGen) -> tuple[Array, Array]:
    """The columns [B, K, r] of a prompt, and what its last query chooses [B, K, S] of the tokens before it."""
    batch, heads, slots, dim = key.shape
    real = jnp.ones((batch, slots), bool)
    sums = look.watch(look.start((batch, heads), dim), query, key, real, None)
    position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, heads, slots))
    newest = jnp.full((batch,), slots - 1, jnp.int32)
    held = Held(position, key, newest, None, lambda each: each)
    index = look.build(look.init((batch, heads, slots), dim, jnp.float32), sums, held)
    # The last token is the new one, and its query chooses.
    view = SelectView(
        position=position, key=key, newest=newest, budget=newest, prompt=newest,
        slot=jnp.full((batch, heads), slots - 1, jnp.int32), scale=dim**-0.5, layer=FIRST,
    )  # fmt: skip
    return index["columns"], look.chosen(index, query[:, :, :, -1], view)


def guess(heads: int) -> Guess:
    """A part; it has the same size at every scale."""
    return Guess(heads=heads)
