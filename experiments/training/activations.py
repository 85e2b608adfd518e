"""The results of layers between the forward and the backward pass: kept, recomputed, or held in host memory (MEMO).

MEMO (arXiv:2407.12117) moves the results of a share of the tokens to the host while the next layer computes, and
recomputes the others. Here the share is of the layers, spread evenly over the depth: the link moves as many bytes per
layer. What moves are the outputs of projections, which take nearly all FLOPs; norms, rotations, activation functions
and attention are computed again. The input of each layer stays on the device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from kvjax.cache.planning.layout import Group, keep_everything
from kvjax.cache.state import Block
from kvjax.devices import Device
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.decoder import Decoder
from kvjax.models.decoder_layer import run_layer
from kvjax.models.parameters import parameter_shapes
from kvjax.models.stacked_params import unstacked
from kvjax.parallel import host_memory, sharding
from kvjax.parallel.host_memory import DEVICE, PINNED
from kvjax.parallel.sharding import Params
from kvjax.planning.offload_shares import host_share
from kvjax.planning.served_model import ServedModel

Array = jax.Array
Apply = Callable[[dict[str, Any], Array], tuple[Array, Any]]


def moved_layers(layers: int, share: float) -> list[bool]:
    """Returns whether each layer is among the ⌊share · layers⌋ whose results move to the host, spread evenly."""
    return [int((index + 1) * share + 1e-9) > int(index * share + 1e-9) for index in range(layers)]


def forward(config: DecoderConfig, activations: str, share: float = 1.0) -> Apply:
    """Returns a function like ``Decoder(config).apply``, of variables and tokens [B, n], of the same gradients.

    Args:
      config: the decoder.
      activations: ``keep``, ``recompute`` or ``offload``.
      share: of the layers whose results move to the host under ``offload``; the others are recomputed.
    """
    if activations == "keep":
        return Decoder(config).apply
    moves = moved_layers(config.num_layers, share if activations == "offload" else 0.0)
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(DEVICE, PINNED)

    def apply(variables: dict[str, Any], tokens: Array) -> tuple[Array, None]:
        params, (batch, n) = variables["params"], tokens.shape
        decoder = Decoder(config)
        # [B, n]
        position = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
        # [B]
        length = jnp.full((batch,), n, jnp.int32)
        phase = keep_everything(config.num_layers)
        block = Block(position=position, prompt=length, total=length, budget=((None,),) * config.num_layers)
        # [B, n, hidden]
        x = cast(Array, decoder.apply({"params": unstacked(params)}, tokens, block, method="enter"))
        for index, offloads in enumerate(moves):
            x = sharding.constrain(x, ("batch", None, None))
            layer = functools.partial(_layer, config=config, kind=config.kind(index), groups=phase[index])
            x = jax.checkpoint(layer, policy=policy if offloads else None)(
                params[f"layer_{index}"], x, block.of_layer(index)
            )
        hidden = decoder.apply({"params": unstacked(params)}, x, method="leave")
        return cast(Array, decoder.apply({"params": unstacked(params)}, hidden, method="logits")), None

    return apply


def _layer(
    params: Params, x: Array, block: Block, *, config: DecoderConfig, kind: LayerKind, groups: tuple[Group, ...]
) -> Array:
    """Returns the residual stream [B, n, hidden] after a layer."""
    return run_layer(params, x, None, block, None, config=config, kind=kind, dtype=jnp.float32, groups=groups).x


def check_devices(activations: str, devices: Sequence[jax.Device]) -> None:
    """Refuses to offload where a device reads no host memory by itself.

    Raises:
      ConfigError: with the memories of the device.
    """
    kinds = sorted(memory.kind for memory in devices[0].addressable_memories())
    if activations == "offload" and PINNED not in kinds:
        raise ConfigError(
            f"activations=offload needs a device that reads {PINNED} memory; {devices[0].device_kind} has "
            f"{', '.join(kinds) or 'none'}. Give activations=recompute, or keep."
        )


def activation_bytes(config: DecoderConfig) -> int:
    """Returns the bytes that a token moves to the host in a layer under ``offload``, in float32, read from a trace."""
    one, tokens = config.one_layer(), jax.ShapeDtypeStruct((1, 16), jnp.int32)

    def residuals(params: Params, tokens: Array) -> list[Array]:
        return jax.tree.leaves(
            jax.vjp(lambda params: forward(one, "offload")({"params": params}, tokens)[0], params)[1]
        )

    made = jax.make_jaxpr(residuals)(parameter_shapes(one), tokens).out_avals
    moved = sum(
        math.prod(each.shape) * each.dtype.itemsize for each in made if each.memory_space == host_memory.Space.Host
    )
    return moved // tokens.size


def recommended_share(
    config: DecoderConfig, device: Device, *, rows: int, tokens: int, host_bytes: float, width: int = 4
) -> float | None:
    """Returns the share of layers that moves for nothing, by MEMO's formula.

    A layer's forward pass is planned at the full speed of the device: where it takes longer, more can move.

    Args:
      config: the decoder.
      device: that trains.
      rows: of a batch, on each device.
      tokens: of a row.
      host_bytes: of host memory, for each device.
      width: bytes of a number of activations.

    Returns:
      The share, or None where the speed of the device or of its link is unknown.
    """
    if not device.flops or not device.link:
        return None
    layer_time = rows * ServedModel.of(config).prefill_flops(tokens) / config.num_layers / device.flops
    return host_share(
        link_rate=device.link, layer_time=layer_time, bytes_per_token=activation_bytes(config) * width // 4,
        tokens=rows * tokens, layers=config.num_layers, host_memory=host_bytes,
    )  # fmt: skip
