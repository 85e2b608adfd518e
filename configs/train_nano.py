r"""Trains a very small decoder on any text, in about two minutes on two CPU cores: to try the tools, not the model.

Two layers, 0.5 M parameters, 512 tokens of context, 2.0 M tokens. On Shakespeare's plays it found all passkeys, about
half of the copied sequences (59 and 47 % on two machines) and 12 and 16 % of the word pairs. `--config.steps=2000`
trains for longer, and the schedule follows.

Command: python -m experiments.train --config=train_nano --config.texts=FILE,FOLDER,...
Then, within its context:
  python -m experiments.run --config=h2o_tiny --config.model.path=results/train_nano/model \
    --config.data.prompt_length=384 --config.data.new_tokens=64 --config.recall.tasks=passkey,copy \
    --config.recall.length=480 --config.recall.nearest=300 --config.recall.farthest=420
"""

from experiments.training.config import DecoderShape, MixtureConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        name="train_nano",
        decoder=DecoderShape(vocab_size=1024, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=352),
        contexts=(128, 512),
        stage_ends=(250,),
        mixture=MixtureConfig(repeat_fraction=(0.25, 0.0), invented_fraction=(0.0, 0.5), wordy_fraction=(0.5, 0.5)),
        batch_tokens=4096,
        steps=500,
        schedule_steps=500,
        optimizer=OptimizerConfig(
            learning_rate=4e-3, embedding_learning_rate=4e-3, warmup_steps=40, decay_steps=(200,)
        ),
        checkpoint_every=250,
        output="results/train_nano",
    )
