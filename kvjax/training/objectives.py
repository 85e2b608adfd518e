"""Objectives: losses of gates on whole texts; the model is not trained."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.gates import LayerInputs
from kvjax.arguments import choice_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.models.config import DecoderConfig
from kvjax.numerics.soft_cap import soft_capped
from kvjax.parallel.sharding import Params
from kvjax.policies.gates import Gate, SinkGate
from kvjax.training.gated_attention import DECAY, HIGHEST
from kvjax.training.replayed import Replayer
from kvjax.training.retention import RELAXATIONS, SMALLEST, ages
from kvjax.training.setup import Gates, Objective, Progress, Setup, logits_of, model_logits, run_model, scores_of

Array = jax.Array
FLOOR = 1e-9  # smaller attention is raised to this before the logarithm
SMOOTH = 0.0025  # weight of the squared difference between neighbours' scores (Locret)
FORMS = ("log", "cross_entropy")


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """The mean negative log-likelihood of the next token under the budget, in nats.

    Attributes:
      relax: how gradients reach scores: ``st`` or ``soft``, see `gated_weights`.
    """

    relax: str = "st"

    def __post_init__(self) -> None:
        choice_argument("relax", self.relax, RELAXATIONS)

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        logits = model_logits(setup, params, setup.attention(gates, progress.temperature, self.relax), tokens)
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

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        expected = jax.nn.log_softmax(model_logits(setup, params, None, tokens))
        hidden, inputs = run_model(setup, params, setup.attention(gates, progress.temperature, DECAY), tokens)
        got = jax.nn.log_softmax(logits_of(setup, params, hidden))
        divergence = kl_divergence(expected, got)
        excess = [
            jnp.mean(jnp.maximum(_held(score) - retention.slots, 0.0))
            for score, retention in zip(scores_of(setup, gates, inputs), setup.retention, strict=True)
        ]
        return divergence + self.capacity * sum(excess, jnp.float32(0)) / len(excess)


class Examples(NamedTuple):
    """The inputs of a gate for a batch of texts, and the scores that it should return.

    Attributes:
      hidden: of each layer, [B, T, E].
      heads: the queries [B, H, T, D], keys and values [B, K, T, D] of each layer; None if the gate does not read them.
      targets: of each layer, [B, K, T] float32.
    """

    hidden: list[Array]
    heads: list[tuple[Array, Array, Array]] | None
    targets: list[Array]

    def inputs(self, config: DecoderConfig) -> list[LayerInputs]:
        """Returns the inputs of each layer; queries, keys and values that the gate does not read are 0."""
        if self.heads is not None:
            return [LayerInputs(hidden, *heads) for hidden, heads in zip(self.hidden, self.heads, strict=True)]
        batch, n = self.hidden[0].shape[:2]
        query, key = (
            jnp.zeros((batch, count, n, config.head_dim), self.hidden[0].dtype)
            for count in (config.num_heads, config.num_kv_heads)
        )
        return [LayerInputs(hidden, query, key, key) for hidden in self.hidden]


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

    def examples(self, setup: Setup, params: Params, tokens: Array) -> Examples:
        """Returns all that the loss of a batch depends on except the gates, so that steps can share it.

        Args:
          setup: the model and the gate.
          params: of the model.
          tokens: [B, T] int32, texts without padding.
        """
        targets = self.replayer.scores(params, tokens)
        _, inputs = run_model(setup, params, None, tokens)
        hidden = [each.hidden for each in inputs]
        heads = None if setup.gate.hidden_only else [(each.query, each.key, each.value) for each in inputs]
        return Examples(hidden, heads, targets)

    def error(self, setup: Setup, gates: Gates, examples: Examples) -> Array:
        """Returns the loss of a batch, [] float32.

        Args:
          setup: the model and the gate.
          gates: of each layer, [K or 1, ...] each.
          examples: see `examples`.
        """
        losses = []
        for score, z in zip(scores_of(setup, gates, examples.inputs(setup.config)), examples.targets, strict=True):
            if self.form == "log":
                losses.append(jnp.mean(jnp.square(score - jnp.log(jnp.maximum(z, FLOOR)))))
            else:
                share, z = jnp.clip(score, FLOOR, 1 - 1e-6), jnp.clip(z, 0.0, 1.0)
                losses.append(-jnp.mean(z * jnp.log(share) + (1 - z) * jnp.log1p(-share)))
        return sum(losses, jnp.float32(0)) / len(losses)

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        return self.error(setup, gates, jax.lax.stop_gradient(self.examples(setup, params, tokens)))


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

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        _, inputs = run_model(setup, params, None, tokens)
        inputs = jax.lax.stop_gradient(inputs)
        losses = []
        for index, score in enumerate(scores_of(setup, gates, inputs)):
            own = score[:, :, : self.prompt]
            target = _probabilities(setup.config, index, inputs[index])[:, :, :, self.prompt :, : self.prompt]
            distance = jnp.abs(own - jnp.max(target, axis=(2, 3)))
            smooth = jnp.where(distance < 1, jnp.square(distance) / 2, distance - 0.5)
            losses.append(jnp.mean(smooth) + SMOOTH * jnp.mean(jnp.square(jnp.diff(own, axis=2))))
        return sum(losses, jnp.float32(0)) / len(losses)


def kl_divergence(expected: Array, got: Array) -> Array:
    """Returns the mean over tokens of KL(expected || got), [] float32.

    Args:
      expected: [B, T, V] float32 log-probabilities, constants to the gradient.
      got: [B, T, V] float32 log-probabilities.
    """
    expected = jax.lax.stop_gradient(expected)
    return jnp.mean(jnp.sum(jnp.exp(expected) * (expected - got), axis=2))


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
