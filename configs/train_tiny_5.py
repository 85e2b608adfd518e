"""Goes on training kvjax-tiny, where configs/train_tiny_4.py left it: text in lines of every length, and questions.

The model had read books wrapped at 70 columns only. On the same books with each paragraph in one line it needed 2.46
bits a byte instead of 1.58, and it had never seen a question and its answer written as evaluations write them.

Command, with the texts of the first run: python -m experiments.train --config=train_tiny_5 --config.texts=...
Then: python -m experiments.card --run=results/train_tiny_5 --output=FOLDER
"""

from experiments.training.config import DecoderShape, MixtureConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        name="train_tiny",
        start="results/train_tiny_4/model",
        decoder=DecoderShape(num_layers=6),
        seed=4,  # windows and tasks that the runs before have not seen
        contexts=(1024,),
        mixture=MixtureConfig(
            recall_fraction=0.45,
            task_shares=(0.1, 0.15, 0.5, 0.15, 0.1),
            repeat_fraction=(0.0,),
            invented_fraction=(0.9,),
            wordy_fraction=(0.9,),
            answer_weight=2.0,
            story_fraction=0.04,
            question_fraction=0.08,
            layouts=("wrapped", "joined", "flat", "short"),
        ),
        batch_tokens=4096,
        steps=2400,
        schedule_steps=2400,
        optimizer=OptimizerConfig(
            learning_rate=2e-3, embedding_learning_rate=2e-3, warmup_steps=50, decay_steps=(1400,)
        ),
        evaluate_every=300,
        output="results/train_tiny_5",
    )
