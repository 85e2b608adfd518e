"""Trains kvjax-tiny: 3.5 M parameters, grouped queries, 1,024 tokens of context, 32.8 M tokens.

Time: two CPU cores do about 7,400 tokens a second in windows of 256 and 5,500 in windows of 1,024 with the settings of
the allocator below, and 5,700 and 4,300 without: every large array is then memory that the kernel zeroes anew.

  export GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:\
glibc.malloc.hugetlb=1

The run was stopped at steps 3,300, 4,900 and 6,500, when the later stages were decided on: this config has the stages
that it went through, but has not been run in one piece. configs/train_tiny_2.py goes on from there.

Command: python -m experiments.train --config=train_tiny --config.texts=FILE,FOLDER,...
Then: python -m experiments.card --run=results/train_tiny --output=FOLDER, which scores it and writes its card.
"""

from experiments.training.config import MixtureConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        name="train_tiny",
        contexts=(128, 256, 1024, 1024, 1024, 1024),
        stage_ends=(400, 1200, 3300, 4900, 6500),
        mixture=MixtureConfig(
            repeat_fraction=(0.25, 0.15, 0.0, 0.0, 0.0, 0.0),
            # Wordings made up on the spot teach a model to look up what it was told in any words: without them it found
            # 90 % of unknown words told as in training, and 30 % of any words told otherwise.
            invented_fraction=(0.0, 0.0, 0.0, 0.5, 0.85, 0.9),
            wordy_fraction=(0.5, 0.5, 0.5, 0.5, 0.5, 0.9),
            answer_weight=2.0,
        ),
        batch_tokens=4096,
        steps=8000,
        schedule_steps=8000,
        # Low and slow enough for the induction head that training begins with; see experiments/training/induction.py.
        optimizer=OptimizerConfig(
            learning_rate=2.5e-3,
            embedding_learning_rate=2.5e-3,
            warmup_steps=100,
            cycle_ends=(6500,),
            decay_steps=(2200, 1100),
        ),
        evaluate_every=500,
        output="results/train_tiny",
    )
