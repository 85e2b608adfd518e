"""KVgrad: ranks slots by the gradient of the hidden states of a replay of the prompt."""

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
class ReplayedGradient(Importance):
    """Ranks a slot by the gradient of the replay's hidden states with respect to a gate on its attention.

    A gate g multiplies the attention probabilities of the slot, for all queries of the replay and all query heads of
    the KV head. Importance is the sum over chunks of |∂ Σ_i ‖h_i‖₂ / ∂g| at g = 1, where h_i is the output of the last
    layer for token i of the chunk's block, before the final norm. This is the first-order change of the norms if the
    slot adds nothing, and includes the changes in all later layers, unlike an attention probability. The gate is after
    the softmax: before it, a slot that receives all of the attention would have no gradient.

    Attributes:
      replay: how the prompt is replayed, with ``by="gradient"``.

    Raises:
      PolicyError: a replay with another ``by``.
    """

    replay: Replay = dataclasses.field(default_factory=lambda: Replay(by="gradient"))
    needs = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.replay, Replay) or self.replay.by != "gradient":
            raise PolicyError(f"replay={self.replay!r} is not valid; give Replay(by='gradient').")

    def score(self, stats: Stats, view: View) -> Array:
        return stats[REPLAYED]


@factory
def kvgrad(
    budget: BudgetLike,
    *,
    instruction: Sequence[int] = (),
    later: Sequence[int] | None = None,
    chunk: int = 512,
    sinks: int = 4,
    positions: str = "original",
) -> Evict:
    """Keeps the slots whose attention changes the hidden states of a replay of the prompt most.

    The prompt is replayed as by `kvzip`. The importance of a slot is the gradient of the norms of the replay's last
    hidden states with respect to a gate of the slot; see `ReplayedGradient`. The loss and the gates are kvjax's own
    definition. The first `sinks` positions are protected. The replay takes one more forward and one backward pass, and
    holds the activations of a chunk in all layers at once.

    Args:
      budget: slots per KV head that remain of a prompt; see `kvzip`.
      instruction: see `kvzip`.
      later: see `kvzip`.
      chunk: the number of tokens of a chunk.
      sinks: the number of first positions that are protected.
      positions: see `evict`.

    Raises:
      PolicyError: an argument that is not valid.
    """
    texts = instruction, instruction if later is None else later
    replay = Replay(*texts, chunk, sinks=0, by="gradient")  # type: ignore[arg-type]
    return compress(
        importance=ReplayedGradient(replay), scope=First(sinks), budget=budget, positions=positions, name="kvgrad"
    )
