"""Configs of training runs; every field can be overridden on the command line (see `experiments.fields`)."""

import dataclasses
import glob
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from experiments import fields
from experiments.fields import Count, Counts, Names, Number, Numbers, OptionalCount, Text, Whole
from experiments.tasks import recall
from experiments.training import layouts
from kvjax.arguments import choice_argument
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

if TYPE_CHECKING:
    from kvjax.models.config import DecoderConfig

BY_STAGE = ("repeat_fraction", "invented_fraction", "wordy_fraction")  # of the mixture
SHORTEST = 16  # tokens of a window
ACTIVATIONS = ("keep", "recompute", "offload")  # see `experiments.training.activations`
SMALLEST_VOCABULARY = 257
ROPE_THETA = 500_000.0  # LLaMA 3's: more features turn slowly enough to match over the whole context


@dataclasses.dataclass
class DecoderShape:
    """A LLaMA-style decoder with tied embeddings.

    Attributes:
    vocab_size: the number of tokens of the vocabulary.
    hidden_size: the number of features of a token between layers.
    num_layers: the number of layers.
    num_heads: the number of query heads of a layer.
    num_kv_heads: the number of KV heads of a layer.
    mlp_size: the number of features inside an MLP.
    """

    vocab_size: Count = 2048
    hidden_size: Count = 256
    num_layers: Count = 4
    num_heads: Count = 4
    num_kv_heads: Count = 2
    mlp_size: Count = 704


@dataclasses.dataclass
class MixtureConfig:
    """Attributes:
    recall_fraction: the share of every window that consists of facts, questions and answers.
    answer_weight: the weight of an answer's tokens in the loss, relative to those of a text.
    repeat_fraction: the share of the windows that only repeat one sequence of tokens, by stage.
    invented_fraction: the share of the episodes with random wording (`experiments.tasks.wording`), by stage.
    wordy_fraction: the share of these episodes with words between a name and its value; the others have symbols.
    task_shares: the relative frequencies of recall.TASKS, in their order.
    story_fraction: the share of generated stories in the training text.
    question_fraction: the share of generated passages with questions and answers in the training text.
    layouts: how the texts are divided into lines (`experiments.training.layouts`); each text is included in all of
      these layouts, and held-out texts are scored in all of them.
    common_words: the number of the texts' most frequent words that tasks use in addition to their nouns.
    """

    recall_fraction: Number = 0.4
    answer_weight: Number = 4.0
    repeat_fraction: Numbers = (0.0,)
    invented_fraction: Numbers = (0.5,)
    wordy_fraction: Numbers = (0.5,)
    task_shares: Numbers = (0.15, 0.2, 0.35, 0.2, 0.1)
    story_fraction: Number = 0.08
    question_fraction: Number = 0.0
    layouts: Names = ("wrapped",)
    common_words: Count = 10_000


@dataclasses.dataclass
class OptimizerConfig:
    """Attributes:
    learning_rate: the learning rate of the projections (Muon, in units of Adam's learning rate).
    embedding_learning_rate: the learning rate of embeddings and norms (Adam).
    warmup_steps: the number of steps at a cycle's start in which the rate rises linearly from 0.
    cycle_ends: the steps at which a cycle ends and the rate rises again from 0 (WSD-S, arXiv:2410.05192); the last
      cycle ends with the run.
    decay_steps: the number of steps at each cycle's end in which the rate falls linearly to 0, one number per cycle.
    weight_decay: the weight decay of the projections.
    clip: the largest global norm of a gradient.
    """

    learning_rate: Number = 8e-3
    embedding_learning_rate: Number = 8e-3
    warmup_steps: Count = 30
    cycle_ends: Counts = ()
    decay_steps: Counts = (600,)
    weight_decay: Number = 0.1
    clip: Number = 1.0


