"""Training and held-out texts as tokens, kept beside the run so that it resumes with the very same ones."""

import dataclasses
import hashlib
import re
from pathlib import Path

import numpy as np
import tokenizers

from experiments.tasks import words
from experiments.tasks.questions import passages
from experiments.tasks.story import story
from experiments.training import layouts
from experiments.training import tokenizer as bpe
from experiments.training.config import TrainConfig, files
from experiments.training.mixture import Mixture
from kvjax.errors import ConfigError

GENERATED_CHARACTERS = 20_000  # of one generated story, whose people and things are its own, or of some passages


@dataclasses.dataclass(frozen=True)
class Text:
    """Attributes:
    name: of its file; tokens: [N] int32; bytes: [N] int32, of each token in UTF-8.
    """

    name: str
    tokens: np.ndarray
    bytes: np.ndarray


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def checksums(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of every text, training and held out, by its file's name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for paths in files(config) for path in paths}


def curled(text: str) -> str:
    """With “ and ” where there was ": half of the books in the world have those."""
    opened = re.sub(r'(^|[\s(\[-])"', r"\1“", text)
    return opened.replace('"', "”")


def load(config: TrainConfig, folder: Path, *, resume: bool) -> tuple[Mixture, list[Text]]:
    """The training mixture and the held-out texts.

    Args:
      folder: the run's, where its tokenizer lies.
      resume: take that tokenizer; otherwise one is trained on the training texts.

    Raises:
      ConfigError: no texts, one that is shorter than a window, or a folder that cannot be read or written.
    """
    training, held_out = files(config)
    texts = [read(path) for path in training]
    # Each text in both typographies, where there are quotes to tell them apart.
    texts += [curled(text) for text in texts if '"' in text]
    tokenizer = bpe.load(folder) if resume else bpe.train(texts, config.decoder.vocab_size, folder)
    rng = np.random.default_rng(config.seed)
    laid_out = [layouts.LAYOUTS[name](text, rng) for name in config.mixture.layouts for text in texts]

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]

    size = sum(map(len, laid_out))
    made = ((story, config.mixture.story_fraction), (passages, config.mixture.question_fraction))
    generated = [
        [make(rng, words.TRAINING, GENERATED_CHARACTERS) for _ in range(round(size * share / GENERATED_CHARACTERS))]
        for make, share in made
    ]
    tokens = [np.asarray(ids, np.int32) for ids in encode(laid_out)]
    for path, ids in zip(training, tokens, strict=False):
        _check_length(path.name, ids, config)
    for kind in generated:
        joined_ids = np.concatenate([np.zeros(0, np.int32), *(np.asarray(ids, np.int32) for ids in encode(kind))])
        if joined_ids.size > config.contexts[-1]:
            tokens.append(joined_ids)
    ends = np.zeros(config.decoder.vocab_size, bool)
    for entry, index in tokenizer.get_vocab().items():
        ends[index] = entry.endswith((".", "!", "?", "Ċ"))
    mixture = Mixture(
        texts=tokens,
        encode=encode,
        ends_sentence=ends,
        words=dataclasses.replace(
            words.TRAINING,
            nouns=tuple(dict.fromkeys(words.TRAINING.nouns + words.common_words(texts, config.mixture.common_words))),
        ),
        bos=tokenizer.token_to_id(bpe.BOS) or 0,
        recall_fraction=config.mixture.recall_fraction,
        task_shares=config.mixture.task_shares,
        seed=config.seed,
    )
    found = [tokenized(path, tokenizer, layout) for path in held_out for layout in config.mixture.layouts]
    for text in found:
        _check_length(text.name, text.tokens, config)
    return mixture, found


def tokenized(path: Path, tokenizer: tokenizers.Tokenizer, layout: str = "wrapped") -> Text:
    """A file's text, laid out, under a byte-level tokenizer without special tokens."""
    # Such a vocabulary writes every byte as one character.
    bytes_of = {index: len(entry) for entry, index in tokenizer.get_vocab().items()}
    text = layouts.LAYOUTS[layout](read(path), np.random.default_rng(0))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return Text(
        layouts.named(path.name, layout), np.asarray(ids, np.int32), np.asarray([bytes_of[i] for i in ids], np.int32)
    )


def _check_length(name: str, ids: np.ndarray, config: TrainConfig) -> None:
    if ids.size <= config.contexts[-1]:
        raise ConfigError(f"{name} has {ids.size} tokens, fewer than a window of {config.contexts[-1]}.")
