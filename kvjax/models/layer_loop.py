"""Layers that are alike as one loop, so that the time of compilation does not follow the number of layers.

XLA compiles every operation of every layer that it is given. A loop has the operations of one layer, and its iterations
differ in data: they read weights and caches of one layer by its index.

On CPUs, layers run as loops by default. kvjax's own products read one of several matrices by an index, see
`kvjax.products.IndexedMatrix`; other parameters, budgets and caches are in stacks, see `kvjax.numerics.stack_slices`.
SmolLM2-135M with a full cache in int8, 2 rows of 512 tokens, two cores of an EPYC: a first `generate` takes 9 CPU
seconds instead of 43, a step 26 ms instead of 31. With the codes of its GGUF file as weights, under h2o, one row of
512 tokens, two cores of another EPYC: 4 CPU seconds instead of 29. Layers are unrolled if they share arrays, have them
in host memory, or have quantised weights whose scales are not float32, as they would be converted for each product, or
whose inputs have another order than their own.

On other platforms, layers run as loops if their weights are in stacks (`kvjax.models.stacked_params`), into which
``KVJAX_LAYER_LOOPS=stacked`` makes `kvjax.load` read them. XLA fuses the slice of a weight with its product, on meshes
too, and TPU kernels of whole steps read and write a layer's slots within the stacks (`kvjax.kernels.step.stacks_tpu`).
Steps by other kernels are unrolled, as are codes of which a vector has less than a word in an array; those by XLA's
attention copy a layer's slots. The programs of OPT-30B on 8 TPU v5e then take 13 CPU seconds to compile instead of 41,
or of 22 with prompts by `kvjax.generation.layer_calls`, which is the default. It is not the default there, because XLA
reads the weights of later layers ahead only if layers are unrolled: by the TPU compiler's own estimate, which counts no
kernels, a step of OPT-30B's loop takes 1.3 times as long. On an H200, SmolLM2-135M in float32, 8 rows of 2,048 tokens,
takes 18 s for a first call, beside 17 other processes, and 4.7 ms a step with a full cache, 3.5 under h2o at 20 %;
steps of unrolled layers have not been measured there.

The environment variable ``KVJAX_LAYER_LOOPS=off`` unrolls all layers, to compare, and ``calls`` unrolls them but for
prompts, which call layers.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import KeyPath, tree_flatten_with_path

from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import LayerRun, LayerRuns, LayerStack
from kvjax.cache.shared_prefix import LayerPrefix
from kvjax.cache.state import Block, Layer, LayerKV
from kvjax.errors import ConfigError
from kvjax.kernels.decode import coded
from kvjax.models.config import DecoderConfig
from kvjax.models.stacked_params import StackedParams
from kvjax.numerics import stack_slices
from kvjax.numerics.slices import Slice, array_of, is_slice
from kvjax.parallel import host_memory
from kvjax.parallel.sharding import Params
from kvjax.products import IndexedMatrix, QuantizedMatrix, native, runs_native
from kvjax.products.indexed import can_index
from kvjax.products.quantized import is_quantized
from kvjax.storage.store import encode
from kvjax.typing import PyTree

Array = jax.Array

VARIABLE = "KVJAX_LAYER_LOOPS"  # of the environment, and its values:
ON, OFF, STACKED, CALLS = "on", "off", "stacked", "calls"
SHORTEST = 2  # layers of a loop
LARGEST = 1 << 16  # numbers of a parameter that is stacked, and so held twice
NO_MODULES = frozenset({"policy", "sides", "gates"})  # optional parameters of an attention that are trees of arrays


def possible_runs(config: DecoderConfig, params: Params, prompt: Phase, decode: Phase) -> LayerRuns:
    """Returns the layers that run as loops on this machine; all others are unrolled.

    Args:
      config: the decoder.
      params: its parameters.
      prompt: the groups of heads of each layer while the prompt goes in.
      decode: the groups of heads of each layer while decoding.

    Raises:
      ConfigError: see `setting`.
    """
    if setting() in (OFF, CALLS) or config.num_experts:
        return ()
    by_products = runs_native() and native.load(native.INDEXED_PRODUCT) is None
    if not by_products and not isinstance(params, StackedParams):
        return ()
    keys = [_key(config, params, (prompt[index], decode[index]), index) for index in range(config.num_layers)]
    found, start = [], 0
    for index in range(1, config.num_layers + 1):
        if index == config.num_layers or keys[index] is None or keys[index] != keys[start]:
            if keys[start] is not None and index - start >= SHORTEST:
                found.append(LayerRun(start, index))
            start = index
    return tuple(found)


def setting() -> str:
    """Returns the value of ``KVJAX_LAYER_LOOPS``.

    Raises:
      ConfigError: it is none of those that exist.
    """
    given = os.environ.get(VARIABLE, ON).strip().lower()
    if given not in (ON, OFF, STACKED, CALLS):
        raise ConfigError(f"{VARIABLE}={given!r} must be {ON}, {OFF}, {STACKED} or {CALLS}.")
    return given


def wants_stacks(config: DecoderConfig, mesh: Mesh | AbstractMesh | None) -> bool:
    """Returns whether exact weights of layers should be in stacks; see `kvjax.models.stacked_params`.

    On one CPU, kvjax's own products loop over separate matrices, which is faster than XLA's products with stacks.

    Args:
      config: the decoder.
      mesh: the mesh, or None for the default device.
    """
    return setting() == STACKED and not config.num_experts and (mesh is not None or jax.default_backend() != "cpu")


def _key(config: DecoderConfig, params: Params, groups: tuple[tuple[Group, ...], ...], index: int) -> Any:
    """Returns what the layers of a loop have in common; None for a layer that is unrolled."""
    every = [group for phase in groups for group in phase]
    dtype = params["embed"]["tokens"].dtype
    in_stacks = isinstance(params, StackedParams)
    if not all(_can_loop(group, config.head_dim, dtype, in_stacks) for group in every):
        return None
    own = params.layer_shapes if isinstance(params, StackedParams) else params[f"layer_{index}"]
    leaves, tree = jax.tree.flatten(own)
    if not in_stacks:
        if any(map(host_memory.on_host, leaves)):
            return None
        others = [leaf for path, leaf in _leaves(own) if not _is_indexed(path, leaf)]
        if any(map(is_quantized, others)):
            return None
        if max((leaf.size for leaf in others), default=0) > LARGEST:
            return None
    # The first layer has no hint.
    first = index == 0 and any(group.selection.ahead for group in every)
    return config.kind(index), groups, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), first


def _can_loop(group: Group, dim: int, dtype: jnp.dtype, in_stacks: bool) -> bool:
    """Whether a group's slots can be slices of stacks, without copies that take long."""
    if group.storage.on_host or group.arrangement.borrows(group) or group.slot_axes:
        return False
    by_kernel = group.step_implementation is not None or group.attn_implementation != "xla"
    if in_stacks:
        # A prompt is limited by arithmetic, which hides the copy of a layer's slots.
        return not group.decoding or not by_kernel or _takes_slices(group, dim, dtype)
    # Slices of codes that kvjax's own products do not read would be copied in each step. While the products are being
    # built they are: a program that is compiled soon is worth more then.
    reasons = [coded.refuses(codec, dim, dtype) for codec in group.codecs if codec is not None]
    return not by_kernel and all(reason in (None, native.BUILDING) for reason in reasons)