@dataclasses.dataclass
class TrainConfig:
    """Attributes:
    name: the name of the run.
    texts: text files, folders of text files or glob patterns.
    held_out: the file names of texts that are used for evaluation only.
    decoder: see `DecoderShape`.
    mixture: see `MixtureConfig`.
    optimizer: see `OptimizerConfig`.
    contexts: the number of tokens of a window in each stage, the longest last. Retrieval heads form in time quadratic
      in the context (arXiv:2511.01033), so that short contexts come first.
    stage_ends: the step at which each stage ends, except the last.
    batch_tokens: the number of tokens of a step.
    steps: the number of steps of the run.
    schedule_steps: the number of steps that stage_ends and the optimizer's warmup_steps, cycle_ends and decay_steps
      refer to; if `steps` differs, they are scaled in proportion. None = they are not scaled.
    activations: where the results of layers are until the backward pass: keep (on the device), recompute, or offload
      (the outputs of projections in host memory; the rest is recomputed).
    offload_share: the share of layers whose results are offloaded; the others are recomputed. A run's log has the
      share that MEMO's formula recommends, where the speed of the device is known.
    evaluate_every: the number of steps between evaluations; the last one is at the end.
    checkpoint_every: the number of steps between checkpoints.
    log_every: the number of steps between log lines.
    start: a model of this shape, as for `kvjax.load`, whose weights and tokenizer the run starts from; "" = random
      weights that include an induction head, and a tokenizer trained on the texts.
    new_layers: the indices of layers, from 0, that `start` does not have; they are initialized as the identity.
    seed: the random seed of weights, windows and tasks.
    output: the folder of the run; a run that already exists there continues from its last checkpoint.
    """

    name: Text = "train"
    texts: Names = ()
    held_out: Names = ()
    decoder: DecoderShape = dataclasses.field(default_factory=DecoderShape)
    mixture: MixtureConfig = dataclasses.field(default_factory=MixtureConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    contexts: Counts = (1024,)
    stage_ends: Counts = ()
    batch_tokens: Count = 4096
    steps: Count = 3000
    schedule_steps: OptionalCount = None
    activations: Text = "keep"
    offload_share: Number = 1.0
    evaluate_every: Count = 250
    checkpoint_every: Count = 100
    log_every: Count = 10
    start: Text = ""
    new_layers: Counts = ()
    seed: Whole = 0
    output: Text = "results/train"


def check(config: TrainConfig) -> None:
    """Refuses, before anything is read or trained, settings that do not fit together.

    Raises:
      ConfigError: what was given, and what would be valid.
    """
    shape, contexts, ends = config.decoder, config.contexts, config.stage_ends
    by_stage = {name: getattr(config.mixture, name) for name in BY_STAGE}
    if len(ends) != len(contexts) - 1 or list(ends) != sorted(set(ends)):
        raise ConfigError(
            f"contexts={contexts} has {len(contexts)} stages, which need {len(contexts) - 1} ascending stage_ends, not "
            f"{ends}."
        )
    for name, shares in by_stage.items():
        if len(shares) != len(contexts):
            raise ConfigError(
                f"contexts={contexts} has {len(contexts)} stages; give {len(contexts)} of mixture.{name}, not {shares}."
            )
        if max(shares) > 1:
            raise ConfigError(f"mixture.{name}={shares} are shares; give numbers from 0 to 1.")
    if list(contexts) != sorted(contexts) or contexts[0] < SHORTEST:
        raise ConfigError(f"contexts={contexts} must ascend from at least {SHORTEST} tokens.")
    layouts.check(config.mixture.layouts)
    if config.mixture.recall_fraction > 1:
        raise ConfigError(
            f"mixture.recall_fraction={config.mixture.recall_fraction} is a share; give a number from 0 to 1."
        )
    if len(config.mixture.task_shares) != len(recall.TASKS) or not sum(config.mixture.task_shares):
        raise ConfigError(
            f"mixture.task_shares={config.mixture.task_shares} must be {len(recall.TASKS)} numbers, not all 0, for "
            f"{', '.join(recall.TASKS)}."
        )
    cycles, decays = config.optimizer.cycle_ends, config.optimizer.decay_steps
    name, steps = ("schedule_steps", config.schedule_steps) if config.schedule_steps else ("steps", config.steps)
    if len(decays) != len(cycles) + 1 or list(cycles) != sorted({*cycles}) or (cycles and cycles[-1] >= steps):
        raise ConfigError(
            f"optimizer.cycle_ends={cycles} must ascend and be below {name}={steps}, and optimizer.decay_steps="
            f"{decays} must be {len(cycles) + 1} numbers, one per cycle."
        )
    if unfit := [context for context in contexts if config.batch_tokens % context]:
        raise ConfigError(f"batch_tokens={config.batch_tokens} is not a multiple of a window's {unfit[0]} tokens.")
    if shape.vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"decoder.vocab_size={shape.vocab_size} is too small for 256 bytes and a special token; give at least "
            f"{SMALLEST_VOCABULARY}."
        )
    if shape.hidden_size % (2 * shape.num_heads) or shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"decoder.hidden_size={shape.hidden_size} must be an even multiple of decoder.num_heads={shape.num_heads}, "
            f"which must be a multiple of decoder.num_kv_heads={shape.num_kv_heads}."
        )
    new = config.new_layers
    if new and (not config.start or list(new) != sorted({*new}) or new[-1] >= shape.num_layers):
        raise ConfigError(
            f"new_layers={new} needs start, got {config.start!r}, and must be ascending numbers below "
            f"decoder.num_layers={shape.num_layers}."
        )
    choice_argument("activations", config.activations, ACTIVATIONS, error=ConfigError)
    if config.offload_share > 1:
        raise ConfigError(f"offload_share={config.offload_share} is a share; give a number from 0 to 1.")
    if shape.num_layers < 2 or shape.num_heads < 4:
        raise ConfigError(
            f"decoder.num_layers={shape.num_layers} and decoder.num_heads={shape.num_heads} are too few for the "
            "induction head that training begins with; give at least 2 layers and 4 heads."
        )


