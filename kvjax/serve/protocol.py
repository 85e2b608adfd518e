"""Requests of OpenAI's API: what their bodies may say, and errors as the API has them.

Source: the API reference at platform.openai.com, "Completions" and "Chat completions". What kvjax cannot do is refused,
not ignored. Further fields, which the `openai` package sends from ``extra_body``: top_k, min_p, repetition_penalty,
stop_token_ids, ignore_eos, priority (as in vLLM: the lowest number is served first), prefix, the name of a state that
the server was given, conversation, as in OpenAI's responses: the id of a conversation that the server holds, documents,
texts before the prompt, as in the templates of `transformers`, recompute_ratio, the share of these that is computed
again, and recompute_by_question, the part of that share that the prompt chooses.
"""

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.generation.context import Context
from kvjax.generation.sampling import Greedy, Sample, Sampler
from kvjax.models.model import Model
from kvjax.serve.api_errors import ApiError
from kvjax.serve.conversations import Conversation
from kvjax.serve.document_fields import FIELDS as DOCUMENT_FIELDS
from kvjax.serve.document_fields import ChatTokens, GivenDocuments, document_tokens, given_documents
from kvjax.serve.documents import Documents
from kvjax.serve.prefix import room_of, text_of
from kvjax.serve.request import SEEDS, Request
from kvjax.serve.text_stream import TextStream
from kvjax.typing import Json, JsonObject

COMPLETION_TOKENS = 16  # new tokens of a completion that does not say how many, as in OpenAI's API
MAX_CHOICES, MAX_STOPS = 16, 16  # of a request
MAX_PRIORITY = 1 << 31
FAST_CHARACTERS = 100_000  # that are tokenized in less than a tenth of a second
#: Fields that are accepted with a value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "suffix": ("",), "echo": (False,),
    "best_of": (1,), "top_logprobs": (0,), "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,), "audio": (),
    "prediction": (), "service_tier": ("auto", "default"), "parallel_tool_calls": (True, False),
}  # fmt: skip
#: Fields that say nothing about the result.
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
COMMON = {
    "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "logprobs",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "priority", *DOCUMENT_FIELDS,
}  # fmt: skip
FIELDS = {
    "completion": COMMON | {"prompt", "prefix"},
    "chat": COMMON | {"messages", "max_completion_tokens", "conversation"},
}


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """The model and the settings of a server.

    Attributes:
      model: the model.
      name: what requests call it.
      prefixes: states that requests may continue, by name.
      longest_prompt: tokens of a prompt at the most.
      max_new_tokens: new tokens of a request at the most.
      by_priority: whether requests may have a priority.
    """

    model: Model
    name: str
    prefixes: Mapping[str, Context]
    longest_prompt: int
    max_new_tokens: int
    by_priority: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked body.

    Attributes:
      kind: ``completion`` or ``chat``.
      requests: one for each choice, of each prompt in turn.
      texts: what makes the text of each.
      prompts: the number of prompts.
      stream: whether the answer is a stream of events.
      usage: whether the stream ends with the number of tokens.
      logprobs: whether log-probabilities are sent.
      conversation: the id of the conversation that is continued; None for none.
    """

    kind: str
    requests: list[Request]
    texts: list[TextStream | None]
    prompts: int
    stream: bool
    usage: bool
    logprobs: bool
    conversation: str | None = None


def parse(content: bytes | bytearray) -> JsonObject:
    """Returns the JSON object of a body.

    Raises:
      ApiError: it is none.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object; got {type(body).__name__}.")
    return body


Served = ServerInfo  # its name in earlier versions


