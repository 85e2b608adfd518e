"""Fixtures of the tests of storages."""

import pytest

from tests import conftest


@pytest.fixture(autouse=True)
def optimised():
    """The suite compiles without optimisations, for speed; they are what could round differently."""
    with conftest.optimised():
        yield
