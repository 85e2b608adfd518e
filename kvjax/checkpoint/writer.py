"""Saves a model as a Hugging Face folder, atomically."""

import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from kvjax.arguments import check_path
from kvjax.cache import shared_prefix
from kvjax.checkpoint import chat, names, quantized, readers
from kvjax.errors import CheckpointError
from kvjax.models import families, generation_config
from kvjax.models.model import Model, check_model
from kvjax.models.stacked_params import LAYER, StackedParams, with_rest
from kvjax.numerics.slices import slice_of
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params, PyTree
from kvjax.products.quantized import dequantize, is_quantized

SHARD_BYTES = 5_000_000_000  # maximum size of a safetensors file
HEADER_ALIGNMENT = 8  # a safetensors header is padded to a multiple of this number of bytes
MAX_LISTED = 5  # files that an error message lists
#: Names of the files of a checkpoint. `save` replaces a folder only if it contains nothing else.
_CHECKPOINT_FILES = re.compile(
    r"(.*config\.json|(model|pytorch_model|flax_model)[\w.-]*|tokenizer[\w.]*|vocab\.json|merges\.txt|"
    r"special_tokens_map\.json|added_tokens\.json|README\.md|LICENSE[\w.]*|\.gitattributes|chat_template[\w.]*)"
)


def save(model: Model, folder: str | Path) -> None:
    """Saves the configuration, the weights and the tokenizer of a model.

    Writes to a hidden folder next to the target and renames it at the end, so that the target is either complete or
    unchanged. An existing checkpoint is replaced.

    A model that is spread over several processes (`kvjax.parallel.distributed`) is saved by all of them together: each
    calls this, one tensor after the other is collected, and the first process writes.

    Args:
      model: the model.
      folder: the folder to write: config.json, safetensors files of at most 5 GB, and the files of the tokenizer and
        of generation that the model was loaded with.
        Quantised weights are written in version 2 of GPTQ's format, with scales in their own dtype.

    Raises:
      CheckpointError: if the folder contains anything else than a checkpoint or cannot be written, or the parameters
        are not those of the configuration.
      KvjaxError: in the other processes, if the first one cannot write.
    """
    check_model(model)
    check_path("folder", folder)
    shared_prefix.refuse(model.params, "kvjax.save")
    folder = Path(folder).expanduser().resolve()
    raw = families.write(model.config)
    params = _writable(model.params)
    found = [(tensor, _parts(tensor, params)) for tensor in names.tensors(model.config)]
    entries = [entry for tensor, parts in found for entry in _entries(tensor, parts)]
    raw |= {"dtype": entries[0].dtype, "torch_dtype": entries[0].dtype}
    if matrices := [part for _, parts in found for part in parts if is_quantized(part)]:
        head = is_quantized(params.get("head", {}).get("kernel"))
        raw["quantization_config"] = quantized.settings(matrices, head=head)
    files = _files(entries)
    pending = collections.deque(entry for own in files.values() for entry in own)
    shared = distributed.shares(model.params)
    with distributed.collective(f"saving {folder}") if shared else contextlib.nullcontext():
        try:
            if distributed.is_first() or not shared:
                _write(model, folder, raw, files, lambda: pending.popleft().read())
        finally:
            # Every process takes part in reading what is spread over them, also if the first one has failed.
            while shared and pending:
                pending.popleft().read()


