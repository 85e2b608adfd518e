"""Chat templates of Hugging Face tokenizers: Jinja templates that make one text of a conversation.

The globals and options of the environment are those that templates are written for (transformers' documentation,
"Chat templates"). Templates come with checkpoints and are not trusted: they run in Jinja's sandbox and see plain data.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvjax.checkpoint.readers import Json
from kvjax.errors import ConfigError, InputError

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

    from kvjax.checkpoint.tokenizer import Tokenizer

Message = Mapping[str, Any]
DEFAULT = "default"  # the name of the template that is used unless another is asked for
TEMPLATE_FILE, SETTINGS_FILES = "chat_template.jinja", ("special_tokens_map.json", "tokenizer_config.json")
JINJA = (3, 1, 6)  # older releases have known ways out of the sandbox


class ChatTemplateError(InputError):
    """A conversation that a chat template refuses, such as one with a role that the template does not know."""


def templates(tokenizer: "Tokenizer") -> dict[str, str]:
    """Returns the templates of a tokenizer by name, the only one as `DEFAULT`; {} if it has none."""
    found: Any = _settings(tokenizer).get("chat_template")
    if TEMPLATE_FILE in tokenizer.files:
        found = tokenizer.files[TEMPLATE_FILE].decode("utf-8")
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}
    return {} if found is None else {DEFAULT: found}


def template(tokenizer: "Tokenizer", name: str | None = None) -> str:
    """Returns a template.

    Args:
      tokenizer: of the model.
      name: of the template; None for the default one. A tokenizer's only template has any name.

    Raises:
      InputError: there is none of that name.
    """
    found = templates(tokenizer)
    if not found:
        raise InputError(
            "the model's tokenizer has no chat template, which conversations need; give texts, or a model that was "
            "trained for conversations."
        )
    if len(found) == 1:
        return next(iter(found.values()))
    if (name or DEFAULT) not in found:
        raise InputError(f"there is no chat template {name or DEFAULT!r}; there are {', '.join(sorted(found))}.")
    return found[name or DEFAULT]


def render(tokenizer: "Tokenizer", source: str, messages: Sequence[Message], *, answer: bool, **arguments: Any) -> str:
    """Makes one text of a conversation; see `Tokenizer.apply_chat_template`.

    Args:
      tokenizer: whose special tokens the template may name.
      source: the template.
      messages: the conversation.
      answer: whether an answer of the model begins after the text; otherwise the text ends within the last message, so
        that the model goes on with it.
      arguments: further variables of the template.

    Raises:
      ChatTemplateError: the template refuses the messages, or is not valid.
      InputError: messages of another form; or the last one is to be continued, but the template changes it.
      ConfigError: Jinja is not installed.
    """
    talk = _checked(messages)
    special = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in _settings(tokenizer).items()
        if key.endswith("_token") and value is not None
    }
    environment = _environment()
    from jinja2.exceptions import TemplateError

    given = {"tools": None, "documents": None} | special | arguments
    try:
        text = environment.from_string(source).render(messages=talk, add_generation_prompt=answer, **given)
    except (TemplateError, TypeError) as error:  # a TypeError if the content of a message is of another kind
        raise ChatTemplateError(f"the chat template refuses the conversation: {error}.") from None
    if answer:
        return text
    last = talk[-1]["content"]
    for content in (last, last.strip()) if isinstance(last, str) else ():
        if content in text:
            return text[: text.rindex(content) + len(content)]
    raise InputError("the chat template changes the last message, so that it cannot be continued.")


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages as plain data, which has no methods of its own that a template could call."""
    valid = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not valid or not all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in messages):
        raise InputError(
            "a conversation must be messages of the form {'role': 'user', 'content': 'Hello'}, at least one; got "
            f"{messages!r}."
        )
    try:
        talk: list[dict[str, Any]] = json.loads(json.dumps([dict(each) for each in messages]))
    except (TypeError, ValueError) as error:
        raise InputError(f"the messages of a conversation must be what JSON can hold: {error}.") from None
    return talk


def _settings(tokenizer: "Tokenizer") -> Json:
    settings: Json = {}
    for name in SETTINGS_FILES:
        settings |= json.loads(tokenizer.files.get(name, b"{}").decode("utf-8"))
    return settings


@functools.cache
def _environment() -> "jinja2.Environment":
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError:
        raise ConfigError("chat templates need Jinja: pip install 'kvjax[chat]'.") from None
    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < JINJA:
        least = ".".join(map(str, JINJA))
        raise ConfigError(
            f"chat templates need Jinja {least} or newer, not {jinja2.__version__}: pip install -U jinja2."
        )

    def refuse(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False} | options)

    class Generation(jinja2.ext.Extension):
        """The block ``generation``, which marks what a model wrote, for training; here it is its contents."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's type

        def parse(self, parser: "jinja2.parser.Parser") -> "list[jinja2.nodes.Node]":
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made
