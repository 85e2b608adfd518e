"""The number and a hash of the tokens that a calibration was made from."""

import hashlib
from typing import NamedTuple

import numpy as np

HASH_DIGITS = 16  # of the hash of tokens


class CalibrationText(NamedTuple):
    """The tokens that a calibration was made from, or last trained on.

    Attributes:
      tokens: the number of tokens, without padding.
      hash: the first 16 digits of a SHA-256 hash of the token ids, row by row; the same however rows are padded.
    """

    tokens: int
    hash: str

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens with the hash {self.hash}"

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray) -> "CalibrationText":
        """Returns the number and the hash of tokens [B, T] int, rows of `lengths` [B] padded at the end."""
        found = hashlib.sha256()
        for row, length in zip(tokens, lengths.tolist(), strict=True):
            found.update(length.to_bytes(8, "little"))
            found.update(np.ascontiguousarray(row[:length], "<i4").tobytes())
        return cls(int(lengths.sum()), found.hexdigest()[:HASH_DIGITS])
