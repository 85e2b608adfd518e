"""The table of GGUF architectures: which family each is, and how its metadata becomes a ``config.json``.

Keys of metadata begin with the name of the architecture, which the table leaves out. A mistral is a ``llama`` in GGUF,
and so is a mixtral, which has a number of experts.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax.checkpoint.gguf.container import Container
from kvjax.checkpoint.gguf.elements import vector
from kvjax.checkpoint.gguf.metadata_errors import checked
from kvjax.errors import CheckpointError, ConfigError, shown
from kvjax.models import values
from kvjax.models.family import FULL, SLIDING
from kvjax.models.rope_config import YARN_SLOPE
from kvjax.models.values import Json

#: Key of metadata -> key of ``config.json``, in most families.
_USUAL = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA = _USUAL | _WINDOW
#: Keys without which a decoder cannot be made.
_NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
#: Ends of generation, by their keys in ``tokenizer.ggml``: of text, of a turn and of a message.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Names of tokens that end a text whatever the metadata say, as in llama.cpp.
END_TOKENS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>"}
)
CONTROL = 3  # type of a token
_THETA = 10_000.0  # base of the frequencies where the file has none, as in llama.cpp
_LARGE_GEMMA2, _LARGE_GEMMA3 = 46, 62  # layers of the models of 27 billion parameters, whose queries have another scale
_GEMMA3_PERIOD, _GEMMA3_LOCAL_THETA = 6, 10_000.0


@dataclasses.dataclass(frozen=True)
class Source:
    """A file, as the table below reads it.

    Attributes:
      container: the file.
      architecture: the name in GGUF.
    """

    container: Container
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value of metadata under the name of the architecture."""
        value = self.container.metadata.get(f"{self.architecture}.{key}", default)
        # Some files list a number for each layer.
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise ConfigError(
                    f"{self.container.path}: {self.architecture}.{key} differs between layers, {shown(value)}; the "
                    "layers of a decoder have parameters of the same shapes in kvjax."
                )
            value = value[0]
        # Settings are float32 in GGUF; 1e-05 reads back as 1e-05, and not as 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def has(self, tensor: str) -> bool:
        """Returns whether the first layer has a tensor."""
        return f"blk.0.{tensor}" in self.container.tensors


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF.

    Attributes:
      name: in GGUF, ``general.architecture``.
      family: ``model_type`` of ``config.json``.
      keys: key of metadata -> key of ``config.json``.
      neighbours: whether llama.cpp turns pairs of neighbouring features (``LLAMA_ROPE_TYPE_NORM``): the outputs of
        query and key projections are in that order.
      norm_offset: what the scales of norms have in the file and not in Hugging Face checkpoints.
      finish: further keys of ``config.json``.
    """

    name: str
    family: str
    keys: Mapping[str, str]
    neighbours: bool = False
    norm_offset: float = 0.0
    finish: Callable[[Source], Json] = lambda source: {}


def _llama(source: Source) -> Json:
    found: Json = {"attention_bias": source.has("attn_q.bias"), "mlp_bias": source.has("ffn_gate.bias")}
    if experts := source.get("expert_count", 0):
        found |= {"num_local_experts": experts, "num_experts_per_tok": source.get("expert_used_count", 2)}
        found["model_type"] = "mixtral"
    return found


def _phi3(source: Source) -> Json:
    found: Json = {"partial_rotary_factor": _rotated_share(source)}
    if original := source.get("rope.scaling.original_context_length"):
        found["original_max_position_embeddings"] = original
    return found


def _stablelm(source: Source) -> Json:
    parallel = bool(source.get("use_parallel_residual", False))
    return {
        "partial_rotary_factor": _rotated_share(source),
        "use_parallel_residual": parallel,
        "use_qkv_bias": source.has("attn_q.bias"),
        "qk_layernorm": source.has("attn_q_norm.weight"),
    }


def _gemma2(source: Source) -> Json:
    return {
        "query_pre_attn_scalar": _query_scalar(source, _LARGE_GEMMA2),
        "attn_logit_softcapping": source.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": source.get("final_logit_softcapping", 30.0),
    }


def _gemma3(source: Source) -> Json:
    period = source.get("attention.sliding_window_pattern", _GEMMA3_PERIOD)
    layers = source.get("block_count")
    return {
        "query_pre_attn_scalar": _query_scalar(source, _LARGE_GEMMA3),
        "final_logit_softcapping": source.get("final_logit_softcapping"),
        "rope_local_base_freq": source.get("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        "layer_types": [FULL if (index + 1) % period == 0 else SLIDING for index in range(layers)],
    }


def _query_scalar(source: Source, large: int) -> float:
    """Returns the number whose root divides the logits of attention; llama.cpp knows large models by their layers."""
    if source.get("block_count") == large:
        return float(source.get("embedding_length") / source.get("attention.head_count"))
    return float(source.get("attention.key_length", 256))


def _rotated_share(source: Source) -> float:
    """Returns the share of a head's features that is rotated."""
    dim = source.get("embedding_length") // source.get("attention.head_count")
    return float(source.get("rope.dimension_count", dim) / dim)


def _olmo2(source: Source) -> Json:
    if source.get("attention.sliding_window"):
        raise ConfigError(f"{source.container.path} is OLMo 3, whose layers have sliding windows; kvjax reads OLMo 2.")
    return {"attention_bias": source.has("attn_q.bias")}


def _qwen3_moe(source: Source) -> Json:
    return {"norm_topk_prob": True, "attention_bias": source.has("attn_q.bias")}


