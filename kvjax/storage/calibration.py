"""Calibrations: what the vectors of each layer share, made once from a text, and kept beside the parameters."""

import ast
import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.errors import StorageError
from kvjax.numerics.rope import Rope
from kvjax.storage import calibration_files
from kvjax.storage.base import Codec, Storage
from kvjax.storage.calibration_text import CalibrationText
from kvjax.storage.side import CALIBRATION, Samples, Sides
from kvjax.summary import one_line
from kvjax.typing import JsonObject, PyTree

Array = jax.Array
Expected = dict[str, dict[str, tuple[tuple[int, ...], str]]]  # name -> part -> shape and dtype

TEXT = "_text"  # the attribute of `Calibration.text`
SIDES = ("key", "value")  # names of the parts of a storage's calibration


class Calibration(flax.struct.PyTreeNode):
    """The parts that keys and values of each layer share; `kvjax.calibrate` makes one.

    It is a pytree whose leaves are its arrays, so that gradients reach them and `optax` updates them. `text` is no part
    of the pytree: calibrations of two texts have the same structure, and the results of `jax.tree.map`, of functions
    that jax traces and of `replace` have no text.

    Attributes:
      layers: for each layer, {"key": {part: [K, *shape]}, "value": {...}} of a storage, and {name: {part: ...}} of
        policies; a part that heads share is [1, *shape].
      method: what the arrays are, for messages.
      rope: the rotary embedding of the model that they were made for; None without one.
      model: the fingerprint of that model (`kvjax.models.calibrate.fingerprint`); None = not known.
      kind: what it is of, apart from shapes; see `kind_of`. None = not known.
      policies: the name and a description of each policy's parameters; see `kvjax.policies.Parameters`.
    """

    layers: tuple[Sides, ...]
    method: str = flax.struct.field(pytree_node=False, default="given")
    rope: Rope | None = flax.struct.field(pytree_node=False, default=None)
    model: str | None = flax.struct.field(pytree_node=False, default=None)
    kind: str | None = flax.struct.field(pytree_node=False, default=None)
    policies: tuple[tuple[str, str], ...] = flax.struct.field(pytree_node=False, default=())

    @property
    def text(self) -> CalibrationText | None:
        """The tokens that the arrays were made from, or last trained on; None = not known."""
        found: CalibrationText | None = vars(self).get(TEXT)
        return found

    def with_text(self, text: CalibrationText | None) -> "Calibration":
        """Returns the calibration with another `text`."""
        made: Calibration = self.replace()
        # Fields of the class would be leaves of the pytree, or part of its structure.
        object.__setattr__(made, TEXT, text)
        return made

    def __repr__(self) -> str:
        return one_line(self)

    @classmethod
    def of(
        cls, storage: Storage, samples: Iterable[Samples], rope: Rope | None = None, dtype: DTypeLike = jnp.float32
    ) -> "Calibration":
        """Makes a calibration from vectors that are given.

        Args:
          storage: what needs it.
          samples: one `Samples` per layer; its `own` and `name` are ignored.
          rope: the model's rotary embedding.
          dtype: the model's.

        Raises:
          StorageError: a storage that needs no calibration, or samples that are not finite.
        """
        sides = required(storage)
        if not sides:
            raise StorageError(f"storage {storage.name} needs no calibration; leave it out.")
        layers = []
        for index, given in enumerate(samples):
            if given.key.ndim != 3 or not len(given.key) or given.value.shape[:2] != given.key.shape[:2]:
                raise StorageError(
                    f"storage {storage.name}: keys and values of layer {index} must be [n, K, D] of at least one "
                    f"token; got {given.key.shape} and {given.value.shape}."
                )
            kv_heads = given.key.shape[1]
            bound = storage.bound(kv_heads)  # raises where groups of heads do not divide the KV heads
            one = bound.of_layer(index).of_head(0, kv_heads)  # raises where ranks are of other heads
            # Raises where vectors would be held in more numbers than they have.
            for codec in one.codecs.values():
                if isinstance(codec, Codec):
                    codec.parts(given.key.shape[-1], dtype)
                elif (size := one.resolved_layout.block_size) is not None:
                    codec.parts(size, given.key.shape[-1], dtype)
            own = {"key": given.key, "value": given.value}
            for name, x in own.items():
                if not np.all(np.isfinite(x)):
                    raise StorageError(
                        f"storage {storage.name}: {name}s of layer {index} of the calibration have numbers that are "
                        "infinite or NaN; give another text, or other samples."
                    )
            layers.append(
                {
                    name: side.prepared(given._replace(own=own[name], name=name), own[name].shape[-1], dtype)
                    for name, side in required(storage.of_layer(index)).items()
                }
            )
        if not layers:
            raise StorageError(f"storage {storage.name}: a calibration needs the samples of at least one layer.")
        return cls(tuple(layers), method=method_of(storage), rope=rope, kind=kind_of(storage.bound(kv_heads)))

    @property
    def hash(self) -> str:
        """SHA-256 hash of all arrays, their names and their description in a file."""
        return calibration_files.digest(self.layers, self._about())

    def _about(self) -> dict[str, str]:
        """Returns the description of the arrays for a file."""
        about = {"method": self.method, "rope": repr(self.rope)}
        about |= {"policies": json.dumps(self.policies)} if self.policies else {}
        about |= {} if self.text is None else {"tokens": str(self.text.tokens), "tokens_hash": self.text.hash}
        return about | {name: x for name in ("model", "kind") if (x := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.layers))

    def save(self, path: str | Path) -> None:
        """Saves it as a safetensors file.

        The metadata are the method, shapes, the rotary embedding, the model's fingerprint, the number and the hash of
        the tokens (`text`), and a hash of all.

        Args:
          path: of the file; it is replaced if it exists.

        Raises:
          StorageError: if the file cannot be written.
        """
        calibration_files.write(path, self.layers, self._about())

    def check(self, storages: Sequence[Storage], kv_heads: int, dim: int, dtype: DTypeLike, rope: Rope | None) -> None:
        """Checks that the calibration fits a storage and a model.

        Args:
          storages: of each layer, what needs it; layers whose storage needs none may be anything.
          kv_heads: KV heads of a layer.
          dim: features of a head.
          dtype: the model's.
          rope: the model's rotary embedding.

        Raises:
          StorageError: it is for another storage, another shape, another dtype or another rotary embedding.
        """
        expected = [expected_parts(storage, kv_heads, dim, dtype) for storage in storages]
        names = ", ".join(dict.fromkeys(storage.name for storage in storages))
        if not any(expected):
            raise StorageError(f"storage {names} needs no calibration; leave out calibration={self.method}.")
        self.check_rope(rope)
        kinds = dict.fromkeys(kind_of(storage.bound(kv_heads)) for storage in storages if required(storage))
        if self.kind is not None and (other := next((kind for kind in kinds if kind != self.kind), None)):
            raise StorageError(
                f"the calibration ({self.method}) is of {self.kind}, and storage {names} needs one of {other}. Make it "
                "with kvjax.calibrate for this model and storage."
            )
        made = [shapes_of({name: parts for name, parts in layer.items() if name in SIDES}) for layer in self.layers]
        both: list[tuple[Expected, Expected]] = list(itertools.zip_longest(made, expected, fillvalue={}))
        wrong = [index for index, (own, needed) in enumerate(both) if needed and own != needed]
        if wrong or len(made) != len(storages):
            if len(made) != len(storages):
                mine, needed = both[0]
            else:
                # Of parts that both have, those that are equal say nothing.
                mine, needed = both[wrong[0]]
                mine, needed = _without(mine, needed), _without(needed, mine)
            raise StorageError(
                f"the calibration ({self.method}) has {len(made)} layers of {shapes_text(mine)}; storage {names} and "
                f"this model need {len(storages)} layers of {shapes_text(needed)}. Make it with kvjax.calibrate for "
                "this model and storage."
            )

    def check_rope(self, rope: Rope | None) -> None:
        """Checks that the calibration was made for a model's rotary embedding.

        Raises:
          StorageError: it was made for another rotary embedding.
        """
        if self.rope != rope:
            raise StorageError(
                f"the calibration ({self.method}) was made for {_rope_name(self.rope)}, and the model has "
                f"{_rope_name(rope)}; make one for this model with kvjax.calibrate."
            )


