"""Loads models from Hugging Face folders, from the hub and from GGUF files; `kvjax.checkpoint.writer` saves them."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.typing import DTypeLike

from kvjax import host, products
from kvjax.arguments import check_type
from kvjax.checkpoint import gguf, names, quantized, readers, shards
from kvjax.checkpoint.locate import FORMATS, listing, locate, shorten
from kvjax.checkpoint.readers import Stored
from kvjax.checkpoint.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from kvjax.checkpoint.writer import save
from kvjax.errors import CheckpointError, ConfigError, shown
from kvjax.models import families, generation_config, layer_loop, offload, quantize
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.models.quantize import WeightCodes, as_weight_codes
from kvjax.models.stacked_params import LAYER, StackBuilder
from kvjax.models.values import Json
from kvjax.parallel import distributed, sharding
from kvjax.parallel.meshes import make_mesh
from kvjax.parallel.rules import Rules, using
from kvjax.parallel.sharding import Params, PyTree
from kvjax.products import QuantizedMatrix

Array = jax.Array
DTYPES = ("float32", "bfloat16", "float16")  # of parameters
STORED = "stored"  # weights as the codes that the checkpoint has


def load(
    path_or_name: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | str | None = None,
    rules: Rules | None = None,
    host_weights: float = 0.0,
    weights: WeightCodes | str | None = None,
) -> Model:
    """Loads a model from a Hugging Face folder, from the hub or from a GGUF file.

    Tensors are read one at a time, converted to the target dtype and moved to their devices. The host therefore needs
    memory for those parameters that stay on the host and for the largest tensor. The same holds for weights that are
    quantised here.

    Where the mesh spans several processes (`kvjax.parallel.distributed`), each reads the bytes of its own shards; of
    GPTQ and AWQ folders, all.

    Weights of GPTQ and AWQ folders (`kvjax.checkpoint.quantized`) stay quantised. A generation_config.json is read for
    `kvjax.generate_text`; see `kvjax.models.generation_config`.

    GGUF files (`kvjax.checkpoint.gguf`) need the package ``gguf``, ``pip install kvjax[gguf]``. Their weights are
    dequantised, unless ``weights="stored"`` keeps the codes of projections, of the output head and of the embedding in
    Q8_0, Q4_0 and Q4_1.

    Args:
      path_or_name: a folder with ``config.json`` and weights (safetensors, Flax msgpack, or PyTorch if torch is
        installed; one file, or shards with an index), a GGUF file (any one of several), the name of a model in
        kvjax/pretrained or in a package (``smollm2-135m-instruct``), or a hub id such as ``facebook/opt-125m``. An
        existing folder or file has precedence.
      dtype: of the parameters: float32, bfloat16 or float16. None for float32 on CPUs, where narrower weights decode
        ten times slower, and for bfloat16 on GPUs and TPUs.
      mesh: the mesh to shard the parameters over, by `kvjax.parallel.sharding.PARAMETERS`, or its axes as text, such as
        ``"data:2,model:4"``; None for the default device.
        If its axis ``model`` does not divide the KV heads, the model has a mesh of the same devices that also divides
        slots; see `kvjax.parallel.sharding.fit`.
      rules: over which axes of the mesh each dimension is divided; None for the defaults of `kvjax.Rules`.
      host_weights: the share of the layers whose weights stay in host memory, see `kvjax.models.offload`.
      weights: ``int8``, ``int4``, ``int2`` or a `kvjax.WeightCodes`, to quantise the projections; ``stored``, to keep
        the codes that the checkpoint has; None = exact, but for GPTQ and AWQ.

    Raises:
      CheckpointError: if there is no checkpoint, a file is damaged, a tensor holds NaN, or the tensors are not those of
        the configuration. The message lists the tensors concerned.
      ConfigError: if the family, an option, the dtype or the format of quantised weights is not supported, or the mesh
        leaves out a process.
    """
    mesh = make_mesh(mesh) if isinstance(mesh, str) else mesh
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f'mesh must be a mesh, or its axes such as "data:2,model:4"; got {shown(mesh)}.')
    if rules is not None:
        valid = "a kvjax.Rules, such as kvjax.Rules(mlp='model') or kvjax.Rules.parse('mlp=model')"
        check_type("rules", rules, Rules, valid, error=ConfigError)
    if mesh is None:
        return _load(locate(path_or_name), dtype, mesh, rules or Rules(), host_weights, weights)
    distributed.check_mesh(mesh)
    with distributed.collective(f"loading {path_or_name}"):
        return _load(locate(path_or_name), dtype, mesh, rules or Rules(), host_weights, weights)


def read_config(checkpoint: Path) -> DecoderConfig:
    """Reads the decoder's description alone.

    Args:
      checkpoint: a folder or a GGUF file.

    Raises:
      CheckpointError: if it is damaged.
      ConfigError: see `load`.
    """
    return families.read(_open_source(checkpoint).config)


def _load(
    checkpoint: Path,
    dtype: DTypeLike | None,
    mesh: Mesh | None,
    rules: Rules,
    host_weights: float,
    weights: WeightCodes | str | None,
) -> Model:
    """See `load`."""
    host.keep_programs_by_default()
    if mesh is None:
        products.begin()
    keep = weights == STORED
    target, codes = _dtype(dtype, mesh), None if keep else as_weight_codes(weights)
    source = _open_source(checkpoint)
    try:
        config = families.read(source.config)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint}: {error}") from None
    mesh = None if mesh is None else sharding.fit(mesh, config.num_kv_heads, rules)
    form = source.form
    if form is not None and codes is not None:
        raise ConfigError(
            f"{checkpoint} holds {form.bits}-bit weights of {form.method}; leave out weights={codes.name!r}."
        )
    if keep and source.coded is None and form is None:
        raise ConfigError(f"{checkpoint} has exact weights; weights={STORED!r} is for codes of GGUF, GPTQ and AWQ.")
    tokenizer = source.tokenizer(config)
    on_host = offload.host_layers(config.num_layers, host_weights)
    try:
        stored = _canonical(checkpoint, config, source.tensors(config))
        _tie(config, stored)
        config = _untie(config, stored, everywhere=mesh is not None)
        quantize.check(config, codes)
        place = _Place(mesh, on_host)
        params: dict[str, PyTree] = {}
        builder: StackBuilder | None = None
        if layer_loop.wants_stacks(config, mesh) and not (codes or keep or form or on_host):
            builder = StackBuilder(config.num_layers)
        stacks: dict[names.Path, list[PyTree]] = {}
        kept = 0
        for tensor in _expected(source, config, stored):
            parts: list[PyTree] | None = None
            coded = codes is not None and codes.takes(tensor.paths[0])
            if keep and source.coded is not None and quantize.can_be_codes(tensor.paths[0]):
                parts = source.coded(config, tensor)
                kept += parts is not None
                if parts is not None and tensor.paths[0] == sharding.EMBEDDING:
                    # Its dtype is that of the activations.
                    parts = [dataclasses.replace(part, scale=part.scale.astype(target)) for part in parts]
            if parts is not None:
                pass
            elif form is not None and quantized.is_stored(tensor, stored):
                parts = quantized.read(tensor, stored, form, target)
            else:
                # Codes are made of exact weights, whatever the dtype of the model.
                kind = np.dtype(np.float32) if coded else target
                if mesh is not None and distributed.count() > 1:
                    parts = [*shards.read(tensor, stored[tensor.name], kind, place.of_tensor(tensor))]
                else:
                    whole = stored[tensor.name].read(kind, transposed_memory=tensor.out_first and not tensor.rearranged)
                    parts = [*tensor.split(whole)]
                    del whole
            for path in tensor.paths:
                part = parts.pop(0)
                if tensor.stack:
                    entries = stacks.setdefault(path, [])
                    entries.append(part)
                    if len(entries) < tensor.stack:
                        continue
                    part = _stacked(stacks.pop(path), path)
                with using(rules):
                    made = place.coded(part, path, codes, target) if codes and coded else place(part, path)
                if builder is not None and path[0].startswith(LAYER):
                    assert isinstance(made, jax.Array), "quantized weights are not stacked"
                    builder.add(path, made)
                else:
                    node = params
                    for key in path[:-1]:
                        node = node.setdefault(key, {})
                    node[path[-1]] = made
                del part, made
    except OSError as error:
        raise CheckpointError(f"{error.filename or checkpoint} cannot be read: {error.strerror or error}.") from None
    if keep and source.coded is not None and not kept:
        raise ConfigError(
            f"{checkpoint} has no matrix of the types {', '.join(gguf.KEPT)}, whose codes can be kept; leave out "
            f"weights={STORED!r}."
        )
    held: Params = params if builder is None else builder.build(params)
    sharding.warn_of_copies(held, mesh, rules)
    return Model(config, held, tokenizer, mesh, source.defaults, rules)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint, as `_load` reads it.

    Attributes:
      path: the folder or the file.
      config: its ``config.json``.
      described_by: the part of the checkpoint that lists the tensors, for messages.
      tokenizer: makes the tokenizer.
      tensors: opens the tensors.
      expected: the tensors of a decoder.
      defaults: of generation.
      form: how quantised weights are held; None = the weights are exact, or of GGUF.
      coded: reads the parameters of a tensor as the codes that the file has; None = it has none, or `form` says.
    """

    path: Path
    config: Json
    described_by: str
    tokenizer: Callable[[DecoderConfig], Tokenizer | None]
    tensors: Callable[[DecoderConfig], list[Stored]]
    expected: Callable[[DecoderConfig], list[names.Tensor]] = names.tensors
    defaults: generation_config.GenerationConfig = dataclasses.field(default_factory=generation_config.GenerationConfig)
    form: quantized.StoredFormat | None = None
    coded: Callable[[DecoderConfig, names.Tensor], list[QuantizedMatrix] | None] | None = None


