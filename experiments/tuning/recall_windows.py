"""Training windows of gates that contain facts and questions, made as those of `experiments.train`."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.tasks import words
from experiments.tasks.story import story
from experiments.training.mixture import Mixture
from experiments.tuning.gate_config import RecallWindowsConfig
from kvjax.errors import ConfigError
from kvjax.models.model import Model

STORIES, CHARACTERS = 24, 20_000  # generated stories, and the length of one
ENDS = (".", "!", "?", "\n")  # of sentences


@dataclasses.dataclass(frozen=True)
class RecallWindows:
    """The source of windows with recall material.

    Attributes:
      config: the shares of the windows and of their parts.
      texts: inserts recall material into the texts of the run.
      stories: inserts recall material into generated stories.
      opened: whether windows begin with BOS.
    """

    config: RecallWindowsConfig
    texts: Mixture
    stories: Mixture
    opened: bool

    def batch(self, rng: np.random.Generator, rows: int, size: int) -> list[np.ndarray]:
        """Returns the windows with recall material among `rows` windows, [size] int32 each.

        Args:
          rng: the random generator of the step.
          rows: the number of windows of the step.
          size: the number of tokens of a window.
        """
        return [self._window(rng, size) for _ in range(rng.binomial(rows, self.config.share))]

    def _window(self, rng: np.random.Generator, size: int) -> np.ndarray:
        config = self.config
        mixture = self.stories if rng.random() < config.story_fraction else self.texts
        skipped = 0 if self.opened else 1  # the mixture's BOS
        tokens, _ = mixture.window(rng, size + skipped, config.invented_fraction, config.wordy_fraction)
        return tokens[skipped:]


def load(
    config: RecallWindowsConfig, model: Model, texts: Sequence[str], encoded: Sequence[np.ndarray], *, opened: bool,
    seed: int,
) -> RecallWindows:  # fmt: skip
    """Returns the source of windows; words and wordings are those of training, never the held-out ones.

    Args:
      config: the shares of the windows and of their parts.
      model: the model; its tokenizer encodes the recall material.
      texts: the training texts, whose frequent words the tasks use.
      encoded: the tokens of the training texts, [N] int32 each.
      opened: whether windows begin with BOS.
      seed: the random seed of the stories.

    Raises:
      ConfigError: a model without a tokenizer.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"mixture.share={config.share} needs a tokenizer, and the model has none; give another model.path, or "
            "mixture.share=0.0."
        )
    vocabulary = model.config.vocab_size
    ends = np.zeros(vocabulary, bool)
    for token in range(min(tokenizer.size, vocabulary)):
        ends[token] = tokenizer.decode([token]).endswith(ENDS)
    rng = np.random.default_rng(seed)
    stories = [np.asarray(tokenizer.encode(" " + story(rng, words.TRAINING, CHARACTERS), bos=False), np.int32)
               for _ in range(STORIES)]  # fmt: skip
    nouns = words.TRAINING.nouns + words.common_words(texts, config.common_words)
    mixture = Mixture(
        texts=encoded,
        encode=lambda parts: [tokenizer.encode(part, bos=False) for part in parts],
        ends_sentence=ends,
        words=dataclasses.replace(words.TRAINING, nouns=tuple(dict.fromkeys(nouns))),
        bos=tokenizer.bos_id or 0,
        recall_fraction=config.recall_fraction,
        task_shares=config.task_shares,
        seed=seed,
    )
    return RecallWindows(config, mixture, dataclasses.replace(mixture, texts=stories), opened)
