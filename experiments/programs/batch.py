"""Answers a file of requests; see `experiments.batch`."""

import contextlib
import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from tqdm.auto import tqdm

import kvjax.products
from experiments import fields
from experiments.batch import groups, requests, shared_texts
from experiments.batch.contexts import Contexts, codec_of
from experiments.batch.journal import FILES, Journal
from experiments.batch.requests import Asked, Defaults
from experiments.batch.shared_texts import SharedText
from experiments.config import DataConfig, ExperimentConfig, TasksConfig
from experiments.runs import identity
from experiments.runs.resolve import check_fit, dtype_of, layout_of, max_cache_bytes
from experiments.runs.session import Session, calibrated_for, describe, given_calibration
from experiments.specs import build_spec
from kvjax import contexts
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.shared_prefix import prefix_bytes
from kvjax.contexts.shared import refuses_model
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generation.sampling import Sample
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies.budget import MIN_SLOTS
from kvjax.policies.window import full
from kvjax.serve import Request, Result, Runner
from kvjax.serve.counts import Counts
from kvjax.specs import user_files
from kvjax.storage import dense
from kvjax.transport import KVTC, CacheGen
from kvjax.typing import JsonObject
from kvjax.units import size

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
FAILED = 1  # the exit status if some request could not be answered
NEW_TOKENS = 256  # at most, if neither the request nor a flag nor the checkpoint says how many
PRODUCTS = "products"  # the journal's note of how products are rounded
SHOWN = ("prompts:", "prefix store:")  # of what the runner says of itself
AHEAD = 2  # requests that wait, for each row


