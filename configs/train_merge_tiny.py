"""Trains LoCoCo's convolution for kvjax-tiny: h2o with 51 slots of prompts of 256 tokens, 25 of them merged ones.

Paper: LoCoCo (arXiv:2406.05317); no table of it is at this scale. docs/policies.md has the result.
Hardware: any CPU; some ten minutes on two cores.
Command: python -m experiments.train_merge --config=train_merge_tiny --config.texts=FILE,FOLDER,... \
  --config.held_out=NAME,...
"""

from experiments.config import PolicyConfig
from experiments.tuning.config import TunedModel, TuneOptimizer
from experiments.tuning.merge_config import TrainMergeConfig


def get_config() -> TrainMergeConfig:
    return TrainMergeConfig(
        name="train_merge_tiny",
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="h2o(recent=25, every=32, merge=lococo(slots=25))", budget=51),
        optimizer=TuneOptimizer(learning_rate=3e-3),
        output="results/train_merge_tiny",
    )
