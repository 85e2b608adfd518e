"""Trains a byte-level BPE tokenizer with the `tokenizers` library, in Hugging Face's format."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from experiments import results
from kvjax.errors import ConfigError

BOS = "<|endoftext|>"


def train(texts: Iterable[str], vocab_size: int, folder: Path) -> tokenizers.Tokenizer:
    """A tokenizer of `vocab_size` entries, every byte among them, written as tokenizer.json and tokenizer_config.json.

    Digits stay single, so that a number is as many decisions as it has digits. The one special token opens a text and
    ends it; it has id 0.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    results.write(folder / "tokenizer_config.json", results.to_json(settings))
    results.write(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    return tokenizer


def load(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a run.

    Raises:
      ConfigError: it is not there or damaged.
    """
    try:
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from None
