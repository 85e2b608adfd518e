"""The description of a saved context: what must be equal when it is read again, and the layout of its arrays."""

import dataclasses
import functools
import hashlib
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.cache import shared_prefix
from kvjax.cache.empty import empty_layers, memories
from kvjax.cache.layer_stack import (
    LayerRun,
    LayerStack,
    arranged_state,
    entries_of,
    len_of,
    sequence_of,
    stacked_runs,
)
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState, Layer
from kvjax.contexts import spec_text
from kvjax.contexts.room import lowered_layout
from kvjax.errors import LONGEST, CheckpointError, InputError, shown
from kvjax.generation.context import Boundaries, Context, Made, Span
from kvjax.generation.options import CacheOptions
from kvjax.models.digest import model_digest
from kvjax.models.model import Model
from kvjax.parallel import distributed, host_memory
from kvjax.policies.base import Policy
from kvjax.specs import functions
from kvjax.typing import JsonObject

Array = jax.Array


class Restored(NamedTuple):
    """All of a context but its arrays.

    Attributes:
      layout: the static description of the cache.
      runs: layers that ran as loops, and do so again, so that what follows is equal to the bit.
      rows: see `Context.rows`.
      boundaries: see `Context.boundaries`.
      made: see `Context.made`.
    """

    layout: CacheLayout
    runs: tuple[LayerRun, ...]
    rows: int
    boundaries: Boundaries
    made: Made


def describe(context: Context, name: str) -> JsonObject:
    """Returns what `restore` needs, for JSON.

    Args:
      context: the context.
      name: of the function that saves, for messages.

    Raises:
      InputError: the model and the cache of the context are not known.
      ConfigError: the model is divided over several processes.
    """
    made = context.made
    if (
        made is None or made.sizes is None or context.tokens is None or context.resolved is None
        or context.boundaries is None
    ):  # fmt: skip
        raise InputError("this context cannot be saved, since its tokens or its cache are not known.")
    if any(group.parallel is not None for group in context.layout.groups):
        raise InputError("this context cannot be saved: it has contexts that share positions.")
    if shared_prefix.PARAM in made.model.params:
        raise InputError("this context cannot be saved: its rows follow a shared prefix, which is another context.")
    distributed.check_alone(made.model.params, name)
    return _about(made.model, made.spec) | {
        "spec": repr(made.spec), "rows": context.num_rows, "sizes": dataclasses.asdict(made.sizes),
        "model": model_digest(made.model.params),
        "slots": [[list(group.slots) for group in layer] for layer in context.layout.decode],
        "runs": [[run.start, run.stop] for run in stacked_runs(context.state.layers)],
        "boundaries": [[dataclasses.astuple(span) for span in own] for own in context.boundaries],
    }  # fmt: skip


def restore(
    about: JsonObject, model: Model, policy: Policy | CacheSpec | None, options: CacheOptions, where: object
) -> Restored:
    """Returns the context that `describe` has described, without its arrays.

    Args:
      about: from `describe`.
      model: that of the context.
      policy: that of the context, or its `CacheSpec`; None = as described, unless it is made of functions of the user's
        own.
      options: see `kvjax.CacheOptions`.
      where: what the description was read from, for messages.

    Raises:
      CheckpointError: it is damaged, or is of another model or cache; the message names all that differs.
    """
    model, spec = options.resolve(model, _saved_spec(about, where) if policy is None else policy)
    own = _about(model, spec) | {"model": model_digest(model.params)}
    different = {name: value for name, value in own.items() if about.get(name) != value}
    if different:
        texts = "; ".join(_difference(name, about.get(name), value) for name, value in different.items())
        dtype = f", as by kvjax.load(..., dtype={about.get('dtype')!r})" if "dtype" in different else ""
        raise CheckpointError(
            f"{where} was saved with another {texts}. Nothing is converted: give the model, the dtype and the cache "
            f"that it was saved with{dtype}, or make the context again by kvjax.contexts.prefill."
        )
    try:
        sizes = Sizes(**about["sizes"])
        layout = lowered_layout(model, spec, sizes, options)
        layout = dataclasses.replace(layout, decode=tuple(
            tuple(dataclasses.replace(group, slots=tuple(own)) for group, own in zip(groups, each, strict=True))
            for groups, each in zip(layout.decode, about["slots"], strict=True)
        ))  # fmt: skip
        runs = tuple(LayerRun(*map(int, run)) for run in about["runs"])
        boundaries = tuple(tuple(Span(*span) for span in own) for own in about["boundaries"])
        return Restored(layout, runs, int(about["rows"]), boundaries, Made(model, spec, options, sizes))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}.") from None


