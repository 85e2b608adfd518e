"""Contexts of requests, in a folder: a request keeps the one after its last token, and one of a later run continues it.

Each context has its own folder, named by the id of the request. All contexts of a folder have arrays of the same sizes.
The first run that keeps a context chooses them, and the file `SIZES` stores them for later runs.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import urllib.parse
import uuid
from collections.abc import Sequence
from pathlib import Path

from experiments import results
from experiments.batch.journal import Journal
from experiments.batch.requests import Asked
from kvjax.cache import Limits
from kvjax.errors import CheckpointError, ConfigError, InputError, KvjaxError
from kvjax.generation.context import Context
from kvjax.serve import Runner
from kvjax.serve.prefix import room_of, text_of
from kvjax.serve.text_stream import TextStream
from kvjax.transport import KVTC, CacheGen, load_codec

SIZES, LOCK = "sizes.json", "lock"
OWNER = "owner"  # the journal's note of a name of its run, which is also written beside the contexts that it keeps
LONGEST = 100  # characters of an id in the name of a folder; longer ones are digests
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
        return load_codec(text)
    except CheckpointError as error:
        raise ConfigError(f"--codec={text!r} must be {', '.join(LEVELS)}, or a file: {error}") from None


def name_of(key: str | int) -> str:
    """Returns the name of a request's folder; of ids that differ, "5" and 5 among them, the names differ."""
    text = json.dumps(key)
    quoted = urllib.parse.quote(text, safe="")
    return quoted if len(quoted) <= LONGEST else hashlib.sha256(text.encode()).hexdigest()


class Contexts:
    """The folder of a run. Use it as a context manager: the folder is locked meanwhile.

    Of a run that is refused before it keeps anything, a folder that was made for it is removed.

    Attributes:
      limits: the sizes that the folder's first run has decided; None if there was none.
      codec: in which contexts are saved; None = as they are.
    """

    def __init__(self, folder: str, codec: CacheGen | KVTC | None) -> None:
        """Reads the sizes.

        Args:
          folder: of the contexts; it need not exist.
          codec: see `Contexts`.

        Raises:
          ConfigError: the folder cannot be read or written, or another process uses it.
        """
        self._shown, self._folder, self.codec = folder, Path(folder).expanduser().resolve(), codec
        self._last: tuple[str | int, Context] | None = None
        self._made = results.missing(self._folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"--contexts={folder!r} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"--contexts={folder!r} is being used by another process.") from None
        path = self._folder / SIZES
        try:
            self.limits = Limits(**json.loads(path.read_text())) if path.exists() else None
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from None

    def __enter__(self) -> "Contexts":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        refused = kind is not None and issubclass(kind, KvjaxError)
        if refused and self._made and os.listdir(self._folder) == [LOCK]:
            (self._folder / LOCK).unlink()
            results.remove_empty(self._made)
        os.close(self._lock)

    def begin(self, asked: Sequence[Asked], limits: Limits, journal: Journal) -> None:
        """Checks that nothing of an earlier run would be replaced, and keeps the sizes for later runs.

        Args:
          asked: all requests.
          limits: their sizes.
          journal: of the run.

        Raises:
          ConfigError: there is a context already of a request that keeps its own.
        """
        keeping = [each for each in asked if each.keeps]
        if keeping and OWNER not in journal.notes:
            journal.note(OWNER, uuid.uuid4().hex)
        for each in keeping:
            folder, owner = self._paths(each.id)
            if folder.exists() and _text(owner) != journal.notes[OWNER]:
                raise ConfigError(
                    f"line {each.line}: --contexts={self._shown!r} already has the context of a request {each.id!r}; "
                    "give the request another id, or another folder."
                )
        if keeping and self.limits is None:
            results.write(self._folder / SIZES, json.dumps({"prompt": limits.prompt, "new_tokens": limits.new_tokens}))

    def save(self, key: str | int, context: Context, runner: Runner, journal: Journal) -> None:
        """Saves the context of a request, in place of what this run left there when it was killed.

        Args:
          key: the id of the request.
          context: after its last token.
          runner: that has made it.
          journal: of the run.

        Raises:
          KvjaxError: it cannot be coded or written.
        """
        folder, owner = self._paths(key)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            results.write(owner, journal.notes[OWNER])
        except OSError as error:
            raise CheckpointError(f"{owner} cannot be written: {error.strerror}.") from None
        runner.save_prefix(folder, context, codec=self.codec)

    def prepared(self, each: Asked, runner: Runner) -> Asked:
        """Returns a request with the context that it continues, if it does.

        If the line gives no max_new_tokens, the default is lowered to what fits in the context.

        Raises:
          InputError: there is no context of that name, or no room in it; or a prompt is longer than those of the
            folder's first run.
          CheckpointError: the context cannot be read, or is of another model, cache, codec or size.
        """
        request = each.request
        assert request is not None
        if each.continues is None:
            if self.limits is not None and len(request.tokens) > self.limits.prompt:
                raise InputError(
                    f"the prompt has {len(request.tokens)} tokens, and those of --contexts={self._shown!r} have at "
                    f"most {self.limits.prompt}, as its first run has decided; give another folder, and "
                    "--longest_prompt."
                )
            return each
        context = self._loaded(each.continues, runner)
        room = room_of(context, runner.prompts.limits.new_tokens) - len(request.tokens) - request.keep_context
        new = min(request.max_new_tokens, max(room, 1)) if each.uses_default else request.max_new_tokens
        if new > room:
            raise InputError(
                f"{len(request.tokens)} tokens and {new} new ones do not fit behind the context of {each.continues!r}: "
                f"there is room for {max(room + len(request.tokens), 0)}. A folder that is begun with a larger "
                "--most_new_tokens has more."
            )
        request, text = dataclasses.replace(request, prefix=context, max_new_tokens=new), None
        if each.text is not None and (tokenizer := runner.model.tokenizer) is not None:
            # A character may begin in the context.
            text = TextStream(tokenizer, each.stops, prompt=[*text_of(context).tolist(), *request.tokens])
            request = dataclasses.replace(request, until=text.take)
        return dataclasses.replace(each, request=request, text=text)

    def _loaded(self, key: str | int, runner: Runner) -> Context:
        """Returns a context; the last one is held, for the requests about it, which come one after the other."""
        if self._last is None or self._last[0] != key or type(self._last[0]) is not type(key):
            folder, _ = self._paths(key)
            if not folder.exists():
                raise InputError(f"--contexts={self._shown!r} has no context of a request {key!r}.")
            self._last = key, runner.load_prefix(folder, codec=self.codec)
        return self._last[1]

    def _paths(self, key: str | int) -> tuple[Path, Path]:
        """Returns the folder of a context, and the file that says which run has written it."""
        name = name_of(key)
        return self._folder / name, self._folder / f"{name}.{OWNER}"


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
