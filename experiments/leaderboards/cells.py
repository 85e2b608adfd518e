"""The cells of a leaderboard: each is a cache at a budget, on every text and every task, and an experiment each."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments import config as configs
from experiments import specs
from experiments.config import ExperimentConfig, PolicyConfig, TasksConfig
from experiments.leaderboards.config import FULL, WHOLE, LeaderboardConfig
from experiments.leaderboards.generation import GENERATED, OPENING, generation_of
from experiments.leaderboards.turns import turns_of
from experiments.sweeps.sharing import MISSING
from kvjax.errors import ConfigError
from kvjax.specs import parse
from kvjax.typing import JsonObject

PAGE = 16  # tokens, to a multiple of which ``{tokens}`` is rounded
MACHINE = ("device", "cpu", "jax", "commit")  # of the environment of a result


class Cell(NamedTuple):
    """One cache at one budget.

    Attributes:
      cache: as the config has it.
      budget: share of the prompt, or of prompt and new tokens of a long generation; None if the cache has no budget.
    """

    cache: str
    budget: float | None


def cells(config: LeaderboardConfig) -> dict[str, list[Cell]]:
    """Returns the cells of each cache.

    Raises:
      ConfigError: if a cache is listed twice, a budget is no share, or a cache has none.
    """
    listed = [*config.caches, *config.unlimited]
    if doubled := next((cache for cache in listed if listed.count(cache) > 1), None):
        raise ConfigError(f"{doubled!r} is listed twice; give each cache once, in caches or in unlimited.")
    if not config.budgets or not all(0 < budget <= 1 for budget in config.budgets):
        raise ConfigError(f"budgets must be shares of the prompt, above 0 and at most 1; got {config.budgets}.")
    found = {cache: [Cell(cache, budget) for budget in config.budgets] for cache in config.caches}
    if config.generated and config.data.prompt is not None:
        raise ConfigError("a long generation continues a text; give data.prompt=none, or generated=0.")
    for cache, own in found.items():
        made = [specs.build_spec(next(experiments(config, cell))[1]) for cell in own]
        if len(made) > 1 and all(spec == made[0] for spec in made):
            raise ConfigError(f"{cache!r} is the same cache at every budget; list it in unlimited.")
    return found | {cache: [Cell(cache, None)] for cache in config.unlimited}


def filled(cell: Cell, length: int) -> str:
    """Returns the text of a cell's cache with its budget in it.

    Args:
      cell: the cell.
      length: tokens of which the budget is a share.
    """
    share = cell.budget or WHOLE
    tokens = max(PAGE, round(share * length / PAGE) * PAGE)
    return cell.cache.replace("{share}", f"{share:g}").replace("{tokens}", str(tokens))


def experiments(config: LeaderboardConfig, cell: Cell) -> Iterator[tuple[JsonObject, ExperimentConfig]]:
    """Yields the experiments of a cell: one for each text, the first of which has the tasks too, and a long generation.

    Yields:
      The cell and the text of the experiment, and its config, whose baseline is the full cache.
    """
    texts = config.texts or (None,)
    for number, text in enumerate(texts):
        made = dataclasses.replace(
            _with_cache(config, cell, config.data.prompt_length), data=dataclasses.replace(config.data, text=text),
            tasks=config.tasks if number == 0 else TasksConfig(), repeats=config.repeats if number == 0 else 0,
        )  # fmt: skip
        yield {"cache": cell.cache, "budget": cell.budget, "text": text}, made
    if config.generated:
        length = config.opening + config.generated
        made = _with_cache(config, cell, length)
        if cell.budget is not None:
            # A share of the opening alone would be a few slots.
            made.policy.budget = max(1, round(cell.budget * length))
        made.data = dataclasses.replace(
            config.data, text=texts[0], prompt_length=config.opening, new_tokens=config.generated, chunk=None
        )
        sizes = {GENERATED: config.generated, OPENING: config.opening}
        yield {"cache": cell.cache, "budget": cell.budget, "text": texts[0], **sizes}, made


def _with_cache(config: LeaderboardConfig, cell: Cell, length: int) -> ExperimentConfig:
    """Returns an experiment with a cell's cache.

    Args:
      config: the leaderboard.
      cell: the cell.
      length: tokens of which a budget in the cache's text is a share.

    Raises:
      ConfigError: if the cache has two storages, or two selections.
    """
    policy, *others = (part.strip() for part in filled(cell, length).split(configs.JOINED))
    axes: dict[parse.Axis, str] = {}
    for part in others:
        axis = parse.axis_of(part, ("storage", "selection"))
        if axis in axes:
            raise ConfigError(f"{cell.cache!r} has two parts that are a {axis}; give one of each.")
        axes[axis] = part
    return ExperimentConfig(
        name=config.name, model=config.model, policy=PolicyConfig(name=policy, budget=cell.budget or WHOLE),
        baselines=(FULL,), tasks=TasksConfig(), implementation=config.implementation, repeats=0, seed=config.seed,
        output=config.output, storage=axes.get("storage", configs.DENSE),
        selection=axes.get("selection", configs.EVERYTHING),
    )  # fmt: skip


def command(given: Sequence[str], cell: Cell | None = None) -> str:
    """Returns the command that measures all cells, or one.

    Args:
      given: the arguments of the command that measured all, without the folder of results.
      cell: the cell; None = all.
    """
    parts = ["python", "-m", "experiments.leaderboard"]
    if cell is None:
        return shlex.join([*parts, *given])
    replaced = ("--config.caches=", "--config.unlimited=", "--config.budgets=", "--add=")
    parts += [argument for argument in given if not argument.startswith(replaced)]
    if cell.budget is None:
        parts += ["--config.caches=none", f"--config.unlimited={cell.cache}"]
    else:
        parts += ["--config.unlimited=none", f"--config.caches={cell.cache}", f"--config.budgets={cell.budget:g}"]
    return shlex.join(parts)


def row(cell: Cell, found: Sequence[Mapping], given: Sequence[str]) -> JsonObject:
    """Returns what the page shows of a cell, and what it computes intervals from.

    Args:
      cell: the cell.
      found: the results of its experiments, as `experiments.programs.sweep.run_all` returns them.
      given: see `command`.
    """
    made: JsonObject = {"cache": cell.cache, "budget": cell.budget, "command": command(given, cell)}
    # A cell keeps its scores where its generation fails, such as with a budget that is too small for the policy.
    needed = [result for result in found if GENERATED not in result["swept"] or result["status"] == MISSING]
    if failed := [result for result in needed if result["status"] != "ok"]:
        return made | {"status": failed[0]["status"], "error": failed[0].get("error", "left to another worker")}
    nats, full, tasks = {}, {}, {}
    for result in needed:
        text = result["swept"]["text"] or "generated"
        own, whole = _rows(result)
        nats[text], full[text] = own["nats_by_row"], whole["nats_by_row"]
        for task, scores in own["tasks"].items():
            others = whole["tasks"][task]
            tasks[task] = {"scores": scores["by_question"], "full": others["by_question"]}
            if "by_turn" in scores:
                tasks[task]["turns"] = {"cache": turns_of(scores), FULL: turns_of(others)}
    own, whole = _rows(found[0])
    return made | {
        "status": "ok", "slots": own["slots"], "kv_bytes": own["kv_bytes"], "full_kv_bytes": own["full_kv_bytes"],
        "footprint": own.get("footprint"), "read": own.get("read"),
        "decode_tokens_per_second": own["decode_tokens_per_second"],
        "full_decode_tokens_per_second": whole["decode_tokens_per_second"], "agreement": own["agreement"],
        "seconds": sum(result["seconds"] for result in found),
        "nats": nats, "full_nats": full, "tasks": tasks,
        **_generation(found),
        "machine": {name: found[0]["environment"][name] for name in MACHINE},
    }  # fmt: skip


def _generation(found: Sequence[Mapping]) -> JsonObject:
    """Returns what a row keeps of a cell's generation, or its error, if there is one among the results."""
    long = next((result for result in found if GENERATED in result["swept"]), None)
    if long is None:
        return {}
    if long["status"] != "ok":
        return {GENERATED: {"error": long.get("error")}}
    own, whole = _rows(long)
    return {GENERATED: generation_of(own, whole, long["swept"][OPENING])}


def _rows(result: Mapping) -> tuple[JsonObject, JsonObject]:
    """Returns the cache's own row of a result, and the full cache's, which is the same if that is measured."""
    rows = result["rows"]
    return rows[-1], next((each for each in rows if each["policy"] == FULL), rows[-1])
