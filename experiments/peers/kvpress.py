"""NVIDIA's kvpress: transformers whose cache is compressed while decoding.

kvpress 0.5 needs transformers before 5.3 (its hooks read `cache_position`, which later ones do not pass), older than
what constraints.txt pins; `kvjax[bench-kvpress]` therefore belongs into an environment of its own, without the
constraints. It knows LLaMA and its relatives, not OPT.

Its decoding press appends `compression_interval` tokens, then cuts the cache back to `target_size`, all layers alike:

- knorm: `KnormPress` keeps the slots that kvjax's evict(low_norm) does. At an interval of 1 both attend to the same
  slots at every step, and `logprobs_under` checks it.
- h2o: `ObservedAttentionPress` is what it has of H2O. While decoding it sees the newest query alone, not the sum over
  all queries, divides by a slot's rank from the end, and protects no slot: cheaper than H2O and no equal of it. It
  needs eager attention. Only slots and work are comparable, not what is kept.
- tova: `TOVAPress` is TOVA, but for the newest token, which it always keeps.

Presses of prompts (`PROMPT_PRESSES`) compress a context, and then append; `answers` asks questions after it.

Two settings of each are tried: an interval of 1, as kvjax evicts, and a quarter of the slots, which compresses rarely.
Neither ever attends to more slots than kvjax: the target is so much lower. Intervals longer than that (its default is
512) hold more than the budget allows.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.peers import Work
from experiments.peers.transformers import Transformers, greedy, median_of_steps
from kvjax.errors import ConfigError
from kvjax.typing import Foreign

#: kvjax's policy -> kvpress's class, and the attention that it needs.
PRESSES = {
    "h2o": ("ObservedAttentionPress", "eager"),
    "knorm": ("KnormPress", "sdpa"),
    "tova": ("TOVAPress", "eager"),
}
#: kvjax's compressor -> kvpress's classes, from the outer one to the inner one, and their arguments. Not among them:
#: PyramidKVPress, which is SnapKV on short contexts, and LagKVPress, whose newest tokens tie at small budgets.
PROMPT_PRESSES: dict[str, tuple[tuple[str, dict[str, int]], ...]] = {
    "knorm": (("KnormPress", {}),),
    "keydiff": (("KeyDiffPress", {}),),
    "snapkv(window=16)": (("SnapKVPress", {"window_size": 16}),),
    "adakv(snapkv(window=16))": (("AdaKVPress", {}), ("SnapKVPress", {"window_size": 16})),
    "chunkkv(snapkv(window=16))": (("ChunkKVPress", {"chunk_length": 10}), ("SnapKVPress", {"window_size": 16})),
    "expected_attention": (("ExpectedAttentionPress", {}),),
    "cur": (("CURPress", {}),),
    "leverage": (("LeverageScorePress", {}),),
    "compactor": (("CompactorPress", {}),),
}


class Kvpress(Transformers):
    """As `Transformers`, under a decoding press."""

    def __init__(self, folder: str):
        super().__init__(folder)
        try:
            import kvpress
        except ImportError as error:
            raise ConfigError(
                f"benchmarks against kvpress need {error.name}; install kvjax[bench-kvpress], in an environment of its "
                "own and without constraints.txt: kvpress needs an older transformers."
            ) from None
        self.kvpress = kvpress

    def decode(self, work: Work) -> dict[str, tuple[Iterator[float], int]]:
        """Sides by press and interval, with the slots that a step attends to at most; rounds continue the last one."""
        names = [name for name in work.policies if name in PRESSES]
        if not names:
            raise ConfigError(
                f"kvpress has no decoding press for {', '.join(work.policies)}; choose --policies from: "
                f"{', '.join(PRESSES)}."
            )
        sides = {}
        for name, interval in itertools.product(names, dict.fromkeys((1, max(1, work.slots // 4)))):
            every = "every step" if interval == 1 else f"every {interval} steps"
            sides[f"{PRESSES[name][0]} {every}"] = (self._side(work, name, interval), work.slots)
        return sides

    def _side(self, work: Work, policy: str, interval: int) -> Iterator[float]:
        length = work.prompt.shape[1]
        model, press = self._pressed(policy, work.slots, interval, length)
        cache, place = self.cache("dynamic", 0), length
        # The hooks stay for as long as this side does: leaving the press forgets how many steps it has counted.
        with press(model):
            with self.torch.inference_mode():
                token = greedy(model, self.ids(work.prompt), cache)

            def step() -> None:
                nonlocal token, place
                attended = cache.layers[0].keys.shape[2] + 1
                if attended > work.slots:
                    raise ConfigError(
                        f"kvpress attends to {attended} slots and kvjax to {work.slots}; the budgets must be equal."
                    )
                token = greedy(model, token, cache, position_ids=self._position(place, token))
                place += 1

            while True:
                with self.torch.inference_mode():
                    seconds = median_of_steps(step, work.tokens)
                yield seconds

    def _pressed(self, policy: str, slots: int, interval: int, length: int) -> tuple[Any, Any]:
        """A model and a press that cuts prompts, and then the cache, so that no step attends to more than `slots`."""
        kind, attention = PRESSES[policy]
        target = slots - interval
        # int(length * (1 - ratio)) are kept of a prompt.
        prompts = getattr(self.kvpress, kind)(compression_ratio=max(0.0, 1 - (target + 0.5) / length))
        decoding = self.kvpress.DecodingPress(
            base_press=getattr(self.kvpress, kind)(), compression_interval=interval, target_size=target,
            hidden_states_buffer_size=1,
        )  # fmt: skip
        press = self.kvpress.PrefillDecodingPress(prefilling_press=prompts, decoding_press=decoding)
        return self.with_attention(attention), press

    def _position(self, place: int, token: object) -> Foreign:
        """The true position: the cache's length is no longer it."""
        return self.torch.full_like(token, place)

    def logprobs_under(self, policy: str, tokens: np.ndarray, length: int, slots: int) -> np.ndarray:
        """[B, T] -> [B, T - length]: log-probabilities after the prompt, compressed at every step."""
        model, press = self._pressed(policy, slots, 1, length)
        cache, ids, found = self.cache("dynamic", 0), self.ids(tokens), []
        with press(model), self.torch.inference_mode():
            out = model(ids[:, :length], past_key_values=cache, use_cache=True, logits_to_keep=1)
            for place in range(length, tokens.shape[1]):
                target = ids[:, place : place + 1]
                found.append(out.logits[:, -1].float().log_softmax(-1).gather(-1, target)[:, 0].cpu().numpy())
                out = model(target, past_key_values=cache, use_cache=True, position_ids=self._position(place, target))
        return np.stack(found, axis=1)

    def answers(
        self,
        cache: str,
        contexts: Sequence[Sequence[int]],
        questions: Sequence[Sequence[int]],
        kept: Sequence[int],
        new_tokens: int,
    ) -> list[list[int]]:
        """Answers a question about each context greedily, as kvpress's pipeline does.

        Args:
          cache: a key of `PROMPT_PRESSES`.
          contexts: token ids that are compressed.
          questions: token ids that follow them.
          kept: slots per head that remain of each context.
          new_tokens: the number of tokens of an answer.

        Returns:
          The tokens of each answer; none ends it.
        """
        model, found = self.with_attention("sdpa"), []
        for context, question, slots in zip(contexts, questions, kept, strict=True):
            press: Any = None
            for name, arguments in reversed(PROMPT_PRESSES[cache]):
                inner = {} if press is None else {"press": press}
                press = getattr(self.kvpress, name)(**inner, **arguments)
            # int(length * (1 - ratio)) are kept of a context.
            press.compression_ratio = 1 - (slots + 0.5) / len(context)
            held = self.cache("dynamic", 0)
            with self.torch.inference_mode():
                with press(model):
                    model(self.ids(np.array([context])), past_key_values=held, logits_to_keep=1)
                places = self.torch.arange(len(context), len(context) + len(question), device=self.device)[None]
                token = greedy(model, self.ids(np.array([question])), held, position_ids=places)
                tokens = [int(token)]
                for place in range(len(context) + len(question), len(context) + len(question) + new_tokens - 1):
                    token = greedy(model, token, held, position_ids=self._position(place, token))
                    tokens.append(int(token))
            found.append(tokens)
        return found

    def _prefill(self, tokens: np.ndarray, attention: str) -> Iterator[float]:
        """Seconds that a prompt takes in one shot and is cut to a fifth, by `PRESSES` of this attention."""
        kind = next(name for name, needs in PRESSES.values() if needs == attention)
        model, press = self.with_attention(attention), getattr(self.kvpress, kind)(compression_ratio=0.8)
        with press(model):
            while True:
                start = time.perf_counter()
                with self.torch.inference_mode():
                    greedy(model, self.ids(tokens), self.cache("dynamic", 0))
                yield time.perf_counter() - start
