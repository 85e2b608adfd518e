"""The fields of a body that say what documents come before its prompt, and where in a chat they are."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvjax.checkpoint.encoding import Tokenizer
from kvjax.errors import KvjaxError
from kvjax.serve.api_errors import ApiError
from kvjax.serve.documents import RATIO
from kvjax.typing import JsonObject

SHARES = {"recompute_ratio": RATIO, "recompute_by_question": 0.0}  # fields that are shares, and their defaults
FIELDS = frozenset({"documents", *SHARES})
MAX_DOCUMENTS = 256


class ChatTokens(NamedTuple):
    """The prompt of a chat.

    Attributes:
      tokens: token ids of the prompt; of a chat with documents, those that follow the last one.
      beginning: those before the first document; none without documents.
    """

    tokens: list[int]
    beginning: Sequence[int] = ()


class GivenDocuments(NamedTuple):
    """The documents of a body.

    Attributes:
      texts: of each, a text or token ids.
      ratio: see `kvjax.serve.Documents`.
      by_question: likewise.
    """

    texts: list[str | list[int]]
    ratio: float
    by_question: float


def given_documents(body: JsonObject) -> GivenDocuments | None:
    """Returns the documents of a body; None if it has none.

    Args:
      body: from `kvjax.serve.protocol.parse`.

    Raises:
      ApiError: they are not valid.
    """
    documents = body.get("documents")
    shares = {name: body[name] for name in SHARES if body.get(name) is not None}
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ApiError(400, f"{name} must be a number from 0 to 1; got {share!r}.", param=name)
    if documents is None or documents == []:
        for name in shares:
            raise ApiError(400, f"{name} needs documents, and there are none.", param=name)
        return None
    if not isinstance(documents, list) or len(documents) > MAX_DOCUMENTS:
        raise ApiError(400, f"documents must be a list of at most {MAX_DOCUMENTS}.", param="documents")
    texts = [_document(each, number) for number, each in enumerate(documents)]
    shares = SHARES | shares
    return GivenDocuments(
        texts, ratio=float(shares["recompute_ratio"]), by_question=float(shares["recompute_by_question"])
    )


def _document(given: Any, number: int) -> str | list[int]:
    """Returns a document that is a text, token ids, or an object with a text."""
    if isinstance(given, dict) and given.keys() == {"text"}:
        given = given["text"]
    is_ids = isinstance(given, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in given)
    if not given or not (isinstance(given, str) or is_ids):
        raise ApiError(
            400, f'documents[{number}] must be a text, token ids, or {{"text": ...}}, and not empty.', param="documents"
        )
    found: str | list[int] = given
    return found


def document_tokens(documents: GivenDocuments, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns the token ids of each document, which is encoded by itself.

    Args:
      documents: from `given_documents`.
      tokenizer: that of the model; None if it has none.

    Raises:
      ApiError: a text cannot be encoded.
    """
    made = []
    for number, each in enumerate(documents.texts):
        if isinstance(each, str):
            if tokenizer is None:
                raise ApiError(400, "the model has no tokenizer; give token ids.", param="documents")
            try:
                each = tokenizer.encode(each, bos=False)
            except KvjaxError as error:
                raise ApiError(400, f"documents[{number}]: {error}", param="documents") from None
            if not each:
                raise ApiError(400, f"documents[{number}] has no token.", param="documents")
        made.append(each)
    return made


def with_documents(messages: list[JsonObject], tokenizer: Tokenizer, check: Callable[[str], None]) -> ChatTokens:
    """Returns a chat whose first message of a user begins with documents.

    The chat template writes the messages with a mark where the documents are.

    Args:
      messages: of the chat, whose contents are texts.
      tokenizer: has the template.
      check: refuses a text that is too long to be tokenized.

    Raises:
      ApiError: no message is of a user, or the template does not write its beginning as it is.
      KvjaxError: the template refuses the messages.
    """
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ApiError(400, "documents come before the first message of a user, and there is none.", param="documents")
    mark = secrets.token_hex(16)
    marked = messages[first] | {"content": mark + messages[first]["content"]}
    text = tokenizer.apply_chat_template([*messages[:first], marked, *messages[first + 1 :]])
    check(text)
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise ApiError(
            400, "the chat template of this model does not write the message of a user once and as it is, so that "
            "documents have no place; use /v1/completions.", param="documents",
        )  # fmt: skip
    return ChatTokens(tokenizer.encode(after, bos=False), tokenizer.encode(before, bos=False))
