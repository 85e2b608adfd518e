"""The inputs of a result: a config's settings, the contents of the files that it names, and this code."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import experiments
import kvjax
from experiments import fields
from experiments.config import ExperimentConfig, ModelConfig
from experiments.tasks import answering, registry
from kvjax.checkpoint import gguf
from kvjax.checkpoint.locate import local
from kvjax.errors import ConfigError
from kvjax.specs import parse, user_files
from kvjax.storage.calibration_files import calibration_file

WHOLE = 64 << 20  # bytes up to which all of a file is read; weights beyond are sampled
SAMPLES, SAMPLE = 64, 64 << 10  # of a larger file, evenly spread, and the bytes of each
DIGITS = 12  # hex digits of a digest
CODE = (".py", ".cc", ".h")
WEIGHTS = (".safetensors", ".bin", gguf.SUFFIX)
#: Of files in a model's folder: settings and tokenizers, weights, vocabularies, merges, chat templates.
OF_MODEL = (".json", ".model", ".txt", ".jinja", *WEIGHTS)


def digest(config: ExperimentConfig, found: Mapping[str, str] | None = None) -> str:
    """Twelve hex digits that name what would be computed.

    They cover every field but the output folder, and the contents of the files that fields name: policies, storages and
    selections of a user's own, with the files beside them that they import, texts, checkpoints, skews and calibrations.

    Args:
      config: an experiment.
      found: its `contents`; None = those of now.
    """
    settings = {key: value for key, value in fields.to_dict(config).items() if key != "output"}
    if found := contents(config) if found is None else found:
        settings["contents"] = found
    return _hex(json.dumps(settings, sort_keys=True).encode())


def of_answers(config: ExperimentConfig) -> str:
    """Twelve hex digits that name what answers to tasks depend on besides the cache and the questions."""
    settings = fields.to_dict(config)
    parts = [settings[part] for part in ("model", "mesh", "rules", "seed", "prefill_block", "implementation")]
    return _hex(json.dumps([parts, _of_own(config) | of_model(config), code()], sort_keys=True).encode())


def contents(config: ExperimentConfig) -> dict[str, str]:
    """A digest of each file that a config names, by the file's name in the config."""
    return _of_own(config) | of_model(config) | _digests(_of_texts(config))


def check_unchanged(config: ExperimentConfig, found: Mapping[str, str]) -> None:
    """Refuses a result that is named by the contents of files that have changed.

    Raises:
      ConfigError: the config's `contents` are others now.
    """
    if changed := {name for name, _ in found.items() ^ contents(config).items()}:
        raise ConfigError(f"{', '.join(sorted(changed))} changed after this began; run the same command again.")


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    return {str(path): of_file(path) for path in sorted(set(paths)) if path.is_file()}


def of_file(path: Path) -> str:
    """A digest of a file's contents; of a large one, of its size and of samples."""
    status = path.stat()
    return _of_file(str(path.resolve()), status.st_size, status.st_mtime_ns)


@functools.cache
def code() -> str:
    """A digest of the sources of kvjax and of experiments."""
    return of_sources([Path(package.__path__[0]) for package in (kvjax, experiments)])


def of_sources(folders: Sequence[Path]) -> str:
    """A digest of the source files below some folders."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in CODE):
            found.update(f"{folder.name}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:DIGITS]


def _of_own(config: ExperimentConfig) -> dict[str, str]:
    """A user's own Python files, and those that they import."""
    texts = (config.policy.name, config.storage, config.selection, *config.baselines)
    files = [file for text in texts for file in parse.files(text)]
    files += [file for name in config.tasks.names for file in registry.files(name)]
    return {str(path): found[:DIGITS] for file in files for path, found in user_files.digests(file).items()}


def _of_texts(config: ExperimentConfig) -> Iterator[Path]:
    """Returns the texts that are read, and the questions."""
    if config.data.text:
        yield Path(config.data.text)
    with contextlib.suppress(ConfigError):  # is said where tasks are checked
        yield from answering.files_of(config.tasks)


def of_model(config: ExperimentConfig) -> dict[str, str]:
    """A digest of each file of a config's model, and of what its caches need."""
    found = _digests([Path(config.model.skew)] if config.model.skew else [])
    calibration = config.model.calibration
    if calibration is not None and (file := calibration_file(calibration)).is_file():
        found[calibration] = of_file(file)
    # As `kvjax.load` looks for it.
    if config.model.path is not None and (checkpoint := local(config.model.path)) is not None:
        inside = gguf.parts(checkpoint) if checkpoint.is_file() else checkpoint.iterdir()
        files = sorted(path for path in inside if path.suffix in OF_MODEL and path.is_file())
        # Not by the folder of a model that kvjax contains, which is another one on another machine.
        found |= {f"{config.model.path}/{path.name}": of_file(path) for path in files}
    return found


def of_weights(path_or_name: str) -> str:
    """A digest of the weights of a checkpoint on this machine; empty if it is not here.

    Args:
      path_or_name: as `kvjax.load` takes it.
    """
    found = of_model(ExperimentConfig(model=ModelConfig(path=path_or_name)))
    weights = {name: digest for name, digest in found.items() if Path(name).suffix in WEIGHTS}
    return _hex(json.dumps(weights, sort_keys=True).encode()) if weights else ""


@functools.lru_cache(maxsize=4096)
def _of_file(name: str, size: int, changed: int) -> str:
    """See `of_file`; a file of this size and of this time of change is read once."""
    with open(name, "rb") as file:
        if size <= WHOLE:
            return _hex(file.read())
        found = hashlib.sha256(str(size).encode())
        for number in range(SAMPLES):
            file.seek(number * (size - SAMPLE) // (SAMPLES - 1))
            found.update(file.read(SAMPLE))
    return found.hexdigest()[:DIGITS]


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]
