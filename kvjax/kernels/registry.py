"""The registry of kernels, and the choice among them for a layer's step.

Each kernel's module has a function `refuses`, which returns the reason why the kernel cannot run a request, or None.
Pallas takes long to import, so a kernel's module is imported when the kernel is considered.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.kernels.coded import Coded
from kvjax.kernels.problem import Problem
from kvjax.numerics.statistics import Statistic
from kvjax.storage.base import Codec

Op = Literal["step", "decode", "prefill", "append"]
Backend = Literal["xla", "pallas_tpu", "pallas_gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A layer's step before it is traced; sizes are per device.

    Attributes:
      batch: the number of rows.
      kv_heads: the number of KV heads.
      whole_heads: whether each device has all KV heads of its rows.
      group: the number of query heads per KV head.
      tokens: the number of queries per head, 1 while decoding.
      slots: the number of slots per KV head.
      dim: the number of features of a head.
      dtype: name of the dtype of keys and values, such as ``bfloat16``.
      statistics: all statistics that the policy needs, including counts.
      parts: the number of problems whose attention is combined.
      codecs: of the keys and values of the first part, which a kernel reads as `Coded`; None = they are arrays.
      band: whether each row has its own window (`Problem.band`).
      soft_cap: whether the logits have a soft-cap (`Problem.soft_cap`).
      extras: what the step does besides append, attend, observe and evict, one entry each, such as ``a merge``.
      trace: the function after attention, (stats, position, columns, newest, budget) -> (stats, position), on [1, K, S]
        arrays of one row, which the kernel of a step traces. None = unknown.
    """

    batch: int
    kv_heads: int
    whole_heads: bool = True
    group: int
    tokens: int
    slots: int
    dim: int
    dtype: str
    statistics: tuple[Statistic, ...] = ()
    parts: int = 1
    codecs: tuple[Codec | None, Codec | None] = (None, None)
    band: bool = False
    soft_cap: bool = False
    extras: tuple[str, ...] = ()
    trace: Callable[..., Any] | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One implementation of one op.

    Attributes:
      op: ``step``, a whole decoding step of a layer; ``decode``, attention of one query per head; ``prefill``,
        attention of a block of queries; ``append``, the write of one slot per head.
      implementation: ``xla``, ``pallas_tpu`` or ``pallas_gpu``.
      load: imports and returns the function: ``step``, see `kvjax.kernels.step.arguments.Step`;
        ``attend_and_reduce``, which takes a `Problem`; or ``write``, see `kvjax.kernels.decode.append_tpu`.
      refuses: returns the reason why the kernel cannot run a request, or None.
      slot_multiple: itemsize of keys and values -> the number of slots must be a multiple of this.
    """

    op: Op
    implementation: Backend
    load: Callable[[], Callable[..., Any]]
    refuses: Callable[[Request], str | None]
    slot_multiple: Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A chosen kernel, and why the kernels before it were not chosen.

    Attributes:
      op: see `Kernel`.
      implementation: see `Kernel`.
      reasons: one per kernel that refused, each with the kernel's name.
    """

    op: Op
    implementation: Backend
    reasons: tuple[str, ...] = ()


GROUP_BYTES = 32  # bytes per feature of the slots that share a memory tile of a TPU, which is written whole
LANES = 128  # of a TPU, along which codes of one vector after the other lie; tiles are padded to as many
NO_SOFT_CAP = "it has no soft-cap of the logits"
GPU_SLOTS = 8  # the number of slots that copies into a GPU's shared memory move at once


