"""Neurons of MLPs: how often each is active, and what a decoder without some of them loses."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes import training
from experiments.papers.settings import Settings
from kvjax import policies
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.decoder_layer import Streams
from kvjax.models.layers import ACTIVATIONS, Linear, Norm
from kvjax.models.model import Model
from kvjax.models.stacked_params import unstacked
from kvjax.parallel.sharding import Params
from kvjax.products.quantized import is_quantized

Array = jax.Array
TOP = 0.1  # of a token's gates count as active where no activation is ever 0
OFTEN = 0.2  # of the tokens, above which Table 9 removes a neuron


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neurons(Part):
    """Counts the tokens that activate each neuron.

    The result has ``active`` [L, neurons] float32, the share of the tokens.

    Attributes:
      text: a key of `TEXTS`.
      rows: of the text.
      length: tokens of each.
    """

    text: str
    rows: int
    length: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        tokens = lab.rows(self, self.text, self.rows, self.length)
        return {"active": frequency(lab.model(self.model), tokens)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removal(Part):
    """Removes the neurons that are active on over `OFTEN` of the tokens, then tunes what is left on shares of a text.

    The result has ``before``, ``after`` and ``random``, the perplexities of an unseen text with all neurons, without
    these, and without as many random ones in each layer; ``tuned`` [shares], after tuning; and ``removed``, the share
    of all neurons.

    Attributes:
      text: a key of `TEXTS`, which is scored.
      source: a key of `TEXTS`, which neurons are counted on and the decoder is tuned on.
      rows: of the text that is scored, and that neurons are counted on.
      length: tokens of each.
      shares: of the source's rows that are tuned on.
      steps: of tuning.
      batch: rows of a step.
    """

    text: str
    source: str
    rows: int
    length: int
    shares: tuple[float, ...]
    steps: int
    batch: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return settings.file(self.text), settings.file(self.source)

    def measure(self, lab: Lab) -> Result:
        model, seed = lab.model(self.model), lab.settings.seed
        scored = lab.rows(self, self.text, self.rows, self.length)
        count = max(self.rows, self.batch * self.steps)
        trained = lab.rows(self, self.source, min(count, training.MAX_ROWS), self.length)
        # [L, neurons]
        heavy = frequency(model, trained[: self.rows]) > OFTEN
        rng = np.random.default_rng(seed)
        drawn = np.stack([rng.permutation(layer) for layer in heavy])
        pruned = without(model, heavy)
        tuned = []
        for share in self.shares:
            rows = trained[: max(1, round(share * len(trained)))]
            *_, (_, params) = training.steps(
                pruned, rows, count=self.steps, batch=self.batch, seed=seed, learning_rate=1e-3
            )
            # What was removed has no gradient, and stays away.
            tuned.append(_perplexity(dataclasses.replace(model, params=params), scored))
        values = {"before": _perplexity(model, scored), "after": _perplexity(pruned, scored)}
        values |= {"random": _perplexity(without(model, drawn), scored), "removed": float(heavy.mean())}
        return {name: np.asarray(value) for name, value in values.items()} | {"tuned": np.asarray(tuned)}


def neurons(settings: Settings, text: str) -> Neurons:
    """A part of the scale's sizes."""
    return Neurons(text=text, rows=settings.scale.look_rows, length=settings.scale.length)


def removal(settings: Settings) -> Removal:
    """A part of the scale's sizes."""
    scale = settings.scale
    return Removal(
        text="book", source="war", rows=4 * scale.look_rows, length=scale.length // 4,
        shares=scale.some((0.01, 0.1, 0.4, 1.0), (1.0,)), steps=3 if scale.trial else 50,
        batch=2 if scale.trial else 4,
    )  # fmt: skip


def frequency(model: Model, tokens: np.ndarray) -> np.ndarray:
    """The share of the tokens [B, T] that activate each neuron, [L, neurons] float32.

    Active is above 0 where the activation has zeros (ReLU), otherwise among the largest `TOP` of the token's gates.
    """
    _check(model)
    with model.on_mesh():
        return np.stack([np.asarray(each) for each in _frequency(model.params, jnp.asarray(tokens), model.config)])


def without(model: Model, removed: np.ndarray) -> Model:
    """The model without neurons, [L, neurons] bool."""
    _check(model)
    params = dict(model.params)
    for index, own in enumerate(removed):
        # [neurons]
        stay = jnp.asarray(~own)
        layer = params[f"layer_{index}"]
        mlp = {name: dict(part) for name, part in layer["mlp"].items()}
        for name, part in mlp.items():
            if name == "down":
                part["kernel"] = jnp.where(stay[:, None], part["kernel"], 0)
            else:
                # The kernel [hidden, neurons], and the bias if there is one.
                mlp[name] = {kind: jnp.where(stay, leaf, 0) for kind, leaf in part.items()}
        params[f"layer_{index}"] = dict(layer) | {"mlp": mlp}
    return dataclasses.replace(model, params=params)


def _check(model: Model) -> None:
    if model.config.num_experts:
        raise ConfigError("neurons are counted in dense MLPs; this model routes tokens to experts.")
    if any(is_quantized(leaf) for leaf in jax.tree.leaves(model.params, is_leaf=is_quantized)):
        raise ConfigError("neurons are counted with exact weights only; omit --config.model.weights.")


def _perplexity(model: Model, tokens: np.ndarray) -> float:
    # [B, T - 1]
    scored = kvjax.log_likelihood(model, tokens, policies.full(), prompt_length=tokens.shape[1]).logprobs
    return math.exp(-float(np.mean(np.asarray(scored), dtype=np.float64)))


@functools.partial(jax.jit, static_argnames=("config",))
def _frequency(params: Params, tokens: Array, config: DecoderConfig) -> list[Array]:
    decoder = Decoder(config, params["embed"]["tokens"].dtype)
    _, sown = decoder.apply({"params": unstacked(params)}, tokens, method="hidden", mutable="intermediates")
    found = []
    for index in range(config.num_layers):
        (streams,) = sown["intermediates"][f"streams_{index}"]
        # [B, T, neurons]
        gate = _gates(config, params[f"layer_{index}"], streams)
        if config.activation == "relu":
            active = gate > 0
        else:
            count = round(TOP * gate.shape[-1])
            active = gate >= jax.lax.top_k(gate, count)[0][..., -1:]
        found.append(jnp.mean(active.astype(jnp.float32), axis=(0, 1)))
    return found


def _gates(config: DecoderConfig, layer: Params, streams: Streams) -> Array:
    """The activations that gate a layer's neurons, [B, n, neurons]: of the gate, or of the only projection."""
    dtype = streams.block_input.dtype

    def norm(name: str, x: object) -> Any:
        return Norm(config, dtype).apply({"params": layer.get(name, {})}, x)

    # [B, n, hidden], as in `kvjax.models.decoder_layer.Layer`
    x: Any = streams.block_input + streams.attention_output
    if config.norm_position == "post":
        x = norm("attention_norm", x)
    elif config.shared_norm:
        x = streams.attention_input
    else:
        x = streams.block_input if config.parallel_residual else x
        x = x if config.norm_position == "output" else norm("mlp_norm", x)
    name = "gate" if config.gated_mlp else "up"
    linear = Linear(config.mlp_size, config.mlp_bias, dtype)
    # [B, n, neurons]
    gate: Any = linear.apply({"params": layer["mlp"][name]}, x)
    return ACTIVATIONS[config.activation](gate)
