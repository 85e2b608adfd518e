"""One layer on random queries, keys and values: prompts in one shot or in blocks, then decoding steps.

What a policy, a storage or a selection does is the layer's business, and a model takes ten times as long to compile.
Calls whose layouts and shapes are equal share one program: budgets, lengths and streams are data.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Block, CacheLayout, CacheSpec, Layer
from kvjax.cache.empty import empty_layers
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.lowering import Lowered, lower
from kvjax.cache.spec import as_spec
from kvjax.cache.state import EMPTY
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.cache.step.step import step_layer
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.policies import ModelSizes, Policy
from kvjax.policies.parameters import distinct
from tests import parameters

RUBBISH = 7.0  # what padding holds


class Streams(NamedTuple):
    """Queries, keys and values of a batch before RoPE.

    Attributes:
      query: [B, H, T, D] float32.
      key: [B, K, T, D] float32.
      value: [B, K, T, D] float32.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def random_streams(
    seeds: Sequence[int], length: int, *, heads: tuple[int, int] = (4, 2), dim: int = 8, vocabulary: int | None = None
) -> Streams:
    """Normal numbers; a row depends on its seed alone.

    Args:
      seeds: one per row.
      length: T.
      heads: query heads and KV heads.
      dim: features of a head.
      vocabulary: the number of distinct tokens, whose queries, keys and values repeat; None = every token is another.
    """
    rows = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        tokens = np.arange(length) if vocabulary is None else rng.integers(vocabulary, size=length)
        counts = (heads[0], heads[1], heads[1])
        rows.append([rng.normal(size=(n, length, dim)).astype(np.float32)[:, tokens] for n in counts])
    return Streams(*map(np.stack, zip(*rows, strict=True)))


class Case(NamedTuple):
    """A ragged batch.

    Attributes:
      streams: of every row.
      prompts: [B] tokens of each row's prompt.
      ends: [B] tokens of each row in all.
      block: tokens of a block of the prompt; None = in one shot.
      rope: of the layer; None = positions do not matter.
      window: the layer's sliding window.
      layer: index of the layer; in the first one, no selection looks ahead. A guess is the query itself.
      sizes: tokens of the longest prompt, and after a prompt, that arrays have room for; None = those of the batch.
    """

    streams: Streams
    prompts: np.ndarray
    ends: np.ndarray
    block: int | None = None
    rope: Rope | None = None
    window: int | None = None
    sizes: tuple[int, int] | None = None
    layer: int = 0

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return self.streams.query.shape[1], self.streams.key.shape[1]

    @property
    def room(self) -> tuple[int, int]:
        """`sizes`, or those of the batch."""
        return self.sizes or (int(self.prompts.max()), int((self.ends - self.prompts).max()))

    def rows(self, *rows: int) -> "Case":
        """These rows, with room for as much as this batch has: as many rows run the same program."""
        index = list(rows)
        own = Streams(*(x[index] for x in self.streams))
        return self._replace(streams=own, prompts=self.prompts[index], ends=self.ends[index], sizes=self.room)

    def alone(self, row: int) -> "Case":
        """A batch of one row, without padding."""
        return self.rows(row)._replace(sizes=None)


def config(case: Case) -> DecoderConfig:
    """A decoder that ends with the layer; of its sizes those of the heads matter."""
    query_heads, kv_heads = case.heads
    dim = case.streams.query.shape[-1]
    return DecoderConfig(
        family="llama", vocab_size=2, hidden_size=query_heads * dim, num_layers=case.layer + 1, num_heads=query_heads,
        num_kv_heads=kv_heads, head_dim=dim, mlp_size=1, max_positions=512, rope=case.rope,
        windows=(case.window,) * (case.layer + 1),
    )  # fmt: skip


def lowered(policy: Policy | CacheSpec, case: Case, implementation: Any = "xla") -> Lowered:
    """The layout and the budgets of a batch; no array is longer than it must be."""
    width, steps = case.room
    block = None if case.block is None or case.block >= width else case.block
    sizes = Sizes(len(case.prompts), width, width, min(case.prompts), steps, block, rounded=False)
    return lower(as_spec(policy), config(case), sizes, case.prompts, implementation=implementation)


class Run(NamedTuple):
    """The results of a layer.

    Attributes:
      output: [B, H, T, D] of every token of each row; 0 past its end.
      layers: the cache after the prompt and after each decoding step, leaves [steps + 1, B, ...].
      read: [steps, B, K, S] positions that each decoding step could see, -1 = none; by group of heads.
      layout: what was run.
      chosen: [steps, B, K, S] bool, which of the positions of `read` were chosen; by group of heads, None where
        everything is read.
    """

    output: np.ndarray
    layers: Layer
    read: tuple[np.ndarray, ...]
    layout: CacheLayout
    chosen: tuple[np.ndarray, ...]

    @property
    def position(self) -> np.ndarray:
        """[steps + 1, B, K, S] in the model's order of heads; -1 = empty, or beyond the group's capacity."""
        widest = max(layer.position.shape[3] for layer in self.layers)
        parts, order = [], []
        for layer, group in zip(self.layers, self.layout.decode[-1], strict=True):
            pad = ((0, 0), (0, 0), (0, 0), (0, widest - layer.position.shape[3]))
            parts.append(np.pad(layer.position, pad, constant_values=EMPTY))
            order += group.heads or range(self.layout.kv_heads)
        return np.concatenate(parts, axis=2)[:, :, np.argsort(order)]

    def live(self, step: int, row: int, head: int) -> list[int]:
        """Ascending live positions of a head after a decoding step; step 0 = after the prompt."""
        position = self.position[step, row, head]
        return sorted(position[position >= 0].tolist())


