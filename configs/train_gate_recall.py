"""Trains the gate kvjax-tiny-gate.

Command: python -m experiments.train_gate --config=train_gate_recall
"""

from experiments.config import RecallConfig
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer, WindowConfig
from experiments.tuning.gate_config import GateConfig, KeepConfig, RecallWindowsConfig, TrainGateConfig


def get_config() -> TrainGateConfig:
    return TrainGateConfig(
        name="train_gate_recall",
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        gate=GateConfig(kind="mlp", width=128),
        keep=KeepConfig(budget=0.2, recent=25, sinks=4),
        objective="replay",
        mixture=RecallWindowsConfig(share=0.5),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative", "copy"), prompts=16),
        windows=WindowConfig(prompt_length=1000),
        evaluation=EvaluationConfig(windows=8, new_tokens=24),
        optimizer=TuneOptimizer(learning_rate=3e-3),
        rows=4,
        steps=300,
        evaluate_every=100,
        output="results/train_gate_recall",
    )
