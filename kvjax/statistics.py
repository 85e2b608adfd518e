"""Column statistics: what attention reports to a policy about every slot (POLICIES.md, "Column statistics").

Every statistic is a weighted sum over the queries i of a block, ``Σ_i w_i f(m[i, j])``, of an elementwise function of
the group-reduced probability ``m``; one attention routine therefore serves every policy and can reduce tile by tile
without ever holding the queries × slots matrix. This module is a leaf: attention and policies both import it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array
Transform = Literal["identity", "square", "above", "one"]
Accumulate = Literal["sum", "replace", "decay"]


@dataclasses.dataclass(frozen=True)
class Statistic:
    """One column statistic; hashable, so that it can be part of what a jitted step closes over.

    Attributes:
      name: key of the statistic in an `Observation` and in a policy's stats.
      transform: f, applied to m[i, j] for every query i that sees slot j: ``identity`` m, ``square`` m²,
        ``above`` [m ≥ 1 / (number of slots i sees)], ``one`` 1 (needs no attention).
      accumulate: how a block joins what is already there: ``sum`` adds it, ``replace`` keeps the block's last
        query alone, ``decay`` is the exponential average E ← γE + (1 − γ)m, applied query by query.
      gamma: γ of ``decay``; unused otherwise.
    """

    name: str
    transform: Transform = "identity"
    accumulate: Accumulate = "sum"
    gamma: float = 1.0

    @property
    def needs_attention(self) -> bool:
        return self.transform != "one"

    def query_weights(self, age: Array) -> Array:
        """Weight of each query from its age.

        Args:
          age: [B, n] int32, 0 for the block's last real query, 1 for the one before; negative for padding.

        Returns:
          [B, n] float32, 0 for padding.
        """
        match self.accumulate:
            case "sum":
                weight = jnp.ones(age.shape, jnp.float32)
            case "replace":
                weight = (age == 0).astype(jnp.float32)
            case "decay":
                gamma = jnp.float32(self.gamma)
                weight = (1 - gamma) * gamma ** jnp.maximum(age, 0).astype(jnp.float32)
        return jnp.where(age >= 0, weight, 0.0)

    def merge(self, old: Array, block: Array, queries: Array) -> Array:
        """Joins a block's column sums to the accumulated ones.

        Args:
          old: [B, K, S] float32 accumulated so far.
          block: [B, K, S] float32, ``Σ_i w_i f(m[i, j])`` of this block.
          queries: [B] int32 number of real queries of each row in this block; a row with none is unchanged.
        """
        n = queries[:, None, None]
        match self.accumulate:
            case "sum":
                return old + block
            case "replace":
                return jnp.where(n > 0, block, old)
            case "decay":
                return jnp.float32(self.gamma) ** n.astype(jnp.float32) * old + block


MASS = Statistic("mass")
MASS_SQ = Statistic("mass_sq", transform="square")
COUNT = Statistic("count", transform="one")
ABOVE = Statistic("above", transform="above")
LAST = Statistic("last", accumulate="replace")

NAMED: Mapping[str, Statistic] = {s.name: s for s in (MASS, MASS_SQ, COUNT, ABOVE, LAST)}


def decayed(gamma: float) -> Statistic:
    """E(γ): every query first decays all slots, then adds (1 − γ)m; independent of the block size."""
    return Statistic(f"decayed({gamma:g})", accumulate="decay", gamma=float(gamma))


def resolve(needs: Iterable[str | Statistic]) -> frozenset[Statistic]:
    """Turns names into statistics, so that a policy may declare ``needs={"mass", "mass_sq"}``.

    Raises:
      KeyError: for a name that is not in `NAMED`.
    """
    return frozenset(NAMED[need] if isinstance(need, str) else need for need in needs)


class Observation(flax.struct.PyTreeNode):
    """What attention saw of a block, for the statistics that were asked for and no others.

    Attributes:
      columns: statistic name -> [B, K, S] float32, this block's ``Σ_i w_i f(m[i, j])``; 0 for empty slots.
      queries: [B] int32 number of real (not padding) queries of each row.
    """

    columns: Mapping[str, Array]
    queries: Array

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]
