"""The tensors of a checkpoint: their names and shapes, and how they are converted to parameters."""

import dataclasses
import re
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.checkpoint.memory import own
from kvjax.models.config import DecoderConfig
from kvjax.models.families import FAMILIES
from kvjax.models.family import Names
from kvjax.models.parameters import parameter_shapes

#: Modules whose outputs are rotated, or that scale what is.
_ROTATED = {"query", "key", "query_norm", "key_norm"}
Path = tuple[str, ...]  # the keys of a parameter in the parameter tree
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and the parameters that it contains.

    Attributes:
      name: the name in the checkpoint, such as ``model.layers.0.self_attn.qkv_proj.weight``.
      paths: the parameters, in order, such as ``("layer_0", "attention", "query", "kernel")``; several if the
        checkpoint fuses them into one tensor.
      shapes: the shape of each parameter, [in, out] for a projection.
      out_first: whether the checkpoint stores the projection as [out, in].
      heads: if above 0, the number of heads of a fused tensor that is ordered by head: [heads, parameters, D, ...],
        flattened.
      neighbours: if above 0, the features of a head, whose rotary pairs are neighbours in the checkpoint; see `Names`.
      stack: if above 0, the number of tensors of which each is one entry of the parameters, as each expert's is: the
        parameters are [stack, *shape].
      index: of the entry.
    """

    name: str
    paths: tuple[Path, ...]
    shapes: tuple[Shape, ...]
    out_first: bool = False
    heads: int = 0
    neighbours: int = 0
    stack: int = 0
    index: int = 0

    @property
    def shape(self) -> Shape:
        """The shape in the checkpoint."""
        shape = (*self.shapes[0][:-1], sum(shape[-1] for shape in self.shapes)) if self.fused else self.shapes[0]
        return shape[::-1] if self.out_first else shape

    @property
    def fused(self) -> bool:
        """Whether the tensor contains several parameters."""
        return len(self.paths) > 1

    @property
    def rearranged(self) -> bool:
        """Whether outputs are divided, or in another order."""
        return self.fused or self.neighbours > 0

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """Converts the tensor to parameters; inverts `merge`.

        Args:
          array: the tensor, in the shape `shape`.

        Returns:
          The parameters, in the shapes `shapes`. Those of a fused or rearranged tensor are copies.
        """
        # [in, out] or [out], a view
        array = array.T if self.out_first else array
        if not self.rearranged and array.flags.c_contiguous:
            return [array]
        return [own(part) for part in self.split_outputs(array)]

    def split_outputs(self, array: np.ndarray) -> list[np.ndarray]:
        """Divides what has the tensor's outputs on its last axis: [..., out] -> [..., out] of each parameter."""
        if self.heads:
            # [..., heads, parts, D]
            array = array.reshape(*array.shape[:-1], self.heads, len(self.paths), -1)
            return [array[..., i, :].reshape(*array.shape[:-3], -1) for i in range(len(self.paths))]
        if self.neighbours:
            # [..., D / 2, 2]
            pairs = array.reshape(*array.shape[:-1], -1, self.neighbours // 2, 2)
            array = pairs.swapaxes(-1, -2).reshape(array.shape)
        return np.split(array, np.cumsum([shape[-1] for shape in self.shapes])[:-1], axis=-1)

    def merge(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Converts parameters to the tensor.

        Args:
          parts: the parameters, in the shapes `shapes`.

        Returns:
          The tensor, contiguous, in the shape `shape`.
        """
        array = self.merge_outputs(parts)
        return np.ascontiguousarray(array.T if self.out_first else array)

    def merge_outputs(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Inverts `split_outputs`."""
        if self.heads:
            # each [..., heads, 1, D]
            split = [part.reshape(*part.shape[:-1], self.heads, 1, -1) for part in parts]
            # [..., heads * parts * D]
            return np.concatenate(split, axis=-2).reshape(*parts[0].shape[:-1], -1)
        array = np.concatenate(parts, axis=-1) if self.fused else parts[0]
        if self.neighbours:
            # [..., 2, D / 2]
            halves = array.reshape(*array.shape[:-1], -1, 2, self.neighbours // 2)
            array = halves.swapaxes(-1, -2).reshape(array.shape)
        return array


def tensors(config: DecoderConfig) -> list[Tensor]:
    """Returns every tensor that a checkpoint of a decoder contains. A tied output head is not among them.

    Args:
      config: the decoder.
    """
    names = FAMILIES[config.family].names
    # All layers have the same shapes, so that tracing one of them suffices.
    one_layer = parameter_shapes(config.one_layer())
    leaves = jax.tree_util.tree_flatten_with_path(one_layer)[0]
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    found = _matching(
        config, names, names.prefix, {source: (target,) for source, target in names.top.items()}, (), shapes
    )
    layer = {source: (targets,) if isinstance(targets, str) else targets for source, targets in names.layer.items()}
    layer_shapes = {path[1:]: shape for path, shape in shapes.items() if path[0] == "layer_0"}
    for index in range(config.num_layers):
        found += _matching(
            config, names, f"{names.prefix}{names.layers}.{index}.", layer, (f"layer_{index}",), layer_shapes
        )
    return found + _matching(config, names, "", {names.head: ("head",)}, (), shapes)


def _matching(
    config: DecoderConfig,
    names: Names,
    prefix: str,
    modules: dict[str, tuple[str, ...]],
    root: Path,
    shapes: dict[Path, Shape],
) -> list[Tensor]:
    """Returns the tensors of those modules that the decoder has parameters for.

    Args:
      config: the decoder.
      names: the names of its family.
      prefix: prefix of the modules in the checkpoint.
      modules: name of a module in the checkpoint -> names of the modules in kvjax.
      root: the path that is put before those of `shapes`.
      shapes: path -> shape of the parameters.
    """
    found = []
    for source, targets in modules.items():
        for leaf in ("weight", "bias"):
            # A "weight" of the checkpoint is called tokens, table, scale or kernel in kvjax.
            matches = [
                path
                for target in targets
                for path in shapes
                if path[:-1] == tuple(target.split(".")) and (path[-1] == "bias") == (leaf == "bias")
            ]
            if not matches:
                continue
            stack = shapes[matches[0]][0] if "*" in source else 0
            whole = Tensor(
                name=f"{prefix}{source}.{leaf}",
                paths=tuple((*root, *path) for path in matches),
                shapes=tuple(shapes[path][1 if stack else 0 :] for path in matches),
                out_first=matches[0][-1] == "kernel" and not (names.in_first and bool(root)),
                heads=config.num_heads if len(matches) > 1 and names.interleaved else 0,
                neighbours=config.head_dim if names.neighbours and _ROTATED & set(matches[0]) else 0,
                stack=stack,
            )
            found += [
                dataclasses.replace(whole, name=whole.name.replace("*", str(index)), index=index)
                for index in range(stack)
            ] or [whole]
    return found


def canonical(family: str, name: str) -> str | None:
    """Converts the name of a tensor in a file to the one that `tensors` uses.

    Models that were saved without their head lack the first component of the name (``h.0.ln_1.weight``,
    ``decoder.layers.0.fc1.weight``). The head of GPT-NeoX is called ``embed_out``, or ``lm_head`` in newer releases.

    Args:
      family: the ``model_type``.
      name: the name in the file.

    Returns:
      The name, or None for a buffer, which is not a parameter.
    """
    names = FAMILIES[family].names
    if f".{name}".endswith(names.buffers):
        return None
    if re.match(rf"({re.escape(names.head)}|lm_head)\.", name):
        return f"{names.head}.{name.rpartition('.')[2]}"
    base, _, _ = names.prefix.partition(".")
    return name if name.startswith(f"{base}.") else f"{base}.{name}"


def embedding_and_head(family: str) -> tuple[str, str]:
    """Returns the names of the token embedding and of the output head. A tied model stores only one of them,
    in most cases the former.

    Args:
      family: the ``model_type``.
    """
    names = FAMILIES[family].names
    embedding = next(source for source, target in names.top.items() if target == "embed")
    return f"{names.prefix}{embedding}.weight", f"{names.head}.weight"
