"""Which tensors a checkpoint must hold, what they are called, and which of our parameters each one becomes."""

import dataclasses
import re
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.checkpoint.memory import own
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import parameter_shapes
from kvjax.models.families import FAMILIES
from kvjax.models.family import Names

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and the parameters that it holds.

    Attributes:
      name: in the checkpoint, e.g. ``model.layers.0.self_attn.qkv_proj.weight``.
      paths: our parameters, in order, e.g. ("layer_0", "attention", "query", "kernel").
      shapes: their shapes, [in, out] for a projection.
      out_first: the checkpoint has a projection as [out, in].
      heads: above 0, the parts are interleaved head by head: [heads, parts, D, ...] flattened.
    """

    name: str
    paths: tuple[Path, ...]
    shapes: tuple[Shape, ...]
    out_first: bool = False
    heads: int = 0

    @property
    def shape(self) -> Shape:
        """Shape in the checkpoint."""
        shape = (*self.shapes[0][:-1], sum(shape[-1] for shape in self.shapes)) if self.fused else self.shapes[0]
        return shape[::-1] if self.out_first else shape

    @property
    def fused(self) -> bool:
        return len(self.paths) > 1

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """The checkpoint's tensor as our parameters, each in memory of its own; inverts `merge`."""
        # views until the last step: [in, out] or [out]
        array = array.T if self.out_first else array
        if not self.fused and array.flags.c_contiguous:
            return [array]
        if self.heads:
            # [..., heads, parts, D]
            array = array.reshape(*array.shape[:-1], self.heads, len(self.paths), -1)
            parts = [array[..., i, :].reshape(shape) for i, shape in enumerate(self.shapes)]
        else:
            parts = np.split(array, np.cumsum([shape[-1] for shape in self.shapes])[:-1], axis=-1)
        return [own(part) for part in parts]

    def merge(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Our parameters as the checkpoint's tensor, contiguous."""
        if self.heads:
            split = [part.reshape(*part.shape[:-1], self.heads, 1, -1) for part in parts]
            array = np.concatenate(split, axis=-2).reshape(*parts[0].shape[:-1], -1)
        else:
            array = np.concatenate(parts, axis=-1) if self.fused else parts[0]
        return np.ascontiguousarray(array.T if self.out_first else array)


def tensors(config: DecoderConfig) -> list[Tensor]:
    """Every tensor that a checkpoint of this decoder holds; a tied output head is none of them."""
    names = FAMILIES[config.family].names
    # The layers are alike: one is traced, however many there are.
    one = parameter_shapes(dataclasses.replace(config, num_layers=1, windows=()))
    leaves = jax.tree_util.tree_flatten_with_path(one)[0]
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    found = _matching(config, names, names.prefix, {theirs: (ours,) for theirs, ours in names.top.items()}, (), shapes)
    layer = {theirs: (ours,) if isinstance(ours, str) else ours for theirs, ours in names.layer.items()}
    here = {path[1:]: shape for path, shape in shapes.items() if path[0] == "layer_0"}
    for index in range(config.num_layers):
        found += _matching(config, names, f"{names.prefix}{names.layers}.{index}.", layer, (f"layer_{index}",), here)
    return found + _matching(config, names, "", {names.head: ("head",)}, (), shapes)


def _matching(
    config: DecoderConfig,
    names: Names,
    prefix: str,
    modules: dict[str, tuple[str, ...]],
    root: Path,
    shapes: dict[Path, Shape],
) -> list[Tensor]:
    """The tensors of these modules, as far as the decoder has parameters in them."""
    found = []
    for theirs, ours in modules.items():
        for leaf in ("weight", "bias"):
            # our leaves are called tokens, table, scale or kernel where theirs is always weight
            matches = [
                path
                for module in ours
                for path in shapes
                if path[:-1] == tuple(module.split(".")) and (path[-1] == "bias") == (leaf == "bias")
            ]
            if matches:
                found.append(
                    Tensor(
                        name=f"{prefix}{theirs}.{leaf}",
                        paths=tuple((*root, *path) for path in matches),
                        shapes=tuple(shapes[path] for path in matches),
                        out_first=matches[0][-1] == "kernel" and not (names.in_first and bool(root)),
                        heads=config.num_heads if len(matches) > 1 and names.interleaved else 0,
                    )
                )
    return found


def canonical(family: str, name: str) -> str | None:
    """A name found in some checkpoint as `tensors` has it; None for a buffer that is no parameter.

    Models saved without their head lack the first word (``h.0.ln_1.weight``, ``decoder.layers.0.fc1.weight``), and the
    head of a GPT-NeoX is called ``embed_out`` or, by newer releases, ``lm_head``.
    """
    names = FAMILIES[family].names
    if f".{name}".endswith(names.buffers):
        return None
    if re.match(rf"({re.escape(names.head)}|lm_head)\.", name):
        return f"{names.head}.{name.rpartition('.')[2]}"
    base, _, _ = names.prefix.partition(".")
    return name if name.startswith(f"{base}.") else f"{base}.{name}"


def embedding_and_head(family: str) -> tuple[str, str]:
    """The names of the token embedding and of the output head, which may be one and the same tensor."""
    names = FAMILIES[family].names
    embedding = next(theirs for theirs, ours in names.top.items() if ours == "embed")
    return f"{names.prefix}{embedding}.weight", f"{names.head}.weight"