def _without(parts: Expected, others: Expected) -> Expected:
    """Returns the parts that are not the same in `others`."""
    return {
        name: {part: shape for part, shape in own.items() if others.get(name, {}).get(part) != shape}
        for name, own in parts.items()
    }


def required(storage: Storage) -> JsonObject:
    """Returns the sides of a storage that come from a calibration."""
    return storage.sides_of(CALIBRATION)


def method_of(storage: Storage) -> str:
    """Describes how the calibration of a storage is made."""
    return ", ".join(f"{name}s: {side!r}" for name, side in required(storage).items())


def kind_of(storage: Storage) -> str:
    """Describes what the calibration of a storage is of, without the numbers of directions, which shapes tell.

    Args:
      storage: bound to the KV heads of a model; see `Storage.bound`.
    """
    found = []
    for name, side in required(storage).items():
        fields = [] if not dataclasses.is_dataclass(side) else dataclasses.fields(side)
        values = {field.name: getattr(side, field.name) for field in fields if field.name != "rank"}
        # A function is named without its address, which differs from process to process.
        own = [f"{name}={x.__qualname__ if callable(x) else repr(x)}" for name, x in values.items()]
        found.append(f"{name}s: {type(side).__name__}({', '.join(own)})")
    return ", ".join(found)


def expected_parts(storage: Storage, kv_heads: int, dim: int, dtype: DTypeLike) -> Expected:
    """Returns the shapes and dtypes of one layer of the calibration that a storage needs."""
    return {
        name: {
            part: (((1,) if part in side.shared else (kv_heads,)) + tuple(shape), jnp.dtype(each).name)
            for part, (shape, each) in side.parts(dim, dtype).items()
        }
        for name, side in required(storage).items()
    }


