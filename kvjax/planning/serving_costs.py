"""Closed forms of serving: how many rows fit, and how long prompts, steps and switches take (Fu, arXiv:2405.08944)."""

import dataclasses
import math

from kvjax.arguments import check_type, number_argument
from kvjax.devices import Device, known_numbers
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.planning.served_model import Budget, ServedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingCosts:
    """The costs of serving texts of one length on a device, at its full speed.

    Attributes:
      cache: bytes of the cache of a row.
      host: those of them that are in host memory.
      rows: the rows that fit beside the weights, and in host memory.
      prefill: seconds of a prompt, which computes.
      decode_step_one_row: seconds of a token of one row, which reads weights and cache; or the time of the link, if
        that is longer.
      decode_step_all_rows: seconds of a token of each of `rows` rows.
      switch: seconds to move what a row has on the device to host memory, and that of another one back.
    """

    cache: int
    host: int
    rows: int
    prefill: float
    decode_step_one_row: float
    decode_step_all_rows: float
    switch: float

    def __str__(self) -> str:
        return "\n".join([
            f"{self.rows} rows fit, {self.cache / 1e9:.3f} GB of keys and values each"
            + (f", {self.host / 1e9:.3f} GB of them in host memory" if self.host else ""),
            f"{self.prefill:.3f} s for a prompt",
            f"{self.decode_step_one_row * 1e3:.2f} ms for a token of one row, {self.decode_step_all_rows * 1e3:.2f} ms "
            f"for one of each of {self.rows} rows",
            f"{self.switch * 1e3:.1f} ms to exchange a row with one in host memory",
        ])  # fmt: skip


def serving_costs(
    model: ServedModel,
    device: Device,
    tokens: int,
    *,
    budget: Budget = None,
    statistics_layers: int = 0,
    host_memory: float = math.inf,
) -> ServingCosts:
    """Computes what a device of full speed needs to serve texts of `tokens` tokens.

    Args:
      model: the model.
      device: with its memory, and the speeds of its memory, of its host link and of its products.
      tokens: of each text.
      budget: the slots of each layer, or one number for each; see `ServedModel.runs`. None = a full cache.
      statistics_layers: see `ServedModel.prefill_flops`.
      host_memory: bytes for the slots that are there.

    Raises:
      InputError: the device's memory, compute or link is not known; all slots are in host memory, and `host_memory` is
        not given; or see `ServedModel`.
    """
    check_type("model", model, ServedModel, "a ServedModel, such as ServedModel.of(model.config)")
    memory, bandwidth, link, compute = known_numbers(device, "memory", "bandwidth", "link", "flops")
    check_count("tokens", tokens)
    cache = model.cache_bytes(tokens, budget)
    host = sum(each.on_host * each.held(tokens) for each in model.runs(budget))
    number_argument("host_memory", host_memory, minimum=0, maximum=math.inf, error=InputError)

    def fit(room: float, row: int) -> float:
        if room < 0:
            return 0.0
        return room / row if row else math.inf

    most = min(fit(memory - model.weight_bytes, cache - host), fit(host_memory, host))
    if most == math.inf:
        raise InputError("all slots are in host memory, which limits the number of rows; give host_memory.")
    rows = math.floor(most)

    def step(rows: int) -> float:
        return max((model.weight_bytes + rows * cache) / bandwidth, rows * host / link)

    return ServingCosts(
        cache=cache, host=host, rows=rows,
        prefill=model.prefill_flops(tokens, statistics_layers=statistics_layers) / compute,
        decode_step_one_row=step(1), decode_step_all_rows=step(rows), switch=2 * (cache - host) / link,
    )  # fmt: skip
