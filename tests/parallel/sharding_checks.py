"""Runs each case with and without a mesh, for test_sharding.py, in a process with eight simulated devices.

Prints one line of JSON for each case whose name is an argument.
"""

import dataclasses
import functools
import json
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import kvjax
from kvjax import policies
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.contexts import extend
from kvjax.generation.context import Context
from kvjax.generation.decoding import decode_steps
from kvjax.generation.prefill import prefill
from kvjax.generation.sampling import Greedy
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.models.parameters import parameter_shapes
from kvjax.models.stacked_params import stacked
from kvjax.numerics.rope import Rope
from kvjax.parallel import sharding
from kvjax.planning.programs import with_loops
from kvjax.planning.roofline import decode_shapes
from kvjax.selection import Selection, everything, infinigen, quest
from kvjax.serve import Request, Runner
from kvjax.storage import Storage, dense, int8, read
from tests import conftest

ROWS, WIDTH, NEW = 8, 24, 12
LENGTHS = [24, 9, 24, 17, 5, 20, 24, 12]


def _config(num_heads: int, num_kv_heads: int, **changes: Any) -> DecoderConfig:
    return DecoderConfig(
        family="llama", vocab_size=96, hidden_size=64, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=16, mlp_size=128, max_positions=256, rope=Rope(dim=16), **changes,
    )  # fmt: skip


