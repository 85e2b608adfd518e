"""When drafts pay: the length of a text from which rounds of drafts are faster than plain decoding."""

import dataclasses
import itertools
import math

from kvjax.arguments import check_type, number_argument, plain_signature
from kvjax.cache.spec import CacheSpec
from kvjax.devices import Device, known_numbers
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_count
from kvjax.policies import full
from kvjax.policies.base import Policy
from kvjax.speculation.rules import mean_tokens_per_round

Lines = tuple[tuple[float, float], ...]  # the seconds of resources: without slots, and per slot
LONGEST = 1 << 30  # tokens; a draft that does not pay then never does


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCosts:
    """The costs of a round of γ drafts, which the full cache of a text of n tokens verifies.

    A step takes as long as the slowest of its bytes from the device's memory, its bytes over the link from host
    memory, and its FLOPs. The step that verifies reads what a plain step reads, and computes γ + 1 times as much. With
    speeds of 1 byte/s, and no FLOPs, seconds are bytes.

    Attributes:
      gamma: γ, the number of drafts of a round.
      weights: bytes of weights that a step of the target reads.
      draft_weights: the same of a draft.
      slot_bytes: bytes of keys and values of a token, in all layers and rows.
      budget: slots of a head that a draft reads.
      draft_slot_bytes: bytes of such a slot, in all layers and rows; None = `slot_bytes`.
      on_host: whether the target's cache is in host memory; a draft's part is on the device.
      flops: FLOPs of a step of the target, without attention.
      draft_flops: the same of a draft.
      slot_flops: FLOPs of attention of a step of the target per slot, in all layers and rows.
      draft_slot_flops: the same of a draft; None = `slot_flops`.
      bandwidth: bytes/s between the device and its memory.
      link: bytes/s from host memory to the device; read only with `on_host`.
      compute: FLOP/s of the device; None = FLOPs take no time.
    """

    gamma: int
    weights: int
    draft_weights: int
    slot_bytes: int
    budget: int
    draft_slot_bytes: int | None = None
    on_host: bool = False
    flops: float = 0.0
    draft_flops: float = 0.0
    slot_flops: float = 0.0
    draft_slot_flops: float | None = None
    bandwidth: float = 1.0
    link: float = 1.0
    compute: float | None = None

    def _step_lines(self, tokens: int) -> Lines:
        """Returns the seconds of each resource in a step of the target, as lines in the number of slots."""
        device, link = (0, self.slot_bytes) if self.on_host else (self.slot_bytes, 0)
        compute = self.compute or math.inf
        return (
            (self.weights / self.bandwidth, device / self.bandwidth),
            (0.0, link / self.link),
            (tokens * self.flops / compute, tokens * self.slot_flops / compute),
        )

    def _draft_lines(self) -> Lines:
        """Returns the same of a step that drafts."""
        slot_bytes = self.slot_bytes if self.draft_slot_bytes is None else self.draft_slot_bytes
        slot_flops = self.slot_flops if self.draft_slot_flops is None else self.draft_slot_flops
        compute = self.compute or math.inf
        return (
            (self.draft_weights / self.bandwidth, slot_bytes / self.bandwidth),
            (self.draft_flops / compute, slot_flops / compute),
        )

    def step(self, length: int, tokens: int = 1) -> float:
        """Returns the least seconds of a step of the target that reads `tokens` tokens, after `length` tokens."""
        return _slowest(self._step_lines(tokens), length)

    def draft_step(self, length: int) -> float:
        """Returns the least seconds of a step that drafts one token, after `length` tokens."""
        return _slowest(self._draft_lines(), min(self.budget, length))

    def speed_up(self, length: int, alpha: float) -> float:
        """Returns the speed of rounds divided by that of plain steps, after `length` tokens.

        Args:
          length: n.
          alpha: the chance that a draft is accepted, independent of others.
        """
        plain, verify = self.step(length), self.step(length, self.gamma + 1)
        return mean_tokens_per_round(alpha, self.gamma) * plain / (self.gamma * self.draft_step(length) + verify)

    def break_even(self, alpha: float) -> int | None:
        """Returns the least length from which rounds are faster than plain steps; None if there is none.

        Between lengths where another resource becomes the slowest of a step, and beside the budget, the speed-up is the
        ratio of two lines, which only rises or only falls: it is searched between the first two such lengths of which
        the second one has a speed-up above 1.

        Args:
          alpha: see `speed_up`.
        """
        marks = {1, min(self.budget, LONGEST), LONGEST}
        for lines in (self._step_lines(1), self._step_lines(self.gamma + 1), self._draft_lines()):
            for (start, slope), (other, other_slope) in itertools.combinations(lines, 2):
                if slope != other_slope and 1 <= (crossing := (other - start) / (slope - other_slope)) < LONGEST:
                    marks |= {math.floor(crossing), math.floor(crossing) + 1}
        low = 0
        for high in sorted(marks):
            if self.speed_up(high, alpha) > 1:
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (low, middle) if self.speed_up(middle, alpha) > 1 else (middle, high)
                return high
            low = high
        return None


def _slowest(lines: Lines, slots: int) -> float:
    return max(start + slope * slots for start, slope in lines)


