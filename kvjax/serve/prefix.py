"""Contexts that requests continue and leave: text that is run, and by a policy compressed, once.

They are those of `kvjax.contexts`, in the arrays of a runner's rows. What continues one is fed as if the model had
generated it (`kvjax.contexts.extend` with ``block=1``): one token at a time, or in one block where that makes no
difference but for rounding.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax import contexts
from kvjax.cache.state import KVState
from kvjax.contexts import room
from kvjax.contexts.description import on_its_memory
from kvjax.contexts.folders import ContextCodec
from kvjax.contexts.prefix_store import rotated_by_length
from kvjax.contexts.turns import same_calibration, same_weights
from kvjax.errors import CheckpointError, InputError
from kvjax.generation.context import Context, Span, turn_of
from kvjax.generation.continuations import takes_blocks
from kvjax.inputs import check_batch, check_one_row
from kvjax.parallel import host_memory
from kvjax.serve.chunked_prefill import Prompt, Started
from kvjax.serve.prompts import Prompts
from kvjax.typing import PyTree

Array = jax.Array


def make(prompts: Prompts, tokens: ArrayLike) -> Context:
    """Runs a text.

    Args:
      prompts: model, spec and limits; `kvjax.serve.Runner.prompts` of the runner that will continue it.
      tokens: [n] int.

    Raises:
      InputError: the tokens are not valid for the model, or exceed the limits.
      PolicyError: the budget cannot work for their number.
    """
    model = prompts.model
    check_one_row("a prefix", tokens)
    # [n]
    ids = check_batch(model.config, tokens, None, new_tokens=1).tokens[0]
    prompt = prompts.prompt(ids, prompts.limits.new_tokens)
    bucket = prompts.bucket(prompt)
    with model.on_mesh():
        if bucket is not None:
            started = prompts.run([prompt], bucket)
        else:
            blocks = prompts.begin(prompt)
            while (ended := blocks.advance()) is None:
                pass
            started = ended
        logits, state = _rows(tuple(started), np.zeros(1, np.int32))
    return _after_prompt(prompts, prompt, logits, state)


def load(folder: str | Path, prompts: Prompts, *, codec: ContextCodec | None = None) -> Context:
    """Loads a context that `kvjax.contexts.save` has saved.

    Args:
      folder: the folder.
      prompts: see `make`; of the same model, spec and limits.
      codec: the one that it was saved with; None = none.

    Raises:
      CheckpointError: see `kvjax.contexts.load`; or the context was made with other limits.
    """
    context = contexts.load(folder, prompts.model, prompts.spec, codec=codec, implementation=prompts.implementation)
    if reason := _other_rows(context, prompts):
        raise CheckpointError(f"{folder} was saved with another cache: {reason}.")
    return context


def text_of(context: Context) -> np.ndarray:
    """Returns the tokens of a context of one row, [n] int32; none if they are not known."""
    return context.text[0] if context.text else np.zeros(0, np.int32)


def length_of(context: Context) -> int:
    """Returns the number of tokens of a context of one row; 0 if they are not known."""
    return len(text_of(context))


def room_of(context: Context, new_tokens: int) -> int:
    """Returns the number of tokens that may follow, given or generated, at most `new_tokens`.

    A cache that evicts in each step has room for any number. Of other ones, arrays have room for `new_tokens` after the
    longest prompt.

    Args:
      context: from `make` or `load`, or one that was extended.
      new_tokens: the most new tokens of a prompt.
    """
    assert context.resolved is not None
    after_prompt = new_tokens - (length_of(context) - int(context.resolved[0, 0]))
    assert context.made is not None
    # To count the slots that a compressor has left would wait for what the device runs.
    if (
        after_prompt >= new_tokens
        or turn_of(context.layout) == "append"
        or rotated_by_length(context.made.model) is not None
    ):
        return after_prompt
    spare = room.spare(context)
    # The last token is not fed.
    return new_tokens if spare is None else min(new_tokens, max(after_prompt, spare + 1))


def check(context: Context, prompts: Prompts, following: int) -> None:
    """Checks that a runner can continue a context.

    Args:
      context: the context.
      prompts: of the runner.
      following: the number of tokens that follow, given and generated.

    Raises:
      InputError: it has several rows, is of another model or another spec, or there is no room.
    """
    if context.made is None or context.text is None or context.resolved is None or context.num_rows != 1:
        raise InputError("a prefix must be a context of one row whose tokens and cache are known, as Runner.prefix's.")
    if not same_weights(context.made.model, prompts.model):
        raise InputError("the prefix belongs to another model; make or load it with this runner.")
    if not same_calibration(context.made.model, prompts.model):
        raise InputError(
            "the prefix was made with another calibration (parameters of the policy, codes of the storage, directions "
            "of the selection); make or load it with this runner."
        )
    if reason := _other_rows(context, prompts):
        raise InputError(f"the prefix cannot be continued: {reason}.")
    limits = prompts.limits
    if following > (fits := room_of(context, limits.new_tokens)):
        raise InputError(
            f"{following} tokens were requested after a prefix that has room for {fits}; make the prefix and the "
            "runner with larger limits.new_tokens."
        )


def at_once(context: Context) -> bool:
    """Returns whether the tokens that continue a context are fed in one block."""
    return takes_blocks(context.layout.decode)


def started(context: Context, tokens: np.ndarray) -> Started:
    """Returns the state that a request starts from.

    Args:
      context: what it continues; its arrays may be in host memory.
      tokens: [n] int32, those of the request; fed here if they are fed in one block.
    """
    state = on_its_memory(context.state, context.layout)
    context = context._replace(state=state, logits=host_memory.to_device(context.logits))
    if at_once(context) and len(tokens):
        assert context.made is not None
        context = contexts.extend(context.made.model, context, tokens, block=1)
    return Started(context.logits, context.state)


def after_request(
    prompts: Prompts, before: Context | Prompt, given: np.ndarray, new: np.ndarray, state: KVState
) -> Context:
    """Returns the context after a request's new tokens, the last of which its row has not been fed.

    Args:
      prompts: of the runner.
      before: what the request continues, or its prompt.
      given: [n] int32, the tokens that it gives after a context.
      new: [m] int32, its new tokens, at least one.
      state: its row when it ended; donated.
    """
    # Logits are those after the last token, which is fed here.
    logits = jnp.zeros((1, prompts.model.config.vocab_size), jnp.float32)
    if isinstance(before, Prompt):
        context = _after_prompt(prompts, before, logits, state)
    else:
        context = before._replace(state=state, logits=logits)
    context = context.with_text([np.concatenate([text_of(context), given, new[:-1]])], block=1)
    return contexts.extend(prompts.model, context, new[None, -1:], block=1, donate=True)


def _after_prompt(prompts: Prompts, prompt: Prompt, logits: Array, state: KVState) -> Context:
    tokens = prompt.tokens
    spans = prompt.spans
    if spans is None:
        block = prompts.block if prompts.bucket(prompt) is None else len(tokens)
        assert block is not None
        spans = (Span(len(tokens), block),)
    return Context(
        logits, state, prompts.layout, tokens[None], 1, (spans,), prompts.made,
        np.array([[len(tokens), prompt.total]], np.int32),
    )  # fmt: skip


def _other_rows(context: Context, prompts: Prompts) -> str | None:
    """Returns why a context does not fit the rows of a runner, or None if it does."""
    if context.layout.decode == prompts.layout.decode:
        return None
    sizes, limits = None if context.made is None else context.made.sizes, prompts.limits
    own = (
        ""
        if sizes is None
        else f" with prompts of up to {sizes.budget_prompt} tokens and {sizes.following + 1} new ones"
    )
    return (
        f"it was made under {context.layout.name}{own}, and the runner has {prompts.layout.name} with prompts of up to "
        f"{limits.prompt} tokens and {limits.new_tokens} new ones"
    )


@jax.jit
def _rows(tree: PyTree, rows: Array) -> PyTree:
    """Copies rows [R] int32 of every array of a tree."""
    return jax.tree.map(lambda leaf: host_memory.take_rows(leaf, rows), tree)
