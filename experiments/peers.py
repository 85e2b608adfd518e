"""What kvjax is measured against, each at its best setting: all cores, inference mode, nothing recomputed."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvjax.errors import ConfigError


class Transformers:
    """Hugging Face transformers with a full cache, on the CPU or a GPU if torch sees one."""

    def __init__(self, folder: str | Path):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ConfigError(f"benchmarks against transformers need {error.name}; install kvjax[bench].") from None
        self.torch, self.transformers = torch, transformers
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().to(self.device)

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T] -> [B, T - 1] log-probability of each token after the first."""
        torch = self.torch
        with torch.inference_mode():
            ids = torch.as_tensor(tokens, device=self.device)
            scores = self.model(ids).logits.float().log_softmax(-1)
            return scores[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].cpu().numpy()

    def decode(self, prompt: np.ndarray, kind: str, rounds: int, tokens: int) -> Iterator[float]:
        """Seconds a greedy step (the median of a round), round after round; each continues the last one.

        Args:
          prompt: [B, T] ids; kind: ``dynamic`` or ``static`` cache; tokens: steps of a round, fewer if it is slow.
        """
        torch, transformers = self.torch, self.transformers
        context = prompt.shape[1]
        room = context + (rounds + 1) * tokens
        if kind == "static":
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=room)
        else:
            cache = transformers.DynamicCache(config=self.model.config)

        def step(ids):
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1)[:, None]
            token.cpu()  # waits for the device
            return token

        with torch.inference_mode():
            ids = torch.as_tensor(prompt, device=self.device)
            # The prompt in blocks: a peer's prefill is not what is timed, and one shot takes the square in memory.
            for part in ids.split(512, dim=1):
                token = step(part)
        slow = 0.1  # seconds a step beyond which a sixteenth of the round is enough
        while True:
            times: list[float] = []
            with torch.inference_mode():
                while len(times) < (tokens if not times or np.median(times) < slow else max(4, tokens // 16)):
                    start = time.perf_counter()
                    token = step(token)
                    times.append(time.perf_counter() - start)
            yield float(np.median(times))
