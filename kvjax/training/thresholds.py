"""Objectives of gates that run with a threshold: each token stays or goes whatever the others score."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import number_argument
from kvjax.errors import PolicyError
from kvjax.parallel.sharding import Params
from kvjax.policies.gates import Gate
from kvjax.training.gated_attention import MASK
from kvjax.training.objectives import kl_divergence
from kvjax.training.setup import Gates, Objective, Progress, Setup, logits_of, model_logits, run_model, scores_of

Array = jax.Array


def _check_probability(gate: Gate) -> None:
    """Raises PolicyError unless the scores of the gate are probabilities whose logits are known."""
    if gate.output != "sigmoid":
        raise PolicyError(f"{gate!r} must return the probability that a token stays; give output='sigmoid'.")


@dataclasses.dataclass(frozen=True)
class DelayedEviction(Objective):
    """KL divergence from the full model to one that may evict each token after `recent` steps (DMS, arXiv:2506.05345).

    The score of a token is 1 - α, where α is the probability of its eviction. In training, α is a sample of a
    Gumbel-sigmoid at the temperature of soft gates, and log(1 - α) is added to the logits of the token for queries more
    than `recent` positions later. The loss adds max(0, target - mean α), over tokens, heads and layers. The target
    rises with the steps: tokens / slots rises linearly from 1.

    Run the gate by ``learned(budget, gate=gate, recent=recent, threshold=0.5)``. The authors train the model as well,
    take α from a channel of its queries or keys, and set the channel to 0 in attention. Here the model is constant and
    keeps its channel; see `kvjax.policies.ChannelGate`.

    Attributes:
      target: the mean α of the last step, 0 to 1; None = 1 - slots / tokens, of the retention and a text.
    """

    target: float | None = None
    bias = 5.0

    def __post_init__(self) -> None:
        if self.target is not None:
            object.__setattr__(self, "target", number_argument("target", self.target, minimum=0.0, maximum=0.999))

    def check(self, gate: Gate) -> None:
        _check_probability(gate)

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        shape = (tokens.shape[0], setup.config.num_kv_heads, tokens.shape[1])
        noise = [jax.random.logistic(key, shape) for key in jax.random.split(progress.key, len(gates))]
        expected = jax.nn.log_softmax(model_logits(setup, params, None, tokens))
        hidden, inputs = run_model(
            setup, params, setup.attention(gates, progress.temperature, MASK, noise), tokens
        )  # fmt: skip
        got = jax.nn.log_softmax(logits_of(setup, params, hidden))
        raw = scores_of(setup, gates, inputs, raw=True)
        # [L, B, K, T]
        alpha = jax.nn.sigmoid(-(jnp.stack(raw) + jnp.stack(noise)) / progress.temperature)
        last = 1 / (1 - self._last_target(setup, tokens.shape[1]))
        target = 1 - 1 / (1 + progress.part * (last - 1))
        return kl_divergence(expected, got) + jnp.maximum(target - jnp.mean(alpha), 0.0)

    def _last_target(self, setup: Setup, length: int) -> float:
        if self.target is not None:
            return self.target
        return 1 - min(float(np.mean([each.slots for each in setup.retention])) / length, 1.0)


@dataclasses.dataclass(frozen=True)
class PromptEviction(Objective):
    """The loss of the tokens after a prompt that is compressed once (Attention-Gate, arXiv:2410.12876).

    The loss is the mean negative log-likelihood of the tokens after the prompt, in nats, plus `weight` times
    abs(mean gate - target) over the prompt's tokens, heads and layers. A gate is 1 if the score of its token is at
    least the threshold, or 0.5 without one, and else 0; gradients are those of the score (straight through).
    Gradients of the first term are those of `gated_weights`.

    Run the gate by ``learned(budget, gate=gate, every=None, threshold=0.5)``, and give a `Retention` with a prompt.

    Attributes:
      weight: the weight of the second term.
      target: the mean gate, 0 to 1; None = slots / prompt, of the retention.
    """

    weight: float = 1.0
    target: float | None = None

    def __post_init__(self) -> None:
        found = number_argument("weight", self.weight, minimum=0.0, maximum=float("inf"))
        object.__setattr__(self, "weight", found)
        if self.target is not None:
            object.__setattr__(self, "target", number_argument("target", self.target, minimum=0.0, maximum=1.0))

    def check(self, gate: Gate) -> None:
        _check_probability(gate)

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        prompts = [each.prompt for each in setup.retention]
        first = prompts[0]
        if first is None or any(each != first for each in prompts) or first >= tokens.shape[1]:
            raise PolicyError(
                f"texts of {tokens.shape[1]} tokens with prompts of {prompts} tokens in the layers are not valid; give "
                "all layers a Retention with the same prompt, shorter than the texts."
            )
        hidden, inputs = run_model(setup, params, setup.attention(gates, progress.temperature, "st"), tokens)
        got = jax.nn.log_softmax(logits_of(setup, params, hidden[:, first - 1 : -1]))
        loss = -jnp.mean(jnp.take_along_axis(got, tokens[:, first:, None], axis=2))
        means, targets = [], []
        for score, retention in zip(scores_of(setup, gates, inputs), setup.retention, strict=True):
            own = score[:, :, :first]
            threshold = 0.5 if retention.threshold is None else retention.threshold
            hard = (own >= threshold).astype(jnp.float32)
            means.append(jnp.mean(hard + own - jax.lax.stop_gradient(own)))
            targets.append(min(retention.slots / first, 1.0) if self.target is None else self.target)
        distance = sum(means, jnp.float32(0)) / len(means) - float(np.mean(targets))
        return loss + self.weight * jnp.abs(distance)


@dataclasses.dataclass(frozen=True)
class Admission(Objective):
    """Squared error of the hidden states of a model that admits few tokens to its cache (WG-KV, arXiv:2512.17452).

    The score of a token is g, the probability that it is admitted. Tokens that are not admitted are seen by the next
    `recent` queries only. In training, log g is added to the logits of a token for later queries. The loss is the mean
    squared difference of the last hidden states from those of the full model, plus `sparsity` times the mean over
    tokens, heads and layers of o + (1 - o)·(1 - (g - 1)²). Here o is the share of queries from the token on that see it
    in any case. A token with g = 0 costs o, and one with g = 1 costs 1.

    Run the gate by ``learned(budget, gate=gate, recent=recent, threshold=0.1)``. The authors' gate is a network of
    each KV head, on its key and value.

    Attributes:
      sparsity: the weight of the second term.
    """

    sparsity: float = 0.04

    def __post_init__(self) -> None:
        found = number_argument("sparsity", self.sparsity, minimum=0.0, maximum=float("inf"))
        object.__setattr__(self, "sparsity", found)

    def check(self, gate: Gate) -> None:
        _check_probability(gate)

    def loss(self, setup: Setup, params: Params, gates: Gates, tokens: Array, progress: Progress) -> Array:
        expected, _ = run_model(setup, params, None, tokens)
        got, inputs = run_model(setup, params, setup.attention(gates, 1.0, MASK), tokens)
        error = jnp.mean(jnp.square(got.astype(jnp.float32) - jax.lax.stop_gradient(expected).astype(jnp.float32)))
        costs = []
        for score, retention in zip(scores_of(setup, gates, inputs), setup.retention, strict=True):
            # [T]: the number of queries from each token on
            queries = np.arange(tokens.shape[1], 0, -1, dtype=np.float32)
            seen = np.minimum((retention.recent + 1) / queries, 1).astype(np.float32)
            costs.append(jnp.mean(seen + (1 - seen) * (1 - jnp.square(score - 1))))
        return error + self.sparsity * sum(costs, jnp.float32(0)) / len(costs)
