"""`program`: `jax.jit` for the large programs, with what makes XLA compile them sooner.

XLA for CPUs has two ways to turn a fusion into code. The newer one takes longer: of the first `generate` of kvjax-tiny
under h2o, 6.5 CPU seconds become 4.9 without it (jax 0.10.2, AMD EPYC), with the same results to the bit and the same
time for a token. Later versions of jax have no such option, and are not given it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

OPTIONS: dict[str, bool | int | str] = {"xla_cpu_use_fusion_emitters": False}


@functools.cache
def options() -> dict[str, bool | int | str] | None:
    """Returns compiler options for the default backend, or None."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: x, compiler_options=OPTIONS).lower(np.float32(0)).compile()
    except jax.errors.JaxRuntimeError:
        return None
    return OPTIONS


class Program:
    """A function that is jitted when it is first called, since that depends on the backend."""

    def __init__(self, function: Callable[..., Any], **arguments: Any) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Within another program, or a gradient, the outer one has the options.
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        return (self._inner if traced else self.jitted)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.jitted, name)

    @functools.cached_property
    def jitted(self) -> Any:
        """The jitted function."""
        return jax.jit(self._function, compiler_options=options(), **self._arguments)

    @functools.cached_property
    def _inner(self) -> Any:
        return jax.jit(self._function, **self._arguments)


def program(**arguments: Any) -> Callable[[Callable[..., Any]], Program]:
    """Returns a decorator that does what `jax.jit` does, with compiler options.

    Args:
      arguments: of `jax.jit`.
    """
    return lambda function: Program(function, **arguments)
