"""Saves and loads contexts: the cache with Orbax, and what says whether it is the right one."""

import atexit
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.cache.empty import empty_layers, memories
from kvjax.cache.layer_stack import LayerRun, arranged_state, stacked_runs
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState
from kvjax.checkpoint import orbax
from kvjax.contexts import spec_text
from kvjax.contexts.room import lowered_layout
from kvjax.errors import CheckpointError, InputError, shown
from kvjax.generation.context import Context, Made, Span
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords
from kvjax.models.digest import model_digest
from kvjax.models.model import Model
from kvjax.parallel import distributed, host_memory
from kvjax.policies.base import Policy
from kvjax.specs import functions
from kvjax.typing import JsonObject

Array = jax.Array
ABOUT, ARRAYS, STATE = "context.json", "arrays.npz", "state"  # the files of a saved context
FORMAT = 2
_unfinished = set[Future[None]]()


@functools.cache
def _writer() -> ThreadPoolExecutor:
    """Returns the one thread that writes. Python waits for it before it ends."""
    return ThreadPoolExecutor(1, thread_name_prefix="kvjax-save")


@atexit.register
def _raise_errors() -> None:
    """Raises the error of a save whose result was not asked for."""
    for future in list(_unfinished):
        future.result()


def _forget_success(future: Future[None]) -> None:
    if future.exception() is None:
        _unfinished.discard(future)