def side_shapes(storage: Storage, kv_heads: int, dim: int, dtype: DTypeLike) -> dict[str, dict[str, PyTree]]:
    """Returns one layer of the calibration that a storage needs as `jax.ShapeDtypeStruct`; {} if it needs none."""
    return {
        name: {part: jax.ShapeDtypeStruct(shape, jnp.dtype(each)) for part, (shape, each) in parts.items()}
        for name, parts in expected_parts(storage, kv_heads, dim, dtype).items()
    }


def load_calibration(path: str | Path) -> Calibration:
    """Loads a calibration that `Calibration.save` has saved, or a trained gate that kvjax contains.

    It is checked against the model and the storage when it is used.

    Args:
      path: of the file; or ``kvjax-tiny-gate``, the gate of kvjax-tiny for
        ``kvjax.policies.learned(0.2, gate=MlpGate(128), recent=25, sinks=4)``.

    Raises:
      StorageError: there is no such file, it is damaged or was changed, it is of an older format, or no calibration.
    """
    layers, about = calibration_files.read(path)
    try:
        made = Calibration(
            layers, about["method"], _rope(about["rope"]), about.get("model"), about.get("kind"),
            tuple((str(name), str(kind)) for name, kind in json.loads(about.get("policies", "[]"))),
        )  # fmt: skip
        if "tokens" in about:
            made = made.with_text(CalibrationText(int(about["tokens"]), about["tokens_hash"]))
    except (KeyError, ValueError, TypeError, SyntaxError) as error:
        raise calibration_files.invalid(calibration_files.calibration_file(path), error) from None
    return made


def _rope(text: str) -> Rope | None:
    """Reads `repr` of a rotary embedding."""
    if text == "None":
        return None
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) != "Rope":
        raise ValueError(f"{text!r} is not a rotary embedding")
    return Rope(**{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})


def _rope_name(rope: Rope | None) -> str:
    return "a model without a rotary embedding" if rope is None else repr(rope)


def shapes_of(layer: Sides) -> Expected:
    """Returns the shapes and dtypes of one layer of a calibration."""
    return {
        name: {part: (tuple(x.shape), jnp.dtype(x.dtype).name) for part, x in parts.items()}
        for name, parts in layer.items()
    }


def shapes_text(parts: Expected) -> str:
    """Returns shapes as text: ``key.basis [2, 8, 4] float32``."""
    found = [
        f"{name}.{part} {list(shape)} {dtype}"
        for name, own in parts.items()
        for part, (shape, dtype) in sorted(own.items())
    ]
    return ", ".join(found) or "nothing"
