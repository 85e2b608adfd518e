"""The replay of a prompt: the scores of KVzip, token by token, and those of gradients, by finite differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tests.reference.base import Array, Policy, Query, Ranking, Statistic, View
from tests.reference.layers import linear, rms_norm, swish
from tests.reference.step import Head, rotate


class Replay(NamedTuple):
    instruction: tuple[int, ...]
    later: tuple[int, ...]
    chunk: int
    sinks: int
    plus: bool
    by_gradient: bool = False


def kvzip(
    budget: Any, instruction: tuple[int, ...] = (), later: tuple[int, ...] | None = None, chunk: int = 2048,
    sinks: int = 4, plus: bool = False, **options: Any,
) -> Policy:  # fmt: skip
    def rank(view: View) -> Ranking:
        return Ranking(np.where(view.position < sinks, np.inf, view.stats["replayed"]))

    replay = Replay(tuple(instruction), tuple(instruction if later is None else later), chunk, sinks, plus)
    statistics = {"replayed": Statistic(lambda old, block: old)}
    return Policy(
        budget, rank, statistics, at_prompt_end_only=True, replay=replay,
        importance=lambda view: view.stats["replayed"], **options,
    )  # fmt: skip


def kvgrad(
    budget: Any, instruction: tuple[int, ...] = (), later: tuple[int, ...] | None = None, chunk: int = 512,
    sinks: int = 4, **options: Any,
) -> Policy:  # fmt: skip
    base = kvzip(budget, instruction, later, chunk, sinks, **options)
    return replace(base, replay=base.replay._replace(by_gradient=True))


def score(params: Mapping[str, Any], config: Any, prompt: Array, layers: list[list[Head]], policy: Policy) -> None:
    """Sets the statistic of every head of a row whose prompt [n] has been read and is held whole."""
    replay, length = policy.replay, len(prompt)
    for start in range(0, length, replay.chunk):
        end = min(start + replay.chunk, length)
        lead = replay.instruction if start == 0 else (*replay.later, *prompt[max(start - 8, 0) : start])
        if replay.by_gradient:
            _add_gradient(params, config, np.array([*lead, *prompt[start:end]], int), length, layers, policy)
            continue
        # Per layer, the keys and values [i, K, D] of the block's own past.
        past: list[tuple[list[Array], list[Array]]] = [([], []) for _ in layers]
        for i, token in enumerate((*lead, *prompt[start:end])):
            _one_token(params, config, int(token), length + i, layers, past, policy, start, end)


def _one_token(
    params: Mapping[str, Any], config: Any, token: int, position: int, layers: list[list[Head]],
    past: list[tuple[list[Array], list[Array]]], policy: Policy, start: int, end: int,
) -> None:  # fmt: skip
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    at = np.array([position])
    x = params["embed"]["tokens"][token][None]
    for index, heads in enumerate(layers):
        layer = params[f"layer_{index}"]
        attention, mlp = layer["attention"], layer["mlp"]
        h = rms_norm(x, layer["attention_norm"], config.norm_eps)
        query = rotate(linear(h, attention["query"]).reshape(1, -1, dim), at, config.rope_theta)[0]
        past[index][0].append(rotate(linear(h, attention["key"]).reshape(1, -1, dim), at, config.rope_theta)[0])
        past[index][1].append(linear(h, attention["value"]).reshape(-1, dim))
        own_key, own_value = (np.stack(each) for each in past[index])
        outputs = []
        for number, head in enumerate(heads):
            own_queries = query[number * group : (number + 1) * group]
            head.queries.append(Query(position, own_queries, own_queries))
            held = head.key if policy.positions == "original" else rotate(head.key, head.position, config.rope_theta)
            among = (head.position < min(policy.replay.sinks, start)) | (start <= head.position) & (head.position < end)
            for own in range(number * group, (number + 1) * group):
                logits = np.concatenate([held, own_key[:, number]]) @ query[own] / math.sqrt(dim)
                weights = _softmax(logits)
                outputs.append(weights @ np.concatenate([head.value, own_value[:, number]]))
                compared = np.concatenate([among, np.ones(len(own_key), bool)])
                z = _softmax(logits[compared])[: among.sum()]
                if policy.replay.plus:
                    into = attention["out"]["kernel"][own * dim : (own + 1) * dim]
                    z = z * np.linalg.norm(head.value[among] @ into, axis=1) / np.linalg.norm(h)
                head.stats["replayed"][among] = np.maximum(head.stats["replayed"][among], z)
        x = x + linear(np.concatenate(outputs)[None], attention["out"])
        h = rms_norm(x, layer["mlp_norm"], config.norm_eps)
        x = x + linear(swish(linear(h, mlp["gate"])) * linear(h, mlp["up"]), mlp["down"])


STEP = 1e-4  # of a gate


def _add_gradient(
    params: Mapping[str, Any], config: Any, tokens: Array, position: int, layers: list[list[Head]], policy: Policy
) -> None:
    """Adds, to the statistic of each slot, how much the block's last hidden states change with the slot's gate."""
    for index, heads in enumerate(layers):
        for number, head in enumerate(heads):
            for slot in range(len(head.position)):
                up, down = (
                    _norms(params, config, tokens, position, layers, policy, (index, number, slot, step))
                    for step in (STEP, -STEP)
                )
                head.stats["replayed"][slot] += abs(up - down) / (2 * STEP)


def _norms(
    params: Mapping[str, Any], config: Any, tokens: Array, position: int, layers: list[list[Head]], policy: Policy,
    gate: tuple[int, int, int, float],
) -> float:  # fmt: skip
    """The sum of the norms of what leaves the last layer; gate: of layer, KV head and slot, less 1."""
    count, dim, group = len(tokens), config.head_dim, config.num_heads // config.num_kv_heads
    at, theta = position + np.arange(count), config.rope_theta
    x = params["embed"]["tokens"][tokens]
    for index, heads in enumerate(layers):
        layer = params[f"layer_{index}"]
        attention, mlp = layer["attention"], layer["mlp"]
        h = rms_norm(x, layer["attention_norm"], config.norm_eps)
        query = rotate(linear(h, attention["query"]).reshape(count, -1, dim), at, theta)
        key = rotate(linear(h, attention["key"]).reshape(count, -1, dim), at, theta)
        value = linear(h, attention["value"]).reshape(count, -1, dim)
        outputs = []
        for number, head in enumerate(heads):
            held = head.key if policy.positions == "original" else rotate(head.key, head.position, theta)
            gates = np.ones(len(held) + count)
            if gate[:2] == (index, number):
                gates[gate[2]] += gate[3]
            mask = np.where(np.tri(count, dtype=bool), 0.0, -np.inf)
            for own in range(number * group, (number + 1) * group):
                logits = np.hstack([query[:, own] @ held.T, query[:, own] @ key[:, number].T]) / math.sqrt(dim)
                weights = np.exp(logits + np.hstack([np.zeros((count, len(held))), mask]))
                weights /= weights.sum(axis=1, keepdims=True)
                outputs.append((weights * gates) @ np.concatenate([head.value, value[:, number]]))
        x = x + linear(np.concatenate(outputs, axis=1), attention["out"])
        h = rms_norm(x, layer["mlp_norm"], config.norm_eps)
        x = x + linear(swish(linear(h, mlp["gate"])) * linear(h, mlp["up"]), mlp["down"])
    return float(np.linalg.norm(x, axis=1).sum())


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return weights / weights.sum()
