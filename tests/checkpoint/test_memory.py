"""Loading never holds more than the model and its largest tensor, whatever the file's format and dtype."""

import json
import subprocess
import sys

import flax.serialization
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.models import families
from tests.checkpoint import folders

# Resident memory that is not tensors: pieces being read, XLA's arena, the allocator's slack.
SLACK = 8e6

MEASURE = """
import json, sys
import jax, jax.numpy as jnp
from kvjax.checkpoint.huggingface import load

def memory(field):  # not getrusage, whose maximum a process inherits from the one that started it
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

weights = sys.argv[3] if len(sys.argv) > 3 else None
load(sys.argv[1], dtype=jnp.float32, weights=weights)  # imports and traces, whose memory is not the checkpoint's
before = memory("VmRSS")
model = load(sys.argv[2], dtype=jnp.float32, weights=weights)
peak = memory("VmHWM") - before
print(json.dumps({"peak": peak, "model": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))}))
"""


def write(folder, kind, family, **sizes):
    _, _, found = folders.folder_with(folder, folders.raw_config(family, **sizes))
    if kind == "flax":
        (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(folders.flax_tree(found)))
    else:
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32
        save_file({name: array.astype(dtype) for name, array in found.items()}, folder / "model.safetensors")
    return max(array.size for array in found.values()) * 4


SIZES = {
    "hidden_size": 768, "n_embd": 768, "word_embed_proj_dim": 768, "head_dim": 192, "vocab_size": 8000,
    "intermediate_size": 3072, "ffn_dim": 3072, "n_inner": 3072, "num_hidden_layers": 4, "n_layer": 4,
}  # fmt: skip
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@pytest.mark.sampled(1)
@needs_proc
@pytest.mark.parametrize(("kind", "family"), [("bfloat16", "phi3"), ("flax", "opt"), ("float32", "gpt2")])
def test_peak_memory(kind, family, tmp_path):
    write(tmp_path / "small", kind, family)
    largest = write(tmp_path / "large", kind, family, **SIZES)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{kind} {family}: {result}, largest {largest}, ratio {result['peak'] / (result['model'] + largest):.3f}")
    assert result["model"] > 100e6
    assert result["peak"] < result["model"] + largest + SLACK


@pytest.mark.sampled(0)
@needs_proc
def test_peak_memory_of_weights_that_are_quantised(tmp_path):
    """Not that of the exact model, which is never held: that of the codes and of one exact matrix."""
    write(tmp_path / "small", "float32", "llama")
    largest = write(tmp_path / "large", "float32", "llama", **SIZES)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), "int4"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    exact = sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
    print(f"{result}, largest {largest}, exact {exact}")
    assert result["model"] < exact / 2
    # Programs for the shapes of the large model are compiled, which takes some megabytes.
    assert result["peak"] < result["model"] + largest + 3 * SLACK < exact


@pytest.mark.sampled(0)
@needs_proc
@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_peak_memory_of_gguf(kind, tmp_path):
    """A file is dequantised some blocks at a time."""
    writer = pytest.importorskip("tests.checkpoint.gguf_files", reason="GGUF files need gguf")
    largest = 0
    for name, sizes in (("small", {"hidden_size": 32, "head_dim": 8, "intermediate_size": 32}), ("large", SIZES)):
        raw = folders.raw_config("llama", tie_word_embeddings=True, **sizes)
        config = families.read(raw)
        found = folders.tensors(config, folders.random_params(config))
        writer.write(tmp_path / f"{name}.gguf", raw, found, kinds={"attn_q.": kind, "ffn_": kind, "token_embd": kind})
        largest = max(array.size for array in found.values()) * 4
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small.gguf"), str(tmp_path / "large.gguf")]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{kind}: {result}, largest {largest}, ratio {result['peak'] / result['model']:.3f}")
    assert result["model"] > 100e6
    # The numbers of a piece are in memory in several forms while it is dequantised.
    assert result["peak"] < result["model"] + largest + 4 * SLACK
    assert result["peak"] < 1.2 * result["model"] + 4 * SLACK
