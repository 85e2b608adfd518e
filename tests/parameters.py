"""Random parameters of policies, the same for the library and for the reference: a head's depend on its index alone."""

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.config import model_sizes
from kvjax.models.decoder_layer import POLICY
from kvjax.policies import LinearGate, LoCoCo, ModelSizes, Parameters, QueryDirection, QuerySpread

EVERY = (QuerySpread(), QueryDirection(), LinearGate(), LoCoCo().weights)


def of_head(name: str, part: str, layer: int, head: int, shape: tuple[int, ...]) -> np.ndarray:
    """The array of one KV head, float32."""
    seed = [zlib.crc32(f"{name}.{part}".encode()), layer, head]
    found = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    # Magnitudes are no smaller than that of the mean.
    return np.abs(found) + 1 if part == "size" else found


def of_layer(parameters: Iterable[Parameters], sizes: ModelSizes, layer: int) -> dict[str, dict[str, Any]]:
    """The arrays of one layer: name -> part -> [K or 1, ...]."""
    return {
        each.name: {
            part: jnp.asarray(
                np.stack([of_head(each.name, part, layer, head, shape[1:]) for head in range(shape[0])]), jnp.float32
            )
            for part, shape in each.parts(sizes).items()
        }
        for each in parameters
    }


def without_parameters(model: kvjax.Model) -> kvjax.Model:
    """The model without parameters of policies, as a checkpoint has it."""
    params = dict(model.params)
    for index in range(model.config.num_layers):
        layer = params[f"layer_{index}"]
        attention = {name: x for name, x in layer["attention"].items() if name != POLICY}
        params[f"layer_{index}"] = layer | {"attention": attention}
    return dataclasses.replace(model, params=params)


def with_parameters(model: kvjax.Model, parameters: Iterable[Parameters] = EVERY) -> kvjax.Model:
    """The model with these parameters, so that policies that read them need no calibration."""
    params, sizes = dict(model.params), model_sizes(model.config)
    own = [each for each in parameters if sizes.rotary is not None or not isinstance(each, QuerySpread)]
    for index in range(model.config.num_layers):
        layer = params[f"layer_{index}"]
        with jax.ensure_compile_time_eval():
            attention = layer["attention"] | {POLICY: of_layer(own, sizes, index)}
        params[f"layer_{index}"] = layer | {"attention": attention}
    return dataclasses.replace(model, params=params)
