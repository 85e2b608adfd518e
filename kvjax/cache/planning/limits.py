"""The sizes that programs are compiled for.

Lengths are rounded up to a small set of sizes, so that a new length does not compile a new program. Prompts are padded
to a power of two or to the middle between two, so that at most a third of what is computed is padding. The number of
slots of a cache depends on the next power of two only, which halves the number of decoding programs. A caller that
knows the sizes passes `Limits` and gets arrays of exactly these sizes.

A batch may have prompts of any lengths up to its size, and some budgets are larger for short prompts (`Pyramid`). The
number of slots is therefore the largest for any prompt length that the size allows, not for those of one batch.
"""

import dataclasses

import numpy as np

from kvjax.errors import InputError
from kvjax.inputs import check_count

SMALLEST_PROMPT = 64  # tokens that shorter prompts are padded to; a smaller program takes no less time
SMALLEST_CONTEXT = 256  # tokens of a prompt that a cache is sized for at the least
SMALLEST_ROOM = 64  # new tokens that a cache has room for at the least: those of one call of `decode_steps`
EIGHTHS = 8  # sizes of a cache between two powers of two


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest prompt and number of new tokens of a run, which has one program for all.

    Attributes:
      prompt: tokens of the longest prompt.
      new_tokens: tokens that follow a prompt.
      shortest: tokens of the shortest prompt. Arrays hold the budget of every prompt length from here to `prompt`, so
        that a caller whose prompts all have one length gives it here too, and gets arrays of exactly their budget.

    Raises:
      InputError: a number below 1, or `shortest` above `prompt`.
    """

    prompt: int
    new_tokens: int
    shortest: int = 1

    def __post_init__(self) -> None:
        for field in ("prompt", "new_tokens", "shortest"):
            check_count(f"limits.{field}", getattr(self, field))
        if self.shortest > self.prompt:
            raise InputError(
                f"limits.shortest must be at most limits.prompt, which is {self.prompt}; got {self.shortest}."
            )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that `kvjax.cache.planning.lowering.lower` allocates for.

    Attributes:
      rows: of a batch.
      prompt: width of the prompts' arrays.
      budget_prompt: the longest prompt whose budgets must fit.
      shortest: the shortest one.
      following: tokens that are fed after the prompt.
      block: tokens of a block of the prompt; None = in one shot.
      rounded: whether the number of slots goes up to an eighth of a power of two.
    """

    rows: int
    prompt: int
    budget_prompt: int
    shortest: int
    following: int
    block: int | None
    rounded: bool

    @property
    def total(self) -> int:
        """The most tokens that a row can hold."""
        return self.budget_prompt + self.following

    @property
    def prompts(self) -> range:
        """The prompt lengths whose budgets must fit, so that all of them share one program."""
        return range(self.shortest, self.budget_prompt + 1)

    @property
    def blocks(self) -> int:
        """The number of blocks of a prompt."""
        return 1 if self.block is None else -(-self.prompt // self.block)


def sizes_for(
    lengths: np.ndarray, following: int, *, width: int, block: int | None, limits: Limits | None, last_fed: bool
) -> Sizes:
    """The sizes of a batch.

    Args:
      lengths: [B] tokens of each row's prompt.
      following: the most tokens that are fed after a prompt.
      width: of the caller's array of prompts; where it is longer than every prompt, its padding is kept.
      block: see `Sizes`; one that is as wide as the prompts' arrays is one shot.
      limits: what the caller allows for; None = buckets.
      last_fed: whether the last of the new tokens is fed, as in scoring, or not, as in generation.

    Raises:
      InputError: `limits` of another type, or a batch beyond them.
    """
    longest, shortest, rows = int(lengths.max()), 1, len(lengths)
    padded = width > longest
    if limits is not None and not isinstance(limits, Limits):
        raise InputError(f"limits={limits!r} is not valid; give kvjax.Limits(prompt=512, new_tokens=128), or None.")
    if limits is not None:
        room = limits.new_tokens - (0 if last_fed else 1)
        if longest > limits.prompt or following > room:
            raise InputError(
                f"the longest prompt has {longest} tokens and {following + (0 if last_fed else 1)} follow, more than "
                f"{limits}; raise the limits, or leave them out."
            )
        if lengths.min() < limits.shortest:
            raise InputError(
                f"the shortest prompt has {int(lengths.min())} tokens, fewer than {limits}; lower limits.shortest, or "
                "leave it out."
            )
        prompt = budget_prompt = limits.prompt
        shortest = limits.shortest
    elif padded:
        prompt, budget_prompt, room = width, max(width, power_of_two(longest, SMALLEST_CONTEXT)), _room(following)
    else:
        prompt, budget_prompt, room = prompt_bucket(longest), power_of_two(longest, SMALLEST_CONTEXT), _room(following)
    if block is not None and limits is None and not padded:
        # The number of blocks is what a program depends on.
        prompt = min(prompt, block) if longest <= block else half_steps(-(-longest // block), 1) * block
    if block is not None and block >= prompt:
        block = None
    return Sizes(rows, prompt, budget_prompt, shortest, room, block, rounded=limits is None)


def prompt_bucket(length: int) -> int:
    """The size that a prompt of `length` tokens is padded to."""
    return half_steps(length, SMALLEST_PROMPT)


def half_steps(size: int, smallest: int) -> int:
    """The least 2^k or 3·2^(k-1) that is at least `size`, and `smallest` at the least."""
    power = power_of_two(size, smallest)
    return 3 * power // 4 if power >= 2 * smallest and power % 4 == 0 and size <= 3 * power // 4 else power


def quarter_steps(size: int, smallest: int) -> int:
    """The least 4·2^k, 5·2^k, 6·2^k or 7·2^k that is at least `size`, and `smallest` at the least."""
    power = power_of_two(size, smallest)
    quarters = [part * power // 8 for part in (5, 6, 7, 8)] if power >= 2 * smallest and power % 8 == 0 else [power]
    return next(each for each in quarters if each >= size)


def power_of_two(size: int, smallest: int) -> int:
    """The least power of two that is at least `size`, and `smallest` at the least."""
    return max(smallest, 1 << max(size - 1, 0).bit_length())


def slots_bucket(slots: int) -> int:
    """The least number of slots, in steps of an eighth of a power of two, that is at least `slots`."""
    step = max(EIGHTHS, (1 << (slots.bit_length() - 1)) // EIGHTHS)
    return -(-slots // step) * step


def _room(following: int) -> int:
    return power_of_two(following, SMALLEST_ROOM) if following else 0
