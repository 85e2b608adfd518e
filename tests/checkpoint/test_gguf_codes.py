"""`weights="stored"`: matrices of GGUF files that stay the codes that they are."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import gguf as files
from kvjax.checkpoint import orbax
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models.calibrate import fingerprint
from kvjax.products.quantized import dequantize, is_quantized, outputs_of
from tests.checkpoint import folders
from tests.checkpoint.test_gguf import small, written
from tests.conftest import ROOT, XLA_FLAGS
from tests.models.test_parity import log_probabilities

pytest.importorskip("gguf", reason="GGUF files need gguf")
writer = pytest.importorskip("tests.checkpoint.gguf_files")

KINDS = {
    "attn_q": "Q4_1", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "ffn": "Q4_0", "token_embd": "Q8_0",
    "output.weight": "Q4_0",
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2"])
def test_codes_are_kept(name, tmp_path):
    path = tmp_path / "model.gguf"
    raw, config, params = small(name, **WIDE)
    tensors = folders.tensors(config, params)
    # One group without a spread: its numbers are all its minimum.
    flat = next(value for key, value in tensors.items() if "layers.0.self_attn.q_proj.weight" in key)
    flat[3, :32] = -0.5
    writer.write(path, raw, tensors, kinds=KINDS)
    exact, kept = (kvjax.load(path, dtype=jnp.float32, weights=weights) for weights in (None, "stored"))
    matrices = 0
    for (_, expected), (_, found) in zip(
        jax.tree_util.tree_leaves_with_path(exact.params),
        jax.tree_util.tree_leaves_with_path(kept.params, is_leaf=is_quantized),
        strict=True,
    ):
        if is_quantized(found):
            matrices += 1
            assert found.group == 32
            table = found is kept.params["embed"]["tokens"]
            np.testing.assert_allclose(
                dequantize(found).T if table else dequantize(found), expected, rtol=1e-6, atol=2e-6
            )
        else:
            np.testing.assert_array_equal(found, expected)
    assert matrices == 14 + 1 + ("head" in exact.params)
    assert fingerprint(kept) == fingerprint(exact)
    with pytest.raises(CheckpointError, match="between two of its codes"):
        kvjax.save(kept, tmp_path / "saved")
    tokens = np.arange(12)[None]
    np.testing.assert_allclose(log_probabilities(kept, tokens), log_probabilities(exact, tokens), atol=2e-3)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_codes_in_narrow_dtypes(dtype, tmp_path):
    raw, config, params = small("llama", **WIDE)
    writer.write(tmp_path / "model.gguf", raw, folders.tensors(config, params), kinds=KINDS)
    exact, kept = (kvjax.load(tmp_path / "model.gguf", dtype=dtype, weights=weights) for weights in (None, "stored"))
    assert exact.dtype == kept.dtype == dtype
    tokens = np.arange(12)[None]
    # The scale of a row's group is rounded, and the product with it.
    step = 2 * float(jnp.finfo(dtype).eps)
    rows = outputs_of(kept.params["embed"]["tokens"], jnp.arange(kept.config.vocab_size), dtype)
    assert rows.dtype == dtype
    np.testing.assert_allclose(np.float32(rows), np.float32(exact.params["embed"]["tokens"]), rtol=step)
    made, expected = (kvjax.generate(model, tokens, kvjax.policies.full(), max_new_tokens=3) for model in (kept, exact))
    assert made.layout.dtype == expected.layout.dtype == np.dtype(dtype).name
    assert made.layout.bytes(1) == expected.layout.bytes(1)
    dtypes = [jax.tree.map(lambda leaf: str(leaf.dtype), run.state) for run in (made, expected)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.sampled(0)
def test_prompts_in_chunks_of_codes(tmp_path):
    """A server's prompts in blocks have a cache of the model's dtype, not of its codes'."""
    raw, config, params = small("llama", **WIDE)
    writer.write(tmp_path / "model.gguf", raw, folders.tensors(config, params), kinds=KINDS)
    exact, kept = (
        kvjax.load(tmp_path / "model.gguf", dtype=jnp.float32, weights=weights) for weights in (None, "stored")
    )
    tokens = np.arange(1, 13)[None]
    made, expected = (
        kvjax.generate(model, tokens, kvjax.policies.full(), max_new_tokens=3, prefill_block=4)
        for model in (kept, exact)
    )
    np.testing.assert_allclose(made.logprobs, expected.logprobs, atol=1e-3)
    dtypes = [jax.tree.map(lambda leaf: str(leaf.dtype), run.state) for run in (made, expected)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("head", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the latter's output head is its embedding
def test_codes_are_saved(name, head, tmp_path):
    raw, config, params = small(name, **{key: value for key, value in WIDE.items() if key in small(name)[0]})
    kinds = dict.fromkeys(KINDS, "Q4_0") | {"token_embd": "Q8_0", "output.weight": head}
    writer.write(tmp_path / "model.gguf", raw, folders.tensors(config, params), kinds=kinds)
    kept = kvjax.load(tmp_path / "model.gguf", dtype=jnp.float32, weights="stored")
    assert is_quantized(kept.params["embed"]["tokens"])
    kvjax.save(kept, tmp_path / "saved")
    again = kvjax.load(tmp_path / "saved", dtype=jnp.float32)
    tokens = np.arange(12)[None]
    np.testing.assert_allclose(log_probabilities(again, tokens), log_probabilities(kept, tokens), atol=1e-5)
    orbax.save_params(tmp_path / "params", kept.params)
    restored = orbax.restore_params(tmp_path / "params", kept.config)
    assert restored["embed"]["tokens"].bits == 8
    jax.tree.map(np.testing.assert_array_equal, restored, kept.params)


ON_A_MESH = """
import sys
import jax, jax.numpy as jnp, numpy as np
import kvjax

mesh = kvjax.make_mesh("model:2")
for path in sys.argv[1:]:
    for weights in (None, "int4", "stored"):
        one, several = (kvjax.load(path, dtype=jnp.float32, weights=weights, mesh=where) for where in (None, mesh))
        jax.tree.map(np.testing.assert_array_equal, one.params, several.params)
        kernel = several.params["layer_0"]["mlp"]["up"]["kernel"]
        assert len(jax.tree.leaves(kernel)[0].sharding.device_set) == 2
        table = jax.tree.leaves(several.params["embed"]["tokens"])[0]
        assert len(table.sharding.device_set) == 2
        tokens = np.arange(8)[None]
        full = kvjax.policies.full()
        made, expected = (
            kvjax.log_likelihood(each, tokens, full, prompt_length=4).logprobs for each in (several, one)
        )
        np.testing.assert_allclose(made, expected, atol=1e-4)
        on_host = kvjax.load(path, dtype=jnp.float32, weights=weights, host_weights=0.5)
        jax.tree.map(np.testing.assert_array_equal, one.params, on_host.params)
print("equal")
"""


@pytest.mark.sampled(0)
def test_on_a_mesh_and_in_host_memory(tmp_path):
    for name in ("llama", "phi3"):  # one with rearranged matrices, one with fused ones
        raw, config, params = small(name, **{key: value for key, value in WIDE.items() if key in small(name)[0]})
        writer.write(tmp_path / f"{name}.gguf", raw, folders.tensors(config, params), kinds=KINDS)
    command = [sys.executable, "-c", ON_A_MESH, *map(str, sorted(tmp_path.glob("*.gguf")))]
    environment = os.environ | {"XLA_FLAGS": f"{XLA_FLAGS} --xla_force_host_platform_device_count=2"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_codes_with_a_scale_that_is_no_number(tmp_path):
    path = tmp_path / "model.gguf"
    raw, config, params = small("llama", **WIDE)
    writer.write(path, raw, folders.tensors(config, params), kinds=KINDS)
    place = files.read(path).tensors["blk.1.attn_q.weight"].offset
    content = bytearray(path.read_bytes())
    content[place : place + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    for weights in (None, "stored"):
        with pytest.raises(CheckpointError, match="holds NaN or infinity"):
            kvjax.load(path, dtype=jnp.float32, weights=weights)


def test_codes_that_are_not_there(tmp_path):
    written(tmp_path / "model.gguf", "llama")
    with pytest.raises(ConfigError, match="no matrix of the types Q8_0, Q4_0, Q4_1"):
        kvjax.load(tmp_path / "model.gguf", weights="stored")
    with pytest.raises(ConfigError, match="has exact weights"):
        kvjax.load("kvjax-tiny", weights="stored")
