"""The number of slots that are allocated for each head."""

from kvjax.cache.arrangements import arrangement_of
from kvjax.cache.arrangements.base import Counts
from kvjax.cache.groups import ArraySizes
from kvjax.cache.planning.head_groups import Branch
from kvjax.cache.planning.limits import Sizes, slots_bucket
from kvjax.cache.spec import CacheSpec
from kvjax.policies.base import Evict


def capacities(
    spec: CacheSpec, branch: Branch, budgets: list[int | None], kv_heads: int, sizes: Sizes
) -> tuple[int, int]:
    """Slots per head of the arrays: while the prompt goes in block by block, and while decoding.

    Where a step's own tokens are apart (`Storage.new_tokens_separate`), they take none.
    """
    whole, total = sizes.prompt, sizes.total
    first, then = budgets
    room = 0 if spec.storage.new_tokens_separate else 1  # for the step's own token
    # Between two evictions, a head holds up to this many slots more than its budget.
    over = branch.decode.every - 1

    def up(slots: int, policy: Evict) -> int:
        return _rounded(slots, policy, sizes)

    if branch.decode.budget is not None and branch.decode.budget.beyond_prompt:
        assert then is not None
        if first is None:
            held = sizes.budget_prompt + then + over + room
            return whole, min(slots_bucket(held) if sizes.rounded else held, total)
        left = up(_left(branch.prompt, first, kv_heads, sizes), branch.prompt)
        return whole, min(left + up(then + over + room, branch.decode), total)
    if branch.prompt.when == "step":
        if first is None:
            return total, total
        if branch.prompt.page > 1:
            # Also where the step's own tokens are apart: which slots they will have is known before any is freed.
            page = branch.prompt.page
            return _in_pages(first, sizes.block or 1, page, total), _in_pages(first, 1, page, total)
        block = 0 if spec.storage.new_tokens_separate else (sizes.block or 1)
        held = first + over
        return min(up(held + block, branch.prompt), total), min(up(held + room, branch.prompt), total)
    assert first is not None and branch.prompt.budget is not None
    left = up(_left(branch.prompt, first, kv_heads, sizes), branch.prompt)
    if then is None:
        return whole, left + sizes.following
    if branch.decode.page > 1:
        return whole, _in_pages(max(left, then), 1, branch.decode.page, total)
    return whole, max(left + room, min(up(then + over + room, branch.decode), total))


def _rounded(slots: int, policy: Evict, sizes: Sizes) -> int:
    """Rounds a number of slots up to a bucket, if the policy's budget follows prompts."""
    follows = policy.budget is not None and policy.budget.follows_prompt
    return slots_bucket(slots) if sizes.rounded and follows else slots


def most_left(branch: Branch, budget: int | None, kv_heads: int, sizes: Sizes) -> int | None:
    """Returns `Group.most_left`; for the arguments see `shares`."""
    policy = branch.prompt
    if budget is None or policy.budget is None or policy.when == "step" or policy.merge is None:
        return None
    return _rounded(_left(policy, budget, kv_heads, sizes), policy, sizes)


def _left(policy: Evict, budget: int, kv_heads: int, sizes: Sizes) -> int:
    """Returns the largest number of slots per head that a compressor keeps of a prompt."""
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
    array_sizes: ArraySizes | None = None,
) -> tuple[int, ...]:
    """Returns the slots of each store: the encoded ones, and those of the newest tokens, which are exact.

    Args:
      spec: which has the storage.
      branch: the policies.
      slots: the most slots that a head holds between steps.
      budgets: the largest of the batch, for each phase.
      following: the most tokens that follow a prompt while these arrays are in use.
      array_sizes: what else arrays are sized for.
    """
    counts = Counts(
        slots, following, array_sizes, compressed=branch.prompt.budget is not None,
        evicts=branch.decode.budget is not None, newest_stay=newest_stay(spec, branch, budgets),
    )  # fmt: skip
    return arrangement_of(spec.storage).slots(spec.storage, counts)


def extent_of(spec: CacheSpec, branch: Branch, sizes: Sizes) -> ArraySizes | None:
    """Returns what arrays are sized for beyond the number of slots; None for a storage of single slots."""
    if not arrangement_of(spec.storage).sized_by_extent:
        return None
    compressed = branch.prompt.budget is not None
    return ArraySizes(shortest=1 if compressed else sizes.shortest, following=sizes.following, compressed=compressed)