def _takes_slices(group: Group, dim: int, dtype: jnp.dtype) -> bool:
    """Whether the kernel of a decoding step reads and writes the slots of a layer within a stack."""
    if not _steps_by_slices(group) or not any(group.codecs):
        return _steps_by_slices(group)
    from kvjax.kernels.step import stacks_tpu  # Pallas takes long to import

    vectors = jax.ShapeDtypeStruct((1, 1, stacks_tpu.LANES, dim), dtype)
    return stacks_tpu.takes_parts(jax.eval_shape(lambda x: encode(group.stores[0], x, x, dtype), vectors))


def _steps_by_slices(group: Group) -> bool:
    """Whether a decoding step is one kernel, which can be given slices."""
    return group.step_implementation == "pallas_tpu"


def _leaves(params: Params) -> list[tuple[KeyPath, Any]]:
    """Returns the parameters of a layer with their paths; a quantised matrix is one."""
    return tree_flatten_with_path(params, is_leaf=is_quantized)[0]


def _is_indexed(path: KeyPath, leaf: Array | QuantizedMatrix) -> bool:
    """Whether the parameters of all layers are operands of a product with an index; others are stacked."""
    names = [getattr(each, "key", None) for each in path]
    # Policies and storages choose the names of their arrays, and read them as plain arrays.
    return names[-1] == "kernel" and not NO_MODULES & {*names} and can_index(leaf)


