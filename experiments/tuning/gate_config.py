"""Configs of the training of gates; every field can be overridden on the command line (see `experiments.fields`).

This module does not import jax, so that ``--help`` takes no time.
"""

import dataclasses

from experiments.config import RecallConfig
from experiments.fields import Budget, Count, Names, Number, Numbers, OptionalCount, OptionalText, Text, Whole
from experiments.tasks import recall
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer, WindowConfig
from kvjax.arguments import did_you_mean
from kvjax.errors import ConfigError

LINEAR, MLP, QKV, SINK, CHANNEL, ATTENTION = "linear", "mlp", "qkv", "sink", "channel", "attention"  # gates
NEXT_TOKEN, DISTILL, REPLAY, SHARE, ANSWER = "next_token", "distill", "replay", "replay_share", "answer"  # objectives
DELAYED, ADMISSION, PROMPT = "delayed_eviction", "admission", "prompt_eviction"
GRADIENT, LEAST_SQUARES = "gradient", "least_squares"  # solvers
GATES = (LINEAR, MLP, QKV, SINK, CHANNEL, ATTENTION)
OBJECTIVES = (NEXT_TOKEN, DISTILL, REPLAY, SHARE, ANSWER, DELAYED, ADMISSION, PROMPT)
#: Outputs of gates that an objective needs.
OUTPUTS = {DISTILL: "log_sigmoid", SHARE: "sigmoid", DELAYED: "sigmoid", ADMISSION: "sigmoid", PROMPT: "sigmoid"}
#: Thresholds of objectives that train for one, unless another is given.
THRESHOLDS = {DELAYED: 0.5, ADMISSION: 0.1, PROMPT: 0.5}


@dataclasses.dataclass
class GateConfig:
    """Attributes:
    kind: linear, mlp, qkv, sink, channel or attention; see docs/policies.md.
    width: the number of features of the hidden layer, or of a sink gate's queries; none = the gate's default.
    output: none, sigmoid or log_sigmoid; auto = what the objective needs.
    """

    kind: Text = LINEAR
    width: OptionalCount = None
    output: Text = "auto"


@dataclasses.dataclass
class KeepConfig:
    """Attributes:
    budget: slots per KV head, or a fraction of each prompt, with a decimal point.
    recent: the number of newest positions that are protected.
    sinks: the number of first positions that are protected.
    threshold: slots of lower scores are evicted even if the head is within its budget; none = no threshold, but 0.5
      for delayed_eviction and prompt_eviction, and 0.1 for admission.
    every: the number of slots that are evicted at once.
    """

    budget: Budget = 0.2
    recent: Whole = 8
    sinks: Whole = 0
    threshold: OptionalText = None
    every: Count = 1


@dataclasses.dataclass
class RecallWindowsConfig:
    """Attributes:
    share: the probability that a training window contains recall material: facts, and questions about them, between the
      sentences of a text (`experiments.training.mixture`).
    recall_fraction: the share of such a window that consists of facts, questions and answers.
    story_fraction: the probability that its text is a generated story; otherwise it is one of texts.
    invented_fraction: the share of the episodes with random wording (`experiments.tasks.wording`).
    wordy_fraction: the share of these episodes with words between a name and its value; the others have symbols.
    task_shares: the relative frequencies of recall.TASKS, in their order.
    common_words: the number of the texts' most frequent words that tasks use in addition to their nouns.
    """

    share: Number = 0.0
    recall_fraction: Number = 0.2
    story_fraction: Number = 0.5
    invented_fraction: Number = 0.5
    wordy_fraction: Number = 0.7
    task_shares: Numbers = (0.2, 0.25, 0.3, 0.2, 0.05)
    common_words: Count = 10_000


@dataclasses.dataclass
class TrainGateConfig:
    """Attributes:
    name: the name of the run.
    model: the model, which is not trained.
    gate: scores the tokens.
    keep: the slots that the policy learned keeps.
    objective: next_token (the loss under the budget), replay (KVzap), replay_share (Fast KVzip), distill (TRIM-KV),
      answer (Locret), delayed_eviction (DMS), admission (WG-KV) or prompt_eviction (Attention-Gate).
    solver: gradient (AdamW), or least_squares, which fits a linear gate to the replay's scores in closed form: a step
      adds its windows to sums over all windows, and one of five steps chooses the ridge of each head.
    relax: how gradients of next_token reach scores, st (straight through) or soft (soft gates).
    temperature: the temperature of soft gates at the first step.
    last_temperature: the temperature of soft gates at the last step, reached geometrically.
    capacity: the weight of distill's penalty on slots beyond the budget, and of prompt_eviction's on other numbers of
      slots than the budget.
    sparsity: the weight of admission's penalty on tokens that are admitted.
    texts: text files, folders of text files or glob patterns.
    held_out: the file names of texts that are used for evaluation only; none = the last tenth of each text.
    start: a file gate.safetensors with the initial parameters, of the same model and gate; "" = random ones.
    mixture: the training windows with recall material.
    recall: recall tasks that are measured at each evaluation, on held-out words and wordings.
    windows: the windows of the texts; answer and prompt_eviction take the new_tokens of a training window as answer.
    evaluation: how the loss under a budget is measured.
    optimizer: AdamW with a schedule.
    rows: the number of windows of a step.
    steps: the number of steps of the run.
    batches: the number of different batches of windows, which steps use in turn; the scores that replay and
      replay_share train on are computed once per batch, and held in memory. none = each step has new windows.
    evaluate_every: the number of steps between evaluations.
    checkpoint_every: the number of steps between checkpoints.
    log_every: the number of steps between log lines.
    seed: the random seed of windows and of the first gates.
    output: the folder of the run; a run that already exists there continues from its last checkpoint.
    """

    name: Text = "train_gate"
    model: TunedModel = dataclasses.field(default_factory=TunedModel)
    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    keep: KeepConfig = dataclasses.field(default_factory=KeepConfig)
    objective: Text = NEXT_TOKEN
    solver: Text = GRADIENT
    relax: Text = "st"
    temperature: Number = 0.5
    last_temperature: Number = 0.5
    capacity: Number = 1.0
    sparsity: Number = 0.04
    texts: Names = ()
    held_out: Names = ()
    start: Text = ""
    mixture: RecallWindowsConfig = dataclasses.field(default_factory=RecallWindowsConfig)
    recall: RecallConfig = dataclasses.field(default_factory=RecallConfig)
    windows: WindowConfig = dataclasses.field(default_factory=lambda: WindowConfig(prompt_length=256))
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    optimizer: TuneOptimizer = dataclasses.field(default_factory=TuneOptimizer)
    rows: Count = 8
    steps: Count = 200
    batches: OptionalCount = None
    evaluate_every: Count = 50
    checkpoint_every: Count = 50
    log_every: Count = 10
    seed: Whole = 0
    output: Text = "results/train_gate"


