"""How the next token is chosen from logits: frozen, hashable methods, static arguments of the decode loop."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax.errors import InputError

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token; of equals the lowest id."""

    def __call__(self, logits: Array, keys: Array) -> Array:
        """[B, V] float32 -> [B] int32."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


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
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature must be above 0 (use Greedy() for 0); got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, or None for all tokens; got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be in (0, 1], or None for all tokens; got {self.top_p}.")

    def __call__(self, logits: Array, keys: Array) -> Array:
        """[B, V] float32 and [B] keys, one a row, so that a row never depends on its neighbours -> [B] int32."""
        return jax.vmap(jax.random.categorical)(keys, self.filter(logits)).astype(jnp.int32)

    def filter(self, logits: Array) -> Array:
        """Logits after temperature, -inf where a token is excluded; [B, V] float32."""
        logits = logits / self.temperature
        if self.top_k is not None:
            kth = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            probability = jax.nn.softmax(ordered, axis=-1)
            # A token stays while the mass before it is below p, so the first always does.
            before = jnp.cumsum(probability, axis=-1) - probability
            last = jnp.sum(before < self.top_p, axis=-1, keepdims=True) - 1
            logits = jnp.where(logits < jnp.take_along_axis(ordered, last, axis=-1), -jnp.inf, logits)
        return logits


Sampler = Greedy | Sample