def read(
    kind: str,
    body: JsonObject,
    served: ServerInfo,
    chat: ChatTokens | None = None,
    conversation: Conversation | None = None,
) -> Call:
    """Checks the body of a request.

    Args:
      kind: ``completion`` or ``chat``.
      body: from `parse`.
      served: the model.
      chat: the prompt of a chat, from `kvjax.serve.chat_prompts`.
      conversation: the conversation that a chat continues; None for none.

    Raises:
      ApiError: something that is not valid, or that kvjax does not have.
    """
    body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, values in NEUTRAL.items():
        if name in body and body.pop(name) not in values:
            raise ApiError(400, f"{name} is not supported.", param=name, code="unsupported_parameter")
    if unknown := sorted(body.keys() - FIELDS[kind]):
        raise ApiError(400, f"unknown field {unknown[0]!r}.", param=unknown[0], code="unknown_parameter")
    check_model(_field(body, "model", str, served.name), served)
    logprobs = _logprobs(kind, body)
    stream, options = _field(body, "stream", bool, False), _field(body, "stream_options", dict, {})
    kept = conversation is not None
    prefix = _prefix(body, served) if conversation is None else conversation.context
    given = given_documents(body)
    if given is not None and (prefix is not None or kept):
        name = "prefix" if conversation is None else "conversation"
        raise ApiError(400, f"documents cannot follow a {name}.", param="documents", code="unsupported_parameter")
    prompts = _prompts(body, served, prefix, bos=given is None) if chat is None else [chat.tokens]
    documents = None if given is None else _documents(given, body, served, chat)
    document_length = 0 if documents is None else len(documents.beginning) + sum(map(len, documents.chunks))
    for prompt in prompts:
        _check_length(prompt, document_length, served, prefix, "prompt" if chat is None else "messages", kept=kept)
    stops, ids = _stops(body, served.model)
    sampler, tokens = _sampler(body, served.model), _max_tokens(kind, body, served, prefix, kept=kept)
    choices = _whole(body, "n", 1, 1, MAX_CHOICES)
    if kept and (choices > 1 or stops):
        # The cache of a row that the host ends may have gone further.
        name = "n" if choices > 1 else "stop"
        raise ApiError(
            400, f"{name} is not supported in a conversation, whose next turn follows one answer that a token or its "
            "length ends.", param=name, code="unsupported_parameter",
        )  # fmt: skip
    # A request without a seed is like no other.
    seed = _whole(body, "seed", secrets.randbelow(SEEDS), 0, SEEDS - 1)
    priority = _priority(body, served)
    requests, texts = [], []
    for prompt in prompts:
        # The answer of a chat is a text of its own, which begins without the space between words.
        before = [] if kind == "chat" else prompt if prefix is None else [*text_of(prefix), *prompt]
        for number in range(choices):
            tokenizer = served.model.tokenizer
            text = None if tokenizer is None else TextStream(tokenizer, stops, prompt=before)
            texts.append(text)
            requests.append(
                Request(
                    tokens=prompt,
                    max_new_tokens=tokens(prompt),
                    stop=ids,
                    sampler=sampler,
                    seed=seed,
                    number=number,
                    prefix=prefix,
                    documents=documents,
                    early=stream,
                    priority=priority,
                    keep_context=kept,
                    until=None if text is None else text.take,
                )
            )
    usage, continued = bool(options.get("include_usage")), None if conversation is None else conversation.id
    return Call(kind, requests, texts, len(prompts), stream, usage, logprobs, continued)


def check_model(name: str, served: ServerInfo) -> None:
    """Raises ApiError if a request is for another model."""
    if name != served.name:
        raise ApiError(404, f"there is no model {name!r}; this server has {served.name!r}.", param="model",
                       code="model_not_found")  # fmt: skip


def _documents(given: GivenDocuments, body: JsonObject, served: ServerInfo, chat: ChatTokens | None) -> Documents:
    """The documents of a body. Those of texts follow what begins a text; those of token ids, nothing."""
    tokenizer, prompt = served.model.tokenizer, body.get("prompt")
    if tokenizer is not None:
        check_size("".join(each for each in given.texts if isinstance(each, str)), served, None, "documents")
    chunks = document_tokens(given, tokenizer)
    if chat is not None:
        return Documents(chunks, chat.beginning, given.ratio, given.by_question)
    # `_prompts` has checked it: a text, token ids, or a list of either.
    texts = {isinstance(each, str) for each in (prompt if isinstance(prompt, list) else [prompt])}
    if len(texts) > 1:
        raise ApiError(400, "with documents, prompts must be all texts or all token ids.", param="prompt")
    beginning = tokenizer.encode("") if True in texts and tokenizer is not None else []
    return Documents(chunks, beginning, given.ratio, given.by_question)


