"""GGUF files as llama.cpp's converter writes them, from the tensors and the config.json of a Hugging Face folder.

Written from that program's behaviour with the package ``gguf``, whose writer has the keys of metadata; nothing here is
of `kvjax.checkpoint.gguf`.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

#: ``model_type`` -> architecture.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "olmo2": "olmo2", "granite": "granite", "starcoder2": "starcoder2", "stablelm": "stablelm", "smollm3": "smollm3",
}  # fmt: skip
PERMUTED = {"llama", "granite", "smollm3"}  # architectures whose rotary pairs are neighbours in llama.cpp
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
HEAD_NORM = re.compile(r"(.*_layernorm)\.norms\.(\d+)\.weight")


def write(
    path: Path,
    raw: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kinds: dict[str, str] | None = None,
    vocabulary: dict[str, Any] | None = None,
    vectors: dict[str, np.ndarray] | None = None,
    more: dict[str, Any] | None = None,
    files: int = 1,
) -> None:
    """Writes a file.

    Args:
      path: to write to.
      raw: config.json.
      tensors: Hugging Face names -> arrays.
      kinds: a part of the names in GGUF -> the type of those tensors; float32 for all others.
      vocabulary: metadata of the tokenizer, without the prefix ``tokenizer.``.
      vectors: further tensors.
      more: further metadata.
      files: over how many files it is split.
    """
    name = ARCHITECTURES[raw["model_type"]]
    small = {"split_max_tensors": -(-len(tensors) // files)} if files > 1 else {}
    writer = gguf.GGUFWriter(path, name, **small)
    settings(writer, name, raw)
    for key, value in {
        **{f"tokenizer.{key}": value for key, value in (vocabulary or {}).items()},
        **(more or {}),
    }.items():
        add(writer, key, value)
    layers = raw["num_hidden_layers"]
    names = gguf.get_tensor_name_map(next(n for n, each in gguf.MODEL_ARCH_NAMES.items() if each == name), layers)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for own, array in tensors.items():
        if name in PERMUTED and (kind := re.search(r"\.([qk])_proj\.", own)):
            heads = raw["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
            array = permuted(array, heads)
        if name.startswith("gemma") and own.endswith("norm.weight"):
            array = array + np.float32(1)
        if entry := EXPERT.fullmatch(own):
            stacks.setdefault(f"{entry[1]}.{entry[3]}", {})[int(entry[2])] = array
        elif entry := HEAD_NORM.fullmatch(own):
            stacks.setdefault(f"{entry[1]}.weight", {})[int(entry[2])] = array
        else:
            put(writer, names.get_name(own, try_suffixes=(".weight", ".bias")), array, kinds or {})
    for own, entries in stacks.items():
        whole = np.stack([entries[index] for index in range(len(entries))])
        put(writer, names.get_name(own, try_suffixes=(".weight", ".bias")), whole, kinds or {})
    for own, array in (vectors or {}).items():
        put(writer, own, array, {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings(writer: gguf.GGUFWriter, name: str, raw: dict[str, Any]) -> None:
    """Writes the settings of the decoder."""
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(raw["num_key_value_heads"])
    if "head_dim" in raw:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * raw.get("partial_rotary_factor", 1)))
    if name in ("stablelm", "starcoder2"):
        writer.add_layer_norm_eps(raw.get("layer_norm_eps", raw.get("norm_epsilon", 1e-5)))
    else:
        writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(raw.get("rope_theta", 10_000.0))
    writer.add_vocab_size(raw["vocab_size"])
    if experts := raw.get("num_local_experts", raw.get("num_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(raw.get("num_experts_per_tok", 2))
    if "moe_intermediate_size" in raw:
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if raw.get("sliding_window") and name in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(raw["sliding_window"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(raw.get("attn_logit_softcapping", 50.0))
        writer.add_final_logit_softcapping(raw.get("final_logit_softcapping", 30.0))
    if name == "granite":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    if name == "stablelm":
        writer.add_parallel_residual(raw.get("use_parallel_residual", False))
    if name == "phi3":
        writer.add_rope_scaling_orig_ctx_len(
            raw.get("original_max_position_embeddings", raw["max_position_embeddings"])
        )
    scaling = raw.get("rope_scaling") or {}
    if (kind := scaling.get("rope_type")) in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Pairs of features that are half a head apart become neighbours."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def put(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kinds: dict[str, str]) -> None:
    """Writes a tensor in its type."""
    kind = next((gguf.GGMLQuantizationType[kind] for part, kind in kinds.items() if part in name), None)
    if kind is None:
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        return
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind), raw_dtype=kind)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Writes a value of metadata in the type that llama.cpp's converter gives it."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
