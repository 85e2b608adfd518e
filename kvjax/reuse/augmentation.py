"""Cache augmentation (arXiv:2412.17747): a trained copy of the decoder reads a cache, and appends slots to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import plain_signature
from kvjax.cache import shared_prefix
from kvjax.cache.groups import Phase
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.state import Block, KVState
from kvjax.contexts.room import with_room
from kvjax.contexts.turns import check_positions, own_model
from kvjax.errors import InputError, shown
from kvjax.generation import compiling
from kvjax.generation.context import Context
from kvjax.generation.continuations import takes_blocks, without_step_kernels
from kvjax.generation.program import program
from kvjax.models.bound import BoundDecoder, bind
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import POLICY, SIDES, SKEW
from kvjax.models.layers import Embed
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.summary import one_line

Array = jax.Array
#: Parameters that are the decoder's own in a coprocessor too, which reads no tokens and has no output head.
SHARED = ("embed", "head")


@dataclasses.dataclass(frozen=True, eq=False)
class Coprocessor:
    """A copy of a decoder with learned input vectors.

    Attributes:
      params: the parameters of the copy, without those of the token embedding and of the output head, and without
        calibrations.
      latents: [n_l, embed], the input vectors; 0 of them leave a context as it is.
    """

    params: Params
    latents: Array

    def __repr__(self) -> str:
        return one_line(self)


def initial_coprocessor(model: Model, latents: int, *, seed: int = 0) -> Coprocessor:
    """Returns a coprocessor before training, which shares the arrays of the model.

    Args:
      model: the decoder.
      latents: n_l, the number of input vectors; they begin as the embeddings of random tokens.
      seed: the random seed of these tokens.

    Raises:
      InputError: a number that is not valid.
    """
    if isinstance(latents, bool) or not isinstance(latents, int | np.integer) or latents < 0:
        raise InputError(f"latents must be a whole number of at least 0; got {shown(latents)}.")
    shared_prefix.refuse(model.params, "cache augmentation")
    drawn = np.random.default_rng(seed).integers(0, model.config.vocab_size, int(latents))
    embed = Embed(model.config, model.dtype, parent=None)
    # [n_l, embed]
    made: Array = embed.apply({"params": model.params["embed"]}, jnp.asarray(drawn[None], jnp.int32))[0]
    return Coprocessor(_copied(model.params), made)


def _copied(params: Params) -> Params:
    """Returns the parameters that a coprocessor has its own of."""
    own = {name: part for name, part in params.items() if name not in SHARED}
    for name, part in own.items():
        if "attention" in part:
            plain = {key: leaf for key, leaf in part["attention"].items() if key not in (SIDES, SKEW, POLICY)}
            own[name] = {**part, "attention": plain}
    return own


@plain_signature
def augment(model: Model, context: Context, coprocessor: Coprocessor) -> Context:
    """Appends slots that a coprocessor computes to the cache of a context (arXiv:2412.17747, section 2).

    The coprocessor reads its input vectors as a block after the context, in a copy of the cache. Its last hidden
    states, after the final norm, are fed to the decoder as embeddings of as many tokens, whose slots are appended. They
    have positions and no token ids; what follows them continues after these positions.

    Args:
      model: that of the context.
      context: from `kvjax.contexts.prefill` and the like, whose cache takes further tokens as a block: no slots that
        are evicted, coded or chosen while decoding. Prompts that were compressed will do. It is unchanged.
      coprocessor: from `initial_coprocessor`, or trained by `kvjax.training.train_coprocessor`.

    Returns:
      The context, whose logits are those after the last input vector; its tokens are not known, so that it cannot be
      saved, edited or kept as a prefix. Without input vectors, the context that was given.

    Raises:
      InputError: another model, a coprocessor for another model, a cache that takes no blocks, a model on a mesh,
        arrays that cannot grow, or a text that is longer than the model's positions.
      ConfigError: a model that is spread over several processes.
    """
    model = own_model(model, context)
    check_coprocessor(model, coprocessor)
    count = len(coprocessor.latents)
    if not count:
        return context
    if not takes_blocks(context.layout.decode):
        raise InputError(
            f"{context.layout.name} cannot be augmented: its slots are coded, evicted or chosen while decoding, or "
            "keys are rotated by rank; prefill under a policy that keeps all slots while decoding, with exact storage."
        )
    length, total = (
        each[: context.num_rows] for each in distributed.to_host((context.state.length, context.state.total))
    )
    check_positions(model.config, length + count, total)
    context = with_room(context, np.full(context.logits.shape[0], count, np.int32))
    with compiling.announced(compiling.tokens_of(context.layout.decode)):
        logits, state = _augment(
            model.params, coprocessor.params, coprocessor.latents, context.state, config=model.config,
            phase=without_step_kernels(context.layout.decode),
        )  # fmt: skip
    return context._replace(logits=logits, state=state, tokens=None, boundaries=None, snapshots=())


@program(static_argnames=("config", "phase"))
def _augment(
    params: Params, own: Params, latents: Array, state: KVState, *, config: DecoderConfig, phase: Phase
) -> tuple[Array, KVState]:
    """Returns the logits [B, V] after the slots that are appended, and the cache with them; see `appended`."""
    compiling.traced()
    stacked, decoder = stacked_runs(state.layers), bind(config, params)
    runs = decoder.runs_now(state, phase)
    reader = bind(config, reader_params(params, own)).looped(runs)
    hidden, kv = appended(decoder.looped(runs), reader, latents, arranged_state(state, runs), phase)
    return decoder.logits(hidden[:, -1]), arranged_state(kv, stacked)


def appended(
    decoder: BoundDecoder, reader: BoundDecoder, latents: Array, state: KVState, phase: Phase
) -> tuple[Array, KVState]:
    """Runs the coprocessor, and feeds the decoder what it returns.

    Args:
      decoder: the decoder.
      reader: the coprocessor; see `reader_params`.
      latents: [n_l, embed], its input vectors, at least one.
      state: the cache, with room for n_l slots.
      phase: the groups of heads of each layer, without kernels of one token.

    Returns:
      The decoder's last hidden states [B, n_l, embed], and its cache.
    """
    rows, count = len(state.length), len(latents)
    # [B, n_l]
    position = state.length[:, None] + jnp.arange(count, dtype=jnp.int32)
    end = state.length + count
    kv = state.replace(prompt=end, total=jnp.maximum(state.total, end))
    block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
    # [B, n_l, embed] each
    given = jnp.broadcast_to(latents.astype(decoder.dtype), (rows, *latents.shape))
    made, _ = reader.hidden(given, kv, block, phase)
    return decoder.hidden(made, kv, block, phase)


def reader_params(params: Params, own: Params) -> Params:
    """Returns the parameters of a coprocessor, with those that it shares with the decoder."""
    shared = {name: params[name] for name in SHARED if name in params}
    return {**own, **shared}


def check_coprocessor(model: Model, coprocessor: Coprocessor) -> None:
    """Checks that a coprocessor is one of a model.

    Raises:
      InputError: it is not, or the model is on a mesh.
      ConfigError: the model is spread over several processes.
    """
    if not isinstance(coprocessor, Coprocessor):
        raise InputError(f"coprocessor must be a kvjax.reuse.Coprocessor; got {shown(coprocessor)}.")
    distributed.check_alone(model.params, "cache augmentation")
    shared_prefix.refuse(model.params, "cache augmentation")
    if model.mesh is not None:
        raise InputError("cache augmentation runs on one device; load the model without a mesh.")
    latents, own = coprocessor.latents, coprocessor.params
    if len(np.shape(latents)) != 2 or np.shape(latents)[1] != model.config.embed_size:
        raise InputError(
            f"latents must be vectors [n, {model.config.embed_size}], the size of this model's embeddings; got "
            f"shape {list(np.shape(latents))}."
        )
    one, two = (
        {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (own, _copied(model.params))
    )
    if one != two:
        differing = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        raise InputError(
            f"the coprocessor is not a copy of this model: {differing[0]} is {one.get(differing[0], 'missing')}, and "
            f"in the model {two.get(differing[0], 'missing')}; make one with kvjax.reuse.initial_coprocessor."
        )
