"""Text in and text out: prompts as texts or conversations, of any lengths, and what follows them as texts."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from kvjax.cache import shared_prefix
from kvjax.cache.spec import CacheSpec
from kvjax.checkpoint.chat import Message
from kvjax.checkpoint.encoding import EncodedBatch, Tokenizer, padded
from kvjax.errors import InputError, NonFiniteError, shown
from kvjax.generation.detokenize import text_after
from kvjax.generation.generate import Generation, generate
from kvjax.generation.sampling import Sampler
from kvjax.models.generation_config import FILE
from kvjax.models.model import Model, check_model
from kvjax.policies.base import Policy
from kvjax.summary import one_line

NEW_TOKENS = 256  # at most, if neither the caller nor the checkpoint says how many

Text = str | Sequence[Message]  # a text or a conversation


class TextGeneration(NamedTuple):
    """The result of `generate_text`.

    Attributes:
      texts: what was generated after each prompt, without special tokens.
      generation: the new tokens, their log-probabilities and the cache; see `kvjax.generate`.
      prompts: the tokens of the prompts.
    """

    texts: list[str]
    generation: Generation
    prompts: EncodedBatch

    def __repr__(self) -> str:
        return one_line(self)


def generate_text(
    model: Model,
    texts: Text | Sequence[Text],
    policy: Policy | CacheSpec,
    *,
    max_new_tokens: int | None = None,
    sampler: Sampler | None = None,
    stop: Sequence[int] | None = None,
    key: jax.Array | None = None,
    template: str | None = None,
    **options: Any,
) -> TextGeneration:
    """Generates text after texts or conversations of any lengths, with a cache that is limited by a policy.

    What is not given is as the checkpoint's generation_config.json says (`kvjax.models.generation_config`), and where
    that says nothing, as below. An argument always has precedence.

    Args:
      model: from `kvjax.load`, with a tokenizer.
      texts: a text, a conversation, or a sequence of these. A conversation is a sequence of messages such as
        ``{"role": "user", "content": "Hello"}``, of which the chat template of the tokenizer makes a text; the model's
        answer follows.
      policy: which slots the cache keeps, or a `CacheSpec`.
      max_new_tokens: the maximum number of new tokens per row; None for that of the checkpoint, or else 256.
      sampler: how a token is chosen from the logits; None for that of the checkpoint, or else greedy.
      stop: token ids that end a row; None for the model's (`Model.eos_token_ids`), () for none.
      key: [] random key for sampling; None for `jax.random.key(0)`.
      template: the name of the chat template, if there are several; None for the default one.
      options: further arguments of `kvjax.generate`, such as `storage` and `prefill_block`.

    Raises:
      InputError: if the model has no tokenizer, or no chat template for a conversation; if something is neither a text
        nor a conversation, or has no token; and see `kvjax.generate`.
      NonFiniteError: see `kvjax.generate`; ``error.result`` is the `TextGeneration`.
      KvjaxError: see `kvjax.generate`.
    """
    check_model(model)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError("the model has no tokenizer, which texts need; give token ids to `kvjax.generate`.")
    items = _items(texts)
    # A text that follows another one does not begin with BOS.
    bos = shared_prefix.PARAM not in model.params
    prompts = padded([_encoded(tokenizer, item, number, template, bos=bos) for number, item in enumerate(items)])
    defaults = model.generation
    if sampler is None and defaults.unsupported:
        named = ", ".join(defaults.unsupported)
        warnings.warn(f"{FILE} sets {named}, which kvjax does not support and ignores.", stacklevel=2)
    try:
        made = generate(
            model, prompts.tokens, policy, lengths=prompts.lengths,
            max_new_tokens=(defaults.max_new_tokens or NEW_TOKENS) if max_new_tokens is None else max_new_tokens,
            sampler=defaults.sampler if sampler is None else sampler, key=key,
            stop=model.eos_token_ids if stop is None else stop, **options,
        )  # fmt: skip
    except NonFiniteError as error:
        error.result = _as_text(tokenizer, items, prompts, error.result)
        raise
    return _as_text(tokenizer, items, prompts, made)


def _as_text(tokenizer: Tokenizer, items: Sequence[Text], prompts: EncodedBatch, made: Generation) -> TextGeneration:
    """Returns what was generated after texts and conversations as texts."""
    found = []
    for item, prompt, size, new, length in zip(items, *prompts, made.tokens, made.lengths, strict=True):
        # The answer to a conversation is a text of its own, which begins without the space between words.
        before = prompt[:size] if isinstance(item, str) else ()
        found.append(text_after(tokenizer, before, new[:length]))
    return TextGeneration(found, made, prompts)


def _items(texts: Text | Sequence[Text]) -> Sequence[Text]:
    """Returns the texts and conversations of an argument that may be one of them."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes) or not isinstance(texts, Sequence) or not texts:
        raise InputError(f"texts must be a string, a conversation or a sequence of these; got {texts!r}.")
    items: Any = [texts] if isinstance(texts[0], Mapping) else texts
    for number, each in enumerate(items):
        conversation = isinstance(each, list | tuple) and bool(each) and all(isinstance(one, Mapping) for one in each)
        if not (isinstance(each, str) or conversation):
            raise InputError(
                f"text {number} must be a string, or a conversation, a list of messages; got {shown(each)}."
            )
    found: Sequence[Text] = items
    return found


def _encoded(tokenizer: Tokenizer, item: Text, number: int, template: str | None, *, bos: bool) -> list[int]:
    """Returns the token ids of a text, with or without BOS, or of a conversation."""
    if isinstance(item, str):
        ids = tokenizer.encode(item, bos=bos)
    else:
        ids = tokenizer.encode(tokenizer.apply_chat_template(item, template=template), bos=False)
    if not ids:
        raise InputError(f"text {number} is empty, and this tokenizer does not add BOS; give at least one token.")
    return ids
