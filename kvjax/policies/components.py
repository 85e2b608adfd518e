"""Components of eviction policies: importances, scopes and merges."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.arguments import Restorable, check_hashable
from kvjax.errors import PolicyError
from kvjax.numerics.rope import Rope
from kvjax.numerics.statistics import Statistic
from kvjax.policies.parameters import Parameters, Parts
from kvjax.policies.prompt_replay import Replay
from kvjax.policies.row_memory import RowMemory
from kvjax.policies.written import Written

Array = jax.Array
Stats = Mapping[str, Array]  # statistic name -> [B, K, S, ...]

READABLE = frozenset({"key", "value"})  # what ranking may read in addition to statistics and positions


class KeyFrame(NamedTuple):
    """How the keys of a view are rotated.

    Attributes:
      rotated: whether they are rotated to their positions in the text.
      rope: the model's rotary embedding; None = it has none, and keys are the same in both frames.
      frequencies: of the rows, see `Rope.frequencies`.
    """

    rotated: bool = True
    rope: Rope | None = None
    frequencies: Array | None = None


class View(NamedTuple):
    """The arguments of a policy that ranks the slots of one group of heads of one layer.

    Attributes:
      position: [B, K, S] int32 absolute token position, -1 = empty.
      key: [B, K, S, D] as stored (rotated, unless ``positions="cache"``) and decoded.
      value: [B, K, S, D] decoded.
      newest: [B] int32 position of each row's newest token; -1 for a row without a token in this block.
      budget: [B] int32 slots per KV head that each row may keep; [B, K] where all layers share their slots.
      prompt: [B] int32 tokens of each row's prompt.
      layer: index of the layer, a number or [] int32.
      decoding: whether the prompt is over.
      heads: the model's indices of these KV heads, a tuple or [K] int32; None = all, in order.
      frame: how `key` is rotated; None where slots are divided over devices, and in kernels.
      memory: name of a `RowMemory` -> its arrays [B, K, ...].
      scale: factor of the logits.
      soft_cap: the soft cap of the logits, see `kvjax.attention.problem`; None = no cap.
      window: the layer's sliding window; None = queries see all slots.
      most_left: the largest number of slots per head that a compressor keeps of a prompt; None = not known.
      num_layers: the number of layers of the model.
      params: the arrays of the policy's `Parameters` for these KV heads, name -> part -> [K or 1, ...].
      priority: [B, K, S] float32, by which slots were evicted, larger stays and +inf is protected; None unless a merge
        has `ranks`.
      turn: [B] int32 position of the first token of a further turn, at whose end slots are evicted as at a prompt's
        end; None = the prompt.
    """

    position: Array
    key: Array
    value: Array
    newest: Array
    budget: Array
    prompt: Array
    layer: Array | int
    decoding: bool
    heads: tuple[int, ...] | Array | None = None
    frame: KeyFrame | None = None
    memory: Mapping[str, Mapping[str, Array]] = MappingProxyType({})
    scale: float = 1.0
    soft_cap: float | None = None
    window: int | None = None
    most_left: int | None = None
    num_layers: int = 1
    params: Mapping[str, Parts] = MappingProxyType({})
    priority: Array | None = None
    turn: Array | None = None

    @property
    def live(self) -> Array:
        """[B, K, S] bool: whether a slot holds a token."""
        return self.position >= 0

    def recent(self, count: Array | int) -> Array:
        """Marks the `count` ([B] or a number) newest positions of each row, [B, K, S] bool.

        A compressor may have evicted some of them; no older token is marked instead.
        """
        return self.position > (self.newest - count)[:, None, None]

    def rotated(self) -> Array:
        """Returns the keys rotated to their positions in the text, [B, K, S, D]."""
        frame = self._frame()
        if frame.rotated or frame.rope is None or frame.frequencies is None:
            return self.key
        return frame.rope.rotate(self.key, self.position, frame.frequencies)

    def unrotated(self) -> Array:
        """Returns the keys before rotation, [B, K, S, D]; float32 if they are stored rotated."""
        frame = self._frame()
        if not frame.rotated or frame.rope is None or frame.frequencies is None:
            return self.key
        return frame.rope.unrotate(self.key, self.position, frame.frequencies)

    def _frame(self) -> KeyFrame:
        if self.frame is None:
            raise PolicyError(
                "keys can be rotated only where a device has all slots of a head, outside of kernels, and where no "
                "contexts share positions."
            )
        return self.frame

    @property
    def at_prompt_end(self) -> Array:
        """[B] bool: whether this step was the last of the row's prompt."""
        return (self.newest == self.prompt - 1) & (self.newest >= 0)