def runs_now(stacked: LayerRuns, config: DecoderConfig, params: Params, phase: Phase) -> LayerRuns:
    """Returns the runs of a state in stacks if they may run as loops here and now, or none.

    Args:
      stacked: see `kvjax.cache.layer_stack.stacked_runs`.
      config: the decoder.
      params: its parameters.
      phase: the groups of heads of each layer.
    """
    allowed = possible_runs(config, params, phase, phase) if stacked else ()
    inside = [any(each.start <= run.start and run.stop <= each.stop for each in allowed) for run in stacked]
    return stacked if all(inside) else ()


class RunParams(flax.struct.PyTreeNode):
    """The parameters of the layers of a run.

    Attributes:
      run: the layers.
      tree: of the parameters of a layer.
      first: index of the run's first layer in `stacks`.
      matrices: for each parameter of a layer the matrices of all layers; () if it is stacked.
      stacks: for each parameter [L, ...]; None if its matrices are apart.
    """

    run: LayerRun = flax.struct.field(pytree_node=False)
    tree: jax.tree_util.PyTreeDef = flax.struct.field(pytree_node=False)
    first: int = flax.struct.field(pytree_node=False)
    matrices: tuple[tuple[Array | QuantizedMatrix, ...], ...]
    stacks: tuple[Array | None, ...]

    def of_layer(self, index: Array) -> Params:
        """Returns the parameters of the layer of an index within the run."""
        leaves: list[Any] = [
            IndexedMatrix(matrices, index)
            if stack is None
            else jax.lax.dynamic_index_in_dim(stack, self.first + index, 0, False)
            for matrices, stack in zip(self.matrices, self.stacks, strict=True)
        ]
        found: Params = jax.tree.unflatten(self.tree, leaves)
        return found


def run_params(params: Params, run: LayerRun) -> RunParams:
    """Collects the parameters of a run, outside of loops over tokens, so that steps stack nothing."""
    if isinstance(params, StackedParams):
        leaves, tree = jax.tree.flatten(params.layers)
        return RunParams(run, tree, run.start, ((),) * len(leaves), tuple(leaves))
    each = [_leaves(params[f"layer_{index}"]) for index in run.layers]
    matrices: list[tuple[Array | QuantizedMatrix, ...]] = []
    stacks: list[Array | None] = []
    for leaves in zip(*each, strict=True):
        path, arrays = leaves[0][0], tuple(leaf for _, leaf in leaves)
        indexed = _is_indexed(path, arrays[0])
        matrices.append(arrays if indexed else ())
        stacks.append(None if indexed else jnp.stack(arrays))
    tree = jax.tree.structure(params[f"layer_{run.start}"], is_leaf=is_quantized)
    return RunParams(run, tree, 0, tuple(matrices), tuple(stacks))


class Output(Protocol):
    """The result of a layer; see `kvjax.models.decoder_layer.LayerOutput`."""

    @property
    def x(self) -> Array: ...
    @property
    def cache(self) -> Layer: ...
    @property
    def entered(self) -> Array: ...


T = TypeVar("T", bound=Output)
S = TypeVar("S", Layer, LayerKV)


class LoopOutput(NamedTuple):
    """The result of a run.

    Attributes:
      x: [B, n, hidden], after the last layer.
      entered: [B, n, hidden], the input of the last layer's attention.
      cache: of its layers.
      collected: the results of `collect`, stacked over the layers, leaves [L, ...]; None without it.
    """

    x: Array
    entered: Array
    cache: LayerStack
    collected: PyTree


