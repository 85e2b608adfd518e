"""Contexts of requests, in a folder: a request keeps the one after its last token, and one of a later run continues it.

Each has a folder of its own, named by the id of the request that has kept it. Programs have one size for all requests,
which the folder's first run decides: `LIMITS` holds it for later ones.
"""

import dataclasses
import json
import shutil
import urllib.parse
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments import results
from experiments.batch.requests import Asked
from kvjax.cache import Limits
from kvjax.errors import CheckpointError, ConfigError, InputError
from kvjax.generation.context import Context
from kvjax.serve import Request, Runner
from kvjax.transport import KVTC, CacheGen, Tables, Transform

LIMITS = "limits.json"
CHECKED = "contexts"  # the journal's note that none of the folders was there before
LEVELS = {f"cachegen:{level}": level for level in (1, 2, 3)}


def codec_of(text: str | None) -> CacheGen | KVTC | None:
    """Returns the codec of a text.

    Args:
      text: ``cachegen:LEVEL``, or a file that `Tables.save` or `Transform.save` has written; None for no codec.

    Raises:
      ConfigError: it is neither.
    """
    if text is None:
        return None
    if text in LEVELS:
        return CacheGen(LEVELS[text])
    try:
        with np.load(text) as arrays:
            is_transform = "ratio" in arrays
        if is_transform:
            return KVTC(Transform.load(text))
        tables = Tables.load(text)
    except (OSError, ValueError, zipfile.BadZipFile, CheckpointError) as error:
        raise ConfigError(
            f"--codec={text!r} must be {', '.join(LEVELS)}, or a file that kvjax.transport.Tables.save or "
            f"Transform.save has written: {error}"
        ) from None
    return CacheGen(tables.level, tables.delta, tables=tables)


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The contexts of a run.

    Attributes:
      folder: that holds them; None if requests neither keep nor continue any.
      codec: in which they are saved; None = as they are.
    """

    folder: Path | None
    codec: CacheGen | KVTC | None

    def path(self, name: str | int) -> Path:
        """Returns the folder of the context that a request keeps."""
        assert self.folder is not None
        return self.folder / ("=" + urllib.parse.quote(str(name), safe=""))

    def limits(self) -> Limits | None:
        """Returns the sizes of the folder's first run; None if there was none.

        Raises:
          ConfigError: the file that holds them cannot be read.
        """
        if self.folder is None or not (path := self.folder / LIMITS).exists():
            return None
        try:
            return Limits(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from None

    def begin(self, asked: Iterable[Asked], limits: Limits) -> None:
        """Prepares the folder for the first call of a run.

        Args:
          asked: all requests.
          limits: their sizes.

        Raises:
          ConfigError: there is a context already of a request that keeps its own, or the folder cannot be written.
        """
        if self.folder is None:
            return
        for each in asked:
            if each.keeps and self.path(each.id).exists():
                raise ConfigError(
                    f"line {each.line}: --contexts={str(self.folder)!r} already has the context of a request "
                    f"{each.id!r}; give the request another id, or another folder."
                )
        if not (path := self.folder / LIMITS).exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                results.write(path, json.dumps({"prompt": limits.prompt, "new_tokens": limits.new_tokens}).encode())
            except OSError as error:
                raise ConfigError(f"--contexts={str(self.folder)!r} cannot be written: {error.strerror}.") from None

    def save(self, name: str | int, context: Context, runner: Runner) -> None:
        """Saves the context of a request, in place of what a killed call may have left.

        Raises:
          CheckpointError: it cannot be written.
        """
        path = self.path(name)
        if path.exists():
            shutil.rmtree(path)
        runner.save_prefix(path, context, codec=self.codec)

    def continued(self, each: Asked, runner: Runner) -> Request:
        """Returns a request with the context that it continues.

        Raises:
          InputError: there is none of that name.
          CheckpointError: it cannot be read, or is of another model, cache, codec or size.
        """
        assert each.request is not None
        if each.continues is None:
            return each.request
        path = self.path(each.continues)
        if not path.exists():
            raise InputError(f"--contexts={str(self.folder)!r} has no context of a request {each.continues!r}.")
        return dataclasses.replace(each.request, prefix=runner.load_prefix(path, codec=self.codec))
