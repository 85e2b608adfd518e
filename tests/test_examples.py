"""Every entry of the registries has an example, which the laws run."""

import pytest

from kvjax import policies, selection, storage
from tests import examples

TABLES = {
    "policies": (examples.POLICIES, policies.POLICIES),
    "combinators": (examples.combined(), policies.COMBINATORS),
    "plans of heads, layers and phases": (examples.planned(), policies.HEAD_PLANS),
    "storages": (examples.STORAGES, storage.STORAGES),
    "selections": (examples.SELECTIONS, selection.SELECTIONS),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_entry_has_one(kind):
    """A new policy, storage or selection that the laws do not run fails here."""
    known, registry = TABLES[kind]
    assert set(known) == set(registry), f"add what is new to tests/examples.py: {set(known) ^ set(registry)}"
