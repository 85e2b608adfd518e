"""Checks what a user's own policy, storage and selection compute against what they declare, from shapes alone.

`jax.eval_shape` runs the Python of each of them once, on the host, before anything is traced for a program. Equal ones
are checked once, so that layers that are alike, and further batches, cost nothing.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import CodecError, KvjaxError, PolicyError, SelectionError, StorageError
from kvjax.numerics.rope import Rope
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict, View
from kvjax.policies.components import READABLE, Folded, KeyFrame
from kvjax.policies.parameters import ModelSizes, Parts
from kvjax.policies.parameters import empty as empty_parameters
from kvjax.policies.row_memory import RowMemory
from kvjax.policies.written import Token, Written
from kvjax.selection.base import Held, Selection, SelectView
from kvjax.specs.user_files import described_error
from kvjax.storage.base import Storage
from kvjax.storage.codec import Codec
from kvjax.storage.side import PROMPT, PromptView
from kvjax.typing import PyTree

Array = jax.Array
Stats = dict[str, Array]

ROWS, TOKENS = 2, 64  # shape of the arrays that check a policy
QUERIES = 2  # query heads of a KV head
HIDDEN = 16  # features of the residual stream
FLOAT, BOOL = jnp.dtype("float32"), jnp.dtype("bool")


class _Declared(dict[str, Any]):
    """The statistics that a policy declares; another one is an error that says so."""

    def __init__(self, about: str, arrays: dict[str, PyTree]):
        super().__init__(arrays)
        self._about = about

    def __missing__(self, name: str) -> PyTree:
        known = ", ".join(sorted(self)) or "none"
        raise PolicyError(
            f"{self._about} reads statistic {name!r}, which it does not declare; it declares {known}. Add it to "
            "`needs`, as a name of kvjax.numerics.statistics.NAMED or a Statistic."
        )

    def get(self, name: str, default: object = None) -> PyTree:
        return self[name]


def _view(
    about: str,
    reads: frozenset[str],
    position: Array,
    key: PyTree,
    value: PyTree,
    row: Array,
    decoding: bool,
    memory: tuple[RowMemory, ...] = (),
    params: Mapping[str, Parts] = MappingProxyType({}),
) -> View:
    """Makes a view whose keys and values may be read only by a policy that declares so."""

    # A class, so that what `_replace` returns is one too.
    class Checked(View):
        def __getattribute__(self, name: str) -> Any:
            if name in READABLE and name not in reads:
                raise PolicyError(f"{about} reads view.{name}, which it does not declare; add {name!r} to `reads`.")
            return super().__getattribute__(name)

    key, value = (x if name in reads else None for name, x in (("key", key), ("value", value)))
    batch, heads, _ = position.shape
    dim = 1 if key is None and value is None else (value if key is None else key).shape[-1]
    held = {each.name: each.empty((batch, heads, QUERIES), dim) for each in memory}
    frame = KeyFrame()
    if params:
        rope = Rope(max(dim - dim % 2, 2))
        frame = KeyFrame(True, rope, rope.frequencies(row))
    return Checked(position, key, value, row, row, row, row[0], decoding, None, frame, held, params=params)


def check_names(name: str, statistics: frozenset[Statistic], remembers: tuple[str, ...] = ()) -> None:
    """Checks that no two statistics of a cache have one name.

    Raises:
      PolicyError: two have.
    """
    known: dict[str, Any] = dict.fromkeys(remembers, "what it remembers")
    for each in sorted(statistics, key=repr):
        if known.setdefault(each.name, each) != each:
            raise PolicyError(f"policy {name}: {each!r} and {known[each.name]!r} have one name; rename one of them.")


@functools.lru_cache(maxsize=1024)
def check_policy(policy: Evict, decoding: bool, heads: int, slots: int, dim: int, dtype: str, layers: int = 1) -> None:
    """Checks an eviction policy.

    Args:
      policy: without the numbers of its budget.
      decoding: whether it is the policy of the decoding phase, and not that of the prompt.
      heads: the number of KV heads.
      slots: the number of slots per head.
      dim: features of a head.
      dtype: of keys and values.
      layers: the number of layers of the model.

    Raises:
      PolicyError: its importance, scope or merge reads what it does not declare, raises an error, or returns something
        else than an array of the right shape and dtype.
    """
    about = f"policy {policy.name}: its"
    shape = (ROWS, heads, slots)
    check_names(policy.name, policy.needs, policy.remembers)
    arrays = {s.name: jax.eval_shape(functools.partial(s.empty, shape)) for s in policy.needs}
    own = {name: jax.ShapeDtypeStruct(shape, FLOAT) for name in policy.remembers}
    row, position = jax.ShapeDtypeStruct((ROWS,), jnp.int32), jax.ShapeDtypeStruct(shape, jnp.int32)
    vectors = jax.ShapeDtypeStruct((*shape, dim), dtype)

    def seen(
        part: str, reads: frozenset[str], stats: Stats, position: Array, key: Array, value: Array, row: Array
    ) -> tuple[dict[str, Any], View]:
        said = f"{about} {part}"
        view = _view(said, frozenset(reads), position, key, value, row, decoding, policy.memory, params())
        return _Declared(said, stats), view._replace(num_layers=layers)

    sizes = ModelSizes(heads, QUERIES, dim, HIDDEN, dim - dim % 2)

    def params() -> dict[str, Parts]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty_parameters(policy.params, sizes))

    def score(*given: PyTree) -> PyTree:
        found = policy.importance.score(*seen("importance", policy.importance.reads, *given))
        return _checked(f"{about} importance.score", found, shape, FLOAT, PolicyError)

    def protected(*given: PyTree) -> PyTree:
        found = policy.scope.protected(*seen("scope", policy.scope.reads, *given))
        return _checked(f"{about} scope.protected", found, shape, BOOL, PolicyError)

    def fold(*given: PyTree) -> PyTree:
        merge = policy.merge
        assert merge is not None
        stats, view = seen("merge", READABLE, *given)
        if merge.ranks:
            view = view._replace(priority=jnp.zeros(shape, FLOAT))
        folded = merge.fold(view.key, view.value, view.live, stats, view, 1)
        if not isinstance(folded, Folded):
            raise PolicyError(
                f"{about} merge.fold returned {_described(folded)}; expected a kvjax.policies.Folded of key, value and "
                "stats."
            )
        for name in ("key", "value"):
            _checked(f"{about} merge.fold: `{name}`", getattr(folded, name), vectors.shape, dtype, PolicyError)
        if not isinstance(folded.stats, Mapping) or folded.stats.keys() != stats.keys():
            raise PolicyError(
                f"{about} merge.fold: `stats` is {_names(folded.stats)}; expected the statistics that it was given: "
                f"{_names(stats)}."
            )
        for name, given_stat in stats.items():
            _checked(f"{about} merge.fold: `stats[{name!r}]`", folded.stats[name], given_stat.shape, given_stat.dtype,
                     PolicyError)  # fmt: skip
        return folded.key

    def remembered(*given: PyTree) -> PyTree:
        stats, view = seen("memory", policy.reads, *given)
        for each in policy.rounds:
            expected, kind = (shape, FLOAT) if each.per_slot else (shape[:2], jnp.dtype("int32"))
            _checked(
                f"{about} {type(each).__name__}.after", each.after(stats, view, view.live), expected, kind, PolicyError
            )
        return view.position

    def written(score: Written, key: Array, query: Array, hidden: Array, kernel: Array, row: Array) -> PyTree:
        at = jnp.broadcast_to(row[:, None], hidden.shape[:2])
        found = score.write(Token(hidden, query, key, key, query, at, kernel if score.projects else None), params())
        return _checked(f"{about} {score.name}.write", found, (ROWS, heads, TOKENS), FLOAT, PolicyError)

    new = (ROWS, heads, TOKENS, dim), (ROWS, heads, QUERIES, TOKENS, dim), (ROWS, TOKENS, HIDDEN)
    tokens = [jax.ShapeDtypeStruct(each, dtype) for each in (*new, (heads, QUERIES, dim, HIDDEN))]
    for each in policy.writes:
        _evaluated(f"{about} {each.name}.write", functools.partial(written, each), (*tokens, row), PolicyError)
    arguments = (arrays | own, position, vectors, vectors, row)
    if policy.rounds:
        _evaluated(f"{about} memory", remembered, arguments, PolicyError)
    for part, function in (("importance.score", score), ("scope.protected", protected), ("merge.fold", fold)):
        if part != "merge.fold" or (policy.merge is not None and _is_own(policy.merge)):
            _evaluated(f"{about} {part}", function, arguments, PolicyError)


@functools.lru_cache(maxsize=1024)
def reads_prompt_length(policy: Evict, heads: int, slots: int, dim: int, dtype: str) -> bool:
    """Returns whether what a policy evicts before a prompt has ended may depend on the length of the prompt.

    Args:
      policy: evicts in each step.
      heads: see `check_policy`.
      slots: see `check_policy`.
      dim: see `check_policy`.
      dtype: see `check_policy`.
    """
    read = False

    class Watched(View):
        def __getattribute__(self, name: str) -> Any:
            nonlocal read
            read = read or name == "prompt"
            return super().__getattribute__(name)

    def run(stats: Stats, position: Array, key: Array, value: Array, row: Array) -> PyTree:
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty_parameters(policy.params, sizes))
        view = Watched(*_view(policy.name, READABLE, position, key, value, row, False, (), params))
        made = [policy.priority(stats, view), policy.limit(stats, view)]
        if policy.merge is not None:
            ranked = view._replace(priority=made[0]) if policy.merge.ranks else view
            made.append(policy.merge.fold(key, value, view.live, stats, ranked, 1).key)
        return made

    shape, sizes = (ROWS, heads, slots), ModelSizes(heads, QUERIES, dim, HIDDEN, dim - dim % 2)
    if policy.memory or any(each.tail is not None for each in policy.needs):
        return True
    stats = {each.name: jax.eval_shape(functools.partial(each.empty, shape)) for each in policy.needs}
    stats |= {name: jax.ShapeDtypeStruct(shape, FLOAT) for name in policy.remembers}
    vectors, row = jax.ShapeDtypeStruct((*shape, dim), dtype), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    jax.eval_shape(run, stats, jax.ShapeDtypeStruct(shape, jnp.int32), vectors, vectors, row)
    return read


@functools.lru_cache(maxsize=1024)
def check_storage(storage: Storage, heads: int, queries: int, dim: int, dtype: str) -> None:
    """Checks the codecs of a storage that are a user's own.

    Args:
      storage: of one layer and head.
      heads: the number of KV heads.
      queries: query heads of each.
      dim: features of a head.
      dtype: of keys and values.

    Raises:
      CodecError: `parts`, `encode` or `decode` raises an error, or they do not fit each other.
    """
    for side, codec in storage.codecs.items():
        if _is_own(codec) and codec.dims is None and not codec.of_pairs if isinstance(codec, Codec) else _is_own(codec):
            block = storage.resolved_layout.block_size
            sizes = (dim,) if block is None or isinstance(codec, Codec) else (block, dim)
            shape = (ROWS, heads, 3, *sizes)
            _check_codec(f"storage {storage.name}: its {side} codec's", codec, shape, sizes, queries, dtype)
    for nested in storage.resolved_layout.nested:
        check_storage(nested, heads, queries, dim, dtype)


def _check_codec(
    about: str, codec: Any, shape: tuple[int, ...], sizes: tuple[int, ...], query_heads: int, dtype: str
) -> None:
    lead = shape[: len(shape) - len(sizes)]
    parts = _shapes(f"{about} parts", codec.parts, (*sizes, jnp.dtype(dtype)), lead)
    side = None
    if codec.side is not None:
        leading = (ROWS, lead[1]) if codec.side.leading == 2 else (lead[1],)
        side = _shapes(f"{about} side.parts", codec.side.parts, (sizes[-1], jnp.dtype(dtype)), leading)
        if codec.side.when == PROMPT:
            vectors, row = (*lead[:2], TOKENS, sizes[-1]), (ROWS, TOKENS)
            queries = (*lead[:2], query_heads, TOKENS, sizes[-1])
            given: PyTree = [jax.ShapeDtypeStruct(each, FLOAT) for each in (vectors, queries, vectors, vectors)]
            given += [jax.ShapeDtypeStruct(row, jnp.int32), jax.ShapeDtypeStruct(vectors[:3], BOOL)]

            def prepare(view: PyTree) -> PyTree:
                try:
                    return codec.side.prepared(view, sizes[-1], jnp.dtype(dtype))
                except StorageError as error:
                    raise CodecError(f"{about} {error}") from None

            _evaluated(f"{about} side.prepare", prepare, (PromptView(*given),), CodecError)

    def aligned(side: PyTree) -> PyTree:
        return None if side is None or codec.side is None else codec.side.aligned(side, len(shape))

    def encode(x: Array, side: PyTree) -> PyTree:
        made = codec.encode(x, aligned(side), jnp.dtype(dtype))
        if not isinstance(made, Mapping) or made.keys() != parts.keys():
            raise CodecError(f"{about} encode returned {_names(made)}; expected the names of `parts`: {_names(parts)}.")
        for name, part in parts.items():
            _checked(f"{about} encode: {name!r}", made[name], part.shape, part.dtype, CodecError)
        return dict(made)

    def decode(parts: PyTree, side: PyTree) -> PyTree:
        return _checked(f"{about} decode", codec.decode(parts, aligned(side), *sizes), shape, FLOAT, CodecError)

    _evaluated(f"{about} encode", encode, (jax.ShapeDtypeStruct(shape, FLOAT), side), CodecError)
    _evaluated(f"{about} decode", decode, (parts, side), CodecError)


def _shapes(
    what: str, function: Callable[..., PyTree], arguments: tuple[PyTree, ...], lead: tuple[int, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays that a function says there are, after leading dimensions."""
    given = _called(what, function, arguments, CodecError)
    try:
        found = {
            name: jax.ShapeDtypeStruct((*lead, *map(operator.index, own)), jnp.dtype(kind))
            for name, (own, kind) in dict(given).items()
        }
    except (TypeError, ValueError) as error:
        raise CodecError(
            f"{what} returned {given!r}; expected a dict of name -> (shape, dtype), such as "
            "{'codes': ((64,), 'uint8')}."
        ) from error
    return found


