"""Keeps what a policy evicts with few bits (MiKV, arXiv:2402.18096)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import StorageError
from kvjax.storage.base import Codec, Storage, factory
from kvjax.storage.dense import dense
from kvjax.storage.integer import Integer, group_size
from kvjax.storage.layouts import Tiers
from kvjax.storage.scaled import SCALE, scaled
from kvjax.storage.side import PromptView, Shapes, Side

Array = jax.Array

MAX_CHANNELS = 2**16


@dataclasses.dataclass(frozen=True)
class Balance(Side):
    """Scales the channels of keys, so that channels with large queries use more of a code's range.

    b_c = sqrt(max |q_c| / max |k_c|) over the prompt's tokens and the query heads of the group, 1 where either is 0
    (MiKV, arXiv:2402.18096, section 3.3).
    """

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {SCALE: ((dim,), jnp.dtype(dtype))}

    def prepare(self, view: PromptView) -> dict[str, Array]:
        # [B, 1, n, 1]
        real = view.real[:, None, :, None]
        # [B, K, D] each
        query = jnp.max(jnp.where(real[:, :, None], jnp.abs(view.query), 0.0), axis=(2, 3))
        key = jnp.max(jnp.where(real, jnp.abs(view.key), 0.0), axis=2)
        known = (query > 0) & (key > 0)
        # The roots first: the quotient may be below the smallest number, or above the largest.
        scale = jnp.sqrt(query) / jnp.sqrt(jnp.where(known, key, 1.0))
        return {SCALE: jnp.where(known, scale, 1.0)}


@dataclasses.dataclass(frozen=True)
class Halves(Integer):
    """`Integer` with groups of up to half of the channels, whatever their number.

    Attributes:
      bits: bits of a code, 1 to 8.
      group: the most channels of a group.
    """

    group: int = MAX_CHANNELS

    def size(self, dim: int) -> int:
        return group_size(dim, min(max(dim // 2, 1), self.group))


@factory
def mikv(
    bits: int = 2,
    group: int | None = None,
    high: Storage | None = None,
    balance: bool = True,
    *,
    low_capacity: int | None = None,
) -> Storage:
    """Keeps what the policy evicts with few bits instead of dropping it (MiKV, arXiv:2402.18096, section 3).

    The slots that the policy keeps are the high tier, and its budget is theirs. A victim is encoded into the low tier
    and stays there. Queries attend to both tiers. Keys of the low tier are balanced by the queries of the prompt, which
    then goes in in one shot.

    Args:
      bits: bits of a code of the low tier, 1 to 8.
      group: channels of the low tier that share a zero and a scale; None = half of the head size.
      high: how the high tier is held, such as ``int8()``; None = in the model's dtype.
      balance: whether keys of the low tier are balanced; see `Balance`.
      low_capacity: the number of slots of the low tier, whose oldest entry is lost when it is full; None = room for
        all victims.

    Raises:
      StorageError: an argument out of range, or a high tier that is not of single slots on the device.
    """
    codec = Halves(bits) if group is None else Integer(bits, group)
    key: Codec = scaled(codec, Balance()) if balance else codec
    if not isinstance(balance, bool):
        raise StorageError(f"storage mikv: balance={balance!r} must be True or False.")
    layout = Tiers(high=dense() if high is None else high, low_capacity=low_capacity)
    return Storage(key=key, value=codec, layout=layout, name=f"mikv{codec.bits}")
