"""Shares of work that hide behind a transfer: CacheBlend's recomputed tokens, and MEMO's activations in host memory."""

from typing import NamedTuple

from kvjax.errors import InputError

LEAST_RATIO = 0.15  # of tokens, below which the answers of CacheBlend suffer (arXiv:2405.16444, figure 16)


class BlendPlan(NamedTuple):
    """How much of chunks can be recomputed while their caches are loaded.

    Attributes:
      ratio: the share of tokens.
      ttft: seconds to the first token.
    """

    ratio: float
    ttft: float


def plan_blend(layers: int, *, load: float, prefill: float, check: int = 1) -> BlendPlan:
    """Returns the share of tokens whose recomputation hides behind the loading of the next layer (CacheBlend).

    Args:
      layers: of the model.
      load: seconds to load the cache of a layer.
      prefill: seconds to compute a layer of all tokens.
      check: see `kvjax.reuse.blend`.

    Raises:
      InputError: a number that is not valid.
    """
    if not 1 <= check < layers or load < 0 or prefill <= 0:
        raise InputError(
            f"check must be a layer from 1 to {layers - 1}, and load and prefill seconds; got check={check}, "
            f"load={load}, prefill={prefill}."
        )
    ratio = min(1.0, max(LEAST_RATIO, load / prefill))
    return BlendPlan(ratio, (check + 1) * prefill + (layers - check - 1) * max(load, ratio * prefill))


def host_share(
    *, link_rate: float, layer_time: float, bytes_per_token: int, tokens: int, layers: int, host_memory: float
) -> float:
    """Returns the share of tokens whose activations move to the host while a layer computes (MEMO, arXiv:2407.12117).

    Those of the others are recomputed in the backward pass.

    Args:
      link_rate: bytes/s to host memory.
      layer_time: seconds of a layer's forward pass.
      bytes_per_token: bytes of activations of a token and layer.
      tokens: of the batch.
      layers: of the model.
      host_memory: bytes.
    """
    per_layer = bytes_per_token * tokens
    return min(1.0, link_rate * layer_time / per_layer, host_memory / (layers * per_layer))