def _prompts(body: JsonObject, served: ServerInfo, prefix: Context | None, *, bos: bool) -> list[list[int]]:
    """The prompts of a completion: a text, token ids, or a list of either."""
    given = body.get("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(_is_id, given))):
        given = [given]
    if not isinstance(given, list) or not given or len(given) > MAX_CHOICES:
        raise ApiError(
            400, f"prompt must be a string, token ids, or a list of 1 to {MAX_CHOICES} of these.", param="prompt"
        )
    tokenizer, found = served.model.tokenizer, []
    for prompt in given:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ApiError(400, "the model has no tokenizer; give token ids.", param="prompt")
            check_size(prompt, served, prefix, "prompt")
            try:
                found.append(tokenizer.encode(prompt, bos=bos and prefix is None))
            except KvjaxError as error:
                raise ApiError(400, str(error), param="prompt") from None
        elif isinstance(prompt, list) and all(map(_is_id, prompt)):
            found.append(prompt)
        else:
            raise ApiError(400, f"a prompt must be a string or token ids; got {type(prompt).__name__}.", param="prompt")
    return found


def _logprobs(kind: str, body: JsonObject) -> bool:
    """Returns whether log-probabilities of the chosen tokens are sent: ``true`` in a chat, ``0`` in a completion."""
    given: Any = body.get("logprobs", False)
    if given is False:
        return False
    if given is not True if kind == "chat" else isinstance(given, bool) or given != 0:
        raise ApiError(400, "logprobs are given for chosen tokens only; use 0 (in a chat, true).", param="logprobs")
    return True


def _max_prompt(served: ServerInfo, prefix: Context | None, *, kept: bool = False) -> int:
    """The most tokens of a prompt. If the context is kept, the last new token takes a slot too."""
    return served.longest_prompt if prefix is None else room_of(prefix, served.max_new_tokens) - 1 - kept


def check_size(text: str, served: ServerInfo, prefix: Context | None, param: str) -> None:
    """Refuses a text that cannot fit before it is tokenized, which keeps everybody waiting."""
    assert served.model.tokenizer is not None
    maximum = _max_prompt(served, prefix)
    # Spaces may be one token however many they are: such a text is short enough to be tokenized.
    if len(text) > max(maximum * served.model.tokenizer.longest_token, FAST_CHARACTERS):
        raise ApiError(
            400, f"the prompt has {len(text)} characters, and at most {maximum} tokens are accepted.", param=param,
            code="context_length_exceeded",
        )  # fmt: skip


def _check_length(
    prompt: list[int], documents: int, served: ServerInfo, prefix: Context | None, param: str, *, kept: bool = False
) -> None:
    maximum = _max_prompt(served, prefix, kept=kept)
    if len(prompt) + documents > maximum:
        raise ApiError(
            400, f"the prompt has {len(prompt) + documents} tokens, and at most {maximum} are accepted.",
            param="documents" if documents > maximum else param, code="context_length_exceeded",
        )  # fmt: skip
    if not prompt and prefix is None:
        raise ApiError(400, "the prompt has no token.", param=param)


def _prefix(body: JsonObject, served: ServerInfo) -> Context | None:
    name = _field(body, "prefix", str, None)
    if name is not None and name not in served.prefixes:
        raise ApiError(404, f"there is no prefix {name!r}; there are {', '.join(served.prefixes) or 'none'}.",
                       param="prefix")  # fmt: skip
    return None if name is None else served.prefixes[name]


def _stops(body: JsonObject, model: Model) -> tuple[list[str], list[int]]:
    """The texts and the token ids that end a request."""
    texts = body.get("stop", [])
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(x, str) and x for x in texts):
        raise ApiError(400, f"stop must be a non-empty string or a list of up to {MAX_STOPS}.", param="stop")
    if texts and model.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer; give stop_token_ids.", param="stop")
    ids = _field(body, "stop_token_ids", list, [])
    if not all(map(_is_id, ids)):
        raise ApiError(400, "stop_token_ids must be token ids.", param="stop_token_ids")
    return texts, [*ids, *(() if _field(body, "ignore_eos", bool, False) else model.eos_token_ids)]


