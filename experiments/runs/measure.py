"""Measures a cache on a model: perplexity, agreement with the full cache, speed, bytes held."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from experiments import stages
from experiments.tasks import ngrams
from experiments.tasks.base import Answer, Asked
from experiments.tasks.prompts import Prompt
from experiments.tasks.score import SPARE_TOKENS, exact_answers, shares
from kvjax.analysis.held import HeldTokens, held_tokens
from kvjax.attention import Implementation
from kvjax.cache import CacheLayout, CacheSpec, KVState, Limits, layers_of, live_slots
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import as_spec
from kvjax.generation import prompt_store
from kvjax.generation.generate import decode
from kvjax.generation.likelihood import score_continuation
from kvjax.generation.prefill import prefill
from kvjax.generation.selection_record import widths
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel import distributed, sharding
from kvjax.planning.roofline import decode_shapes
from kvjax.policies import Policy, padded
from kvjax.storage import breakdown
from kvjax.typing import JsonObject


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One policy's results.

    Attributes:
      policy: its name, with the storage and the selection where these are not the default.
      budget: as configured, one number or one per layer; None where that is the policies' of single heads, or no limit.
      slots: the largest number of live slots of a KV head, of all layers and rows.
      least_slots: the smallest.
      keeps_all: whether every token stays in every head.
      logprobs: [rows, new] float32 of the true continuation under teacher forcing; None when there is none.
      tokens: [rows, new] int32, greedy.
      prefill_rate: prompt tokens a second over all rows, the fastest of the repetitions; None if there was none.
      decode_rate: the same of new tokens; also None where a single new token takes no decoding.
      compile_seconds: what the first, untimed pass took longer, less where compiled programs were kept from before;
        None without repetitions.
      kv_bytes: of keys and values held while decoding, and of what a selection keeps to find them.
      full_kv_bytes: what the full cache would hold.
      footprint: slots that are held from the prompt's end to the last step, summed over steps, over the full cache's.
      read: share of the slots that are held that the first step reads at most; below 1 for selections.
      ends: tokens that end a text; what follows the first of them is no part of an answer.
      kv_parts: what is held by kind; see `kvjax.storage.breakdown`, and ``calibration``, which all rows share.
      explain: which kernels ran, and why no faster one did; see `kvjax.cache.CacheLayout.explain`.
      recall: recall task -> share of its prompts answered exactly.
      recall_by_prompt: recall task -> whether each of its prompts was answered exactly.
      asked: task -> its questions.
      answers: task -> the answers to them.
      held: the tokens that the cache of the first row holds at the end; None = not asked for.
    """

    policy: str
    budget: int | float | tuple[int | float, ...] | None
    slots: int
    least_slots: int
    keeps_all: bool
    logprobs: np.ndarray | None
    tokens: np.ndarray
    prefill_rate: float | None
    decode_rate: float | None
    compile_seconds: float | None
    kv_bytes: int
    full_kv_bytes: int
    footprint: float
    read: float
    explain: str
    ends: tuple[int, ...] = ()
    kv_parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    recall: Mapping[str, float] = dataclasses.field(default_factory=dict)
    recall_by_prompt: Mapping[str, Sequence[bool]] = dataclasses.field(default_factory=dict)
    asked: Mapping[str, Asked] = dataclasses.field(default_factory=dict)
    answers: Mapping[str, Sequence[Answer]] = dataclasses.field(default_factory=dict)
    held: HeldTokens | None = None

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-likelihood a token."""
        return None if self.logprobs is None else math.exp(-float(np.mean(self.logprobs, dtype=np.float64)))

    def agreement(self, full: "Measurement | None") -> float | None:
        """Fraction of greedy tokens equal to the full cache's at the same place."""
        return None if full is None else float(np.mean(self.tokens == full.tokens))

    def agreement_by_row(self, full: "Measurement | None") -> list[float]:
        """The `agreement` of each row."""
        return [] if full is None else [float(x) for x in np.mean(self.tokens == full.tokens, axis=1)]

    def same_until(self, full: "Measurement | None") -> float | None:
        """Mean number of greedy tokens before the first that differs from the full cache's."""
        return None if full is None else float(np.mean(self.same_until_by_row(full)))

    def same_until_by_row(self, full: "Measurement | None") -> list[int]:
        """The number of greedy tokens of each row before the first that differs from the full cache's."""
        if full is None:
            return []
        same = np.cumprod(self.tokens == full.tokens, axis=1)
        return [int(x) for x in np.sum(same, axis=1)]

    def generated(self) -> JsonObject:
        """The mean number of greedy tokens before one that ends a text, and how much they repeat themselves."""
        answers = [_before(row, self.ends) for row in self.tokens]
        return {"tokens": float(np.mean([len(each) for each in answers])), **ngrams.diversity(answers)}

    def by_chunk(self, tokens: int) -> list[float]:
        """Perplexity of each `tokens` tokens of the continuation, the last of which may be fewer."""
        if self.logprobs is None:
            return []
        loss = -self.logprobs.astype(np.float64)
        return [math.exp(loss[:, start : start + tokens].mean()) for start in range(0, loss.shape[1], tokens)]

    def by_row(self) -> list[float]:
        """The mean negative log-likelihood per token of each row, in nats."""
        return [] if self.logprobs is None else [float(x) for x in -self.logprobs.mean(axis=1, dtype=np.float64)]

    def scores(self, full: "Measurement | None") -> dict[str, JsonObject]:
        """Returns the scores of each task.

        Task -> what it is (``about``), its ``scores``, those that tables of all tasks show (``headline``), the
        first of these question by question (``by_question``), and of conversations turn by turn (``by_turn``).
        """
        found = {}
        for name, each in self.asked.items():
            others = full.answers.get(name) if full is not None else None
            scores = each.scores(self.answers[name], others)
            shown = [score for score in each.headline if score in scores]
            by_question = each.by_question(self.answers[name])
            found[name] = {"about": each.about, "scores": scores, "headline": shown, "by_question": by_question}
            if turns := each.by_turn(self.answers[name]):
                found[name]["by_turn"] = turns
        return found

    def row(self, full: "Measurement | None", chunk: int | None = None) -> JsonObject:
        """The scalars, for metrics.jsonl and tables; `chunk`: see `by_chunk`."""
        return {
            "policy": self.policy,
            "budget": self.budget,
            "slots": self.slots,
            "least_slots": self.least_slots,
            "keeps_all": self.keeps_all,
            "perplexity": self.perplexity,
            "nats_by_row": self.by_row(),
            "agreement": self.agreement(full),
            "agreement_by_row": self.agreement_by_row(full),
            "same_until": self.same_until(full),
            "same_until_by_row": self.same_until_by_row(full),
            "new_tokens": self.tokens.shape[1],
            "generated": self.generated(),
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_tokens_per_second": self.decode_rate,
            "compile_seconds": self.compile_seconds,
            "kv_bytes": self.kv_bytes,
            "full_kv_bytes": self.full_kv_bytes,
            "footprint": self.footprint,
            "read": self.read,
            "kv_parts": dict(self.kv_parts),
            "recall": dict(self.recall),
            "recall_by_prompt": {task: list(map(int, right)) for task, right in self.recall_by_prompt.items()},
            "tasks": self.scores(full),
            **({"chunk": chunk, "perplexity_by_chunk": self.by_chunk(chunk)} if chunk else {}),
        }


