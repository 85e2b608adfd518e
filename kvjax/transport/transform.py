"""The transform of KVTC (arXiv:2511.01815): principal components of keys and values, and the bits of each.

The keys, before rotation, and the values of all heads of a layer are one vector each. Their principal components,
scales and tables of counts are those of calibration texts, so that nothing but codes is sent.
"""

import dataclasses
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.arguments import number_argument, plain_signature
from kvjax.errors import CheckpointError, InputError
from kvjax.generation.context import Context
from kvjax.transport import vectors

SIDES = ("key", "value")
#: Bits of a component: none, or as many as its codes -limit..limit take before entropy coding.
BITS = (0, 2, 3, 4, 5, 6, 8)
#: Steps of a quantiser, in standard deviations divided by the largest code; the best of them is taken.
REACHES = (1.5, 2.0, 2.5, 3.0, 4.0)
WIDTH = 16  # bits of a number, which a ratio is relative to


@dataclasses.dataclass(frozen=True, eq=False)
class Component:
    """The principal components of the keys, or of the values, of a layer.

    Attributes:
      mean: [C] float32 with C = K · D.
      basis: [C, C] float32, a component in each column, of falling variance.
      bits: [C] int64, members of `BITS`.
      step: [C] float32, the step of each component's codes.
      counts: [C, 255] int64, how often each code -127..127 occurs, and once more where it is possible.
    """

    mean: np.ndarray
    basis: np.ndarray
    bits: np.ndarray
    step: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Transform:
    """The transforms of a model at one ratio; both ends of a transfer need them.

    Attributes:
      ratio: the ratio that bits were chosen for, relative to 16 bits a number and before entropy coding.
      layers: of the keys and of the values of each layer.
    """

    ratio: float
    layers: tuple[tuple[Component, Component], ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of all arrays."""
        found = hashlib.sha256(repr(self.ratio).encode())
        for array in self._arrays().values():
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def save(self, path: str | Path) -> None:
        """Writes the transform to a file, ``.npz``."""
        arrays: dict[str, Any] = {"ratio": np.float64(self.ratio), **self._arrays()}
        np.savez_compressed(Path(path), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Transform":
        """Reads a transform that `save` has written.

        Raises:
          CheckpointError: the file is missing or damaged.
        """
        names = [field.name for field in dataclasses.fields(Component)]
        try:
            with np.load(Path(path)) as arrays:
                layers: list[tuple[Component, Component]] = []
                while f"{len(layers)}_key_mean" in arrays:
                    key, value = (
                        Component(**{name: arrays[f"{len(layers)}_{side}_{name}"] for name in names}) for side in SIDES
                    )
                    layers.append((key, value))
                return cls(float(arrays["ratio"]), tuple(layers))
        except (OSError, EOFError, AttributeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} has no transform: {type(error).__name__}: {error}.") from None

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            f"{layer}_{side}_{field.name}": getattr(own, field.name)
            for layer, pair in enumerate(self.layers)
            for side, own in zip(SIDES, pair, strict=True)
            for field in dataclasses.fields(Component)
        }


@plain_signature
def fit_transform(contexts: Sequence[Context], *, ratio: float = 20.0) -> Transform:
    """Computes principal components from contexts, and divides bits over all components by dynamic programming.

    The bits are those of the least squared error of the calibration's keys and values, each relative to the variance of
    its layer, summed over layers.

    Args:
      contexts: of one model, whose keys and values are held as they are and whose heads hold the same positions.
      ratio: 16 bits divided by the mean bits of a number, before entropy coding; from 2 to 1000.

    Raises:
      InputError: there is no context, its heads hold different positions, its keys are in codes, or a ratio that is not
        valid.
    """
    number_argument("ratio", ratio, minimum=2, maximum=1000, error=InputError)
    if not contexts:
        raise InputError("a transform is computed from at least one context.")
    texts = [vectors.by_token(context) for context in contexts]
    made, errors = [], []
    for layer in range(len(texts[0])):
        for side in range(2):
            # [N, C]
            x = np.concatenate([row.sides[side] for text in texts for row in text[layer]]).astype(np.float64)
            mean = x.mean(axis=0)
            _, basis = np.linalg.eigh(np.cov(x, rowvar=False, bias=True) if len(x) > 1 else np.eye(x.shape[1]))
            basis = basis[:, ::-1]
            y = (x - mean) @ basis
            best, steps = _quantisers(y)
            made.append((mean, basis, y, steps))
            # Relative to the layer's own variance: of absolute errors, a few layers with large keys take most bits, and
            # SmolLM2 at a ratio of 12 loses 5 % of perplexity instead of 0.3 %.
            errors.append(best / max(float(best[:, 0].sum()), np.finfo(np.float64).tiny))
    chosen = divide_bits(np.concatenate(errors), ratio)
    layers: list[Component] = []
    for (mean, basis, y, steps), own in zip(made, np.split(chosen, len(made)), strict=True):
        step = steps[np.arange(len(own)), own]
        bits = np.array(BITS)[own]
        codes = quantised(y, step, limits_of(bits))
        counts = np.stack([np.bincount(column + 127, minlength=255) for column in codes.T.astype(np.int64)])
        possible = np.abs(np.arange(-127, 128)) <= limits_of(bits)[:, None]
        layers.append(Component(
            mean.astype(np.float32), basis.astype(np.float32), bits, step.astype(np.float32), counts + possible
        ))  # fmt: skip
    return Transform(float(ratio), tuple(zip(layers[::2], layers[1::2], strict=True)))


def limits_of(bits: np.ndarray) -> np.ndarray:
    """Returns the largest codes of components: 0 without bits."""
    return np.where(bits > 0, 2 ** (np.maximum(bits, 1) - 1) - 1, 0)


def quantised(y: np.ndarray, step: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Returns the codes [n, C] int8 of components [n, C]."""
    return np.clip(np.rint(y / np.maximum(step, np.finfo(np.float32).tiny)), -limit, limit).astype(np.int8)


def _quantisers(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean squared error of components [N, C] at each of `BITS`, and the steps, [C, BITS] each."""
    deviation = y.std(axis=0)
    errors, steps = [np.mean(y**2, axis=0)], [np.ones_like(deviation)]
    for bits in BITS[1:]:
        limit = limits_of(np.array(bits))
        tried = []
        for reach in REACHES:
            step = np.maximum(deviation * reach / limit, 1e-12)
            tried.append((np.mean((np.clip(np.rint(y / step), -limit, limit) * step - y) ** 2, axis=0), step))
        # [REACHES, C]
        error, step = (np.stack(each) for each in zip(*tried, strict=True))
        best = error.argmin(axis=0)
        errors.append(np.take_along_axis(error, best[None], axis=0)[0])
        steps.append(np.take_along_axis(step, best[None], axis=0)[0])
    return np.stack(errors, axis=1), np.stack(steps, axis=1)


def divide_bits(errors: np.ndarray, ratio: float) -> np.ndarray:
    """Chooses the bits of components so that the sum of errors is the least.

    Args:
      errors: [N, BITS] float64, of each component at each number of bits.
      ratio: see `fit_transform`; of all components together.

    Returns:
      [N] int64, indices of `BITS`.
    """
    budget = int(WIDTH * len(errors) / ratio)
    least = np.zeros(budget + 1)
    chosen = np.zeros((len(errors), budget + 1), np.int8)
    for number, own in enumerate(errors):
        # [BITS, budget + 1]: infinite where there are too few bits
        options = np.full((len(BITS), budget + 1), np.inf)
        for place, bits in enumerate(BITS):
            if bits <= budget:
                options[place, bits:] = least[: budget + 1 - bits] + own[place]
        chosen[number] = options.argmin(axis=0)
        least = options.min(axis=0)
    found, left = np.zeros(len(errors), np.int64), budget
    for number in reversed(range(len(errors))):
        found[number] = chosen[number, left]
        left -= BITS[found[number]]
    return found
