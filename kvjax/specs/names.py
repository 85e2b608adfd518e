"""Names of registries, read from their source files: a command's ``--help`` lists them without importing jax.

`tests/experiments/test_help.py` compares them with the registries.
"""

import ast
import functools
from pathlib import Path

_KVJAX = Path(__file__).resolve().parent.parent
#: Kind -> a file of kvjax, and the table in it.
TABLES = {
    "policies": ("policies/__init__.py", "POLICIES"),
    "combinators": ("policies/__init__.py", "COMBINATORS"),
    "head plans": ("policies/__init__.py", "HEAD_PLANS"),
    "storages": ("storage/__init__.py", "STORAGES"),
    "selections": ("selection/__init__.py", "SELECTIONS"),
    "weights": ("models/quantize.py", "WEIGHTS"),
    "shapes": ("models/shapes.py", "SHAPES"),
    "TPUs": ("devices.py", "TOPOLOGIES"),
    "GPUs": ("planning/topologies.py", "GPUS"),
}
#: Dtypes of weights and caches.
DTYPES = ("float32", "bfloat16", "float16")


def names(kind: str) -> list[str]:
    """Returns the names of a kind of `TABLES`, in the order of its table."""
    path, table = TABLES[kind]
    return list(keys(_KVJAX / path, table))


@functools.cache
def keys(path: Path, table: str) -> tuple[str, ...]:
    """Returns the texts that are keys of the first dict in the value of a module's variable.

    Args:
      path: of the module's source.
      table: the variable.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            found = next(each for each in ast.walk(node) if isinstance(each, ast.Dict))
            return tuple(
                key.value for key in found.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )
    raise KeyError(f"{path.name} has no table {table}")
