"""Quantised weights in Hugging Face folders: GPTQ's and AWQ's formats, read into and written from `QuantizedMatrix`.

A quantised matrix [in, out] is several tensors. Codes and zeros are packed into int32, lowest bits first:

- GPTQ (arXiv:2210.17323): ``qweight`` [in · bits / 32, out] packs inputs, ``qzeros`` [G, out · bits / 32] packs
  outputs, ``scales`` is [G, out], and ``g_idx`` [in] has the group of each input. With activation order (``desc_act``)
  the inputs of a group are scattered. The first version stores zeros less 1: each integer of ``qzeros`` is that of the
  zeros less 0x11111111 (for 4 bits), modulo 2³². Version 2 (``checkpoint_format``: ``gptq_v2``) stores the zeros.
- AWQ (arXiv:2306.00978), version ``gemm``: ``qweight`` [in, out / 8] and ``qzeros`` [G, out / 8] pack 4-bit codes of
  outputs 0, 2, 4, 6, 1, 3, 5, 7 of each eight.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.checkpoint import names, readers
from kvjax.checkpoint.memory import own
from kvjax.checkpoint.readers import Json, Stored
from kvjax.errors import CheckpointError, ConfigError, shown
from kvjax.models import values
from kvjax.parallel import distributed
from kvjax.parallel.sharding import QUANTIZED
from kvjax.products.quantized import BYTE, WIDTHS, QuantizedMatrix, pack, unpack

Array = jax.Array
Vectors = TypeVar("Vectors", Array, np.ndarray)
Shape = tuple[int, ...]

GPTQ, AWQ = "gptq", "awq"
WORD = 32  # bits of a packed integer
AWQ_BITS = 4
#: The output, of each eight, whose code is at each place of AWQ's integers, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
V1, V2 = "gptq", "gptq_v2"  # of GPTQ's zeros
#: Files that describe quantised weights where config.json does not.
SETTINGS = ("quantize_config.json", "quant_config.json")
_WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True)
class StoredFormat:
    """How a folder holds quantised weights.

    Attributes:
      method: ``gptq`` or ``awq``.
      bits: of a code.
      group: inputs of a group; None = all.
      minus_one: whether zeros are stored less 1.
      symmetric: whether all zeros are said to be 2^(bits - 1).
      file: the name of the weights without its ending, if it is not the usual one.
    """

    method: str
    bits: int
    group: int | None
    minus_one: bool
    symmetric: bool
    file: str | None = None

    def tensors(self, tensor: names.Tensor, stored: Mapping[str, Stored]) -> dict[str, Shape]:
        """Returns the names and shapes of the tensors that hold a matrix, `tensor` being its exact form."""
        inputs, outputs = tensor.shapes[0][0], sum(shape[-1] for shape in tensor.shapes)
        stem, per_word = tensor.name.removesuffix(_WEIGHT), WORD // self.bits
        groups = math.ceil(inputs / min(self.group or inputs, inputs))
        found: dict[str, Shape] = {}
        if self.method == AWQ:
            found[f"{stem}.qweight"] = (inputs, outputs // per_word)
        else:
            found[f"{stem}.qweight"] = (inputs // per_word, outputs)
            # Old files of matrices without activation order lack it.
            if f"{stem}.g_idx" in stored:
                found[f"{stem}.g_idx"] = (inputs,)
                # It has the last word on groups: their size can differ from matrix to matrix.
                groups = next(iter(stored[f"{stem}.scales"].shape), 0) if f"{stem}.scales" in stored else groups
        return found | {f"{stem}.scales": (groups, outputs), f"{stem}.qzeros": (groups, outputs // per_word)}


def stored_format(folder: Path, raw: Json) -> StoredFormat | None:
    """Returns how a folder holds quantised weights, or None if its weights are exact.

    Args:
      folder: the folder.
      raw: its parsed ``config.json``.

    Raises:
      CheckpointError: a damaged file of settings.
      ConfigError: a method, a format or a number of bits that kvjax does not read.
    """
    where, settings = "quantization_config of config.json", raw.get("quantization_config")
    for name in SETTINGS:
        if settings is None and (folder / name).is_file():
            where, settings = name, readers.read_json(folder / name)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ConfigError(f"{folder}: {where} must be an object, but is {shown(settings)}.")

    def refuse(key: str, valid: str) -> ConfigError:
        return ConfigError(f"{folder}: {key} in {where} is {shown(settings.get(key))}; kvjax reads {valid}.")

    method: Any = settings.get("quant_method", {SETTINGS[0]: GPTQ, SETTINGS[1]: AWQ}.get(where))
    if method not in (GPTQ, AWQ):
        raise refuse("quant_method", f"{GPTQ} and {AWQ}, or weights that are not quantized")
    bits: Any = settings.get("bits", settings.get("w_bit"))
    group = settings.get("group_size", settings.get("q_group_size"))
    valid_bits = WIDTHS if method == GPTQ else (AWQ_BITS,)
    if bits not in valid_bits or not isinstance(bits, int):
        raise refuse("bits" if "bits" in settings else "w_bit", f"{', '.join(map(str, valid_bits))} of {method}")
    if not values.is_whole(group, 1, values.MAX_SIZE) and not values.is_whole(group, -1, -1):
        raise refuse("group_size" if "group_size" in settings else "q_group_size", "a number of inputs, or -1 for all")
    if settings.get("is_marlin_format"):
        raise refuse("is_marlin_format", "formats that are not arranged for one kind of GPU")
    if settings.get("pack_dtype", "int32") != "int32":
        raise refuse("pack_dtype", "int32")
    if method == GPTQ:
        key = "checkpoint_format" if "checkpoint_format" in settings else "format"
        if (form := settings.get(key) or V1) not in (V1, V2):
            raise refuse(key, f"{V1} and {V2}")
    else:
        key = "version" if "version" in settings else "checkpoint_format"
        if (form := str(settings.get(key, "gemm")).lower()) != "gemm":
            raise refuse(key, "gemm")
    file = settings.get("model_file_base_name")
    return StoredFormat(
        method=method,
        bits=bits,
        group=None if group == -1 else group,
        minus_one=form == V1,
        symmetric=settings.get("sym") is True,
        file=file if isinstance(file, str) and file not in ("", "model") and Path(file).name == file else None,
    )


def is_stored(tensor: names.Tensor, stored: Mapping[str, Stored]) -> bool:
    """Returns whether a folder holds a tensor in quantised form."""
    return f"{tensor.name.removesuffix(_WEIGHT)}.qweight" in stored and tensor.name.endswith(_WEIGHT)


def zero_biases(stored: Mapping[str, Stored], wanted: Mapping[str, Any]) -> list[str]:
    """Returns biases of quantised matrices that the decoder has not, and that are 0; some releases wrote them."""
    found = []
    for name, tensor in stored.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "bias" and name not in wanted and f"{stem}.qweight" in stored:
            found += [name] if not tensor.read(np.dtype(np.float32)).any() else []
    return found


def read(
    tensor: names.Tensor, stored: Mapping[str, Stored], form: StoredFormat, dtype: np.dtype
) -> list[QuantizedMatrix]:
    """Reads a matrix, or several that the checkpoint fuses into one.

    Args:
      tensor: the exact form of the tensor.
      stored: the tensors of the folder, in the shapes of `StoredFormat.tensors`.
      form: of the folder.
      dtype: of the model. Scales that are stored with 16 bits keep their dtype if the model's has 16 too.

    Returns:
      One matrix for each of the tensor's paths.

    Raises:
      CheckpointError: groups that do not fit, or tensors of a wrong dtype.
    """
    stem = tensor.name.removesuffix(_WEIGHT)
    part = {name: stored[f"{stem}.{name}"] for name in ("qweight", "qzeros", "scales")}
    inputs, groups = tensor.shapes[0][0], part["scales"].shape[0]
    if not groups or inputs % groups or inputs // groups % (BYTE // form.bits):
        raise CheckpointError(
            f"{part['scales'].name} in {part['scales'].file} has {groups} groups for {inputs} inputs; kvjax reads "
            "groups of equal sizes that fill whole bytes."
        )
    order = _order(stored[f"{stem}.g_idx"], inputs, groups) if f"{stem}.g_idx" in stored else None
    kept = np.dtype(readers.FLOATS.get(part["scales"].dtype, dtype))
    scale = part["scales"].read(kept if kept.itemsize == dtype.itemsize == 2 else dtype)
    zero = _zeros(part["qzeros"].read_integers(), form)
    qweight = part["qweight"].read_integers()
    codes = np.asarray(_codes(qweight, order, bits=form.bits, groups=groups, awq=form.method == AWQ))
    arrays: list[tuple[np.ndarray, ...]] = [(codes, scale, zero)]
    if tensor.rearranged:
        split = (tensor.split_outputs(each) for each in arrays[0])
        arrays = [tuple(map(own, each)) for each in zip(*split, strict=True)]
    made: list[Any] = [dict(zip(QUANTIZED, (*each, order), strict=True)) for each in arrays]
    return [QuantizedMatrix(bits=form.bits, **each) for each in made]


def _order(stored: Stored, inputs: int, groups: int) -> np.ndarray | None:
    """Returns the inputs in the order of their groups, or None if that is their own order.

    Raises:
      CheckpointError: groups of different sizes.
    """
    # [in]
    group_of = stored.read_integers()
    order = np.argsort(group_of, kind="stable")
    if inputs % groups or not np.array_equal(group_of[order], np.repeat(np.arange(groups), inputs // groups)):
        raise CheckpointError(
            f"{stored.name} in {stored.file} must give each of {groups} groups as many of the {inputs} inputs; it has "
            f"groups {group_of.min()} to {group_of.max()}, the smallest with "
            f"{np.unique(group_of, return_counts=True)[1].min()} inputs."
        )
    return None if np.array_equal(order, np.arange(inputs)) else order.astype(np.int32)


def _zeros(qzeros: np.ndarray, form: StoredFormat) -> np.ndarray:
    """Unpacks zeros: [G, out · bits / 32] int32 -> [G, out] uint8."""
    words = qzeros.view(np.uint32)
    half, per_word = 1 << (form.bits - 1), WORD // form.bits
    ones = np.uint32(sum(1 << form.bits * i for i in range(per_word)))
    # Some releases call the second version the first. Symmetric zeros tell: the first version stores them less 1.
    if form.minus_one and not (form.symmetric and (words == ones * np.uint32(half)).all()):
        words = words + ones
    shifts = np.uint32(form.bits) * np.arange(per_word, dtype=np.uint32)
    # [G, out / per word, per word]
    zeros = ((words[..., None] >> shifts) & np.uint32((1 << form.bits) - 1)).astype(np.uint8)
    return _outputs_in_order(zeros, form.method == AWQ).reshape(len(words), -1)


def _outputs_in_order(x: Vectors, awq: bool) -> Vectors:
    """Undoes AWQ's order of the last axis."""
    return x[..., np.argsort(AWQ_ORDER)] if awq else x


