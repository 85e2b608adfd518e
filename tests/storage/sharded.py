"""Runs storages with and without a mesh, for tests/storage/test_sharded.py, in a process with eight devices.

Prints one line of JSON for each storage whose name is an argument.
"""

import json
import math
import re
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.parallel import sharding
from tests import conftest  # noqa: F401, it sets how programs are compiled
from tests.storage import every

MESH = "data:2,model:2"
#: Vectors of a pair of heads are held together, on one device.
MESHES = {"cskv": "data:4", "kv_heads": "data:2"}
COLLECTIVE = re.compile(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(text: str) -> dict[str, int]:
    """The result shapes of the collectives of a compiled program, and their numbers of elements."""
    found = {}
    for match in COLLECTIVE.finditer(text):
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
            found[f"{kind}[{dims}]"] = math.prod(int(n) for n in dims.split(",") if n)
    return found


def check(name: str) -> dict[str, Any]:
    given = every.tokens(), every.tokens(1)
    alone = jax.jit(lambda *given: every.run(name, every.prepare(name), *given))(*given)
    mesh = sharding.make_mesh(MESHES.get(name, MESH))
    place = NamedSharding(mesh, PartitionSpec("data", "model"))
    with jax.set_mesh(mesh):
        made = every.prepare(name)
        placed = jax.device_put(given, place)
        program = jax.jit(lambda *given: every.run(name, made, *given)).lower(*placed).compile()
        spread = program(*placed)
    live = np.asarray(alone.position) >= 0
    heads = every.KV_HEADS // mesh.shape["model"]
    leaves = jax.tree.leaves((spread.layer.stores, spread.layer.sides, spread.layer.position))
    expected = [(len(every.LENGTHS) // mesh.shape["data"], heads, *leaf.shape[2:]) for leaf in leaves]
    own = zip(jax.tree.leaves(alone.layer.stores), jax.tree.leaves(spread.layer.stores), strict=True)
    return {
        "positions_equal": bool(np.array_equal(alone.position, spread.position)),
        "codes_equal": all(np.array_equal(x, y) for x, y in own if x.dtype == np.uint8),
        "output_error": float(np.abs(np.asarray(alone.output) - np.asarray(spread.output)).max()),
        "cache_error": max(
            float(np.abs(np.asarray(x)[live] - np.asarray(y)[live]).max())
            for x, y in ((alone.key, spread.key), (alone.value, spread.value))
        ),
        "spread": [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves],
        "expected": expected,
        "collectives": collectives(program.as_text()),
    }


def main() -> None:
    assert len(jax.devices()) == 8, jax.devices()
    for name in sys.argv[1:]:
        print(json.dumps({"name": name} | check(name)), flush=True)


if __name__ == "__main__":
    main()
