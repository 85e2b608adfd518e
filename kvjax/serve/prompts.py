"""Runs the prompts of requests: short ones in buckets, several at a time, and long ones block by block.

All of them end in the arrays of one decoding phase, so that any prompt's state can replace any row.
"""

import jax
import numpy as np

from kvjax.attention import Implementation
from kvjax.cache import shared_prefix
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Limits, Sizes, prompt_bucket
from kvjax.cache.planning.lowering import Budgets, budgets_of, lower
from kvjax.cache.spec import CacheSpec
from kvjax.errors import InputError, KvjaxError
from kvjax.generation import compiling, layer_calls
from kvjax.generation.context import Made
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prefill_program
from kvjax.inputs import check_count, check_positions
from kvjax.models.calibrate import calibrated
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies.traits import evicting_in_prompt
from kvjax.serve.chunked_prefill import InBlocks, Prompt, Started

AUTO = "auto"
AUTO_BLOCK = 512  # tokens of a block, where blocks do not change what is kept
#: The same where beginnings of prompts are stored, which are found in whole blocks: of smaller ones, less is computed
#: again, and a prompt of which nothing is found may cost more. On a CPU, 768 tokens of kvjax-tiny cost 361 ms of CPU
#: time in blocks of 64, and 337 in one. On other devices nothing was measured.
STORED_BLOCK = {"cpu": 64}
STORED_BLOCK_ELSEWHERE = 256
AT_ONCE = 512  # tokens of short prompts that are run together, padding included