@functools.partial(jax.jit, static_argnames=("bits", "groups", "awq"))
def _codes(qweight: Array, order: Array | None, *, bits: int, groups: int, awq: bool) -> Array:
    """Converts packed codes to those of a `QuantizedMatrix`."""
    per_word = WORD // bits
    words = jax.lax.bitcast_convert_type(qweight, jnp.uint32)
    shifts = np.uint32(bits) * np.arange(per_word, dtype=np.uint32)
    if awq:
        # [in, out / per word, per word]
        codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        codes = _outputs_in_order(codes, awq).reshape(words.shape[0], -1)
    else:
        # [in / per word, per word, out]
        codes = (words[:, None] >> shifts[:, None]) & np.uint32((1 << bits) - 1)
        codes = codes.reshape(-1, words.shape[-1])
    # [in, out]
    codes = codes.astype(jnp.uint8)
    codes = codes if order is None else codes[order]
    return pack(codes, bits, codes.shape[0] // groups)


class Written(NamedTuple):
    """A tensor to write.

    Attributes:
      shape: its shape.
      dtype: the name of its NumPy dtype.
      read: returns it, on the host.
    """

    shape: Shape
    dtype: str
    read: Callable[[], np.ndarray]


def can_write(matrix: QuantizedMatrix) -> bool:
    """Returns whether `written` takes a matrix."""
    per_word = WORD // matrix.bits
    return not np.issubdtype(matrix.zero.dtype, np.floating) and not any(size % per_word for size in matrix.shape)


def written(tensor: names.Tensor, matrices: list[QuantizedMatrix]) -> dict[str, Written]:
    """Returns the tensors that hold a matrix in version 2 of GPTQ's format, by name; inverts `read`.

    Args:
      tensor: the exact form of the tensor.
      matrices: the parameters that it contains.

    Raises:
      CheckpointError: numbers of inputs or outputs that do not fill whole integers.
    """
    bits, groups, per_word = matrices[0].bits, len(matrices[0].scale), WORD // matrices[0].bits
    inputs, outputs = matrices[0].shape[0], sum(matrix.shape[1] for matrix in matrices)
    if any(np.issubdtype(matrix.zero.dtype, np.floating) for matrix in matrices):
        raise CheckpointError(
            f"{tensor.name} cannot be saved: 0 is between two of its codes, as in GGUF's Q4_1, and GPTQ's format has "
            "no such zeros. Load the model without weights='stored'. Nothing was saved."
        )
    if inputs % per_word or outputs % per_word:
        raise CheckpointError(
            f"{tensor.name} of {inputs} inputs and {outputs} outputs cannot be saved with {bits} bits: GPTQ's format "
            f"packs {per_word} of both into an integer. Nothing was saved."
        )

    def merged(part: str) -> np.ndarray:
        return tensor.merge_outputs([distributed.to_host(getattr(each, part)) for each in matrices])

    def in_order(x: np.ndarray) -> np.ndarray:
        """Undoes the order of a matrix's inputs."""
        if matrices[0].order is None:
            return x
        y = np.empty_like(x)
        y[distributed.to_host(matrices[0].order)] = x
        return y

    def qweight() -> np.ndarray:
        # [in, out]
        codes = in_order(np.asarray(unpack(jnp.asarray(merged("codes")), bits)).reshape(inputs, outputs))
        return _packed(codes.reshape(-1, per_word, outputs).swapaxes(1, 2), bits)

    def qzeros() -> np.ndarray:
        return _packed(merged("zero").reshape(groups, -1, per_word), bits)

    def group_of() -> np.ndarray:
        return in_order(np.repeat(np.arange(groups, dtype=np.int32), inputs // groups))

    stem = tensor.name.removesuffix(_WEIGHT)
    return {
        f"{stem}.qweight": Written((inputs // per_word, outputs), "int32", qweight),
        f"{stem}.qzeros": Written((groups, outputs // per_word), "int32", qzeros),
        f"{stem}.scales": Written((groups, outputs), matrices[0].scale.dtype.name, lambda: merged("scale")),
        f"{stem}.g_idx": Written((inputs,), "int32", group_of),
    }


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs the last axis of codes into int32: [..., per word] -> [...]."""
    words = np.zeros(codes.shape[:-1], np.uint32)
    for i in range(codes.shape[-1]):
        words |= codes[..., i].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def settings(matrices: list[QuantizedMatrix], *, head: bool) -> Json:
    """Returns the ``quantization_config`` of matrices that `written` has converted.

    Raises:
      CheckpointError: matrices of different numbers of bits.
    """
    widths = {matrix.bits for matrix in matrices}
    if len(widths) > 1:
        raise CheckpointError(f"a checkpoint has one number of bits, but the weights have {sorted(widths)}.")
    return {
        "quant_method": GPTQ,
        "checkpoint_format": V2,
        "bits": widths.pop(),
        "group_size": max(matrix.group for matrix in matrices),
        "desc_act": any(matrix.order is not None for matrix in matrices),
        "sym": False,
        "lm_head": head,
        "pack_dtype": "int32",
    }
