"""A LLaMA-style decoder in float64 NumPy, one row at a time, over the reference cache step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.reference import prompt_replay
from tests.reference.base import Array, Policy
from tests.reference.eviction import full
from tests.reference.layers import linear, rms_norm, swish
from tests.reference.step import Head, empty_heads, evict, step


@dataclass(frozen=True)
class ReferenceConfig:
    """The part of a configuration that the reference reads; any object with these attributes will do."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0


@dataclass
class ReferenceRun:
    """The result of `reference_run`.

    Attributes:
        logprobs: [B, T-1] float64; entry t is log p(token t+1); 0 from a row's end on.
        kept: per layer, [B][K] ascending live positions after the row's last token.
        stats: per layer, [B][K] dicts of the live slots' statistics, aligned with `kept`.
        evict_gap: [L, B, K] smallest relative gap of any choice of slots (inf: none was close).
        above_gap: [L, B, K] smallest |m - uniform share| that entered the `above` statistic.
    """

    logprobs: Array
    kept: list[list[list[Array]]]
    stats: list[list[list[dict[str, Array]]]]
    evict_gap: Array
    above_gap: Array


def reference_run(
    params: Mapping[str, Any],
    config: Any,
    tokens: Array,
    policy: Policy,
    prompt_length: int | Array,
    lengths: Array | None = None,
    prefill_block: int | None = None,
) -> ReferenceRun:
    """Teacher forcing of tokens [B, T] while the cache evolves as in generation.

    Row r is tokens[r, :lengths[r]]; its prompt is its first min(prompt_length, lengths[r]) tokens,
    stepped at once or in blocks of `prefill_block` from position 0; the rest is stepped singly.
    """
    tokens = np.asarray(tokens)
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths is None else np.asarray(lengths)
    prompts = np.minimum(np.broadcast_to(prompt_length, batch), lengths)
    params = _to_float64(params)
    logprobs = np.zeros((batch, width - 1))
    rows: list[list[list[Head]]] = []  # [B][L][K]
    for row in range(batch):
        real = tokens[row, : lengths[row]]
        scores, layers = _run_row(params, config, real, policy, int(prompts[row]), prefill_block)
        logprobs[row, : len(scores)] = scores
        rows.append(layers)
    by_layer = [[rows[row][layer] for row in range(batch)] for layer in range(config.num_layers)]
    return ReferenceRun(
        logprobs=logprobs,
        kept=[[[head.position for head in heads] for heads in layer] for layer in by_layer],
        stats=[[[head.stats for head in heads] for heads in layer] for layer in by_layer],
        evict_gap=np.array([[[h.evict_gap for h in heads] for heads in la] for la in by_layer]),
        above_gap=np.array([[[h.above_gap for h in heads] for heads in la] for la in by_layer]),
    )


def _run_row(
    params: Mapping[str, Any],
    config: Any,
    tokens: Array,
    policy: Policy,
    prompt_length: int,
    prefill_block: int | None,
) -> tuple[Array, list[list[Head]]]:
    """One row of T real tokens: log-probabilities [T-1] and the heads of every layer."""
    layers = [empty_heads(config.num_kv_heads, config.head_dim, policy) for _ in range(config.num_layers)]
    count = config.num_layers
    budgets = [policy.slots(layer, prompt_length, count) for layer in range(count)]
    unlimited: list[int | None] = [None] * count
    scores = []
    for start, stop in _blocks(prompt_length, len(tokens), prefill_block):
        if start == prompt_length and policy.at_prompt_end_only:
            policy = policy.then or full(positions=policy.positions)
            budgets = [policy.slots(layer, prompt_length, count) for layer in range(count)]
            for head in itertools.chain(*layers):
                # The weights of slots belong to them, whoever decodes.
                held = {*policy.statistics, "log_weight"}
                head.stats = {name: stat for name, stat in head.stats.items() if name in held}
        may_evict = stop == prompt_length or not policy.at_prompt_end_only
        limits = budgets if may_evict and policy.replay is None else unlimited
        logits = _forward(params, config, tokens[start:stop], start, layers, policy, limits, prompt_length)
        following = tokens[start + 1 : stop + 1]
        scores.append(_log_softmax(logits)[np.arange(len(following)), following])
        if stop == prompt_length and policy.replay is not None:
            prompt_replay.score(params, config, tokens[:stop], layers, policy)
            ranked = [list(itertools.chain(*layers))] if policy.over_layers else layers
            for heads, budget in zip(ranked, budgets, strict=not policy.over_layers):
                evict(heads, policy, budget, prompt_length, config.rope_theta)
                for head in heads:
                    del head.queries[prompt_length:]  # those of the replay
    return np.concatenate([*scores, np.zeros(0)]), layers


def _blocks(prompt: int, total: int, block: int | None) -> Iterator[tuple[int, int]]:
    """(start, stop) of every step: the prompt at once or in blocks, then single tokens."""
    for start in range(0, prompt, block or max(prompt, 1)):
        yield start, min(start + (block or prompt), prompt)
    for start in range(prompt, total):
        yield start, start + 1


def _forward(
    params: Mapping[str, Any],
    config: Any,
    tokens: Array,
    start: int,
    layers: list[list[Head]],
    policy: Policy,
    budgets: list[int | None],
    prompt_length: int,
) -> Array:
    """Steps a block of n tokens through all layers: logits [n, V]."""
    count, head_dim = len(tokens), config.head_dim
    position = np.arange(start, start + count)
    x = params["embed"]["tokens"][tokens]  # [n, hidden]
    for index, heads in enumerate(layers):
        layer = params[f"layer_{index}"]
        attention, mlp = layer["attention"], layer["mlp"]
        h = rms_norm(x, layer["attention_norm"], config.norm_eps)
        output = step(
            heads,
            linear(h, attention["query"]).reshape(count, config.num_heads, head_dim),
            linear(h, attention["key"]).reshape(count, config.num_kv_heads, head_dim),
            linear(h, attention["value"]).reshape(count, config.num_kv_heads, head_dim),
            position,
            policy=policy,
            budget=budgets[index],
            prompt_length=prompt_length,
            theta=config.rope_theta,
            layer=index,
            hidden=h,
            out=attention["out"]["kernel"],
        )
        x = x + linear(output.reshape(count, -1), attention["out"])
        h = rms_norm(x, layer["mlp_norm"], config.norm_eps)
        x = x + linear(swish(linear(h, mlp["gate"])) * linear(h, mlp["up"]), mlp["down"])
    x = rms_norm(x, params["final_norm"], config.norm_eps)
    head = params["head"]["kernel"] if "head" in params else params["embed"]["tokens"].T  # tied
    return x @ head


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _to_float64(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _to_float64(leaf) for name, leaf in tree.items()}
    return np.asarray(tree, np.float64)
