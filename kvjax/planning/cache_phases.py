"""Where the slots of a growing text lie: on the device, on the host, or nowhere, so that they are computed again.

ALISA (arXiv:2403.17312, section V) goes through three phases: at first all slots are on the device; then the oldest of
them are on the host; at last the oldest are deleted, and computed again in each step that reads them. `CachePhases`
finds the split of least time for each length, and from which length on each phase holds. All seconds are planned.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from kvjax.arguments import check_type, number_argument
from kvjax.errors import InputError
from kvjax.inputs import LARGEST_COUNT, check_count
from kvjax.planning.served_model import ServedModel

DEVICE, HOST, RECOMPUTED = 1, 2, 3  # the phases


class Split(NamedTuple):
    """The tokens of a row by where their keys and values are.

    Attributes:
      device: the newest tokens.
      host: tokens before these.
      recomputed: the oldest tokens.
      seconds: of a step of all rows.
    """

    device: int
    host: int
    recomputed: int
    seconds: float

    @property
    def phase(self) -> int:
        """`DEVICE`, `HOST` or `RECOMPUTED`: the last place that is used."""
        return RECOMPUTED if self.recomputed else HOST if self.host else DEVICE


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePhases:
    """The costs of a step of rows of n tokens, of which the device holds the newest that fit.

    A step reads weights and slots from the device's memory, moves the slots of the host over the link, and computes the
    keys and values of deleted tokens. These are the oldest, so that it computes them as a prompt of their own. Layers
    run one after the other: room for the slots of a layer that arrive or are computed is not counted.

    Attributes:
      model: the model.
      device_bytes: for the slots of all rows.
      host_bytes: for the slots of all rows.
      bandwidth: bytes/s of the device's memory.
      link: bytes/s from the host to the device.
      compute: FLOP/s of the device.
      rows: of the batch.
      read_share: of the slots on the host, the share that a step reads: 1 = all; less under a selection, such as
        ALISA's sparse window attention.
      overlap: whether the link moves slots while the device reads and computes.

    Raises:
      InputError: a number out of range, or a model whose storage is in host memory: a split says which slots are there.
    """

    model: ServedModel
    device_bytes: float
    host_bytes: float
    bandwidth: float
    link: float
    compute: float
    rows: int = 1
    read_share: float = 1.0
    overlap: bool = False

    def __post_init__(self) -> None:
        check_type("model", self.model, ServedModel, "a ServedModel, such as ServedModel.of(model.config)")
        self.model.check_on_device("phases")
        check_count("rows", self.rows)
        for name, minimum in (("device_bytes", 0), ("host_bytes", 0), ("bandwidth", 1), ("link", 1), ("compute", 1)):
            number_argument(name, getattr(self, name), minimum=minimum, maximum=math.inf, error=InputError)
        number_argument("read_share", self.read_share, minimum=0, maximum=1, error=InputError)

    @property
    def slot(self) -> int:
        """Bytes of a token of all rows, in all layers."""
        return self.rows * self.model.token_bytes

    def seconds(self, tokens: int, host: int, recomputed: int) -> float:
        """Returns the seconds of a step with a split: reading, moving and computing again."""
        read = (self.model.weight_bytes + self.slot * tokens) / self.bandwidth
        moved = self.read_share * self.slot * host / self.link
        again = self.rows * self.model.prefill_flops(recomputed) / self.compute
        return max(read + again, moved) if self.overlap else read + moved + again

    def split(self, tokens: int) -> Split:
        """Returns the split of least time, with the fewest tokens that are computed again.

        The seconds are a convex function of this number: those of the link fall evenly, and those of a prompt rise ever
        faster.

        Args:
          tokens: of the text, n.

        Raises:
          InputError: `tokens` is no whole number of at least 1.
        """
        check_count("tokens", tokens)
        device = tokens if self.device_bytes == math.inf else min(tokens, int(self.device_bytes // self.slot))
        rest = tokens - device
        held = rest if self.host_bytes == math.inf else min(rest, int(self.host_bytes // self.slot))

        def seconds(recomputed: int) -> float:
            return self.seconds(tokens, rest - recomputed, recomputed)

        best = _first(lambda again: seconds(again + 1) >= seconds(again), rest - held, rest)
        return Split(device, rest - best, best, seconds(best))

    def boundaries(self, longest: int = LARGEST_COUNT) -> tuple[int | None, int | None]:
        """Returns the least lengths at which slots are on the host, or beyond, and at which tokens are computed again.

        As a text grows, the split never takes tokens back from a later phase. Where computing again is faster than the
        link from the first token on, both lengths are the same, and the second phase is left out.

        Args:
          longest: the length of text beyond which neither is searched; None stands for one that is not reached.

        Raises:
          InputError: `longest` is no whole number of at least 1.
        """
        check_count("longest", longest)

        def begins(phase: int) -> int:
            return _first(lambda tokens: self.split(tokens).phase >= phase, 1, longest + 1)

        first, second = begins(HOST), begins(RECOMPUTED)
        return (first if first <= longest else None, second if second <= longest else None)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the least number from `low` on that holds, where all larger ones do; `high` if no smaller one does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
