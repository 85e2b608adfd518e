"""What an experiment is: dataclasses whose every field the command line can override, and configs by name.

``--config=h2o_tiny`` finds configs/h2o_tiny.py; ``--config.policy.budget=0.1`` overrides one field, checked by the kind
that its annotation names. No postponed annotations here: `config_flags` reads the types themselves.
"""

import copy
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from kvjax import policies
from kvjax.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent / "configs"

# The kinds of fields: what a value is in Python, and how an error describes what the command line accepts.
Count = Annotated[int, "a whole number of at least 1"]
OptionalCount = Annotated[int | None, "a whole number of at least 0, or none"]
Seed = Annotated[int, "a whole number of at least 0"]
Budget = Annotated[int | float, "slots as a whole number (256), or a fraction of the prompt as a decimal (0.2)"]
Text = Annotated[str, "text"]
OptionalText = Annotated[str | None, "text, or none"]
Names = Annotated[tuple[str, ...], "names separated by commas, or none"]


def _is_none(text: str) -> bool:
    return text.strip().lower() in ("none", "")


def _whole(text: str, minimum: int) -> int:
    if not re.fullmatch(r"[+-]?\d+", text.strip()) or int(text) < minimum:
        raise ValueError(text)
    return int(text)


def _budget(text: str) -> int | float:
    """``256`` is slots and ``256.0`` is not: the decimal point says which. Ranges are the policy's to judge."""
    if re.fullmatch(r"[+-]?\d+", text.strip()):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


#: How each kind reads the text of a command line; raises ValueError when it cannot.
KINDS: dict[Any, Callable[[str], Any]] = {
    Count: lambda text: _whole(text, 1),
    OptionalCount: lambda text: None if _is_none(text) else _whole(text, 0),
    Seed: lambda text: _whole(text, 0),
    Budget: _budget,
    Text: str,
    # Empty text is not the same as none: an empty prompt is refused, not replaced.
    OptionalText: lambda text: None if text.strip().lower() == "none" else text,
    Names: lambda text: () if _is_none(text) else tuple(name.strip() for name in text.split(",") if name.strip()),
}


def read(kind: Any, text: str) -> Any:
    """The value that `text` means for a field of this kind.

    Raises:
      ConfigError: with what the kind accepts.
    """
    try:
        return KINDS[kind](text)
    except ValueError:
        raise ConfigError(f"{text!r} is not valid here; give {kind.__metadata__[0]}.") from None


@dataclasses.dataclass
class ModelConfig:
    """Attributes:
    path: a checkpoint folder or a Hugging Face hub id; None = random weights.
    shape: a decoder of `kvjax.models.shapes`: for random weights, and for what a model needs before it is loaded.
    dtype: of the weights and the cache; None = float32 on a CPU, bfloat16 elsewhere.
    """

    path: OptionalText = None
    shape: OptionalText = None
    dtype: OptionalText = None


@dataclasses.dataclass
class PolicyConfig:
    """Attributes:
    name: one of `kvjax.policies.POLICIES`.
    budget: slots per KV head (int), or a fraction of each row's prompt (float in (0, 1]).
    recent, sinks, positions, group_reduce: as in the policy's factory; None = its default.
    """

    name: Text = "h2o"
    budget: Budget = 0.2
    recent: OptionalCount = None
    sinks: OptionalCount = None
    positions: OptionalText = None
    group_reduce: OptionalText = None


@dataclasses.dataclass
class DataConfig:
    """Attributes:
    text: a text file, cut into `num_sequences` rows; None = a text that the project generates.
    prompt: continue this prompt instead (no perplexity: there is no true continuation).
    num_sequences: rows; prompt_length: tokens of each that are the prompt; new_tokens: tokens scored, and generated.
    """

    text: OptionalText = None
    prompt: OptionalText = None
    num_sequences: Count = 4
    prompt_length: Count = 256
    new_tokens: Count = 64


