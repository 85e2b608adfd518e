"""Tables of counts by which codes of keys and values are entropy-coded, one for each channel of each head."""

import dataclasses
import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.errors import CheckpointError, InputError
from kvjax.generation.context import Context
from kvjax.transport import cachegen, vectors
from kvjax.transport.entropy import Symbols, count

SIDES = ("key", "value")


class Pair(NamedTuple):
    """The tables of the heads of a layer and side.

    Attributes:
      anchors: [K, D, 255] counts of anchors; without differences, None.
      differences: [K, D, 2 * limit + 1] counts of the other vectors, which are differences if there are anchors.
    """

    anchors: np.ndarray | None
    differences: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Tables of a model, from caches of some texts; both ends of a transfer need them.

    Attributes:
      level: see `kvjax.transport.encode`.
      delta: see `kvjax.transport.encode`.
      layers: the tables of keys and values of each layer.
    """

    level: int
    delta: bool
    layers: tuple[tuple[Pair, Pair], ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of the counts."""
        found = hashlib.sha256(f"{self.level} {self.delta}".encode())
        for _, array in self._arrays():
            found.update(np.ascontiguousarray(array, "<i8").tobytes())
        return found.hexdigest()

    def save(self, path: str | Path) -> None:
        """Writes the tables to a file, ``.npz``."""
        arrays: dict[str, Any] = {"level": self.level, "delta": self.delta, **dict(self._arrays())}
        np.savez_compressed(Path(path), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Tables":
        """Reads tables that `save` has written.

        Raises:
          CheckpointError: the file is missing or damaged.
        """
        try:
            with np.load(Path(path)) as arrays:
                layers: list[tuple[Pair, Pair]] = []
                while f"{len(layers)}_key_differences" in arrays:
                    key, value = (
                        Pair(arrays.get(f"{name}_anchors"), arrays[f"{name}_differences"])
                        for name in (f"{len(layers)}_{side}" for side in SIDES)
                    )
                    layers.append((key, value))
                return cls(int(arrays["level"]), bool(arrays["delta"]), tuple(layers))
        except (OSError, EOFError, AttributeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} has no tables: {type(error).__name__}: {error}.") from None

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for layer, pairs in enumerate(self.layers):
            for side, pair in zip(SIDES, pairs, strict=True):
                if pair.anchors is not None:
                    yield f"{layer}_{side}_anchors", pair.anchors
                yield f"{layer}_{side}_differences", pair.differences


def make_tables(
    contexts: Sequence[Context], *, level: int = 2, delta: bool = True, chunk: int = cachegen.CHUNK
) -> Tables:
    """Counts the codes of contexts.

    Args:
      contexts: of one model, whose keys and values are held as they are.
      level: see `kvjax.transport.encode`.
      delta: see `kvjax.transport.encode`.
      chunk: see `kvjax.transport.encode`.

    Raises:
      InputError: see `kvjax.transport.encode`; or there is no context.
    """
    if not contexts:
        raise InputError("tables are made of at least one context.")
    found: list[tuple[Pair, Pair]] = []
    for number, context in enumerate(contexts):
        read = vectors.read(context)
        both = cachegen.limits(len(read.layers), level)
        for layer, groups in enumerate(read.layers):
            pairs = []
            for side in range(2):
                limit = both[side][layer]
                made = empty_pair(read.num_heads, read.dim, limit, delta)
                for group in groups:
                    for row in group.rows:
                        for head, own in zip(group.heads, row, strict=True):
                            x = own.sides[side]
                            codes = cachegen.encode_vectors(x, limit, delta=delta, chunk=chunk).codes
                            add_counts(made, head, codes, limit, chunk)
                pairs.append(made)
            if number == 0:
                found.append((pairs[0], pairs[1]))
            else:
                # Each symbol was counted once more than it occurs.
                key, value = found[layer]
                found[layer] = _sum(key, pairs[0]), _sum(value, pairs[1])
    return Tables(level, delta, tuple(found))


def empty_pair(heads: int, dim: int, limit: int, delta: bool) -> Pair:
    """Returns tables in which each symbol was counted once."""
    anchors = np.ones((heads, dim, 2 * cachegen.ANCHOR_LIMIT + 1), np.int64) if delta else None
    return Pair(anchors, np.ones((heads, dim, 2 * limit + 1), np.int64))


def add_counts(pair: Pair, head: int, codes: np.ndarray, limit: int, chunk: int) -> None:
    """Adds the codes [n, D] of a head to its tables."""
    anchors, others = split(codes, limit, pair.anchors is not None, chunk)
    if pair.anchors is not None:
        pair.anchors[head] += count(anchors) - 1
    pair.differences[head] += count(others) - 1


def split(codes: np.ndarray, limit: int, delta: bool, chunk: int) -> tuple[Symbols, Symbols]:
    """Returns the codes [n, D] of anchors, and of the other vectors."""
    first = cachegen.anchors(len(codes), chunk) if delta else np.zeros(len(codes), bool)
    return Symbols(codes[first], cachegen.ANCHOR_LIMIT), Symbols(codes[~first], limit)


def _sum(one: Pair, two: Pair) -> Pair:
    anchors = None if one.anchors is None or two.anchors is None else one.anchors + two.anchors - 1
    return Pair(anchors, one.differences + two.differences - 1)
