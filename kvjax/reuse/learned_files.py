"""Files of predictors and coprocessors."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from kvjax.checkpoint.huggingface import load, save
from kvjax.errors import CheckpointError, InputError
from kvjax.models.calibrate import fingerprint
from kvjax.models.model import Model
from kvjax.reuse.augmentation import Coprocessor, check_coprocessor
from kvjax.reuse.prediction import KVMaps, Predictor, check_predictor

Array = jax.Array
AUXILIARY, MAPS = "auxiliary", "maps.safetensors"  # in a predictor's folder
LATENTS = "latents"
PREDICTOR_FORMAT, COPROCESSOR_FORMAT = "kvjax-predictor-1", "kvjax-coprocessor-1"


def save_predictor(folder: str | Path, model: Model, predictor: Predictor) -> None:
    """Saves a predictor: the auxiliary model as a Hugging Face folder, and the maps as a safetensors file.

    Args:
      folder: that is made; files of a predictor in it are replaced.
      model: the base.
      predictor: of the base.

    Raises:
      InputError: the predictor is for another base.
      CheckpointError: the files cannot be written.
    """
    check_predictor(model, predictor)
    folder = Path(folder)
    save(predictor.auxiliary, folder / AUXILIARY)
    about = {"format": PREDICTOR_FORMAT, "sources": json.dumps([int(each) for each in predictor.sources])}
    _write(folder / MAPS, predictor.maps._asdict(), model, about)


def load_predictor(folder: str | Path, model: Model) -> Predictor:
    """Loads a predictor that `save_predictor` has saved.

    Args:
      folder: of the predictor.
      model: the base.

    Raises:
      CheckpointError: the folder has no predictor, is damaged, or its predictor is for another base.
    """
    folder = Path(folder)
    tensors, about = _read(folder / MAPS, model, PREDICTOR_FORMAT)
    try:
        maps, sources = KVMaps(**tensors), tuple(json.loads(about["sources"]))
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{folder / MAPS} is damaged: it has not the maps of a predictor.") from None
    made = Predictor(load(folder / AUXILIARY, dtype=model.dtype), maps, sources)
    try:
        check_predictor(model, made)
    except InputError as error:
        raise CheckpointError(f"{folder} has no predictor for this model: {error}") from None
    return made


def save_coprocessor(path: str | Path, model: Model, coprocessor: Coprocessor) -> None:
    """Saves a coprocessor as a safetensors file.

    Args:
      path: of the file; it is replaced if it exists.
      model: the decoder.
      coprocessor: of the decoder.

    Raises:
      InputError: the coprocessor is for another model.
      CheckpointError: the file cannot be written.
    """
    check_coprocessor(model, coprocessor)
    tensors = traverse_util.flatten_dict(coprocessor.params, sep="/")
    _write(Path(path), {**tensors, LATENTS: coprocessor.latents}, model, {"format": COPROCESSOR_FORMAT})


def load_coprocessor(path: str | Path, model: Model) -> Coprocessor:
    """Loads a coprocessor that `save_coprocessor` has saved.

    Args:
      path: of the file.
      model: the decoder.

    Raises:
      CheckpointError: the file has no coprocessor, is damaged, or its coprocessor is for another model.
    """
    tensors, _ = _read(Path(path), model, COPROCESSOR_FORMAT)
    latents = tensors.pop(LATENTS, None)
    if latents is None:
        raise CheckpointError(f"{path} is damaged: it has no {LATENTS}.")
    made = Coprocessor(traverse_util.unflatten_dict(tensors, sep="/"), latents)
    try:
        check_coprocessor(model, made)
    except InputError as error:
        raise CheckpointError(f"{path} has no coprocessor for this model: {error}") from None
    return made


def _write(path: Path, tensors: dict[str, Array], model: Model, about: dict[str, str]) -> None:
    arrays = {name: jnp.asarray(each) for name, each in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, str(path), metadata=about | {"model": fingerprint(model) or ""})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}.") from None


def _read(path: Path, model: Model, form: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Reads the arrays of a file and its description.

    Raises:
      CheckpointError: it cannot be read, has another format, or was made for another model.
    """
    try:
        with safe_open(str(path), framework="flax") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    if about.get("format") != form:
        raise CheckpointError(f"{path} is not valid: it has format {about.get('format')!r}, and {form!r} is needed.")
    if about.get("model") != fingerprint(model):
        raise CheckpointError(f"{path} was made for another model; give the model that it was trained for.")
    return tensors, about
