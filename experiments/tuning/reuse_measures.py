"""Measures trained reuse on held-out windows, through the functions that users call, and the FLOPs of prompts."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.tuning.reuse_config import TrainReuseConfig, layers_of
from experiments.tuning.reuse_methods import UNCHANGED, Augmentation, Prediction
from kvjax import policies, reuse
from kvjax.contexts.choices import score_prefilled
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.models.parameters import parameter_shapes
from kvjax.training import prediction
from kvjax.typing import JsonObject, PyTree

BASE, TRUNCATED, FEWER, ALONE, PREDICTED = "base", "truncated", "fewer layers", "auxiliary alone", "prediction"  # kinds
SHARES = (0.125, 0.25, 0.5)  # of the prompt, its newest tokens
UNTRAINED, TRAINED = "untrained", "trained"


@dataclasses.dataclass
class Point:
    """A way to read prompts.

    Attributes:
      name: what is shown of it.
      kind: one of the kinds above.
      flops: of a prompt.
      nats_by_window: the mean loss of the tokens after the prompt of each held-out window.
    """

    name: str
    kind: str
    flops: float
    nats_by_window: list[float]


def layer_weights(config: DecoderConfig) -> int:
    """Returns the number of elements of a layer's matrices that a token is multiplied by."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(parameter_shapes(config.one_layer())["layer_0"])]
    # Matrices of all experts have an axis more.
    experts = sum(math.prod(shape) for shape in shapes if len(shape) > 2)
    share = config.experts_per_token / config.num_experts if config.num_experts else 0
    return round(sum(math.prod(shape) for shape in shapes if len(shape) == 2) + share * experts)


def layers_flops(config: DecoderConfig, tokens: int) -> float:
    """Returns the FLOPs of the layers for a prompt: matrices, and the two causal products of attention."""
    attention = 2 * config.num_heads * config.head_dim * tokens**2
    return float(config.num_layers * (2 * layer_weights(config) * tokens + attention))


def prompt_flops(config: DecoderConfig, tokens: int) -> float:
    """Returns the FLOPs of a prompt: its layers, and the output head of the last token."""
    return layers_flops(config, tokens) + 2.0 * config.vocab_size * config.embed_size


def predicted_flops(config: DecoderConfig, auxiliary: DecoderConfig, tokens: int) -> float:
    """Returns the FLOPs of a prompt whose cache is predicted: auxiliary layers, maps, the last token in the base."""
    inputs, outputs = (each.num_kv_heads * each.head_dim for each in (auxiliary, config))
    maps = 2.0 * (tokens - 1) * config.num_layers * 2 * inputs * outputs
    attention = 4 * config.num_heads * config.head_dim * tokens
    last = config.num_layers * (2 * layer_weights(config) + attention) + 2.0 * config.vocab_size * config.embed_size
    return layers_flops(auxiliary, tokens - 1) + maps + last


def after_prompts(model: Model, tokens: np.ndarray, prompt: int) -> list[float]:
    """Returns the mean loss of the tokens after each prompt under a full cache, in nats."""
    found = kvjax.log_likelihood(model, tokens, policies.full(), prompt_length=prompt)
    return _means(-np.asarray(found.logprobs)[:, prompt - 1 :])


def after_predictions(
    model: Model, predictor: reuse.Predictor, tokens: np.ndarray, prompt: int, rows: int
) -> list[float]:
    """Returns the mean loss of the tokens after prompts whose caches are predicted, in nats."""
    found: list[float] = []
    for start in range(0, len(tokens), rows):
        own = tokens[start : start + rows]
        context = reuse.predict(model, predictor, own[:, :prompt], room=own.shape[1])
        scored = score_prefilled(model, context, [[row[prompt:].tolist()] for row in own])
        found += _means(np.stack([-each.logprobs for (each,) in scored]))
    return found


def _means(nats: np.ndarray) -> list[float]:
    return [float(x) for x in nats.mean(axis=1, dtype=np.float64)]


def prediction_points(
    config: TrainReuseConfig, model: Model, method: Prediction, trained: Sequence[PyTree], tokens: np.ndarray,
    opening: int,
) -> list[Point]:  # fmt: skip
    """Measures KV prediction, and other ways to read a prompt with fewer FLOPs.

    Args:
      config: of the run.
      model: the base.
      method: of the run.
      trained: the parameters of each variant.
      tokens: [N, T] int32, held-out windows.
      opening: the tokens that every window begins with, which truncated prompts have too.
    """
    prompt, base = config.windows.prompt_length, model.config
    points = [Point("base", BASE, prompt_flops(base, prompt), after_prompts(model, tokens, prompt))]
    for share in SHARES:
        newest = max(1, round(share * (prompt - opening)))
        shorter = np.concatenate([tokens[:, :opening], tokens[:, prompt - newest :]], axis=1)
        nats = after_prompts(model, shorter, opening + newest)
        points.append(Point(f"newest {share:.1%}", TRUNCATED, prompt_flops(base, opening + newest), nats))
    for name, before, own in zip(config.variants, method.predictors, trained, strict=True):
        predictor = prediction.predictor_of(before, own)
        auxiliary = predictor.auxiliary
        small = prompt_flops(auxiliary.config, prompt)
        untrained = reuse.fewer_layers(model, layers_of(name))
        points += [
            Point(name, FEWER, small, after_prompts(untrained, tokens, prompt)),
            Point(name, ALONE, small, after_prompts(auxiliary, tokens, prompt)),
            Point(
                name, PREDICTED, predicted_flops(base, auxiliary.config, prompt),
                after_predictions(model, predictor, tokens, prompt, config.rows),
            ),
        ]  # fmt: skip
    return points


def augmentation_points(
    config: TrainReuseConfig, model: Model, method: Augmentation, trained: Sequence[PyTree], tokens: np.ndarray
) -> list[JsonObject]:
    """Measures cache augmentation: the losses of the tokens after points, by their distance from the point.

    Args:
      config: of the run.
      model: the decoder.
      method: of the run.
      trained: the parameters of each variant.
      tokens: [N, T] int32, held-out windows.

    Returns:
      Of each cache its name, the number of input vectors, how it was trained, the mean loss by distance, and the mean
      loss of each window.
    """
    points = method.points(tokens)
    nats = jax.jit(method.nats)
    untrained = method.initial()
    cases: list[tuple[str, int, str, PyTree]] = [(UNCHANGED, 0, "", None)]
    for number, count in enumerate(config.augmentation.latents):
        cases += [
            (f"{count} {how}", count, how, own[number]) for how, own in ((UNTRAINED, untrained), (TRAINED, trained))
        ]
    made = []
    for name, count, how, own in cases:
        found = [
            nats(
                model.params,
                own,
                jnp.asarray(tokens[at : at + config.rows]),
                jnp.asarray(points[at : at + config.rows]),
            )
            for at in range(0, len(tokens), config.rows)
        ]
        # [N, M, ahead]
        whole = np.concatenate([np.asarray(each, np.float64) for each in found])
        made.append({
            "name": name, "latents": count, "how": how, "nats_by_distance": whole.mean(axis=(0, 1)).tolist(),
            "nats_by_window": whole.mean(axis=(1, 2)).tolist(),
        })  # fmt: skip
    return made


def above(nats: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Returns the mean difference of the losses of windows from those of another cache, and half its 95 % interval."""
    differences = np.subtract(nats, base)
    spread = 1.96 * differences.std(ddof=1) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return float(differences.mean()), float(spread)
