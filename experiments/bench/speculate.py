"""Speculation against plain decoding: tokens per round, the times of steps and rounds, and what a plan says of them.

The length from which rounds are faster is given three times: as planned from the speeds of the device, by the measured
times of the steps of a round, and as measured.

Prompts are not timed. Times are CPU seconds of the process on a CPU, which other load disturbs less, and wall time on
other devices.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import kvjax
from experiments.bench import transfers
from experiments.bench.contestants import in_turns, lengths, random_model, random_prompt, ratio, shape
from experiments.config import DataConfig
from experiments.runs import data
from kvjax import policies, speculation
from kvjax.analysis import acceptance
from kvjax.cache import KVState
from kvjax.cache.cut import cut
from kvjax.cache.groups import Phase
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.state import Block
from kvjax.devices import GIGA, Device, local_device
from kvjax.errors import ConfigError
from kvjax.generation.context import Context
from kvjax.generation.generate import decode
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prefill
from kvjax.generation.program import program
from kvjax.generation.sampling import Greedy, Sample, Sampler
from kvjax.inputs import check_batch
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.parallel.sharding import Params
from kvjax.planning import plan_speculation
from kvjax.specs.parse import build
from kvjax.speculation.drafts import Drafter, Level, Own, Seen, resolve_levels
from kvjax.speculation.report import Drafts
from kvjax.speculation.rules import mean_tokens_per_round
from kvjax.speculation.slot_copies import plain_group
from kvjax.speculation.speculating import Loop, prepare_rounds
from kvjax.storage import dense
from kvjax.typing import JsonObject

MODEL, CONTEXT = "kvjax-tiny", 768
HOST = "host"  # --memory
DRAFTS = ("retrieval", "seen(window)", "seen(h2o)", "own(window)")
STEPS = 16  # of a timing of steps
PLAIN, ROUNDS, DRAFT, VERIFY = "plain", "rounds", "draft", "verify"  # sides

Array = jax.Array
Timer = Iterator[float]


def drafter(text: str, slots: int) -> Drafter:
    """Returns what drafts: ``seen(POLICY)``, ``own(POLICY)`` or a selection, with a budget of `slots` unless given.

    Raises:
      KvjaxError: an unknown name, or arguments that are not valid.
    """
    if found := re.fullmatch(r"(seen|own)\((.*)\)", text.strip()):
        made: Drafter = getattr(speculation, found[1])(build("policy", found[2], budget=slots))
        return made
    selects: Drafter = build("selection", text, budget=slots)
    return selects


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for every length, draft and γ; see `one_setting`."""
    contexts, gammas = lengths(values) or [CONTEXT], values.gammas
    drafts = {text: drafter(text, values.slots) for text in values.drafts or DRAFTS}
    room = max(values.tokens, max(gammas) + 2)  # a block of drafts, and a token after it
    model = model_of(values, max(contexts) + room)
    sampler: Sampler = Sample(values.temperature, top_p=values.top_p) if values.temperature else Greedy()
    device, rows, options = local_device(jax.devices()[:1]), list[JsonObject](), CacheOptions()
    if values.memory == HOST:
        options = CacheOptions(storage=dense(memory=HOST))
        if device.link is None and not on_cpu():
            device = dataclasses.replace(device, link=transfers.link_bandwidth(values.rounds))
    for context in contexts:
        prompt, slots = prompts(values, model, context), min(values.slots, context)
        whole = prefill(model, prompt, policies.full(), max_new_tokens=room, options=options)
        short = prefill(model, prompt[:, -slots:], policies.full(), max_new_tokens=room)
        setting = Setting(model, prompt, whole, short, values.tokens, slots, sampler, values.rounds, device, options)
        for text, draft in drafts.items():
            rows += [one_setting(setting, text, draft, gamma, forced=values.acceptance) for gamma in gammas]
    for row in rows:
        alike = [other for other in rows if all(row[name] == other[name] for name in ("draft", "γ"))]
        lengths_, plain, rounds, by_steps = (
            [other[name] for other in alike] for name in ("context", "ms/token, plain", "ms/token", "ms/token by steps")
        )
        planned, measured = row["break-even, planned"], break_even(lengths_, plain, rounds)
        row["break-even by steps"] = break_even(lengths_, plain, by_steps)
        row["break-even, measured"] = measured
        row["planned/measured"] = planned / measured if planned and measured else None
    return rows


