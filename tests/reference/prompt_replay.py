"""The replay of a prompt, token by token: the scores of KVzip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tests.reference.base import Array, Policy, Ranking, Statistic, View
from tests.reference.layers import linear, rms_norm
from tests.reference.step import Head, rotate


class Replay(NamedTuple):
    instruction: tuple[int, ...]
    later: tuple[int, ...]
    chunk: int
    sinks: int
    plus: bool


def kvzip(
    budget: Any, instruction: tuple[int, ...] = (), later: tuple[int, ...] | None = None, chunk: int = 2048,
    sinks: int = 4, plus: bool = False, **options: Any,
) -> Policy:  # fmt: skip
    def rank(view: View) -> Ranking:
        return Ranking(np.where(view.position < sinks, np.inf, view.stats["replayed"]))

    replay = Replay(tuple(instruction), tuple(instruction if later is None else later), chunk, sinks, plus)
    statistics = {"replayed": Statistic(lambda old, block: old)}
    return Policy(budget, rank, statistics, at_prompt_end_only=True, replay=replay, **options)


def score(params: Mapping[str, Any], config: Any, prompt: Array, layers: list[list[Head]], policy: Policy) -> None:
    """Sets the statistic of every head of a row whose prompt [n] has been read and is held whole."""
    replay, length = policy.replay, len(prompt)
    for start in range(0, length, replay.chunk):
        end = min(start + replay.chunk, length)
        told = replay.instruction if start == 0 else (*replay.later, *prompt[max(start - 8, 0) : start])
        # Per layer, the keys and values [i, K, D] of the block's own past.
        past: list[tuple[list[Array], list[Array]]] = [([], []) for _ in layers]
        for i, token in enumerate((*told, *prompt[start:end])):
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
        gate = linear(h, mlp["gate"])
        x = x + linear(gate / (1.0 + np.exp(-gate)) * linear(h, mlp["up"]), mlp["down"])


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return weights / weights.sum()
