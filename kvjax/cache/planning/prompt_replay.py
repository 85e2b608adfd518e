"""Checks that policies, storages and devices allow a replay of the prompt."""

from collections.abc import Sequence

import numpy as np

from kvjax.cache.arrangements import arrangement_of
from kvjax.cache.planning.head_groups import Branch
from kvjax.cache.planning.limits import Sizes
from kvjax.errors import PolicyError
from kvjax.models.config import DecoderConfig
from kvjax.parallel import sharding
from kvjax.policies.prompt_replay import Replay
from kvjax.products import on_mesh
from kvjax.storage.base import Storage
from kvjax.storage.side import PROMPT


def replay_of(branches: Sequence[Branch], config: DecoderConfig, sizes: Sizes, lengths: np.ndarray) -> Replay | None:
    """Returns how prompts are replayed; None if no policy wants it.

    Args:
      branches: the policies of all heads.
      config: the decoder.
      sizes: the lengths that arrays are allocated for.
      lengths: [B] tokens of each row's prompt.

    Raises:
      PolicyError: policies of layers that cannot be combined, a model without the positions or tokens of the replay, or
        a mesh that divides slots, or any mesh where the replay takes a gradient.
    """
    names = {branch.prompt.replay: branch.prompt.name for branch in branches if branch.prompt.replay is not None}
    if not names:
        return None
    (replay, name), *others = names.items()
    about = f"policy {name}: it replays the prompt"
    if others:
        raise PolicyError(
            f"{about}, and {others[0][1]} of other layers in another way; give all layers the same replay."
        )
    for branch in branches if sizes.block is not None else ():
        if branch.prompt.budget is not None and branch.prompt.when == "step":
            raise PolicyError(
                f"{about}, which all layers hold until then, but {branch.prompt.name} evicts after each block of it; "
                "leave out prefill_block, or use compressors such as snapkv for the other layers."
            )
    axes, _ = sharding.left_over("slots", config.num_kv_heads)
    if axes or (replay.by == "gradient" and on_mesh()):
        where = "a mesh" if replay.by == "gradient" else f"a mesh that divides slots over {'+'.join(axes)}"
        raise PolicyError(
            f"{about}, which is not supported on {where}; load the model without a mesh, or under kvzip with axes data "
            "and model that divide its rows and KV heads."
        )
    if replay.highest() >= config.vocab_size:
        raise PolicyError(
            f"{about} after an instruction with the token {replay.highest()}, but this model has {config.vocab_size} "
            "tokens; encode the instruction with its own tokenizer."
        )
    needed = int(lengths.max()) + replay.width(sizes.prompt)
    if config.learned_positions and needed > config.max_positions:
        raise PolicyError(
            f"{about} at the positions that follow it, up to {needed}, but this model's learned position table ends at "
            f"{config.max_positions} tokens; shorten the prompt or the chunk."
        )
    return replay


def refuses_replay(storage: Storage, branch: Branch, sizes: Sizes) -> str | None:
    """Returns why a storage cannot hold a prompt that is replayed before it is compressed; None if it can.

    Args:
      storage: the storage of the heads.
      branch: their policies.
      sizes: the lengths of the batch.
    """
    about = f"{branch.prompt.name} replays the prompt before it evicts"
    if storage.sides_of(PROMPT):
        return f"{about}, but the parts that this storage's vectors share are computed from queries that are not held."
    if arrangement_of(storage).joins_layers:
        return f"{about}, but this storage joins pairs of layers as soon as the prompt has been read."
    if sizes.block is not None and (storage.new_tokens_separate or storage.on_host):
        return (
            f"{about}, and reads exact keys and values, but this storage does not hold them after a block; leave out "
            "prefill_block."
        )
    return None
