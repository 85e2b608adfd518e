"""KVzip: ranks slots by the attention that they receive when the prompt is repeated (arXiv:2505.23416)."""

import dataclasses
from collections.abc import Sequence

import jax

from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, compress, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.prompt_replay import REPLAYED, Replay
from kvjax.policies.window import First

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ReplayedAttention(Importance):
    """Ranks a slot by the largest attention from a replay of the prompt (KVzip, arXiv:2505.23416, equation 2).

    The maximum is over the replay's queries and the query heads of a KV head. The softmax is over the first slots, the
    slots of the chunk that is replayed, and the earlier tokens of the block itself.

    Attributes:
      replay: how the prompt is replayed, with ``by="attention"``.

    Raises:
      PolicyError: a replay with another ``by``.
    """

    replay: Replay = dataclasses.field(default_factory=Replay)
    needs = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.replay, Replay) or self.replay.by != "attention":
            raise PolicyError(f"replay={self.replay!r} is not valid; give Replay(by='attention').")

    def score(self, stats: Stats, view: View) -> Array:
        return stats[REPLAYED]


@factory
def kvzip(
    budget: BudgetLike,
    *,
    instruction: Sequence[int] = (),
    later: Sequence[int] | None = None,
    chunk: int = 2048,
    sinks: int = 4,
    plus: bool = False,
    positions: str = "original",
) -> Evict:
    """Keeps the slots that the model needs to repeat the prompt, whatever is asked later (KVzip, arXiv:2505.23416).

    When the prompt ends, its tokens run again, chunk by chunk, as queries over the whole prompt: see
    `kvjax.policies.Replay`. Importance is the largest attention that a slot receives; see `ReplayedAttention`.
    The first `sinks` positions are protected. The replay takes one more prefill, and all keys and values of the prompt
    are held until it ends.

    Args:
      budget: slots per KV head that remain of a prompt; see `snapkv`. The heads of all layers share their slots, as the
        authors' do, under ``adakv(kvzip(...), safeguard=0, layers=True)``.
      instruction: token ids before the first chunk, such as those of "Repeat the previous context:"; () = none.
      later: token ids before all other chunks; None = `instruction`.
      chunk: the number of tokens of a chunk.
      sinks: the number of first positions that are protected, and in the softmax of each chunk.
      plus: whether an attention probability is multiplied by ‖W_o v‖₂ of the slot, for the query's head, and divided
        by ‖h‖₂, where h is the input of the layer's projections for the query (KVzip+, arXiv:2601.07891).
      positions: see `evict`.

    Raises:
      PolicyError: an argument that is not valid.
    """
    replay = Replay(instruction, instruction if later is None else later, chunk, sinks, plus)  # type: ignore[arg-type]
    return compress(
        importance=ReplayedAttention(replay), scope=First(sinks), budget=budget, positions=positions, name="kvzip"
    )
