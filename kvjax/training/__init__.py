"""Training of learned retention: the budget of all queries at once, attention whose gradient reaches gates, objectives.

`Retention` says which slots stay, `visible` which of them each query of a text sees, and `gated_weights` returns
weights of attention whose gradient reaches the scores of tokens. `GatedAttention` puts them into a model.

Objectives are losses of the parameters of a `Setup`: `NextToken`, `Distillation` (TRIM-KV), `ReplayedScore` (KVzap and
Fast KVzip; `Replayer` computes its targets) and `AnswerAttention` (Locret). `calibration_of` makes a calibration of
trained parameters, which `kvjax.policies.learned` takes. `train_gate` trains a gate on tokens, and ``python -m
experiments.train_gate`` on files of texts.
"""

from kvjax.training.gated_attention import GatedAttention
from kvjax.training.objectives import (
    AnswerAttention,
    Distillation,
    NextToken,
    Objective,
    ReplayedScore,
    Setup,
    calibration_of,
)
from kvjax.training.replayed import Replayer
from kvjax.training.retention import Retention, decayed_weights, gated_weights, soft_gates, visible
from kvjax.training.train import TrainedGate, train_gate

__all__ = [
    "AnswerAttention", "Distillation", "GatedAttention", "NextToken", "Objective", "ReplayedScore", "Replayer",
    "Retention", "Setup", "TrainedGate", "calibration_of", "decayed_weights", "gated_weights", "soft_gates",
    "train_gate", "visible",
]  # fmt: skip
