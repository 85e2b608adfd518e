"""Combinations of policy, storage and selection that cannot work, each with its reason."""

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements import arrangement_of
from kvjax.cache.arrangements.base import reads_some
from kvjax.cache.planning.head_groups import Branch
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.prompt_replay import refuses_replay
from kvjax.cache.spec import CacheSpec
from kvjax.errors import PolicyError, StorageError
from kvjax.parallel import sharding
from kvjax.parallel.host_memory import HOST
from kvjax.policies.traits import per_head_positions
from kvjax.selection.base import Selection
from kvjax.storage.base import ROTATED, Storage
from kvjax.storage.side import PROMPT


def check(spec: CacheSpec, branch: Branch, sizes: Sizes, kv_heads: int, layers: int) -> None:
    """Checks that a policy, a storage and a selection can be combined.

    Args:
      spec: has the storage, and the policy's name.
      branch: the policies and the selection of some heads.
      sizes: of the batch.
      kv_heads: KV heads of the model.
      layers: the number of its layers.

    Raises:
      PolicyError: they cannot, with the reason and what would work.
      StorageError: the storage cannot be combined with the rest.
    """
    selection, name = branch.selection, spec.policy.name
    if reason := arrangement_of(spec.storage).refuses(spec, branch, sizes, layers):
        raise StorageError(f"storage {spec.storage.name} with policy {name}: {reason}")
    if reason := selection.refuses(spec.policy, spec.storage, positions=branch.decode.positions):
        raise PolicyError(f"policy {name} with selection={selection!r}: {reason}")
    if spec.storage.divided and max(branch.prompt.page, branch.decode.page) > 1:
        raise PolicyError(
            f"policy {name} with storage={spec.storage!r}: a page is consecutive slots of one store, and a residual "
            "holds the newest tokens in another (sinks the first ones); use residual=0 and sinks=0."
        )
    if reason := _refuses_sides(spec.storage, branch, sizes):
        raise StorageError(f"storage {spec.storage.name} with policy {name}: {reason}")
    if spec.storage.joint_heads > 1 and (reason := _refuses_joint(spec.storage.joint_heads, branch, kv_heads)):
        raise StorageError(f"storage {spec.storage.name} with policy {name}: {reason}")
    if branch.prompt.replay is not None and (reason := refuses_replay(spec.storage, branch, sizes)):
        raise StorageError(f"storage {spec.storage.name} with policy {name}: {reason}")
    if reason := _refuses_whole_prompt(branch, sizes):
        raise PolicyError(f"policy {name}: {reason}")
    if spec.storage.on_host and (reason := _refuses_host(spec, branch, sizes)):
        raise PolicyError(f"policy {name} with storage={spec.storage!r}: {reason}")
    if selection.whole_text:
        if sizes.following:
            raise PolicyError(
                f"policy {name}: it uses all queries of a text, later ones included, so that nothing can be generated; "
                "score whole texts, with prompt_length equal to their length."
            )
        if sizes.block is not None:
            raise PolicyError(f"policy {name}: it needs the whole text at once; leave out prefill_block.")
    if selection.prompt is not None and (reason := _refuses_query_blocks(spec, branch, sizes, kv_heads)):
        raise PolicyError(f"policy {name} with selection={selection!r}: {reason}")
    summarizes = not selection.in_prompt and bool(jax.eval_shape(lambda: selection.init((1, 1, 1), 1, jnp.float32)))
    if summarizes and sizes.block is not None and not spec.storage.exact:
        raise PolicyError(
            f"policy {name}: selection={selection!r} summarises exact keys, which storage={spec.storage.name} no "
            "longer has after a block of the prompt; leave out prefill_block."
        )


def _refuses_whole_prompt(branch: Branch, sizes: Sizes) -> str | None:
    """Returns why scores that depend on the whole prompt cannot be computed; None if they can."""
    for policy in (branch.prompt, branch.decode):
        if not any(each.whole_prompt for each in policy.writes):
            continue
        if policy.when == "step":
            return (
                "it scores the tokens of a whole prompt, when it ends; make a compressor, such as learned(every=None)."
            )
        if sizes.block is not None:
            return "it scores the tokens of a whole prompt, which must be run in one block; leave out prefill_block."
    return None


