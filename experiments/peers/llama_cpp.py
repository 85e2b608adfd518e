"""llama.cpp through llama-cpp-python, on the CPU: LLaMA in float32, weights and cache, or a GGUF file as it is.

As in its own `llama-batched-bench`, each row is a sequence of its own with its own prompt, and a step is one call with
a token of every row. Its package is built from source, for this processor. Flash and plain attention are both tried.
"""

import ctypes
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from experiments.peers import Work
from experiments.peers.transformers import median_of_steps
from kvjax.errors import ConfigError
from kvjax.typing import Foreign

TOKENS = 2048  # of a call at most, and
PIECE = 512  # of one pass through the model: the defaults of llama.cpp's tools
ROOM = 256  # a cache is padded to a multiple of it
KINDS = {"plain attention": False, "flash attention": True}


class LlamaCpp:
    """A model of a Hugging Face folder, by way of a GGUF file beside it; or of a GGUF file, with a cache in float16."""

    def __init__(self, folder: str):
        try:
            import gguf
            import llama_cpp
        except ImportError as error:
            raise ConfigError(f"benchmarks against llama.cpp need {error.name}; install kvjax[bench-llama].") from None
        self.llama_cpp, given = llama_cpp, Path(folder)
        self.as_it_is = given.is_file()
        path = given if self.as_it_is else given / "model.gguf"
        if not self.as_it_is:
            write_gguf(gguf, given, path)
        # The library keeps a pointer to the function.
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise ConfigError(f"llama.cpp cannot load {path}.")
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model)))

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T] -> [B, T - 1] log-probability of each token after the first, a token at a time."""
        context, found = Context(self, tokens.shape[0], tokens.shape[1]), []
        for place in range(tokens.shape[1] - 1):
            logits = context.feed(tokens[:, place : place + 1], place).astype(np.float64)
            top = logits.max(1, keepdims=True)
            normalised = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
            found.append(np.take_along_axis(normalised, tokens[:, place + 1 : place + 2], 1)[:, 0])
        return np.stack(found, axis=1)

    def decode(self, work: Work) -> dict[str, tuple[Iterator[float], int]]:
        """Sides with and without flash attention, and the slots that a step attends to."""
        room = work.prompt.shape[1] + work.tokens
        return {kind: (self._side(work, room, flash), room) for kind, flash in KINDS.items()}

    def _side(self, work: Work, room: int, flash: bool) -> Iterator[float]:
        batch, length = work.prompt.shape
        context = Context(self, batch, room, flash)
        if work.copied:
            first = np.repeat(context.feed(work.prompt[:1], 0).argmax(1), batch)
            context.copy_first()
        else:
            first = context.feed(work.prompt, 0).argmax(1)
        while True:
            context.forget(length)
            token, place = first, length

            def step() -> None:
                nonlocal token, place
                token = context.feed(token[:, None], place).argmax(1)
                place += 1

            yield median_of_steps(step, work.tokens)

    def prefill(self, prompt: np.ndarray) -> dict[str, Iterator[float]]:
        return {kind: self._prefill(prompt, flash) for kind, flash in KINDS.items()}

    def _prefill(self, prompt: np.ndarray, flash: bool) -> Iterator[float]:
        """Seconds that prompts take until the logits of each row's last token are there."""
        context = Context(self, prompt.shape[0], prompt.shape[1], flash)
        while True:
            context.forget(0)
            start = time.perf_counter()
            context.feed(prompt, 0)
            yield time.perf_counter() - start


class Context:
    """`batch` sequences of up to `room` tokens, each with a cache of its own."""

    def __init__(self, owner: LlamaCpp, batch: int, room: int, flash: bool = False):
        self.api, self.vocabulary = owner.llama_cpp, owner.vocabulary
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * -(-room // ROOM) * ROOM, batch
        params.n_batch, params.n_ubatch = TOKENS, PIECE
        params.n_threads = params.n_threads_batch = cores
        params.flash_attn_type = int(flash)
        if not owner.as_it_is:
            params.type_k = params.type_v = self.api.GGML_TYPE_F32
        params.kv_unified = False
        self.context = self.api.llama_init_from_model(owner.model, params)
        if not self.context:
            raise ConfigError(f"llama.cpp could not create a context of {batch} rows of {room} tokens.")
        self.rows, self.batch = batch, self.api.llama_batch_init(TOKENS, 0, 1)

    def copy_first(self) -> None:
        """Gives all rows the first one's tokens; rows have memory of their own, so that a step reads as much."""
        memory = self.api.llama_get_memory(self.context)
        for row in range(1, self.rows):
            self.api.llama_memory_seq_cp(memory, 0, row, -1, -1)

    def forget(self, length: int) -> None:
        """Removes all tokens from position `length` on."""
        memory = self.api.llama_get_memory(self.context)
        self.api.llama_memory_seq_rm(memory, -1, length, -1)

    def feed(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Feeds [B, n] token ids at positions `start` on; returns the logits [B, V] after the last one of each row."""
        rows, count = tokens.shape
        # [B * n]: row, place
        entries = [(row, place) for row in range(rows) for place in range(count)]
        logits = np.empty((rows, self.vocabulary), np.float32)
        for begin in range(0, len(entries), TOKENS):
            part = entries[begin : begin + TOKENS]
            self.batch.n_tokens = len(part)
            for i, (row, place) in enumerate(part):
                self.batch.token[i], self.batch.pos[i] = int(tokens[row, place]), start + place
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row
                self.batch.logits[i] = place == count - 1
            if status := self.api.llama_decode(self.context, self.batch):
                raise ConfigError(f"llama.cpp: llama_decode returned {status}.")
            for i, (row, place) in enumerate(part):
                if place == count - 1:
                    found = self.api.llama_get_logits_ith(self.context, i)
                    logits[row] = np.ctypeslib.as_array(found, shape=(self.vocabulary,))
        return logits


def write_gguf(gguf: Foreign, folder: Path, path: Path) -> None:
    """Writes a Hugging Face LLaMA as float32 GGUF without a tokenizer."""
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
