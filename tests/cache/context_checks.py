"""Runs one layer with and without a mesh that divides its slots, for tests/cache/test_context.py, on eight devices.

Prints one line of JSON for each case whose name is an argument.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import policies, storage
from kvjax.cache import Block, CacheSpec, Layer
from kvjax.cache.context_parallel import protected_victim
from kvjax.cache.empty import empty
from kvjax.cache.groups import RANK, Group
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.lowering import lower
from kvjax.cache.slots import AXES, divided
from kvjax.cache.spec import as_spec
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.step import step_layer
from kvjax.models.config import DecoderConfig
from kvjax.numerics import top_k
from kvjax.numerics.rope import Rope
from kvjax.parallel import sharding
from kvjax.policies import POLICIES, Policy
from kvjax.selection import Selection, everything, infinigen, lserve, optimal, quest, retrieval, tokenselect
from kvjax.storage import Samples, Storage, dense
from kvjax.storage.side import CALIBRATION
from tests import conftest, examples, layers

LENGTHS, STEPS, BUDGET = np.array([24, 6, 14, 17]), 14, 12
ROWS, KV_HEADS, GROUP, DIM = len(LENGTHS), 2, 2, 4
USUAL = protected_victim.CANDIDATES_PER_DEVICE, top_k.FIRST, top_k.CANDIDATES
MANY = 1024  # slots, of which each device has more than numbers that a collective may move


@dataclasses.dataclass(frozen=True)
class Case:
    """A cache of one layer on a mesh.

    Attributes:
      policy: slots -> which of them stay.
      mesh: see `kvjax.make_mesh`.
      storage: how they are held.
      selection: which of them a query reads.
      block: tokens of a block of the prompt; None = in one shot.
      heads: query heads and KV heads.
      divided: the mesh axes that slots are divided over.
      candidates: slots that a device names before a threshold is searched; None = as many as usual.
    """

    policy: Callable[[int], Policy]
    mesh: str = "data:2,model:2,context:2"
    storage: Storage = dataclasses.field(default_factory=dense)
    selection: Selection = dataclasses.field(default_factory=everything)
    block: int | None = None
    heads: tuple[int, int] = (KV_HEADS * GROUP, KV_HEADS)
    divided: tuple[str, ...] = ("context",)
    candidates: int | None = None

    def spec(self, budget: int = BUDGET) -> CacheSpec:
        """The cache, of `budget` slots if that limits it."""
        return CacheSpec(self.policy(budget), self.storage, self.selection)


#: A prompt is not replayed on a mesh.
OF_LAYERS = [name for name in POLICIES if name not in examples.REPLAYED]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "strided": {"stride": 3}, "fixed": {"block": 4, "columns": 1}, "snapkv": {"window": 4}, "pyramidkv": {"window": 4},
    "ladder": {"span": 1, "layers": 2, "every": 2, "positions": "original"},
    "rkv": {"every": 1}, "morphkv": {"window": 4}, "gkv": {"every": 1}, "vase": {"every": 1}, "vase_dkv": {"every": 2},
    "lazy": {"every": 1, "alpha": 0.1}, "compactor": {"sinks": 2, "recent": 2},
    "triattention": {"every": 1},
}  # fmt: skip


def registered(name: str) -> Callable[[int], Policy]:
    """A registered policy of a number of slots."""
    return lambda budget: policies.by_name(
        name, **({} if name == "full" else {"budget": budget}), **ARGUMENTS.get(name, {})
    )


def merging(merge: policies.Merge, policy: Callable[..., Policy] = policies.h2o) -> Callable[[int], Policy]:
    """A policy that folds what it evicts into what stays."""
    return lambda budget: policy(budget, merge=merge)


def paged(page: int, policy: Callable[[int], Policy] = policies.h2o) -> Callable[[int], Policy]:
    """A policy that evicts whole pages."""
    return lambda budget: policies.by_page(policy(budget), page=page)


def ranked(policy: Callable[..., Policy], **given: Any) -> Callable[[int], Policy]:
    """A policy whose keys are rotated to their ranks."""
    return lambda budget: policy(budget, positions="cache", **given)


CHANNELS = storage.Channels(2, 2)
LESS = 3  # slots by which a budget is smaller while decoding
#: Policies of each kind that a storage may go with.
KINDS: dict[str, Callable[[int], Policy]] = {
    "full": registered("full"), "h2o": registered("h2o"), "roco": registered("roco"), "snapkv": registered("snapkv"),
    "less": lambda budget: policies.after_prefill(policies.snapkv(budget, window=4), then=policies.h2o(budget - LESS)),
    "newest": lambda budget: policies.compress(importance=policies.recency, budget=budget, name="newest"),
}  # fmt: skip
MESHES = {
    "full": "data:2,model:2,context:2", "h2o": "data:2,context:4", "roco": "data:2,model:2,context:2",
    "snapkv": "model:2,context:4", "less": "data:2,context:2", "newest": "context:8",
}  # fmt: skip
EVICTS = ("full", "h2o", "roco", "snapkv", "less")
#: Storages whose vectors share something or are changed before attention, and their policies.
SHARING: dict[str, tuple[Storage, tuple[str, ...]]] = {
    "think": (storage.think(0.4, 4, 3), EVICTS),
    "think codes": (storage.think(0.5, 4, 0, codec=storage.Integer(4)), EVICTS),
    "low_rank": (storage.low_rank(2, 3, 2), EVICTS),
    "low_rank codes": (storage.low_rank(3, 2, value_codec=storage.Integer(8), center=False), EVICTS),
    "kvquant": (storage.kvquant(3, 0.2, 1, "kmeans", residual=2, qnorm=True), EVICTS),
}
h2o, full = registered("h2o"), registered("full")
CASES = {
    # Tova's mean over heads would move one number per slot between devices that have some of the heads.
    **{name: Case(registered(name), "data:2,context:2" if name == "tova" else Case.mesh) for name in OF_LAYERS},
    "context of 8": Case(h2o, "context:8"),
    "all in context": Case(full, "context:8"),
    "one KV head": Case(h2o, "model:4", heads=(4, 1), divided=("model",)),
    "in blocks": Case(h2o, "data:2,model:1,context:4", block=5),
    "ranks in blocks": Case(registered("streaming_llm"), "data:2,model:1,context:4", block=5),
    # Where all candidates are protected, the victim is searched.
    "roco, few candidates": Case(
        lambda budget: policies.roco(budget, protect=budget - 2, guard=2), "data:2,context:4", candidates=1
    ),
    "heavy hitters": Case(
        lambda budget: policies.with_heavy_hitters(policies.h2o(budget, recent=2)), "context:4", candidates=2
    ),
    "roco in blocks": Case(policies.roco, "data:4,model:1,context:2", block=5),
    "cam": Case(merging(policies.cam(recent=5)), "data:2,context:4"),
    "d2o": Case(merging(policies.d2o()), "data:2,model:1,context:4", block=5),
    "kvmerger": Case(merging(policies.kvmerger(similarity=-0.5))),
    "anchors": Case(merging(policies.anchors()), "context:8"),
    "cam in blocks": Case(merging(policies.cam(recent=5)), "data:2,model:1,context:4", block=5),
    "kvmerger in blocks": Case(merging(policies.kvmerger(similarity=-0.5)), "context:4", block=7),
    "anchors in blocks": Case(merging(policies.anchors(), policies.tova), "data:2,context:4", block=5),
    # The pairs of all slots that a device names travel with them, or a search finds the victim's.
    "merge of roco": Case(
        lambda budget: policies.roco(budget, protect=budget - 2, guard=2, merge=policies.d2o()), "data:2,context:4",
        candidates=1,
    ),
    "cam of a few": Case(merging(policies.cam(recent=1)), "model:2,context:4"),
    "d2o, int8": Case(merging(policies.d2o()), storage=storage.int8()),
    "merge by ranks": Case(merging(policies.anchors(), policies.streaming_llm), "data:2,context:4", block=5),
    "merge after a prompt": Case(
        lambda budget: policies.after_prefill(
            policies.snapkv(budget, window=4), then=policies.h2o(budget, merge=policies.d2o())
        )
    ),
    "razor": Case(
        lambda budget: policies.razor_attention([[True, False, False, False]], budget), "data:2,model:2",
        heads=(8, 4), divided=("model",),
    ),
    "razor in blocks": Case(
        lambda budget: policies.razor_attention([[True, False, False, False]], budget, sinks=1),
        "data:2,model:2", heads=(8, 4), divided=("model",), block=5,
    ),
    "by rank": Case(ranked(policies.h2o), "data:2,model:2,context:2"),
    "by rank in blocks": Case(ranked(policies.h2o), "data:2,context:4", block=5),
    "by rank, residual": Case(
        ranked(policies.scissorhands), "data:2,context:4", block=7, storage=storage.int8(residual=3)
    ),
    "by rank, merged": Case(ranked(policies.tova, merge=policies.d2o()), "data:2,context:4", block=5),
    "by rank after a prompt": Case(ranked(policies.snapkv, window=4)),
    "by rank, compressed in blocks": Case(ranked(policies.knorm), "data:2,context:4", block=5),
    "smaller while decoding": Case(
        lambda budget: policies.after_prefill(policies.snapkv(budget + 4, window=4), then=h2o(budget - 3))
    ),
    "smaller, in codes": Case(
        lambda budget: policies.after_prefill(policies.snapkv(budget + 4, window=4), then=policies.roco(budget - 3)),
        "data:2,context:4", storage=storage.int8(residual=4),
    ),
    "int8": Case(registered("scissorhands"), storage=storage.int8()),
    "int4": Case(full, "model:2,context:4", storage=storage.int4()),
    "fp8": Case(policies.tova, "context:4", storage=storage.fp8()),
    "mxfp4": Case(full, storage=storage.mxfp4()),
    "residual": Case(h2o, storage=storage.int8(residual=4)),
    "residual, all": Case(full, "data:2,context:4", storage=storage.int4(residual=5)),
    "residual in blocks": Case(h2o, "data:2,model:1,context:4", block=5, storage=storage.int8(residual=3)),
    "residual beyond the budget": Case(policies.tova, "data:2,context:2", storage=storage.int8(residual=20)),
    "residual by ranks": Case(registered("streaming_llm"), storage=storage.int8(residual=4)),
    "first and newest": Case(
        registered("scissorhands"), storage=dataclasses.replace(storage.int8(residual=2), sinks=2)
    ),
    "first alone": Case(h2o, storage=dataclasses.replace(storage.int8(), sinks=3)),
    "kivi": Case(full, "data:2,context:2", storage=storage.kivi(2, 2, 4)),
    "kivi in blocks": Case(full, "context:2", block=5, storage=storage.kivi(4, 2, 4)),
    "blocks of both": Case(
        full, storage=storage.Storage(key=CHANNELS, value=CHANNELS, layout=storage.blocks(2), name="blocks of both")
    ),
    "optimal": Case(h2o, "data:2,context:4", selection=optimal(5)),
    "optimal, residual": Case(full, storage=storage.int8(residual=4), selection=optimal(5)),
    "infinigen": Case(h2o, "data:2,context:4", selection=infinigen(1.0, cap=5, first_layer=1)),
    "infinigen, heads": Case(h2o, selection=infinigen(1.0, cap=5, first_layer=1, columns="union")),
    "infinigen, ends": Case(
        full, "model:2,context:4", selection=infinigen(0.5, cap=4, first_layer=1, sinks=2, recent=3), block=5
    ),
    "infinigen, few candidates": Case(
        h2o, "data:2,context:4", selection=infinigen(1.5, cap=0.6, first_layer=1), candidates=2
    ),
    "infinigen, residual": Case(
        h2o, "data:2,context:4", storage=storage.int8(residual=4), selection=infinigen(1.0, cap=4, first_layer=1)
    ),
    "infinigen, fraction": Case(registered("snapkv"), selection=infinigen(1.0, cap=0.3, first_layer=1)),
    "tokenselect": Case(full, "data:2,context:4", selection=tokenselect(4, 2, 3, reuse=0.2)),
    "tokenselect, anew": Case(full, "data:2,context:4", selection=tokenselect(4, 2, 3, reuse=None)),
    "tokenselect, heads": Case(full, selection=tokenselect(4, 1, 3, reuse=None), storage=storage.int8()),
    "quest": Case(full, "data:2,context:4", selection=quest(4, 12, first_layer=0)),
    "quest in blocks": Case(full, block=5, selection=quest(2, 8, first_layer=0)),
    "lserve": Case(full, "context:2", selection=lserve(4, 2, 3, budget=12, first_layer=0)),
    "retrieval": Case(full, selection=retrieval(4, 12)),
    "quest of codes": Case(registered("snapkv"), storage=storage.int8(), selection=quest(4, 12, first_layer=0)),
    **{
        f"{name} {kind}": Case(KINDS[kind], MESHES[kind], storage=own)
        for name, (own, kinds) in SHARING.items() for kind in kinds
    },
    "kvquant in blocks": Case(h2o, "data:2,model:1,context:4", block=5, storage=storage.kvquant(4, 0.2, 2)),
    "kvquant by ranks": Case(registered("streaming_llm"), storage=storage.kvquant(3, 0.2, 1)),
    "kv_heads": Case(policies.tova, "data:2,context:4", storage=storage.kv_heads(2, residual=2)),
    "kv_heads apart": Case(full, heads=(8, 4), storage=storage.kv_heads(2)),
    "cskv": Case(full, "data:2,context:4", storage=storage.cskv(4, 3)),
    "cskv in blocks": Case(full, heads=(8, 4), block=5, storage=storage.cskv(4, 4, 2, key_codec=CHANNELS)),
    "cskv, newest": Case(KINDS["newest"], "context:8", storage=storage.cskv(3, 2)),
    "cskv by age": Case(registered("streaming_llm"), "data:2,context:4", storage=storage.cskv(4, 3)),
    "optimal of latents": Case(h2o, "data:2,context:4", storage=storage.low_rank(3, 3, 2), selection=optimal(5)),
    "optimal, unrotated": Case(h2o, storage=storage.kvquant(4, 0.2, 1), selection=optimal(5)),
    "parts of heads": Case(
        lambda budget: policies.split_heads([[True, False, False, False]], full(budget), h2o(budget)),
        "data:2,model:2", heads=(4, 4), divided=("model",),
    ),
}  # fmt: skip
#: Cases whose steps XLA divides.
BY_XLA = {
    "pages": Case(paged(3), "data:2,context:4"),
    "pages in blocks": Case(paged(4), "data:2,model:1,context:4", block=5),
    "pages of the newest": Case(paged(3, registered("window")), "context:8", block=7),
    "pages after a prompt": Case(
        lambda budget: policies.after_prefill(policies.snapkv(budget + 4, window=4), then=paged(3)(budget - 3))
    ),
}
CASES |= BY_XLA


def sides_of(case: Case) -> Any:
    """Returns the sides of a calibration with random vectors; None if the storage has no such sides."""
    held = case.storage.bound(case.heads[1])
    if not held.sides_of(CALIBRATION):
        return None
    rng = np.random.default_rng(3)
    key, value = rng.normal(size=(2, 60, case.heads[1], DIM)).astype(np.float32)
    kernels = {name: rng.normal(size=(12, case.heads[1], DIM)) for name in ("key", "value")}
    samples = Samples(own=key, query=None, key=key, value=value, inputs=rng.normal(size=(60, 12)), kernels=kernels)
    return storage.Calibration.of(held, [samples], Rope(dim=DIM)).layers[0]


def difference(case: Case) -> dict[str, Any]:
    """Compares a run on the mesh with one on a single device."""
    protected_victim.CANDIDATES_PER_DEVICE, top_k.FIRST, top_k.CANDIDATES = (
        USUAL if case.candidates is None else (case.candidates,) * 3
    )
    total = int(LENGTHS.max()) + STEPS
    streams = layers.random_streams(range(ROWS), total, heads=case.heads, dim=DIM)
    ends = LENGTHS + np.array([STEPS, STEPS, STEPS - 5, 0])
    first = case.selection.first_layer
    given = layers.Case(streams, LENGTHS, ends, block=case.block, rope=Rope(dim=DIM), layer=first)
    sides = sides_of(case)
    alone = layers.run(case.spec(), given, sides=sides)
    mesh = sharding.make_mesh(case.mesh)
    with sharding.on_mesh(mesh):
        spread = layers.run(case.spec(), given, sides=sides)
    rows, heads = range(ROWS), range(case.heads[1])

    def read(run: layers.Run) -> list[np.ndarray]:
        """The positions that each step could see, in order, and how many of them were chosen."""
        sorted_positions = [np.sort(each, axis=3) for each in run.read]
        counts = [each.sum(axis=3) for each in run.chosen if each is not None]
        return [*(each[each >= 0] for each in sorted_positions), *counts]

    return {
        "output": float(np.abs(alone.output - spread.output).max()),
        "positions_equal": all(
            alone.live(step, row, head) == spread.live(step, row, head)
            for step in range(STEPS + 1) for row in rows for head in heads
        ),
        "read_equal": all(np.array_equal(*each) for each in zip(read(alone), read(spread), strict=True)),
        "divided": [group.slot_axes for group in spread.layout.decode[-1]],
        "reasons": [group.reasons for group in spread.layout.decode[-1]],
    }  # fmt: skip


def groups_of(spec: CacheSpec, heads: tuple[int, int]) -> tuple[DecoderConfig, tuple[Group, ...]]:
    """A decoder, and the groups of a cache of about `MANY` slots on the mesh in force."""
    config = DecoderConfig(
        family="llama", vocab_size=2, hidden_size=heads[0] * DIM, num_layers=spec.selection.first_layer + 1,
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=DIM, mlp_size=1, max_positions=4096, rope=Rope(dim=DIM),
    )  # fmt: skip
    lengths = np.full(ROWS, MANY + 50)
    sizes = Sizes(ROWS, MANY + 50, MANY + 50, MANY + 50, 60, None, rounded=False)
    return config, lower(as_spec(spec), config, sizes, lengths).layout.decode[-1]


def held(group: Group, kv_heads: int) -> Any:
    """The shapes of the arrays of a group."""
    return jax.eval_shape(lambda: empty(group, ROWS, kv_heads, DIM, jnp.float32))


def step_program(spec: CacheSpec, mesh: Any, heads: tuple[int, int]) -> tuple[Layer, Any]:
    """Compiles a decoding step of a cache of about `MANY` slots on a mesh; returns its shapes and the program."""
    with sharding.on_mesh(mesh):
        config, groups = groups_of(spec, heads)
        sides = sides_of(Case(lambda _: spec.policy, storage=spec.storage, heads=heads))

        def shaped(x: Any, *axes: str) -> Any:
            names = (*axes, *(None,) * (x.ndim - len(axes)))
            place = jax.sharding.NamedSharding(mesh, sharding.spec(names, x.shape, mesh))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        def placed(group: Group) -> Any:
            made = held(group, heads[1])
            counts = divided(made, group.per_head) if group.slot_axes else jax.tree.map(lambda _: 2, made)
            return jax.tree.map(lambda x, count: shaped(x, *AXES[:count]), made, counts)

        layer = Layer(map(placed, groups))
        q, kv = (shaped(jax.ShapeDtypeStruct((ROWS, n, 1, DIM), jnp.float32), "batch") for n in heads)
        row = shaped(jax.ShapeDtypeStruct((ROWS,), jnp.int32), "batch")
        at = shaped(jax.ShapeDtypeStruct((ROWS, 1), jnp.int32), "batch")

        ahead = any(group.selection.ahead for group in groups)

        def run(layer, query, key, value, at, row, sides):
            budget = tuple(row if group.has_budget else None for group in groups)
            block = Block(position=at, prompt=row, total=row, budget=budget, layer=jnp.int32(0))
            args = LayerArgs(rope=config.rope, guess=query if ahead else None, sides=sides)
            return step_layer(layer, query, key, value, block=block, groups=groups, args=args)[:2]

        shared = jax.tree.map(lambda x: shaped(x, "kv_heads"), sides)
        program = jax.jit(run, donate_argnums=0).lower(layer, q, kv, kv, at, row, shared).compile()
    return layer, program


PATTERN = re.compile(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.-]+))")


def computations(text: str) -> dict[str, str]:
    """The computations of compiled HLO, by name."""
    blocks = re.split(r"\n(?=(?:ENTRY )?%[\w.-]+ \()", text)
    return {match[1]: block for block in blocks if (match := re.match(r"(?:ENTRY )?(%[\w.-]+) \(", block.lstrip()))}


def rare(text: str) -> set[str]:
    """The computations that run in a branch of a conditional alone."""
    blocks = computations(text)
    calls = {
        name: {each for each in re.findall(r"%[\w.-]+", block) if each in blocks} for name, block in blocks.items()
    }
    due = [name for match in BRANCHES.finditer(text) for name in re.findall(r"%[\w.-]+", match[1] or match[2])]
    found: set[str] = set()
    while due:
        if (name := due.pop()) not in found:
            found.add(name)
            due += calls[name]
    return found


def collectives(text: str, *, branches: bool = False) -> list[int]:
    """The number of elements of the results of each collective of compiled HLO.

    Args:
      text: the program.
      branches: whether to take those in the branches of conditionals, instead of the others.
    """
    inside = rare(text)
    kept = "\n".join(block for name, block in computations(text).items() if (name in inside) == branches)
    return [
        max(math.prod(int(n) for n in dims.split(",") if n) for _, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]))
        for match in PATTERN.finditer(kept)
    ]


def moved(case: Case, devices: Any = None) -> dict[str, Any]:
    """Counts the collectives of a step that is compiled for these devices, or for those of the process."""
    mesh = sharding.make_mesh(case.mesh, devices)
    layer, program = step_program(case.spec(MANY), mesh, case.heads)
    local = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(layer)]
    parts = layer[0].position.sharding.shard_shape(layer[0].position.shape)
    found, rarely = (collectives(program.as_text(), branches=branches) for branches in (False, True))
    whole = [held(group, case.heads[1]) for group in groups_of(case.spec(MANY), case.heads)[1]]
    # The slots of heads that are whole hold no ranks.
    ranks = sum(x.stats[RANK].size * 4 if RANK in x.stats else 0 for x in layer)
    even = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(whole)) + ranks) / mesh.size
    return {
        "uneven": sum(local) / even,
        "collectives": found,
        "in branches": rarely,
        "local_slots": parts[2],
        "local_rows": parts[0] * parts[1],
        "copied": program.memory_analysis().alias_size_in_bytes < sum(local),
    }


def main() -> None:
    assert len(jax.devices()) == 8, jax.devices()
    for name in sys.argv[1:]:
        case = CASES[name]
        found = difference(case)
        # A program is read, which needs what only compiling yields.
        jax.config.update("jax_enable_compilation_cache", False)
        found |= moved(case)
        jax.config.update("jax_enable_compilation_cache", conftest.KEPT)
        print(json.dumps({"name": name} | found), flush=True)


if __name__ == "__main__":
    main()
