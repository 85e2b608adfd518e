"""Conversations: each message is a turn of one context."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.arguments import check_type, plain_signature
from kvjax.cache.spec import CacheSpec
from kvjax.checkpoint.chat import Message
from kvjax.checkpoint.encoding import Tokenizer
from kvjax.contexts.answers import decode
from kvjax.contexts.prompts import prefill
from kvjax.contexts.turns import extend
from kvjax.errors import InputError, shown
from kvjax.generation.context import Context
from kvjax.generation.detokenize import text_after
from kvjax.generation.generate import Generation
from kvjax.generation.sampling import Sampler
from kvjax.generation.text import NEW_TOKENS
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.summary import one_line

# A conversation to which a turn is added, to see how the template writes it.
BEFORE: tuple[Message, ...] = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
)


class Reply(NamedTuple):
    """The result of `chat`.

    Attributes:
      text: the answer, without special tokens.
      context: the conversation so far, which the next `chat` continues.
      generation: the new tokens and their log-probabilities; see `kvjax.generate`.
    """

    text: str
    context: Context
    generation: Generation

    def __repr__(self) -> str:
        return one_line(self)


@plain_signature
def chat(
    start: Context | Model,
    message: str | Message | Sequence[Message],
    policy: Policy | CacheSpec | None = None,
    *,
    max_new_tokens: int | None = None,
    sampler: Sampler | None = None,
    stop: Sequence[int] | None = None,
    key: jax.Array | None = None,
    template: str | None = None,
    block: int | None = None,
    **options: Any,
) -> Reply:
    """Answers a message, in a conversation that begins or goes on.

    The first message is a prompt, and each further one a turn of the context (`kvjax.contexts.extend`), written as the
    chat template of the tokenizer writes it after an answer. Nothing that was said before goes through the model again.

    Args:
      start: the model, to begin a conversation; or `Reply.context`, to continue one.
      message: what the user says; or messages such as ``{"role": "system", "content": "Answer briefly."}``.
      policy: which slots the cache keeps, or a `CacheSpec`; of a conversation that begins.
      max_new_tokens: the maximum number of new tokens; None for that of the checkpoint, or else 256.
      sampler: how a token is chosen from the logits; None for that of the checkpoint, or else greedy.
      stop: token ids that end the answer; None for the model's (`Model.eos_token_ids`).
      key: [] random key for sampling; None for `jax.random.key(0)`.
      template: the name of the chat template, if there are several; None for the default one.
      block: tokens of a block of a further turn; see `kvjax.contexts.extend`.
      options: of a conversation that begins, further arguments of `kvjax.contexts.prefill`, such as `storage`.

    Raises:
      InputError: the model has no tokenizer or no chat template, the message is none, the context has not one row, or
        a policy or options are given for a context, or no policy for a model.
      NonFiniteError: see `kvjax.generate`.
      KvjaxError: see `kvjax.contexts.prefill`.
    """
    check_type("start", start, (Model, Context), "a model, to begin a conversation, or Reply.context, to continue one")
    messages = _messages(message)
    if isinstance(start, Model):
        if policy is None:
            raise InputError("a conversation begins with a policy, as in kvjax.chat(model, 'Hello', policies.full()).")
        rendered = _tokenizer(start).apply_chat_template(messages, template=template)
        context = prefill(start, _tokenizer(start).encode(rendered, bos=False), policy, **options)
    else:
        context = _continued(start, messages, policy, options, template, block)
    assert context.made is not None
    model = context.made.model
    defaults = model.generation
    made = decode(
        model, context, donate=True, key=key, sampler=(sampler or defaults.sampler),
        max_new_tokens=(defaults.max_new_tokens or NEW_TOKENS) if max_new_tokens is None else max_new_tokens,
        stop=model.eos_token_ids if stop is None else stop,
    )  # fmt: skip
    assert made.context is not None
    text = text_after(_tokenizer(model), (), made.tokens[0, : made.lengths[0]])
    return Reply(text, made.context, made)


def _continued(
    context: Context,
    messages: Sequence[Message],
    policy: Policy | CacheSpec | None,
    options: Mapping[str, Any],
    template: str | None,
    block: int | None,
) -> Context:
    """Returns a context after a further turn."""
    if policy is not None or options:
        given = ", ".join(filter(None, ["a policy" if policy is not None else "", *options]))
        raise InputError(f"a conversation keeps the cache that it began with; leave out {given}.")
    if context.made is None or context.text is None or context.num_rows != 1:
        raise InputError("a conversation is a context of one row whose model is known, such as Reply.context.")
    turn = next_turn(context.made.model, context.text[0], messages, template=template)
    return extend(context.made.model, context, np.array(turn, np.int32)[None], block=block)


def next_turn(model: Model, text: np.ndarray, messages: Sequence[Message], *, template: str | None = None) -> list[int]:
    """Returns the tokens between an answer and the next one: the end of the answer, and messages.

    Args:
      model: a model with a chat template.
      text: [n] int32, the tokens of a conversation that ends with an answer.
      messages: what follows.
      template: see `chat`.

    Raises:
      InputError: there is no chat template, or it does not write a conversation turn by turn.
    """
    turn = _turn(_tokenizer(model), messages, template)
    # An answer that ended by itself has the token that the template writes after it.
    newest = text[-1:].tolist()
    return turn[1:] if turn[:1] == newest and newest[0] in model.eos_token_ids else turn


def _turn(tokenizer: Tokenizer, messages: Sequence[Message], template: str | None) -> list[int]:
    """Returns what the template writes between an answer and the next one."""
    before = tokenizer.apply_chat_template(BEFORE, answer=False, template=template)
    whole = tokenizer.apply_chat_template([*BEFORE, *messages], template=template)
    if not whole.startswith(before):
        raise InputError(
            "the chat template does not write a conversation turn by turn: what it writes of an answer changes when a "
            "message follows; use kvjax.generate_text with the whole conversation."
        )
    one, two = (tokenizer.encode(text, bos=False) for text in (before, whole))
    return two[len(one) :] if two[: len(one)] == one else tokenizer.encode(whole[len(before) :], bos=False)


def _messages(message: str | Message | Sequence[Message]) -> Sequence[Message]:
    """Returns messages from an argument that may be a text or one message."""
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    if isinstance(message, Mapping):
        return [message]
    whole = isinstance(message, list | tuple) and bool(message) and all(isinstance(each, Mapping) for each in message)
    if not whole:
        raise InputError(
            "message must be a text, a message such as {'role': 'user', 'content': 'Hello'}, or a list of messages; "
            f"got {shown(message)}."
        )
    return message


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise InputError("the model has no tokenizer, which conversations need; use kvjax.contexts with token ids.")
    return model.tokenizer
