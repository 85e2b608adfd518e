"""Trains a linear gate for kvjax-tiny and a budget of a fifth of the prompt, on the loss of the next token.

Command: python -m experiments.train_gate --config=train_gate_tiny --config.texts=FILE,FOLDER,... \
  --config.held_out=NAME,...
"""

from experiments.tuning.config import TunedModel, TuneOptimizer
from experiments.tuning.gate_config import TrainGateConfig


def get_config() -> TrainGateConfig:
    return TrainGateConfig(
        name="train_gate_tiny",
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        optimizer=TuneOptimizer(learning_rate=5e-3),
        output="results/train_gate_tiny",
    )