class _OfParts:
    """A descriptor of an attribute that is collected from the components in `made_of`, unless the class sets it.

    A property would not allow a frozen dataclass to have a field of the same name.

    Args:
      first: whether the value is that of the first component that has one; otherwise it is a tuple of all values.
    """

    def __init__(self, *, first: bool = False) -> None:
        self._first = first

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, component: Any, owner: type | None = None) -> Any:
        found = [] if component is None else [getattr(part, self._name, None) for part in component.made_of]
        if self._first:
            return next(filter(None, found), None)
        return tuple(dict.fromkeys(each for own in found for each in own or ()))


class Importance:
    """The importance of each slot.

    Write a frozen dataclass that inherits from this class, with the parameters as its fields, or call
    ``Importance(needs={"mass"}, score=function)``.

    Attributes:
      needs: the statistics that `score` reads, by name or as `Statistic`.
      score: (stats, view) -> [B, K, S] float32; slots of larger scores stay.
      amount: whether the scores, or `amounts`, can be multiplied; False = they only order the slots.
      signed: whether scores can be negative.
      shared_by_heads: whether the score compares slots across heads, which must then all hold the same positions.
      of_budget: whether the score chooses slots for a part of the budget.
      by_age: whether the score is the position, so that the oldest is evicted first.
      by_position: whether the score depends on positions alone, so that all heads hold the same.
      reads: which of "key" and "value" `score` reads from the view.
      memory: the memories that `score` reads: of queries, `kvjax.policies.row_memory.RowMemory`, and of earlier rounds
        of evictions, `kvjax.policies.round_memory.RoundMemory`.
      replay: how the prompt is replayed before `score` reads ``stats["replayed"]``; None = no replay.
      params: the parameters that `score` reads, as `kvjax.policies.parameters.Parameters`.
      writes: the scores that `score` reads of each token, as `kvjax.policies.written.Written`.
      made_of: the importances, scopes and policies that it uses; it also reads their memory, parameters, scores and
        replay.
    """

    score: Callable[[Stats, View], Array]

    if TYPE_CHECKING:  # attributes of some classes, and properties of others

        @property
        def needs(self) -> frozenset[str | Statistic]: ...
        @property
        def amount(self) -> bool: ...
        @property
        def signed(self) -> bool: ...
        @property
        def shared_by_heads(self) -> bool: ...
        @property
        def of_budget(self) -> bool: ...
        @property
        def by_age(self) -> bool: ...
        @property
        def by_position(self) -> bool: ...
        @property
        def reads(self) -> frozenset[str]: ...
        @property
        def memory(self) -> tuple[RowMemory, ...]: ...
        @property
        def replay(self) -> Replay | None: ...
        @property
        def params(self) -> tuple[Parameters, ...]: ...
        @property
        def writes(self) -> tuple[Written, ...]: ...
        @property
        def made_of(self) -> tuple[Any, ...]: ...
    else:
        amount, signed, shared_by_heads, of_budget, by_age, by_position = True, False, False, False, False, False
        reads, made_of = frozenset(), ()
        memory, params, writes, replay = _OfParts(), _OfParts(), _OfParts(), _OfParts(first=True)

    def __new__(cls, *args: Any, **kwargs: Any) -> "Importance":
        return super().__new__(ImportanceFunction if cls is Importance else cls)

    def amounts(self, stats: Stats, view: View) -> Array:
        """Returns the scores as amounts that others multiply, [B, K, S] float32.

        Override this method if `score` orders amounts so small that float32 would round them to 0.
        """
        return self.score(stats, view)


