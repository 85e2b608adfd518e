"""The number of slots that are allocated for each head."""

import functools

from kvjax.cache.arrangements import segments
from kvjax.cache.groups import Extent, stores_of
from kvjax.cache.planning.head_groups import Branch
from kvjax.cache.planning.limits import Sizes, slots_bucket
from kvjax.cache.spec import CacheSpec
from kvjax.errors import PolicyError
from kvjax.policies.base import Evict
from kvjax.storage.layouts import Pairs, Segments, Tiers
from kvjax.storage.layouts import slots as single_slots


def capacities(
    spec: CacheSpec, branch: Branch, budgets: list[int | None], kv_heads: int, sizes: Sizes
) -> tuple[int, int]:
    """Slots per head of the arrays: while the prompt goes in block by block, and while decoding.

    Where a step's own tokens are apart (`Storage.apart`), they take none.
    """
    whole, total = sizes.prompt, sizes.total
    first, then = budgets
    room = 0 if spec.storage.apart else 1  # for the step's own token

    def up(slots: int, policy: Evict) -> int:
        return (
            slots_bucket(slots)
            if sizes.rounded and policy.budget is not None and policy.budget.follows_prompt
            else slots
        )

    if branch.prompt.when == "step":
        if first is None:
            return total, total
        if branch.prompt.page > 1:
            # Also where the step's own tokens are apart: which slots they will have is known before any is freed.
            page = branch.prompt.page
            return _in_pages(first, sizes.block or 1, page, total), _in_pages(first, 1, page, total)
        block = 0 if spec.storage.apart else (sizes.block or 1)
        return min(up(first + block, branch.prompt), total), min(up(first + room, branch.prompt), total)
    assert first is not None and branch.prompt.budget is not None
    left = up(_left(branch.prompt, first, kv_heads, sizes), branch.prompt)
    if then is None:
        return whole, left + sizes.following
    if branch.decode.page > 1:
        return whole, _in_pages(max(left, then), 1, branch.decode.page, total)
    return whole, max(left + room, min(up(then + room, branch.decode), total))


def _left(policy: Evict, budget: int, kv_heads: int, sizes: Sizes) -> int:
    """Returns the most slots of a head that a compressor leaves of a prompt."""
    assert policy.budget is not None
    return min(policy.budget.widest(policy, budget, kv_heads), sizes.budget_prompt)


def shares(branch: Branch, budget: int | None, kv_heads: int, sizes: Sizes) -> tuple[int, int] | None:
    """Returns `Group.shares`.

    Args:
      branch: the policies.
      budget: the largest of the batch, of the average head of the layer.
      kv_heads: of the group.
      sizes: what is allocated for.
    """
    policy = branch.prompt
    if budget is None or policy.budget is None or not policy.budget.shared:
        return None
    return budget, _left(policy, budget, kv_heads, sizes)


def _in_pages(slots: int, new: int, page: int, total: int) -> int:
    """Returns the slots of arrays whose pages are evicted as a whole, for `new` tokens of a step."""
    return -(-min(slots // page * page + -(-new // page) * page, total) // page) * page


def newest_stay(spec: CacheSpec, branch: Branch, budgets: list[int | None]) -> bool:
    """Returns whether the tokens that a residual keeps exact are never evicted while decoding."""
    if branch.decode.budget is None or branch.prompt.when != "step":
        return False
    return all(
        each is not None and policy.keeps_newest(each) >= min(spec.storage.residual, each)
        for policy, each in zip((branch.prompt, branch.decode), budgets, strict=True)
    )


def split_stores(
    spec: CacheSpec,
    branch: Branch,
    slots: int,
    budgets: list[int | None],
    following: int = 0,
    low: int = 0,
    extent: Extent | None = None,
) -> tuple[int, ...]:
    """Returns the slots of each store: the encoded ones, and those of the newest tokens, which are exact.

    Args:
      spec: which has the storage.
      branch: the policies.
      slots: the most slots that a head holds between steps.
      budgets: the largest of the batch, for each phase.
      following: the most tokens that follow a prompt while these arrays are in use.
      low: slots of a low tier.
      extent: what else arrays are sized for.
    """
    if isinstance(spec.storage.layout, Segments) and extent is not None:
        return segments.slots(spec.storage.layout, slots, extent)
    if isinstance(spec.storage.layout, Tiers):
        return low, slots
    if isinstance(spec.storage.layout, Pairs):
        # A store has a slot at the least, also if no token follows.
        return slots - following, max(following, 1)
    residual = spec.storage.residual
    if len(stores_of(spec.storage)) == 1:
        return (slots,)
    exact, newest = min(spec.storage.kept_exact, slots), min(residual, slots)
    if branch.decode.budget is not None:
        # Where the newest tokens may be evicted, all that stays may be encoded; so may the first ones.
        return (slots - newest if newest_stay(spec, branch, budgets) else slots), exact
    # A compressor may drop the newest tokens of the prompt. Those that follow stay, and the newest of them are exact.
    return slots - (exact if branch.prompt.budget is None else min(newest, following)), exact


def low_slots(layout: Tiers, branch: Branch, layer: int, layers: int, sizes: Sizes) -> int:
    """Returns the slots of a tier that holds all that is evicted of a row, or as many as the layout says."""
    evicted = most_evicted(branch.prompt, branch.decode, sizes.prompts, sizes.following, layers)[layer]
    return evicted if layout.low_capacity is None else min(evicted, layout.low_capacity)


@functools.lru_cache(maxsize=256)
def most_evicted(first: Evict, then: Evict, prompts: range, following: int, layers: int) -> tuple[int, ...]:
    """Returns the most slots of a head that are evicted in each layer.

    Args:
      first: the policy of the prompt.
      then: the policy that decodes.
      prompts: the lengths of prompts.
      following: the most tokens that follow.
      layers: the number of layers.
    """

    def left(policy: Evict, tokens: int, length: int) -> list[int]:
        """Returns the slots of each layer that stay of `tokens`, under a budget for prompts of `length` tokens."""
        budget = policy.budget
        if budget is None:
            return [tokens] * layers
        if budget.shared:
            # A head's share of its layer's slots may be any.
            return [1] * layers
        own = budget.slots(length + following if budget.of_text else length, layers)
        if policy.page > 1:
            # The newest page has one slot at the least.
            own = tuple((each // policy.page - 1) * policy.page + 1 for each in own)
        return [min(each, tokens) if layer >= budget.first_layer else tokens for layer, each in enumerate(own)]

    most = [0] * layers
    for length in prompts:
        total = length + following
        try:
            if first.when == "step":
                stays = left(first, total, length)
            else:
                kept = [each + following for each in left(first, length, length)]
                stays = [min(pair) for pair in zip(kept, left(then, total, length), strict=True)]
        except PolicyError:
            # The budget does not allow such a prompt, and a batch that has one is refused.
            continue
        most = [max(each, total - other) for each, other in zip(most, stays, strict=True)]
    return tuple(most)


def extent_of(spec: CacheSpec, branch: Branch, sizes: Sizes) -> Extent | None:
    """Returns what arrays are sized for beyond the number of slots; None for a storage of single slots."""
    if spec.storage.layout == single_slots:
        return None
    compressed = branch.prompt.budget is not None
    return Extent(shortest=1 if compressed else sizes.shortest, following=sizes.following, compressed=compressed)
