"""Reads requests: a JSON object a line, each checked by itself."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.lines import numbered
from kvjax.errors import ConfigError, InputError, KvjaxError
from kvjax.generation.sampling import Greedy, Sample, Sampler
from kvjax.models.model import Model
from kvjax.serve import Request
from kvjax.serve.text_stream import TextStream
from kvjax.typing import JsonObject

FIELDS = (
    "id", "prompt", "max_new_tokens", "stop", "stop_tokens", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "seed", "context", "keep_context",
)  # fmt: skip
MAX_TEXTS = 16  # stop texts of a request


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Settings of requests that have none of their own.

    Attributes:
      max_new_tokens: see `Request`.
      sampling: fields of `kvjax.Sample`; None for one that is as the model's generation_config.json says.
    """

    max_new_tokens: int
    sampling: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A line of a file of requests.

    Attributes:
      index: the number of lines before it that are not empty.
      line: its number in the file, from 1.
      id: what its result is called.
      request: what it asks for; None if it cannot be answered.
      text: makes the text of its tokens; None if the model has no tokenizer.
      error: why it cannot be answered; None if it can.
      continues: the id of the request, of an earlier run, whose context it continues; None if it begins a text.
      stops: the texts that end it.
      uses_default: whether its max_new_tokens is the default.
      shared: the number of tokens of its prompt that come before those of `request`.
    """

    index: int
    line: int
    id: str | int
    request: Request | None
    text: TextStream | None = None
    error: str | None = None
    continues: str | int | None = None
    stops: tuple[str, ...] = ()
    uses_default: bool = False
    shared: int = 0

    @property
    def keeps(self) -> bool:
        """Whether its context is kept."""
        return self.request is not None and self.request.keep_context


def lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--requests={str(path)!r} cannot be read: {error.strerror}.") from None
    return numbered(content)


def read(given: list[tuple[int, bytes]], model: Model, defaults: Defaults, *, contexts: bool = False) -> list[Asked]:
    """Returns the requests of lines, each with the number of its line as `Request.number`.

    Args:
      given: from `lines`.
      model: whose tokenizer texts are for.
      defaults: what requests are that say nothing.
      contexts: whether there is a folder for contexts.
    """
    found = [*_read(given, model, defaults, contexts)]
    kept = {json.dumps(each.id) for each in found if each.keeps}
    error = "the context of a request of this file is continued in another run, when it is there."
    return [
        Asked(each.index, each.line, each.id, None, error=error) if json.dumps(each.continues) in kept else each
        for each in found
    ]


def _read(given: list[tuple[int, bytes]], model: Model, defaults: Defaults, contexts: bool) -> Iterator[Asked]:
    seen: dict[str | int, int] = {}
    for index, (number, line) in enumerate(given):
        name: str | int = number
        try:
            entry = _object(line)
            name = _name(entry, number)
            if name in seen:
                own = "" if "id" in entry else ": a line without an id has its line number as its id"
                raise InputError(f"id {name!r} is already used in line {seen[name]}{own}.")
            seen[name] = number
            continues = _continued(entry, contexts)
            request, text, stops = _request(entry, model, defaults, index)
            uses_default = "max_new_tokens" not in entry
            yield Asked(index, number, name, request, text, continues=continues, stops=stops, uses_default=uses_default)
        except KvjaxError as error:
            yield Asked(index, number, name, None, error=str(error))


def _object(line: bytes) -> JsonObject:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the line is not valid JSON: {error}.") from None
    if not isinstance(entry, dict):
        raise InputError(f"the line must be a JSON object; got {type(entry).__name__}.")
    return entry


def _name(entry: JsonObject, number: int) -> str | int:
    return _checked_name("id", entry.get("id", number))


def _checked_name(field: str, name: object) -> str | int:
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError(f"{field} must be a string or an integer; got {_short(name)}.")
    if isinstance(name, str):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"{field} {name!r} contains an unpaired surrogate.") from None
    return name


def _continued(entry: JsonObject, contexts: bool) -> str | int | None:
    """Returns the id of the request whose context is continued, after checking both fields on contexts."""
    name, keeps = entry.get("context"), entry.get("keep_context", False)
    if not isinstance(keeps, bool):
        raise InputError(f"keep_context must be true or false; got {_short(keeps)}.")
    if (keeps or name is not None) and not contexts:
        raise InputError("context and keep_context need a folder; give --contexts=FOLDER.")
    if keeps and entry.get("stop"):
        raise InputError("keep_context needs stop_tokens in place of stop: a text may end within tokens.")
    return None if name is None else _checked_name("context", name)


def _request(
    entry: JsonObject, model: Model, defaults: Defaults, index: int
) -> tuple[Request, TextStream | None, tuple[str, ...]]:
    """Returns a request, what makes its text, and the texts that end it."""
    if unknown := sorted(entry.keys() - set(FIELDS)):
        raise InputError(f"unknown field {unknown[0]!r}; a request may have {', '.join(FIELDS)}.")
    prompt: Any = entry.get("prompt")
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError("the model has no tokenizer; give prompt as a list of token ids.")
        # A prompt that continues a context does not begin with BOS.
        prompt = tokenizer.encode(prompt, bos=entry.get("context") is None)
    elif not _ids(prompt):
        raise InputError(f"prompt must be a string or a list of token ids; got {_short(prompt)}.")
    stops = entry.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_TEXTS or not all(isinstance(x, str) and x for x in stops):
        raise InputError(f"stop must be a non-empty string or a list of up to {MAX_TEXTS}; got {_short(stops)}.")
    if stops and tokenizer is None:
        raise InputError("the model has no tokenizer; give stop_tokens instead of stop.")
    tokens = entry.get("stop_tokens", [])
    if not _ids(tokens):
        raise InputError(f"stop_tokens must be a list of token ids; got {_short(tokens)}.")
    ends = [*tokens, *model.eos_token_ids]
    text = None if tokenizer is None else TextStream(tokenizer, stops, prompt=prompt)
    seed = entry.get("seed")
    request = Request(
        tokens=prompt, max_new_tokens=entry.get("max_new_tokens", defaults.max_new_tokens), stop=ends,
        sampler=_sampler(entry, model, defaults), seed=seed, number=index if seed is None else None,
        keep_context=entry.get("keep_context", False), until=None if text is None else text.take,
    )  # fmt: skip
    return request, text, tuple(stops)


def _sampler(entry: JsonObject, model: Model, defaults: Defaults) -> Sampler:
    usual = dataclasses.asdict(model.generation.sampler)
    if isinstance(model.generation.sampler, Greedy):
        usual["temperature"] = 0
    own: dict[str, Any] = {}
    for name, default in defaults.sampling.items():
        value = entry.get(name, default)
        if (value := usual.get(name) if value is None else value) is not None:
            own[name] = value
    if own["temperature"] == 0:
        return Greedy(own.get("repetition_penalty", 1.0))
    return Sample(**own)


def _ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