@dataclasses.dataclass(frozen=True)
class ImportanceFunction(Importance):
    """An importance made of a function; ``Importance(needs=..., score=...)`` returns one."""

    needs: frozenset[str | Statistic]
    score: Any = None
    amount: bool = True
    signed: bool = False
    shared_by_heads: bool = False
    reads: frozenset[str] = READABLE

    def __post_init__(self) -> None:
        _check_functions("Importance", self)


class Scope(Restorable):
    """The slots that may not be evicted, whatever their importance.

    Write a frozen dataclass that inherits from this class, or call
    ``Scope(needs=..., protected=function, count=function)``. ``one | other`` protects what either of them protects; see
    `kvjax.policies.Union`.

    Attributes:
      needs: the statistics that `protected` reads, by name or as `Statistic`.
      protected: (stats, view) -> [B, K, S] bool.
      count: budget in slots -> the number of protected slots.
      reads: which of "key" and "value" `protected` reads from the view.
      memory: see `Importance`.
      params: see `Importance`.
      writes: see `Importance`.
      made_of: see `Importance`.
    """

    protected: Callable[[Stats, View], Array]
    count: Callable[[int], int]

    if TYPE_CHECKING:  # attributes of some classes, and properties of others

        @property
        def needs(self) -> frozenset[str | Statistic]: ...
        @property
        def reads(self) -> frozenset[str]: ...
        @property
        def memory(self) -> tuple[RowMemory, ...]: ...
        @property
        def params(self) -> tuple[Parameters, ...]: ...
        @property
        def writes(self) -> tuple[Written, ...]: ...
        @property
        def made_of(self) -> tuple[Any, ...]: ...
    else:
        reads, made_of = frozenset(), ()
        memory, params, writes = _OfParts(), _OfParts(), _OfParts()

    def __new__(cls, *args: Any, **kwargs: Any) -> "Scope":
        return super().__new__(ScopeFunction if cls is Scope else cls)

    def __or__(self, other: "Scope") -> "Scope":
        from kvjax.policies.union import protect_any  # a scope made of scopes

        return protect_any(self, other) if isinstance(other, Scope) else NotImplemented

    def newest(self, budget: int) -> int:
        """Returns how many of the newest positions are always protected under a budget in slots."""
        return 0

    def traced(self) -> "Scope":
        """Returns the scope without the numbers of any budget in it; see `Evict.traced`."""
        return self

    def mapped(self, change: "Callable[[Scope], Scope]") -> "Scope":
        """Returns the scope after a change of every scope that it is made of, or of itself if it is not made of any."""
        return change(self)


@dataclasses.dataclass(frozen=True)
class ScopeFunction(Scope):
    """A scope made of functions; ``Scope(needs=..., protected=..., count=...)`` returns one."""

    needs: frozenset[str | Statistic]
    protected: Any = None
    count: Any = None
    reads: frozenset[str] = READABLE

    def __post_init__(self) -> None:
        _check_functions("Scope", self)


class Folded(NamedTuple):
    """A layer after a merge.

    Attributes:
      key: [B, K, S, D] as stored.
      value: [B, K, S, D].
      stats: the statistics [B, K, S, ...], including those in `Merge.remembers`.
    """

    key: Array
    value: Array
    stats: dict[str, Array]