_ARCHITECTURES = (
    Architecture("llama", "llama", _USUAL, neighbours=True, finish=_llama),
    Architecture("qwen2", "qwen2", _USUAL),
    Architecture("qwen3", "qwen3", _USUAL, finish=lambda source: {"attention_bias": source.has("attn_q.bias")}),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        _USUAL
        | {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        finish=_qwen3_moe,
    ),
    Architecture("gemma", "gemma", _USUAL, norm_offset=1.0),
    Architecture("gemma2", "gemma2", _GEMMA, norm_offset=1.0, finish=_gemma2),
    Architecture("gemma3", "gemma3_text", _GEMMA, norm_offset=1.0, finish=_gemma3),
    Architecture("phi3", "phi3", _USUAL | _WINDOW, finish=_phi3),
    Architecture("olmo2", "olmo2", _USUAL, finish=_olmo2),
    Architecture(
        "granite",
        "granite",
        _USUAL
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        neighbours=True,
        finish=lambda source: {"attention_bias": source.has("attn_q.bias"), "mlp_bias": source.has("ffn_gate.bias")},
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        _USUAL | {"attention.layer_norm_epsilon": "norm_epsilon"},
        finish=lambda source: {"use_bias": source.has("attn_q.bias")},
    ),
    Architecture("stablelm", "stablelm", _USUAL | {"attention.layer_norm_epsilon": "layer_norm_eps"}, finish=_stablelm),
    Architecture(
        "smollm3",
        "smollm3",
        _USUAL,
        neighbours=True,
        finish=lambda source: {"attention_bias": source.has("attn_q.bias"), "mlp_bias": source.has("ffn_gate.bias")},
    ),
)
#: Name in GGUF -> architecture.
ARCHITECTURES = {each.name: each for each in _ARCHITECTURES}


def architecture_of(container: Container) -> Architecture:
    """Returns the architecture of a file.

    Raises:
      ConfigError: if it is unknown, or the file is an adapter or a part of a model for images.
    """
    kind = container.metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{container.path} is not a model: its general.type is {shown(kind)}.")
    name = container.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{container.path}: general.architecture {shown(name)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]


@checked
def config_json(container: Container) -> Json:
    """Converts metadata to a ``config.json``.

    Args:
      container: the file.

    Raises:
      CheckpointError: if a setting is missing that every decoder has.
      ConfigError: if the architecture or a setting is not supported.
    """
    architecture = architecture_of(container)
    source = Source(container, architecture.name)
    for key in _NEEDED:
        maximum = values.MAX_LAYERS if key == "block_count" else values.MAX_SIZE
        if not values.is_whole(value := source.get(key), 1, maximum):
            raise CheckpointError(
                f"{container.path}: {architecture.name}.{key}, a setting of every decoder, must be a whole number from "
                f"1 to {maximum}, but is {shown(value)}."
            )
    hidden, heads = source.get("embedding_length"), source.get("attention.head_count")
    # The defaults are llama.cpp's, which are not those of Hugging Face's families.
    found: Json = {"rope_theta": _THETA, "num_key_value_heads": heads}
    if hidden % heads == 0:
        found["head_dim"] = hidden // heads
    found |= {"model_type": architecture.family, **_tokens(container)}
    for key, name in architecture.keys.items():
        if (value := source.get(key)) is not None:
            found[name] = value
    features = source.get("attention.value_length", found.get("head_dim"))
    if features != found.get("head_dim"):
        raise ConfigError(
            f"{container.path}: values have {features} features and keys {found.get('head_dim')}; kvjax needs the same "
            "number for both."
        )
    # A window of 0 means none.
    found["sliding_window"] = found.get("sliding_window") or None
    found["tie_word_embeddings"] = "output.weight" not in container.tensors
    found |= architecture.finish(source)
    if scaling := _rope_scaling(source):
        found["rope_scaling"] = scaling
    return found


def _tokens(container: Container) -> Json:
    """Returns the size of the vocabulary and the ids of special tokens."""
    metadata = container.metadata
    embedding = container.tensors.get("token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    size = embedding.shape[0] if embedding is not None else len(tokens)
    ends = [metadata[key] for name in _ENDS if (key := f"tokenizer.ggml.{name}") in metadata]
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    ends += [
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in END_TOKENS
    ]
    return {
        "vocab_size": size,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(source: Source) -> Json | None:
    """Returns the scaling of the rotary embedding as ``config.json`` has it, or None."""
    factor = source.get("rope.scaling.factor", source.get("rope.scale_linear", 1.0)) or 1.0
    # Without a type, a factor is that of linear scaling.
    kind = source.get("rope.scaling.type", "none" if factor == 1 else "linear")
    original = source.get("rope.scaling.original_context_length") or source.get("context_length")
    if factors := vector(source.container, "rope_freqs.weight"):
        # The factors of LLaMA 3, one for each frequency, whatever the length of the text.
        if all(factor == 1 for factor in factors):
            return None
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": original,
            "attention_factor": 1.0,
        }
    long, short = (vector(source.container, f"rope_factors_{length}.weight") for length in ("long", "short"))
    if long and short:
        scaling: Json = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if (attention := source.get("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        return scaling if source.architecture == "phi3" else scaling | {"original_max_position_embeddings": original}
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            found: Json = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
            attention = source.get("rope.scaling.attn_factor", source.get("rope.scaling.yarn_attn_factor", 1.0))
            if attention != 1:
                found["attention_factor"] = attention * (1 + YARN_SLOPE * math.log(factor))
            for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
                if (value := source.get(f"rope.scaling.{key}")) is not None:
                    found[name] = value
            return found
    raise ConfigError(
        f"{source.container.path}: {source.architecture}.rope.scaling.type is {shown(kind)}; kvjax reads none, linear, "
        "yarn, and the factors of LLaMA 3 and LongRoPE."
    )
