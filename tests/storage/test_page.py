"""docs/storages.md: its tables are those of the code, its blocks run, and its storage does what it says."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.programs import storage_tables
from kvjax import storage
from kvjax.specs import parse
from kvjax.storage import STORAGES
from tests.conftest import ROOT

TEXT = storage_tables.PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: what runs here is compared with no reference of rounding."""


@pytest.fixture(scope="module")
def page():
    names = {"__name__": "page"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"storages.md, block {number}", "exec"), names)
    return names


def test_tables_are_those_of_the_code():
    """`python -m experiments.storage_tables` writes them."""
    assert storage_tables.regenerated(TEXT) == TEXT


def test_tables_are_complete():
    named = set(re.findall(r"^\| `(\w+)", TEXT, re.MULTILINE))
    assert set(STORAGES) <= named
    refused = [line for line in TEXT.splitlines() if re.search(r"(refused|only [^|]*) \(\d", line)]
    for number in re.findall(r"\((\d+)\) \|", "\n".join(refused)):
        assert f"\n{number}. " in TEXT


YES, NO = "yes", "refused"
JOINT = ["yes", "only one by position", "only window, tova", NO, YES, YES]
#: What goes with `full`, a prompt compressor, eviction while decoding, merges, positions="cache" and prefill_block.
COMPOSES = {
    "fp16": [YES] * 6,
    "integer": [YES] * 6, "fp8": [YES] * 6, "bfp": [YES] * 6, "mxfp4": [YES] * 6, "kvquant": [YES] * 6,
    "turboquant": [YES] * 6, "levels": [YES] * 6, "kivi": [YES, YES, NO, NO, YES, YES],
    "nvfp4": [YES] * 6, "rotated": [YES] * 6, "kvarn": [YES, YES, NO, NO, YES, YES],
    "gear": [YES, YES, NO, NO, YES, NO], "mikv": [NO, YES, YES, NO, YES, NO],
    "mikv(balance=False)": [NO, YES, YES, NO, YES, YES], "zipcache": [YES, YES, NO, NO, YES, NO],
    "think": [YES, YES, YES, NO, NO, NO], "low_rank": [YES, YES, YES, NO, NO, YES], "cskv": JOINT, "kv_heads": JOINT,
    "minicache": [YES, "only one by position", NO, NO, YES, NO],
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSES)
def test_what_composes_is_what_the_definitions_say(name):
    (line,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |") and line.count("|") == 8]
    cells = [re.sub(r" \(\d+\)$", "", cell.strip()) for cell in line.split("|")[2:-1]]
    assert cells == COMPOSES[name]


def test_a_table_that_is_not_the_codes_would_be_seen():
    wrong = TEXT.replace("| `int8` | 272 |", "| `int8` | 256 |")
    assert wrong != TEXT == storage_tables.regenerated(wrong)


def test_what_is_refused_has_its_reason():
    held = parse.build("storage", "int8(residual=4)")
    ((spec, block),) = storage_tables.COLUMNS["`merge=`"].values()
    assert storage_tables.refusal(spec, held, block) is None
    host = parse.build("storage", 'int8(memory="host")')
    assert "merge" in str(storage_tables.refusal(spec, host, block))


def test_blocks_run(page):
    x = np.random.default_rng(1).normal(size=(3, 5, 20)).astype(np.float32)
    back = storage.round_trip(page["Signs"](), x, None, jnp.float32)
    np.testing.assert_allclose(back, np.sign(x) * np.abs(x).mean(axis=-1, keepdims=True), rtol=1e-5)
    assert page["signs"]().bytes_per_slot(128, "bfloat16") == 2 * (16 + 2)
    assert page["output"].shape == (2, 4, 8, 16)
    # Positions that are coded decode to two magnitudes, the newest four are exact.
    key, position = np.asarray(page["key"]), np.asarray(page["position"])
    newest = np.array([31, 24])[:, None, None]
    coded, exact = (position >= 0) & (position <= newest - 4), position > newest - 4
    assert coded.any() and exact.sum() == 2 * 2 * 4
    assert all(len(np.unique(np.abs(vector))) == 1 for vector in key[coded])
    rows, heads, slots = np.nonzero(exact)
    at = position[exact]
    prompt, decode = (page[name][1] for name in ("prompt", "decode"))
    for row, head, slot, p in zip(rows, heads, slots, at, strict=True):
        length = (24, 17)[row]
        own = prompt[row, head, p] if p < length else decode[row, head, p - length]
        np.testing.assert_array_equal(key[row, head, slot], own)


def test_links():
    assert "docs/storages.md" in (ROOT / "README.md").read_text()
    for module in re.findall(r"`kvjax\.storage\.(\w+)` has", TEXT):
        assert (ROOT / "kvjax" / "storage" / f"{module}.py").exists()
