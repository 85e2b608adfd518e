"""llama.cpp through llama-cpp-python: LLaMA in float32, weights and cache, batch 1, on the CPU.

Its wheel from PyPI is built from source, for this processor. Flash attention, and plain attention, are both tried.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from experiments.peers import Work
from experiments.peers.transformers import median_of_steps
from kvjax.errors import ConfigError


class LlamaCpp:
    """A model of a Hugging Face folder, by way of a GGUF file beside it."""

    def __init__(self, folder: str):
        try:
            import gguf
            import llama_cpp
        except ImportError as error:
            raise ConfigError(f"benchmarks against llama.cpp need {error.name}; install kvjax[bench-llama].") from None
        self.llama_cpp = llama_cpp
        self.path = Path(folder) / "model.gguf"
        self.vocabulary = write_gguf(gguf, Path(folder), self.path)

    def load(self, room: int, flash: bool) -> Any:
        """A context for `room` tokens."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return self.llama_cpp.Llama(
            str(self.path), n_ctx=room, n_threads=cores, n_threads_batch=cores, flash_attn=flash, verbose=False,
            type_k=self.llama_cpp.GGML_TYPE_F32, type_v=self.llama_cpp.GGML_TYPE_F32,
        )  # fmt: skip

    def logits(self, llama: Any) -> np.ndarray:
        """[V] float32 of the newest token."""
        return np.ctypeslib.as_array(self.llama_cpp.llama_get_logits(llama.ctx), shape=(self.vocabulary,))

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """[1, T] -> [1, T - 1] log-probability of each token after the first, a token at a time."""
        llama, found = self.load(tokens.shape[1], flash=False), []
        for token, following in zip(tokens[0, :-1].tolist(), tokens[0, 1:].tolist(), strict=True):
            llama.eval([token])
            logits = self.logits(llama).astype(np.float64)
            top = logits.max()
            found.append(logits[following] - top - np.log(np.exp(logits - top).sum()))
        return np.asarray([found])

    def decode(self, work: Work) -> dict[str, tuple[Iterator[float], int]]:
        """Sides with and without flash attention, and the slots that a step attends to."""
        batch, length = work.prompt.shape
        if batch != 1:
            raise ConfigError(f"llama.cpp is measured at batch 1; got --batch={batch}.")
        room = length + work.tokens
        kinds = {"plain attention": False, "flash attention": True}
        return {kind: (self._side(work, room, flash), room) for kind, flash in kinds.items()}

    def _side(self, work: Work, room: int, flash: bool) -> Iterator[float]:
        llama, length = self.load(room, flash), work.prompt.shape[1]
        llama.eval(work.prompt[0].tolist())
        first = int(self.logits(llama).argmax())
        while True:
            llama.n_tokens, token = length, first  # the next call forgets what is beyond

            def step() -> None:
                nonlocal token
                llama.eval([token])
                token = int(self.logits(llama).argmax())

            yield median_of_steps(step, work.tokens)


def write_gguf(gguf: Any, folder: Path, path: Path) -> int:
    """Writes a Hugging Face LLaMA as float32 GGUF without a tokenizer; returns the vocabulary's size."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(float(config.get("rope_parameters", config)["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for shard in sorted(folder.glob("*.safetensors")):
        for name, array in load_file(shard).items():
            if rotated := {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2]):
                # Pairs of rotated features are neighbours there, and half a head apart in Hugging Face's layout.
                halves = array.reshape(rotated, 2, array.shape[0] // rotated // 2, -1)
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config["vocab_size"])