def scheduled(config: TrainConfig) -> TrainConfig:
    """The config with every number of steps as it is in this run; see `TrainConfig.schedule_steps`."""
    planned, config = config.schedule_steps, dataclasses.replace(config, schedule_steps=None)
    if not planned:
        return config

    def scaled(number: int) -> int:
        return number * config.steps // planned

    optimizer = config.optimizer
    return dataclasses.replace(
        config,
        stage_ends=tuple(map(scaled, config.stage_ends)),
        optimizer=dataclasses.replace(
            optimizer,
            warmup_steps=max(1, scaled(optimizer.warmup_steps)),
            cycle_ends=tuple(map(scaled, optimizer.cycle_ends)),
            decay_steps=tuple(max(1, scaled(number)) for number in optimizer.decay_steps),
        ),
    )


def decoder_config(config: TrainConfig, bos: int) -> "DecoderConfig":
    """The decoder that is trained."""
    # They import jax, which `--help` does without.
    from kvjax.models.config import DecoderConfig
    from kvjax.numerics.rope import Rope

    shape = config.decoder
    head_dim = shape.hidden_size // shape.num_heads
    return DecoderConfig(
        family="llama",
        **dataclasses.asdict(shape),
        head_dim=head_dim,
        max_positions=config.contexts[-1],
        rope=Rope(dim=head_dim, theta=ROPE_THETA),
        tie_embeddings=True,
        bos_token_id=bos,
        eos_token_ids=(bos,),
    )


def stage(config: TrainConfig, step: int) -> int:
    """Which stage a step, counted from 0, belongs to."""
    return sum(step >= end for end in config.stage_ends)


class NamesTexts(Protocol):
    """A config that names texts; see `TrainConfig` for its fields."""

    texts: Names
    held_out: Names


def files(config: NamesTexts) -> tuple[list[Path], list[Path]]:
    """Files for training, and for evaluation.

    Raises:
      ConfigError: none, or a name that stands for none.
    """
    found: dict[Path, None] = {}
    for name in config.texts:
        pattern = str(Path(name) / "*.txt") if Path(name).is_dir() else name
        matches = [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()]
        if not matches:
            raise ConfigError(f"texts={name!r} is not a text file, a folder of .txt files or a matching pattern.")
        found |= dict.fromkeys(matches)
    if not found:
        raise ConfigError("there is no text to train on; give --config.texts=FILE,FOLDER,...")
    held_out = [path for path in found if path.stem in config.held_out or path.name in config.held_out]
    if missing := [name for name in config.held_out if name not in {part for p in found for part in (p.stem, p.name)}]:
        raise ConfigError(f"held_out={missing[0]!r} is not among the texts: {', '.join(path.name for path in found)}.")
    training = [path for path in found if path not in held_out]
    if not training:
        raise ConfigError(f"every text is held out ({', '.join(config.held_out)}); leave at least one for training.")
    return training, held_out


def past(config: TrainConfig, step: int) -> JsonObject:
    """Everything that the state after `step` steps depends on: two configs that agree on it share that state."""
    settings = fields.to_dict(config)
    # The gradients are the same wherever the results of layers are.
    of_no_step = ("activations", "offload_share")
    for name in ("output", "name", "evaluate_every", "checkpoint_every", "log_every", "steps", *of_no_step):
        del settings[name]
    ends = [*config.stage_ends, config.steps]
    begun = sum(end < step for end in ends[:-1]) + 1
    settings["contexts"] = settings["contexts"][:begun]
    settings["stage_ends"] = settings["stage_ends"][: begun - 1]
    for name in BY_STAGE:
        settings["mixture"][name] = settings["mixture"][name][:begun]
    # The first parameters look ahead to the longest context.
    settings["max_positions"] = config.contexts[-1]

    ends, decays = settings["optimizer"].pop("cycle_ends"), settings["optimizer"].pop("decay_steps")
    cycles = zip([*ends, config.steps], decays, strict=True)
    settings["decays"] = [[end - decay, decay] for end, decay in cycles if end - decay < step]
    return settings
