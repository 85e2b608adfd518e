"""Trains an mlp gate for kvjax-tiny and a budget of a fifth of the prompt, on the loss of the next token.

docs/experiments.md has the result.

Command: python -m experiments.train_gate --config=train_gate_tiny --config.texts=FILE,FOLDER,... \
  --config.held_out=NAME,...
"""

from experiments.tuning.config import TunedModel, TuneOptimizer
from experiments.tuning.gate_config import GateConfig, KeepConfig, TrainGateConfig


def get_config() -> TrainGateConfig:
    return TrainGateConfig(
        name="train_gate_tiny",
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        gate=GateConfig(kind="mlp", width=64),
        keep=KeepConfig(budget=0.2, recent=25, sinks=4),
        optimizer=TuneOptimizer(learning_rate=3e-3),
        rows=4,
        steps=150,
        output="results/train_gate_tiny",
    )
