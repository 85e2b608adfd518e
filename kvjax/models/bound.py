"""A decoder with its parameters, and the scores of tokens under its logits."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from kvjax.cache.layer_stack import LayerRuns, stacked_runs
from kvjax.cache.planning.layout import Phase
from kvjax.cache.state import Block, KVState
from kvjax.cache.step.interface import AttentionOperands
from kvjax.models import layer_loop
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import CHOICES, PROJECTED, RUNS, SEEN, Choice, Decoder
from kvjax.models.decoder_layer import Streams
from kvjax.models.stacked_params import LAYER, StackedParams
from kvjax.parallel.sharding import Params, PyTree

Array = jax.Array
SCORE_ROWS = 512  # tokens per row whose logits exist at the same time when scoring


class BoundDecoder(NamedTuple):
    """A decoder with its parameters, for use in jitted loops.

    Attributes:
      config: the decoder.
      params: its parameters.
      run_params: the parameters of the layers that run as loops; see `looped`.
    """

    config: DecoderConfig
    params: Params
    run_params: tuple[layer_loop.RunParams, ...] = ()

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of parameters and cache."""
        return jnp.dtype(self.params["embed"]["tokens"].dtype)

    @property
    def runs(self) -> LayerRuns:
        """The layers that run as loops."""
        return tuple(own.run for own in self.run_params)

    def looped(self, runs: LayerRuns) -> "BoundDecoder":
        """Returns the decoder that runs some layers as loops, whose caches are in stacks.

        Args:
          runs: of the layout, or those of a state that is to be decoded; see `kvjax.cache.layer_stack.runs_of`.
        """
        return self._replace(run_params=tuple(layer_loop.run_params(self.params, run) for run in runs))

    def runs_now(self, state: KVState, phase: Phase) -> LayerRuns:
        """Returns the runs of a state if they may run as loops here and now, or none; see `layer_loop.runs_now`."""
        return layer_loop.runs_now(stacked_runs(state.layers), self.config, self.params, phase)

    def hidden(self, tokens: Array, state: KVState | None, block: Block, phase: Phase) -> tuple[Array, KVState]:
        """Runs tokens [B, n] through all layers: hidden states [B, n, E] and the state."""
        return cast(tuple[Array, KVState], self._apply("hidden", tokens, state, block, phase))

    def stream(self, tokens: Array, state: KVState | None, block: Block, phase: Phase) -> tuple[Array, KVState]:
        """Returns the output of the last layer before the final norm, [B, n, hidden], and the state; see `hidden`."""
        return cast(tuple[Array, KVState], self._apply("stream", tokens, state, block, phase))

    def step(
        self, tokens: Array, state: KVState, block: Block, phase: Phase
    ) -> tuple[Array, KVState, dict[int, tuple[Choice, ...]]]:
        """Does what `hidden` does, and returns what was read.

        Returns:
          Hidden states and the state; and the slots that were read of the cache of each group of heads, by the index of
          a layer. Those of layers that run as a loop are at the index of the first one, leaves [L, B, K, S].
        """
        (x, state), sown = self._apply("hidden", tokens, state, block, phase, mutable=CHOICES)
        return x, state, {int(index): values for index, (values,) in sown[CHOICES].items()}

    def observed(
        self, tokens: Array, state: KVState, block: Block, phase: Phase
    ) -> tuple[Array, KVState, dict[int, tuple[AttentionOperands, ...]]]:
        """Does what `hidden` does, and returns the operands of attention as well, see `seen`."""
        (x, state), sown = self._apply("hidden", tokens, state, block, phase, mutable=SEEN)
        return x, state, {int(index): values[0] for index, (values,) in sown[SEEN].items()}

    def seen(
        self, tokens: Array, state: KVState, block: Block, phase: Phase
    ) -> tuple[KVState, dict[int, tuple[tuple[AttentionOperands, ...], Streams]]]:
        """Does what `hidden` does, for `kvjax.analysis`.

        Returns:
          The state; and the operands of attention of each group of heads, and inputs and outputs, by the index of a
          layer. Those of layers that run as loops are at the index of the first one, leaves [L, ...].
        """
        (_, state), sown = self._apply("hidden", tokens, state, block, phase, mutable=SEEN)
        return state, {int(index): values for index, (values,) in sown[SEEN].items()}

    def projected(self, tokens: Array, block: Block, phase: Phase) -> tuple[Array, dict[int, tuple[Array, ...]]]:
        """Runs whole prompts [B, n] through all layers.

        Returns:
          Hidden states [B, n, E]; and the queries, keys and values by the index of a layer. Those of layers that run as
          a loop are at the index of the first one, [L, B, heads, n, D].
        """
        (x, _), sown = self._apply("hidden", tokens, None, block, phase, mutable=PROJECTED)
        return x, {int(index): values for index, (values,) in sown[PROJECTED].items()}

    def enter(self, tokens: Array, block: Block) -> Array:
        """Returns what enters the first layer, [B, n, hidden], for tokens [B, n]."""
        return cast(Array, self._apply("enter", tokens, block))

    def leave(self, x: Array) -> Array:
        """Returns the input of the output head, [..., E], for what leaves the last layer, [..., hidden]."""
        return cast(Array, self._apply("leave", x))

    def logits(self, hidden: Array) -> Array:
        """Hidden states [..., E] -> [..., V] float32."""
        return cast(Array, self._apply("logits", hidden))

    def _apply(self, method: str, *arguments: Any, **options: Any) -> Any:
        params = self.params
        if isinstance(params, StackedParams):
            # Flax takes no other mapping than a dict. Slices of layers that loop are not needed.
            looped = {f"{LAYER}{index}" for run in self.runs for index in run.layers}
            params = {name: params[name] for name in params if name not in looped}
        variables = {"params": params, RUNS: {str(own.run.start): own for own in self.run_params}}
        return Decoder(self.config, self.dtype).apply(variables, *arguments, method=method, **options)


