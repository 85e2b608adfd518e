"""Trains KV prediction for kvjax-tiny, with auxiliary models of one, two and three of its six layers.

docs/reuse.md has the result.

Command: python -m experiments.train_reuse --config=train_prediction_tiny --config.texts=FILE,FOLDER,... \
  --config.held_out=NAME,...
"""

from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer
from experiments.tuning.reuse_config import PREDICTION, PredictionConfig, ReuseWindowConfig, TrainReuseConfig


def get_config() -> TrainReuseConfig:
    return TrainReuseConfig(
        name="train_prediction_tiny",
        method=PREDICTION,
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        prediction=PredictionConfig(auxiliaries=("0", "0+3", "0+2+4")),
        windows=ReuseWindowConfig(prompt_length=192, new_tokens=32),
        evaluation=EvaluationConfig(windows=10, new_tokens=32),
        optimizer=TuneOptimizer(learning_rate=1e-3),
        rows=4,
        steps=100,
        evaluate_every=20,
        checkpoint_every=20,
        output="results/train_prediction_tiny",
    )
