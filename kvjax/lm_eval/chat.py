"""Chat templates of Hugging Face tokenizers: Jinja templates that make one text of a conversation.

The globals and options of the environment are those that templates are written for (transformers' documentation,
"Chat templates"); none of them runs code.
"""

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvjax.checkpoint.readers import Json
from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.errors import InputError

Message = dict[str, str]
DEFAULT = "default"  # the name of the template that is used unless another is asked for
TEMPLATE_FILE, SETTINGS_FILES = "chat_template.jinja", ("special_tokens_map.json", "tokenizer_config.json")


def templates(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the templates of a tokenizer by name, the only one as `DEFAULT`; {} if it has none."""
    found: Any = _settings(tokenizer).get("chat_template")
    if TEMPLATE_FILE in tokenizer.files:
        found = tokenizer.files[TEMPLATE_FILE].decode("utf-8")
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}
    return {} if found is None else {DEFAULT: found}


def template(tokenizer: Tokenizer, name: str | None = None) -> str:
    """Returns a template.

    Args:
      tokenizer: of the model.
      name: of the template; None for the default one. A tokenizer's only template has any name.

    Raises:
      InputError: there is none of that name.
    """
    found = templates(tokenizer)
    if not found:
        raise InputError("the model's tokenizer has no chat template; leave out --apply_chat_template.")
    if len(found) == 1:
        return next(iter(found.values()))
    if (name or DEFAULT) not in found:
        raise InputError(f"there is no chat template {name or DEFAULT!r}; there are {', '.join(sorted(found))}.")
    return found[name or DEFAULT]


def render(tokenizer: Tokenizer, source: str, messages: Sequence[Message], *, answer: bool, **arguments: Any) -> str:
    """Makes one text of a conversation.

    Args:
      tokenizer: whose special tokens the template may name.
      source: the template.
      messages: "role" and "content" of each.
      answer: whether an answer of the model begins after the text; otherwise the text ends within the last message, so
        that the model goes on with it.
      arguments: further variables of the template.

    Raises:
      jinja2.exceptions.TemplateError: the template refuses the messages, such as a role that it does not know.
      InputError: the last message is to be continued, but the template changes it.
    """
    special = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in _settings(tokenizer).items()
        if key.endswith("_token") and value is not None
    }
    text = _environment().from_string(source).render(
        messages=list(messages), add_generation_prompt=answer, tools=None, documents=None, **special | arguments
    )  # fmt: skip
    if answer:
        return text
    last = messages[-1]["content"]
    for content in (last, last.strip()):
        if content in text:
            return text[: text.rindex(content) + len(content)]
    raise InputError("the chat template changes the last message, so that it cannot be continued.")


def _settings(tokenizer: Tokenizer) -> Json:
    settings: Json = {}
    for name in SETTINGS_FILES:
        settings |= json.loads(tokenizer.files.get(name, b"{}").decode("utf-8"))
    return settings


def _environment() -> jinja2.Environment:
    def refuse(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made