def model_of(values: flags.FlagValues, positions: int) -> kvjax.Model:
    """Returns the model of --model, or one of random weights of --shape that takes `positions` tokens.

    Raises:
      ConfigError: the model was trained on shorter texts.
    """
    if values.shape:
        return random_model(shape(values.shape), positions, values.dtype)
    model = kvjax.load(values.model or MODEL, dtype=values.dtype)
    if positions > model.config.max_positions:
        raise ConfigError(
            f"prompts and what follows them take {positions:,} tokens, and {values.model or MODEL} was trained on "
            f"texts of at most {model.config.max_positions:,}; lower --context or --tokens."
        )
    return model


def prompts(values: flags.FlagValues, model: kvjax.Model, context: int, rows: int = 1) -> np.ndarray:
    """Returns [rows, context] token ids, of --text or of a generated story, of --batch rows if they are given."""
    batch = values.batch or rows
    if values.shape:
        return random_prompt(model.config, batch, context).astype(np.int32)
    config = DataConfig(text=values.text, num_sequences=batch, prompt_length=context, new_tokens=1)
    tokens, _, _ = data.load(config, model, 0)
    return tokens[:, :context]


class Setting(NamedTuple):
    """A prompt, and how it is continued.

    Attributes:
      model: decodes, drafts and verifies.
      prompt: [B, n] int32.
      whole: the full cache after the prompt.
      short: the same after its newest `slots` tokens alone.
      tokens: the number of new tokens of a row.
      slots: those that a draft reads.
      sampler: of both sides.
      rounds: how many times each side is timed.
      device: that the plan is for.
      options: of the cache of the model, which may be in host memory.
    """

    model: kvjax.Model
    prompt: np.ndarray
    whole: Context
    short: Context
    tokens: int
    slots: int
    sampler: Sampler
    rounds: int
    device: Device
    options: CacheOptions


