"""Prompts of chats: the messages of a request, as the chat template of the model writes them."""

from kvjax.contexts.chats import next_turn
from kvjax.errors import KvjaxError
from kvjax.generation.context import Context
from kvjax.serve.api_errors import ApiError
from kvjax.serve.document_fields import ChatTokens, given_documents, with_documents
from kvjax.serve.prefix import text_of
from kvjax.serve.protocol import ServerInfo, check_size
from kvjax.typing import JsonObject


def chat_prompt(body: JsonObject, served: ServerInfo, before: Context | None) -> ChatTokens:
    """Returns the token ids of a chat's messages, after which the answer follows.

    The chat template writes them, which may take as long as `kvjax.checkpoint.sandbox` allows.

    Args:
      body: from `kvjax.serve.protocol.parse`.
      served: the model.
      before: the conversation that they are the next turn of; its cache is not read. None for a whole conversation.

    Raises:
      ApiError: messages that are not valid, or that the template refuses; or, after a conversation, answers.
    """
    messages, tokenizer = _messages(body), served.model.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the model has no tokenizer, which conversations need.", param="messages")
    if before is not None and any(message["role"] == "assistant" for message in messages):
        raise ApiError(
            400, "the server has what was said before in this conversation; send the new messages alone, without "
            "answers.", param="messages",
        )  # fmt: skip
    try:
        if before is not None:
            check_size("".join(message["content"] for message in messages), served, before, "messages")
            return ChatTokens(next_turn(served.model, text_of(before), messages))
        if given_documents(body) is not None:
            return with_documents(messages, tokenizer, lambda text: check_size(text, served, None, "messages"))
        text = tokenizer.apply_chat_template(messages)
        check_size(text, served, None, "messages")
        return ChatTokens(tokenizer.encode(text, bos=False))
    except KvjaxError as error:
        raise ApiError(400, str(error), param="messages") from None


def conversation_id(body: JsonObject) -> str | None:
    """Returns the id of the conversation that a body names: as itself, or as ``{"id": ...}``; None for none."""
    given = body.get("conversation")
    named = given["id"] if isinstance(given, dict) and given.keys() == {"id"} else given
    if not isinstance(named, str) and given is not None:
        raise ApiError(400, 'conversation must be an id or {"id": id}.', param="conversation")
    return named


def _messages(body: JsonObject) -> list[JsonObject]:
    """Returns the messages of a chat, whose contents are texts."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message.", param="messages")
    return [_message(each, number) for number, each in enumerate(messages)]


def _message(message: object, number: int) -> JsonObject:
    """A message whose content is one text."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must be an object with a role and a content.", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a string, or parts of type text.", param="messages")
    return message | {"content": content}
