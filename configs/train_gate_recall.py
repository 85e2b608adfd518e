"""Trains kvjax-tiny-gate: kvjax-tiny's gate for a fifth of the prompt, on KVzip+'s scores of facts, stories and books.

Paper: KVzap (arXiv:2601.07891); its training texts are others.
Expected: kvjax/pretrained/kvjax-tiny-gate/README.md.
Hardware: any CPU; a quarter of an hour on two cores that do other work too.
Command: python -m experiments.train_gate --config=train_gate_recall --config.texts=FILE,FOLDER,... \
  --config.held_out=NAME,...
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
        mixture=RecallWindowsConfig(share=0.7, recall_fraction=0.25, task_shares=(0.1, 0.2, 0.35, 0.3, 0.05)),
        recall=RecallConfig(tasks=("passkey", "multi_key", "associative", "copy"), prompts=16),
        windows=WindowConfig(prompt_length=1000),
        evaluation=EvaluationConfig(windows=4, new_tokens=24),
        optimizer=TuneOptimizer(learning_rate=5e-3),
        rows=2,
        steps=300,
        batches=100,
        evaluate_every=150,
        checkpoint_every=100,
        output="results/train_gate_recall",
    )
