"""LoCoCo: merges evicted pairs into some of the slots that stay, by a trained convolution (arXiv:2406.05317)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import count_argument
from kvjax.errors import PolicyError
from kvjax.numerics.top_k import largest
from kvjax.policies.base import factory
from kvjax.policies.components import Folded, Merge, Stats, View
from kvjax.policies.parameters import ModelSizes, Parameters

Array = jax.Array
SMALLEST = -1e30  # the logit of padding
FAR = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class ConvolutionWeights(Parameters):
    """The parameters of `LoCoCo`, which the KV heads of a layer share.

    Arrays of a layer: ``kernel`` [1, slots, kernel, 2 D], ``bias`` [1, slots], ``blend`` [1]. Before training, the
    kernel is random normal, the bias 0 and the blend 0.5.

    Attributes:
      slots: see `LoCoCo`.
      kernel: see `LoCoCo`.
    """

    slots: int
    kernel: int
    name = "lococo"
    trained = True

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        return {"kernel": (1, self.slots, self.kernel, 2 * sizes.dim), "bias": (1, self.slots), "blend": (1,)}

    def initial(self, key: Array, sizes: ModelSizes) -> dict[str, Array]:
        shapes = self.parts(sizes)
        scale = math.sqrt(1 / (self.kernel * 2 * sizes.dim))
        return {
            "kernel": scale * jax.random.normal(key, shapes["kernel"], jnp.float32),
            "bias": jnp.zeros(shapes["bias"], jnp.float32), "blend": jnp.full(shapes["blend"], 0.5, jnp.float32),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LoCoCo(Merge):
    """Mixes evicted pairs into the `slots` lowest-ranked pairs that stay, by a convolution (arXiv:2406.05317).

    When a head evicts, its unprotected slots of lowest priority that stay, at most `slots`, receive the victims; the
    others are unchanged. The R receiving and evicted pairs are put in order of their positions. A convolution over them
    with 2 D channels, the keys as stored and the values, gives the logits of each receiver, and a softmax over the R
    pairs its weights W₁. W₀ takes a receiver's own pair alone. The new keys and values are those of all R pairs times
    (1 - blend) W₀ + blend W₁. A receiver keeps its position and its statistics.

    The parameters are trained for one number of slots, and for budgets near those that they were trained with; see
    `kvjax.training.train_merge`. Give the policy an `every` of about the blocks that prompts are read in, as the
    authors do, so that many pairs are merged at once.

    Attributes:
      slots: the largest number of receivers of a head; half of the budget in the paper.
      kernel: the number of neighbours that the convolution takes in, an odd number.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    slots: int = 64
    kernel: int = 21
    ranks = True

    def __post_init__(self) -> None:
        for field in ("slots", "kernel"):
            object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=1))
        if self.kernel % 2 == 0:
            raise PolicyError(f"kernel={self.kernel} must be odd, so that a pair is the middle of its neighbours.")

    @property
    def weights(self) -> ConvolutionWeights:
        """The description of the parameters."""
        return ConvolutionWeights(self.slots, self.kernel)

    @property
    def params(self) -> tuple[Parameters, ...]:
        return (self.weights,)

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        assert view.priority is not None
        params = {part: x[0] for part, x in view.params[self.weights.name].items()}
        size, dim = key.shape[2:]
        kept = view.live & ~victim & (view.priority < jnp.inf)
        # [B, K, 1]
        spared = jnp.maximum(jnp.sum(kept, axis=2, keepdims=True, dtype=jnp.int32) - self.slots, 0)
        better = largest(view.priority, jnp.where(kept, view.position, -1), spared)
        # [B, K, S]
        receives = kept & ~better & jnp.any(victim, axis=2, keepdims=True)
        mixed = receives | victim
        # [B, K, R]: the slots in order of their positions, and then padding
        order = jnp.argsort(jnp.where(mixed, view.position, FAR), axis=2)[:, :, : min(size, self.slots + tokens)]
        real, own = (jnp.take_along_axis(x, order, axis=2) for x in (mixed, receives))
        # [B, K, R, 2 D]
        pairs = jnp.concatenate(
            [jnp.take_along_axis(x.astype(jnp.float32), order[..., None], axis=2) for x in (key, value)], axis=3
        )
        pairs = jnp.where(real[..., None], pairs, 0.0)
        # [B, K, M, R]: W₀, whose row i is the i-th receiver, and zeros if there are fewer
        number = jnp.cumsum(own, axis=2, dtype=jnp.int32) - 1
        itself = own[:, :, None] & (number[:, :, None] == jnp.arange(self.slots, dtype=jnp.int32)[:, None])
        alone = itself.astype(jnp.float32)
        logits = _convolved(pairs, params["kernel"]) + params["bias"][:, None]
        others = jax.nn.softmax(jnp.where(real[:, :, None], logits, SMALLEST), axis=3)
        weights = (1 - params["blend"]) * alone + params["blend"] * others
        # [B, K, M, 2 D]
        made = jnp.einsum("bkmr,bkrc->bkmc", weights, pairs, precision=jax.lax.Precision.HIGHEST)
        # [B, K, M]: the slot of each receiver, beyond the end where there is none
        slot = jnp.where(jnp.any(itself, axis=3), jnp.sum(jnp.where(itself, order[:, :, None], 0), axis=3), size)
        return Folded(_put(key, slot, made[..., :dim]), _put(value, slot, made[..., dim:]), dict(stats))


def _convolved(x: Array, kernel: Array) -> Array:
    """Returns the convolution of x [B, K, R, C] with a kernel [M, w, C] along R, with zeros beyond: [B, K, M, R]."""
    batch, kv_heads, length, channels = x.shape
    made = jax.lax.conv_general_dilated(
        x.reshape(batch * kv_heads, length, channels), kernel, (1,), "SAME",
        dimension_numbers=("NWC", "OWI", "NCW"), precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
    return made.reshape(batch, kv_heads, -1, length)


def _put(x: Array, slot: Array, new: Array) -> Array:
    """Returns x [B, K, S, D] with vectors [B, K, M, D] at slots [B, K, M]; slots beyond the end are left out."""
    write = jax.vmap(jax.vmap(lambda x, slot, new: x.at[slot].set(new, mode="drop")))
    written: Array = write(x, slot, new.astype(x.dtype))
    return written


lococo = factory(LoCoCo)
