"""Tiny random LLaMA-style models: float32 numpy params and a configuration."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference.decoder import ReferenceConfig


def random_model(
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    vocab: int = 64,
    seed: int = 0,
    *,
    tied: bool = True,
) -> tuple[dict[str, Any], ReferenceConfig]:
    """Params and configuration; kv_heads == heads is MHA, 1 is MQA, a divisor between is GQA.

    Norm scales are spread over [0.5, 1.5], so that a norm left out or applied twice shows.
    Queries and keys are large enough for attention scores to spread by about 1.5: near-uniform
    attention would make every policy's choice a tie.
    """
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    rng = np.random.default_rng(seed)
    hidden = heads * head_dim
    config = ReferenceConfig(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 4,
        vocab_size=vocab,
    )

    def weight(out: int, into: int, gain: float = 1.0) -> dict[str, np.ndarray]:
        return {"kernel": (rng.standard_normal((out, into)) * gain / into**0.5).astype(np.float32).T}

    def norm() -> dict[str, np.ndarray]:
        return {"scale": rng.uniform(0.5, 1.5, hidden).astype(np.float32)}

    params: dict[str, Any] = {
        "embed": {"tokens": (0.5 * rng.standard_normal((vocab, hidden))).astype(np.float32)},
        "final_norm": norm(),
    }
    if not tied:
        params["head"] = weight(vocab, hidden, gain=2.0)
    for index in range(layers):
        params[f"layer_{index}"] = {
            "attention_norm": norm(),
            "attention": {
                "query": weight(hidden, hidden, gain=1.2),
                "key": weight(kv_heads * head_dim, hidden, gain=1.2),
                "value": weight(kv_heads * head_dim, hidden),
                "out": weight(hidden, hidden),
            },
            "mlp_norm": norm(),
            "mlp": {
                "gate": weight(config.intermediate_size, hidden),
                "up": weight(config.intermediate_size, hidden),
                "down": weight(hidden, config.intermediate_size),
            },
        }
    return params, config