def _difference(name: str, saved: object, here: object) -> str:
    """Returns what was saved and what there is, for messages; of two long texts, from where they differ on."""
    if isinstance(saved, str) and isinstance(here, str) and max(len(saved), len(here)) > LONGEST:
        pairs = enumerate(zip(saved, here, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), min(len(saved), len(here)))
        # From the name of the field that differs.
        start = max(saved.rfind(mark, 0, same) + len(mark) for mark in (", ", "("))
        saved, here = f"...{saved[start:]}", f"...{here[start:]}"
    return f"{name}: {shown(saved)}, and here {shown(here)}"


def fields_digest(about: JsonObject) -> str:
    """Returns the SHA-256 of all fields but ``about``, which is for this digest."""
    fields = {name: value for name, value in about.items() if name != "about"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _saved_spec(about: JsonObject, where: object) -> CacheSpec:
    """Returns the spec of a saved context."""
    try:
        return spec_text.read(str(about.get("spec")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"the policy of {where} cannot be read, since its text {error}; give the policy that the context was made "
            "with."
        ) from None


def _about(model: Model, spec: CacheSpec) -> JsonObject:
    """Returns what must be equal when a context is loaded, for JSON."""
    return {
        **{
            f"config.{field.name}": functions.described(getattr(model.config, field.name))
            for field in dataclasses.fields(model.config)
        },
        "policy": functions.described(spec.policy),
        "storage": functions.described(spec.storage),
        "selection": functions.described(spec.selection),
        "dtype": model.dtype.name,
        "mesh": None if model.mesh is None else dict(model.mesh.shape),
    }


def state_shapes(model: Model, layout: CacheLayout, rows: int) -> KVState:
    """Returns the shapes of a cache of `rows` rows."""
    config, row = model.config, jnp.zeros((rows,), jnp.int32)
    made = functools.partial(empty_layers, layout.decode, rows, config.num_kv_heads, config.head_dim, layout.dtype)
    budget = tuple(tuple(row if group.has_budget else None for group in layer) for layer in layout.decode)
    return KVState(layers=jax.eval_shape(made), length=row, prompt=row, total=row, budget=budget)


def on_its_memory(state: KVState, layout: CacheLayout) -> KVState:
    """Moves the arrays of a cache to the memory that its storages say, and the numbers of its rows to the device."""
    moved: list[Layer | LayerStack] = []
    index = 0
    for entry in entries_of(state.layers):
        if isinstance(entry, LayerStack):  # whose storages are on the device
            moved.append(host_memory.to_device(entry))
        else:
            (where,) = memories(layout.decode[index : index + 1], (entry,))
            moved.append(jax.tree.map(_move, entry, where))
        index += len_of(entry)
    return host_memory.to_device(state.replace(layers=())).replace(layers=sequence_of(moved))


def _move(leaf: Array, where: str) -> Array:
    """Moves an array to one of `kvjax.parallel.host_memory.MEMORIES`."""
    if where == host_memory.DEVICE:
        return host_memory.to_device(leaf)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(host_memory.PINNED))


def arrays_digest(state: KVState, *arrays: ArrayLike) -> str:
    """Returns the SHA-256 of the bytes of a cache, whether or not its layers are in stacks, and of further arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((arranged_state(state, ()), arrays)):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
