"""Fits a linear gate of SmolLM2-135M-Instruct for a fifth of the prompt to KVzip+'s scores, in closed form.

Paper: KVzap (arXiv:2601.07891), whose authors fit linear gates by ridge regression too; its training texts are others.
Expected: docs/experiments.md, "The gate of SmolLM2".
Hardware: any CPU; ten minutes on two cores of an EPYC, family 26.
Command: python -m experiments.train_gate --config=train_gate_smollm2 --config.texts=FILE,FOLDER,... \
  --config.held_out=NAME,...
"""

from experiments.tuning.config import EvaluationConfig, TunedModel, WindowConfig
from experiments.tuning.gate_config import GateConfig, KeepConfig, RecallWindowsConfig, TrainGateConfig


def get_config() -> TrainGateConfig:
    return TrainGateConfig(
        name="train_gate_smollm2",
        model=TunedModel(path="smollm2-135m-instruct", dtype="float32"),
        gate=GateConfig(kind="linear"),
        keep=KeepConfig(budget=0.2, recent=25, sinks=4),
        objective="replay",
        solver="least_squares",
        mixture=RecallWindowsConfig(share=0.7, recall_fraction=0.25, task_shares=(0.1, 0.2, 0.35, 0.3, 0.05)),
        windows=WindowConfig(prompt_length=1000),
        evaluation=EvaluationConfig(windows=4, new_tokens=64),
        rows=1,
        steps=60,
        evaluate_every=60,
        checkpoint_every=10,
        output="results/train_gate_smollm2",
    )
