"""The memory that cells need at their peak, from programs of few layers that are compiled; nothing is run."""

import functools
from collections.abc import Mapping, Sequence

import jax

from experiments import specs
from experiments.config import ExperimentConfig
from experiments.leaderboards.cells import Cell, experiments
from experiments.leaderboards.config import FULL, LeaderboardConfig
from experiments.leaderboards.page import sizes
from experiments.progress import tracked
from experiments.runs import machine
from experiments.runs.resolve import codes_of, decoder_config, dtype_of
from kvjax.cache import CacheSpec
from kvjax.errors import ConfigError, KvjaxError
from kvjax.models.config import DecoderConfig
from kvjax.planning import plan
from kvjax.planning.memory_estimate import Run
from kvjax.typing import Json, JsonObject


def with_peaks(rows: Sequence[JsonObject], config: LeaderboardConfig, measured: Mapping[str, Json]) -> list[JsonObject]:
    """Returns rows with ``peak_bytes`` and ``full_peak_bytes``, the cell's and the full cache's.

    Args:
      rows: see `experiments.leaderboards.cells.row`. Those without a result stay as they are, as do those whose
        programs the compiler refuses, and those of policies that need more layers than the programs have.
      config: the leaderboard of the rows.
      measured: the sizes of the rows, see `experiments.leaderboards.page.sizes`.

    Raises:
      ConfigError: the model is not on this machine, or the config has other sizes than the rows, or a row was measured
        on another kind of device.
    """
    for name, value in sizes(config).items():
        if measured[name] != value and name != "texts":
            raise ConfigError(
                f"--peaks needs the config of the cells: their {name} is {measured[name]!r}, the config's {value!r}."
            )
    device = jax.devices()[0].device_kind
    if others := sorted({row["machine"]["device"] for row in rows if row["status"] == "ok"} - {device}):
        raise ConfigError(
            f"--peaks needs the kind of device that the cells were measured on: {', '.join(others)}; this is {device}."
        )
    decoder = decoder_config(config.model)
    if decoder is None:
        raise ConfigError(f"--peaks needs the config of {config.model.path}, which is not on this machine.")
    found, fulls = [], {}
    for row in tracked(rows, unit="cell", name=lambda row: f"memory of {row['cache']}", show=None):
        found.append(row)
        if row["status"] != "ok":
            continue
        _, made = next(experiments(config, Cell(row["cache"], row["budget"])))
        spec = specs.build_spec(made)
        if FULL not in fulls:
            fulls[FULL] = peak_bytes(decoder, specs.baseline(made, FULL), made)
        try:
            own = peak_bytes(decoder, spec, made) if fulls[FULL] else None
        except KvjaxError:  # a policy of spans of layers may refuse so few
            continue
        if own:
            found[-1] = row | {"peak_bytes": own, "full_peak_bytes": fulls[FULL]}
        machine.forget_programs()
    return found


def peak_bytes(decoder: DecoderConfig, spec: CacheSpec, config: ExperimentConfig) -> int | None:
    """Returns the bytes beyond the weights of the larger of two programs, that of the prompts and that of a step.

    None where the compiler refuses one, and does not say how much it needs.

    Args:
      decoder: the model's config.
      spec: the cache.
      config: has the rows, their lengths and the dtype.
    """
    data = config.data
    planned = functools.partial(
        plan, policy=spec, prompt_length=data.prompt_length, new_tokens=data.new_tokens,
        dtype=dtype_of(config.model), weights=codes_of(config.model), host_weights=config.model.host_weights,
        prefill_block=config.prefill_block, implementation=config.implementation,
    )  # fmt: skip
    one = planned(decoder, compiles=False)
    need = Run(decoder, planned, "", one).need(data.num_sequences)
    return None if need.refused else round(need.peak) - one.weights
