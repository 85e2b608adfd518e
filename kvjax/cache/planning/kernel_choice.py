"""Chooses the kernels of each group of heads, before anything is traced, and keeps the reasons of those that refuse."""

import dataclasses
import functools
import math
import warnings

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax import attention
from kvjax.attention import Implementation
from kvjax.cache.context_parallel import refusals
from kvjax.cache.groups import Group
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.step.fused_kernel import observe_and_evict
from kvjax.errors import ConfigError
from kvjax.kernels import platform as pallas_platform
from kvjax.kernels import registry
from kvjax.kernels.registry import Choice, Op, Request
from kvjax.models.config import DecoderConfig
from kvjax.numerics.statistics import by_name
from kvjax.parallel import sharding
from kvjax.policies.round_memory import RoundMemory

#: Why ``auto`` on a GPU, which means XLA, does not try the Pallas kernels for it.
ONLY_BY_NAME = "pallas_gpu: its kernels run only if they are asked for by name, implementation='pallas_gpu'"
BY_PAGES = "blocks of queries of a prompt that read pages of their own (in_prompt) are gathered by XLA alone"
LANES = 128  # of a TPU; vectors of as many features lie one after the other in its tiles
#: What the TPU compiler (libtpu 0.0.42, 0.0.50) does to a pool in host memory, unless it is exact and of whole lanes.
THROUGH_DEVICE = (
    "in host memory alone: the TPU compiler moves pools of codes, or of heads whose size is no multiple of "
    f"{LANES}, through the device in each step"
)


