"""The parts of a decoder's layer in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.reference.base import Array


def linear(x: Array, layer: Mapping[str, Array]) -> Array:
    """x [n, in] through a kernel stored [in, out]."""
    return x @ layer["kernel"] + layer.get("bias", 0.0)


def rms_norm(x: Array, norm: Mapping[str, Array], eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * norm["scale"]


def swish(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))
