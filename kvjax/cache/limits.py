"""The sizes that programs are compiled for.

Lengths are rounded up to a small set of sizes, so that a new length does not compile a new program. Prompts are padded
to a power of two or to the middle between two, so that at most a third of what is computed is padding. The number of
slots of a cache depends on the next power of two only, which halves the number of decoding programs. A caller that
knows the sizes passes `Limits` and gets arrays of exactly these sizes.
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

    Raises:
      InputError: a number below 1.
    """

    prompt: int
    new_tokens: int

    def __post_init__(self) -> None:
        check_count("limits.prompt", self.prompt)
        check_count("limits.new_tokens", self.new_tokens)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What `kvjax.cache.lowering.lower` allocates for.

    Attributes:
      rows: of a batch.
      prompt: width of the prompts' arrays.
      budget_prompt: prompt length that budgets are computed for.
      following: tokens that are fed after the prompt.
      block: tokens of a block of the prompt; None = in one shot.
      rounded: whether the number of slots goes up to an eighth of a power of two.
    """

    rows: int
    prompt: int
    budget_prompt: int
    following: int
    block: int | None
    rounded: bool

    @property
    def total(self) -> int:
        """The most tokens that a row can hold."""
        return self.budget_prompt + self.following

    def sized_for(self, lengths: np.ndarray) -> tuple[range, ...]:
        """Returns the prompt lengths whose budgets must fit, so that all of them share one program.

        Args:
          lengths: [B] tokens of each row's prompt.
        """
        own = range(self.budget_prompt, self.budget_prompt + 1)
        if not self.rounded:
            return (own,)
        tops = sorted({power_of_two(int(n), SMALLEST_CONTEXT) for n in lengths})
        return (*(range(1 if top == SMALLEST_CONTEXT else top // 2 + 1, top + 1) for top in tops), own)

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
      block: see `Sizes`; one that holds the longest prompt is one shot.
      limits: what the caller allows for; None = buckets.
      last_fed: whether the last of the new tokens is fed, as in scoring, or not, as in generation.

    Raises:
      InputError: `limits` of another type, or a batch beyond them.
    """
    longest, rows = int(lengths.max()), len(lengths)
    if limits is not None and not isinstance(limits, Limits):
        raise InputError(f"limits={limits!r} is not valid; give kvjax.Limits(prompt=512, new_tokens=128), or None.")
    if limits is not None:
        room = limits.new_tokens - (0 if last_fed else 1)
        if longest > limits.prompt or following > room:
            raise InputError(
                f"the longest prompt has {longest} tokens and {following + (0 if last_fed else 1)} follow, more than "
                f"{limits}; raise the limits, or leave them out."
            )
        prompt = budget_prompt = limits.prompt
    elif width > longest:
        prompt, budget_prompt, room = width, max(width, power_of_two(longest, SMALLEST_CONTEXT)), _room(following)
    else:
        prompt, budget_prompt, room = prompt_bucket(longest), power_of_two(longest, SMALLEST_CONTEXT), _room(following)
    if block is not None:
        block = None if block >= longest else block
    if block is not None and limits is None:
        # The number of blocks is what a program depends on.
        prompt = half_steps(-(-longest // block), 1) * block
    return Sizes(rows, prompt, budget_prompt, room, block, rounded=limits is None)


def prompt_bucket(length: int) -> int:
    """The size that a prompt of `length` tokens is padded to."""
    return half_steps(length, SMALLEST_PROMPT)


def half_steps(size: int, smallest: int) -> int:
    """The least 2^k or 3·2^(k-1) that is at least `size`, and `smallest` at the least."""
    power = power_of_two(size, smallest)
    return 3 * power // 4 if power >= 2 * smallest and power % 4 == 0 and size <= 3 * power // 4 else power


def power_of_two(size: int, smallest: int) -> int:
    """The least power of two that is at least `size`, and `smallest` at the least."""
    return max(smallest, 1 << max(size - 1, 0).bit_length())


def slots_bucket(slots: int) -> int:
    """The least number of slots, in steps of an eighth of a power of two, that is at least `slots`."""
    step = max(EIGHTHS, (1 << (slots.bit_length() - 1)) // EIGHTHS)
    return -(-slots // step) * step


def _room(following: int) -> int:
    return power_of_two(following, SMALLEST_ROOM) if following else 0