def one_setting(setting: Setting, text: str, draft: Drafter, gamma: int, *, forced: bool) -> JsonObject:
    """Times plain decoding, rounds, and the two kinds of steps of a round, in turns.

    A draft's step is a step that reads the newest `slots` tokens of the prompt, and nothing besides; a step that
    verifies reads the whole cache with a block of γ + 1 tokens. A round takes γ draft steps, and those of `late_steps`;
    it chooses and copies slots besides these.

    Args:
      setting: the prompt.
      text: how the draft is called.
      draft: what drafts.
      gamma: the number of drafts of a round.
      forced: whether to compute α by teacher forcing too; see `teacher_forced`.
    """
    model, whole, tokens = setting.model, setting.whole, setting.tokens
    batch, context = setting.prompt.shape
    levels = resolve_levels(model, draft, Level(gamma=gamma, accept="shared"), setting.sampler)
    loop = prepare_rounds(
        model, check_batch(model.config, setting.prompt, None, new_tokens=tokens), levels, max_new_tokens=tokens,
        sampler=setting.sampler, options=setting.options,
    )  # fmt: skip
    made: dict[str, Any] = {}

    def plain(start: Context) -> None:
        result = decode(model, start, max_new_tokens=tokens, sampler=setting.sampler, key=jax.random.key(0))
        made[PLAIN] = result.tokens
        jax.block_until_ready(result.state)

    def drafted(start: Loop) -> None:
        made[ROUNDS] = jax.block_until_ready(start.run())

    walls: dict[str, list[float]] = {name: [] for name in (PLAIN, ROUNDS, DRAFT, VERIFY)}
    times = in_turns(
        {
            PLAIN: clocked(plain, lambda: whole._replace(state=copy_of(whole.state)), walls[PLAIN]),
            ROUNDS: clocked(drafted, lambda: loop._replace(carry=copy_of(loop.carry)), walls[ROUNDS]),
            DRAFT: clocked(*steps(model, setting.short, 1), walls[DRAFT]),
            VERIFY: clocked(*steps(model, whole, gamma + 1), walls[VERIFY]),
        },
        setting.rounds,
    )
    carry = made[ROUNDS]
    new, counts, by_round = jax.device_get((carry.text[:batch, :tokens], carry.counts, carry.by_round))
    drafts = Drafts.from_counts(counts, by_round, batch)
    rounds = int(drafts.rounds.max())
    chance = chance_of(drafts, tokens)
    draft_steps = gamma + late_steps(draft, drafts, gamma)
    step, draft_step, verify = (
        float(np.median(times[name])) / count for name, count in ((PLAIN, tokens - 1), (DRAFT, STEPS), (VERIFY, STEPS))
    )
    round_ = float(np.median(times[ROUNDS])) / rounds
    device = setting.device
    assert device.bandwidth is not None
    plan = plan_speculation(
        model.config, budget=setting.slots, device=device, alpha=chance, length=context + tokens // 2, gamma=gamma,
        batch=batch, dtype_bytes=model.dtype.itemsize,
        # The memory of a CPU is that of its host: nothing moves over a link.
        on_host=setting.options.storage is not None and not on_cpu(),
    )  # fmt: skip
    # The tokens that a round feeds in the mean, of the row with the most rounds; the last token of all is not fed.
    advanced = (tokens - 1) / rounds
    accepted, tried = drafts.levels[0].by_place
    return {
        "context": context, "memory": "device" if setting.options.storage is None else HOST, "batch": batch,
        "draft": text,
        "γ": gamma, "slots": setting.slots, "sampler": repr(setting.sampler), "new tokens": tokens,
        "rows that differ": int((new != made[PLAIN]).any(axis=1).sum()),
        "accepted by place": " ".join(f"{one}/{of}" for one, of in zip(accepted, tried, strict=True)),
        "α": chance, "α, teacher-forced": teacher_forced(setting, draft, made[PLAIN]) if forced else None,
        "tokens/round": drafts.tokens_per_round, "tokens/round by α": mean_tokens_per_round(chance, gamma),
        "clock": "CPU" if on_cpu() else "wall",
        "ms/token, plain": 1e3 * step, "ms/token": 1e3 * round_ / advanced,
        "ms/token by steps": 1e3 * (draft_steps * draft_step + verify) / advanced, "ms/round": 1e3 * round_,
        "draft steps/round": draft_steps,
        "ms/draft step": 1e3 * draft_step, "ms/verification": 1e3 * verify,
        "speed-up": ratio(times[PLAIN], times[ROUNDS]), "speed-up, wall": ratio(walls[PLAIN][1:], walls[ROUNDS][1:]),
        "speed-up by steps": advanced * step / (draft_steps * draft_step + verify), "speed-up, planned": plan.speed_up,
        "device GB/s": device.bandwidth / GIGA, "device GFLOP/s": (device.flops or 0.0) / GIGA,
        "link GB/s": device.link / GIGA if plan.costs.on_host and device.link else None,
        "break-even, planned": plan.break_even,
    }  # fmt: skip


def chance_of(drafts: Drafts, tokens: int) -> float:
    """Returns the share of drafts that were accepted, of those behind no refused one; NaN if there are none.

    It is the estimate of an independent chance α. `Drafts.acceptance` is of all drafts.
    """
    accepted = tried = 0
    for row in drafts.by_round:
        due = tokens
        for count in row[row >= 0]:
            accepted += int(count)
            # After the last one that was accepted, one was refused, unless all were.
            tried += min(int(count) + 1, drafts.levels[0].drafted.shape[1], due)
            due -= int(count) + 1
    return accepted / tried if tried else float("nan")


