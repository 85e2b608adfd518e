"""Closed forms of serving: how many rows fit, and how long prompts, steps and switches take (Fu, arXiv:2405.08944)."""

import dataclasses
import math

from kvjax.devices import Device
from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import active_parameter_count, parameter_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The numbers of a model that its costs depend on.

    Attributes:
      params: of the whole model.
      layers: the number of layers.
      heads: query heads.
      kv_heads: KV heads.
      dim: features of a head.
      width: bytes of a number of weights, keys and values.
      active_params: those that a token is multiplied by, in a model of experts; None = all.
    """

    params: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    width: int = 2
    active_params: int | None = None

    @classmethod
    def of(cls, config: DecoderConfig, width: int = 2) -> "ServedModel":
        """Returns the numbers of a decoder."""
        return cls(
            params=parameter_count(config), layers=config.num_layers, heads=config.num_heads,
            kv_heads=config.num_kv_heads, dim=config.head_dim, width=width,
            active_params=active_parameter_count(config),
        )  # fmt: skip

    @property
    def active(self) -> int:
        """The parameters that a token is multiplied by."""
        return self.params if self.active_params is None else self.active_params

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.params * self.width

    @property
    def slot_bytes(self) -> int:
        """Bytes of the key and the value of a token in one layer."""
        return 2 * self.kv_heads * self.dim * self.width

    def cache_bytes(self, tokens: int, budget: int | None = None) -> int:
        """Returns the bytes of the cache of a text, of which each layer holds at most `budget` tokens."""
        return self.layers * self.slot_bytes * (tokens if budget is None else min(tokens, budget))

    def prefill_flops(self, tokens: int, *, statistics: bool = False) -> float:
        """Returns the FLOPs of a prompt: weights, and the two causal products of attention.

        Args:
          tokens: of the prompt.
          statistics: whether probabilities are summed over queries, which takes half as much as attention.
        """
        attention = self.layers * self.heads * self.dim * tokens**2
        return 2 * self.active * tokens + (3 if statistics else 2) * attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingCosts:
    """The costs of serving texts of one length on a device, at its full speed.

    Attributes:
      cache: bytes of the cache of a row.
      rows: the rows that fit beside the weights.
      prefill: seconds of a prompt, which computes.
      decode_step_one_row: seconds of a token of one row, which reads weights and cache.
      decode_step_all_rows: seconds of a token of each of `rows` rows.
      switch: seconds to move the cache of a row to host memory, and that of another one back.
    """

    cache: int
    rows: int
    prefill: float
    decode_step_one_row: float
    decode_step_all_rows: float
    switch: float

    def __str__(self) -> str:
        return "\n".join([
            f"{self.rows} rows fit, {self.cache / 1e9:.3f} GB of keys and values each",
            f"{self.prefill:.3f} s for a prompt",
            f"{self.decode_step_one_row * 1e3:.2f} ms for a token of one row, {self.decode_step_all_rows * 1e3:.2f} ms "
            f"for one of each of {self.rows} rows",
            f"{self.switch * 1e3:.1f} ms to exchange a row with one in host memory",
        ])  # fmt: skip


def serving_costs(
    model: ServedModel, device: Device, tokens: int, *, budget: int | None = None, statistics: bool = False
) -> ServingCosts:
    """Computes what a device of full speed needs to serve texts of `tokens` tokens.

    Args:
      model: the model.
      device: with its memory, and the speeds of its memory, of its host link and of its products.
      tokens: of each text.
      budget: the slots of each layer; None = a full cache.
      statistics: see `ServedModel.prefill_flops`.

    Raises:
      InputError: the device's memory, compute or link is not known.
    """
    memory, bandwidth, link, compute = device.memory, device.bandwidth, device.link, device.flops
    if not memory or not bandwidth or not link or not compute:
        raise InputError(
            f"the memory, its bandwidth, the host link and the FLOP/s of {device.kind} must be known; give a "
            "kvjax.devices.Device that has them."
        )
    cache = model.cache_bytes(tokens, budget)
    rows = max(0, math.floor((memory - model.weight_bytes) / cache))

    def step(rows: int) -> float:
        return (model.weight_bytes + rows * cache) / bandwidth

    return ServingCosts(
        cache=cache, rows=rows, prefill=model.prefill_flops(tokens, statistics=statistics) / compute,
        decode_step_one_row=step(1), decode_step_all_rows=step(rows), switch=2 * cache / link,
    )  # fmt: skip