class Prompts:
    """Runs prompts of a model under a spec.

    Attributes:
      model: the model, calibrated.
      spec: policy, storage and selection.
      limits: what arrays are allocated for.
      layout: the static description of the cache; its decoding phase is that of every prompt.
      block: tokens of a block; None if every prompt is run in one shot.
      one_shot_reason: why prompts are run in one shot, or None.
      implementation: see `kvjax.CacheOptions`.
      made: of the contexts of prompts; see `kvjax.Context`.
    """

    def __init__(
        self,
        model: Model,
        spec: CacheSpec,
        *,
        limits: Limits,
        rows: int,
        prefill_block: int | str | None = AUTO,
        stored: bool = False,
        implementation: Implementation = "auto",
    ):
        """Lowers the spec.

        Args:
          model: from `kvjax.load`.
          spec: policy, storage and selection.
          limits: the longest prompt, and the most tokens that follow one.
          rows: the rows that will decode.
          prefill_block: tokens of a block of a prompt, as in `kvjax.generate`; None for one shot; ``auto`` for
            `AUTO_BLOCK` where blocks do not change what is kept or read, otherwise one shot.
          stored: whether beginnings of prompts are stored, so that ``auto`` is for smaller blocks.
          implementation: see `kvjax.CacheOptions`.

        Raises:
          KvjaxError: a spec that cannot work with this model; see `kvjax.generate`; or a model that is spread over
            several processes.
        """
        if not isinstance(limits, Limits):
            raise InputError(f"limits must be kvjax.Limits(prompt=1024, new_tokens=256) or the like; got {limits!r}.")
        check_count("rows", rows)
        distributed.check_alone(model.params, "serving with a Runner")
        self.model, self.spec, self.limits = calibrated(model, spec, None), spec, limits
        check_positions(model.config, spec.policy.positions)
        implementation = shared_prefix.implementation_for(model.params, implementation)
        self._rows, self.implementation, self._stored = rows, implementation, stored
        self._layouts: dict[int | None, CacheLayout] = {}
        self.block, self.one_shot_reason = self._block(prefill_block)
        widest = self._width(min(limits.prompt, self.block or limits.prompt))
        self.layout = self._lowered(widest)
        options = CacheOptions(limits=limits, prefill_block=self.block, implementation=implementation)
        self.made = Made(self.model, spec, options, self._sizes(widest))

    def _block(self, asked: int | str | None) -> tuple[int | None, str | None]:
        """The number of tokens of a block, or why there are no blocks."""
        if asked is None:
            return None, "prefill_block is None"
        if asked != AUTO:
            check_count("prefill_block", asked)
            block = int(asked)
        else:
            if reason := changed_by_blocks(self.spec):
                return None, reason
            platform = self.model.platform
            block = STORED_BLOCK.get(platform, STORED_BLOCK_ELSEWHERE) if self._stored else AUTO_BLOCK
        if block >= self.limits.prompt:
            return None, f"no prompt is longer than a block of {block} tokens"
        self.block = block
        try:
            self._lowered(None)
        except KvjaxError as error:
            if asked != AUTO:
                raise
            return None, str(error)
        return block, None

    @property
    def lowered_blocks(self) -> CacheLayout | None:
        """The layout for prompts in blocks; None if there are none."""
        return None if self.block is None else self._lowered(None)

    def prompt(self, tokens: np.ndarray, new_tokens: int) -> Prompt:
        """Checks a prompt.

        Args:
          tokens: [n] int32.
          new_tokens: the number of tokens that will follow, the last of which is not fed.

        Raises:
          InputError: it exceeds the limits.
          PolicyError: the budget cannot work for its length.
        """
        limits, length = self.limits, len(tokens)
        if not limits.shortest <= length <= limits.prompt or new_tokens > limits.new_tokens:
            raise InputError(
                f"a prompt of {length} tokens and {new_tokens} new ones do not fit: prompts must have "
                f"{limits.shortest} to {limits.prompt} tokens, and at most {limits.new_tokens} new ones."
            )
        total = length + new_tokens - 1
        budgets = budgets_of(self.spec, self.model.config, np.array([length], np.int32), np.array([total], np.int32))
        return Prompt(tokens, total, budgets)

    def bucket(self, prompt: Prompt) -> int | None:
        """The width that a prompt is padded to; None if it is run in blocks."""
        length = len(prompt.tokens)
        return None if self.block is not None and length > self.block else self._width(length)

    def at_once(self, bucket: int) -> int:
        """The number of prompts of a bucket that one program runs. It is fixed: a result does not depend on others."""
        max_prompts = max(1, min(self._rows // 8, AT_ONCE // bucket))
        return 1 << (max_prompts.bit_length() - 1)

    def run(self, prompts: list[Prompt], bucket: int) -> Started:
        """Dispatches prompts of one bucket, at most `at_once(bucket)`."""
        rows = [*prompts, *prompts[:1] * (self.at_once(bucket) - len(prompts))]
        # [P, width]
        tokens = np.zeros((len(rows), bucket), np.int32)
        for row, prompt in enumerate(rows):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
        lengths = np.array([len(prompt.tokens) for prompt in rows], np.int32)
        totals = np.array([prompt.total for prompt in rows], np.int32)
        budgets: Budgets = jax.tree.map(lambda *each: np.concatenate(each), *(prompt.budgets for prompt in rows))
        model = self.model
        layout = self._lowered(bucket)
        with compiling.announced(compiling.prompts_of(layout, bucket)):
            logits, _, state = prefill_program(layout)(
                model.params, *model.place((tokens, lengths, totals, budgets.prompt, budgets.decode)),
                config=model.config, layout=layout, score=False,
            )  # fmt: skip
        return Started(logits, state)

    def begin(self, prompt: Prompt) -> InBlocks:
        """Begins a prompt that is run block by block."""
        return InBlocks(self.model, self._lowered(None), prompt)

    def _width(self, length: int) -> int:
        return min(prompt_bucket(length), self.limits.prompt)

    def _sizes(self, bucket: int | None) -> Sizes:
        """The sizes of the layout for prompts of a bucket; None: for those in blocks."""
        limits = self.limits
        return Sizes(
            rows=self._rows, prompt=limits.prompt if bucket is None else bucket, budget_prompt=limits.prompt,
            shortest=limits.shortest, following=limits.new_tokens - 1, block=self.block if bucket is None else None,
            rounded=False,
        )  # fmt: skip

    def _lowered(self, bucket: int | None) -> CacheLayout:
        """The layout for prompts of a bucket; None: for those in blocks."""
        if bucket not in self._layouts:
            limits, model, sizes = self.limits, self.model, self._sizes(bucket)
            with model.on_mesh():
                layout = lower(
                    self.spec, model.config, sizes, np.array([limits.prompt], np.int32),
                    implementation=self.implementation, platform=model.platform,
                    dtype=model.dtype,
                ).layout  # fmt: skip
                layout = layer_calls.with_layer_programs(layout, model.config, model.params)
            others = next(iter(self._layouts.values()), layout)
            if layout.decode != others.decode:
                raise AssertionError("the decoding phase depends on how a prompt is run")
            self._layouts[bucket] = layout
        return self._layouts[bucket]


def changed_by_blocks(spec: CacheSpec) -> str | None:
    """Why blocks of a prompt change what is kept or read; None if they do not."""
    if name := evicting_in_prompt(spec.policy):
        return f"policy {name} evicts after each block of a prompt, so that blocks change what it keeps"
    if not spec.storage.exact:
        return f"a block reads the ones before it as storage {spec.storage.name} holds them"
    return None
