"""Trains cache augmentation for kvjax-tiny, with coprocessors of 4 and 16 input vectors.

docs/reuse.md has the result.

Command: python -m experiments.train_reuse --config=train_augmentation_tiny --config.texts=FILE,FOLDER,... \
  --config.held_out=NAME,...
"""

from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer
from experiments.tuning.reuse_config import AUGMENTATION, AugmentationConfig, ReuseWindowConfig, TrainReuseConfig


def get_config() -> TrainReuseConfig:
    return TrainReuseConfig(
        name="train_augmentation_tiny",
        method=AUGMENTATION,
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        augmentation=AugmentationConfig(latents=(4, 16), points=4, ahead=16),
        windows=ReuseWindowConfig(prompt_length=192, new_tokens=32),
        evaluation=EvaluationConfig(windows=10, new_tokens=32),
        optimizer=TuneOptimizer(learning_rate=1e-3),
        rows=4,
        steps=350,
        evaluate_every=50,
        checkpoint_every=50,
        output="results/train_augmentation_tiny",
    )