def _open_source(checkpoint: Path) -> _Source:
    return _gguf(checkpoint) if checkpoint.is_file() else _folder(checkpoint)


def _folder(folder: Path) -> _Source:
    """Opens a Hugging Face folder."""
    raw = readers.read_json(folder / "config.json")
    form = quantized.stored_format(folder, raw)
    return _Source(
        folder, raw, "config.json",
        tokenizer=lambda config: load_tokenizer(folder, config),
        tensors=lambda config: _open(folder, form),
        defaults=_generation_config(folder),
        form=form,
    )  # fmt: skip


def _gguf(path: Path) -> _Source:
    """Opens a GGUF file."""
    try:
        container = gguf.read(path)
        return _Source(
            path, gguf.config_json(container), "metadata",
            tokenizer=lambda config: make_tokenizer(path, gguf.tokenizer_files(container), config),
            tensors=lambda config: gguf.stored(container, config),
            expected=lambda config: gguf.tensors(container, config),
            coded=lambda config, tensor: gguf.coded(container, config, tensor),
        )  # fmt: skip
    except ImportError as error:
        raise CheckpointError(f"{path} needs the package {error.name}: pip install kvjax[gguf].") from None


def _generation_config(folder: Path) -> generation_config.GenerationConfig:
    """Reads a folder's generation_config.json, if there is one."""
    path = folder / generation_config.FILE
    if not path.is_file():
        return generation_config.GenerationConfig()
    try:
        return generation_config.read(readers.read_json(path), path.read_bytes())
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _dtype(dtype: DTypeLike | None, mesh: Mesh | None) -> np.dtype:
    """Returns the checked dtype of the parameters, or the default of the platform."""
    if dtype is None:
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not valid for weights; valid: {', '.join(DTYPES)}, or None.")
    return found


