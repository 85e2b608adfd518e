"""The model of `python -m experiments.paper`, which needs no --config: kvjax's own small model, in float32."""

from experiments.config import ModelConfig
from experiments.papers.config import PaperConfig


def get_config() -> PaperConfig:
    return PaperConfig(model=ModelConfig(path="kvjax-tiny", dtype="float32"))
