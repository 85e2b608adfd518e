"""Problems over a cache of codes and the step's own tokens, beside the same over what the codes decode to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention
from kvjax.attention import Problem
from kvjax.kernels.coded import Coded
from kvjax.storage import Codec, Fp8, Integer, Rotated, TurboQuant
from tests.kernels.cases import Case, assert_golden

CODE, NUMBER = 255, 1e15  # bytes of codes in empty slots, which are NaN in e4m3, and their scales and zeros


@dataclasses.dataclass(frozen=True)
class CodedCase:
    """A problem of one query per head over coded slots, and slots that are exact.

    Attributes:
      case: all slots; the last `exact` of them are another part.
      key: the codec of keys.
      value: that of values; None = the same.
      exact: the number of slots of the other part; 0 = there is none.
    """

    case: Case
    key: Codec
    value: Codec | None = None
    exact: int = 1

    def __str__(self):
        return f"{type(self.key).__name__}{getattr(self.key, 'bits', '')}-{self.case}"

    def made(self, inputs, known, *, rounded: bool) -> tuple[list[Problem], Problem]:
        """The parts, and the problem of all slots as they decode, in float32 or rounded to the model's dtype."""

        def coded(x, codec, position):
            def spoiled(part):
                """The part with rubbish in empty slots, which must not matter."""
                live = (position >= 0).reshape(*position.shape, *(1,) * (part.ndim - 3))
                return jnp.where(live, part, jnp.asarray(CODE if part.dtype == jnp.uint8 else NUMBER, part.dtype))

            made = codec.encode(x.astype(jnp.float32), None, x.dtype)
            return Coded(parts=jax.tree.map(spoiled, made), codec=codec, dim=x.shape[-1], dtype=x.dtype)

        def decoded(first):
            dtype = first.key.dtype if rounded else jnp.float32
            one, two = (x.codec.decode(x.parts, None, x.dim).astype(dtype) for x in (first.key, first.value))
            return first.replace(key=one, value=two)

        whole = self.case.problem(inputs, known)
        size = whole.slots - self.exact
        first = whole.only_slots(size)
        codecs = {"key": self.key, "value": self.value or self.key}
        held = {name: coded(getattr(first, name), codec, first.key_position) for name, codec in codecs.items()}
        first = first.replace(**held)
        plain = decoded(first)
        if not self.exact:
            return [first], plain
        arrays = {name: x for name, x in whole.by_head().items() if name != "query" and x is not None}
        rest = whole.replace(**{name: x[:, :, size:] for name, x in arrays.items()})
        joined = {
            name: jnp.concatenate([x, getattr(rest, name).astype(x.dtype)], axis=2)
            for name, x in ((name, getattr(plain, name)) for name in arrays)
        }
        return [first, rest], whole.replace(**joined)

    @property
    def shapes(self) -> list[Problem]:
        """The shapes of the parts."""
        return jax.eval_shape(functools.partial(self.made, rounded=False), *self.case.shapes)[0]

    def check(self, implementation: str, error: float, *, rounded: bool) -> None:
        parts, whole = jax.jit(functools.partial(self.made, rounded=rounded))(*self.case.arrays())
        output, columns = jax.jit(lambda parts: attention.attend_parts(parts, implementation))(parts)
        joined = {name: jnp.concatenate([each[name] for each in columns], axis=2) for name in columns[0]}
        assert_golden(output, joined, whole, error if self.case.dtype == jnp.float32 else 0.02)
        assert not np.asarray(output)[np.asarray(whole.query_position)[:, 0] < 0].any(), "the output of padding is 0"


# Codes whose slots are the rows of a TPU's tiles, or the lanes; several groups of channels, and a table.
CODED = [
    CodedCase(Case((1, 0), 2, 3, 1, 167, 128, jnp.float32), Integer(8)),
    CodedCase(Case((1,), 2, 4, 1, 399, 128), Integer(4), exact=20),
    CodedCase(Case((1,), 1, 9, 1, 143, 64, jnp.float32, log_weight=True, group_reduce="max"), TurboQuant(4)),
    CodedCase(Case((1, 1), 1, 1, 1, 71, 96, jnp.float32, window=40), Fp8(), Fp8(0.02)),
    CodedCase(Case((1,), 2, 2, 1, 95, 256), Integer(4), TurboQuant(4, seed=3), exact=0),
    CodedCase(Case((1,), 1, 2, 1, 71, 128, jnp.float32), Rotated(Integer(4)), Rotated(Fp8(0.02), 2)),
]

# The kernels for GPUs read keys and values of one codec, in groups of a multiple of 64 channels.
CODED_GPU = [
    CodedCase(Case((1, 0), 2, 3, 1, 167, 128, jnp.float32), Integer(8)),
    CodedCase(Case((1,), 2, 4, 1, 399, 128, split=True), Integer(4), exact=20),
    CodedCase(Case((1,), 1, 9, 1, 143, 64, jnp.float32, log_weight=True, group_reduce="max"), TurboQuant(4)),
    CodedCase(Case((1, 1), 1, 1, 1, 49, 64, window=40), Fp8()),
    CodedCase(Case((1,), 1, 2, 1, 95, 128), Integer(2, 128), exact=0),
    CodedCase(Case((1,), 1, 2, 1, 71, 128, jnp.float32), Rotated(Integer(4))),
]
