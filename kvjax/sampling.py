"""How the next token is chosen from logits: frozen, hashable methods, static arguments of the decode loop."""

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import InputError
from kvjax.inputs import check_count

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token; of equals the lowest id."""

    def __call__(self, logits: Array, keys: Array) -> Array:
        """[B, V] float32 -> [B] int32."""
        # Maximum, then minimum of an iota: argmax is not vectorised on CPUs.
        best = logits == jnp.max(logits, axis=-1, keepdims=True)
        last = logits.shape[-1] - 1
        return jnp.min(jnp.where(best, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Samples from the softmax, optionally of the most probable tokens only.

    Attributes:
      temperature: divides the logits; above 0.
      top_k: only the k most probable tokens; None = all.
      top_p: only the smallest set of tokens whose probability reaches p (nucleus, arXiv:1904.09751), applied after
        temperature and `top_k`; None = all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        number = isinstance(self.temperature, numbers.Real) and not isinstance(self.temperature, bool)
        if not (number and self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature must be above 0 (use Greedy() for 0); got {self.temperature!r}.")
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        if self.top_p is not None and not (isinstance(self.top_p, numbers.Real) and 0 < self.top_p <= 1):
            raise InputError(f"top_p must be a number in (0, 1], or None for all tokens; got {self.top_p!r}.")

    def __call__(self, logits: Array, keys: Array) -> Array:
        """[B, V] float32 and [B] keys, one a row, so that a row never depends on its neighbours -> [B] int32."""
        return jax.vmap(jax.random.categorical)(keys, self.filter(logits)).astype(jnp.int32)

    def filter(self, logits: Array) -> Array:
        """Logits after temperature, -inf where a token is excluded; [B, V] float32."""
        logits = logits / self.temperature
        if self.top_k is None and self.top_p is None:
            return logits
        # By place in the order, so that of equal tokens just as many stay as asked for, the lowest ids.
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        place = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        stays = jnp.broadcast_to(place < (self.top_k or logits.shape[-1]), logits.shape)
        if self.top_p is not None:
            ordered = jnp.where(stays, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
            probability = jax.nn.softmax(ordered, axis=-1)
            # A token stays while the mass before it is below p, so the first always does.
            stays &= jnp.cumsum(probability, axis=-1) - probability < self.top_p
        return jnp.where(jnp.take_along_axis(stays, jnp.argsort(order, axis=-1), axis=-1), logits, -jnp.inf)


Sampler = Greedy | Sample


def check_sampling(sampler: Any, key: Any) -> None:
    """Refuses what is no sampling method (a class of one's own may be) and no random key."""
    if isinstance(sampler, type) or not callable(sampler):
        raise InputError(f"sampler must be a sampling method such as Greedy() or Sample(top_p=0.9); got {sampler!r}.")
    if key is not None and not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise InputError(f"key must be a random key, as from jax.random.key(0); got {key!r}.")
