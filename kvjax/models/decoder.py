"""One decoder for all model families: pure functions of parameters, tokens and a cache (Flax Linen, used functionally).

A program has all layers one after the other, unless `kvjax.models.layer_loop` runs those that are alike as a loop,
whose weights are not stacked (a scan over stacked layers reads memory a quarter as fast on a CPU). Prompts may call a
program of one layer instead; see `kvjax.generation.layer_calls`.

The decoder does not depend on the policy: it passes unrotated queries, keys and values to `kvjax.cache.step.step`,
which returns the output of attention and the updated cache of the layer.
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
from kvjax.cache.planning.layout import Group, Phase, keep_everything
from kvjax.cache.shared_prefix import SharedPrefix
from kvjax.cache.state import Block, KVState
from kvjax.cache.state import Layer as LayerCache
from kvjax.cache.step.interface import AttentionOperands, LayerArgs
from kvjax.cache.step.step import step_layer
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.experts import Experts
from kvjax.models.layer_loop import run_loop
from kvjax.models.layers import Embed, Linear, Mlp, Norm, PositionEmbed
from kvjax.models.output_gram import output_gram
from kvjax.numerics.soft_cap import soft_capped
from kvjax.parallel import host_memory, sharding
from kvjax.parallel.sharding import Params
from kvjax.products import as_matrix
from kvjax.typing import PyTree

Array = jax.Array

SKEW = "skew"  # optional parameter of an attention, [K, D, D]; see `kvjax.models.skew`
SIDES = "sides"  # optional parameters of an attention, {"key": {part: [K, ...]}, "value": ...}; see `kvjax.calibrate`
RUNS = "runs"  # optional collection of variables, index of a layer -> `kvjax.models.layer_loop.RunParams`
PROJECTED = "projected"  # optional collection, index of a layer -> its queries, keys and values
CHOICES = "choices"  # optional collection, index of a layer -> `Choice` of each group of heads
SEEN = "seen"  # optional collection, index of a layer -> the operands of attention by group of heads, and `Streams`
POLICY = "policy"  # optional parameters of an attention, {name of `Parameters`: {part: [K or 1, ...]}}
SHIFT = "shift"  # optional parameters of an attention, added to {"key": [B, K, n, D], "value": ...}, for gradients
#: Optional parameter of an attention that replaces its output: `models.gates.Gates`, `models.nested.Nested`, or
#: `kvjax.training.GatedAttention`.
GATES = "gates"


class Streams(NamedTuple):
    """The inputs and outputs of a layer and of its attention, for `kvjax.analysis`; all [B, n, hidden].

    Attributes:
      block_input: the residual stream that enters the layer.
      attention_input: what is multiplied by the projections of queries, keys and values.
      attention_output: what attention adds to the residual stream.
      mlp_output: what the MLP adds to it.
    """

    block_input: Array
    attention_input: Array
    attention_output: Array
    mlp_output: Array


class LayerOutput(NamedTuple):
    """The result of a layer, or of its attention.

    Attributes:
      x: [B, n, hidden].
      cache: the layer's updated cache.
      seen: per group of heads, the operands of attention, for `kvjax.analysis`.
      entered: [B, n, hidden], the input of attention.
      projected: the query [B, H, n, D], the key [B, K, n, D] and the value [B, K, n, D], not rotated.
      streams: inputs and outputs of the layer's parts; None from `Attention`.
    """

    x: Array
    cache: LayerCache
    seen: tuple[AttentionOperands | None, ...]
    entered: Array
    projected: tuple[Array, Array, Array]
    streams: Streams | None = None


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


def attention_args(config: DecoderConfig, kind: LayerKind, params: Params, guess: Array | None = None) -> LayerArgs:
    """Returns the arguments of an attention's steps besides queries, keys and values.

    Args:
      config: the decoder.
      kind: the settings in which the layer may differ from others.
      params: the parameters of the attention, of which only optional ones are used.
      guess: see `LayerArgs`.
    """
    return LayerArgs(
        rope=kind.rope, scale=config.attention_scale, soft_cap=config.attention_soft_cap, window=kind.window,
        guess=guess, skew=params.get(SKEW), sides=params.get(SIDES), params=params.get(POLICY),
    )  # fmt: skip


class Attention(nn.Module):
    """Self-attention over the cache of one layer.

    Attributes:
      config: the decoder.
      kind: what the layer has of its own.
      dtype: of the parameters.
    """

    config: DecoderConfig
    kind: LayerKind
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, layer: LayerCache | None, block: Block, groups: tuple[Group, ...], hint: Array | None = None
    ) -> LayerOutput:
        """Attends to the cache, which is updated with the tokens of the block.

        Args:
          x: [B, n, hidden], normalised.
          layer: the layer's cache so far; None if the block is the whole prompt.
          block: positions and budgets of the tokens, of this layer.
          groups: the layer's groups of heads.
          hint: [B, n, hidden], the input of the attention of the layer before, from which selections that look ahead
            guess the query; None if none does.

        Returns:
          The output, [B, n, hidden], the updated cache and the operands of attention.
        """
        config = self.config
        batch, n, _ = x.shape

        def projection(name: str, count: int, norm: str | None = None) -> Callable[[Array], Array]:
            linear = Linear(count * config.head_dim, config.qkv_bias, self.dtype, name=name)
            joint, of_each = config.qk_norm_form == "joint", count if config.qk_norm_form == "per_head" else None
            normalised = Norm(config, self.dtype, of_each, name=norm) if norm and config.qk_norm else None

            def heads(x: Array) -> Array:
                # [B, n, heads * D]
                y = linear(x)
                # Without this barrier before the reshape, XLA's TPU compiler keeps a transposed copy of the kernel.
                y = jax.lax.platform_dependent(y, tpu=jax.lax.optimization_barrier, default=lambda y: y)
                y = sharding.constrain_heads(y, count)
                y = normalised(y) if normalised is not None and joint else y
                # [B, n, heads, D]
                y = y.reshape(batch, n, count, config.head_dim)
                y = normalised(y) if normalised is not None and not joint else y
                # [B, heads, n, D]
                return jnp.swapaxes(y, 1, 2)

            return heads

        optional: Params = {
            name: self.get_variable("params", name)
            for name in (SKEW, SIDES, POLICY, SHIFT, GATES)
            if self.has_variable("params", name)
        }
        to_query = projection("query", config.num_heads, "query_norm")
        # [B, H, n, D]
        query = to_query(x)
        # [B, K, n, D]
        key = projection("key", config.num_kv_heads, "key_norm")(x)
        value = projection("value", config.num_kv_heads)(x)
        if (shift := optional.get(SHIFT)) is not None:
            key, value = key + shift["key"], value + shift["value"]
        args = attention_args(config, self.kind, optional, None if hint is None else to_query(hint))
        if any(group.replaying and group.replay is not None and group.replay.output_norm for group in groups):
            gram = output_gram(self.get_variable("params", "out")["kernel"], config.num_heads)
            # [B, n]
            norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=2))
            args = args._replace(output_gram=gram, hidden_norm=norm)
        if writes := [score for group in groups for score in group.writes]:
            args = args._replace(hidden=x)
            if any(score.projects for score in writes) and not self.is_initializing():
                args = args._replace(out_kernel=as_matrix(self.variables["params"]["out"]["kernel"]))
        output, after, seen = step_layer(layer, query, key, value, block=block, groups=groups, args=args)
        if layer is None and (gates := optional.get(GATES)) is not None:
            output = gates.blend(output, query, key, value, block, args._replace(hidden=x))
        # [B, n, H * D]
        output = jnp.swapaxes(output, 1, 2).reshape(batch, n, config.num_heads * config.head_dim)
        output = sharding.constrain_heads(output, config.num_heads, enters=True)
        # [B, n, hidden]
        output = Linear(config.hidden_size, config.out_bias, self.dtype, name="out")(output)
        return LayerOutput(output, after, seen, x, (query, key, value))


class Layer(nn.Module):
    """One layer: attention and MLP with their norms and residual connections.

    Attributes:
      config: the decoder.
      kind: what the layer has of its own.
      dtype: of the parameters.
    """

    config: DecoderConfig
    kind: LayerKind
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, layer: LayerCache | None, block: Block, groups: tuple[Group, ...], hint: Array | None = None
    ) -> LayerOutput:
        """Returns the residual stream [B, n, hidden] after the layer, and more; see `Attention`."""
        config = self.config
        attention = Attention(config, self.kind, self.dtype, name="attention")
        mlp = (Experts if config.num_experts else Mlp)(config, self.dtype, name="mlp")
        norm = functools.partial(Norm, config, self.dtype)
        # [B, n, hidden] all
        before = x
        if config.norm_position == "post":
            output = attention(x, layer, block, groups, hint)
            x = norm(name="attention_norm")(x + output.x)
            added = mlp(x)
            x = norm(name="mlp_norm")(x + added)
            return output._replace(x=x, streams=Streams(before, output.entered, output.x, added))

        def entering(x: Array, name: str) -> Array:
            return x if config.norm_position == "output" else norm(name=name)(x)

        def leaving(x: Array, name: str) -> Array:
            x = x if config.norm_position == "pre" else norm(name=name)(x)
            return x if config.residual_scale == 1 else x * jnp.asarray(config.residual_scale, x.dtype)

        entered = entering(x, "attention_norm")
        output = attention(entered, layer, block, groups, hint)
        first = leaving(output.x, "attention_out_norm")
        if config.shared_norm:
            added = mlp(entered)
        else:
            added = mlp(entering(x if config.parallel_residual else x + first, "mlp_norm"))
        added = leaving(added, "mlp_out_norm")
        return output._replace(x=x + first + added, streams=Streams(before, output.entered, first, added))


@functools.partial(jax.jit, static_argnames=("config", "kind", "dtype", "groups"))
def run_layer(
    params: Params,
    x: Array,
    layer: LayerCache | None,
    block: Block,
    hint: Array | None,
    *,
    config: DecoderConfig,
    kind: LayerKind,
    dtype: DTypeLike,
    groups: tuple[Group, ...],
) -> LayerOutput:
    """Runs one layer; see `Layer`.

    A jitted function inside of a jitted loop is traced and lowered once for all layers that are alike, and inlined by
    the compiler: the first call of OPT-125M's shape takes 0.7 times as long, and 0.6 times with compiled programs kept.
    """
    module = Layer(config, kind, dtype, parent=None)
    # Weights in host memory are on the device while their layer runs.
    return cast(LayerOutput, module.apply({"params": host_memory.to_device(params)}, x, layer, block, groups, hint))


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
                run_layer, params = self._run_layer(index, phase), self.variables["params"]
                collect = self._collect if self._wanted() else None
                looped = run_loop(
                    run_layer, run, x, hint, stack, block, params, phase[index], collect,
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