@dataclasses.dataclass(frozen=True)
class SpeculationPlan:
    """The result of `plan_speculation`.

    Attributes:
      costs: of a round.
      alpha: the chance that a draft is accepted.
      length: the length of the text that `speed_up` is for.
      tokens_per_round: mean.
      speed_up: at `length`; at most, since nothing but bytes and FLOPs is counted.
      break_even: the least length from which rounds are faster; None if there is none.
      device: that the speeds are of.
    """

    costs: DraftCosts
    alpha: float
    length: int
    tokens_per_round: float
    speed_up: float
    break_even: int | None
    device: str

    def __str__(self) -> str:
        costs = self.costs
        pays = "at no length" if self.break_even is None else f"from {self.break_even:,} tokens on"
        if self.break_even is not None and costs.speed_up(LONGEST, self.alpha) <= 1:
            # Attention to many slots computes for longer than it reads.
            pays = f"from {self.break_even:,} tokens, up to some longer length"
        where = ", the cache in host memory" if costs.on_host else ""
        why = ""
        if self.break_even is None:
            round_, plain = costs.step(LONGEST, costs.gamma + 1), costs.step(LONGEST)
            computes = round_ > plain and costs.compute
            why = (
                f": a block of {costs.gamma + 1} tokens takes {round_ / plain:.3g} times as long as a step, since "
                "FLOPs take its time, and not bytes"
                if computes
                else ": too few drafts are accepted for what they read"
            )
        return (
            f"Drafts of γ={costs.gamma} tokens from {costs.budget:,} slots, each accepted with probability "
            f"{self.alpha:g}, make {self.tokens_per_round:.3g} tokens per round and pay {pays}{why}. After "
            f"{self.length:,} tokens they are {self.speed_up:.3g} times as fast ({self.device}{where})."
        )


@plain_signature
def plan_speculation(
    config: DecoderConfig,
    *,
    budget: int,
    device: Device,
    alpha: float,
    length: int,
    gamma: int = 4,
    batch: int = 1,
    draft_config: DecoderConfig | None = None,
    draft_policy: Policy | CacheSpec | None = None,
    on_host: bool = False,
    dtype_bytes: int = 2,
) -> SpeculationPlan:
    """Computes from which length on drafts pay on a device, by the bytes and FLOPs that steps move and compute.

    With the same weights, a draft still reads all weights, so that it pays only where the cache is much larger than
    these, or where it lies in host memory and the draft's part on the device.

    Args:
      config: the decoder.
      budget: slots of a head that a draft reads.
      device: from `kvjax.devices`.
      alpha: the chance that a draft is accepted; `kvjax.analysis.acceptance` and `kvjax.speculation.Drafts` measure it.
      length: the length of the text that the speed-up is computed for.
      gamma: the number of drafts of a round.
      batch: the number of rows, which share the weights.
      draft_config: of another model that drafts; None = the model itself.
      draft_policy: of a draft's cache, whose storage says how it is held; None = exactly.
      on_host: whether the cache of the model is in host memory.
      dtype_bytes: bytes of a number of weights, and of keys and values that are exact.

    Raises:
      InputError: a number out of range, or a device of unknown speed.
    """
    check_type("config", config, DecoderConfig, "a DecoderConfig, such as model.config")
    for name, value in (("budget", budget), ("length", length), ("gamma", gamma), ("batch", batch)):
        check_count(name, value)
    alpha = number_argument("alpha", alpha, minimum=0, maximum=1)
    bandwidth, *_ = known_numbers(device, "bandwidth", *(["link"] if on_host else []))
    other = draft_config or config
    spec = draft_policy if isinstance(draft_policy, CacheSpec) else CacheSpec(draft_policy or full())
    dtype = {2: "bfloat16", 4: "float32"}.get(dtype_bytes)
    if dtype is None:
        raise InputError(f"dtype_bytes={dtype_bytes!r} is not valid; use 2 or 4.")

    def slot(own: DecoderConfig, storage_of: CacheSpec) -> int:
        held = storage_of.storage.bytes_per_slot(own.head_dim, dtype)
        return batch * own.num_layers * own.num_kv_heads * held

    weights, draft_weights = (_read_weights(each) for each in (config, other))
    costs = DraftCosts(
        gamma=gamma, weights=weights * dtype_bytes, draft_weights=draft_weights * dtype_bytes,
        slot_bytes=slot(config, CacheSpec(full())), budget=budget, draft_slot_bytes=slot(other, spec), on_host=on_host,
        flops=2.0 * batch * weights, draft_flops=2.0 * batch * draft_weights, slot_flops=batch * _slot_flops(config),
        draft_slot_flops=batch * _slot_flops(other), bandwidth=bandwidth, link=device.link or 1.0,
        compute=device.flops,
    )  # fmt: skip
    return SpeculationPlan(
        costs, alpha, length, mean_tokens_per_round(alpha, gamma), costs.speed_up(length, alpha),
        costs.break_even(alpha), device.kind,
    )  # fmt: skip


def _read_weights(config: DecoderConfig) -> int:
    """Returns the number of weights that a step reads; of tables of embeddings it looks up single rows."""
    tables = 0 if config.tie_embeddings else config.vocab_size * config.embed_size
    if config.learned_positions:
        tables += config.max_positions * config.hidden_size
    return parameter_count(config) - tables


def _slot_flops(config: DecoderConfig) -> float:
    """Returns the FLOPs of a token's attention to a slot in all layers: products with its key and its value."""
    return 4.0 * config.num_layers * config.num_heads * config.head_dim