def _open(folder: Path, quantised: quantized.StoredFormat | None) -> list[Stored]:
    """Opens the weights of a folder, in the first format of `FORMATS` that it has.

    Args:
      folder: the folder.
      quantised: how it holds quantised weights, whose file may have another name.

    Returns:
      Every tensor of the folder.
    """
    named = quantised and quantised.file and f"{quantised.file}.safetensors"
    if named and (folder / named).is_file():
        return list(readers.safetensors(folder / named).values())
    for form in FORMATS:
        if (folder / form.file).is_file():
            return list(form.read(folder / form.file).values())
        if (folder / form.index).is_file():
            weights = readers.read_json(folder / form.index).get("weight_map")
            if not isinstance(weights, dict) or not weights or not all(isinstance(f, str) for f in weights.values()):
                raise CheckpointError(f"{folder / form.index} must map tensors to files under weight_map.")
            shards = sorted(set(weights.values()))
            if outside := [shard for shard in shards if not _is_inside(folder, shard)]:
                raise CheckpointError(
                    f"{folder / form.index} names {shorten([shown(each) for each in outside])} under weight_map; the "
                    "files of a checkpoint must be in its folder."
                )
            if absent := [shard for shard in shards if not (folder / shard).is_file()]:
                raise CheckpointError(
                    f"{folder} lacks {len(absent)} of the {len(shards)} files that {form.index} names: "
                    f"{shorten(absent)}. Was the download interrupted?"
                )
            return [tensor for shard in shards for tensor in form.read(folder / shard).values()]
    valid = ", ".join(name for form in FORMATS for name in (form.file, form.index))
    raise CheckpointError(f"{folder} has no weights that kvjax reads ({valid}); it has {listing(folder)}.")