def late_steps(draft: Drafter, drafts: Drafts, gamma: int) -> float:
    """Returns the mean number of steps of a round that draft nothing.

    A cache of the draft's own lacks the last of γ drafts. If all are accepted, the next round feeds it first.
    """
    if not isinstance(draft, Own):
        return 0.0
    by_round = drafts.by_round
    every = int(drafts.rounds.max())
    # Rows go on together.
    return float((by_round[:, : every - 1] == gamma).any(axis=0).sum()) / every


def teacher_forced(setting: Setting, draft: Drafter, new: np.ndarray) -> float | None:
    """Returns α by `kvjax.analysis.acceptance` on what plain decoding wrote; None for drafts of `seen`.

    Greedy, it is the share of tokens that both would choose; of samples, the least chance that both choose the same
    with one key, (1 - δ) / (1 + δ), where 1 - δ is the mean overlap of both distributions.
    """
    if isinstance(draft, Seen):
        return None
    found = acceptance(
        setting.model, np.concatenate([setting.prompt, new], axis=1), draft, prompt_length=setting.prompt.shape[1]
    )
    return found.agreement if isinstance(setting.sampler, Greedy) else found.chance / (2 - found.chance)


def break_even(contexts: list[int], plain: list[float], rounds: list[float]) -> float | None:
    """Returns the context from which rounds are faster, by lines through the times of tokens; None without one.

    Args:
      contexts: numbers of tokens, of which two at least are needed.
      plain: milliseconds of a token at each.
      rounds: the same of a token of rounds.
    """
    if len(set(contexts)) < 2:
        return None
    (slope, start), (round_slope, round_start) = (np.polyfit(contexts, each, 1) for each in (plain, rounds))
    # Parallel lines differ by rounding.
    if slope <= round_slope or np.isclose(slope, round_slope, rtol=1e-9):
        return None
    return max(1.0, float((round_start - start) / (slope - round_slope)))


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def copy_of(tree: Any) -> Any:
    """Returns a copy of arrays, each in the kind of memory that it is in."""
    return jax.block_until_ready(jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), tree))


def clocked(work: Callable[[Any], object], start: Callable[[], Any], walls: list[float]) -> Timer:
    """Seconds of each call of `work` with what `start` makes, which is not timed; wall times are added to `walls`."""
    while True:
        given = jax.block_until_ready(start())
        wall, cpu = time.perf_counter(), time.process_time()
        work(given)
        walls.append(time.perf_counter() - wall)
        yield time.process_time() - cpu if on_cpu() else walls[-1]


def steps(model: kvjax.Model, context: Context, width: int) -> tuple[Callable[[KVState], None], Callable[[], KVState]]:
    """Returns what feeds blocks of `width` tokens as drafts are fed and verified, and what makes a cache for it."""
    phase = tuple(tuple(plain_group(group) for group in layer) for layer in context.layout.decode)
    tokens = jnp.zeros((context.logits.shape[0], width), jnp.int32)

    def feed(state: KVState) -> None:
        with model.on_mesh():
            made = feed_blocks(model.params, state, tokens, np.int32(STEPS), config=model.config, phase=phase)
            jax.block_until_ready(made)

    return feed, lambda: copy_of(context.state)


@program(static_argnames=("config", "phase"), donate_argnames=("state",))
def feed_blocks(
    params: Params, state: KVState, tokens: Array, count: Array, *, config: DecoderConfig, phase: Phase
) -> tuple[KVState, Array]:
    """Feeds `count` blocks of tokens, [B, n] int32, each in the place of the last one, whose choices it has."""
    stacked, length = stacked_runs(state.layers), state.length
    runs = bind(config, params).runs_now(state, phase)
    # [B, n]
    position = length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def body(_: Array, loop: tuple[KVState, Array]) -> tuple[KVState, Array]:
        kv, given = loop
        decoder = bind(config, params).looped(stacked_runs(kv.layers))
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        x, kv = decoder.hidden(given, kv, block, phase)
        return cut(kv, length), jnp.argmax(decoder.logits(x), axis=-1).astype(jnp.int32)

    state, tokens = jax.lax.fori_loop(0, count, body, (arranged_state(state, runs), tokens))
    return arranged_state(state, stacked), tokens
