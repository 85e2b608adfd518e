"""Trains gates that say which KV heads need every token (DuoAttention, arXiv:2410.10819)."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.scan import ANALYSIS
from kvjax.arguments import count_argument, number_argument
from kvjax.cache import shared_prefix
from kvjax.cache.planning.layout import Group
from kvjax.cache.state import Block
from kvjax.errors import InputError
from kvjax.inputs import check_batch
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import GATES, run_layer
from kvjax.models.gates import Gates
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.policies.window import full
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array
WARM = 0.2  # the part of all steps in which the rate rises, and in which it falls at the end
SLOW = 0.1  # the first and the last rate, relative to the largest


class Passkeys(NamedTuple):
    """The result of `passkeys`.

    Attributes:
      tokens: [B, T] int32.
      answers: [B, T] bool, the tokens that a passkey earlier in the row determines.
    """

    tokens: np.ndarray
    answers: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


class HeadGates(NamedTuple):
    """The result of `head_gates`.

    Attributes:
      gates: [L, K] float32 in [0, 1]; larger for heads that need every token.
      losses: [steps] float32, the loss before each step.
    """

    gates: np.ndarray
    losses: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)

    def heads(self, share: float) -> np.ndarray:
        """Returns the heads of the largest gates, [L, K] bool: a table for `kvjax.policies.duo_attention`.

        Args:
          share: the part of all KV heads to choose, rounded up; of equal gates, those of lower layers and heads.

        Raises:
          InputError: a share outside [0, 1].
        """
        share = number_argument("share", share, minimum=0.0, maximum=1.0, error=InputError)
        chosen = np.zeros(self.gates.size, bool)
        chosen[np.argsort(-self.gates, axis=None, kind="stable")[: int(np.ceil(share * self.gates.size - 1e-9))]] = True
        return chosen.reshape(self.gates.shape)


def passkeys(
    text: ArrayLike,
    *,
    rows: int = 16,
    width: int | None = None,
    keys: int = 10,
    length: int = 32,
    cue: int = 4,
    draw_from: ArrayLike | None = None,
    seed: int = 0,
) -> Passkeys:
    """Inserts random passkeys into a text and repeats them at its end (DuoAttention).

    A row is a part of the text with `keys` passkeys at random places, and then all passkeys once more, in another
    order. The first `cue` tokens of a repeated passkey say which one it is; the others are its answer.

    Args:
      text: [N] int, the tokens of a long text.
      rows: B, the number of rows.
      width: T, the number of tokens of a row; None = the whole text and all passkeys twice.
      keys: the number of passkeys of a row; 10 in the paper.
      length: the number of tokens of a passkey; the paper's have 32 words.
      cue: the number of first tokens of a repeated passkey that are not answers.
      draw_from: [M] token ids that passkeys are drawn from; None = those of the text.
      seed: the random seed of the parts of the text, the passkeys and their places.

    Raises:
      InputError: a text that is too short, no tokens to draw from, or a number that is not valid.
    """
    filler = np.asarray(text)
    ids = np.unique(filler if draw_from is None else np.asarray(draw_from))
    for name, array in (("text", filler), ("draw_from", ids)):
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
            raise InputError(f"{name} must be a sequence of token ids; got an array of shape {np.shape(array)}.")
    rows, keys = (count_argument(*each, minimum=1, error=InputError) for each in (("rows", rows), ("keys", keys)))
    length = count_argument("length", length, minimum=2, error=InputError)
    cue = count_argument("cue", cue, minimum=1, maximum=length - 1, error=InputError)
    asked = 2 * keys * length
    width = filler.size + asked if width is None else count_argument("width", width, error=InputError)
    if not asked < width <= filler.size + asked:
        raise InputError(
            f"width={width} is not valid: a row has {asked} tokens of passkeys, and the text has {filler.size}; give "
            f"from {asked + 1} to {filler.size + asked}."
        )
    rng = np.random.default_rng(seed)
    tokens, answers = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    for row in range(rows):
        start = rng.integers(0, filler.size - (width - asked) + 1)
        part = filler[start : start + width - asked]
        hidden = rng.choice(ids, (keys, length))
        # A passkey stands before the token of each place; several may stand before the same one.
        places = np.sort(rng.integers(0, part.size + 1, keys))
        context = np.insert(part, np.repeat(places, length), hidden.ravel())
        tokens[row] = np.concatenate([context, hidden[rng.permutation(keys)].ravel()])
        answers[row, context.size :] = np.tile(np.arange(length) >= cue, keys)
    return Passkeys(tokens, answers)


def head_gates(
    model: Model,
    tokens: ArrayLike,
    answers: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    sinks: int = 64,
    recent: int = 256,
    penalty: float = 0.05,
    steps: int = 400,
    learning_rate: float = 0.02,
    rows: int = 1,
) -> HeadGates:
    """Trains a gate for each KV head, which blends attention over all tokens with that over a window (DuoAttention).

    The loss is the mean squared difference between the last hidden states of the gated and the full model, over the
    answers and the features, plus `penalty` times the mean gate (arXiv:2410.10819; taking means is kvjax's choice). A
    gate therefore stays near 1 only if a window would change the answers. The model is not trained.

    Gates begin at 1 and are kept in [0, 1]. They are trained by Adam (optax), whose rate rises in the first fifth of
    the steps and falls in the last. The paper has 2,000 steps.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] int, rows padded at the end, with answers that depend on distant tokens; see `passkeys`.
      answers: [B, T] bool, the tokens that are answers. The loss compares the hidden states that predict them, those of
        the tokens before.
      lengths: [B] real tokens of each row; None = all T.
      sinks: the number of first positions that a streaming head sees; see `kvjax.policies.duo_attention`.
      recent: the number of positions before the query's own that a streaming head sees too.
      penalty: the weight of the mean gate.
      steps: the number of steps.
      learning_rate: the largest learning rate of Adam.
      rows: the rows of the batch of each step; steps go through all rows in turn.

    Returns:
      The gates and the losses. ``duo_attention(head_gates(...).heads(0.5), sinks=64, recent=256)`` is the policy under
      which half of the heads keep every token.

    Raises:
      InputError: tokens or lengths that do not fit the model, answers of another shape or none in a row, or a number
        that is not valid.
      ConfigError: a model that is spread over several processes.
    """
    import optax

    distributed.check_alone(model.params, ANALYSIS)
    shared_prefix.refuse(model.params, ANALYSIS)
    config = model.config
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    # [B, T] bool, the tokens whose hidden states are compared
    compared = _before_answers(answers, batch.tokens.shape, batch.lengths)
    sinks, recent, steps, rows = (
        count_argument(name, value, minimum=minimum, error=InputError)
        for name, value, minimum in (("sinks", sinks, 0), ("recent", recent, 0), ("steps", steps, 1), ("rows", rows, 1))
    )
    penalty, learning_rate = (
        number_argument(name, each, minimum=0.0, maximum=float("inf"), error=InputError)
        for name, each in (("penalty", penalty), ("learning_rate", learning_rate))
    )
    optimizer = optax.scale_by_adam()

    @jax.jit
    def step(
        params: Params, gates: Array, memory: optax.OptState, learning_rate: Array, *data: Array
    ) -> tuple[Array, optax.OptState, Array]:
        loss = functools.partial(gate_loss, config=config, sinks=sinks, recent=recent, penalty=penalty)
        value, slope = jax.value_and_grad(loss, argnums=1)(params, gates, *data)
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = optimizer.update(slope, memory)
        return jnp.clip(gates - learning_rate * change, 0.0, 1.0), memory, value

    with model.on_mesh():
        gates = jnp.ones((config.num_layers, config.num_kv_heads), jnp.float32)
        memory, losses, each = optimizer.init(gates), [], learning_rate * rates(steps)
        for number in range(steps):
            own = (number * rows + np.arange(rows)) % len(batch.tokens)
            data = model.place((batch.tokens[own], compared[own], batch.lengths[own].astype(np.int32)))
            gates, memory, value = step(model.params, gates, memory, jnp.float32(each[number]), *data)
            losses.append(value)
        return HeadGates(np.asarray(gates), np.asarray(losses, np.float32))


def rates(steps: int) -> np.ndarray:
    """Returns the rate of each step as a part of the largest rate, [steps] float64 in (0, 1]."""
    warm = max(int(WARM * steps), 1)
    rise = np.arange(steps) / warm
    return np.asarray(SLOW + (1 - SLOW) * np.clip(np.minimum(rise, rise[::-1]), 0, 1))


def _before_answers(answers: ArrayLike, shape: tuple[int, ...], lengths: np.ndarray) -> np.ndarray:
    """Returns the tokens before those that are answers, [B, T] bool.

    Raises:
      InputError: answers of another shape, or a row without any.
    """
    marks = np.asarray(answers)
    marks = marks[None] if marks.ndim == 1 else marks
    if marks.dtype != bool or marks.shape[0] != shape[0] or marks.shape[1] < shape[1]:
        raise InputError(
            f"answers must be true or false for each of the tokens {shape}; got {marks.dtype}{list(marks.shape)}."
        )
    marks = marks[:, : shape[1]] & (np.arange(shape[1]) < lengths[:, None])
    compared = np.concatenate([marks[:, 1:], np.zeros_like(marks[:, :1])], axis=1)
    if not compared.any(axis=1).all():
        raise InputError(f"row {int(np.argmin(compared.any(axis=1)))} has no answers after its first token; mark some.")
    return compared


def gate_loss(
    params: Params,
    gates: Array,
    tokens: Array,
    compared: Array,
    lengths: Array,
    *,
    config: DecoderConfig,
    sinks: int,
    recent: int,
    penalty: float,
) -> Array:
    """Computes the loss of `head_gates` on a batch.

    Args:
      params: of the model.
      gates: [L, K] float32.
      tokens: [B, T] int32.
      compared: [B, T] bool, the tokens whose hidden states are compared.
      lengths: [B] int32.
      config: the decoder.
      sinks: see `head_gates`.
      recent: see `head_gates`.
      penalty: see `head_gates`.
    """
    # [B, T, E]
    expected = jax.lax.stop_gradient(hidden_states(params, None, tokens, lengths, config=config))
    own = [Gates(share, sinks, recent) for share in gates]
    got = hidden_states(params, own, tokens, lengths, config=config)
    # [B, T]
    distance = jnp.mean(jnp.square(got.astype(jnp.float32) - expected.astype(jnp.float32)), axis=-1)
    answers = jnp.sum(jnp.where(compared, distance, 0.0)) / jnp.sum(compared, dtype=jnp.float32)
    return answers + penalty * jnp.mean(gates)


class LayerInputs(NamedTuple):
    """The inputs of a layer's attention for a whole text.

    Attributes:
      hidden: [B, T, E], the input of the projections.
      query: [B, H, T, D], not rotated.
      key: [B, K, T, D], not rotated.
      value: [B, K, T, D].
    """

    hidden: Array
    query: Array
    key: Array
    value: Array


def hidden_states(
    params: Params, gates: Sequence[PyTree] | None, tokens: Array, lengths: Array, *, config: DecoderConfig
) -> Array:
    """Computes the last hidden states of whole texts, [B, T, E]; the backward pass holds one layer at a time.

    Args:
      params: of the model.
      gates: for each layer, the object that replaces the output of attention; None = attention over all tokens.
      tokens: [B, T] int32.
      lengths: [B] int32.
      config: the decoder.
    """
    return run_text(params, gates, tokens, lengths, config=config)[0]


def run_text(
    params: Params, gates: Sequence[PyTree] | None, tokens: Array, lengths: Array, *, config: DecoderConfig
) -> tuple[Array, list[LayerInputs]]:
    """Returns the result of `hidden_states`, and the inputs of the attention of each layer."""
    dtype = params["embed"]["tokens"].dtype
    decoder = bind(config, params)
    # [B, T]
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    position = jnp.where(position < lengths[:, None], position, -1)
    block = Block(position=position, prompt=lengths, total=lengths, budget=((None,),) * config.num_layers)

    def layer(index: int, own: Params, x: Array) -> tuple[Array, LayerInputs]:
        made = run_layer(
            own, x, None, block.of_layer(index), None, config=config, kind=config.kind(index), dtype=dtype,
            groups=(Group(policy=full()),),
        )  # fmt: skip
        return made.x, LayerInputs(made.entered, *made.projected)

    # [B, T, hidden]
    x = decoder.enter(tokens, block)
    inputs = []
    for index in range(config.num_layers):
        own = params[f"layer_{index}"]
        if gates is not None:
            own = {**own, "attention": {**own["attention"], GATES: gates[index]}}
        x, entered = jax.checkpoint(functools.partial(layer, index))(own, x)
        inputs.append(entered)
    return decoder.leave(x), inputs
