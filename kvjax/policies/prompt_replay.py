"""A replay: runs a prompt's tokens once more when it ends, to score its slots (KVzip, arXiv:2505.23416)."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import choice_argument, count_argument
from kvjax.errors import PolicyError

REPLAYED = "replayed"  # name of the statistic of slots that a replay fills, [B, K, S] float32
SCORES = ("attention", "gradient")  # values of `Replay.by`
OVERLAP = 8  # tokens before a chunk that are repeated with it, in every chunk but the first


@dataclasses.dataclass(frozen=True)
class Replay:
    """How a prompt is replayed, chunk by chunk, after it ends and before a compressor evicts.

    Each chunk of a prompt of n tokens is replayed as a block of tokens at positions n, n + 1, ...: an instruction, then
    the chunk's own tokens. In later chunks, the `OVERLAP` tokens before the chunk stand between the two. A block
    attends to the whole prompt and to itself, causally. It is not kept.

    Attributes:
      instruction: ids of the tokens before the first chunk.
      later: ids of the tokens before the other chunks.
      chunk: the number of tokens of a chunk.
      sinks: the number of first slots that are in the softmax of each chunk; see `ReplayedAttention`.
      by: ``attention`` scores a slot by the attention that it receives; ``gradient`` by the gradient of the last
        layer's outputs, see `kvjax.policies.ReplayedGradient`.
      output_norm: whether a probability is multiplied by the norm of the slot's projected value, and divided by the
        norm of the query's hidden state (KVzip+, arXiv:2601.07891).

    Raises:
      PolicyError: an attribute that is not valid.
    """

    instruction: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    chunk: int = 2048
    sinks: int = 4
    output_norm: bool = False
    by: str = "attention"

    def __post_init__(self) -> None:
        for field in ("instruction", "later"):
            object.__setattr__(self, field, _ids(field, getattr(self, field)))
        object.__setattr__(self, "chunk", count_argument("chunk", self.chunk, minimum=1))
        object.__setattr__(self, "sinks", count_argument("sinks", self.sinks))
        choice_argument("by", self.by, SCORES)
        if not isinstance(self.output_norm, bool):
            raise PolicyError(f"plus={self.output_norm!r} is not valid; give True or False.")

    def width(self, prompt: int) -> int:
        """Returns the number of tokens of the longest block for prompts of up to `prompt` tokens."""
        chunk = min(self.chunk, prompt)
        first = len(self.instruction) + chunk
        return first if prompt <= self.chunk else max(first, len(self.later) + OVERLAP + chunk)

    def added(self, chunks: jax.Array | int) -> jax.Array | int:
        """Returns the number of tokens of the first blocks that are not tokens of their chunks.

        Args:
          chunks: the number of blocks, int32 [...] or an int.
        """
        xp = np if isinstance(chunks, int) else jnp
        later = xp.maximum(chunks - 1, 0)
        # The k-th of these repeats min(OVERLAP, k · chunk) tokens.
        short = xp.minimum(later, (OVERLAP - 1) // self.chunk)
        overlaps = self.chunk * (short * (short + 1) // 2) + OVERLAP * (later - short)
        found = len(self.instruction) * xp.minimum(chunks, 1) + len(self.later) * later + overlaps
        return int(found) if isinstance(chunks, int) else found

    def highest(self) -> int:
        """Returns the largest token id of the instructions; -1 if there are none."""
        return max((*self.instruction, *self.later), default=-1)


def _ids(name: str, given: object) -> tuple[int, ...]:
    """Returns token ids as a tuple.

    Raises:
      PolicyError: `given` is not a sequence of token ids.
    """
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
        raise PolicyError(
            f"{name}={given!r} is not a sequence of token ids; encode the text with the model's tokenizer."
        )
    ids = np.asarray(given)
    if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0):
        raise PolicyError(f"{name}={given!r} is not valid; give a sequence of whole numbers of at least 0.")
    return tuple(int(each) for each in ids)
