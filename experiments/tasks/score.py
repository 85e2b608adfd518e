"""How much of its prompts a model recalls under a policy: greedy generation, exact match."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import kvjax
from experiments import stages
from experiments.config import RecallConfig
from experiments.runs import data
from experiments.tasks import prompts, recall
from experiments.tasks.prompts import Prompt
from experiments.tasks.words import HELD_OUT, Words
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import ConfigError
from kvjax.generation.generate import Generation
from kvjax.models.model import Model
from kvjax.policies import Policy

ROWS = 16  # prompts that are generated from at once, unless told otherwise
SPARE_TOKENS = 2  # beyond an answer's own, where a tokenizer splits it otherwise in its context


def check(config: RecallConfig) -> None:
    """Refuses settings that cannot work, before anything is loaded.

    Raises:
      ConfigError: an unknown task, a difficulty that it does not have, or distances that no prompt has.
    """
    for task in config.tasks:
        if task not in recall.TASKS:
            raise ConfigError(f"recall.tasks={task!r} is unknown; known tasks: {', '.join(recall.TASKS)}.")
        if config.difficulty is not None and config.difficulty < recall.EASIEST[task]:
            raise ConfigError(
                f"recall.difficulty={config.difficulty} is too low for {task}; give at least {recall.EASIEST[task]}, "
                "or none for its default."
            )
    if not config.nearest <= config.farthest < config.length:
        raise ConfigError(
            f"recall.nearest={config.nearest}, recall.farthest={config.farthest} and recall.length={config.length} "
            "must ascend: a fact lies from nearest to farthest tokens before the end of its prompt."
        )


def make_prompts(config: RecallConfig, model: Model, seed: int, words: Words = HELD_OUT) -> dict[str, list[Prompt]]:
    """The prompts of each task, all of one length.

    Raises:
      ConfigError: as `check`, a model without a tokenizer, or facts that have no room in a prompt.
    """
    check(config)
    tokenizer = model.tokenizer
    if not config.tasks:
        return {}
    if tokenizer is None:
        raise ConfigError(
            "recall tasks need a tokenizer, and the model has none; give --config.model.path=FOLDER, or "
            "--config.recall.tasks=none."
        )
    return {
        task: prompts.make_many(
            task, count=config.prompts, length=config.length, nearest=config.nearest, farthest=config.farthest,
            difficulty=recall.DIFFICULTY[task] if config.difficulty is None else config.difficulty,
            encode=lambda text: tokenizer.encode(text, bos=False), bos=data.opening(model), seed=seed, words=words,
        )
        for task in config.tasks
    }  # fmt: skip


def exact_matches(
    model: Model, asked: Mapping[str, Sequence[Prompt]], policy: Policy | CacheSpec, **options: Any
) -> dict[str, float]:
    """Task -> share of its prompts that greedy generation under `policy` answers exactly, to the last character.

    Args:
      model: has a tokenizer.
      asked: prompts of each task.
      policy: the cache.
      options: see `exact_answers`.
    """
    return shares(exact_answers(model, asked, policy, **options))


def shares(found: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Returns the share of right answers of each task."""
    return {task: sum(right) / len(right) for task, right in found.items()}


def exact_answers(
    model: Model,
    asked: Mapping[str, Sequence[Prompt]],
    policy: Policy | CacheSpec,
    *,
    watch: Callable[[Generation], None] | None = None,
    rows: int = ROWS,
    limits: Limits | None = None,
    **options: Any,
) -> dict[str, list[bool]]:
    """Task -> whether greedy generation under `policy` answers each of its prompts exactly, to the last character.

    Args:
      model: has a tokenizer.
      asked: prompts of each task.
      policy: the cache.
      watch: is called with the result of each batch.
      rows: prompts that are generated from at once.
      limits: the sizes that programs are compiled for; None for those of these prompts.
      options: for `kvjax.generate`.

    Texts are compared, not tokens: tokenizers differ in how they would split an answer that stands alone.
    """
    if not (every := [prompt for made in asked.values() for prompt in made]):
        return {}
    assert model.tokenizer is not None  # `make_prompts` refuses models without
    # One program for all tasks.
    limits = limits or Limits(
        prompt=max(prompt.tokens.size for prompt in every),
        new_tokens=max(prompt.answer.size for prompt in every) + SPARE_TOKENS,
        shortest=min(prompt.tokens.size for prompt in every),
    )
    found: dict[str, list[bool]] = {}
    for task, made in asked.items():
        longest = max(prompt.answer.size for prompt in made) + SPARE_TOKENS
        found[task] = []
        for start in range(0, len(made), rows):
            part = made[start : start + rows]
            stages.enter(f"{task}, prompts {start + 1} to {start + len(part)} of {len(made)}")
            tokens = np.stack([prompt.tokens for prompt in part])
            result = kvjax.generate(model, tokens, policy, max_new_tokens=longest, limits=limits, **options)
            if watch is not None:
                watch(result)
            found[task] += [answers(model, row, prompt) for row, prompt in zip(result.tokens, part, strict=True)]
    return found


def answers(model: Model, tokens: np.ndarray, prompt: Prompt) -> bool:
    """Whether generated tokens [n] begin with the answer of a prompt."""
    assert model.tokenizer is not None
    return bool(model.tokenizer.decode(tokens).lstrip().startswith(prompt.text.lstrip()))
