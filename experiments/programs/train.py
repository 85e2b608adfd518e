"""Trains a small decoder and exports it; see `experiments.train`."""

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from tqdm.auto import tqdm

from experiments import fields, results
from experiments.runs import machine
from experiments.tasks.prompts import NoRoom, make_many
from experiments.tasks.recall import DIFFICULTY
from experiments.training import activations, checkpoints, corpus, evaluate
from experiments.training.config import BY_STAGE, TrainConfig, check, decoder_config, files, past, scheduled, stage
from experiments.training.induction import grown, initial_parameters
from experiments.training.mixture import Kind, Mixture
from experiments.training.optimizer import optimizer
from experiments.training.run_folder import CONFIG, METRICS, Diverged, Log, check_same_past, removed_if_unused
from kvjax import devices as hardware
from kvjax.checkpoint.huggingface import load, save
from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel import distributed, sharding
from kvjax.typing import PyTree

Array = jax.Array
EVALUATION_WINDOWS, EVALUATION_PROMPTS = 16, 32
ANSWER_TOKENS = 40  # of a window, left to the answer


def loss_of(
    params: PyTree, apply: Any, tokens: Array, kind: Array, answer_weight: float
) -> tuple[Array, dict[str, Array]]:
    """Mean negative log-likelihood in nats, answers weighted, and the mean of each kind (NaN where there is none).

    Args:
      tokens, kind: [B, T + 1], see `mixture.Kind`.
    """
    logits, _ = apply({"params": params}, tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    kind = kind[:, 1:]
    weight = jnp.asarray([0.0, 1.0, answer_weight, 1.0])[kind]
    total = jnp.sum(nats * weight) / jnp.sum(weight)
    return total, {"total": total} | {k.name.lower(): jnp.mean(nats, where=kind == k) for k in Kind if k}


@functools.partial(jax.jit, donate_argnames="state")
def train_step(
    state: TrainState, tokens: Array, kind: Array, answer_weight: float
) -> tuple[TrainState, dict[str, Array]]:
    gradients, losses = jax.grad(loss_of, has_aux=True)(state.params, state.apply_fn, tokens, kind, answer_weight)
    return state.apply_gradients(grads=gradients), losses


def train(config: TrainConfig, *, command: str = "", progress: bool | None = None, writers: Sequence[str] = ()) -> Path:
    """Trains, or goes on training, and exports.

    Args:
      config: the settings.
      command: that is logged.
      progress: whether a bar is shown; None = on a terminal.
      writers: that get what metrics.jsonl gets, see `experiments.writers`.

    Returns:
      The exported model's folder.

    Raises:
      ConfigError: settings that cannot work, or an output folder that holds a run with others.
    """
    check(config)
    activations.check_devices(config.activations, jax.local_devices())
    files(config)
    with removed_if_unused(Path(config.output)):
        return _train(config, command, progress, writers)


def _train(config: TrainConfig, command: str, progress: bool | None, writers: Sequence[str]) -> Path:
    """See `train`."""
    changed = config.schedule_steps not in (None, config.steps)
    config = scheduled(config)
    folder = Path(config.output)
    # As many devices as every stage's windows can be divided among.
    devices = math.gcd(jax.device_count(), *(config.batch_tokens // context for context in config.contexts))
    mesh = sharding.make_mesh({"data": devices})
    distributed.check_mesh(mesh)
    everywhere, by_row = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
    results.make_folder(folder)
    with jax.set_mesh(mesh), checkpoints.manager(folder, config.checkpoint_every) as manager:
        start = manager.latest_step() or 0
        if start:
            advice = " With --config.schedule_steps=none the schedule is not scaled to steps." if changed else ""
            check_same_past(config, start, lambda each: dict(sorted(past(each, start).items())), advice=advice)
        with distributed.first_before_others():
            before = _start_model(config, folder) if config.start else None
            # The first process writes the tokenizer.
            mixture, held_out = corpus.load(config, folder, resume=bool(start or before or not distributed.is_first()))
        checksums = corpus.checksums(config)
        decoder = decoder_config(config, mixture.bos)
        apply = activations.forward(decoder, config.activations, config.offload_share)

        @functools.partial(jax.jit, out_shardings=everywhere)
        def begin(params: PyTree) -> TrainState:
            return TrainState.create(apply_fn=apply, params=params, tx=optimizer(config))

        initial = before.params if before else initial_parameters(decoder, jax.random.key(config.seed))
        state = begin(jax.tree.map(lambda leaf: distributed.put(leaf, everywhere), initial))
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))
        if distributed.is_first():
            results.write(folder / CONFIG, results.to_json(fields.to_dict(config)))
        log = Log(folder / METRICS, start, config, writers)
        environment = machine.environment()
        about = _offload(config, decoder, devices) if config.activations == "offload" else {}
        log.write(
            kind="start", step=start, command=command, devices_used=devices, **about, **environment, sha256=checksums
        )
        bar = tqdm(total=config.steps, initial=start, unit="step", disable=None if progress is None else not progress)
        in_log = progress is None and not sys.stderr.isatty() and distributed.is_first()
        since, logged = time.perf_counter(), start
        for step in range(start, config.steps):
            at = stage(config, step)
            context = config.contexts[at]
            batch = mixture.batch(
                step, config.batch_tokens // context, context,
                **{name: getattr(config.mixture, name)[at] for name in BY_STAGE},
            )  # fmt: skip
            placed = [distributed.put(each, by_row) for each in batch]
            state, losses = train_step(state, *placed, config.mixture.answer_weight)
            done, last = step + 1, step + 1 == config.steps
            if done % config.log_every == 0 or last:
                # NaN of a kind is a kind that this batch does not have.
                losses = distributed.to_host(losses)
                values = {name: float(value) for name, value in losses.items() if not np.isnan(value)}
                if not np.isfinite(losses["total"]):
                    raise Diverged(f"the loss is {losses['total']} at step {done}; lower optimizer.learning_rate.")
                speed = round((done - logged) * config.batch_tokens / (time.perf_counter() - since))
                since, logged = time.perf_counter(), done
                log.write(kind="loss", step=done, context=context, **values, tokens_per_second=speed)
                shown = {name: f"{value:.2f}" for name, value in values.items()} | {"tok/s": speed}
                bar.set_postfix(shown)
                if in_log:
                    losses_now = ", ".join(f"{name} {value}" for name, value in shown.items())
                    print(f"step {done} of {config.steps}: {losses_now}", file=sys.stderr, flush=True)
            bar.update()
            if done % config.evaluate_every == 0 or last:
                began = time.perf_counter()
                scores = evaluated(state.params, decoder, mixture, held_out, context)
                log.write(kind="evaluation", step=done, context=context, **scores)
                bar.write(f"step {done}: " + ", ".join(f"{name} {value:.3f}" for name, value in scores.items()))
                since += time.perf_counter() - began
            manager.save(done, args=ocp.args.StandardSave(state), force=last)
        bar.close()
        log.close()
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), distributed.to_host(state.params))
    if distributed.is_first():
        save(Model(decoder, params, load_tokenizer(folder, decoder)), folder / "model")
    return folder / "model"


