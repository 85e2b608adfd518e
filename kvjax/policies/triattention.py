"""TriAttention: ranks keys by the logits that later queries are expected to give them (arXiv:2604.04921)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import count_argument
from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, KeyFrame, Stats, View
from kvjax.policies.parameters import ModelSizes, Parameters, TextSamples

Array = jax.Array
SMALL = 1e-6  # the least standard deviation that scores are divided by


@dataclasses.dataclass(frozen=True)
class QuerySpread(Parameters):
    """The mean of each query head's queries, and their mean magnitudes, before rotation (arXiv:2604.04921, section 4).

    Arrays of a layer: ``mean`` [K, G, D]; ``size`` [K, G, F], F = D - R / 2 magnitudes: first those of the R / 2 pairs
    of features that are rotated together, then those of the features that are not rotated.
    """

    name = "triattention"

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        if sizes.rotary is None:
            raise PolicyError("triattention needs a model with a rotary embedding; give another policy.")
        heads = sizes.kv_heads, sizes.queries
        return {"mean": (*heads, sizes.dim), "size": (*heads, sizes.dim - sizes.rotary // 2)}

    def prepare(self, samples: TextSamples, sizes: ModelSizes) -> dict[str, np.ndarray]:
        assert sizes.rotary is not None
        # [n, H, D]
        query = samples.query.astype(np.float64)
        half = sizes.rotary // 2
        pairs = np.hypot(query[..., :half], query[..., half : sizes.rotary])
        # [n, H, F]
        size = np.concatenate([pairs, np.abs(query[..., sizes.rotary :])], axis=2)
        heads = sizes.kv_heads, sizes.queries
        return {name: x.mean(axis=0).reshape(*heads, -1) for name, x in (("mean", query), ("size", size))}


@dataclasses.dataclass(frozen=True)
class FutureLogit(Importance):
    """Ranks a slot by the logit that later queries are expected to give it (TriAttention, arXiv:2604.04921, eq. 7).

    The expected logit is the sum of two terms. The first is the logit of the mean query, averaged over the positions
    1, 2, 4, ... after the newest. The second is the product of the key's magnitudes with the differences between the
    queries' mean magnitudes and the magnitudes of their mean. The logit is standardised over the live slots of each
    query head; the score is the largest over the query heads that share a KV head.

    Attributes:
      longest: the largest distance to a later position.
    """

    longest: int = 65_536
    needs = frozenset()
    signed = True
    reads = frozenset({"key"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", count_argument("longest", self.longest, minimum=1))

    @property
    def params(self) -> tuple[Parameters, ...]:
        return (QuerySpread(),)

    def score(self, stats: Stats, view: View) -> Array:
        return standardised(self.raw(view), view.live)

    def raw(self, view: View) -> Array:
        """Returns the expected logit of each query head, [B, K, G, S] float32, without the scale."""
        own = view.params[QuerySpread.name]
        key = view.rotated().astype(jnp.float32)
        mean, size = own["mean"], own["size"]
        half = mean.shape[-1] - size.shape[-1]
        factor = 1.0 if view.frame is None or view.frame.rope is None else view.frame.rope.attention_factor
        # [B or 1, R / 2] each: the mean rotation by the later positions
        cos, sin = _mean_rotation(view.newest + 1, half, self.longest, view.frame)

        def magnitudes(x: Array) -> Array:
            """Returns [..., F] for [..., D]."""
            pairs = jnp.sqrt(jnp.square(x[..., :half]) + jnp.square(x[..., half : 2 * half]))
            return jnp.concatenate([pairs, jnp.abs(x[..., 2 * half :])], axis=-1)

        cos, sin = (x[:, None, None] for x in (cos, sin))
        first, second, rest = mean[..., :half], mean[..., half : 2 * half], mean[..., 2 * half :]
        rest = jnp.broadcast_to(rest, (*cos.shape[:1], *rest.shape))
        # [B or 1, K, G, D]: rotated keys have the factor once, and logits have its square
        pair = (first * cos - second * sin) * factor, (second * cos + first * sin) * factor
        turned = jnp.concatenate([*pair, rest], axis=-1)
        turned = jnp.broadcast_to(turned, (key.shape[0], *turned.shape[1:]))
        # [K, G, F]
        excess = (size - magnitudes(mean)) * jnp.where(jnp.arange(size.shape[-1]) < half, factor, 1.0)
        exact = jax.lax.Precision.HIGHEST
        return jnp.einsum("bkgd,bksd->bkgs", turned, key, precision=exact) + jnp.einsum(
            "kgf,bksf->bkgs", excess, magnitudes(key), precision=exact
        )


def standardised(raw: Array, live: Array) -> Array:
    """Standardises logits over the live slots, and returns the largest over the query heads, [B, K, S] float32.

    Args:
      raw: [B, K, G, S] float32.
      live: [B, K, S] bool.
    """
    number = jnp.maximum(jnp.sum(live, axis=2), 1)[..., None, None].astype(jnp.float32)
    counted = live[:, :, None]
    mean = jnp.sum(jnp.where(counted, raw, 0.0), axis=3, keepdims=True) / number
    away = jnp.where(counted, raw - mean, 0.0)
    spread = jnp.sqrt(jnp.sum(jnp.square(away), axis=3, keepdims=True) / number)
    return jnp.max((raw - mean) / jnp.maximum(spread, SMALL), axis=2)


def _mean_rotation(start: Array, half: int, longest: int, frame: KeyFrame | None) -> tuple[Array, Array]:
    """Returns the mean cosine and sine of the rotations by start + 1, start + 2, start + 4, ..., [B or 1, half].

    Args:
      start: [B] int32.
      half: the number of frequencies.
      longest: the largest distance from the start.
      frame: the rotary embedding; None = no rotation.
    """
    if frame is None or frame.rope is None or frame.frequencies is None:
        return jnp.ones((1, half)), jnp.zeros((1, half))
    distance = 2.0 ** np.arange(longest.bit_length())
    constant = frame.rope.constant_frequencies()
    if constant is not None:
        # In float64: an angle of 65,536 positions has an error of 1e-3 in float32.
        # [1, half]
        turn = np.exp(1j * distance[:, None] * constant).mean(axis=0)[None]
        ahead_cos, ahead_sin = jnp.asarray(turn.real, jnp.float32), jnp.asarray(turn.imag, jnp.float32)
    else:
        # [distances, B, half]: products with powers of two are exact
        angle = jnp.asarray(distance, jnp.float32)[:, None, None] * frame.frequencies
        ahead_cos, ahead_sin = jnp.mean(jnp.cos(angle), axis=0), jnp.mean(jnp.sin(angle), axis=0)
    angle = start[:, None].astype(jnp.float32) * frame.frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return cos * ahead_cos - sin * ahead_sin, sin * ahead_cos + cos * ahead_sin


@factory
def triattention(budget: BudgetLike, *, every: int = 128, longest: int = 65_536, positions: str = "original") -> Evict:
    """Keeps the slots that later queries are expected to give the largest logits (TriAttention, arXiv:2604.04921).

    Importance reads only keys and a calibration of the model's queries; see `FutureLogit`. Make the calibration with
    ``kvjax.calibrate(model, tokens, policy)`` and pass it as ``calibration=``.

    Args:
      budget: see `evict`.
      every: see `evict`.
      longest: the largest distance of a later position from the newest.
      positions: see `evict`.

    Raises:
      PolicyError: a model without a rotary embedding.

    The authors' code ranks the slots of all layers and heads together by default, and keeps the prompt, which here is
    ``phases(full(), triattention(...))``. Its later positions begin one before the paper's.
    """
    return evict(importance=FutureLogit(longest), budget=budget, positions=positions, every=every, name="triattention")
