"""Fits linear gates to the scores of a replay by least squares, in closed form (KVzap, arXiv:2601.07891, ridge)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import count_argument
from kvjax.cache import shared_prefix
from kvjax.errors import PolicyError
from kvjax.inputs import check_batch
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies.gates import Gate, LinearGate
from kvjax.storage.calibration import Calibration
from kvjax.summary import one_line
from kvjax.training.objectives import FLOOR, Examples, ReplayedScore
from kvjax.training.setup import Setup, calibration_of

#: Weights of the squared norm of a kernel, relative to the mean variance of a feature, of which the best is taken.
RIDGES = tuple(10.0**exponent for exponent in range(-8, 2))
VALIDATION = 5  # the ridge is chosen on every fifth batch


class Moments(NamedTuple):
    """The sums over tokens that a least-squares fit of one layer depends on, float64 on the host.

    Attributes:
      gram: [E + 1, E + 1], Σ x xᵀ of hidden states x with a 1 appended.
      cross: [E + 1, K], Σ x yᵀ, with the target y of each KV head.
      squares: [K], Σ y².
    """

    gram: np.ndarray
    cross: np.ndarray
    squares: np.ndarray

    @classmethod
    def zeros(cls, hidden: int, kv_heads: int) -> "Moments":
        """Returns the sums over no token, for hidden states of `hidden` features."""
        size = hidden + 1
        return cls(np.zeros((size, size)), np.zeros((size, kv_heads)), np.zeros(kv_heads))

    @classmethod
    def of(cls, hidden: ArrayLike, target: ArrayLike) -> "Moments":
        """Returns the sums over the tokens of some texts.

        Args:
          hidden: [B, T, E].
          target: [B, K, T], the score that the gate should return.
        """
        x = np.asarray(hidden, np.float64).reshape(-1, np.shape(hidden)[-1])
        # [N, E + 1] and [N, K]
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        y = np.moveaxis(np.asarray(target, np.float64), 1, 2).reshape(len(x), -1)
        return cls(x.T @ x, x.T @ y, np.sum(y**2, axis=0))

    def plus(self, other: "Moments") -> "Moments":
        """Returns the sums over the tokens of both."""
        return Moments(*(one + two for one, two in zip(self, other, strict=True)))

    @property
    def tokens(self) -> float:
        """The number of tokens."""
        return float(self.gram[-1, -1])

    def solutions(self, ridges: np.ndarray) -> np.ndarray:
        """Returns the coefficients of each KV head for each ridge, the bias last, [R, K, E + 1].

        With x̄ and ȳ the means, they minimise Σ (w·x + c - y)² + ridge · tr(Σ (x - x̄)(x - x̄)ᵀ) / E · ‖w‖².

        Args:
          ridges: [R] or [R, K], for each KV head its own.
        """
        mean_x, mean_y = self.gram[-1, :-1] / self.tokens, self.cross[-1] / self.tokens
        scatter = self.gram[:-1, :-1] - self.tokens * np.outer(mean_x, mean_x)
        cross = self.cross[:-1] - self.tokens * np.outer(mean_x, mean_y)
        # One decomposition serves all ridges.
        variance, basis = np.linalg.eigh(scatter)
        ridges = np.broadcast_to(ridges.reshape(len(ridges), -1), (len(ridges), len(mean_y)))
        # [R, K, E]
        shrunk = np.maximum(variance, 0) + ridges[..., None] * np.trace(scatter) / len(scatter)
        kernel = (basis.T @ cross).T / shrunk @ basis.T
        return np.concatenate([kernel, (mean_y - kernel @ mean_x)[..., None]], axis=2)

    def errors(self, solutions: np.ndarray) -> np.ndarray:
        """Returns the mean squared errors of coefficients [..., K, E + 1], [..., K]."""
        fitted = np.sum((solutions @ self.gram) * solutions, axis=-1)
        return (self.squares - 2 * np.sum(solutions * self.cross.T, axis=-1) + fitted) / self.tokens


class Fit(NamedTuple):
    """Linear gates of all layers.

    Attributes:
      gates: of each layer, the parameters of a `LinearGate`, float32.
      ridge: [L, K] float64, the ridge of each KV head.
      loss: the mean squared error on the validation texts before these joined the fit.
    """

    gates: list[dict[str, np.ndarray]]
    ridge: np.ndarray
    loss: float


def fit(texts: Sequence[Moments], validation: Sequence[Moments]) -> Fit:
    """Returns the gates with the ridges of `RIDGES` that have the smallest errors on validation texts, head by head.

    The gates themselves are fitted to all texts, with these ridges.

    Args:
      texts: of each layer.
      validation: of each layer, of other texts.
    """
    ridges, gates, chosen, losses = np.asarray(RIDGES), [], [], []
    for one, two in zip(texts, validation, strict=True):
        # [R, K]
        errors = two.errors(one.solutions(ridges))
        best = ridges[np.argmin(errors, axis=0)]
        # [K, E + 1]
        solution = one.plus(two).solutions(best[None])[0].astype(np.float32)
        gates.append({"kernel": solution[:, :-1], "bias": solution[:, -1]})
        chosen.append(best)
        losses.append(errors.min(axis=0))
    return Fit(gates, np.stack(chosen), float(np.mean(losses)))


def validates(batch: int) -> bool:
    """Whether a batch chooses the ridge: the second one is the first of them."""
    return batch % VALIDATION == 1


def check(gate: Gate, objective: ReplayedScore) -> None:
    """Checks that a gate is linear in its parameters, and its loss a squared error.

    Raises:
      PolicyError: another gate, or another loss.
    """
    if not isinstance(gate, LinearGate) or gate.output != "none":
        raise PolicyError(
            f"{gate!r} has no closed form: least squares fit a LinearGate(output='none'); give this gate, or train by "
            "gradients."
        )
    if objective.form != "log":
        raise PolicyError(f"form={objective.form!r} is not a squared error; least squares need form='log'.")


def moments(examples: Examples) -> list[Moments]:
    """Returns the moments of each layer, with the logarithms of replayed scores as targets.

    Args:
      examples: on the host, see `ReplayedScore.examples`.
    """
    return [
        Moments.of(hidden, np.log(np.maximum(np.asarray(z, np.float64), FLOOR)))
        for hidden, z in zip(examples.hidden, examples.targets, strict=True)
    ]


class FittedGate(NamedTuple):
    """The result of `fit_gate`.

    Attributes:
      calibration: the parameters, for ``learned(..., gate=gate)``.
      ridge: [L, K] float64, the ridge of each KV head, one of `RIDGES`.
      loss: the mean squared error on validation texts, of gates that were fitted to the others.
    """

    calibration: Calibration
    ridge: np.ndarray
    loss: float

    def __repr__(self) -> str:
        return one_line(self)


def fit_gate(model: Model, gate: Gate, tokens: ArrayLike, *, objective: ReplayedScore, rows: int = 1) -> FittedGate:
    """Fits a linear gate to the scores of a replay by least squares; the model is not trained.

    The result is the exact minimum of the squared error to log z (KVzap, arXiv:2601.07891) plus a ridge. One of five
    batches chooses the ridge of each KV head, then all batches are fitted. `train_gate` takes other gates and
    objectives, and needs many more passes.

    Args:
      model: from `kvjax.load`.
      gate: a `LinearGate`.
      tokens: [B, T] int, texts without padding; B is a multiple of `rows`, and at least 2 · `rows`.
      objective: with the squared error, and a replayer for texts [rows, T].
      rows: the number of texts of a batch.

    Raises:
      InputError: tokens that do not fit the model.
      PolicyError: a gate or an objective that has no closed form, or a number of texts that cannot be divided.
      ConfigError: a model that is spread over several processes.
    """
    distributed.check_alone(model.params, "kvjax.training.fit_gate")
    shared_prefix.refuse(model.params, "kvjax.training.fit_gate")
    check(gate, objective)
    rows = count_argument("rows", rows, minimum=1)
    texts = check_batch(model.config, tokens, None, new_tokens=0).tokens
    if len(texts) % rows or len(texts) < 2 * rows:
        raise PolicyError(f"{len(texts)} texts cannot be divided into at least 2 batches of rows={rows}; give more.")
    setup = Setup(model.config, gate, ())
    examples = jax.jit(lambda params, ids: objective.examples(setup, params, ids))
    sums: list[Any] = [None, None]  # of texts, and of validation texts
    with model.on_mesh():
        for number, start in enumerate(range(0, len(texts), rows)):
            own = moments(jax.device_get(examples(model.params, model.place(texts[start : start + rows]))))
            use = validates(number)
            sums[use] = own if sums[use] is None else added(sums[use], own)
        found = fit(*sums)
        made = calibration_of(model, gate, jax.tree.map(jnp.asarray, found.gates), tokens=texts)
        return FittedGate(made, found.ridge, found.loss)


def added(one: Sequence[Moments], two: Sequence[Moments]) -> list[Moments]:
    """Returns the sums of the moments of each layer."""
    return [first.plus(second) for first, second in zip(one, two, strict=True)]