def _offload(config: TrainConfig, decoder: DecoderConfig, devices: int) -> dict[str, float | None]:
    """Returns the share of layers that are offloaded, and the one that is recommended for the longest windows."""
    context = config.contexts[-1]
    known = hardware.DEVICES.get(jax.local_devices()[0].device_kind)
    recommended = None if known is None else activations.recommended_share(
        decoder, known, rows=config.batch_tokens // context // devices, tokens=context,
        host_bytes=(hardware.host_memory() or math.inf) / jax.local_device_count(),
    )  # fmt: skip
    return {"offload_share": config.offload_share, "recommended_offload_share": recommended}


def _start_model(config: TrainConfig, folder: Path) -> Model:
    """The model that a run begins with; its tokenizer becomes the run's."""
    model = load(config.start, dtype="float32")
    if model.tokenizer is None:
        raise ConfigError(f"start={config.start!r} has no tokenizer.")
    decoder = decoder_config(config, model.config.bos_token_id or 0)
    # The windows are of each layer, and follow from their number.
    expected = dataclasses.replace(decoder, num_layers=decoder.num_layers - len(config.new_layers), windows=())
    if model.config != expected:
        but = " without new_layers" if config.new_layers else ""
        raise ConfigError(f"start={config.start!r} is {model.config}; this run's decoder{but} is {expected}.")
    model.tokenizer.save(folder)
    params = grown(model.params, decoder, config.new_layers, jax.random.key(config.seed))
    return dataclasses.replace(model, config=decoder, params=params)


def evaluated(
    params: PyTree, decoder: DecoderConfig, mixture: Mixture, held_out: Sequence[corpus.Text], context: int
) -> dict[str, float]:
    """Bits per byte of each held-out text, and the share of exact matches of each recall task that has room."""
    scores = {
        text.name: evaluate.bits_per_byte(
            params, decoder, text, bos=mixture.bos, context=context, windows=EVALUATION_WINDOWS
        )
        for text in held_out
    }
    # Most of the way back, where facts and question leave room for that.
    near, far = (0.7, 0.88) if context >= 1024 else (0.5, 0.6)
    for task, level in DIFFICULTY.items():
        with contextlib.suppress(NoRoom):
            asked = make_many(
                task, count=EVALUATION_PROMPTS, difficulty=level, length=context - ANSWER_TOKENS,
                nearest=int(near * context), farthest=int(far * context),
                encode=lambda text: mixture.encode([text])[0], bos=[mixture.bos], seed=0,
            )  # fmt: skip
            scores[task] = evaluate.exact_match(params, decoder, asked)
    return scores
