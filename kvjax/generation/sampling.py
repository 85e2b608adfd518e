"""Sampling methods: how the next token is chosen from logits.

Methods are frozen dataclasses, so that they can be static arguments of the decode loop. They have no state: the tokens
that a row has so far, which a repetition penalty needs, are part of the loop's carry
(`kvjax.generation.decoding.Carry`). A method of another class takes part in that with a field `repetition_penalty`.
"""

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import InputError, shown
from kvjax.inputs import check_count
from kvjax.numerics.nucleus import most_probable

Array = jax.Array
SMALLEST = 1e-20  # of temperatures, probabilities and penalties: logits that are divided by it are finite in float32


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Chooses the most probable token; among equal logits the lowest id.

    Attributes:
      repetition_penalty: see `penalised`; 1 = none.

    Raises:
      InputError: if an attribute is out of range.
    """

    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_penalty(self.repetition_penalty)

    def __call__(self, logits: Array, keys: Array | None) -> Array:
        """Chooses a token for each row.

        Args:
          logits: [B, V] float32.
          keys: not used.

        Returns:
          [B] int32.
        """
        # [B, V]: a maximum, then the minimum of an iota, since XLA does not vectorise argmax on CPUs.
        best = logits == jnp.max(logits, axis=-1, keepdims=True)
        last = logits.shape[-1] - 1
        # [B]
        return jnp.min(jnp.where(best, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Samples from the softmax of the logits, optionally restricted to the most probable tokens.

    Attributes:
      temperature: divisor of the logits, above 0.
      top_k: restricts sampling to the k most probable tokens; None for all tokens.
      top_p: restricts sampling to the smallest set of tokens whose total probability is at least p (nucleus sampling,
        arXiv:1904.09751), after `temperature` and `top_k` are applied; None for all tokens.
      min_p: restricts sampling to tokens that are at least this many times as probable as the most probable one
        (arXiv:2407.01082), after `temperature`; None for all tokens. A token must pass this and `top_p`.
      repetition_penalty: see `penalised`; applied before everything else; 1 = none.

    Raises:
      InputError: if an attribute is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_penalty(self.repetition_penalty)
        if not _between(self.temperature, SMALLEST, 1 / SMALLEST):
            raise InputError(
                f"temperature must be from {SMALLEST} to {1 / SMALLEST} (use Greedy() for 0); got "
                f"{shown(self.temperature)}."
            )
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        for name in ("top_p", "min_p"):
            p: Any = getattr(self, name)
            if p is not None and not _between(p, SMALLEST, 1):
                raise InputError(f"{name} must be from {SMALLEST} to 1, or None for all tokens; got {shown(p)}.")

    def __call__(self, logits: Array, keys: Array) -> Array:
        """Samples a token for each row.

        Args:
          logits: [B, V] float32.
          keys: [B] random keys, one per row, so that a row does not depend on the other rows of its batch.

        Returns:
          [B] int32.
        """
        # [B]
        return jax.vmap(jax.random.categorical)(keys, self.filter(logits)).astype(jnp.int32)

    def filter(self, logits: Array) -> Array:
        """Applies the temperature and excludes tokens.

        Args:
          logits: [B, V] float32.

        Returns:
          [B, V] float32, -inf for an excluded token.
        """
        # [B, V]
        logits = logits / self.temperature
        if self.min_p is None:
            return self._filter_ranked(logits)
        threshold = jnp.max(logits, axis=-1, keepdims=True) + math.log(self.min_p)
        return jnp.where(logits >= threshold, self._filter_ranked(logits), -jnp.inf)

    def _filter_ranked(self, logits: Array) -> Array:
        """Excludes tokens by `top_k` and `top_p`; [B, V] float32 after the temperature."""
        if self.top_k is None and self.top_p is None:
            return logits
        return jnp.where(most_probable(logits, self.top_k, self.top_p), logits, -jnp.inf)


def penalised(logits: Array, seen: Array, penalty: float | Array) -> Array:
    """Divides positive logits of tokens that a row has by a penalty, and multiplies negative ones by it.

    This is the repetition penalty of CTRL (arXiv:1909.05858, section 4.1) as transformers defines it: each token counts
    once, those of the prompt too.

    Args:
      logits: [B, V] float32.
      seen: [B, V] bool, the tokens of each row's prompt and those generated so far.
      penalty: above 1 makes repetition less likely, below 1 more likely; a number, or [B, 1].

    Returns:
      [B, V] float32.
    """
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalty_of(sampler: object) -> float | None:
    """Returns the repetition penalty of a sampling method; None if it has none."""
    penalty = getattr(sampler, "repetition_penalty", 1.0)
    return None if penalty == 1.0 else penalty


def _check_penalty(penalty: object) -> None:
    if not _between(penalty, SMALLEST, 1 / SMALLEST):
        raise InputError(
            f"repetition_penalty must be from {SMALLEST} to {1 / SMALLEST}, where 1 is none; got {shown(penalty)}."
        )


def _between(value: object, minimum: float, maximum: float) -> bool:
    """Whether a value is a number from `minimum` to `maximum`, of any size."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    number: Any = value  # not as a float, which a whole number of hundreds of digits cannot be
    return bool(minimum <= number <= maximum)


Sampler = Greedy | Sample


def check_sampling(sampler: object, key: object, rows: int | None = None) -> Array | None:
    """Checks the sampling arguments of a call.

    Args:
      sampler: a sampling method. A callable of another class with the same signature is valid.
      key: a random key, as an array of keys or as the numbers of one (``jax.random.PRNGKey``); or None.
      rows: the number of rows, for a key per row; None = only a single key is valid.

    Returns:
      The key as `jax.random.key` makes it, or [rows] keys; or None.

    Raises:
      InputError: if either is something else.
    """
    if isinstance(sampler, type) or not callable(sampler):
        raise InputError(f"sampler must be a sampling method such as Greedy() or Sample(top_p=0.9); got {sampler!r}.")
    if key is None:
        return None
    shapes = [()] if rows is None else [(), (rows,)]
    if isinstance(key, jax.Array) and key.shape in shapes and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if isinstance(key, jax.Array) and key.ndim == 1 and key.dtype == jnp.uint32:
        try:
            return jax.random.wrap_key_data(key)
        except TypeError:  # not as many numbers as a key has
            pass
    several = "" if rows is None else f", or {rows}, one per row"
    raise InputError(f"key must be a random key, as from jax.random.key(0){several}; got {key!r}.")