def start(config: ExperimentConfig, values: flags.FlagValues) -> int:
    """Answers the requests of a command line.

    Returns:
      The exit status.
    """
    distributed.check_single("experiments.batch")
    given = requests.lines(Path(values.requests))
    if not given:
        raise ConfigError(f"--requests={values.requests!r} contains no requests.")
    check_sampling(values)
    config.data, config.baselines, config.tasks = DataConfig(num_sequences=values.rows), (), TasksConfig()
    if values.shared_slots and values.contexts is not None:
        raise ConfigError("--shared_slots cannot keep or continue contexts; leave out --contexts or --shared_slots.")
    if values.codec is not None and values.contexts is None:
        raise ConfigError("--codec says in which form contexts are kept; give --contexts=FOLDER too.")
    codec = codec_of(values.codec)
    with contextlib.ExitStack() as stack:
        stack.enter_context(user_files.pinned())
        folder = None if values.contexts is None else stack.enter_context(Contexts(values.contexts, codec))
        journal = stack.enter_context(Journal(Path(values.output), about(config, values, given, codec)))
        if journal.written == len(given):
            print(f"{values.output} already has all {journal.written:,} results.")
            return FAILED if journal.failed else 0
        session = Session()
        model = session.model(config)
        print(describe(model, config.model), flush=True)
        most = values.new_tokens or model.generation.max_new_tokens or NEW_TOKENS
        if folder is not None:
            most = min(most, values.most_new_tokens or most if folder.limits is None else folder.limits.new_tokens - 1)
        defaults = Defaults(most, {name: values[name].value for name in SAMPLING})
        asked = requests.read(given, model, defaults, contexts=folder is not None)
        limits = limits_for(asked, model, values, folder)
        config.data = DataConfig(num_sequences=1, prompt_length=limits.prompt, new_tokens=limits.new_tokens)
        rows = min(values.rows, rows_that_fit(config, model, values.cache_bytes))
        config.data.num_sequences = rows
        check_fit(config, stored=values.prefix_cache)
        if PRODUCTS in journal.notes:
            # Products are rounded as in the call that was killed.
            kvjax.products.use_timings(journal.notes[PRODUCTS])
        # As in `experiments.run`.
        exact = "highest" if dtype_of(config.model) == jnp.float32 else None
        with jax.default_matmul_precision(exact):
            # Requests may be short, as those of the server.
            spec = build_spec(config, MIN_SLOTS)
            if values.shared_slots:
                if spec != CacheSpec(full()):
                    raise ConfigError(
                        f"--shared_slots is for --config.policy.name=full with exact storage, not {spec.name}."
                    )
                if reason := refuses_model(model):
                    raise ConfigError(f"--shared_slots cannot be used: {reason}.")
            if codec is not None and spec.storage != dense():
                raise ConfigError(f"--codec codes keys and values that are held as they are, not {spec.storage.name}.")
            runner = Runner(
                calibrated_for(model, spec, given_calibration(config.model)), spec, rows=rows, limits=limits,
                key=jax.random.key(config.seed), prefill_block=config.prefill_block or "auto",
                prefix_store=kvjax.PrefixStore(values.prefix_cache) if values.prefix_cache else None,
                implementation=config.implementation,
            )  # fmt: skip
            print("\n".join(line for line in runner.explain().splitlines() if line.startswith(SHOWN)), flush=True)
            texts, others = list[SharedText](), asked
            if values.shared_slots:
                found, others = shared_texts.divide(asked, model.config.vocab_size, limits)
                texts = [each for each in found if rows_behind(each, found, config, model, values.cache_bytes)]
                behind = {each.index for text in texts for each in text.asked}
                others = [each for each in asked if each.index not in behind]
            if folder is not None:
                folder.begin(asked, limits, journal)
            waiting, shared = [each for each in others if each.index not in journal], ""
            if runner.prefix_store is not None:
                waiting, shared = groups.in_groups(waiting, model.config.vocab_size)
            elif folder is not None:
                waiting = [each for part in groups.by_context(waiting) for each in part]
            if shared:
                print(shared, flush=True)
            start, before = time.perf_counter(), journal.written
            counts, name = [runner.counts], Path(values.requests).name
            for text in texts:
                if left := [each for each in text.asked if each.index not in journal]:
                    # All of the group, so that a run that continues another one has the same arrays.
                    fit = rows_behind(text, texts, config, model, values.cache_bytes)
                    few = min(values.rows, fit, len(text.asked))
                    own = runner_behind(text, texts, runner, few, config.seed)
                    answer(own, iter(left), journal, None, rows=few, name=name)
                    counts.append(own.counts)
                    del own  # its rows and its text
            answer(runner, iter(waiting), journal, folder, rows=rows, name=name)
        journal.shorten()
        seconds = time.perf_counter() - start
        print(summary(counts, journal.written - before, seconds))
        print(f"Wrote {values.output}: {journal.written:,} results, of which {journal.failed:,} are errors")
        return FAILED if journal.failed else 0


def rows_that_fit(config: ExperimentConfig, model: Model, most: int | None) -> int:
    """Returns the number of requests that can be answered at the same time in the bytes that the cache may have.

    Args:
      config: with the sizes of one row.
      model: the model.
      most: bytes of keys and values of all rows; None = any number.

    Raises:
      ConfigError: not even one row fits.
    """
    if most is None:
        return sys.maxsize
    layout = layout_of(config, build_spec(config, MIN_SLOTS), model.config, config.data.prompt_length)
    if rows := most // max_cache_bytes(layout, 1):
        return rows
    raise ConfigError(
        f"--cache_bytes={size(most)} is too small: a row of {config.data.prompt_length:,} + "
        f"{config.data.new_tokens:,} tokens takes {size(max_cache_bytes(layout, 1))}."
    )


def rows_behind(
    text: SharedText, texts: Sequence[SharedText], config: ExperimentConfig, model: Model, most: int | None
) -> int:
    """Returns the number of requests behind a text that can be answered at the same time; 0 if none fits.

    The slots of the text count once, and a row has slots for what follows the text alone.

    Args:
      text: the text.
      texts: all texts; see `runner_behind`.
      config: with the sizes of one row.
      model: the model.
      most: see `rows_that_fit`.
    """
    if most is None:
        return sys.maxsize
    longest = longest_behind(texts)
    own = dataclasses.replace(config, data=dataclasses.replace(config.data, num_sequences=1, prompt_length=longest))
    layout = layout_of(own, CacheSpec(full()), model.config, longest)
    left = most - prefix_bytes(model.config, len(text.tokens), model.dtype.itemsize)
    return max(0, left) // max_cache_bytes(layout, 1)


