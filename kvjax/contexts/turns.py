"""Further turns: copies rows of a context and feeds tokens to the copies."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import choice_argument, plain_signature
from kvjax.cache.planning.limits import half_steps, power_of_two, prompt_bucket
from kvjax.cache.planning.lowering import budgets_of
from kvjax.contexts.feed import Plan, feed_copies, feed_rows
from kvjax.contexts.room import (
    BY_LENGTH,
    block_phase,
    compression_phase,
    reason_for_steps,
    with_budgets,
    with_room,
    with_room_to_share,
)
from kvjax.errors import InputError
from kvjax.generation import compiling
from kvjax.generation.context import Boundaries, Context, Span, check_context, padded_rows, spans_with, turn_of
from kvjax.generation.continuations import FEW_FED, MANY_FED, takes_blocks, without_step_kernels
from kvjax.inputs import check_batch, check_count
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import POLICY, SIDES, SKEW
from kvjax.models.model import Model, check_model
from kvjax.parallel import distributed

TURNS = ("append", "compress")
HostBudgets = tuple[tuple[np.ndarray | None, ...], ...]  # per layer and group of heads, [B]


@plain_signature
def extend(
    model: Model,
    context: Context,
    tokens: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    block: int | None = None,
    turns: str = "append",
    rebudget: bool = False,
    donate: bool = False,
) -> Context:
    """Copies rows of a context and feeds a further turn to the copies.

    To a policy that evicts while decoding, a turn is a prompt: its tokens attend to the live slots and to each other,
    and slots are evicted once, at the end of the turn or of each of its blocks. Statistics go on, and budgets stay
    those of the first prompt. What a prompt compressor keeps of the first prompt stays, and turns are appended; with
    ``turns="compress"``, it ranks all live slots again at the end of each turn, by the queries of this turn, and evicts
    down to its budget.

    Some caches are defined token by token, and take a turn one token at a time: H2O's ``ring``; budgets that count what
    follows a prompt; selections, except `rekv`, which chooses once for the turn; storages that encode each new token
    while nothing is evicted; and storages that hold tokens together.

    Args:
      model: that of the context.
      context: from `kvjax.contexts.prefill` or another function of contexts; it is unchanged, unless
        it is donated.
      tokens: [R, n] or [n] int, rows padded at the end; or a list of rows of any lengths. A row may have no token.
      lengths: [R] int, the number of real tokens of each row; None for n.
      rows: [R] int, the row of the context that each row of tokens continues; None if there is one for each,
        in their order.
      block: tokens of a block, counted from the first token of the turn; None for one block. 1 feeds tokens one at a
        time, as if the model had generated them. Not with ``turns="compress"``.
      turns: ``append`` or ``compress``, of a prompt compressor.
      rebudget: whether a budget that is a share of the text is now one of each row's length after the turn. A larger
        budget brings nothing back.
      donate: whether the cache of `context` may be overwritten, so that it is not copied and cannot be used afterwards,
        where the rows of the result are those of the context.

    Returns:
      The context after the turn. A row without a token is only copied. On a mesh that does not divide them, rows
      without a token follow; see `Context`.

    Raises:
      InputError: tokens, lengths, rows, block or turns that are not valid; another model; arrays that cannot grow have
        too few slots; the text is longer than the model's positions; or the cache cannot be compressed again.
      PolicyError: the new budget cannot work.
    """
    model = own_model(model, context)
    choice_argument("turns", turns, TURNS, error=InputError)
    ids, sizes = _checked(model.config, tokens, lengths)
    count, contexts = len(sizes), context.num_rows
    if rows is None and count != contexts:
        raise InputError(
            f"the context has {contexts} rows, and tokens have {count}; give rows=, the row of the context that each "
            "continues, or a row without a token to leave one as it is."
        )
    source = np.arange(count) if rows is None else np.asarray(rows)
    valid = source.shape == (count,) and np.issubdtype(source.dtype, np.integer)
    if not valid or source.min() < 0 or source.max() >= contexts:
        raise InputError(f"rows must be {count} whole numbers from 0 to {contexts - 1}, one per row; got {rows!r}.")
    if block is not None:
        check_count("block", block)
        if turns == "compress":
            raise InputError("turns='compress' compresses a turn as a whole; leave out block.")
    length, total = (x[source] for x in distributed.to_host((context.state.length, context.state.total)))
    check_positions(model.config, length + sizes, total)
    fed = np.zeros(context.logits.shape[0], np.int32)
    np.maximum.at(fed, source, sizes)
    resolved, budget, turn_budget = _budgets(
        context, source, np.where(sizes > 0, length + sizes, 0) if rebudget else None, total
    )  # fmt: skip
    longest = max(int(sizes.max()), 1)
    if turns == "append" or rebudget:
        context = with_room(context, fed)
    if budget is not None:
        context = with_budgets(context, budget)
    size: int | None = None
    if turns == "compress":
        width = prompt_bucket(longest)
        context = with_room_to_share(context, int(sizes[sizes > 0].min(initial=width)))
        during = compression_phase(context.layout, width)
        plan = Plan(context.layout.decode, during, "blocks", width, True, compresses=True)
    else:
        turn_budget = None
        plan, width, size = planned_turn(context, longest, block)
    # One row is no more work for each device than a row of padding.
    padding = model.rows_on_mesh(count) - count if count > 1 else 0
    # [R + padding, width]
    given = np.zeros((count + padding, width), np.int32)
    given[:count, : ids.shape[1]] = ids
    # [R + padding]
    copied, sizes_padded = (np.pad(each.astype(np.int32), (0, padding)) for each in (source, sizes))
    real = np.arange(count + padding) < count
    budgets = jax.tree.map(lambda each: np.pad(each, (0, padding), mode="edge"), (budget, turn_budget))
    with model.on_mesh(), compiling.announced(compiling.tokens_of(context.layout.decode)):
        placed = model.place((copied, given, sizes_padded, real))
        in_place = donate and rows is None and len(real) == context.logits.shape[0]
        if in_place:
            placed = None, *placed[1:-1], None
        logits, state = (feed_rows if in_place else feed_copies)(
            model.params, context.state, context.logits, *placed, *model.place(budgets),
            config=model.config, plan=plan,
        )  # fmt: skip
    spans = functools.partial(
        spans_with, block=size, turn=turns if turns == "compress" else turn_of(context.layout), rebudget=rebudget
    )
    known, boundaries = _recorded(context, source, ids, sizes, length, count + padding, spans)
    return Context(logits, state, context.layout, known, count, boundaries, context.made, resolved)


def own_model(model: Model, context: Context) -> Model:
    """Returns the model of a context, which has the calibration of its cache.

    Raises:
      InputError: the model that is given is another one, or either is of another type.
    """
    check_model(model)
    check_context(context)
    if context.made is None or model is context.made.model:
        return model
    own = context.made.model
    if not same_weights(own, model):
        raise InputError("the context belongs to another model; give the model that it was made with.")
    return own


def same_weights(one: Model, two: Model) -> bool:
    """Returns whether two models have the same arrays as parameters, calibrations left aside."""
    if one is two:
        return True
    first, second = (_parameters(each, of_calibration=False) for each in (one, two))
    return one.config == two.config and first.keys() == second.keys() and all(
        leaf is second[path] for path, leaf in first.items()
    )  # fmt: skip


def same_calibration(one: Model, two: Model) -> bool:
    """Returns whether the calibrations of two models have equal numbers.

    Each call that is given a calibration makes arrays of it, so that they are not the same ones.
    """
    if one is two:
        return True
    first, second = (distributed.to_host(_parameters(each, of_calibration=True)) for each in (one, two))
    return first.keys() == second.keys() and all(np.array_equal(leaf, second[path]) for path, leaf in first.items())


def _parameters(model: Model, *, of_calibration: bool) -> dict[str, Any]:
    """Returns parameters by path, either those of a calibration or all others."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(model.params)[0]
        if of_calibration == any(getattr(part, "key", None) in (SIDES, SKEW, POLICY) for part in path)
    }