def _write(model: Model, folder: Path, raw: readers.Json, files: "Files", read_next: Callable[[], np.ndarray]) -> None:
    """Writes the files of a checkpoint.

    Args:
      model: see `save`.
      folder: see `save`.
      raw: what config.json contains.
      files: of the weights.
      read_next: returns the tensors of `files`, in their order.
    """
    _check_replaceable(folder)
    staging = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}.") from None
    try:
        _write_weights(staging, files, read_next)
        if model.tokenizer is not None:
            model.tokenizer.save(staging)
        if model.generation.content is not None:
            (staging / generation_config.FILE).write_bytes(model.generation.content)
        (staging / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _writable(params: Params) -> Params:
    """Returns parameters with an exact embedding, and an exact output head if GPTQ's format has no form for its codes.

    The format has one number of bits, and no codes of embeddings.
    """
    # Parameters that are absent are reported with their names later, by `_parts`.
    tables: dict[str, dict[str, PyTree]] = {name: dict(params.get(name, {})) for name in ("embed", "head")}
    embedding: PyTree = tables["embed"].get("tokens")
    head: PyTree = tables["head"].get("kernel")
    if is_quantized(embedding):
        tables["embed"]["tokens"] = dequantize(embedding, embedding.dtype).T
    if is_quantized(head):
        layers = {key: node for key, node in params.items() if key not in tables}
        others = [leaf for leaf in jax.tree.leaves(layers, is_leaf=is_quantized) if is_quantized(leaf)]
        if any(each.bits != head.bits for each in others) or not quantized.can_write(head):
            tables["head"]["kernel"] = dequantize(head, head.dtype)
    return with_rest(params, {name: table for name, table in tables.items() if table})


def _parts(tensor: names.Tensor, params: Params) -> list[PyTree]:
    """Returns the parameters that a tensor contains, on their devices."""
    parts = []
    for path, shape in zip(tensor.paths, tensor.shapes, strict=True):
        node: PyTree = params
        if isinstance(params, StackedParams) and path[0].startswith(LAYER):
            # The whole layer would be copied for each of its tensors.
            node = {path[0]: params.layers}
        for key in path:
            node = node.get(key) if hasattr(node, "get") else None
        if isinstance(params, StackedParams) and path[0].startswith(LAYER) and node is not None:
            node = slice_of(node, int(path[0].removeprefix(LAYER)), 0)
        shape = (tensor.stack, *shape) if tensor.stack else shape
        if node is None or getattr(node, "shape", None) != shape:
            found = "absent" if node is None else f"of shape {list(getattr(node, 'shape', []))}"
            raise CheckpointError(
                f"parameter {'/'.join(path)} is {found}, but the model's config says {list(shape)}: nothing was saved."
            )
        dtype = node.dtype
        if dtype not in readers.FLOATS.values():
            valid = ", ".join(each.name for each in readers.FLOATS.values())
            raise CheckpointError(f"parameter {'/'.join(path)} is {dtype.name}; checkpoints hold {valid}.")
        parts.append(node)
    return parts


#: Name of a NumPy dtype -> name in safetensors.
_DTYPE_NAMES = {dtype.name: name for name, dtype in readers.READ.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
      name: the name in the file.
      dtype: the name of its NumPy dtype.
      shape: the shape in the file.
      read: returns it, on the host.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * readers.READ[_DTYPE_NAMES[self.dtype]].itemsize


def _entries(tensor: names.Tensor, parts: list[PyTree]) -> list[Entry]:
    """Returns the tensors of a file that hold a tensor: itself, or those of its quantised form."""
    if not is_quantized(parts[0]):

        def read() -> np.ndarray:
            own = [part[tensor.index] for part in parts] if tensor.stack else parts
            return tensor.merge([distributed.to_host(part) for part in own])

        return [Entry(tensor.name, parts[0].dtype.name, tensor.shape, read)]
    if tensor.stack:
        parts = [jax.tree.map(lambda x: x[tensor.index], part) for part in parts]
    return [Entry(name, each.dtype, each.shape, each.read) for name, each in quantized.written(tensor, parts).items()]


Files = dict[str, list[Entry]]  # name of a file -> what it contains, in order


def _files(entries: Sequence[Entry]) -> Files:
    """Divides tensors among safetensors files: one, or several."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(each.size for each in shards[-1]) + entry.size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(entry)
    # In order of descending element size, every tensor is aligned.
    ordered = [sorted(shard, key=lambda entry: -entry.size // math.prod(entry.shape)) for shard in shards]
    if len(ordered) == 1:
        return {"model.safetensors": ordered[0]}
    return {f"model-{index + 1:05}-of-{len(ordered):05}.safetensors": own for index, own in enumerate(ordered)}


def _write_weights(folder: Path, files: Files, read_next: Callable[[], np.ndarray]) -> None:
    """Writes one safetensors file, or several and an index; see `_write`."""
    for name, own in files.items():
        _write_safetensors(folder / name, own, read_next)
    if len(files) == 1:
        return
    weight_map = {entry.name: name for name, own in files.items() for entry in own}
    size = sum(entry.size for own in files.values() for entry in own)
    index_json = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, entries: Sequence[Entry], read_next: Callable[[], np.ndarray]) -> None:
    """Writes one safetensors file. Copies one tensor at a time to the host."""
    header: readers.Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.size
        dtype = _DTYPE_NAMES[entry.dtype]
        header[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(readers.LENGTH_BYTES, "little") + text)
        for _ in entries:
            file.write(np.ascontiguousarray(read_next()).reshape(-1).view(np.uint8).data)


def _check_replaceable(folder: Path) -> None:
    """Raises a CheckpointError if the folder contains anything else than a checkpoint."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give the name of a folder to save to.")
    found = folder.iterdir() if folder.exists() else ()
    other = sorted(path.name for path in found if not _is_of_checkpoint(path))
    if other:
        raise CheckpointError(
            f"{folder} is not replaced, because it holds more than a checkpoint "
            f"({', '.join(other[:MAX_LISTED])}); save to a new folder."
        )


def _is_of_checkpoint(path: Path) -> bool:
    """Whether a checkpoint has such a file, or such a folder of chat templates."""
    if path.is_dir():
        return path.name == chat.TEMPLATES_FOLDER and all(each.suffix == chat.SUFFIX for each in path.iterdir())
    return _CHECKPOINT_FILES.fullmatch(path.name) is not None


def _replace(staging: Path, folder: Path) -> None:
    """Renames the finished folder to its target. An existing folder is renamed first and deleted last."""
    if not folder.exists():
        staging.rename(folder)
        return
    old = staging.with_suffix(".old")
    folder.rename(old)
    try:
        staging.rename(folder)
    except OSError:
        os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