class Saving:
    """A context that is being saved."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> None:
        """Waits until the folder is finished.

        Args:
          timeout: seconds; None to wait for as long as it takes.

        Raises:
          CheckpointError: the folder could not be written.
          TimeoutError: it is not finished yet.
        """
        try:
            self._future.result(timeout)
        finally:
            if self._future.done():
                _unfinished.discard(self._future)

    @property
    def done(self) -> bool:
        """Whether the folder is finished, or could not be written."""
        return self._future.done()


def save(folder: str | Path, context: Context, *, wait: bool = True) -> Saving:
    """Saves a context; see `load`. The folder is there whole or not at all.

    Args:
      folder: a new folder.
      context: from `kvjax.contexts.prefill` or another function of contexts.
      wait: whether to return when the folder is finished. If not, the arrays are copied to the host before the function
        returns, so that they may be donated afterwards, and are written by a thread; an error is raised by ``result``
        of what is returned, or when Python ends.

    Raises:
      CheckpointError: the folder exists, or cannot be written.
      InputError: the model and the cache of the context are not known.
      ConfigError: the model is divided over several processes.
    """
    path = Path(folder).expanduser().resolve()
    made = context.made
    tokens, resolved = context.tokens, context.resolved
    if made is None or made.sizes is None or tokens is None or resolved is None or context.boundaries is None:
        raise InputError("this context cannot be saved, since its tokens or its cache are not known.")
    distributed.check_alone(made.model.params, "contexts.save")
    if path.exists():
        raise CheckpointError(f"{path} exists already; save to a new folder.")
    state, logits = distributed.to_host((context.state, context.logits))
    about = _about(made.model, made.spec) | {
        "format": FORMAT, "spec": repr(made.spec), "rows": context.num_rows, "sizes": dataclasses.asdict(made.sizes),
        "model": model_digest(made.model.params),
        "state": arrays_digest(state, logits, tokens, resolved),
        "slots": [[list(group.slots) for group in layer] for layer in context.layout.decode],
        "runs": [[run.start, run.stop] for run in stacked_runs(context.state.layers)],
        "boundaries": [[dataclasses.astuple(span) for span in own] for own in context.boundaries],
    }  # fmt: skip
    about["about"] = _fields_digest(about)

    def write() -> None:
        with finished_folder(path) as unfinished:
            orbax.save_state(unfinished / STATE, state)
            np.savez(unfinished / ARRAYS, tokens=tokens, logits=logits, resolved=resolved)
            (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n")

    future = _writer().submit(write)
    _unfinished.add(future)
    future.add_done_callback(_forget_success)
    saving = Saving(future)
    if wait:
        saving.result()
    return saving


@cache_keywords()
def load(
    folder: str | Path,
    model: Model,
    policy: Policy | CacheSpec | None = None,
    *,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Context:
    """Loads a context that `save` has saved. Nothing is converted: model and cache must be those that it was made with.

    Args:
      folder: the folder.
      model: that of the context.
      policy: that of the context, or its `CacheSpec`; None = as the folder says, unless it is made of functions of the
        user's own.
      options: see `kvjax.CacheOptions`; limits and blocks are those of the context.
      cache: fields of the options.

    Raises:
      CheckpointError: the folder is missing or damaged, or is of another model or cache; the message names all that
        differs.
      PolicyError: see `kvjax.generate`.
      StorageError: see `kvjax.generate`.
    """
    options = (options or CacheOptions()).updated(cache, "load")
    distributed.check_alone(model.params, "contexts.load")
    path = Path(folder).expanduser().resolve()
    about = read_json(path / ABOUT, "context")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a context of this version of kvjax: format {about.get('format')!r}.")
    if about.get("about") != _fields_digest(about):
        raise CheckpointError(f"{path} is damaged: {ABOUT} is not as it was saved.")
    model, spec = options.resolve(model, _saved_spec(path, about) if policy is None else policy)
    own = _about(model, spec) | {"model": model_digest(model.params)}
    different = [f"{name}: {shown(about.get(name))}, and here {shown(value)}"
                 for name, value in own.items() if about.get(name) != value]  # fmt: skip
    if different:
        raise CheckpointError(f"{path} was saved with another {'; '.join(different)}.")
    try:
        sizes = Sizes(**about["sizes"])
        layout = lowered_layout(model, spec, sizes, options)
        layout = dataclasses.replace(layout, decode=tuple(
            tuple(dataclasses.replace(group, slots=tuple(own)) for group, own in zip(groups, each, strict=True))
            for groups, each in zip(layout.decode, about["slots"], strict=True)
        ))  # fmt: skip
        runs = tuple(LayerRun(*map(int, run)) for run in about["runs"])
        rows = int(about["rows"])
        boundaries = tuple(tuple(Span(*span) for span in own) for own in about["boundaries"])
        with np.load(path / ARRAYS) as arrays:
            tokens, logits = arrays["tokens"], arrays["logits"]
            resolved = arrays["resolved"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from None
    shapes = state_shapes(model, layout, len(logits))
    state = on_its_memory(orbax.restore_state(path / STATE, shapes, mesh=model.mesh, rules=model.rules), layout)
    if arrays_digest(state, logits, tokens, resolved) != about.get("state"):
        raise CheckpointError(f"{path} is damaged: its arrays are not those that were saved.")
    # Layers that ran as loops do so again, so that what follows is equal to the bit.
    state = arranged_state(state, runs)
    made = Made(model, spec, options, sizes)
    return Context(model.place(logits), state, layout, tokens, rows, boundaries, made, resolved)


def _saved_spec(path: Path, about: JsonObject) -> CacheSpec:
    """Returns the spec of a saved context."""
    try:
        return spec_text.read(str(about.get("spec")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"the policy of {path} cannot be read, since its text {error}; give the policy that the context was made "
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


def _fields_digest(about: JsonObject) -> str:
    """Returns the SHA-256 of all fields but that of this digest."""
    fields = {name: value for name, value in about.items() if name != "about"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def state_shapes(model: Model, layout: CacheLayout, rows: int) -> KVState:
    """Returns the shapes of a cache of `rows` rows."""
    config, row = model.config, jnp.zeros((rows,), jnp.int32)
    made = functools.partial(empty_layers, layout.decode, rows, config.num_kv_heads, config.head_dim, layout.dtype)
    budget = tuple(tuple(row if group.has_budget else None for group in layer) for layer in layout.decode)
    return KVState(layers=jax.eval_shape(made), length=row, prompt=row, total=row, budget=budget)


def on_its_memory(state: KVState, layout: CacheLayout) -> KVState:
    """Moves the arrays of a cache to the memory that its storages say."""
    return state.replace(layers=jax.tree.map(_move, state.layers, memories(layout.decode, state.layers)))


def _move(leaf: Array, where: str) -> Array:
    """Moves an array to one of `kvjax.parallel.host_memory.MEMORIES`."""
    if where == host_memory.DEVICE:
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(host_memory.PINNED))


def arrays_digest(state: KVState, *arrays: ArrayLike) -> str:
    """Returns the SHA-256 of the bytes of a cache, whether or not its layers are in stacks, and of further arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((arranged_state(state, ()), arrays)):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


@contextmanager
def finished_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write to, which becomes `path` if no error is raised.

    Raises:
      CheckpointError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        outer = Path(tempfile.mkdtemp(prefix=f".unfinished-{path.name}-", dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from None
    try:
        # Others may read it as far as the umask says; a temporary folder is its owner's alone.
        unfinished = outer / path.name
        unfinished.mkdir()
        yield unfinished
        os.rename(unfinished, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def read_json(path: Path, kind: str) -> JsonObject:
    """Reads the file that describes what was saved.

    Args:
      path: the file.
      kind: what was saved, for messages.

    Raises:
      CheckpointError: the file is missing or damaged.
    """
    try:
        about = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"there is no {kind} in {path.parent}: {path.name} is missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    if not isinstance(about, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object.")
    return about
