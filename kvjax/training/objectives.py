"""Objectives: losses of gates on whole texts; the model is not trained."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.gates import LayerInputs, run_text
from kvjax.arguments import choice_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.models.calibrate import fingerprint, model_sizes
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.numerics.soft_cap import soft_capped
from kvjax.parallel.sharding import Params
from kvjax.policies.gates import Gate, SinkGate
from kvjax.policies.parameters import Parts
from kvjax.storage.calibration import Calibration
from kvjax.training.gated_attention import DECAY, HIGHEST, GatedAttention, scores
from kvjax.training.replayed import Replayer
from kvjax.training.retention import RELAXATIONS, SMALLEST, Retention, ages

Array = jax.Array
Gates = Sequence[Parts]  # the parameters of each layer's gate
FLOOR = 1e-9  # smaller attention is raised to this before the logarithm
SMOOTH = 0.0025  # weight of the squared difference between neighbours' scores (Locret)
FORMS = ("log", "cross_entropy")


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

    def attention(self, gates: Gates, temperature: Array, relax: str) -> list[GatedAttention]:
        """Returns the gated attention of each layer.

        Args:
          gates: of each layer, [K or 1, ...] each.
          temperature: [] float32, of soft gates.
          relax: see `GatedAttention`.
        """
        return [
            GatedAttention(own, temperature, self.gate, retention, relax)
            for own, retention in zip(gates, self.retention, strict=True)
        ]


def calibration_of(model: Model, gate: Gate, gates: Gates) -> Calibration:
    """Returns trained parameters as a calibration, for ``learned(..., gate=gate)``.

    Args:
      model: the model that the gates were trained for.
      gate: scores the tokens.
      gates: of each layer, [K or 1, ...] each.
    """
    layers = tuple({gate.name: {part: jnp.asarray(x, jnp.float32) for part, x in own.items()}} for own in gates)
    return Calibration(
        layers, method=gate.kind, rope=model.config.rope, model=fingerprint(model), policies=((gate.name, gate.kind),)
    )


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

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, temperature: Array) -> Array:
        """Returns the loss, [] float32.

        Args:
          setup: the model, the gate and the budget.
          params: of the model, which are constants.
          gates: of each layer, [K or 1, ...] each.
          tokens: [B, T] int32, texts without padding.
          temperature: [] float32, of soft gates.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """The mean negative log-likelihood of the next token under the budget, in nats.

    Attributes:
      relax: how gradients reach scores: ``st`` or ``soft``, see `gated_weights`.
    """

    relax: str = "st"

    def __post_init__(self) -> None:
        choice_argument("relax", self.relax, RELAXATIONS)

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, temperature: Array) -> Array:
        logits = _logits(setup, params, setup.attention(gates, temperature, self.relax), tokens)
        own = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(own, tokens[:, 1:, None], axis=2))


@dataclasses.dataclass(frozen=True)
class Distillation(Objective):
    """KL divergence from the full model to one whose attention decays with age (TRIM-KV, arXiv:2512.03324).

    The penalty `capacity` · max(0, Σ_{j ≤ t} β_j^{t-j} - slots), averaged over queries, heads and layers, is added.

    Attributes:
      capacity: the weight of this penalty.
    """

    capacity: float = 1.0
    age = True
    bias = 10.0

    def __post_init__(self) -> None:
        found = number_argument("capacity", self.capacity, minimum=0.0, maximum=float("inf"))
        object.__setattr__(self, "capacity", found)

    def check(self, gate: Gate) -> None:
        if gate.output != "log_sigmoid":
            raise PolicyError(f"{gate!r} must return log β; give a gate with output='log_sigmoid'.")

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, temperature: Array) -> Array:
        expected = jax.lax.stop_gradient(jax.nn.log_softmax(_logits(setup, params, None, tokens)))
        hidden, inputs = _run(setup, params, setup.attention(gates, temperature, DECAY), tokens)
        got = jax.nn.log_softmax(_head(setup, params, hidden))
        divergence = jnp.mean(jnp.sum(jnp.exp(expected) * (expected - got), axis=2))
        excess = [
            jnp.mean(jnp.maximum(_held(score) - retention.slots, 0.0))
            for score, retention in zip(_scores(setup, gates, inputs), setup.retention, strict=True)
        ]
        return divergence + self.capacity * sum(excess, jnp.float32(0)) / len(excess)