def _budgets(
    context: Context, source: np.ndarray, length: np.ndarray | None, total: np.ndarray
) -> tuple[np.ndarray | None, HostBudgets | None, HostBudgets | None]:
    """Returns the lengths that budgets are resolved for, and the budgets of decoding, if they change, and of prompts.

    Args:
      context: the context.
      source: [R] int, its row of each row of the turn.
      length: [R] int, the length after the turn, 0 = unchanged; None if budgets stay as they are.
      total: [R] int, the tokens that were known to follow.
    """
    made = context.made
    if context.resolved is None or made is None:
        if length is not None:
            raise InputError("rebudget needs a context whose cache is known, from kvjax.contexts.prefill.")
        return None, None, None
    resolved = context.resolved[source]
    if length is not None:
        now = np.stack([length, np.maximum(length, total)], axis=1).astype(np.int32)
        resolved = np.where(length[:, None] > 0, now, resolved)
    budgets = budgets_of(made.spec, made.model.config, resolved[:, 0], resolved[:, 1])
    return resolved, None if length is None else budgets.decode, budgets.prompt


def _checked(config: DecoderConfig, tokens: ArrayLike, lengths: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns checked tokens [R, n] int32 and the number of tokens of each row, which may be 0."""
    empty: np.ndarray | None = None
    if lengths is not None:
        sizes = np.asarray(lengths)
        if sizes.ndim == 1 and np.issubdtype(sizes.dtype, np.integer):
            empty, lengths = sizes == 0, np.where(sizes == 0, 1, sizes)
    elif isinstance(tokens, list | tuple) and any(map(_is_empty, tokens)):
        empty = np.array([*map(_is_empty, tokens)])
        tokens = [[0] if none else row for row, none in zip(tokens, empty, strict=True)]
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    return batch.tokens, batch.lengths if empty is None else np.where(empty, 0, batch.lengths).astype(np.int32)


def _is_empty(row: object) -> bool:
    """Returns whether a row is a list or an array without a token."""
    return not row if isinstance(row, list | tuple) else getattr(row, "size", None) == 0


def check_positions(config: DecoderConfig, length: np.ndarray, total: np.ndarray) -> None:
    """Checks that a model has positions for rows of `length` tokens, of which `total` were known before, [R] each."""
    if config.learned_positions and int(length.max()) > config.max_positions:
        raise InputError(
            f"this model's learned position table ends at {config.max_positions} tokens, but a context and its "
            f"continuation have {int(length.max())}; shorten them."
        )
    ropes = [config.kind(index).rope for index in range(config.num_layers)]
    scalings = {rope.scaling for rope in ropes if rope is not None} & {*BY_LENGTH}
    if scalings and (length > total).any():
        raise InputError(
            f"{int(length.max())} tokens do not fit: under {', '.join(sorted(scalings))} RoPE, keys are rotated for "
            f"the number of tokens that was known at the prompt, here {int(total.max())}; give `prefill` a larger room."
        )


def planned_turn(context: Context, longest: int, block: int | None) -> tuple[Plan, int, int | None]:
    """Returns how a turn is fed, the number of tokens that rows are padded to, and the size of its blocks."""
    phase = context.layout.decode
    if takes_blocks(phase):
        # The result does not depend on blocks, but for rounding.
        size = None if block == 1 or block is None or block >= longest else block
        width = half_steps(longest, FEW_FED) if size is None else half_steps(-(-longest // size), 1) * size
        during = without_step_kernels(phase)
        return Plan(phase, during, "blocks", width if size is None else size, block != 1), width, block
    if block == 1 or reason_for_steps(phase, turns=True):
        return Plan(phase, phase, "steps", 1, False), power_of_two(longest, MANY_FED), 1
    if block is None or block >= longest:
        width = size = prompt_bucket(longest)
    else:
        width, size = half_steps(-(-longest // block), 1) * block, block
    return Plan(phase, block_phase(phase, size), "blocks", size, True), width, block


def _recorded(
    context: Context,
    source: np.ndarray,
    ids: np.ndarray,
    sizes: np.ndarray,
    length: np.ndarray,
    count: int,
    spans: Callable[[tuple[Span, ...], int, int], tuple[Span, ...]],
) -> tuple[np.ndarray | None, Boundaries | None]:
    """Returns the tokens of all rows and their spans after a turn, where those of the context are known."""
    known, boundaries = None, None
    if (text := context.text) is not None:
        rows = [np.concatenate([text[row], ids[i, : sizes[i]]]) for i, row in enumerate(source)]
        known = padded_rows(rows, count)
    if context.boundaries is not None:
        boundaries = tuple(
            spans(context.boundaries[row], int(length[i]), int(sizes[i])) for i, row in enumerate(source)
        )
    return known, boundaries
