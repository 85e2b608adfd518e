"""Trains the gates of learned retention (`kvjax.policies.learned`) on whole texts.

`Retention` is the number of slots and the protected positions, and `visible` computes the slots that each query of a
text sees. `gated_weights` returns attention weights whose gradients reach the scores of tokens, and `GatedAttention`
uses them in a model.

Objectives are losses of the gates of a `Setup`: `NextToken`, `Distillation` (TRIM-KV), `ReplayedScore` (KVzap and
Fast KVzip; `Replayer` computes its targets), `AnswerAttention` (Locret), and for gates with a threshold
`DelayedEviction` (DMS), `PromptEviction` (Attention-Gate) and `Admission` (WG-KV). `calibration_of` makes a calibration
of trained gates, which `kvjax.policies.learned` takes. `train_gate` trains a gate on tokens, and ``python -m
experiments.train_gate`` on text files. `fit_gate` fits a linear gate to the scores of a replay in closed form.
`train_merge` trains the parameters of a merge (`kvjax.policies.lococo`), and ``python -m experiments.train_merge`` on
text files. `train_reconstruction` trains the calibration of a storage to reconstruct keys and values (CSKV), the loss
`reconstruction_loss`; ``python -m experiments.calibrate`` does so on a text file.

`train_predictor` trains KV prediction (`kvjax.reuse.predict`), and `train_coprocessor` cache augmentation
(`kvjax.reuse.augment`); ``python -m experiments.train_reuse`` does so on text files.
"""

from kvjax.training.augmentation import TrainedCoprocessor, nats_ahead, train_coprocessor
from kvjax.training.gated_attention import GatedAttention
from kvjax.training.least_squares import FittedGate, fit_gate
from kvjax.training.merges import train_merge
from kvjax.training.objectives import (
    AnswerAttention,
    Distillation,
    Examples,
    NextToken,
    ReplayedScore,
)
from kvjax.training.prediction import PredictionLosses, TrainedPredictor, prediction_losses, train_predictor
from kvjax.training.reconstruction import TrainedCalibration, reconstruction_loss, train_reconstruction
from kvjax.training.replayed import Replayer
from kvjax.training.retention import (
    Retention,
    decayed_weights,
    gated_weights,
    masked_weights,
    soft_gates,
    visible,
)
from kvjax.training.setup import Objective, Progress, Setup, calibration_of
from kvjax.training.thresholds import Admission, DelayedEviction, PromptEviction
from kvjax.training.train import TrainedGate, train_gate

__all__ = [
    "Admission", "AnswerAttention", "DelayedEviction", "Distillation", "Examples", "FittedGate", "GatedAttention",
    "NextToken", "Objective", "PredictionLosses", "Progress", "PromptEviction", "ReplayedScore", "Replayer",
    "Retention", "Setup", "TrainedCalibration", "TrainedCoprocessor", "TrainedGate", "TrainedPredictor",
    "calibration_of", "decayed_weights", "fit_gate", "gated_weights", "masked_weights", "nats_ahead",
    "prediction_losses", "reconstruction_loss", "soft_gates", "train_coprocessor", "train_gate", "train_merge",
    "train_predictor", "train_reconstruction", "visible",
]  # fmt: skip
