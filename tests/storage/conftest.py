"""Fixtures of the tests of storages."""

import jax
import pytest


@pytest.fixture(autouse=True)
def optimised():
    """The suite compiles without optimisations, for speed; they are what could round differently."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