def run(policy: Policy | CacheSpec, case: Case, *, implementation: Any = "xla", sides: Any = None) -> Run:
    """Each row's prompt, and then its own next tokens one by one, until the longest has ended.

    `sides` are those of a calibration, if the storage needs one.
    """
    layout, budgets = lowered(policy, case, implementation)
    prompts, ends = (np.asarray(x, np.int32) for x in (case.prompts, case.ends))
    width, steps = case.room
    first, decoded, layers, read, chosen = jax.tree.map(
        np.asarray,
        program(
            Streams(*map(jnp.asarray, case.streams)), prompts, ends, budgets.prompt, budgets.decode, sides,
            layout=layout, width=width, steps=steps, rope=case.rope, window=case.window,
        ),
    )  # fmt: skip
    output = np.zeros_like(case.streams.query)
    for row, (start, end) in enumerate(zip(prompts, ends, strict=True)):
        output[row, :, :start] = first[row, :, :start]
        output[row, :, start:end] = np.swapaxes(decoded[: end - start, row], 0, 1)
    return Run(output, layers, read, layout, chosen)


def policy_args(query, layout, rope):
    """The arguments of a layer for policies with parameters and scores of their own, by name.

    The input of the projections is the queries of all heads, and the projection of the output is random.
    """
    groups = [group for phase in (layout.prompt, layout.decode) for group in phase[-1]]
    batch, heads, n, dim = query.shape
    hidden = heads * dim
    sizes = ModelSizes(layout.kv_heads, heads // layout.kv_heads, dim, hidden, None if rope is None else rope.dim)
    found = {}
    if needed := distinct(each for group in groups for each in group.policy.params):
        found["params"] = parameters.of_layer(needed, sizes, len(layout.decode) - 1)
    if any(group.writes for group in groups):
        found["hidden"] = jnp.swapaxes(query, 1, 2).reshape(batch, n, hidden)
        found["out_kernel"] = jnp.asarray(out_kernel(hidden))
    return found


@functools.cache
def out_kernel(hidden):
    """The projection of the output, [H * D, E] float32."""
    return np.random.default_rng(hidden).normal(size=(hidden, hidden)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("layout", "width", "steps", "rope", "window"))
def program(streams, prompts, ends, budget, decode_budget, sides, *, layout, width, steps, rope, window):
    """Outputs of the prompts [B, H, T', D] and steps [steps, B, H, D]; `layers`, `read` and `chosen` of `Run`."""
    before, after = layout.prompt[-1], layout.decode[-1]
    rows = len(prompts)

    def one(layer, position, budget, groups):
        # [B, 1, n, 1]; padding is rubbish
        at = position[:, None, :, None]
        tokens = [
            jnp.where(at >= 0, jnp.take_along_axis(x, jnp.maximum(at, 0), axis=2), jnp.float32(RUBBISH))
            for x in streams
        ]
        block = Block(position=position, prompt=prompts, total=ends, budget=budget).of_layer(len(layout.decode) - 1)
        guess = tokens[0] if any(group.selection.ahead for group in groups) else None
        args = LayerArgs(rope=rope, window=window, guess=guess, sides=sides, **policy_args(tokens[0], layout, rope))
        return step_layer(layer, *tokens, block=block, groups=groups, args=args)

    size = layout.block or width
    starts = jnp.arange(0, width, size, dtype=jnp.int32)
    # [blocks, B, n]
    position = starts[:, None, None] + jnp.arange(size, dtype=jnp.int32)
    position = jnp.where(position < prompts[:, None], position, EMPTY)
    if layout.block is None:
        first, layer, _ = one(None, position[0], budget, before)
    else:
        *_, layer = empty_layers(layout.prompt, rows, layout.kv_heads, layout.head_dim, layout.dtype)

        def body(layer, position):
            output, layer, _ = one(layer, position, budget, before)
            return layer, output

        layer, outputs = jax.lax.scan(body, layer, position)
        # [blocks, B, H, n, D] -> [B, H, T', D]
        first = jnp.moveaxis(outputs, 0, 2).reshape(*outputs.shape[1:3], -1, outputs.shape[4])
        about = Prompt(prompts, rope, None if rope is None else rope.frequencies(ends), sides=sides)
        layer = Layer(convert(*each, about) for each in zip(layer, before, after, strict=True))

    def decode(layer, number):
        at = prompts + number
        output, layer, seen = one(layer, jnp.where(at < ends, at, EMPTY)[:, None], decode_budget, after)
        looks = zip(*((None, None) if each is None else (each.position, each.choice) for each in seen), strict=True)
        return layer, (output[:, :, 0], layer, *looks)

    _, (decoded, layers, read, chosen) = jax.lax.scan(decode, layer, jnp.arange(steps, dtype=jnp.int32))
    layers = jax.tree.map(lambda old, new: jnp.concatenate([old[None], new]), layer, layers)
    return first, decoded, layers, read, chosen
