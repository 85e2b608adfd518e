"""Decoding steps in one kernel beside the same in XLA, for any platform."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import policies
from kvjax.cache import Block, Group
from kvjax.cache.empty import empty
from kvjax.cache.state import LayerKV
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.step import step
from kvjax.storage import Storage, dense
from kvjax.storage.store import encode
from tests.kernels.codes import CODE

#: The policies that a kernel can trace.
FUSED = ("window", "h2o", "h2o_decay", "scissorhands", "tova", "mean_attention", "roco", "strided", "fixed")


def decoding(
    policy: policies.Evict, slots: int, implementation: str | None = None, held: Storage | None = None
) -> Group:
    """A group that decodes step by step in XLA, or in one kernel."""
    return Group(
        policy=policy.traced(), storage=held or dense(), needs=policy.needs, slots=(slots,), decoding=True,
        step_implementation=implementation,
    )  # fmt: skip


def one_step(group, layer, query, key, value, position, budget, window=None):
    """One decoding step; the output and the layer afterwards."""
    row = position[:, 0]
    block = Block(position=position, prompt=row, total=row + 1, budget=((budget,),))
    return step(layer, query, key, value, block=block, group=group, budget=budget, args=LayerArgs(window=window))[:2]


def build(name: str, budget: int, **more) -> policies.Policy:
    more |= {"strided": {"stride": 3}, "fixed": {"block": 4, "columns": 1}, "ring": {"variant": "ring"}}.get(name, {})
    if name == "full":
        return policies.full()
    if name == "heavy":
        return policies.with_heavy_hitters(policies.mean_attention(budget=budget, recent=budget // 4))
    return policies.by_name("h2o" if name == "ring" else name, budget=budget, **more)


class Steps(NamedTuple):
    """Some rows' slots, some steps in one kernel beside some in XLA; what is the same is compared after every one."""

    name: str
    slots: int
    dim: int = 64
    group: int = 2
    dtype: Any = jnp.float32
    window: int | None = None
    policy: tuple[tuple[str, str], ...] = ()
    budgets: tuple[int, int] | None = None  # of even and odd rows; None = the slots but one
    held: Storage | None = None
    batch: int = 2

    def __str__(self) -> str:
        return f"{self.name}-{self.slots}-{self.dim}" + (f"-{self.held.name}" if self.held else "")

    def run(self, steps: int, implementation: str = "pallas_tpu", error: float = 2e-6) -> None:
        batch, kv_heads, top = self.batch, 2, self.slots - 1
        policy = build(self.name, top, **dict(self.policy))
        budgets = jnp.asarray(np.resize(self.budgets or (top, top), batch), jnp.int32)
        rng = np.random.default_rng(0)
        filled = np.full((batch, kv_heads, self.slots), -1)
        for row, live in enumerate(np.asarray(budgets) - 2):  # two steps before the first victim, holes anywhere
            for head in range(kv_heads):
                filled[row, head, rng.permutation(self.slots)[:live]] = rng.permutation(live)
        random = lambda *shape: jnp.asarray(rng.normal(size=shape), self.dtype)  # noqa: E731
        groups = [decoding(policy, self.slots, each, self.held) for each in (None, implementation)]
        layer = empty(groups[0], batch, kv_heads, self.dim, self.dtype)
        shape = (*layer.position.shape, self.dim)
        made = encode(groups[0].storage, random(*shape), random(*shape), jnp.dtype(self.dtype))
        made = jax.tree.map(functools.partial(spoiled, live=filled >= 0), made)
        gpu = jax.default_backend() == "gpu"
        # A GPU rounds sums in another order: statistics are so far apart there that few victims depend on it.
        noted = functools.partial(rng.uniform, 3, 99) if gpu else functools.partial(rng.integers, 3, 9)
        layer = layer.replace(
            stores=(made,),
            position=jnp.asarray(filled, jnp.int32),
            stats={
                s.name: jnp.asarray(np.where(filled >= 0, noted(size=filled.shape), 0), jnp.float32)
                for s in policy.needs
            },
        )  # fmt: skip
        ours = layer
        plain, kernel = (jax.jit(functools.partial(one_step, each, window=self.window)) for each in groups)
        # A decoded number is a product and a sum. XLA may compute them as one on a GPU, and round to another bfloat16.
        fused = self.held is not None and self.dtype == jnp.bfloat16 and gpu
        near = {"rtol": 2e-3, "atol": 1e-4} if fused else {"rtol": 1e-5, "atol": 1e-5}
        for number in range(steps):
            query = random(batch, kv_heads * self.group, 1, self.dim)
            key, value = (random(batch, kv_heads, 1, self.dim) for _ in range(2))
            at = budgets - 2 + number
            at = at.at[1].set(-1) if number == steps - 1 else at  # a row that has ended
            expected, layer = plain(layer, query, key, value, at[:, None], budgets)
            got, ours = kernel(ours, query, key, value, at[:, None], budgets)
            rounding = error if self.dtype == jnp.float32 else 0.02
            np.testing.assert_allclose(np.float32(got), np.float32(expected), atol=rounding)
            # XLA writes codes where the step's victim was, the kernel where a slot was empty before.
            one, other = (each if self.held is None else by_position(each) for each in (ours, layer))
            np.testing.assert_array_equal(one.position, other.position)
            live = np.asarray(other.position) >= 0
            for mine, x in zip(jax.tree.leaves(one.stores), jax.tree.leaves(other.stores), strict=True):
                np.testing.assert_array_equal(mine[live], x[live])
            for stat, column in other.stats.items():
                np.testing.assert_allclose(one.stats[stat], column, **near, err_msg=stat)


def spoiled(part: jax.Array, live: np.ndarray) -> jax.Array:
    """Codes [B, K, S, bytes] with 255, which is NaN in e4m3, in empty slots: what these hold does not matter."""
    return jnp.where(live[..., None], part, jnp.uint8(CODE)) if part.dtype == jnp.uint8 else part


def by_position(layer: LayerKV) -> LayerKV:
    """The layer with its slots in the order of their positions."""
    order = np.argsort(layer.position, axis=2)

    def ordered(x: jax.Array) -> np.ndarray:
        return np.take_along_axis(np.asarray(x), order.reshape(*order.shape, *(1,) * (x.ndim - 3)), axis=2)

    return layer.replace(
        position=ordered(layer.position), stores=jax.tree.map(ordered, layer.stores),
        stats=jax.tree.map(ordered, layer.stats),
    )  # fmt: skip
