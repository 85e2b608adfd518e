"""Hugging Face transformers with a full cache, on the CPU or a GPU if torch sees one."""

import copy
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.peers import PLATFORM, Work
from kvjax.errors import ConfigError
from kvjax.typing import Foreign

SLOW = 0.1  # seconds a step beyond which a sixteenth of the round is enough


class Transformers:
    """A model of a Hugging Face folder.

    Attributes:
      torch, transformers: the libraries; device: ``cpu`` or ``cuda``.
      model: with sdpa attention, the fastest that needs no further package.
    """

    def __init__(self, folder: str | Path):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ConfigError(f"benchmarks against transformers need {error.name}; install kvjax[bench].") from None
        self.torch, self.transformers = torch, transformers
        transformers.utils.logging.disable_progress_bar()
        # The one that kvjax runs on; a process of its own is told, so that it need not take a GPU's memory to know.
        platform = os.environ.get(PLATFORM) or jax.default_backend()
        self.device = "cuda" if platform == "gpu" else "cpu"
        if hasattr(os, "sched_getaffinity"):
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(self.device)

    def ids(self, tokens: np.ndarray) -> Foreign:
        return self.torch.as_tensor(tokens, device=self.device)

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T] -> [B, T - 1] log-probability of each token after the first."""
        with self.torch.inference_mode():
            ids = self.ids(tokens)
            scores = self.model(ids).logits.float().log_softmax(-1)
            return scores[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].cpu().numpy()

    def with_attention(self, kind: str) -> Foreign:
        """The model with ``sdpa`` or ``eager`` attention and hooks of its own; the weights are the same arrays."""
        model = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        model.set_attn_implementation(kind)
        return model

    def cache(self, kind: str, room: int) -> Foreign:
        """An empty ``dynamic`` cache, or a ``static`` one for `room` tokens."""
        if kind == "static":
            return self.transformers.StaticCache(config=self.model.config, max_cache_len=room)
        return self.transformers.DynamicCache(config=self.model.config)

    def decode(self, work: Work) -> dict[str, tuple[Iterator[float], int]]:
        """Sides by kind of cache, with the slots that a step attends to; every round begins at the prompt's end."""
        length = work.prompt.shape[1]
        room = length + work.tokens
        sides = {
            "static": (self._full(work, "static", room), room),
            "dynamic": (self._full(work, "dynamic", room), room),
        }
        if work.compile:
            # Breaks in the graph are allowed: OPT's attention asks a traced length whether it is one.
            compiled = self.torch.compile(self.with_attention("sdpa"))
            sides["static, compiled"] = (self._full(work, "static", room, compiled), room)
        return sides

    def _full(self, work: Work, kind: str, room: int, model: object = None) -> Iterator[float]:
        """Seconds a greedy step (the median of a round), round after round."""
        cache = self.cache(kind, room)
        with self.torch.inference_mode():
            # The prompt in blocks: a peer's prefill is not what is timed, and one shot takes the square in memory.
            for part in self.ids(work.prompt).split(512, dim=1):
                first = greedy(self.model, part, cache)
        while True:
            with self.torch.inference_mode():
                own, token = copy.deepcopy(cache), first

                def step(own: object = own) -> None:
                    nonlocal token
                    token = greedy(self.model if model is None else model, token, own)

                seconds = median_of_steps(step, work.tokens)
            yield seconds

    def prefill(self, prompt: np.ndarray) -> dict[str, Iterator[float]]:
        """Sides by kind of attention: weights of attention, which some presses need, exist under ``eager`` alone."""
        return {kind: self._prefill(prompt, kind) for kind in ("sdpa", "eager")}

    def _prefill(self, tokens: np.ndarray, attention: str) -> Iterator[float]:
        """Seconds that a prompt takes in one shot, into a new dynamic cache."""
        model, ids = self.with_attention(attention), self.ids(tokens)
        while True:
            start = time.perf_counter()
            with self.torch.inference_mode():
                greedy(model, ids, self.cache("dynamic", 0))
            yield time.perf_counter() - start

    def fill(self, tokens: np.ndarray, kind: str, new_tokens: int) -> Foreign:
        """A cache after a prompt, in one shot, and the greedy tokens that follow."""
        with self.torch.inference_mode():
            cache = self.cache(kind, tokens.shape[1] + new_tokens)
            token = greedy(self.model, self.ids(tokens), cache)
            for _ in range(new_tokens - 1):
                token = greedy(self.model, token, cache)
        return cache


def greedy(model: Foreign, ids: Foreign, cache: Foreign, **positions: Any) -> Foreign:
    """Feeds [B, n] ids; returns the next token [B, 1] once the device has it."""
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **positions)
    token = out.logits[:, -1].argmax(-1)[:, None]
    token.cpu()
    return token


def median_of_steps(step: Callable[[], None], tokens: int) -> float:
    """Seconds of a step, the median of `tokens` steps, or of fewer if they are slow.

    kvjax's are a mean over a round: the peer's few slow steps, such as a press that compresses every so often, are not
    counted against it.
    """
    times: list[float] = []
    while len(times) < (tokens if not times or np.median(times) < SLOW else min(tokens, max(4, tokens // 16))):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def cache_bytes(cache: Foreign) -> int:
    """Bytes of a cache's keys and values."""
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