def check(config: TrainGateConfig) -> None:
    """Refuses, before anything is read or trained, settings that do not fit together.

    Raises:
      ConfigError: a setting that is not valid, or two that do not fit together.
    """
    for name, given, valid in (
        ("gate.kind", config.gate.kind, GATES),
        ("objective", config.objective, OBJECTIVES),
        ("solver", config.solver, (GRADIENT, LEAST_SQUARES)),
        ("relax", config.relax, ("st", "soft")),
        ("gate.output", config.gate.output, ("auto", "none", "sigmoid", "log_sigmoid")),
    ):
        if given not in valid:
            raise ConfigError(f"{name}={given!r} is unknown; {did_you_mean(given, valid)}valid: {', '.join(valid)}.")
    if config.gate.kind in (LINEAR, CHANNEL) and config.gate.width is not None:
        raise ConfigError(f"gate.width={config.gate.width}: a {config.gate.kind} gate has no width; leave it out.")
    if config.solver == LEAST_SQUARES:
        _check_closed_form(config)
    elif config.optimizer.warmup_steps >= config.steps:
        raise ConfigError(f"optimizer.warmup_steps={config.optimizer.warmup_steps} must be below steps={config.steps}.")
    if not config.optimizer.clip:
        raise ConfigError("optimizer.clip=0.0 sets every gradient to 0; give a number above 0, such as 1.0.")
    if not config.temperature or not config.last_temperature:
        raise ConfigError(
            f"temperature={config.temperature} and last_temperature={config.last_temperature} must be greater than 0."
        )
    if config.objective in (ANSWER, PROMPT) and not config.windows.new_tokens:
        raise ConfigError(f"windows.new_tokens=0 leaves no answer for objective={config.objective}; give at least 1.")
    if config.gate.kind == ATTENTION and config.objective != PROMPT:
        raise ConfigError(
            f"gate.kind={ATTENTION} scores whole prompts, and objective={config.objective} evicts while they are read; "
            f"give objective={PROMPT}."
        )
    if config.objective == PROMPT and config.keep.every > 1:
        raise ConfigError(
            f"keep.every={config.keep.every}: objective={PROMPT} evicts once, when a prompt ends; give 1."
        )
    if config.batches == 0:
        raise ConfigError("batches=0 leaves nothing to train on; give a whole number of at least 1, or none.")
    for name in ("share", "recall_fraction", "story_fraction", "invented_fraction", "wordy_fraction"):
        if (given := getattr(config.mixture, name)) > 1:
            raise ConfigError(f"mixture.{name}={given} is a share; give a number from 0 to 1.")
    if len(config.mixture.task_shares) != len(recall.TASKS) or not sum(config.mixture.task_shares):
        raise ConfigError(
            f"mixture.task_shares={config.mixture.task_shares} must be {len(recall.TASKS)} numbers, not all 0, for "
            f"{', '.join(recall.TASKS)}."
        )
    threshold(config)


def _check_closed_form(config: TrainGateConfig) -> None:
    """Refuses settings whose loss is not a squared error that is linear in the gate's parameters, once per window."""
    for name, given, valid, reason in (
        ("objective", config.objective, (REPLAY,), "the loss of others is not a squared error to known scores"),
        ("gate.kind", config.gate.kind, (LINEAR,), "others are not linear in their parameters"),
        ("gate.output", config.gate.output, ("auto", "none"), "an output function is not linear"),
        ("batches", config.batches, (None,), "a window that is seen again adds nothing"),
        ("start", config.start, ("",), "the result does not depend on the first parameters"),
    ):
        if given not in valid:
            raise ConfigError(
                f"{name}={given!r} does not fit solver={LEAST_SQUARES}: {reason}; give "
                f"{' or '.join(str(each).lower() or repr(each) for each in valid)}, or solver={GRADIENT}."
            )


def threshold(config: TrainGateConfig) -> float | None:
    """Returns the threshold of scores.

    Raises:
      ConfigError: text that is not a number.
    """
    given = config.keep.threshold
    try:
        return THRESHOLDS.get(config.objective) if given is None else float(given)
    except ValueError:
        raise ConfigError(f"keep.threshold={given!r} is not valid; give a number, or none.") from None