class Merge:
    """Folds evicted pairs into pairs that stay; see `kvjax.policies.merge`. Frozen dataclasses inherit from this class.

    Attributes:
      needs: the statistics that `fold` reads.
      remembers: names of the merge's own statistics, [B, K, S] float32, 0 in empty slots.
      over_devices: whether `fold` runs where slots are divided over devices. Its arrays then have the slots of one
        device, those tokens that every device knows (the step's own, and those that leave a residual) and the victims
        of all devices. What it reduces over the slots that stay must be reduced over devices too, by the functions of
        `kvjax.parallel.slot_reductions` or `kvjax.policies.nearest`, and must not change if the tokens that every
        device knows are counted once for each device, which a maximum does not and a sum does.
      folds: whether `fold` is called; False = evicted pairs are dropped, and only `log_weight` is used.
      ranks: whether `fold` reads `View.priority`.
      params: the parameters that `fold` reads from the view, as `kvjax.policies.parameters.Parameters`.
    """

    needs: frozenset[str | Statistic] = frozenset()
    remembers: tuple[str, ...] = ()
    over_devices: bool = False
    folds: bool = True
    ranks: bool = False

    @property
    def params(self) -> tuple[Parameters, ...]:
        return ()

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        """Folds the victims into the slots that stay.

        Args:
          key: [B, K, S, D] as stored.
          value: [B, K, S, D] as stored.
          victim: [B, K, S] bool.
          stats: the statistics of the step, [B, K, S, ...].
          view: the slots of the step; use `key` and `value` instead of those in the view.
          tokens: the largest number of victims of a head.
        """
        raise NotImplementedError

    def log_weight(self, stats: Stats) -> Array | None:
        """Returns what is added to a slot's logits: the log of the number of tokens that it stands for.

        [B, K, S] float32; None = 0 for every slot.
        """
        return None

    def afterwards(self) -> "Merge | None":
        """Returns the merge that decoding needs after a compressor with this merge; None if it needs none."""
        return None


@dataclasses.dataclass(frozen=True)
class Unprotected(Scope):
    """Protects no slot: every slot is open."""

    needs = frozenset()

    def protected(self, stats: Stats, view: View) -> Array:
        return jnp.zeros(view.position.shape, bool)

    def count(self, budget: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Keep(Importance):
    """Gives every slot an infinite importance, so that none is evicted."""

    needs = frozenset()
    amount = False

    def score(self, stats: Stats, view: View) -> Array:
        return jnp.full(view.position.shape, jnp.inf)


keep = Keep()
unprotected = Unprotected()

#: What a component must have.
FUNCTIONS: Mapping[type, tuple[str, ...]] = {Importance: ("score",), Scope: ("protected", "count"), Merge: ("fold",)}


def check_declared(what: str, component: Any) -> None:
    """Checks what an importance, scope or merge is, without calling its functions.

    Raises:
      PolicyError: a function is missing, `needs` is not a set, `reads` is not one of "key" and "value", or it cannot be
        hashed. The message begins with `what`.
    """
    try:
        needs, reads = component.needs, getattr(component, "reads", READABLE)
    except Exception as error:
        raise PolicyError(f"{what}: its needs or reads raised {type(error).__name__}: {error}.") from error
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise PolicyError(f"{what}: needs={needs!r} is not a set of statistics; give one such as {{'mass'}}.")
    if isinstance(reads, str) or not isinstance(reads, Iterable) or not READABLE.issuperset(reads):
        raise PolicyError(f"{what}: reads={reads!r} is not valid; give a set of 'key' and 'value', such as {{'key'}}.")
    kind = Importance if isinstance(component, Importance) else Scope if isinstance(component, Scope) else Merge
    for name in FUNCTIONS[kind]:
        if not callable(given := getattr(component, name, None)):
            raise PolicyError(
                f"{what}: {name}={given!r} must be a function of {type(component).__name__}; see "
                f"kvjax.policies.{kind.__name__}."
            )
    check_hashable(what, component)


def _check_functions(what: str, made: object) -> None:
    for field in ("needs", "reads"):
        given = getattr(made, field)
        if isinstance(given, Iterable) and not isinstance(given, str):
            object.__setattr__(made, field, frozenset(given))
    check_declared(what, made)
