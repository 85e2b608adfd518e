"""Windows of tokens from text files: random ones for training, and evenly spaced ones for evaluation."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from experiments.runs import data
from experiments.training.config import files
from experiments.training.corpus import read
from experiments.tuning import recall_windows
from experiments.tuning.config import TuneConfig
from experiments.tuning.gate_config import TrainGateConfig
from experiments.tuning.merge_config import TrainMergeConfig
from experiments.tuning.recall_windows import RecallWindows
from experiments.tuning.reuse_config import TrainReuseConfig
from kvjax.errors import ConfigError
from kvjax.models.model import Model

TrainingConfig = TuneConfig | TrainGateConfig | TrainMergeConfig | TrainReuseConfig
HELD_OUT = 0.1  # the share at the end of each text that is held out if `held_out` is empty


@dataclasses.dataclass(frozen=True)
class Windows:
    """The texts of a run as tokens.

    Attributes:
      training: texts to train on, [N] int32 each.
      held_out: texts to evaluate on, [N] int32 each.
      opening: the tokens that every window begins with: BOS where the model expects it.
      seed: the random seed of training windows.
      recall: the source of training windows with recall material; None = there are none.
      batches: the number of different batches, which steps use in turn; None = each step has its own.
    """

    training: list[np.ndarray]
    held_out: list[np.ndarray]
    opening: list[int]
    seed: int
    recall: RecallWindows | None = None
    batches: int | None = None

    def batch(self, step: int, rows: int, size: int) -> np.ndarray:
        """Returns the windows of a step, [rows, size] int32, which depend only on the seed and the step.

        Every token of the texts is as likely as any other to be in one of them, except near the ends of a text.
        """
        rng = np.random.default_rng((self.seed, step % self.batches if self.batches else step))
        inserted = [] if self.recall is None else self.recall.batch(rng, rows, size)
        if len(inserted) == rows:
            return np.stack(inserted)
        sizes = np.array([text.size for text in self.training], np.float64)
        body = size - len(self.opening)
        chosen = rng.choice(len(sizes), size=rows - len(inserted), p=sizes / sizes.sum())
        starts = [rng.integers(0, self.training[text].size - body + 1) for text in chosen]
        own = self._opened([self.training[text][at : at + body] for text, at in zip(chosen, starts, strict=True)])
        return np.concatenate([own, np.stack(inserted)]) if inserted else own

    def evaluation(self, count: int, size: int) -> np.ndarray:
        """Returns windows of each held-out text, evenly spread over it, [texts * count, size] int32."""
        body = size - len(self.opening)
        return self._opened(
            [
                text[at : at + body]
                for text in self.held_out
                for at in np.linspace(0, text.size - body, count).astype(int)
            ]
        )

    def _opened(self, bodies: list[np.ndarray]) -> np.ndarray:
        opening = np.asarray(self.opening, np.int32)
        return np.stack([np.concatenate([opening, body]) for body in bodies]).astype(np.int32)


def load(config: TrainingConfig, model: Model) -> Windows:
    """Reads and encodes the texts of a run.

    Raises:
      ConfigError: no texts, a name that matches no text, or a text that is shorter than a window.
    """
    training, held_out = files(config)
    opening = data.opening(model)
    shape, evaluation = config.windows, config.evaluation
    sizes = {
        "training": shape.prompt_length + shape.new_tokens - len(opening),
        "evaluation": shape.prompt_length + evaluation.new_tokens - len(opening),
    }
    if min(sizes.values()) < 1:
        raise ConfigError(
            f"windows.prompt_length={shape.prompt_length} leaves no room for text after BOS; give more tokens."
        )
    contents = {path: read(path) for path in (*training, *held_out)}
    encoded = {path: data.encode(model, text) for path, text in contents.items()}
    if held_out:
        own, others = ([(path.name, encoded[path]) for path in paths] for paths in (training, held_out))
    else:
        cuts = {path: round((1 - HELD_OUT) * encoded[path].size) for path in training}
        own = [(f"{path.name} without its last tenth", encoded[path][: cuts[path]]) for path in training]
        others = [(f"the last tenth of {path.name}", encoded[path][cuts[path] :]) for path in training]
    for use, texts in (("training", own), ("evaluation", others)):
        for name, text in texts:
            if text.size < sizes[use]:
                raise ConfigError(
                    f"{name} has {text.size} tokens, fewer than the {sizes[use]} of a window of {use}; give longer "
                    "texts, or lower windows.prompt_length."
                )
    made = Windows([text for _, text in own], [text for _, text in others], opening, config.seed)
    if not isinstance(config, TrainGateConfig):
        return made
    recall = None
    if config.mixture.share:
        recall = recall_windows.load(
            config.mixture, model, [contents[path] for path in training], made.training, opened=bool(opening),
            seed=config.seed,
        )  # fmt: skip
    return dataclasses.replace(made, recall=recall, batches=config.batches)


def checksums(config: TrainingConfig) -> dict[str, str]:
    """Returns the SHA-256 of every text, training and held out, by its file's name."""
    return {path.name: _checksum(path) for paths in files(config) for path in paths}


def _checksum(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