def _sampler(body: JsonObject, model: Model) -> Sampler:
    """The sampling method: what is not said is as in generation_config.json, or else temperature 1."""
    usual: Sampler = model.generation.sampler if model.generation.content is not None else Sample()
    settings = dataclasses.asdict(usual)
    if isinstance(usual, Greedy):
        settings["temperature"] = 0
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = _number(body, name)
        # What switches a restriction off has another value in the API.
        off = {"top_p": 1, "top_k": -1, "min_p": 0}.get(name)
        settings |= {} if value is None else {name: None if value == off else value}
    try:
        if settings["temperature"] == 0:
            return Greedy(settings["repetition_penalty"])
        return Sample(**settings)
    except KvjaxError as error:
        raise ApiError(400, str(error)) from None


def _max_tokens(
    kind: str, body: JsonObject, served: ServerInfo, prefix: Context | None, *, kept: bool
) -> Callable[[list[int]], int]:
    """The number of new tokens of a request, by its prompt. If the context is kept, the last one takes a slot too."""
    names = ("max_completion_tokens", "max_tokens") if kind == "chat" else ("max_tokens",)
    maximum = served.max_new_tokens
    given = next((_whole(body, name, 0, 1, 1 << 31) for name in names if name in body), None)
    asked = given is not None
    if given is None:
        usual = COMPLETION_TOKENS if kind == "completion" else served.model.generation.max_new_tokens or maximum
        given = min(usual, maximum)

    def room(prompt: list[int]) -> int:
        fits = (maximum if prefix is None else room_of(prefix, maximum) - len(prompt)) - kept
        if kept and fits <= 0:
            raise ApiError(400, "the conversation has no room for these messages and an answer; begin another one.",
                           param="messages", code="context_length_exceeded")  # fmt: skip
        if kept and not asked:
            return min(given, fits)
        if given > fits:
            raise ApiError(
                400, f"{given} new tokens were requested, but at most {fits} fit.", param=names[-1],
                code="context_length_exceeded",
            )  # fmt: skip
        return given

    return room


def _field(body: JsonObject, name: str, kind: type, default: object) -> Json:
    """A field of one type."""
    value = body.get(name, default)
    if value is not default and not isinstance(value, kind):
        raise ApiError(400, f"{name} must be of type {kind.__name__}; got {type(value).__name__}.", param=name)
    return value


def _priority(body: JsonObject, served: ServerInfo) -> int:
    """The priority of `Request`, where higher is sooner; in a body, as in vLLM, lower is sooner."""
    given = _whole(body, "priority", 0, -MAX_PRIORITY, MAX_PRIORITY)
    if given and not served.by_priority:
        raise ApiError(
            400, f"this server takes requests in the order in which they come; got priority {given}. Start it with "
            "--scheduling-policy=priority.", param="priority",
        )  # fmt: skip
    return -given


def _whole(body: JsonObject, name: str, default: int, minimum: int, maximum: int) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or (name in body and not minimum <= value <= maximum):
        raise ApiError(400, f"{name} must be a whole number from {minimum} to {maximum}; got {value!r}.", param=name)
    return value


def _number(body: JsonObject, name: str) -> float | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ApiError(400, f"{name} must be a number; got {value!r}.", param=name)
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
