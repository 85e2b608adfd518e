"""Decoding steps: kvjax under a budget, its peers, and the limit that memory sets."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import kvjax
from experiments import peers
from experiments.bench.contestants import (
    LLAMA,
    attended,
    bytes_a_step,
    dtype_of,
    grows,
    in_turns,
    lengths,
    lowered_for,
    milliseconds,
    ours,
    policy_of,
    random_model,
    random_prompt,
    ratio,
    reading,
    shape,
)
from experiments.bench.fill import filled_steps
from experiments.peers.process import PeerProcess
from experiments.runs import machine
from kvjax import policies
from kvjax.attention import Implementation
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.models.quantize import as_weight_codes
from kvjax.policies import LowNorm
from kvjax.policies.base import Policy
from kvjax.policies.budget import Fraction
from kvjax.policies.components import Stats, View
from kvjax.typing import JsonObject

WORK = ((1, 512), (8, 2048))  # batch, context: what is measured unless the command line says otherwise
#: Largest difference in log-probability between two implementations of the same model. In bfloat16 a logit of 10 is off
#: by up to 0.04, and one is subtracted from another; the tiny shape differs from transformers by 0.05.
SAME = {"float32": 1e-3, "bfloat16": 0.25}
NO_POLICY = "no policy, same slots"


def check(values: flags.FlagValues) -> None:
    """Raises ConfigError if the flags do not go with each other or with the peers."""
    against = names_of_peers(values.against)
    if (values.batch is None) != (not lengths(values)):
        raise ConfigError("give --batch and --context together, or neither for the two standard settings.")
    if values.fill and against:
        raise ConfigError("peers cannot run with --fill, since they read prompts; give --against=none.")
    if "llama.cpp" in against and values.dtype != "float32":
        raise ConfigError(f"llama.cpp is measured in float32; got --dtype={values.dtype}.")
    shape_for(values, against)


def run(values: flags.FlagValues) -> list[JsonObject]:
    against = names_of_peers(values.against)
    settings = WORK if values.batch is None else tuple((values.batch, context) for context in lengths(values))
    return [row for batch, context in settings for row in one_setting(values, against, batch, context)]


def names_of_peers(against: list[str]) -> list[str]:
    """Peers in the order given, none for ``none``."""
    names = [name for name in dict.fromkeys(against) if name != "none"]
    if unknown := [name for name in names if name not in peers.PEERS]:
        raise ConfigError(f"unknown peer {unknown[0]!r}; known peers: {', '.join(peers.PEERS)}, none.")
    return names


def interpreters(given: list[str]) -> dict[str, str]:
    """Returns the interpreter of each peer that --python names.

    Raises:
      ConfigError: not of the form PEER=PATH, or no such peer or file.
    """
    pythons = dict(each.partition("=")[::2] for each in given)
    for name, path in pythons.items():
        if name not in peers.PEERS or not os.path.isfile(path):
            raise ConfigError(
                f"--python={name}={path} is not valid; give PEER=INTERPRETER, where the peer is one of "
                f"{', '.join(peers.PEERS)} and the interpreter is a file."
            )
    return pythons


def shape_for(values: flags.FlagValues, against: list[str]) -> kvjax.models.config.DecoderConfig:
    """--shape, or one that every peer can run.

    Raises:
      ConfigError: a peer that has no model of this family.
    """
    name = values.shape or ("opt-125m" if all("opt" in peers.PEERS[each].families for each in against) else LLAMA)
    config = shape(name)
    for each in against:
        if config.family not in (families := peers.PEERS[each].families):
            raise ConfigError(
                f"{each} does not support {config.family} ({name}); use --shape={LLAMA} ({', '.join(families)})."
            )
    return config


def one_setting(values: flags.FlagValues, against: list[str], batch: int, context: int) -> list[JsonObject]:
    """A row for every side, times in milliseconds a step (all rows of the batch advance one token)."""
    rounds, tokens, implementation = values.rounds, values.tokens, values.implementation
    slots = Fraction(values.budget).slots(context, 1)[0] + 1
    config = shape_for(values, against)
    built = {name: policy_of(name, values.budget) for name in values.policies}
    if values.fill:
        check_fits(config, built, batch, context, (rounds + 1) * tokens, values.dtype)
    # Room for every round to continue where the last one stopped, on a learned position table too.
    model = random_model(config, context + (rounds + 1) * tokens + slots, values.dtype)
    prompt = random_prompt(config, batch, context)
    first = values.policies[0]

    sides: dict[str, Iterator[float]] = {"limit": reading()}
    held: dict[str, int] = {}
    for name, policy in built.items():
        lowered = lowered_for(model, policy, batch, context, tokens)
        if values.fill:
            spec = CacheSpec(policy)
            sides[name] = filled_steps(model, spec, batch, context, tokens, rounds, implementation)
        else:
            sides[name] = ours(model, prompt, policy, tokens, restart=grows(lowered), implementation=implementation)
        held[name] = attended(config, lowered, context, tokens)
    if not values.fill:
        # The same slots, all of them kept: a prompt that leaves room for exactly this run's tokens.
        few = min(tokens, slots)
        unpoliced = prompt[:, : slots + 1 - few]
        sides[NO_POLICY] = ours(model, unpoliced, policies.full(), few, restart=True, implementation=implementation)
        held[NO_POLICY] = slots
    codes = {f"{first}, weights {name}": as_weight_codes(name) for name in values.weights if name != "none"}
    for name, each in codes.items():
        assert each is not None
        coded = kvjax.quantize_weights(model, each.bits, each.group)
        if values.fill:
            sides[name] = filled_steps(coded, CacheSpec(built[first]), batch, context, tokens, rounds, implementation)
        else:
            sides[name] = ours(coded, prompt, built[first], tokens, implementation=implementation)
        held[name] = held[first]
    owner: dict[str, str] = {}
    pythons = interpreters(values.python)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if against:
            kvjax.save(model, folder)
        for name in against:
            peer = stack.enter_context(PeerProcess(name, folder, pythons.get(name)))
            check_same(model, peer, prompt[:1, :64], name, implementation)
            work = peers.Work(prompt, tokens, slots, tuple(built), values.compile)
            for kind, (side, count) in peer.decode(work).items():
                label = f"{name}, {kind}"
                sides[label], held[label], owner[label] = side, count, name
            if name == "kvpress" and "knorm" in built:
                check_kept(model, peer, implementation)
        times = in_turns(sides, rounds)

    must = {name: bytes_a_step(model, policy, batch, context, tokens) for name, policy in built.items()}
    must |= {name: bytes_a_step(model, built[first], batch, context, tokens, each) for name, each in codes.items()}
    a_byte = np.array(times.pop("limit"))
    fastest = {
        name: min((each for each in owner if owner[each] == name), key=lambda each: np.median(times[each]))
        for name in against
    }

    def row(side: str, seconds: Sequence[float] | np.ndarray, slots: int, moved: int | None) -> JsonObject:
        return {
            "batch": batch,
            "context": context,
            "side": side,
            "slots": slots,
            **milliseconds(seconds),
            "tokens/s": batch / float(np.median(seconds)),
            f"times {first}": ratio(seconds, times[first]),
            **{f"faster than {peer}": ratio(times[best], seconds) for peer, best in fastest.items()},
            "MB/step": moved and moved / 1e6,
            "% of the limit": moved and 100 * ratio(moved * a_byte, seconds),
        }

    speed = f"{1e-9 / float(np.median(a_byte)):.1f} GB/s"
    limits = [row(f"limit of {name}: {speed}", moved * a_byte, held[name], moved) for name, moved in must.items()]
    return [row(name, each, held[name], must.get(name)) for name, each in times.items()] + limits


def check_fits(
    config: DecoderConfig, built: dict[str, Policy], batch: int, context: int, tokens: int, dtype: str
) -> None:
    """Checks, before anything is allocated, that weights and all caches at once fit the device.

    Raises:
      ConfigError: they do not.
    """
    prompts = np.full((batch,), context, np.int32)
    limits = Limits(context, tokens, shortest=context)
    sizes = sizes_for(prompts, tokens, width=context, block=None, limits=limits, last_fed=True)
    cache = sum(
        lower(CacheSpec(each), config, sizes, prompts, dtype=dtype).layout.bytes(batch) for each in built.values()
    )
    if not (fit := machine.fit(config, dtype, cache=cache)).fits:
        raise ConfigError(f"a batch of {batch} rows of {context:,} tokens does not fit: {fit}.")


def check_same(model: kvjax.Model, peer: Any, tokens: np.ndarray, name: str, implementation: Implementation) -> None:
    """Both sides must compute the same model, or their times mean nothing."""
    mine = kvjax.log_likelihood(
        model, tokens, policies.full(), prompt_length=tokens.shape[1] // 2, implementation=implementation
    )
    agree(f"{name}, full cache", np.asarray(mine.logprobs), peer.logprobs(tokens), str(dtype_of(model)))


@dataclasses.dataclass(frozen=True)
class ExactNorm(LowNorm):
    """`low_norm` without its rounding, as `KnormPress` ranks: norms that round to the same number are not a tie."""

    def score(self, stats: Stats, view: View) -> jax.Array:
        return -jnp.linalg.norm(view.key.astype(jnp.float32), axis=-1)


def check_kept(model: kvjax.Model, peer: Any, implementation: Implementation) -> None:
    """A press that does what a policy does must keep the same slots: then what follows has the same probability.

    No token comes twice: its keys would be equally long in the first layer, and which of them goes is anybody's choice.
    """
    length, budget = 48, 12
    tokens = np.random.default_rng(0).permutation(np.arange(5, model.config.vocab_size))[None, : length + 16]
    exact = policies.evict(importance=ExactNorm(), budget=budget)
    mine = kvjax.log_likelihood(model, tokens, exact, prompt_length=length, implementation=implementation)
    theirs = peer.logprobs_under("knorm", tokens, length, budget + 1)
    agree("kvpress, knorm at every step", np.asarray(mine.logprobs)[:, length - 1 :], theirs, str(dtype_of(model)))


def agree(what: str, mine: np.ndarray, theirs: np.ndarray, dtype: str = "float32") -> None:
    worst = float(np.abs(mine - theirs).max())
    print(f"largest difference of log-probabilities, {what}: {worst:.1e}")
    if not worst < SAME[dtype]:
        raise ConfigError(
            f"{what}: the log-probabilities of the two sides differ by {worst:.1e}, so that times cannot be compared."
        )