@functools.lru_cache(maxsize=1024)
def check_selection(selection: Selection, heads: int, queries: int, slots: int, dim: int, dtype: str) -> None:
    """Checks a selection that is a user's own.

    Args:
      selection: bound to the model.
      heads: the number of KV heads.
      queries: query heads of each.
      slots: the number of slots per head.
      dim: features of a head.
      dtype: of keys and queries.

    Raises:
      SelectionError: a method raises an error, or returns something else than what `kvjax.selection.Selection` says.
    """
    if not _is_own(selection) or selection.reads_all or selection.whole_text:
        return
    about, shape = f"selection {selection.name}: its", (ROWS, heads, slots)
    width = _called(f"{about} width", selection.width, (slots,), SelectionError)
    if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
        raise SelectionError(
            f"{about} width returned {_described(width)}; expected a whole number of slots of at least 1, or None."
        )
    units = (*shape[:2], -(-slots // selection.unit))
    row, kind = jax.ShapeDtypeStruct((ROWS,), jnp.int32), jnp.dtype(dtype)
    arguments = (
        jax.ShapeDtypeStruct((ROWS, heads, queries, dim), kind), jax.ShapeDtypeStruct((*shape, dim), kind),
        jax.ShapeDtypeStruct(shape, jnp.int32), row, jax.ShapeDtypeStruct(shape[:2], jnp.int32),
    )  # fmt: skip
    columns = {s.name: jax.ShapeDtypeStruct(shape, FLOAT) for s in selection.needs}

    def same(method: str, index: object, made: object) -> PyTree:
        before, after = (
            jax.tree.map(lambda x: (jnp.shape(x), str(jnp.result_type(x))), each) for each in (index, made)
        )
        if before != after:
            raise SelectionError(f"{about} {method} returned an index of {after}; expected that of `init`: {before}.")
        return made

    def run(query: PyTree, key: PyTree, position: PyTree, row: PyTree, slot: PyTree, columns: PyTree) -> PyTree:
        view = SelectView(position, key, row, row, row, slot, 1.0, 0, first=row)
        index = selection.init(shape, dim, kind)
        if not isinstance(index, dict):
            raise SelectionError(f"{about} init returned {_described(index)}; expected a dict of arrays.")
        for name, array in index.items():
            if jnp.shape(array)[:2] != shape[:2] or not hasattr(array, "dtype"):
                raise SelectionError(
                    f"{about} init: {name!r} is {_described(array)}; expected an array whose first dimensions are rows "
                    f"and KV heads, {list(shape[:2])}."
                )
        if not selection.watches:
            value = key if selection.sees_values else None
            held = Held(position, key, row, None, lambda x: x.astype(jnp.float32), value)
            index = same("build", index, selection.build(index, {}, held))
        index = same("write", index, selection.write(index, key[:, :, :1], slot, row >= 0))
        if selection.sees_values:
            index = same("write_value", index, selection.write_value(index, key[:, :, :1], row >= 0))
        name, size, choose = ("choose_units", units, selection.choose_units) if selection.unit > 1 else (
            "chosen" if type(selection).choose is Selection.choose else "choose", shape, selection.choose
        )  # fmt: skip
        made = choose(index, query, view)
        if not isinstance(made, tuple) or len(made) != 2:
            raise SelectionError(f"{about} {name} returned {_described(made)}; expected the marks and the index.")
        mask = _checked(f"{about} {name}", made[0], size, BOOL, SelectionError)
        index = same(name, index, made[1])
        _checked(f"{about} always", selection.always(index, view), shape, BOOL, SelectionError)
        _checked(f"{about} mix", selection.mix(index, query, view), query.shape, kind, SelectionError)
        return mask, same("settle", index, selection.settle(index, columns, view))

    _evaluated(f"{about} choice", run, (*arguments, columns), SelectionError)


def _is_own(part: object) -> bool:
    """Whether a component is of a user's own: of a class outside of kvjax, or made of functions."""
    kind = type(part)
    return not kind.__module__.startswith("kvjax.") or kind.__name__ in ("CodecFunctions", "BlockFunctions")


def _evaluated(
    what: str, function: Callable[..., PyTree], arguments: tuple[PyTree, ...], error: type[KvjaxError]
) -> None:
    """Runs a function on shapes; whatever it raises is an `error` that says where."""
    _called(what, functools.partial(jax.eval_shape, function), arguments, error)


def _called(
    what: str, function: Callable[..., PyTree], arguments: tuple[PyTree, ...], error: type[KvjaxError]
) -> PyTree:
    """Returns what a function returns; whatever it raises is an `error` that says where."""
    try:
        return function(*arguments)
    except KvjaxError:
        raise
    except Exception as raised:
        raise error(f"{what} raised {described_error(raised)}.") from raised


def _checked(what: str, made: object, shape: tuple[int, ...], dtype: DTypeLike, error: type[KvjaxError]) -> PyTree:
    """Returns what a function made if it is an array of a shape and a dtype.

    Raises:
      error: it is something else.
    """
    right = isinstance(made, jax.Array) and made.shape == tuple(shape) and made.dtype == jnp.dtype(dtype)
    if not right:
        expected = f"a jax array of {jnp.dtype(dtype).name} {list(shape)}"
        raise error(f"{what} returned {_described(made)}; expected {expected}.")
    return made


def _described(made: object) -> str:
    if isinstance(made, jax.Array):
        return f"a jax array of {made.dtype.name} {list(made.shape)}"
    if hasattr(made, "shape") and hasattr(made, "dtype"):
        return f"a {type(made).__module__}.{type(made).__name__} of {made.dtype} {list(made.shape)}"
    return (
        f"{made!r} of type {type(made).__name__}" if isinstance(made, float | int | str | None) else type(made).__name__
    )


def _names(made: object) -> str:
    """The names of a dict, or what there is in its place."""
    return str(sorted(made, key=str)) if isinstance(made, Mapping) else _described(made)
