"""Configs of experiments: dataclasses whose every field the command line can override (see `experiments.fields`).

`experiments.specs` builds what they describe. This module does not import jax, so that ``--help`` takes no time. No
postponed annotations here: `config_flags` reads the types themselves.
"""

import dataclasses

from experiments import fields
from experiments.fields import Budget, Count, Kernels, Names, Number, OptionalCount, OptionalText, Text, Whole
from kvjax.arguments import MIN_SLOTS

DENSE, EVERYTHING = "dense", "everything"  # how slots are held and read unless a config says otherwise
JOINED = " + "  # between the parts of a cache in one text, as in the name of a `CacheSpec`


@dataclasses.dataclass
class ModelConfig:
    """Attributes:
    path: a checkpoint folder or a Hugging Face hub id; None = random weights.
    shape: a decoder of `kvjax.models.shapes`: for random weights, and for what a model needs before it is loaded.
    dtype: of the weights and the cache; None = float32 on a CPU, bfloat16 elsewhere.
    skew: a file of `experiments.skew`, for selections that guess; None = no skew.
    calibration: a file of `kvjax.calibrate`, for storages that need one; None = made from a story that is generated.
    host_weights: the share of the layers whose weights are in host memory, 0 to 1.
    weights: as text, int8, int4 or int4(group=128, head=true), to quantise the projections; stored, to keep the codes
      that the checkpoint has; None = exact.
    """

    path: OptionalText = None
    shape: OptionalText = None
    dtype: OptionalText = None
    skew: OptionalText = None
    calibration: OptionalText = None
    host_weights: Number = 0.0
    weights: OptionalText = None


@dataclasses.dataclass
class PolicyConfig:
    """Attributes:
    name: a policy as text (`kvjax.specs.parse`): h2o, roco(guard=4), FILE.py:factory.
    budget: slots per KV head (int), or a fraction of each row's prompt (float in (0, 1]).
    recent: as in the policy's factory; None = its default.
    sinks: likewise.
    positions: likewise.
    group_reduce: likewise.
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
    num_sequences: rows.
    prompt_length: tokens of each row that are the prompt.
    new_tokens: tokens that are scored, and generated.
    chunk: tokens of the parts of the continuation whose perplexity is reported by itself; None = no parts.
    """

    text: OptionalText = None
    prompt: OptionalText = None
    num_sequences: Count = 4
    prompt_length: Count = 256
    new_tokens: Count = 64
    chunk: OptionalCount = None


@dataclasses.dataclass
class RecallConfig:
    """Attributes:
    tasks: of `experiments.tasks.recall`; none = no recall is measured.
    prompts: of each task.
    length: tokens of a prompt.
    nearest: the fewest tokens from the fact that is asked for to the end of its prompt.
    farthest: the most.
    difficulty: as the task counts it; None = its default.
    """

    tasks: Names = ()
    prompts: Count = 16
    length: Count = 984
    nearest: Count = 700
    farthest: Count = 900
    difficulty: OptionalCount = None


@dataclasses.dataclass
class TasksConfig:
    """Attributes:
    names: tasks as text (`experiments.tasks.registry`): copa(shots=5), needle(lengths=(256, 512)), FILE.jsonl; none =
      no task is run.
    folder: of the published files, with the folders tasks and summarization, or what these hold.
    questions: the most questions of a task; None = all.
    rows: questions that are answered at once.
    least_slots: slots that are kept of contexts of which a budget that is a fraction keeps fewer.
    """

    names: Names = ()
    folder: OptionalText = None
    questions: OptionalCount = None
    rows: Count = 16
    least_slots: Count = MIN_SLOTS


@dataclasses.dataclass
class ExperimentConfig:
    """Attributes:
    name: names the results.
    model: what runs.
    policy: what the cache keeps.
    storage: how the policy's slots are held, as text (`kvjax.specs.parse`): int4(residual=32), FILE.py:factory.
    selection: which of these slots a query reads, as text: quest(page=16, budget=512), FILE.py:factory.
    baselines: caches to compare with, under the same budget: a policy, held as it is and read whole, or with a storage
      and a selection of its own, ``full + int8``; agreement is measured against ``full`` if it is here.
    data: the text.
    recall: the recall tasks.
    tasks: tasks of local files, and others whose context may be compressed before its question is known.
    mesh: ``data:2,model:4``, or nothing for one device.
    rules: over which axes of the mesh dimensions are divided where not as in `kvjax.Rules`: mlp=model,vocab=none.
    prefill_block: tokens of a block of the prompt; None = all of it in one shot.
    implementation: of attention and eviction, auto, xla, pallas_tpu or pallas_gpu; see `kvjax.attention`.
    repeats: timed repetitions, of which the fastest counts; 0 = nothing is timed, and as many caches as there are
      processors are measured at the same time.
    seed: of random weights, of the generated text, of the recall tasks and of generated tasks.
    output: the folder in which a run makes its own.
    """

    name: Text = "experiment"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    storage: Text = DENSE
    selection: Text = EVERYTHING
    baselines: Names = ("full",)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    recall: RecallConfig = dataclasses.field(default_factory=RecallConfig)
    tasks: TasksConfig = dataclasses.field(default_factory=TasksConfig)
    mesh: Text = ""
    rules: Text = ""
    prefill_block: OptionalCount = None
    implementation: Kernels = "auto"
    repeats: Whole = 3
    seed: Whole = 0
    output: Text = "results"


def names() -> list[str]:
    """Every experiment of the project."""
    return fields.names(ExperimentConfig)


def by_name(name: str) -> ExperimentConfig:
    """See `fields.by_name`."""
    return fields.by_name(name, ExperimentConfig)
