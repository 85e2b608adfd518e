"""Saves and loads contexts: the cache with Orbax, and what says whether it is the right one."""

import atexit
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol, Unpack, runtime_checkable

import numpy as np

from kvjax.arguments import check_path
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.spec import CacheSpec
from kvjax.checkpoint import orbax
from kvjax.contexts.description import arrays_digest, describe, fields_digest, on_its_memory, restore, state_shapes
from kvjax.errors import CheckpointError, InputError, shown
from kvjax.generation.context import Context, check_context
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.models.model import Model, check_model
from kvjax.parallel import distributed
from kvjax.policies.base import Policy
from kvjax.typing import JsonObject

ABOUT, ARRAYS, STATE = "context.json", "arrays.npz", "state"  # the files of a saved context
MESSAGE = "context.bin"  # instead of the arrays, where a codec was given
FORMAT = 2
_unfinished = set[Future[None]]()


@functools.cache
def _writer() -> ThreadPoolExecutor:
    """Returns the one thread that writes; see `_wait`."""
    return ThreadPoolExecutor(1, thread_name_prefix="kvjax-save")


def _wait() -> None:
    """Waits for all saves. Orbax submits work to executors, which refuse it once `concurrent.futures` has shut down."""
    futures.wait(list(_unfinished))


def _forget_parent() -> None:
    """Forgets the saves of the parent of a forked process, which has no thread that would finish them."""
    _unfinished.clear()
    _writer.cache_clear()


# Called before the function of concurrent.futures, after which no executor takes work. Python has no public name for
# it; a Python without it waits too late, so that saves must be awaited there.
getattr(threading, "_register_atexit", atexit.register)(_wait)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_parent)


@atexit.register
def _raise_errors() -> None:
    """Raises the error of a save whose result was not asked for."""
    for future in list(_unfinished):
        future.result()


def _forget_success(future: Future[None]) -> None:
    if future.exception() is None:
        _unfinished.discard(future)


@runtime_checkable
class ContextCodec(Protocol):
    """A codec of contexts, such as `kvjax.transport.CacheGen`.

    Attributes:
      name: of the codec.
    """

    name: ClassVar[str]

    def encode(self, context: Context) -> bytes:
        """Returns a context as bytes."""

    def decode(self, data: bytes, model: Model, policy: Policy | CacheSpec | None, options: CacheOptions) -> Context:
        """Returns the context of bytes; see `load`."""


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