def longest_behind(texts: Sequence[SharedText]) -> int:
    """Returns the largest number of tokens of a prompt that follow its text."""
    return max(len(each.request.tokens) for text in texts for each in text.asked if each.request is not None)


def runner_behind(text: SharedText, texts: Sequence[SharedText], runner: Runner, rows: int, seed: int) -> Runner:
    """Returns a runner for the requests behind a text, whose slots it holds once.

    Args:
      text: the text.
      texts: all texts, so that their runners have the same programs.
      runner: for the other requests.
      rows: its number of rows.
      seed: of its key.
    """
    model, made = runner.model, runner.prompts
    limits = Limits(longest_behind(texts), made.limits.new_tokens)
    document = contexts.prefill(model, text.tokens, made.spec, implementation=made.implementation)
    return Runner(
        contexts.with_prefix(model, document), made.spec, rows=rows, limits=limits,
        key=jax.random.key(seed), implementation=made.implementation,
    )  # fmt: skip


def check_sampling(values: flags.FlagValues) -> None:
    """Refuses values that every request which says nothing else would be refused for.

    Raises:
      InputError: one is out of range.
    """
    own: dict[str, Any] = {name: values[name].value for name in SAMPLING if values[name].value is not None}
    if own.get("temperature") == 0:
        del own["temperature"]
    Sample(**own)


def about(
    config: ExperimentConfig, values: flags.FlagValues, given: list[tuple[int, bytes]], codec: CacheGen | KVTC | None
) -> JsonObject:
    """Returns the settings that results depend on."""
    used = ("model", "policy", "storage", "selection", "mesh", "rules", "prefill_block", "implementation", "seed")
    own = (
        "rows",
        "cache_bytes",
        "prefix_cache",
        "shared_slots",
        "new_tokens",
        "longest_prompt",
        "most_new_tokens",
        *SAMPLING,
    )
    # With their numbers, which are the names of requests without one.
    digest = hashlib.sha256(b"\n".join(b"%d %s" % each for each in given)).hexdigest()
    found = fields.to_dict(config)
    settings = {name: found[name] for name in used} | {f"--{name}": values[name].value for name in own}
    kept = {} if values.contexts is None else {"--contexts": values.contexts, "--codec": values.codec}
    if codec is not None:
        kept["codec"] = codec.about()  # of a file, its contents too
    return {"requests": digest, FILES: identity.contents(config)} | kept | settings


def limits_for(asked: Sequence[Asked], model: Model, values: flags.FlagValues, folder: Contexts | None) -> Limits:
    """The sizes for all requests: those of flags, of the contexts' first run, or of the largest request that fits.

    Raises:
      ConfigError: flags differ from the sizes of the contexts, or do not say how large these may become.
    """
    if folder is not None and folder.limits is not None:
        # The last token of a context is fed too.
        own = {"longest_prompt": folder.limits.prompt, "most_new_tokens": folder.limits.new_tokens - 1}
        for name, value in own.items():
            if values[name].value not in (None, value):
                raise ConfigError(
                    f"--{name}={values[name].value} is not that of the first run with --contexts={values.contexts!r}, "
                    f"{value}, which all its contexts have; leave it out, or give another folder."
                )
        return folder.limits
    if any(each.keeps for each in asked) and values.most_new_tokens is None:
        raise ConfigError(
            "give --most_new_tokens: how many tokens may follow a prompt in all, given or generated, in this run and "
            "in those that continue its contexts."
        )
    most = model.config.max_positions
    found: list[Request] = [each.request for each in asked if each.request is not None]
    prompts = [len(request.tokens) for request in found]
    tokens = [each.max_new_tokens for each in found if isinstance(each.max_new_tokens, int) and each.max_new_tokens > 0]

    def largest(flag: int | None, sizes: list[int]) -> int:
        return flag or min(max([1, *sizes]), most)

    following = largest(values.most_new_tokens, tokens) + (folder is not None)
    return Limits(largest(values.longest_prompt, prompts), following)