def bind(config: DecoderConfig, params: Params) -> BoundDecoder:
    """Returns the decoder with its parameters.

    Args:
      config: the decoder.
      params: its parameters.
    """
    return BoundDecoder(config, params)


def logprobs_of(decoder: BoundDecoder, hidden: Array, targets: Array) -> Array:
    """Computes the log-probability of a token at each position, with the logits of `SCORE_ROWS` positions at a time.

    Args:
      decoder: the decoder.
      hidden: [B, n, E].
      targets: [B, n] int32.

    Returns:
      [B, n] float32, log p(target).
    """
    return over_logits(decoder, hidden, targets, logprob_of)


def logprob_of(logits: Array, target: Array) -> Array:
    """The log-probability of tokens [...] int32 under logits [..., V] float32: [...] float32."""
    # [...]
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def over_logits(
    decoder: BoundDecoder, hidden: Array, targets: Array, function: Callable[[Array, Array], PyTree]
) -> PyTree:
    """Applies a function to the logits of each position, which exist for `SCORE_ROWS` positions at a time.

    Args:
      decoder: the decoder.
      hidden: [B, n, E].
      targets: [B, n] int32.
      function: (logits [B, m, V] float32, targets [B, m]) -> a tree of arrays [B, m].

    Returns:
      The tree, with arrays [B, n].
    """

    def score(x: Array, target: Array) -> PyTree:
        return function(decoder.logits(x), target)

    n = hidden.shape[1]
    if n <= SCORE_ROWS:
        return score(hidden, targets)
    parts = -(-n // SCORE_ROWS)
    pad = parts * SCORE_ROWS - n
    # [parts, B, SCORE_ROWS, E]
    x = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(hidden.shape[0], parts, SCORE_ROWS, -1).swapaxes(0, 1)
    # [parts, B, SCORE_ROWS]
    y = jnp.pad(targets, ((0, 0), (0, pad))).reshape(hidden.shape[0], parts, SCORE_ROWS).swapaxes(0, 1)
    scores = jax.lax.map(lambda xy: score(*xy), (x, y))
    # [B, n]
    return jax.tree.map(lambda each: each.swapaxes(0, 1).reshape(hidden.shape[0], -1)[:, :n], scores)
