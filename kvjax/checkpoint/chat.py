"""Chat templates of Hugging Face tokenizers: Jinja templates that make one text of a conversation.

Templates come with checkpoints and are not trusted: they see plain data, and `kvjax.checkpoint.sandbox` renders them in
a process of its own. The files and their precedence are those of transformers 5.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from kvjax.checkpoint import sandbox
from kvjax.checkpoint.sandbox import ChatTemplateError
from kvjax.checkpoint.special_tokens import read_settings
from kvjax.errors import InputError, shown
from kvjax.typing import Json, JsonObject

if TYPE_CHECKING:
    from kvjax.checkpoint.tokenizer import Tokenizer

Message = Mapping[str, Json]
DEFAULT, TOOL_USE = "default", "tool_use"  # the templates that are used unless another is asked for
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER, SUFFIX = "additional_chat_templates", ".jinja"  # of further templates, named by their files
MARK_DIGITS = 24
MAX_REASON = 200  # characters of what JSON says is wrong


def templates(tokenizer: "Tokenizer") -> dict[str, str]:
    """Returns the templates of a tokenizer by name, the usual one as `DEFAULT`; {} if it has none.

    Raises:
      InputError: what the files hold is no template.
    """
    files = {name: content for name, content in tokenizer.files.items() if name.endswith(SUFFIX)}
    if not files:
        return _listed(read_settings(tokenizer.files).get("chat_template"))
    found = {}
    for name in sorted(files, key=lambda name: name != TEMPLATE_FILE):
        try:
            found[DEFAULT if name == TEMPLATE_FILE else PurePosixPath(name).stem] = files[name].decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not valid UTF-8: {error}.") from None
    return found


def _listed(found: object) -> dict[str, str]:
    """Returns the templates that tokenizer_config.json holds: one, a list of named ones, or an object of them."""
    if isinstance(found, list) and all(
        isinstance(each, dict) and {"name", "template"} <= each.keys() for each in found
    ):
        found = {each["name"]: each["template"] for each in found}
    found = {} if found is None else {DEFAULT: found} if isinstance(found, str) else found
    if not isinstance(found, dict) or not all(isinstance(x, str) for each in found.items() for x in each):
        raise InputError(
            "chat_template in tokenizer_config.json must be a template, or a list of objects with a name and a "
            f"template; got {shown(found)}."
        )
    return found


def template(tokenizer: "Tokenizer", name: str | None = None, *, tools: bool = False) -> str:
    """Returns a template.

    Args:
      tokenizer: of the model.
      name: of the template; None for the default one.
      tools: whether tools are given to it, for which some models have a template of their own (`TOOL_USE`), which is
        then the default.

    Raises:
      InputError: there is none of that name.
    """
    found = templates(tokenizer)
    if not found:
        raise InputError(
            "the model's tokenizer has no chat template, which conversations need; give texts, or a model that was "
            "trained for conversations."
        )
    wanted = (TOOL_USE if tools and TOOL_USE in found else DEFAULT) if name is None else name
    if wanted not in found:
        asked = "default chat template" if name is None else f"chat template {name!r}"
        raise InputError(f"there is no {asked}; there are {', '.join(sorted(found))}.")
    return found[wanted]


def render(tokenizer: "Tokenizer", source: str, messages: Sequence[Message], *, answer: bool, **arguments: Any) -> str:
    """Makes one text of a conversation; see `Tokenizer.apply_chat_template`.

    Args:
      tokenizer: whose special tokens the template may name.
      source: the template.
      messages: the conversation.
      answer: whether an answer of the model begins after the text; otherwise the text ends within the last message, so
        that the model goes on with it.
      arguments: further variables of the template, which JSON can hold.

    Raises:
      ChatTemplateError: the template refuses the messages, is not valid, or exceeds a limit on time, memory or output.
      InputError: messages of another form; or the last one is to be continued, but the template changes it.
      ConfigError: Jinja is not installed.
    """
    talk = _checked(messages)
    given = {"tools": None, "documents": None} | dict(tokenizer.special_tokens) | arguments

    def rendered(talk: list[JsonObject]) -> str:
        return sandbox.SHARED.render(source, {**given, "messages": talk, "add_generation_prompt": answer})

    return rendered(talk) if answer else _within_last(rendered, talk, source)


def _within_last(rendered: Callable[[list[JsonObject]], str], talk: list[JsonObject], source: str) -> str:
    """Renders a conversation up to the end of the last message's content.

    The content can be any text, and can occur in what the template writes after it. It is found by a mark, which occurs
    nowhere else, at its end. What follows the mark is what the template writes after the content; the text is what the
    conversation without the mark makes, less that. So whitespace is absent that a template removes from contents.
    """
    mark = _mark(source, talk)
    content, last = _extended(talk[-1], mark)
    before, found, after = rendered([*talk[:-1], last]).rpartition(mark)
    if not found or not before.rstrip().endswith(content.strip()):
        raise InputError("the chat template changes the last message, so that it cannot be continued.")
    plain, before = rendered(talk), before.replace(mark, "")  # also where the template wrote the content before
    text = plain[: len(plain) - len(after)]
    # Otherwise the template writes something else for a content such as this one, for example nothing if it is empty.
    same = plain.endswith(after) and "".join(text.split()) == "".join(before.split())
    return text if same else before


def _mark(source: str, talk: list[JsonObject]) -> str:
    """Returns digits, which no filter for upper case changes, that occur neither in a template nor in messages."""
    text = source + json.dumps(talk)
    while (mark := str(secrets.randbelow(9 * 10 ** (MARK_DIGITS - 1)) + 10 ** (MARK_DIGITS - 1))) in text:
        pass
    return mark


def _extended(message: JsonObject, mark: str) -> tuple[str, JsonObject]:
    """Appends a mark to the content of a message, to the last text if the content has several parts.

    Returns:
      The text before the mark, and the message with the mark.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content, message | {"content": content + mark}
    content = content if isinstance(content, list) else []
    for number, part in reversed(list(enumerate(content))):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            parts = [*content[:number], part | {"text": text + mark}, *content[number + 1 :]]
            return text, message | {"content": parts}
    raise InputError("the last message has no text that could be continued.")


def _checked(messages: Sequence[Message]) -> list[JsonObject]:
    """Returns messages as plain data, without the fields that are None, which templates expect to be absent."""
    valid = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not valid or not all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in messages):
        raise InputError(
            "a conversation must be messages of the form {'role': 'user', 'content': 'Hello'}, at least one; got "
            f"{shown(messages)}."
        )
    try:
        talk: list[JsonObject] = json.loads(json.dumps([dict(each) for each in messages]))
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)[:MAX_REASON]
        raise InputError(f"the messages of a conversation must be JSON values: {reason}.") from None
    return [{name: value for name, value in each.items() if value is not None} for each in talk]


__all__ = ["ChatTemplateError", "Message", "render", "template", "templates"]