def _refuses_query_blocks(spec: CacheSpec, branch: Branch, sizes: Sizes, kv_heads: int) -> str | None:
    """Returns why blocks of queries of a prompt cannot read pages of their own, as a sentence; None if they can."""
    blocks, instead = branch.selection.prompt, "leave out in_prompt"
    assert blocks is not None
    if branch.prompt.replay is not None:
        return (
            f"in_prompt reads some pages of a prompt, and this policy replays the prompt, which reads all; {instead}."
        )
    needs = (*branch.prompt.needs, *branch.decode.needs, *spec.storage.needs)
    if aged := [s.name for s in needs if s.transform == "one" and s.accumulate not in ("sum", "max")]:
        return (
            f"the statistic {aged[0]} counts queries by their age, which blocks of queries that read different pages "
            f"(in_prompt) do not know; {instead}."
        )
    if sizes.block is None:
        return None
    if sizes.block % blocks.size:
        return (
            f"prefill_block={sizes.block} divides blocks of queries that read the same pages (in_prompt); use a "
            f"multiple of query_block={blocks.size}, or leave prefill_block out."
        )
    if branch.prompt.budget is not None and branch.prompt.when == "step":
        return (
            "in_prompt needs the prompt's tokens in the order of slots, and this policy evicts between the blocks of a "
            f"prompt; leave out prefill_block, or {instead}."
        )
    if spec.storage.new_tokens_separate:
        return (
            f"in_prompt gathers pages of exact slots on the device, and storage={spec.storage!r} holds the blocks of a "
            f"prompt in another form; leave out prefill_block, or {instead}."
        )
    if axes := sharding.left_over("slots", kv_heads)[0]:
        return (
            f"in_prompt gathers pages of all slots, which are divided over the mesh axis {'+'.join(axes)}; leave out "
            f"prefill_block, or {instead}."
        )
    return None


def _refuses_sides(storage: Storage, branch: Branch, sizes: Sizes) -> str | None:
    """Returns why what the storage's vectors share, or how they are shortened, does not allow it; None if it does."""
    if not storage.new_tokens_separate:
        return None
    selection = branch.selection
    if storage.sides_of(PROMPT) and sizes.block is not None:
        without = arrangement_of(storage).without_prompt_side
        return (
            "the parts that its vectors share are computed from the whole prompt, which must be run in one block; "
            f"leave out prefill_block{without}."
        )
    positions = {policy.positions for policy in (branch.prompt, branch.decode)}
    if storage.frame == ROTATED and "cache" in positions:
        return (
            "keys are held rotated at their positions, and positions='cache' rotates them by rank in each step; use "
            "positions='original'."
        )
    if not storage.shortened:
        return None
    if any(policy.merge is not None for policy in (branch.prompt, branch.decode)):
        return "a merge adds up whole vectors, but this storage holds shorter ones; use a policy without a merge."
    if type(selection).restore is not Selection.restore:
        return (
            f"selection={selection!r} restores keys of all features, but this storage holds shorter ones; use another "
            "selection, such as kvjax.selection.quest(budget=512)."
        )
    return None


def _refuses_joint(heads: int, branch: Branch, kv_heads: int) -> str | None:
    """Returns why KV heads that are held together do not go with a policy, a selection or the mesh; None if they do."""
    if branch.divides_heads:
        return (
            f"{heads} KV heads are stored together, but the policy treats heads differently; use one policy for all of "
            "them, such as full() or a window."
        )
    for policy in (branch.prompt, branch.decode):
        if policy.merge is not None:
            return "a merge changes a single head, but heads are stored together; use a policy without a merge."
        if named_policy := per_head_positions(policy):
            return (
                f"{heads} KV heads are stored together and must keep the same positions, but under the policy "
                f"{named_policy} each head keeps its own; use full(), a window, or tova()."
            )
    if reads_some(branch.selection):
        return (
            f"selection={branch.selection!r} reads slots of each head, but heads are stored together; leave it out, or "
            "use a storage of single heads such as low_rank."
        )
    local = kv_heads // sharding.divided("kv_heads", kv_heads)
    if local % heads:
        return (
            f"{heads} KV heads are stored together, but a device of this mesh has {local} of {kv_heads}; use a mesh "
            "whose axis 'model' does not divide a group of heads."
        )
    return None


def _refuses_host(spec: CacheSpec, branch: Branch, sizes: Sizes) -> str | None:
    """Returns why a pool cannot be in host memory, as a sentence; None if it can."""
    # A prompt in one shot is on the device.
    policies = (branch.decode,) if sizes.block is None else (branch.prompt, branch.decode)
    if any(policy.folding is not None for policy in policies):
        return "a merge changes slots anywhere in a pool, which must be on the device; use memory='device'."
    if branch.selection.reads_all:
        # Every slot moves to the device in each step, where a policy may look at it too.
        return None
    if branch.decode.positions == "cache" and spec.storage.memories["key"] == HOST:
        return (
            "positions='cache' rotates every key in each step, so that all of them would move; keep keys on the device."
        )
    looked = set(branch.decode.reads)
    if branch.selection.ranks_by_keys:
        looked.add("key")
    moved = sorted(side for side in looked if spec.storage.memories[side] == HOST)
    if moved:
        return (
            f"slots are ranked by every {' and '.join(moved)}, so that each step would move all of them from host "
            "memory; keep these on the device, such as memory=('device', 'host') for keys."
        )
    return None
