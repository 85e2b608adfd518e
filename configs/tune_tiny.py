"""Tunes kvjax-tiny for a window of a tenth of the prompt, by updates of rank 16 of all projections.

Command: python -m experiments.tune --config=tune_tiny --config.texts=FILE,FOLDER,... --config.held_out=NAME,...
The control: the same with --config.train_under=full --config.output=results/tune_tiny_control
"""

from experiments.config import PolicyConfig
from experiments.tuning.config import LoraConfig, TuneConfig, TunedModel


def get_config() -> TuneConfig:
    return TuneConfig(
        name="tune_tiny",
        model=TunedModel(path="kvjax-tiny", dtype="float32"),
        policy=PolicyConfig(name="window", budget=0.1),
        lora=LoraConfig(rank=16, alpha=32.0, projections=("query", "key", "value", "out", "gate", "up", "down")),
        output="results/tune_tiny",
    )
