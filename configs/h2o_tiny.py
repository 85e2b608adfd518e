"""H2O against the full cache, small enough to run anywhere.

Paper: H2O (arXiv:2306.14048); no table of it is at this scale. Without a checkpoint the decoder is random (4 layers of
width 128, 8 query heads on 4 KV heads, over bytes): speed and bytes held are real, perplexity is not.
Expected: at a budget of 20 % of a 256-token prompt each head holds 51 slots and one for the newest token, of the full
cache's 319: 16.3 % of its bytes. That is arithmetic; speeds and perplexities depend on the machine and the model.
Hardware: any CPU; about half a minute on two cores, most of it compilation.
Command: python -m experiments.run --config=h2o_tiny
With a model and a text of your own:
  python -m experiments.run --config=h2o_tiny --config.model.path=FOLDER --config.data.text=FILE
"""

from experiments.config import DataConfig, ExperimentConfig, PolicyConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="h2o_tiny",
        policy=PolicyConfig(name="h2o", budget=0.2),
        baselines=("full", "window"),
        data=DataConfig(num_sequences=4, prompt_length=256, new_tokens=64),
    )