def answer(
    runner: Runner, asked: Iterator[Asked], journal: Journal, folder: Contexts | None, *, rows: int, name: str
) -> None:
    """Answers requests and writes their results.

    Args:
      runner: answers them.
      asked: those whose results the journal does not have, in any order.
      journal: takes the results.
      folder: takes the contexts of requests that keep theirs, and has those that others continue; None = no folder.
      rows: of the runner.
      name: of the file of requests, for messages.
    """
    running: dict[int, Asked] = {}
    timings: dict[str, Any] = journal.notes.get(PRODUCTS, {})
    with tqdm(unit="request", initial=journal.written, disable=None) as bar:

        def put(each: Asked, result: JsonObject) -> None:
            journal.put(each.index, {"id": each.id} | result)
            bar.update()

        def refuse(each: Asked, error: str) -> None:
            print(f"{name}, line {each.line}: {error}", file=sys.stderr, flush=True)
            put(each, {"error": error})

        more = True
        while more or not runner.idle:
            while more and runner.load.waiting < AHEAD * rows:
                taken = next(asked, None)
                more = taken is not None
                if taken is not None:
                    submit(runner, folder, taken, running, refuse)
            progress = runner.step()
            if (now := kvjax.products.timings()) != timings:
                # Before any result that depends on it.
                timings = now
                journal.note(PRODUCTS, now)
            for each in progress:
                if each.result is not None:
                    own = running.pop(each.result.id)
                    if each.result.error is not None:
                        refuse(own, str(each.result.error))
                        continue
                    if folder is not None and each.result.context is not None:
                        try:
                            # Before the result, without which the request is answered again.
                            folder.save(own.id, each.result.context, runner, journal)
                        except KvjaxError as error:
                            refuse(own, str(error))
                            continue
                    put(own, described(own, each.result))
            journal.sync(often=True)


def submit(
    runner: Runner,
    folder: Contexts | None,
    each: Asked,
    running: dict[int, Asked],
    refuse: Callable[[Asked, str], None],
) -> None:
    """Submits a request, or refuses it."""
    if each.request is None:
        return refuse(each, str(each.error))
    try:
        ready = each if folder is None else folder.prepared(each, runner)
        assert ready.request is not None
        running[runner.submit(ready.request)] = ready
    except KvjaxError as error:
        refuse(each, str(error))


def described(each: Asked, result: Result) -> JsonObject:
    """A result as JSON."""
    tokens = [int(token) for token in result.tokens]
    text = None
    if each.text is not None:
        each.text.finish()
        text = each.text.text
    counts = {"prompt_tokens": each.shared + result.prompt, "new_tokens": len(tokens)}
    return {"text": text, "tokens": tokens, "reason": result.reason} | counts


def summary(counts: Sequence[Counts], results: int, seconds: float) -> str:
    """One line: speed, and how well the rows of runners were used."""
    tokens, steps, reads, found, prompts, useful = (
        sum(getattr(each, name) for each in counts)
        for name in ("tokens", "row_steps", "reads", "found_tokens", "prompt_tokens", "useful_row_steps")
    )
    about = f", {found:,} of {prompts:,} prompt tokens found" if found else ""
    return (
        f"{results:,} results in {seconds:,.1f} s: {tokens:,} new tokens ({tokens / seconds:,.1f} per second), "
        f"{100 * useful / max(steps, 1):.1f} % of {steps:,} row-steps useful, {reads:,} reads by the host{about}"
    )