def save(folder: str | Path, context: Context, *, codec: ContextCodec | None = None, wait: bool = True) -> Saving:
    """Saves a context; see `load`. The folder is there whole or not at all.

    Args:
      folder: a new folder.
      context: from `kvjax.contexts.prefill` or another function of contexts.
      codec: of keys and values, `kvjax.transport.CacheGen` or `kvjax.transport.KVTC`; None = they are saved as they
        are, equal to the bit.
      wait: whether to return when the folder is finished. If not, the arrays are copied to the host before the function
        returns, so that they may be donated afterwards, and are written by a thread; an error is raised by ``result``
        of what is returned, or when Python ends.

    Raises:
      CheckpointError: the folder exists, or cannot be written.
      InputError: the model and the cache of the context are not known, or the codec cannot code them.
      ConfigError: the model is divided over several processes.
    """
    check_context(context)
    _check_codec(codec)
    path = _path(folder)
    tokens, resolved = context.tokens, context.resolved
    about = describe(context, "contexts.save")
    assert tokens is not None and resolved is not None
    if path.exists():
        raise CheckpointError(f"{path} exists already; save to a new folder.")
    if codec is not None:
        return _saved(functools.partial(_write_message, path, codec.name, codec.encode(context)), wait)
    state, logits = distributed.to_host((context.state, context.logits))
    about |= {"format": FORMAT, "state": arrays_digest(state, logits, tokens, resolved)}
    about["about"] = fields_digest(about)

    def write() -> None:
        with finished_folder(path) as unfinished:
            orbax.save_state(unfinished / STATE, state)
            np.savez(unfinished / ARRAYS, tokens=tokens, logits=logits, resolved=resolved)
            (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n")

    return _saved(write, wait)


def _path(folder: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder that is given.

    Raises:
      InputError: it is no path.
    """
    check_path("folder", folder)
    return Path(folder).expanduser().resolve()


def _check_codec(codec: object) -> None:
    """Raises an `InputError` for what is no `ContextCodec`."""
    if codec is not None and not (isinstance(codec, ContextCodec) and not isinstance(codec, type)):
        raise InputError(f"codec must be a codec such as kvjax.transport.CacheGen(2), or None; got {shown(codec)}.")


def _saved(write: Callable[[], None], wait: bool) -> Saving:
    future = _writer().submit(write)
    _unfinished.add(future)
    future.add_done_callback(_forget_success)
    saving = Saving(future)
    if wait:
        saving.result()
    return saving


def _write_message(path: Path, name: str, data: bytes) -> None:
    about = {"format": FORMAT, "codec": name, "message": hashlib.sha256(data).hexdigest()}
    about["about"] = fields_digest(about)
    with finished_folder(path) as unfinished:
        (unfinished / MESSAGE).write_bytes(data)
        (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n")


@cache_keywords()
def load(
    folder: str | Path,
    model: Model,
    policy: Policy | CacheSpec | None = None,
    *,
    codec: ContextCodec | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Context:
    """Loads a context that `save` has saved. Nothing is converted: model and cache must be those that it was made with.

    Args:
      folder: the folder.
      model: that of the context.
      policy: that of the context, or its `CacheSpec`; None = as the folder says, unless it is made of functions of the
        user's own.
      codec: the one that it was saved with; None = none.
      options: see `kvjax.CacheOptions`; limits and blocks are those of the context.
      cache: fields of the options.

    Raises:
      CheckpointError: the folder is missing or damaged, or is of another model, cache or codec; the message names all
        that differs.
      PolicyError: see `kvjax.generate`.
      StorageError: see `kvjax.generate`.
    """
    options = options_of(options, cache, "load")
    check_model(model)
    _check_codec(codec)
    distributed.check_alone(model.params, "contexts.load")
    path = _path(folder)
    about = read_json(path / ABOUT, "context")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a context of this version of kvjax: format {about.get('format')!r}.")
    if about.get("about") != fields_digest(about):
        raise CheckpointError(f"{path} is damaged: {ABOUT} is not as it was saved.")
    name = about.get("codec")
    if name != (None if codec is None else codec.name):
        given = "no codec" if codec is None else f"codec {codec.name}"
        raise CheckpointError(f"{path} was saved with {'no codec' if name is None else f'codec {name}'}; got {given}.")
    if codec is not None:
        return codec.decode(_read_message(path, about), model, policy, options)
    layout, runs, rows, boundaries, made = restore(about, model, policy, options, path)
    try:
        with np.load(path / ARRAYS) as arrays:
            tokens, logits = arrays["tokens"], arrays["logits"]
            resolved = arrays["resolved"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from None
    model = made.model
    shapes = state_shapes(model, layout, len(logits))
    state = on_its_memory(orbax.restore_state(path / STATE, shapes, mesh=model.mesh, rules=model.rules), layout)
    if arrays_digest(state, logits, tokens, resolved) != about.get("state"):
        raise CheckpointError(f"{path} is damaged: its arrays are not those that were saved.")
    state = arranged_state(state, runs)
    return Context(model.place(logits), state, layout, tokens, rows, boundaries, made, resolved)


def _read_message(path: Path, about: JsonObject) -> bytes:
    try:
        data = (path / MESSAGE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    if hashlib.sha256(data).hexdigest() != about.get("message"):
        raise CheckpointError(f"{path} is damaged: {MESSAGE} is not as it was saved.")
    return data


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