@dataclasses.dataclass
class ExperimentConfig:
    """Attributes:
    name: names the results.
    baselines: policies to compare with, under the same budget; agreement is measured against ``full`` if it is here.
    mesh: ``data:2,model:4``, or nothing for one device.
    prefill_block: the prompt goes in blocks of so many tokens; None = in one shot.
    repeats: timed repetitions, of which the fastest counts.
    seed: of random weights and of the generated text.
    output: the folder in which a run makes its own.
    """

    name: Text = "experiment"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    baselines: Names = ("full",)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    mesh: Text = ""
    prefill_block: OptionalCount = None
    repeats: Count = 3
    seed: Seed = 0
    output: Text = "results"


def names() -> list[str]:
    """Every config of the project."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def by_name(name: str) -> ExperimentConfig:
    """The config of configs/`name`.py, or of a Python file given by its path.

    Raises:
      ConfigError: there is none, or its file has no `get_config`.
    """
    path = Path(name) if name.endswith(".py") else FOLDER / f"{name}.py"
    if not path.is_file() or (path.parent == FOLDER and path.stem not in names()):
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"unknown config {name!r}; {hint}known configs: {', '.join(names())}, or a path to a .py file."
        )
    spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    config = module.get_config() if hasattr(module, "get_config") else None
    if not isinstance(config, ExperimentConfig):
        raise ConfigError(f"{path.name} must define get_config() that returns an ExperimentConfig.")
    return config


def kind_of(path: str) -> Any:
    """The kind of the field at a dotted path such as ``policy.budget``.

    Raises:
      ConfigError: no such field, or a group of fields; with the valid ones.
    """
    here: Any = ExperimentConfig
    walked: list[str] = []
    for part in path.split("."):
        fields = (
            {field.name: field.type for field in dataclasses.fields(here)} if dataclasses.is_dataclass(here) else {}
        )
        if part not in fields:
            where = f"{'.'.join(walked)} has" if walked else "a config has"
            valid = ", ".join(fields) if fields else "no fields of its own"
            close = difflib.get_close_matches(path, leaves(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"unknown field {path!r}: {where} {valid}{hint}")
        here = fields[part]
        walked.append(part)
    if dataclasses.is_dataclass(here):
        inner = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(here))
        raise ConfigError(f"{path!r} is a group of fields; set one of {inner}.")
    return here


def leaves(cls: Any = ExperimentConfig, prefix: str = "") -> list[str]:
    """Every dotted path that can be overridden."""
    found = []
    for field in dataclasses.fields(cls):
        inner = dataclasses.is_dataclass(field.type)
        found += leaves(field.type, f"{prefix}{field.name}.") if inner else [prefix + field.name]
    return found


def override(config: ExperimentConfig, path: str, value: Any) -> ExperimentConfig:
    """A copy of `config` with one field set (`value` as text, or already of the field's type)."""
    kind = kind_of(path)
    config = copy.deepcopy(config)
    *groups, field = path.split(".")
    holder: Any = config
    for group in groups:
        holder = getattr(holder, group)
    setattr(holder, field, read(kind, value) if isinstance(value, str) else value)
    return config


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """As JSON would hold it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def digest(config: ExperimentConfig) -> str:
    """Twelve hex digits that name what would be computed: every field but the output folder."""
    fields = {key: value for key, value in to_dict(config).items() if key != "output"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def build_policy(config: PolicyConfig) -> policies.Policy:
    """The policy that a config describes.

    Raises:
      PolicyError, ConfigError: an unknown policy, a setting that it does not take, or values that cannot work.
    """
    accepted = policies.accepts(config.name)
    given = {key: value for key, value in dataclasses.asdict(config).items() if value is not None and key != "name"}
    # Every config carries a budget; `full` has no use for one.
    ignored = {"budget"} - accepted
    if refused := sorted(given.keys() - accepted - ignored):
        setting = f"policy.{refused[0]}={given[refused[0]]!r}"
        raise ConfigError(f"policy {config.name} does not take {setting}; it takes {', '.join(sorted(accepted))}.")
    return policies.by_name(config.name, **{key: value for key, value in given.items() if key in accepted})


def baseline(config: ExperimentConfig, name: str) -> PolicyConfig:
    """A policy to compare with: the same budget and positions, everything else its default."""
    if name == config.policy.name:
        return config.policy
    accepted = policies.accepts(name)
    shared = {key: getattr(config.policy, key) for key in ("budget", "positions") if key in accepted and name != "full"}
    return PolicyConfig(name=name, **shared)