MODELS = {
    "mha": dataclasses.replace(
        _config(8, 8), family="opt", rope=None, learned_positions=True, position_offset=2, norm="layer", norm_bias=True,
        activation="relu", gated_mlp=False, qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "gqa": _config(8, 4, tie_embeddings=False, qkv_bias=True, qk_norm=True),
    "mqa": _config(8, 1),
    "experts": dataclasses.replace(_config(8, 4, tie_embeddings=False), num_experts=4, experts_per_token=2),
}  # fmt: skip


#: Blocks of queries of a prompt read pages too.
IN_PROMPT = {"in_prompt": True, "prompt_budget": 8, "sinks": 4, "recent": 0, "query_block": 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a cache, a mesh, and how the prompt is fed.

    Attributes:
      model: key of `MODELS`.
      policy: name of a policy.
      mesh: see `kvjax.make_mesh`.
      prefill_block: see `kvjax.generate`.
      ragged: whether the rows have prompts of different lengths.
      positions: see `CacheSpec`.
      scored: whether to run `log_likelihood` too, besides `generate`.
      every: slots that a head evicts at once.
      storage: see `CacheSpec`.
      selection: see `CacheSpec`.
      layers: of the model. A second is spread as the first is, and takes as long to compile.
      parts: of the slots of each head, on as many devices.
      rows: of the batch.
      refilled: whether requests of several lengths are served too, in rows that take the next one.
      stacked: whether the weights of layers are in stacks, so that layers run as loops on the mesh.
    """

    model: str
    policy: str
    mesh: str
    prefill_block: int | None = None
    ragged: bool = False
    positions: str = "original"
    scored: bool = False
    every: int = 1
    storage: Storage = dataclasses.field(default_factory=dense)
    selection: Selection = dataclasses.field(default_factory=everything)
    layers: int = 1
    parts: int = 1
    rows: int = ROWS
    refilled: bool = False
    stacked: bool = False

    @property
    def config(self) -> DecoderConfig:
        """The model's, of as many layers."""
        return dataclasses.replace(MODELS[self.model], num_layers=self.layers, windows=())

    def spec(self, budget: int = 10) -> CacheSpec:
        """Returns the cache; `budget` is ignored by the policy ``full``."""
        more = {} if self.policy == "full" else {"budget": budget}
        if self.every > 1:
            more["every"] = self.every
        if self.policy == "gkv":
            more["window"] = 4
        if self.policy == "lazy":
            more["alpha"] = 0.1
        policy = policies.by_name(self.policy, positions=self.positions, **more)
        return CacheSpec(policy, self.storage, self.selection)


_LIST = [
    Case("mha", "window", "data:8", ragged=True, rows=7, refilled=True),
    Case("mha", "h2o", "model:2", prefill_block=5, ragged=True),
    Case("gqa", "h2o", "data:2,model:4", ragged=True, scored=True, layers=2),
    Case("gqa", "h2o", "data:2,model:4", prefill_block=8, ragged=True, scored=True, layers=3, stacked=True),
    Case("experts", "full", "data:4,model:2", ragged=True),
    Case("gqa", "window", "model:2", positions="cache"),
    # KV heads that the devices do not divide: slots are divided. What that does to a layer under each kind of policy,
    # merge, storage and selection is in tests/cache/test_context.py.
    Case("mqa", "h2o", "data:2,model:4", prefill_block=8, ragged=True, scored=True, parts=4),
    Case("gqa", "h2o", "data:2,model:2,context:2", ragged=True, parts=2, refilled=True),
    Case("mha", "window", "data:4,model:2", ragged=True, storage=int8(residual=4)),
    # Rounds, in rows that are due in different steps, and memories of queries and of rounds.
    Case("gqa", "gkv", "data:2,model:4", prefill_block=8, ragged=True, every=3),
    Case("gqa", "matched", "data:2,model:2", ragged=True, scored=True),
    Case("gqa", "kvzip", "data:2,model:2", ragged=True),
    # Factors of each head. In prompts shorter than a key, all tokens have the same leverage, and rounding decides.
    Case("gqa", "leverage", "data:2,model:2"),
    # A prompt's queries are divided, and the order of their devices counts.
    Case("mqa", "lazy", "data:2,model:4", ragged=True, every=3, parts=1),
    Case("gqa", "full", "data:2,model:4", ragged=True, selection=quest(4, 12, first_layer=0, **IN_PROMPT)),
    Case("mqa", "full", "data:2,model:4", selection=quest(4, 12, first_layer=0), parts=4, refilled=True),
    Case(
        "gqa",
        "full",
        "data:2,model:4",
        storage=dense(memory="host"),
        selection=infinigen(cap=6, first_layer=1),
        layers=2,
    ),
    Case("mqa", "h2o", "data:1,model:8", ragged=True, storage=int8(memory="host")),  # 1 KV head: replicated
]
CASES = {
    "-".join(
        [c.model, c.policy, c.mesh, f"block{c.prefill_block}" if c.prefill_block else "oneshot"]
        + ["ragged"] * c.ragged
        + ["ranks"] * (c.positions == "cache")
        + ([c.storage.label.replace(" ", "_")] if c.storage.new_tokens_separate else [])
        + ([f"residual{c.storage.residual}"] if c.storage.residual else [])
        + ([c.selection.name] if not c.selection.reads_all else [])
        + ["stacked"] * c.stacked
    ): c
    for c in _LIST
}


@functools.cache
def parameters(config: DecoderConfig) -> Any:
    """Random weights, with biases and norms that are not trivial, and logits far enough apart for one greedy choice."""
    rng = np.random.default_rng(1)  # a program of jax's random numbers takes seconds to compile

    def drawn(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        # Kernels [in, out] and embeddings [V, E] are initialised at this size, here with noise; norms are about 1.
        fan = {"kernel": leaf.shape[-2:][0], "tokens": leaf.shape[-1]}.get(name)
        size = 0.1 if fan is None else math.sqrt(1 / fan + 0.01)
        return jnp.asarray(size * rng.normal(size=leaf.shape) + (name == "scale"), leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, parameter_shapes(config))


def run(model: Model, case: Case, tokens: np.ndarray, text: np.ndarray) -> list[Any]:
    """Returns the result of `generate` and, for a scored case, that of `log_likelihood`."""
    lengths = np.asarray(LENGTHS if case.ragged else [WIDTH] * ROWS)[: case.rows]
    options = {"prefill_block": case.prefill_block}
    found = [kvjax.generate(model, tokens, case.spec(), max_new_tokens=NEW, lengths=lengths, **options)]
    if case.scored:
        ends = lengths + NEW
        found.append(kvjax.log_likelihood(model, text, case.spec(), prompt_length=lengths, lengths=ends, **options))
    return found


def copies(model: Model, case: Case, tokens: np.ndarray) -> Context:
    """Returns copies of some rows, to which tokens have been fed; a mesh does not divide their number."""
    lengths = np.asarray(LENGTHS[: case.rows])
    begun = prefill(model, tokens, case.spec(), max_new_tokens=NEW, lengths=lengths)
    return extend(model, begun, tokens[:3, :4], lengths=[4, 1, 3], rows=[6, 0, 6])


def served(model: Model, case: Case, tokens: np.ndarray) -> list[list[int]]:
    """Returns the tokens of more requests than there are rows, in their order."""
    runner = Runner(model, case.spec(), rows=4, limits=Limits(WIDTH, NEW))
    wanted = [3, 12, 1, 7, 5, 12, 2, 9]
    numbers = [
        runner.submit(Request(tokens=row[:length], max_new_tokens=count))
        for row, length, count in zip(tokens, LENGTHS, wanted, strict=False)
    ]
    found = {result.id: result.tokens.tolist() for result in runner}
    return [found[number] for number in numbers]


def slots(state: Any, rows: int) -> list[np.ndarray]:
    """Returns the positions of each layer in the order of rows, heads and positions, whatever their slots."""
    found = [np.sort(np.asarray(layer.position)[:rows], axis=2) for layer in state.layers]
    return [position[position >= 0] for position in found]


def contents(state: Any, storage: Storage, rows: int) -> list[np.ndarray]:
    """Returns the decoded keys and values and the statistics of the live slots, in the order of `slots`."""
    found = []
    for layer in state.layers:
        key, value, position = read(storage, layer)
        at = np.asarray(position)[:rows]
        order = np.argsort(at, axis=2)
        live = np.take_along_axis(at, order, axis=2) >= 0
        for leaf in (key, value, *jax.tree.leaves(layer.stats)):
            own = np.asarray(leaf)[:rows]
            found.append(np.take_along_axis(own, order.reshape(*order.shape, *(1,) * (own.ndim - 3)), axis=2)[live])
    return found


def difference(a: Any, b: Any) -> float:
    """Returns the largest absolute difference; infinity if the shapes differ."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return float("inf")
    return float(np.max(np.abs(a - b), initial=0.0))


def steps(state: Any) -> list[float]:
    """Returns the distance of neighbouring codes in each store of integers: its largest scale."""
    stores = [store for layer in state.layers for store in layer.stores]
    return [float(jnp.max(codec["scale"])) for store in stores for codec in store.values() if "scale" in codec]


def shards(array: jax.Array) -> list[int]:
    """Returns the shape of the part on each device, which must be the same on all."""
    shapes = {tuple(shard.data.shape) for shard in array.addressable_shards}
    assert len(shapes) == 1, shapes
    return list(shapes.pop())


def collectives(text: str) -> dict[str, int]:
    """Returns the result shapes of the collectives in compiled HLO, and their numbers of elements."""
    found = {}
    pattern = r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    for match in re.finditer(pattern, text):
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
            found[f"{kind}[{dims}]"] = math.prod(int(n) for n in dims.split(",") if n)
    return found


def decode_program(case: Case, config: DecoderConfig, mesh: Any, scale: int) -> tuple[Any, Any]:
    """Compiles the decoding loop, for `scale` times as many slots as the case has.

    One layer suffices, and two of a loop: all layers of these models are alike.

    Returns:
      The shapes of the cache's state, and the program.
    """
    layers = 2 if case.stacked else 1
    config = dataclasses.replace(config, num_layers=layers, windows=(), max_positions=2 * scale * (WIDTH + NEW))
    full_rows = np.full((ROWS,), scale * WIDTH, np.int32)
    limits = Limits(scale * WIDTH, scale * NEW)
    sizes = sizes_for(full_rows, scale * NEW - 1, width=scale * WIDTH, block=None, limits=limits, last_fed=False)
    with sharding.on_mesh(mesh):
        layout = lower(case.spec(scale * 10), config, sizes, full_rows).layout
    shapes = decode_shapes(config, layout, jnp.float32, ROWS, mesh)
    if case.stacked:
        layout, shapes = with_loops(config, layout, shapes)
        assert [len(run) for run in layout.runs] == [layers]
    stop, steps = jax.ShapeDtypeStruct((0,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    with sharding.on_mesh(mesh):
        lowered = decode_steps.lower(*shapes, stop, steps, config=config, phase=layout.decode, sampler=Greedy())
    return shapes.carry.state, lowered.compile()


def check(case: Case) -> dict[str, Any]:
    config = case.config
    rng = np.random.default_rng(2)
    tokens, text = (rng.integers(0, config.vocab_size, (ROWS, n))[: case.rows] for n in (WIDTH, WIDTH + NEW))
    params = parameters(config)
    alone = run(Model(config, params), case, tokens, text)
    mesh = sharding.make_mesh(case.mesh)
    own = stacked(params) if case.stacked else params
    model = Model(config, jax.device_put(own, sharding.parameter_shardings(own, mesh)), mesh=mesh)
    spread = run(model, case, tokens, text)
    assert [len(each) for each in spread[0].layout.runs] == [case.layers] * case.stacked
    copied: dict[str, Any] = {}
    if case.rows < ROWS:
        one, other = copies(Model(config, params), case, tokens), copies(model, case, tokens)
        copied = {
            "error": difference(one.logits, other.logits[:3]),
            "rows": [one.num_rows, other.num_rows],
            "shards": shards(other.logits),
            "lengths": [each.state.length.tolist() for each in (one, other)],
        }

    requests = [served(each, case, tokens) for each in (Model(config, params), model)] if case.refilled else [[], []]
    data, split = mesh.shape["data"], mesh.shape["model"]
    kv_heads = config.num_kv_heads // split if config.num_kv_heads % split == 0 else config.num_kv_heads
    held = jax.tree.leaves([(layer.stores, layer.index) for result in spread for layer in result.state.layers])
    expected_state = [[ROWS // data, kv_heads, leaf.shape[2] // case.parts, *leaf.shape[3:]] for leaf in held]
    layer = model.params["layer_0"]
    experts = [config.num_experts] if config.num_experts else []
    # Weights are divided inside of a head too, and over the slots' devices.
    split *= mesh.shape.get("context", 1)
    rows = config.num_kv_heads * config.head_dim // split
    query = config.num_heads * config.head_dim // split
    chosen = {
        "query": (layer["attention"]["query"]["kernel"], [64, query]),
        "key": (layer["attention"]["key"]["kernel"], [64, rows]),
        "value": (layer["attention"]["value"]["kernel"], [64, rows]),
        "out": (layer["attention"]["out"]["kernel"], [query, 64]),
        "up": (layer["mlp"]["up"]["kernel"], [*experts, 64, 128 // split]),
        "down": (layer["mlp"]["down"]["kernel"], [*experts, 128 // split, 64]),
        "embed": (model.params["embed"]["tokens"], [96 // split, 64]),
        "norm": (layer["attention_norm"]["scale"], [64]),
    }

    # What crosses between devices is settled before what the suite leaves out, the optimisation of machine code.
    # Devices with few slots name all of them; where slots are divided, each has more than the most that it names.
    scale = 32 if case.parts > 1 else 1
    # Programs are read, which needs what only compiling yields.
    jax.config.update("jax_enable_compilation_cache", False)
    state, compiled = decode_program(case, config, mesh, scale)
    larger_state, larger = decode_program(case, config, mesh, 4 * scale)
    jax.config.update("jax_enable_compilation_cache", conftest.KEPT)
    position, more_shape = state.layers[0].position, larger_state.layers[0].position.shape
    assert more_shape[2] > 2 * position.shape[2]
    assert isinstance(position.sharding, NamedSharding)
    moved, more_moved = collectives(compiled.as_text()), collectives(larger.as_text())
    local = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)]
    both = list(zip(alone, spread, strict=True))
    return {
        "copies": copied,
        "served_equal": requests[0] == requests[1],
        "served": len(requests[1]),
        "tokens_equal": bool(np.array_equal(alone[0].tokens, spread[0].tokens)),
        "slots_equal": all(
            np.array_equal(x, y)
            for a, b in both
            for x, y in zip(slots(a.state, case.rows), slots(b.state, case.rows), strict=True)
        ),
        "logprob_error": max(difference(a.logprobs, b.logprobs) for a, b in both),
        "cache_error": max(
            difference(x, y)
            for a, b in both
            for x, y in zip(
                contents(a.state, case.storage, case.rows), contents(b.state, case.storage, case.rows), strict=True
            )
        ),
        "code_step": max((step for a, _ in both for step in steps(a.state)), default=0.0),
        "state_shards": [shards(leaf) for leaf in held],
        "expected_state_shards": expected_state,
        "parameter_shards": {name: shards(array) for name, (array, _) in chosen.items()},
        "expected_parameter_shards": {name: shape for name, (_, shape) in chosen.items()},
        "heads_divided": kv_heads < config.num_kv_heads or split == 1 or case.parts > 1,
        "collectives": moved,
        "largest_collective": max(moved.values(), default=0),
        "growing_collectives": {shape: size for shape, size in more_moved.items() if shape not in moved},
        # One number for each slot, and for the step's own token where that is not in a slot yet.
        "numbers_per_slot": math.prod(position.sharding.shard_shape(position.shape)[:2]) * (more_shape[2] + 1),
        "cache_shard_elements": math.prod(position.sharding.shard_shape(position.shape)) * config.head_dim,
        "aliased": compiled.memory_analysis().alias_size_in_bytes,
        "state_bytes": sum(local),
    }


def main() -> None:
    assert len(jax.devices()) == 8, jax.devices()
    for name in sys.argv[1:]:
        print(json.dumps({"name": name} | check(CASES[name])), flush=True)


if __name__ == "__main__":
    main()
