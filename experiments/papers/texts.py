"""Rows of tokens of the files that entries read: books, articles and instructions."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from experiments.config import DataConfig
from experiments.runs import data
from experiments.tasks import files
from kvjax.errors import ConfigError, InputError
from kvjax.models.model import Model

ARTICLE = ("article", "document")  # the fields of JSON lines that hold one
INSTRUCTION = ("instruction", "output")  # the fields of instructions with their answers


def rows_of(model: Model, file: Path, rows: int, length: int) -> np.ndarray:
    """[rows, length] int32 tokens, each row with BOS where the model expects it.

    Args:
      model: which has the tokenizer.
      file: a text, whose rows follow one another; JSON lines with an article each, of which a row is the beginning of
        one that is long enough; or a list of instructions with answers in JSON, likewise.
      rows: the number of rows.
      length: tokens of each.

    Raises:
      ConfigError: a file that is none of these.
      InputError: too little text.
    """
    if file.suffix not in (".json", ".jsonl"):
        config = DataConfig(text=str(file), num_sequences=rows, prompt_length=length - 1, new_tokens=1)
        return data.load(config, model, seed=0)[0]
    bos, found = data.opening(model), []
    for text in _documents(file):
        # [T]
        ids = np.concatenate([np.asarray(bos, np.int32), data.encode(model, text)])
        if ids.size >= length:
            found.append(ids[:length])
        if len(found) == rows:
            return np.stack(found)
    raise InputError(f"{file.name} has {len(found)} texts of at least {length} tokens, but {rows} are needed.")


def _documents(file: Path) -> Iterator[str]:
    for row in files.json_list(file) if file.suffix == ".json" else files.json_lines(file):
        fields = [row.text(name) for name in (*INSTRUCTION, *ARTICLE) if name in row.values]
        if not fields:
            raise ConfigError(f"{row.place}: the record has none of the fields {', '.join((*ARTICLE, *INSTRUCTION))}.")
        yield "\n".join(fields)
