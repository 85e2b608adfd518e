"""Deepens kvjax-tiny, where configs/train_tiny_2.py left it, from four layers to six: 4.9 M parameters.

The model finds words with one head, of layer 1. It missed pairs whose value stands behind several tokens, "n belongs to
v", and 18 M tokens more had not helped: what that head compares is what layer 0 alone has noted at each token, the one
before it. Two layers between them can carry a name over several tokens before it is compared.

Command, with the texts of the first run: python -m experiments.train --config=train_tiny_3 --config.texts=...
Then: python -m experiments.card --run=results/train_tiny_3 --output=FOLDER
"""

from experiments.training.config import DecoderShape, MixtureConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        name="train_tiny",
        start="results/train_tiny_2/model",
        decoder=DecoderShape(num_layers=6),
        new_layers=(1, 2),
        seed=2,  # windows and tasks that the runs before have not seen
        contexts=(1024,),
        mixture=MixtureConfig(
            recall_fraction=0.5,
            repeat_fraction=(0.0,),
            invented_fraction=(0.9,),
            wordy_fraction=(0.9,),
            answer_weight=2.0,
        ),
        batch_tokens=4096,
        steps=2800,
        schedule_steps=2800,
        optimizer=OptimizerConfig(
            learning_rate=2.5e-3, embedding_learning_rate=2.5e-3, warmup_steps=100, decay_steps=(1400,)
        ),
        evaluate_every=250,
        output="results/train_tiny_3",
    )
