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
    path: a checkpoint folder, a GGUF file, a Hugging Face hub id or kvjax-tiny; none = random weights.
    shape: the shape of a known decoder, such as opt-30b: for random weights, and for plans of a model that is not here.
    dtype: the dtype of the weights and the cache; none = float32 on a CPU, bfloat16 elsewhere.
    skew: a file that `experiments.skew` wrote, for selections that guess the query; none = no skew.
    calibration: a file that `experiments.calibrate` or `experiments.train_gate` wrote, or kvjax-tiny-gate, for storages
      and policies that need one; none = the calibration is made from a generated story.
    host_weights: the share of the layers whose weights are in host memory, from 0 to 1.
    weights: the codes to quantize the projections to, such as int8, int4 or int4(group=128, head=true); stored = keep
      the codes of the checkpoint; none = exact weights.
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
    name: a policy, such as h2o, roco(guard=4) or FILE.py:factory.
    budget: the number of slots per KV head (256), or a fraction of each row's prompt, with a decimal point (0.2).
    recent: the number of newest tokens that are protected; none = the policy's default.
    sinks: the number of first tokens that are protected; none = the policy's default.
    positions: the positions that keys are rotated to, original or cache; none = the policy's default.
    group_reduce: the reduction over the query heads of a KV head, mean or max; none = the policy's default.
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
    text: a text file, cut into num_sequences rows; none = a generated text.
    prompt: a prompt to continue instead of a text; there is no true continuation, so no perplexity.
    num_sequences: the number of rows.
    prompt_length: the number of tokens of each row that are its prompt.
    new_tokens: the number of tokens that are scored, and generated.
    chunk: the number of tokens of the parts of the continuation whose perplexity is also reported; none = no parts.
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
    tasks: recall tasks, such as passkey,multi_key,associative,copy,variable; none = no recall is measured.
    prompts: the number of prompts of each task.
    length: the number of tokens of a prompt.
    nearest: the smallest distance, in tokens, from the fact that is asked for to the end of its prompt.
    farthest: the largest such distance.
    difficulty: the difficulty, in the task's own unit; none = the task's default.
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
    names: tasks of local files (docs/tasks.md), such as copa(shots=5), needle(lengths=(256, 512)) or FILE.jsonl; none =
      no task is run.
    folder: the folder of the published files; it contains the folders tasks and summarization, or their contents.
    questions: the largest number of questions of a task; none = all.
    rows: the number of questions that are answered in one batch.
    least_slots: the smallest number of slots that a budget given as a fraction keeps.
    """

    names: Names = ()
    folder: OptionalText = None
    questions: OptionalCount = None
    rows: Count = 16
    least_slots: Count = MIN_SLOTS


@dataclasses.dataclass
class ExperimentConfig:
    """Attributes:
    name: the name of the results.
    model: the model that runs.
    policy: which slots the cache keeps.
    storage: how the policy's slots are held, such as int4(residual=32) or FILE.py:factory.
    selection: which of these slots a query reads, such as quest(page=16, budget=512) or FILE.py:factory.
    baselines: caches to compare with, under the same budget: a policy, or a policy with a storage or a selection, as in
      full + int8; agreement is measured against full if it is among them.
    data: the text.
    recall: the recall tasks.
    tasks: tasks of local files, and others whose context may be compressed before its question is known.
    mesh: the mesh of devices, such as data:2,model:4; empty = one device.
    rules: the axes of the mesh that dimensions are divided over, where other than in `kvjax.Rules`, such as
      mlp=model,vocab=none.
    prefill_block: the number of tokens of a block of the prompt; none = the whole prompt in one block.
    implementation: the implementation of attention and eviction: auto, xla, pallas_tpu or pallas_gpu.
    repeats: the number of timed repetitions, of which the fastest counts; 0 = nothing is timed, and as many caches as
      there are processors are measured at the same time.
    seed: the seed of random weights, of the generated text and of generated tasks.
    output: the folder in which a run makes its own folder.
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