@dataclasses.dataclass(frozen=True)
class ReplayedScore(Objective):
    """The error of a gate's scores relative to KVzip's (KVzap, arXiv:2601.07891; Fast KVzip, arXiv:2601.17668).

    Attributes:
      replayer: computes the scores z by a replay of the text.
      form: ``log``: the squared error to log z (KVzap, whose z includes the norms of outputs); ``cross_entropy``: the
        cross-entropy of a score in [0, 1] to z (Fast KVzip).
    """

    replayer: Replayer
    form: str = "log"

    def __post_init__(self) -> None:
        choice_argument("form", self.form, FORMS)

    def check(self, gate: Gate) -> None:
        share = gate.output == "sigmoid" or (isinstance(gate, SinkGate) and gate.output == "none")
        if self.form == "cross_entropy" and not share:
            raise PolicyError(f"{gate!r} must return a number in [0, 1]; give a SinkGate, or output='sigmoid'.")

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, temperature: Array) -> Array:
        targets = jax.lax.stop_gradient(self.replayer.scores(params, tokens))
        _, inputs = _run(setup, params, None, tokens)
        losses = []
        for score, z in zip(_scores(setup, gates, jax.lax.stop_gradient(inputs)), targets, strict=True):
            if self.form == "log":
                losses.append(jnp.mean(jnp.square(score - jnp.log(jnp.maximum(z, FLOOR)))))
            else:
                share, z = jnp.clip(score, FLOOR, 1 - 1e-6), jnp.clip(z, 0.0, 1.0)
                losses.append(-jnp.mean(z * jnp.log(share) + (1 - z) * jnp.log1p(-share)))
        return sum(losses, jnp.float32(0)) / len(losses)


@dataclasses.dataclass(frozen=True)
class AnswerAttention(Objective):
    """The error of a gate's scores relative to the attention of an answer (Locret, arXiv:2410.01805, section 3.3).

    The loss is the smooth L1 distance of a prompt token's score to the largest attention probability over the queries
    of the answer and the query heads of a KV head, plus 0.0025 times the mean squared difference between neighbours'
    scores.

    Attributes:
      prompt: the number of tokens of a text that form its prompt; the others are the answer.
    """

    prompt: int

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, temperature: Array) -> Array:
        _, inputs = _run(setup, params, None, tokens)
        inputs = jax.lax.stop_gradient(inputs)
        losses = []
        for index, score in enumerate(_scores(setup, gates, inputs)):
            own = score[:, :, : self.prompt]
            target = _probabilities(setup.config, index, inputs[index])[:, :, :, self.prompt :, : self.prompt]
            distance = jnp.abs(own - jnp.max(target, axis=(2, 3)))
            smooth = jnp.where(distance < 1, jnp.square(distance) / 2, distance - 0.5)
            losses.append(jnp.mean(smooth) + SMOOTH * jnp.mean(jnp.square(jnp.diff(own, axis=2))))
        return sum(losses, jnp.float32(0)) / len(losses)


def _run(
    setup: Setup, params: Params, attention: list[GatedAttention] | None, tokens: Array
) -> tuple[Array, list[LayerInputs]]:
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return run_text(params, attention, tokens, lengths, config=setup.config)


def _head(setup: Setup, params: Params, hidden: Array) -> Array:
    """Returns the logits of hidden states, [B, T, V] float32."""
    decoder = Decoder(setup.config, params["embed"]["tokens"].dtype)
    return cast(Array, decoder.apply({"params": params}, hidden, method="logits"))


def _logits(setup: Setup, params: Params, attention: list[GatedAttention] | None, tokens: Array) -> Array:
    return _head(setup, params, _run(setup, params, attention, tokens)[0])


def _scores(setup: Setup, gates: Gates, inputs: Sequence[LayerInputs]) -> list[Array]:
    """Returns the scores of the tokens in each layer, [B, K, T] float32."""
    batch, n = inputs[0].hidden.shape[:2]
    position = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
    return [scores(setup.gate, own, each, position) for own, each in zip(gates, inputs, strict=True)]


def _held(score: Array) -> Array:
    """Returns Σ_{j ≤ t} β_j^{t-j} for each query t, [B, K, T]."""
    n = score.shape[-1]
    kept = jnp.exp(ages(n) * score[..., None, :])
    return jnp.sum(jnp.where(np.tri(n, dtype=bool), kept, 0.0), axis=-1)


def _probabilities(config: DecoderConfig, index: int, inputs: LayerInputs) -> Array:
    """Returns the attention of a layer of whole texts, [B, K, G, T, T] float32."""
    kind, (_, query, key, _) = config.kind(index), inputs
    batch, kv_heads, n, dim = key.shape
    at = np.arange(n)
    if kind.rope is not None:
        position = jnp.broadcast_to(jnp.asarray(at, jnp.int32), (batch, n))
        frequencies = kind.rope.frequencies(jnp.full((batch,), n, jnp.int32))
        query, key = (kind.rope.rotate(x, position, frequencies) for x in (query, key))
    scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
    grouped = query.reshape(batch, kv_heads, -1, n, dim).astype(jnp.float32)
    logits = scale * jnp.einsum("bkgtd,bkjd->bkgtj", grouped, key.astype(jnp.float32), precision=HIGHEST)
    seen = at <= at[:, None]
    if kind.window is not None:
        seen &= at > at[:, None] - kind.window
    return jax.nn.softmax(jnp.where(seen, soft_capped(logits, config.attention_soft_cap), SMALLEST), axis=-1)
