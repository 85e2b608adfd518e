"""A model that says given tokens: each token is followed by the next one of its chain, whatever was before.

Its tokenizer.json has LLaMA 2's form: words with a mark for the space before them, bytes for all other characters, and
a decoder that leaves out the first space of a text.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

import kvjax

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
WORDS = ("▁", "▁the", "▁end", "▁Once", "▁upon", "▁time", "▁say", "x", "yz", "a", "b", "!", "?", "�")
LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *BYTES, *WORDS))}
CHARACTERS = "ခⴵ"  # of three bytes each, no two of which are the same
#: What follows a token that no chain has is the end of the text.
CHAINS = (
    ("x", "▁the", "▁end", "<|im_end|>", "▁Once", "▁upon", "a", "▁time"),
    ("b", *(f"<0x{byte:02X}>" for byte in CHARACTERS.encode()), "!", "▁say"),
)


def write_tokenizer(folder: Path, vocabulary: dict[str, int] = VOCABULARY, decoder=LLAMA2) -> None:
    """Writes tokenizer.json and its settings."""
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def load(folder: Path, chains: Sequence[Sequence[str]] = CHAINS) -> kvjax.Model:
    """Writes the model to a folder and loads it."""
    size, hidden = len(VOCABULARY), 320
    ones, layer = np.ones(hidden, np.float32), "model.layers.0."
    # Each token has a dimension of its own.
    weights = {"model.embed_tokens.weight": np.eye(size, hidden, dtype=np.float32), "model.norm.weight": ones}
    head = np.zeros((size, hidden), np.float32)
    following = dict(pair for chain in chains for pair in itertools.pairwise(chain))
    for token, number in VOCABULARY.items():
        head[VOCABULARY[following.get(token, "</s>")], number] = 1
    weights["lm_head.weight"] = head
    weights |= {f"{layer}{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
    zeros = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    zeros |= {"mlp.gate_proj": (32, hidden), "mlp.up_proj": (32, hidden), "mlp.down_proj": (hidden, 32)}
    weights |= {f"{layer}{name}.weight": np.zeros(shape, np.float32) for name, shape in zeros.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": size, "hidden_size": hidden,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return kvjax.load(folder)


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY[token] for token in tokens]


def byte_ids(text: str) -> list[int]:
    """The tokens of bytes of a text."""
    return ids(*(f"<0x{byte:02X}>" for byte in text.encode()))
