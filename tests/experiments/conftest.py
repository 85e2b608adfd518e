"""A decoder so small that a whole experiment takes seconds."""

import dataclasses

import pytest

from experiments.config import DataConfig, ExperimentConfig, PolicyConfig
from kvjax.models import shapes
from kvjax.numerics.rope import Rope


@pytest.fixture(autouse=True)
def _no_kept_programs(monkeypatch):
    """Programs leave the user's own folder of compiled programs alone, and so do those that tests start."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


@pytest.fixture
def small(monkeypatch, tmp_path) -> ExperimentConfig:
    """A config on one random layer; results go to the test's own folder."""
    decoder = dataclasses.replace(
        shapes.SHAPES["tiny"], hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16,
        embed_size=16, rope=Rope(dim=8), windows=(None,),
    )  # fmt: skip
    monkeypatch.setitem(shapes.SHAPES, "tiny", decoder)
    return ExperimentConfig(
        name="small",
        policy=PolicyConfig(name="window", budget=8, sinks=2),
        data=DataConfig(num_sequences=2, prompt_length=16, new_tokens=6),
        repeats=1,
        output=str(tmp_path / "runs"),
    )
