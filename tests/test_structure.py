"""The rooms of the library: which package may import which (imports point downwards)."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: The rooms in order; a module imports its own room and those above it in this list, which are below it in the house.
ROOMS = [
    {
        "errors",
        "numerics",
        "parallel",
        "specs",
        "devices",
        "environment",
        "host",
        "kept_files",
        "lazy",
        "products",
        "units",
        "typing",
        "summary",
        "arguments",
        "version",
    },
    {"policies"},
    {"storage", "selection"},
    {"kernels"},
    {"attention"},
    {"inputs", "models.config"},
    {"cache"},
    {"models", "generation.sampling"},
    {"checkpoint"},
    {"generation", "speculation"},
    {"contexts"},
    {"reuse"},
    {"presets", "specs.parse"},
    {"planning", "analysis", "training", "lm_eval", "serve", "transport"},
]
#: Public names that run the cache, found when they are asked for; and a policy that is made of a selection.
LATE = {("storage/__init__.py", "cache"), ("policies/h2o_variants.py", "selection")}

#: Kinds of policies made of others, and the fields that say how a policy is made.
KINDS = {"Split", "SplitLayers", "Phases", "WithSelection"}
FIELDS = {"when", "merge", "chosen", "others", "importance", "scope"}
#: Pallas's `when`, a side's, a tensor's `merge`, a selection's `chosen` and a tokenizer's `Split` are others of that
#: name.
OTHER_OWNERS = {"pl", "side", "tensor", "self", "look", "pre_tokenizers"}
#: Fields that policies had once.
FORMER = {"then", "mask", "parts", "limits", "most", "shrinks"}


def room_of(module: str) -> int:
    names = module.split(".")[1:]
    for length in (2, 1):
        for number, room in enumerate(ROOMS):
            if ".".join(names[:length]) in room:
                return number
    raise AssertionError(f"{module} is in no room: say in ROOMS where it belongs")


def imports(path: Path) -> set[str]:
    """Modules of kvjax that a file imports when it runs (not those for types alone)."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvjax"):
            package = node.module == "kvjax"
            found |= {f"kvjax.{alias.name}" for alias in node.names} if package else {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("kvjax.")}
    return found


FILES = sorted((ROOT / "kvjax").rglob("*.py"))


@pytest.mark.parametrize("path", [p for p in FILES if p != ROOT / "kvjax/__init__.py"], ids=lambda p: p.stem)
def test_imports_point_downwards(path):
    inside = path.relative_to(ROOT / "kvjax")
    own = room_of(".".join(("kvjax", *inside.with_suffix("").parts)).removesuffix(".__init__"))
    for module in imports(path):
        if (str(inside), module.split(".")[1]) not in LATE:
            assert room_of(module) <= own, f"{inside} imports {module}"


def test_a_wrong_import_would_be_seen(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def f():\n    from kvjax.cache import step\n    import kvjax.planning\n")
    assert imports(path) == {"kvjax.cache", "kvjax.planning"}
    assert room_of("kvjax.policies.h2o") < room_of("kvjax.cache.step.step") < room_of("kvjax.planning")


def test_only_policies_and_the_cache_read_how_a_policy_is_made():
    for path in (*FILES, *sorted((ROOT / "experiments").rglob("*.py"))):
        if not {"policies", "cache"} & set(path.relative_to(ROOT).parts):
            assert not reads_policies(path.read_text()), path


def reads_policies(source: str) -> list[str]:
    """Expressions that look at how a policy is made, instead of asking `kvjax.policies.traits`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(names=names):
                found += [each.name for each in names if each.name in KINDS]
            case ast.Attribute(value=value, attr=attr):
                of = ast.unparse(value)
                if (attr in FIELDS and of not in OTHER_OWNERS) or (attr in FORMER and of.endswith("policy")):
                    found.append(ast.unparse(node))
                if attr in KINDS and of not in OTHER_OWNERS:
                    found.append(ast.unparse(node))
    return found


def test_looking_at_how_a_policy_is_made_would_be_seen():
    for source in (
        "from kvjax.policies import Split", "from kvjax import policies\nisinstance(x, policies.Phases)",
        "each.when == 'step'", "phases(policy)[-1].merge", "policy.chosen.budget", "spec.policy.then",
    ):  # fmt: skip
        assert reads_policies(source), source
    assert not reads_policies("from kvjax.policies.traits import is_split\npl.when(x)\npolicy.budget\nself.chosen(y)")
