"""KVzip: slots by the attention that they receive when the prompt is repeated (arXiv:2505.23416)."""

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
    """Ranks a slot by the largest attention of a replay of the prompt (KVzip, arXiv:2505.23416, equation 2).

    max over the replay's queries, and over the query heads of a KV head, of the softmax of the logits over the first
    slots, those of the chunk that is replayed, and the replay's own past.

    Attributes:
      replay: how the prompt is replayed, with ``by="attention"``.

    Raises:
      PolicyError: a replay by something else.
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
    `kvjax.policies.Replay`. A slot is worth the largest attention that it receives; see `ReplayedAttention`. The first
    `sinks` positions are protected. A prompt costs one more prefill, and all of its keys and values are held until it
    has been replayed.

    Args:
      budget: slots per KV head that remain of a prompt; see `snapkv`. Heads of a layer share their slots, as the
        authors' do, under ``adakv(kvzip(...), safeguard=0)``; theirs are also shared by layers.
      instruction: ids of tokens before the first chunk, such as those of "Repeat the previous context:"; () = none.
      later: the same before all other chunks; None = `instruction`.
      chunk: the number of tokens of a chunk.
      sinks: the number of first positions that are protected, and that compete with those of each chunk.
      plus: whether an attention probability is multiplied by ‖W_o v‖₂ of the slot, for the query's head, and divided
        by ‖h‖₂, h = the query's hidden state that enters the layer's projections (KVzip+, arXiv:2601.07891).
      positions: see `evict`.

    Raises:
      PolicyError: an argument that is not valid.
    """
    replay = Replay(instruction, instruction if later is None else later, chunk, sinks, plus)  # type: ignore[arg-type]
    return compress(
        importance=ReplayedAttention(replay), scope=First(sinks), budget=budget, positions=positions, name="kvzip"
    )
