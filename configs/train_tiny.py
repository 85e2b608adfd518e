"""Trains kvjax-tiny: 3.5 M parameters, grouped queries, 1,024 tokens of context, 22.5 M tokens.

Time: two CPU cores did about 3,000 tokens a second in windows of 256; those of 1,024 take longer.

Command: python -m experiments.train --config=train_tiny --config.texts=FILE,FOLDER,...
Then: python -m experiments.card --run=results/train_tiny --output=FOLDER, which scores it and writes its card.
"""

from experiments.training.config import MixtureConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        name="train_tiny",
        contexts=(128, 256, 1024),
        stage_ends=(400, 1200),
        mixture=MixtureConfig(repeat_fraction=(0.25, 0.15, 0.0), answer_weight=2.0),
        batch_tokens=4096,
        steps=5500,
        # Low and slow enough for the induction head that training begins with; see experiments/training/induction.py.
        optimizer=OptimizerConfig(learning_rate=2.5e-3, table_learning_rate=2.5e-3, warmup_steps=100, decay_steps=2000),
        evaluate_every=500,
        output="results/train_tiny",
    )