class Chooser:
    """Chooses kernels for the groups of one layout, on the mesh in force.

    Attributes:
      config: of the decoder.
      sizes: what is allocated for.
      asked: the implementation as the caller wrote it.
      implementation: what that means on this platform.
      dtype: of keys and values.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      untried: for `CacheLayout.explain`, why kernels of this platform are not considered.
    """

    def __init__(self, config: DecoderConfig, sizes: Sizes, asked: Implementation, platform: str, dtype: DTypeLike):
        self.config, self.sizes, self.asked, self.dtype = config, sizes, asked, jnp.dtype(dtype)
        self.implementation = attention.resolve(asked, platform)
        self.platform = platform
        self.untried = (ONLY_BY_NAME,) if asked == "auto" and platform == "gpu" else ()
        if reason := pallas_platform.refuses(self.implementation, platform):
            raise ConfigError(f"implementation={asked!r} cannot run this: {reason}. Use 'auto' or 'xla'.")

    def round_up(self, slots: int) -> int:
        """The number of slots that kernels use where they lie."""
        multiple = registry.slot_multiple(self.implementation, self.dtype.itemsize)
        return -(-slots // multiple) * multiple

    def decode(self, group: Group, kv_heads: int) -> Group:
        """The decoding group with its kernels; kv_heads: of the group."""
        group = self._over_devices(group, kv_heads)
        if group.slot_axes:
            return group
        if any(group.codecs):
            multiple = registry.slot_multiple(self.implementation, self.dtype.itemsize, coded=True)
            # A whole step takes an empty slot before it frees one.
            for first in (group.slots[0] + group.evicts, group.slots[0]):
                slots = (-(-first // multiple) * multiple, *group.slots[1:])
                aligned = self._decode(dataclasses.replace(group, slots=slots), kv_heads)
                by_kernel = aligned.attn_implementation != "xla"
                if aligned.step_implementation is not None or (first == group.slots[0] and by_kernel):
                    return aligned
        return self._decode(group, kv_heads)

    def _decode(self, group: Group, kv_heads: int) -> Group:
        parts = len(group.slots) + 1 if group.storage.new_tokens_separate else 1
        request = self._request(group, kv_heads, tokens=1, slots=group.capacity, parts=parts)
        whole = self._choose("step", request, group)
        storage, lanes = group.storage, self.config.head_dim % LANES == 0
        if storage.on_host and self.platform == "tpu" and not (storage.exact and lanes):
            whole = dataclasses.replace(whole, reasons=(*whole.reasons, THROUGH_DEVICE))
        if whole.op == "step":
            return dataclasses.replace(
                group, step_implementation=whole.implementation, attn_implementation=whole.implementation
            )
        return dataclasses.replace(
            group, attn_implementation=whole.implementation, reasons=(*group.reasons, *whole.reasons)
        )

    def _over_devices(self, group: Group, kv_heads: int) -> Group:
        """Divides slots over devices if the mesh has axes for them and nothing needs all slots on one device."""
        axes, parts = sharding.left_over("slots", kv_heads)
        if not axes:
            return group
        over = f"slots over {'+'.join(axes)}, {parts} devices"
        reason = refusals.refuses(group, kv_heads, self.config.head_dim)
        if reason and refusals.divided_by_xla(group):
            multiple = math.lcm(parts, group.policy.page)
            return dataclasses.replace(
                group, slots=tuple(-(-size // multiple) * multiple for size in group.slots), slot_axes=axes,
                slot_parts=parts, by_xla=True, attn_implementation="xla", step_implementation=None,
                reasons=(f"a program of each of {parts} devices: XLA divides the slots, as {reason}",),
            )  # fmt: skip
        if reason:
            text = f"{over}, each of which holds them all: {reason}"
            warnings.warn(f"policy {group.policy.name}: not {text}.", stacklevel=2)
            return dataclasses.replace(group, reasons=(text,))
        if self.asked not in ("auto", "xla"):
            raise ConfigError(
                f"implementation={self.asked!r} cannot run this: {over}, which attention by XLA alone combines. Use "
                "'auto' or 'xla', or a mesh whose axis model divides the KV heads and which has no axis context."
            )
        slots = group.arrangement.slots_over_devices(group, parts)
        return dataclasses.replace(
            group, slots=slots, slot_axes=axes, slot_parts=parts, attn_implementation="xla", step_implementation=None,
            reasons=(f"pallas: {over}",) if self.implementation != "xla" else (),
        )  # fmt: skip

    def prompt(self, group: Group, kv_heads: int) -> Group:
        """The prompt's group with its kernel."""
        one_shot = self.sizes.block is None
        if not one_shot:
            group = self._over_devices(group, kv_heads)
            if group.slot_axes:
                return group
        if group.sparse_prompt is not None:
            if self.asked not in ("auto", "xla"):
                raise ConfigError(f"implementation={self.asked!r} cannot run this: {BY_PAGES}. Use 'auto' or 'xla'.")
            reasons = (f"pallas: {BY_PAGES}",) if self.platform != "cpu" else ()
            return dataclasses.replace(group, attn_implementation="xla", reasons=(*group.reasons, *reasons))
        tokens = self.sizes.prompt if one_shot else self.sizes.block
        assert tokens is not None
        parts = len(group.slots) + 1 if group.storage.new_tokens_separate and not one_shot else 1
        slots = tokens if one_shot else group.capacity
        request = self._request(group, kv_heads, tokens=tokens, slots=slots, parts=parts)
        choice = self._choose("prefill" if tokens > 1 else "decode", request, group)
        return dataclasses.replace(
            group, attn_implementation=choice.implementation, reasons=(*group.reasons, *choice.reasons)
        )

    def _request(self, group: Group, kv_heads: int, *, tokens: int, slots: int, parts: int) -> Request:
        divided = sharding.divided("kv_heads", kv_heads)
        extras = []
        if group.policy.page > 1:
            extras.append("eviction of whole pages")
        if group.policy.every > 1:
            extras.append(f"eviction of {group.policy.every} slots at once")
        if group.policy.budget is not None and group.policy.budget.beyond_prompt:
            extras.append("a prompt outside the budget")
        if any(not isinstance(each, RoundMemory) for each in group.memory):
            extras.append("a memory of a row's queries")
        if group.policy.rounds:
            extras.append("a memory of earlier evictions")
        if group.writes:
            extras.append("scores that are written once per token")
        if group.policy.params:
            extras.append("parameters of a policy")
        if group.policy.merge is not None:
            extras.append("a merge")
        if group.storage.new_tokens_separate and not any(group.codecs):
            extras.append(f"storage {group.storage.label}")
        if not group.selection.reads_all:
            extras.append(f"selection {group.selection.name}")
        if any(statistic.of_selection for statistic in group.needs):
            extras.append("statistics of what a selection chose")
        if group.policy.positions != "original":
            extras.append(f"positions={group.policy.positions!r}")
        return Request(
            batch=self.sizes.rows // sharding.divided("batch", self.sizes.rows),
            kv_heads=kv_heads // divided,
            whole_heads=divided == 1,
            group=self.config.num_heads // self.config.num_kv_heads,
            tokens=tokens,
            slots=slots,
            dim=self.config.head_dim,
            dtype=self.dtype.name,
            statistics=tuple(by_name(group.reports)),
            parts=parts,
            codecs=group.codecs,
            band=group.selection.whole_text,
            soft_cap=self.config.attention_soft_cap is not None,
            extras=tuple(extras),
        )

    def _choose(self, op: Op, request: Request, group: Group) -> Choice:
        # Layers that are alike are asked for once: reading a policy's jaxpr takes some milliseconds.
        choice = _choice(op, self.implementation, request, dataclasses.replace(group, decode_group=None))
        if self.asked not in ("auto", choice.implementation):
            raise ConfigError(
                f"implementation={self.asked!r} cannot run this: {'; '.join(choice.reasons)}. Use 'auto' or 'xla'."
            )
        return dataclasses.replace(choice, reasons=(*self.untried, *choice.reasons))


@functools.lru_cache(maxsize=1024)
def _choice(op: Op, implementation: Implementation, request: Request, group: Group) -> Choice:
    """`registry.choose`, for a group of any layer."""
    traced = dataclasses.replace(request, trace=functools.partial(observe_and_evict, group))
    return registry.choose(op, implementation, traced)
