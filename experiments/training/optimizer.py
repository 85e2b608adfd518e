"""The optimizer: Muon for projections, Adam for tables and norms, warm-up, plateau and linear decay."""

from typing import Any

import jax
import optax

from experiments.training.config import TrainConfig


def schedule(config: TrainConfig, peak: float) -> optax.Schedule:
    """Learning rate by step: linear from 0, constant, linear to 0 at the last step (WSD, arXiv:2404.06395)."""
    warmup = config.optimizer.warmup_steps
    decay_start = max(warmup, config.steps - config.optimizer.decay_steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, max(1, config.steps - decay_start)),
        ],
        [warmup, decay_start],
    )


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) needs fewer tokens than Adam for the same loss; each update's RMS is matched to Adam's
    (arXiv:2502.16982), so that one scale of learning rates serves both."""
    settings = config.optimizer

    def projections(params: Any) -> Any:
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
            adam_learning_rate=schedule(config, settings.table_learning_rate),
            adam_b2=0.98,
        ),
    )