def _before(row: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Returns the tokens before the first that ends a text."""
    found = np.flatnonzero(np.isin(row, ends))
    return row[: found[0]] if found.size else row


def full_cache_bytes(config: DecoderConfig, rows: int, length: int, itemsize: int) -> int:
    """Keys and values of `length` tokens in every layer."""
    return 2 * config.num_layers * rows * config.num_kv_heads * length * config.head_dim * itemsize


def measure(
    model: Model,
    tokens: np.ndarray,
    policy: Policy | CacheSpec,
    *,
    prompt_length: int,
    new_tokens: int,
    prefill_block: int | None = None,
    implementation: Implementation = "auto",
    repeats: int = 3,
    recall: Mapping[str, Sequence[Prompt]] = MappingProxyType({}),
    progress: bool = False,
    capacity: int | float | None = None,
    held_layers: Sequence[int] = (),
) -> Measurement:
    """Scores the true continuation, generates greedily from the same prompts, timed, then asks the recall tasks.

    The first cache of the prompts serves both. Programs are compiled for exactly these sizes, so that the bytes held
    are those of the policy and no bucket's, unless there is a capacity; then these are counted from the layout.

    Args:
      tokens: [rows, prompt_length + new_tokens] int32; [rows, prompt_length] when there is no true continuation.
      implementation: see `kvjax.attention`.
      repeats: timed repetitions after one that compiles; 0 = nothing is timed.
      recall: prompts of each task.
      capacity: slots that arrays have room for, so that other budgets run the same programs (`kvjax.policies.padded`);
        None = those of the policy. Not for what is timed.
      held_layers: the layers of which `Measurement.held` is returned.

    Raises:
      InputError, PolicyError: before anything is traced.
    """
    spec = runs = as_spec(policy)
    if capacity is not None:
        assert not repeats, "the time of a step is that of the capacity"
        runs = dataclasses.replace(spec, policy=padded(spec.policy, capacity))
    limits = Limits(prompt=prompt_length, new_tokens=new_tokens, shortest=prompt_length)
    rows = tokens.shape[0]
    prompts = tokens[:, :prompt_length]
    logprobs = None
    prefill_times, decode_times = [], []
    first_call = "compiling or loading programs, then "
    for turn in range(1 + repeats):
        timed = f"repetition {turn} of {repeats}, " if turn else first_call
        stages.enter(f"{timed}reading prompts, {rows} rows of {prompt_length} tokens")
        start = time.perf_counter()
        with prompt_store.suspended() if repeats else contextlib.nullcontext():
            prefilled = prefill(
                model, prompts, runs, max_new_tokens=new_tokens, prefill_block=prefill_block,
                implementation=implementation, limits=limits,
            )  # fmt: skip
        jax.block_until_ready(prefilled.state)
        prefill_times.append(time.perf_counter() - start)
        if turn == 0:
            first = _live(prefilled.state, rows)
        if turn == 0 and tokens.shape[1] > prompt_length:
            stages.enter(f"{first_call}scoring {tokens.shape[1] - prompt_length} tokens of {rows} rows")
            logprobs = score_continuation(model, prefilled, tokens[:, prompt_length:], progress=progress)
        stages.enter(f"{timed}generating {new_tokens} tokens of {rows} rows")
        middle = time.perf_counter()
        generation = decode(model, prefilled, max_new_tokens=new_tokens)
        jax.block_until_ready(generation.state)
        decode_times.append(time.perf_counter() - middle)
    layout, held = prefilled.layout, generation.state
    if runs != spec:
        dtype = jnp.dtype(layout.dtype)
        with sharding.on_mesh(model.mesh, model.rules):
            layout = layout_of(
                spec, model.config, rows, prompt_length, new_tokens, dtype, block=prefill_block,
                implementation=implementation,
            )  # fmt: skip
        held = decode_shapes(model.config, layout, dtype, rows, None).carry.state
    answered = exact_answers(
        model, recall, runs, prefill_block=prefill_block, implementation=implementation,
        **({"limits": limits, "rows": rows} if _fits(recall, limits) else {}),
    )  # fmt: skip
    steps = new_tokens - 1  # the first new token comes out of the prompt
    live = _live(generation.state, rows)
    itemsize = jnp.dtype(layout.dtype).itemsize
    return Measurement(
        policy=spec.name,
        budget=None if spec.policy.budget is None else spec.policy.budget.value,
        slots=int(live.max()),
        least_slots=int(live.min()),
        keeps_all=layout.keeps_all,
        logprobs=logprobs,
        tokens=generation.tokens,
        ends=tuple(model.eos_token_ids),
        prefill_rate=rows * prompt_length / min(prefill_times[1:]) if repeats else None,
        decode_rate=rows * steps / min(decode_times[1:]) if repeats and steps else None,
        compile_seconds=_longer(prefill_times) + _longer(decode_times) if repeats else None,
        kv_bytes=layout.bytes(rows) + layout.index_bytes(rows),
        full_kv_bytes=full_cache_bytes(model.config, rows, prompt_length + steps, itemsize),
        footprint=_footprint(first, live, prompt_length, steps),
        read=_read(layout, prompt_length),
        explain=prefilled.layout.explain(),
        kv_parts=_parts(held, rows) | {"calibration": prefilled.layout.calibration_bytes()},
        recall=shares(answered),
        recall_by_prompt=answered,
        held=held_tokens(prefilled.layout, generation.state, layers=held_layers) if held_layers else None,
    )  # fmt: skip


def layout_of(
    spec: CacheSpec,
    decoder: DecoderConfig,
    rows: int,
    prompt_length: int,
    new_tokens: int,
    dtype: jnp.dtype,
    *,
    block: int | None,
    implementation: Implementation,
) -> CacheLayout:
    """Returns the layout of a spec when `measure` generates from prompts of one length, on the current mesh.

    Args:
      spec: a cache.
      decoder: the model's config.
      rows: the number of prompts.
      prompt_length: of each of them.
      new_tokens: that are generated.
      dtype: of the cache.
      block: tokens of a block of the prompt; None = in one shot.
      implementation: see `kvjax.attention`.

    Raises:
      KvjaxError: see `kvjax.cache.planning.lowering.lower`.
    """
    lengths = np.full((rows,), prompt_length)
    limits = Limits(prompt_length, new_tokens, shortest=prompt_length)
    sizes = sizes_for(lengths, new_tokens - 1, width=prompt_length, block=block, limits=limits, last_fed=False)
    return lower(
        spec, decoder, sizes, lengths, implementation=implementation, platform=jax.default_backend(), dtype=dtype
    ).layout  # fmt: skip


def _parts(state: KVState, rows: int) -> dict[str, int]:
    """Bytes of a number of rows by kind. On a mesh, arrays may have more rows, which are padding."""
    return {name: count * rows // state.length.shape[0] for name, count in breakdown(state).items()}


def _longer(times: Sequence[float]) -> float:
    """How much longer than the fastest of the others the first one took."""
    return times[0] - min(times[1:])


def _fits(recall: Mapping[str, Sequence[Prompt]], limits: Limits) -> bool:
    """Whether programs for the text serve the recall tasks too: prompts are as long, and answers not longer."""
    asked = [prompt for made in recall.values() for prompt in made]
    return all(
        prompt.tokens.size == limits.prompt and prompt.answer.size + SPARE_TOKENS <= limits.new_tokens
        for prompt in asked
    )


def _footprint(first: np.ndarray, last: np.ndarray, prompt: int, steps: int) -> float:
    """Returns the slots that are held, summed over steps, over those of the full cache.

    Args:
      first: of each KV head of every row and layer, at the end of the prompt.
      last: after the last step.
      prompt: tokens of the prompt.
      steps: the number of steps, each of which adds a slot until the budget is reached.
    """
    # [steps + 1]
    step = np.arange(steps + 1)
    # [heads, steps + 1]
    held = np.minimum(first[:, None] + step, np.maximum(first, last)[:, None])
    return float(held.mean(axis=0).sum() / (prompt + step).sum())


def _read(layout: CacheLayout, prompt: int) -> float:
    """Returns the share of the slots that are held that the first step after a prompt reads at most.

    Args:
      layout: of the cache.
      prompt: tokens of the prompt.
    """
    width = widths(layout.decode, layout.kv_heads)
    capacity = np.zeros_like(width)
    for layer, groups in enumerate(layout.decode):
        for group in groups:
            capacity[layer, slice(None) if group.heads is None else list(group.heads)] = group.capacity
    # The new token is held and read too.
    held = np.minimum(capacity, prompt + 1)
    return float(np.where(width < 0, held, np.minimum(width + 1, held)).sum() / held.sum())


def _live(state: KVState, rows: int) -> np.ndarray:
    """Returns the number of live slots of every KV head, of the first rows and every layer. Other rows are padding."""
    found: list[np.ndarray] = distributed.to_host([live_slots(group) for _, group in layers_of(state)])
    return np.concatenate([live[:rows].ravel() for live in found])
