"""The optimizer: Muon for projections, Adam for embeddings and norms, warm-up, plateau and linear decay."""

from typing import Any

import jax
import optax

from experiments.training.config import TrainConfig
from kvjax.typing import PyTree


def schedule(config: TrainConfig, peak: float) -> optax.Schedule:
    """Learning rate by step: linear from 0, constant, linear to 0 at a cycle's end (WSD, arXiv:2404.06395)."""
    parts: list[optax.Schedule] = []
    boundaries: list[int] = []
    start = 0
    for end, decay in zip((*config.optimizer.cycle_ends, config.steps), config.optimizer.decay_steps, strict=True):
        warm = min(start + config.optimizer.warmup_steps, end)
        falls = max(warm, end - decay)
        parts += [
            optax.linear_schedule(0.0, peak, config.optimizer.warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, max(1, end - falls)),
        ]
        boundaries += [warm, falls, end]
        start = end
    return optax.join_schedules(parts, boundaries[:-1])


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) needs fewer tokens than Adam for the same loss; each update's RMS is matched to Adam's
    (arXiv:2502.16982), so that one scale of learning rates serves both."""
    settings = config.optimizer

    def projections(params: PyTree) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: optax.contrib.MuonDimensionNumbers() if path[-1].key == "kernel" else None, params
        )

    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.contrib.muon(
            schedule(config, settings.learning_rate),
            weight_decay=settings.weight_decay,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=projections,
            adam_learning_rate=schedule(config, settings.embedding_learning_rate),
            adam_b2=0.98,
        ),
    )