def _attribute(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: getattr(importlib.import_module(f"kvjax.kernels.{module}"), name)


def _kernel(op: Op, implementation: Backend, module: str) -> Kernel:
    function = _attribute(module, {"step": "step", "append": "write"}.get(op, "attend_and_reduce"))
    if implementation == "xla":
        return Kernel(op, implementation, function, lambda request: None, lambda itemsize: 1)
    multiple = _tpu_slots if implementation == "pallas_tpu" else (lambda itemsize: GPU_SLOTS)
    refuses = _attribute(module, "refuses")
    return Kernel(op, implementation, function, lambda request: refuses()(request), multiple)


def _tpu_slots(itemsize: int) -> int:
    return max(GROUP_BYTES // itemsize, 1)


KERNELS: tuple[Kernel, ...] = (
    _kernel("step", "pallas_tpu", "step.tpu"),
    _kernel("step", "pallas_gpu", "step.gpu"),
    _kernel("decode", "pallas_tpu", "decode.pallas_tpu"),
    _kernel("decode", "pallas_gpu", "decode.pallas_gpu"),
    _kernel("decode", "xla", "decode.xla"),
    _kernel("prefill", "pallas_tpu", "prefill.pallas_tpu"),
    _kernel("prefill", "pallas_gpu", "prefill.pallas_gpu"),
    _kernel("prefill", "xla", "prefill.xla"),
    _kernel("append", "pallas_tpu", "decode.append_tpu"),
)


def find(op: Op, implementation: str) -> Kernel:
    """Returns the kernel for an op and an implementation.

    Raises:
      ConfigError: if there is none.
    """
    for kernel in KERNELS:
        if (kernel.op, kernel.implementation) == (op, implementation):
            return kernel
    known = ", ".join(f"{kernel.op}/{kernel.implementation}" for kernel in KERNELS)
    raise ConfigError(f"there is no kernel {op}/{implementation}; there are {known}.")


def choose(op: Op, implementation: str, request: Request) -> Choice:
    """Chooses the first kernel that does not refuse a request: for the op, for attention only, or XLA's.

    Args:
      op: the op; ``step`` tries the kernel of a whole step first.
      implementation: from `kvjax.attention.resolve`, not ``auto``.
      request: what the kernel must run.

    Raises:
      ConfigError: if every kernel refuses.
    """
    attention: Op = "decode" if request.tokens == 1 else "prefill"
    reasons: list[str] = []
    for kernel in KERNELS:
        asked = kernel.op in (op, attention) and kernel.implementation in (implementation, "xla")
        if not asked:
            continue
        reason = kernel.refuses(request)
        if reason is None:
            return Choice(kernel.op, kernel.implementation, tuple(reasons))
        reasons.append(f"{kernel.op}/{kernel.implementation}: {reason}")
    raise ConfigError(f"no kernel takes {request}: {'; '.join(reasons)}.")


def slot_multiple(implementation: str, itemsize: int, *, coded: bool = False) -> int:
    """Returns what the number of slots must be a multiple of, so that the kernels of an implementation need no copy.

    Args:
      implementation: of the kernels.
      itemsize: of keys and values.
      coded: whether slots hold codes.
    """
    if coded and implementation == "pallas_tpu":
        return LANES
    return max(kernel.slot_multiple(itemsize) for kernel in KERNELS if kernel.implementation == implementation)


def request_of(problem: Problem) -> Request:
    """Returns the request of a problem that is whole on one device."""
    batch, kv_heads, group, tokens, dim = problem.query.shape
    key, value = (x.codec if isinstance(x, Coded) else None for x in (problem.key, problem.value))
    return Request(
        batch=batch, kv_heads=kv_heads, group=group, tokens=tokens, slots=problem.slots, dim=dim,
        dtype=str(jnp.dtype(problem.key.dtype)), statistics=problem.statistics, codecs=(key, value),
        band=problem.band is not None, soft_cap=problem.soft_cap is not None,
    )  # fmt: skip


def require(op: Op, implementation: str, problem: Problem) -> None:
    """Checks that a kernel can run a problem.

    Raises:
      ConfigError: if it cannot, with the kernel's reason.
    """
    if reason := find(op, implementation).refuses(request_of(problem)):
        raise ConfigError(f"{op}/{implementation}: {reason}.")


def refuses_problem(request: Request, tokens: int | None = None, *, coded: bool = False) -> str | None:
    """Returns why no Pallas kernel for attention can run a request, or None.

    Args:
      request: the request.
      tokens: the number of queries per head that the kernel requires; None = any.
      coded: whether the kernel reads codes, as the first of several parts.
    """
    if any(request.codecs) and not coded:
        return f"it reads keys and values in {request.dtype}, not codes"
    if request.parts > 1 and not any(request.codecs):
        return f"it attends to one part, not to several parts ({request.parts})"
    if request.band:
        return "it takes one window for all rows, not a band per row"
    if request.soft_cap:
        return NO_SOFT_CAP
    largest = [s.name for s in request.statistics if s.largest and s.needs_attention]
    if largest and request.tokens > 1:
        return f"it adds up columns over queries, and statistic {largest[0]} is the maximum over them"
    if recurring := [s.name for s in request.statistics if s.recurs]:
        return f"it adds up columns over queries, and statistic {recurring[0]} depends on their positions"
    if tokens is not None and request.tokens != tokens:
        return f"it takes one query per head, not {request.tokens}"
    return None