def run_loop(
    run_layer: Callable[[Params, Array, Layer | None, Block, Array | None], T],
    own: RunParams,
    x: Array,
    hint: Array | None,
    cache: LayerStack | None,
    block: Block,
    groups: tuple[Group, ...],
    collect: Callable[[T], PyTree] | None = None,
    prefix: LayerPrefix | None = None,
) -> LoopOutput:
    """Runs the layers of a run, one after the other.

    Args:
      run_layer: runs one layer; (parameters, x, cache, block, hint) -> its output.
      own: from `run_params`.
      x: [B, n, hidden], the input of the first layer.
      hint: [B, n, hidden], the input of the attention of the layer before; None if no selection looks ahead.
      cache: of the layers; None if the block is the whole prompt.
      block: the tokens, with the budgets of all layers of the model.
      groups: of heads, of each layer.
      collect: the output of a layer -> a tree of arrays, which is returned of each layer; None for nothing.
      prefix: the text that all rows follow, in these layers; None = there is none.
    """
    run = own.run
    budgets = jax.tree.map(lambda *rows: jnp.stack(rows), *(block.budget[index] for index in run.layers))

    def at(index: Array, x: Array, layer: Any, hint: Array | None, behind: LayerPrefix | None) -> tuple[Any, ...]:
        """Returns the arguments of a layer."""
        budget = jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, index, 0, False), budgets)
        tokens = block.replace(budget=budget, layer=run.start + index, prefix=behind)
        return own.of_layer(index), x, layer, tokens, hint

    def prefix_at(index: Array) -> LayerPrefix | None:
        """Returns the prefix in one layer, whose arrays are slices."""
        return None if prefix is None else prefix.replace(slots=_slices(prefix.slots, index, "prefix "))

    Carry = tuple[Array, Array, Layer, PyTree]

    def body(index: Array, carry: Carry) -> Carry:
        x, entered, stacks, collected = carry
        index = index.astype(jnp.int32)  # it is int64 where 64 bits are enabled
        slices = _slices(stacks, index)
        given = None if cache is None else _given(slices, groups)
        output = stack_slices.call(run_layer, *at(index, x, given, None if hint is None else entered, prefix_at(index)))
        after = jax.tree.map(Slice.replaced, slices, output.cache, is_leaf=is_slice)
        collected = jax.tree.map(
            lambda stack, new: jax.lax.dynamic_update_index_in_dim(stack, new, index, 0),
            collected, values_of(output),
        )  # fmt: skip
        return output.x, output.entered, after, collected

    def values_of(output: T) -> PyTree:
        return None if collect is None else _arrays(collect(output))

    def first() -> tuple[Layer, PyTree]:
        given = None if cache is None else cache.layer_at(0)
        output = run_layer(*at(jnp.int32(0), x, given, hint, _arrays(prefix_at(jnp.int32(0)))))
        return output.cache, values_of(output)

    stacks, collected = None if cache is None else cache.layer, None
    if stacks is None or collect is not None:
        layer, values = jax.eval_shape(first)
        # [L, ...] each
        collected = jax.tree.map(lambda leaf: jnp.zeros((len(run), *leaf.shape), leaf.dtype), values)
        if stacks is None:
            # [B, L, ...] each
            stacks = jax.tree.map(lambda leaf: jnp.zeros((leaf.shape[0], len(run), *leaf.shape[1:]), leaf.dtype), layer)
    carry = (x, x if hint is None else hint, stacks, collected)
    x, entered, stacks, collected = jax.lax.fori_loop(0, len(run), body, carry)
    return LoopOutput(x, entered, LayerStack(stacks, len(run)), collected)


def _arrays(tree: PyTree) -> PyTree:
    """Returns a tree with arrays in place of slices."""
    return jax.tree.map(array_of, tree, is_leaf=is_slice)


def _slices(stacks: S, index: Array, label: str = "") -> S:
    """Returns a layer, or a group of its heads, whose leaves are slices of stacks; their names begin with a label."""
    leaves, tree = jax.tree.flatten(stacks)
    slices = [Slice(leaf, index, f"{label}{i}") for i, leaf in enumerate(leaves)]
    made: S = jax.tree.unflatten(tree, slices)
    return made


def _given(slices: Layer, groups: tuple[Group, ...]) -> Layer:
    """Returns what a layer is given: slices of what it writes slot by slot, and arrays of what it writes as a whole."""

    def of_group(own: LayerKV, group: Group) -> LayerKV:
        # A kernel writes all positions and statistics of the layer.
        whole = group.evicts or _steps_by_slices(group)
        by_slot = {"stores": own.stores} | ({} if whole else {"position": own.position})
        read: LayerKV = _arrays(own)
        return read.replace(**by_slot)

    return Layer(map(of_group, slices, groups))
