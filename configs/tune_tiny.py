r"""Tunes kvjax-tiny under a window of a tenth of the prompt, by updates of rank 16 of all projections.

docs/experiments.md has the results. Texts are the books of kvjax-tiny's training and the three books held out from it.
Time: 25 minutes on two CPU cores that other programs used too.

Command: python -m experiments.tune --config=tune_tiny --config.texts=FILE,FOLDER,... \
  --config.held_out=great_expectations_1400,carroll-alice,shakespeare-hamlet
The control: the same with --config.train_under=full --config.output=results/tune_tiny_control
"""

from experiments.config import PolicyConfig
from experiments.tuning.config import EvaluationConfig, LoraConfig, TuneConfig, TunedModel, TuneOptimizer


def get_config() -> TuneConfig:
    return TuneConfig(
        name="tune_tiny",
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="window", budget=0.1),
        lora=LoraConfig(rank=16, alpha=32.0, projections=("query", "key", "value", "out", "gate", "up", "down")),
        evaluation=EvaluationConfig(windows=32),
        optimizer=TuneOptimizer(learning_rate=5e-4, warmup_steps=20),
        steps=250,
        output="results/tune_tiny",
    )