def _is_inside(folder: Path, name: str) -> bool:
    """Returns whether the name of a file in a JSON file leads to a place in the folder.

    The last part may be a link to anywhere: the hub's cache has links to its blobs, and users link files on other
    disks. A link is in the folder because someone made it; a name is what a stranger wrote.
    """
    path = Path(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        return False
    return (folder / path).parent.resolve().is_relative_to(folder.resolve())


def _canonical(folder: Path, config: DecoderConfig, found: Sequence[Stored]) -> dict[str, Stored]:
    """Returns the tensors by the names that `names.tensors` uses, without the buffers of old releases."""
    stored: dict[str, Stored] = {}
    for tensor in found:
        name = names.canonical(config.family, tensor.name)
        if name in stored:
            raise CheckpointError(
                f"{folder} holds {name} twice: as {stored[name].name} in {stored[name].file} and as {tensor.name} in "
                f"{tensor.file}."
            )
        if name is not None:
            stored[name] = tensor
    return stored


def _tie(config: DecoderConfig, stored: dict[str, Stored]) -> None:
    """Takes the output head of `stored` for the embedding if that is absent and the configuration ties the two.

    A file has one name of a shared tensor; which of the two is up to the program that wrote it.
    """
    embedding, head = names.embedding_and_head(config.family)
    if config.tie_embeddings and embedding not in stored and head in stored:
        stored[embedding] = stored.pop(head)


def _untie(config: DecoderConfig, stored: dict[str, Stored], *, everywhere: bool) -> DecoderConfig:
    """Handles an output head that is stored although the configuration ties it to the embedding.

    Removes the head from `stored` if it is equal to the embedding. Otherwise the head is used, as in transformers.

    Args:
      config: the configuration.
      stored: the tensors by name.
      everywhere: whether all processes load the model, of which each then compares some of the rows.

    Returns:
      The configuration, untied in the second case.
    """
    embedding, head = (stored.get(name) for name in names.embedding_and_head(config.family))
    if not config.tie_embeddings or head is None or embedding is None or head.shape != embedding.shape:
        return config
    native = readers.FLOATS.get(embedding.dtype, np.dtype(np.float32))
    number, count = (distributed.number(), distributed.count()) if everywhere else (0, 1)
    rows = number * head.shape[0] // count, (number + 1) * head.shape[0] // count
    one, other = (each.read_block([[rows], [(0, head.shape[1])]], native) for each in (embedding, head))
    equal = np.array_equal(one, other)
    if distributed.from_all(equal).all() if everywhere else equal:
        del stored[names.embedding_and_head(config.family)[1]]
        return config
    warnings.warn(
        f"config.json ties the output head to the embedding, but {head.name} in {head.file} differs from it; kvjax "
        "uses the head (set tie_word_embeddings to false to silence this).",
        stacklevel=3,
    )
    return dataclasses.replace(config, tie_embeddings=False)


def _expected(source: _Source, config: DecoderConfig, stored: Mapping[str, Stored]) -> list[names.Tensor]:
    """Returns the tensors to read, in their exact form.

    Raises:
      CheckpointError: if a tensor is missing, superfluous or has another shape. The message lists all of them.
    """
    expected, form = source.expected(config), source.form
    wanted: dict[str, tuple[int, ...]] = {}
    for tensor in expected:
        coded = form is not None and quantized.is_stored(tensor, stored)
        wanted |= form.tensors(tensor, stored) if form and coded else {tensor.name: tensor.shape}
    missing = [name for name in wanted if name not in stored]
    ignored = quantized.zero_biases(stored, wanted) if form else []
    extra = [stored[name].name for name in stored if name not in wanted and name not in ignored]
    misshapen = [
        f"{name} is {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    problems = {"missing": missing, "extra": extra, "misshapen": misshapen}
    if any(problems.values()):
        what = "; ".join(f"{len(found)} {kind}: {', '.join(found)}" for kind, found in problems.items() if found)
        raise CheckpointError(
            f"the weights in {source.path} do not match its {source.described_by} ({config.family}, "
            f"{config.num_layers} layers, hidden size {config.hidden_size}, {len(wanted)} tensors): {what}."
        )
    return expected


def _stacked(entries: list[PyTree], path: names.Path) -> Any:
    """Joins the entries of a parameter, each of which was a tensor of its own."""
    try:
        return jax.tree.map(lambda *each: np.stack(each), *entries)
    except ValueError:
        raise CheckpointError(
            f"the quantized matrices of {'/'.join(path)} differ in form (some have activation order, or groups of "
            "another size); kvjax reads experts of one form."
        ) from None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Moves parameters to their devices and waits, so that the host's copy is freed before the next tensor is read.

    Attributes:
      mesh: the mesh, or None.
      on_host: the layers in host memory.
    """

    mesh: Mesh | None
    on_host: frozenset[int]

    def __call__(self, part: np.ndarray | QuantizedMatrix | shards.Shards, path: names.Path) -> Array | QuantizedMatrix:
        if isinstance(part, QuantizedMatrix):
            return quantize.placed(part, path, self.mesh, on_host=offload.is_on_host(path, self.on_host))
        if isinstance(part, shards.Shards):
            place = self.of(path, part.whole)
            assert place is not None
            return jax.block_until_ready(part.assemble(place))
        return jax.block_until_ready(jax.device_put(part, self.of(path, part.shape)))

    def of(self, path: names.Path, shape: names.Shape) -> Sharding | None:
        """Returns the sharding of a parameter; None for the default device."""
        place: Sharding | None = None
        if self.mesh is not None:
            place = NamedSharding(self.mesh, sharding.parameter_spec(path, shape, self.mesh))
        return offload.in_host_memory(place) if offload.is_on_host(path, self.on_host) else place

    def of_tensor(self, tensor: names.Tensor) -> list[Sharding]:
        """Returns the shardings of a tensor's parameters on the mesh."""
        stack = (tensor.stack,) if tensor.stack else ()
        found = [self.of(path, (*stack, *shape)) for path, shape in zip(tensor.paths, tensor.shapes, strict=True)]
        return [place for place in found if place is not None]

    def coded(self, part: Any, path: names.Path, codes: WeightCodes, dtype: np.dtype) -> QuantizedMatrix:
        """Quantises a matrix on its devices."""
        exact: Any = dataclasses.replace(self, on_host=frozenset())(part, path)
        on_host = offload.is_on_host(path, self.on_host)
        return quantize.quantized(exact, path, codes, self.mesh, dtype, on_host=on_host)


__all__ = ["FORMATS", "load", "read_config", "save"]
