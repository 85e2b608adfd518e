"""The setup of an objective of gates, and the runs of the model that objectives share."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.gates import LayerInputs, run_text
from kvjax.models.calibrate import fingerprint
from kvjax.models.config import DecoderConfig, model_sizes
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.models.stacked_params import unstacked
from kvjax.parallel.sharding import Params
from kvjax.policies.gates import Gate
from kvjax.policies.parameters import Parameters, Parts
from kvjax.storage.calibration import Calibration
from kvjax.storage.calibration_text import CalibrationText
from kvjax.training.gated_attention import GatedAttention, of_prompt, scores
from kvjax.training.retention import Retention

Array = jax.Array
Gates = Sequence[Parts]  # the parameters of each layer's gate


@dataclasses.dataclass(frozen=True)
class Setup:
    """The model, the gate and the budget that an objective is computed for.

    Attributes:
      config: the decoder.
      gate: scores the tokens.
      retention: the slots that stay, for each layer.
    """

    config: DecoderConfig
    gate: Gate
    retention: tuple[Retention, ...]

    def initial(self, key: Array, bias: float = 0.0) -> list[dict[str, Array]]:
        """Returns the parameters of each layer's gate before training, [K or 1, ...] float32 each.

        Args:
          key: [] key of random numbers.
          bias: added to the last bias of a gate, which raises the first scores of all tokens.
        """
        layers = []
        for each in jax.random.split(key, self.config.num_layers):
            made = self.gate.initial(each, model_sizes(self.config))
            layers.append({part: x + bias if part in ("bias", "down_bias") else x for part, x in made.items()})
        return layers

    def attention(
        self, gates: Gates, temperature: Array | float, relax: str, noise: Sequence[Array] | None = None
    ) -> list[GatedAttention]:
        """Returns the gated attention of each layer.

        Args:
          gates: of each layer, [K or 1, ...] each.
          temperature: [] float32 or a number, of soft gates.
          relax: see `GatedAttention`.
          noise: of each layer, [B, K, T] float32 each; see `GatedAttention`. None = 0.
        """
        own = [None] * len(gates) if noise is None else list(noise)
        return [
            GatedAttention(params, temperature, each, gate=self.gate, retention=retention, relax=relax)
            for params, each, retention in zip(gates, own, self.retention, strict=True)
        ]


def calibration_of(model: Model, gate: Parameters, gates: Gates, *, tokens: np.ndarray | None = None) -> Calibration:
    """Returns trained parameters as a calibration, for ``learned(..., gate=gate)`` or a merge with parameters.

    Args:
      model: the model that the parameters were trained for.
      gate: the gate, or another description of trained parameters.
      gates: of each layer, [K or 1, ...] each.
      tokens: [B, T] int, the texts without padding that they were trained on; None = not known.
    """
    layers = tuple({gate.name: {part: jnp.asarray(x, jnp.float32) for part, x in own.items()}} for own in gates)
    made = Calibration(
        layers, method=gate.kind, rope=model.config.rope, model=fingerprint(model), policies=((gate.name, gate.kind),)
    )
    return made if tokens is None else made.with_text(CalibrationText.of(tokens, np.full(len(tokens), tokens.shape[1])))


class Progress(NamedTuple):
    """The progress of the training.

    Attributes:
      temperature: [] float32, of soft gates.
      part: [] float32, the number of steps up to this one, inclusive, relative to all steps.
      key: [] key of random numbers of this step.
    """

    temperature: Array
    part: Array
    key: Array


class Objective:
    """A loss of gates. Write a frozen dataclass that inherits from this class.

    Attributes:
      age: whether scores are multiplied by the age of the token; see `kvjax.policies.learned`.
      bias: the bias of the first scores; see `Setup.initial`.
    """

    age: bool = False
    bias: float = 0.0

    def check(self, gate: Gate) -> None:
        """Raises PolicyError if the objective cannot use the scores of a gate."""

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        """Returns the loss, [] float32.

        Args:
          setup: the model, the gate and the budget.
          params: of the model, which are constants.
          gates: of each layer, [K or 1, ...] each.
          tokens: [B, T] int32, texts without padding.
          progress: of the training.
        """
        raise NotImplementedError


def run_model(
    setup: Setup, params: Params, attention: list[GatedAttention] | None, tokens: Array
) -> tuple[Array, list[LayerInputs]]:
    """Returns the last hidden states [B, T, E] of whole texts, and the inputs of the attention of each layer."""
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return run_text(params, attention, tokens, lengths, config=setup.config)


def logits_of(setup: Setup, params: Params, hidden: Array) -> Array:
    """Returns the logits of hidden states, [B, T, V] float32."""
    decoder = Decoder(setup.config, params["embed"]["tokens"].dtype)
    return cast(Array, decoder.apply({"params": unstacked(params)}, hidden, method="logits"))


def model_logits(setup: Setup, params: Params, attention: list[GatedAttention] | None, tokens: Array) -> Array:
    """Returns the logits of whole texts, [B, T, V] float32; attention of None is that over all tokens."""
    return logits_of(setup, params, run_model(setup, params, attention, tokens)[0])


def scores_of(setup: Setup, gates: Gates, inputs: Sequence[LayerInputs], *, raw: bool = False) -> list[Array]:
    """Returns the scores of the tokens in each layer, [B, K, T] float32.

    Args:
      setup: the gate.
      gates: of each layer, [K or 1, ...] each.
      inputs: of each layer.
      raw: whether the scores are those before the output function of the gate.
    """
    batch, n = inputs[0].hidden.shape[:2]
    position = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
    return [
        scores(setup.gate, own, each, of_prompt(position, retention), raw=raw)
        for own, each, retention in zip(gates, inputs, setup.retention, strict=True)
    ]
