"""Goes on training kvjax-tiny, where configs/train_tiny.py left it: 18.4 M tokens more, nearly all wordings made up.

After the first run the model found all passkeys but 84 % of the word pairs that were told in held-out wordings: those
it misses stand behind several tokens, "n belongs to v", which it was still learning (38, 52 and 64 % after 4,600, 6,500
and 8,000 steps).

Command, with the texts of the first run: python -m experiments.train --config=train_tiny_2 --config.texts=...
Then: python -m experiments.card --run=results/train_tiny_2 --output=FOLDER
"""

from experiments.training.config import MixtureConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        name="train_tiny",
        start="results/train_tiny/model",
        seed=1,  # windows and tasks that the first run has not seen
        contexts=(1024,),
        mixture=MixtureConfig(
            repeat_fraction=(0.0,), invented_fraction=(0.9,), wordy_fraction=(0.9,), answer_weight=2.0
        ),
        batch_tokens=4096,
        steps=4500,
        schedule_steps=4500,
        optimizer=OptimizerConfig(
            learning_rate=2.5e-3, embedding_learning_rate=2.5e-3, warmup_steps=100, decay_steps=(1800,)
        ),
        evaluate_every=500,
        output="results/train_tiny_2",
    )
