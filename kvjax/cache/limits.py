"""The sizes that programs are compiled for: buckets of lengths, so that a new length is not a new program.

Prompts go up to a power of two or halfway to the next one (at most a third of what is computed is padding), and the
slots of a cache follow the next power of two, so that there are half as many decoding programs. Whoever knows the sizes
says them (`Limits`) and gets arrays of exactly these.
"""

import dataclasses

import numpy as np

from kvjax.errors import InputError
from kvjax.inputs import check_count

SMALLEST_PROMPT = 64  # shorter prompts are padded to it: a smaller one takes no less time
SMALLEST_CONTEXT = 256  # likewise of what a cache has room for
SMALLEST_ROOM = 64  # likewise of the tokens to come: as many as `generate` decodes between two looks by the host
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
      nominal: prompt length that fractions of a prompt are taken of.
      following: tokens that are fed after the prompt.
      block: tokens of a block of the prompt; None = in one shot.
      rounded: whether the number of slots goes up to an eighth of a power of two.
    """

    rows: int
    prompt: int
    nominal: int
    following: int
    block: int | None
    rounded: bool

    @property
    def total(self) -> int:
        """The most tokens that a row can hold."""
        return self.nominal + self.following

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
      InputError: a batch beyond its limits.
    """
    longest, rows = int(lengths.max()), len(lengths)
    if limits is not None:
        room = limits.new_tokens - (0 if last_fed else 1)
        if longest > limits.prompt or following > room:
            raise InputError(
                f"the longest prompt has {longest} tokens and {following + (0 if last_fed else 1)} follow, more than "
                f"{limits}; raise the limits, or leave them out."
            )
        prompt = nominal = limits.prompt
    elif width > longest:
        prompt, nominal, room = width, max(width, power_of_two(longest, SMALLEST_CONTEXT)), _room(following)
    else:
        prompt, nominal, room = prompt_bucket(longest), power_of_two(longest, SMALLEST_CONTEXT), _room(following)
    if block is not None:
        block = None if block >= longest else block
    if block is not None and limits is None:
        # The number of blocks is what a program depends on.
        prompt = half_steps(-(-longest // block), 1) * block
    return Sizes(rows, prompt, nominal, room, block, rounded=limits is None)


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
