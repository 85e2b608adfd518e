"""Computes the scores of a replay of texts, as targets for gates (KVzip, arXiv:2505.23416)."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Limits
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, layers_of
from kvjax.errors import PolicyError
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prepare
from kvjax.generation.prompt_replay import replayed
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Evict
from kvjax.policies.prompt_replay import REPLAYED

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Replayer:
    """Replays texts, and returns the scores by which a policy with a replay ranks their tokens.

    Attributes:
      config: the decoder.
      layout: the layout of a cache that holds the whole text.
    """

    config: DecoderConfig
    layout: CacheLayout

    @classmethod
    def of(cls, model: Model, policy: Evict, rows: int, width: int) -> "Replayer":
        """Returns the replayer for texts of one shape.

        Args:
          model: from `kvjax.load`.
          policy: has a replay, such as ``kvjax.policies.kvzip(0.5, plus=True)``; its budget does not matter.
          rows: B.
          width: T, the tokens of a text.

        Raises:
          PolicyError: a policy without a replay.
        """
        lengths = np.full(rows, width, np.int32)
        options = CacheOptions(implementation="xla", limits=Limits(width, 1))
        layout = prepare(model, CacheSpec(policy), lengths, lengths, width=width, options=options).layout
        if layout.replay is None:
            raise PolicyError(f"policy {policy.name} replays no prompt; give one such as kvjax.policies.kvzip(0.5).")
        return cls(model.config, layout)

    def scores(self, params: Params, tokens: Array) -> list[Array]:
        """Returns the scores of the tokens in each layer, [B, K, T] float32.

        Args:
          params: of the model.
          tokens: [B, T] int32, texts without padding.
        """
        rows, width = tokens.shape
        decoder = bind(self.config, params).looped(self.layout.runs)
        lengths = jnp.full((rows,), width, jnp.int32)
        position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
        budget = tuple(tuple(lengths for _ in groups) for groups in self.layout.prompt)
        block = Block(position=position, prompt=lengths, total=lengths, budget=budget)
        _, kv = decoder.hidden(tokens, None, block, self.layout.prompt)
        kv = arranged_state(replayed(decoder, kv, tokens, self.layout), ())
        found = []
        for _, layer in layers_of(kv):
            # [B, K, T]: the slot of each position
            slot = jnp.argsort(layer.position, axis=2)[:, :, -width:]
            found.append(cast(Array, jnp.take_along_axis(layer.stats[REPLAYED], slot, axis=2)))
        return found
