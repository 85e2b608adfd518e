"""Resolves a config before anything is loaded: specs, decoder, layouts, and whether the machine can hold them."""

import dataclasses

import jax
import jax.numpy as jnp

from experiments import config as configs
from experiments import results, specs
from experiments.config import ExperimentConfig, ModelConfig
from experiments.runs import machine, measure
from kvjax.cache import CacheLayout, CacheSpec
from kvjax.checkpoint.huggingface import read_config
from kvjax.checkpoint.locate import local
from kvjax.checkpoint.quantized import stored_format
from kvjax.errors import ConfigError, KvjaxError
from kvjax.models import shapes
from kvjax.models.config import DecoderConfig
from kvjax.models.quantize import WeightCodes
from kvjax.parallel import sharding
from kvjax.parallel.rules import Rules
from kvjax.policies import full
from kvjax.specs import parse

DTYPES = ("float32", "bfloat16", "float16")


class CannotRun(ConfigError):
    """A model that this machine cannot hold, or whose checkpoint it does not have."""


def dtype_of(config: ModelConfig, platform: str | None = None) -> jnp.dtype:
    """The dtype of weights and cache: as configured, else float32 on a CPU and bfloat16 elsewhere."""
    if config.dtype is not None:
        if config.dtype not in DTYPES:
            raise ConfigError(f"model.dtype={config.dtype!r} is unknown; valid: {', '.join(DTYPES)}, or none.")
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16")


def decoder_config(config: ModelConfig) -> DecoderConfig | None:
    """Returns the decoder's config, as far as it is known before the model is loaded."""
    checkpoint = None if config.path is None else local(config.path)
    if checkpoint is not None and (checkpoint.is_file() or results.read_json(checkpoint / "config.json") is not None):
        return read_config(checkpoint)
    if config.shape is not None or config.path is None:
        return shapes.by_name(config.shape or "tiny")
    return None


def codes_of(config: ModelConfig) -> WeightCodes | None:
    """Returns the codes of the weights, of the config or the checkpoint, as far as they are known before loading."""
    if (codes := specs.build_weights(config)) is not None or config.path is None:
        return codes
    folder = local(config.path)
    if folder is None or not isinstance(raw := results.read_json(folder / "config.json"), dict):
        return None
    form = stored_format(folder, raw)
    return None if form is None else WeightCodes(form.bits, form.group)


def specs_of(config: ExperimentConfig, least_slots: int | None = None) -> list[CacheSpec]:
    """Baselines first, then the config's own; each once.

    Args:
      config: an experiment.
      least_slots: see `experiments.specs.build_policy`.

    Raises:
      KvjaxError: a policy, a storage or a selection, a setting of one, or a budget that cannot work.
    """
    own = specs.build_spec(config, least_slots)
    found = {own.name: own}
    for name in dict.fromkeys(config.baselines):
        try:
            spec = specs.baseline(config, name, least_slots)
        except KvjaxError as error:
            raise baseline_error(name, error) from None
        if found.get(spec.name, spec) != spec:
            # Policies of two files may have one name.
            text = name.partition(configs.JOINED)[0].strip()
            spec = dataclasses.replace(spec, policy=parse.named(spec.policy, text))
        found.setdefault(spec.name, spec)
    # The full cache opens every table, also when it is the policy itself, which otherwise ends it.
    return sorted([*(spec for spec in found.values() if spec is not own), own], key=lambda spec: spec.name != "full")


def baseline_error(name: str, error: KvjaxError) -> KvjaxError:
    """An error of the same kind that says which baseline it is about, and where baselines are set."""
    return type(error)(f"baseline {name!r}: {error} (baselines are set by --config.baselines=full,...)")


def check_fit(config: ExperimentConfig, *, stored: int = 0) -> None:
    """Refuses, before anything is allocated, what cannot work and a model that this machine cannot hold.

    Args:
      config: an experiment.
      stored: bytes of the states of prompts that are kept besides the cache.

    Raises:
      KvjaxError: a policy, a storage and a selection that do not go together, or not with this model.
      CannotRun: with what the model needs and what the machine has.
    """
    decoder = decoder_config(config.model)
    if decoder is None:
        return
    dtype, rows = dtype_of(config.model), config.data.num_sequences
    if config.data.prompt is None:
        layouts, own = [], specs.build_spec(config).name
        for spec in specs_of(config):
            try:
                layouts.append(layout_of(config, spec, decoder, config.data.prompt_length))
            except KvjaxError as error:
                raise error if spec.name == own else baseline_error(spec.name, error) from None
    else:
        # A prompt that is given has at most as many tokens as bytes; budgets are for its own length, not yet known.
        layouts = [layout_of(config, CacheSpec(full()), decoder, max(len(config.data.prompt.encode()), 1))]
    cache = max(max_cache_bytes(layout, rows) for layout in layouts)
    codes = codes_of(config.model)
    fit = machine.fit(decoder, dtype, cache=cache, stored=stored, mesh=config.mesh, codes=codes)
    if not fit.fits:
        held = f"{dtype}, weights {codes.name}," if codes else str(dtype)
        raise CannotRun(f"{model_name(config.model)} does not fit: in {held} {fit}.")


def layout_of(config: ExperimentConfig, spec: CacheSpec, decoder: DecoderConfig, prompt_length: int) -> CacheLayout:
    """Returns the layout of a config's spec; see `experiments.runs.measure.layout_of`."""
    rules = Rules.parse(config.rules)
    mesh = sharding.fit(sharding.make_mesh(config.mesh), decoder.num_kv_heads, rules) if config.mesh else None
    with sharding.on_mesh(mesh, rules):
        return measure.layout_of(
            spec, decoder, config.data.num_sequences, prompt_length, config.data.new_tokens, dtype_of(config.model),
            block=config.prefill_block, implementation=config.implementation,
        )  # fmt: skip


def max_cache_bytes(layout: CacheLayout, rows: int) -> int:
    """Bytes of keys and values while decoding, or while the prompt goes in where that is more."""
    # A prompt in one shot leaves the survivors of each layer before the next one begins.
    phases = [layout.decode] if layout.block is None else [layout.decode, layout.prompt]
    return max(dataclasses.replace(layout, decode=phase).bytes(rows) for phase in phases)


def model_name(config: ModelConfig) -> str:
    """The checkpoint, or the shape of random weights."""
    return config.path or config.shape or "tiny"
