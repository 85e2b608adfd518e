"""One decoder for all model families: pure functions of parameters, tokens and a cache (Flax Linen, used functionally).

A program has all layers one after the other, unless `kvjax.models.layer_loop` runs those that are alike as a loop,
whose weights are not stacked (a scan over stacked layers reads memory a quarter as fast on a CPU). Prompts may call a
program of one layer instead; see `kvjax.generation.layer_calls`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from kvjax.cache import shared_layers, shared_prefix
from kvjax.cache.layer_stack import LayerStack, arranged, entries_of, sequence_of, stacked_runs
from kvjax.cache.planning.layout import Phase, keep_everything
from kvjax.cache.shared_prefix import SharedPrefix
from kvjax.cache.state import Block, KVState
from kvjax.cache.state import Layer as LayerCache
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import Layer, LayerOutput, run_layer
from kvjax.models.layer_loop import run_loop
from kvjax.models.layers import Embed, Linear, Norm, PositionEmbed
from kvjax.numerics.soft_cap import soft_capped
from kvjax.parallel import host_memory, sharding
from kvjax.typing import PyTree

Array = jax.Array

RUNS = "runs"  # optional collection of variables, index of a layer -> `kvjax.models.layer_loop.RunParams`
PROJECTED = "projected"  # optional collection, index of a layer -> its queries, keys and values
CHOICES = "choices"  # optional collection, index of a layer -> `Choice` of each group of heads
SEEN = "seen"  # optional collection, index of a layer -> the operands of attention by group of heads, and `Streams`


class Choice(NamedTuple):
    """The slots that a step reads of the cache of a group of heads; see `AttentionOperands`.

    Attributes:
      position: [B, K, S] int32.
      held: [B, K, S] int32.
      choice: [B, K, S] bool, or None.
    """

    position: Array
    held: Array
    choice: Array | None


def _choices(output: LayerOutput) -> tuple[Choice, ...]:
    return tuple(Choice(each.position, each.held, each.choice) for each in output.seen if each is not None)


#: Name of a collection of variables -> its values for a layer, from the output of the layer.
COLLECTED: dict[str, Callable[[LayerOutput], PyTree]] = {
    PROJECTED: lambda output: output.projected,
    CHOICES: _choices,
    SEEN: lambda output: (output.seen, output.streams),
}


class Decoder(nn.Module):
    """A causal language model.

    ``decoder.apply({"params": params}, tokens, kv, block, phase)`` returns the logits and the updated cache. Callers
    that need the logits of only a few tokens can call the methods `hidden` and `logits` one after the other.

    Attributes:
      config: the decoder.
      dtype: of the parameters.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.embed = Embed(config, dtype)
        if config.learned_positions:
            self.position_embed = PositionEmbed(config, dtype)
        if config.embed_size != config.hidden_size:
            self.embed_in = Linear(config.hidden_size, False, dtype)
            self.embed_out = Linear(config.embed_size, False, dtype)
        self.layers = [Layer(config, config.kind(i), dtype, name=f"layer_{i}") for i in range(config.num_layers)]
        if config.final_norm:
            self.final_norm = Norm(config, dtype)
        if not config.tie_embeddings:
            self.head = Linear(config.vocab_size, config.head_bias, dtype)

    def __call__(
        self, tokens: Array, kv: KVState | None = None, block: Block | None = None, phase: Phase | None = None
    ) -> tuple[Array, KVState]:
        """Computes the logits of every token.

        Args:
          tokens: [B, n] int32; or [B, n, embed], what takes the place of the embeddings of tokens.
          kv: the cache so far; None if the tokens are the whole prompt.
          block: positions and budgets; None if every token is real.
          phase: the groups of each layer, from a `kvjax.cache.CacheLayout`; None if the tokens are the whole prompt and
            every token is kept.

        Returns:
          The logits, [B, n, V] float32, and the updated cache.
        """
        # [B, n, embed]
        hidden, kv = self.hidden(tokens, kv, block, phase)
        return self.logits(hidden), kv

    def hidden(
        self, tokens: Array, kv: KVState | None = None, block: Block | None = None, phase: Phase | None = None
    ) -> tuple[Array, KVState]:
        """Computes the last hidden states of every token.

        Args:
          tokens: see `__call__`.
          kv: see `__call__`.
          block: see `__call__`.
          phase: see `__call__`.

        Returns:
          The input of the output head, [B, n, embed], and the updated cache.
        """
        x, kv = self.stream(tokens, kv, block, phase)
        return self.leave(x), kv

    def stream(
        self, tokens: Array, kv: KVState | None = None, block: Block | None = None, phase: Phase | None = None
    ) -> tuple[Array, KVState]:
        """Computes the residual stream after the last layer; for the arguments see `__call__`.

        Returns:
          The residual stream, [B, n, hidden], which `leave` takes, and the updated cache.
        """
        config = self.config
        phase = keep_everything(config.num_layers) if phase is None else phase
        if block is None:
            batch, n = tokens.shape[:2]
            # [B, n]
            position = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
            # [B]
            row = jnp.full((batch,), n, jnp.int32)
            block = Block(position=position, prompt=row, total=row, budget=((None,),) * config.num_layers)
        # [B, n, hidden]
        x = self.enter(tokens, block)
        after: list[LayerCache | LayerStack] = []
        entered: Array | None = None
        before = x
        runs = {int(start): own for start, own in self.variables.get(RUNS, {}).items()}
        # A caller that does not know of loops may have a state of one that does.
        stacked = () if kv is None else stacked_runs(kv.layers)
        layer_runs = tuple(own.run for own in runs.values())
        entries = () if kv is None else entries_of(arranged(kv.layers, layer_runs))
        shared: SharedPrefix | None = self.variables.get("params", {}).get(shared_prefix.PARAM)
        prefixes = None if shared is None else shared.entries(layer_runs)
        index = 0
        while index < config.num_layers:
            x = sharding.constrain(x, ("batch", None, None))
            looks_ahead = x.shape[1] == 1 and any(group.selection.ahead for group in phase[index])
            hint: Array | None = entered if looks_ahead else None
            if (run := runs.get(index)) is not None:
                stack = None if kv is None else cast(LayerStack, entries[len(after)])
                run_layer = self._run_layer(index, phase)
                collect = self._collect if self._wanted() else None
                looped = run_loop(
                    run_layer, run, x, hint, stack, block, phase[index], collect,
                    None if prefixes is None else prefixes[len(after)],
                )  # fmt: skip
                self._sow(index, looped.collected)
                after.append(looped.cache)
                before, x, entered, index = x, looped.x, looped.entered, run.run.stop
                continue
            arguments = (
                x,
                None if kv is None else shared_layers.borrow(entries, len(after), phase[index]),
                block.of_layer(index, None if prefixes is None else prefixes[len(after)]),
            )
            if self.is_initializing():
                output = self.layers[index](*arguments, phase[index], hint)
            else:
                # What is in host memory is moved for a layer while the layer before it runs.
                params, held = host_memory.after((self.variables["params"][f"layer_{index}"], arguments[1]), before)
                before = x
                output = self._run_layer(index, phase)(params, x, held, arguments[2], hint)
            # Flax discards these unless the caller makes "intermediates" mutable. Layers that loop have none.
            self.sow("intermediates", f"attention_{index}", output.seen)
            self.sow("intermediates", f"streams_{index}", output.streams)
            self._sow(index, self._collect(output))
            made = output.cache
            if kv is not None:
                made = shared_layers.release(made, cast(LayerCache, entries[len(after)]), phase[index])
            after.append(made)
            x, entered = output.x, output.entered
            index += 1
        # [B]
        added = jnp.sum(block.position >= 0, axis=1, dtype=jnp.int32)
        length = added if kv is None else kv.length + added
        layers = sequence_of(after) if kv is None else arranged(sequence_of(after), stacked)
        return x, KVState(layers, length, prompt=block.prompt, total=block.total, budget=block.budget)

    def _wanted(self) -> list[str]:
        """Returns the collections that the caller wants of layers."""
        # `init` makes every collection mutable.
        return [] if self.is_initializing() else [name for name in COLLECTED if self.is_mutable_collection(name)]

    def _collect(self, output: LayerOutput) -> dict[str, PyTree]:
        """Returns what the caller wants of the output of a layer, by the name of its collection."""
        return {name: COLLECTED[name](output) for name in self._wanted()}

    def _sow(self, index: int, collected: dict[str, PyTree] | None) -> None:
        """Stores the values of the layer of an index, or of the loop that begins there, in their collections."""
        for name, values in (collected or {}).items():
            self.sow(name, str(index), values)

    def _run_layer(self, index: int, phase: Phase) -> Callable[..., LayerOutput]:
        """Returns `run_layer` for the layer of an index."""
        return functools.partial(
            run_layer, config=self.config, kind=self.config.kind(index), dtype=self.dtype, groups=phase[index]
        )  # fmt: skip

    def enter(self, tokens: Array, block: Block) -> Array:
        """Embeds tokens [B, n] int32, unless they are embeddings [B, n, embed]: what enters the first layer."""
        # [B, n, embed]
        x = tokens if jnp.issubdtype(tokens.dtype, jnp.floating) else self.embed(tokens)
        if x.shape[1] > 1:
            # What stands in padding may overflow, and 0 times infinity would be NaN in the row's own tokens. It is not
            # replaced by 0, where a norm has no gradient.
            x = jnp.where((block.position >= 0)[..., None], x, jnp.clip(x, -1, 1))
        if self.config.embed_size != self.config.hidden_size:
            # [B, n, hidden]
            x = self.embed_in(x)
        return x + self.position_embed(block.position) if self.config.learned_positions else x

    def leave(self, x: Array) -> Array:
        """Returns the input of the output head, [B, n, embed], for what leaves the last layer, [B, n, hidden]."""
        if self.config.final_norm:
            x = self.final_norm(x)
        # [B, n, embed]
        return self.embed_out(x) if self.config.embed_size != self.config.hidden_size else x

    def logits(self, hidden: Array) -> Array:
        """Applies the output head.

        Args:
          hidden: [..., embed].

        Returns:
          [..., V] float32.
        """
        config = self.config
        # [..., V]
        output = self.embed.attend(hidden) if config.tie_embeddings else self.head(hidden)
        logits: Array = output.astype(jnp.float32)
        logits = logits if config.logit_scale == 1 else logits * config.logit_scale
        return soft_capped(logits, config.logit_soft_cap)
