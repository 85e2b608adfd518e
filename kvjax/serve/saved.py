"""Saves and loads prefixes: the cache with Orbax, and what says whether it is the right one."""

import hashlib
import json
import zipfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.checkpoint import orbax
from kvjax.contexts.folders import arrays_digest, finished_folder, on_its_memory, read_json, state_shapes
from kvjax.errors import CheckpointError
from kvjax.models.digest import model_digest
from kvjax.models.model import Model
from kvjax.serve.prefix import Prefix
from kvjax.serve.prompts import Prompts
from kvjax.specs import functions
from kvjax.typing import JsonObject

Array = jax.Array
ABOUT, ARRAYS, STATE = "prefix.json", "arrays.npz", "state"  # the files of a saved prefix
FORMAT = 4


def save(folder: str | Path, prefix: Prefix) -> None:
    """Saves a prefix; see `load`. The folder is there whole or not at all.

    Args:
      folder: a new folder.
      prefix: the prefix.

    Raises:
      CheckpointError: the folder exists, or cannot be written.
    """
    path = Path(folder).expanduser().resolve()
    if path.exists():
        raise CheckpointError(f"{path} exists already; save to a new folder.")
    about = {
        "format": FORMAT, "prompt": prefix.prompt, "model": _fingerprint(prefix.prompts.model),
        "cache": _cache(prefix.prompts),
        "state": arrays_digest(prefix.state, prefix.logits, prefix.tokens, np.int64(prefix.prompt)),
    }  # fmt: skip
    with finished_folder(path) as unfinished:
        orbax.save_state(unfinished / STATE, prefix.state)
        np.savez(unfinished / ARRAYS, tokens=prefix.tokens, logits=np.asarray(prefix.logits))
        (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def load(folder: str | Path, prompts: Prompts) -> Prefix:
    """Loads a prefix that `save` has saved.

    Args:
      folder: the folder.
      prompts: see `kvjax.serve.prefix.make`; of the same model, spec and limits.

    Raises:
      CheckpointError: the folder is missing or damaged, or is of another model, spec, or limits.
    """
    path = Path(folder).expanduser().resolve()
    about = read_json(path / ABOUT, "prefix")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a prefix of this version of kvjax: format {about.get('format')!r}.")
    for name, own in (("model", _fingerprint(prompts.model)), ("cache", _cache(prompts))):
        if about.get(name) != own:
            raise CheckpointError(f"{path} was saved with another {name}: {about.get(name)}; this one is {own}.")
    model = prompts.model
    shapes = state_shapes(model, prompts.layout, 1)
    state = orbax.restore_state(path / STATE, shapes, mesh=model.mesh, rules=model.rules)
    state = on_its_memory(state, prompts.layout)
    try:
        with np.load(path / ARRAYS) as arrays:
            tokens, logits = arrays["tokens"], jnp.asarray(arrays["logits"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path / ARRAYS} is damaged: {error}.") from None
    prompt = about.get("prompt")
    same = isinstance(prompt, int) and arrays_digest(state, logits, tokens, np.int64(prompt)) == about.get("state")
    if not isinstance(prompt, int) or not same or len(tokens) != int(state.length[0]):
        raise CheckpointError(f"{path} is damaged: its arrays are not those that were saved.")
    return Prefix(state, logits, tokens, prompt, prompts)


def _cache(prompts: Prompts) -> JsonObject:
    """Returns the settings that the arrays of a cache depend on, for JSON."""
    layout = prompts.layout
    parts = [[group.parts for group in layer] for layer in layout.decode]
    return {
        "spec": functions.described(prompts.spec),
        "prompt": prompts.limits.prompt,
        "new_tokens": prompts.limits.new_tokens,
        "block": prompts.block,
        "dtype": layout.dtype,
        "slots": [[list(group.slots) for group in layer] for layer in layout.decode],
        # On how many devices the slots of several stores are.
        **({"parts": parts} if any(each > 1 for layer in parts for each in layer) else {}),
    }


def _fingerprint(model: Model) -> str:
    """Returns the SHA-256 of a model's configuration and parameters."""
    return hashlib.sha256((repr(model.config) + model_digest(model.params)).encode()).hexdigest()
