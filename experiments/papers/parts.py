"""Parts: the measurements that entries ask for. A part that is finished is kept, and shared by all entries.

A part is a frozen dataclass whose fields say all that its result depends on, besides the contents of the files that it
reads. Its result is a file of arrays named by a digest of both, written whole or not at all: a run that is killed goes
on at the first part that is missing.
"""

import dataclasses
import functools
import hashlib
import io
import json
import time
import warnings
import zipfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import experiments
import kvjax
from experiments import results
from experiments.config import DataConfig, ExperimentConfig, ModelConfig
from experiments.papers import texts
from experiments.papers.settings import MAIN, Settings
from experiments.runs import identity, machine
from experiments.runs.resolve import dtype_of
from experiments.runs.session import Session
from kvjax import products
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from kvjax.typing import JsonObject

Result = Mapping[str, np.ndarray]
#: What measures, below the folder of experiments; all of kvjax does besides.
MEASURE = ("papers/recipes", "papers/own.py", "papers/texts.py", "tasks", "training")
ABOUT = "about"  # the entry of a result's file that says what it is


@dataclasses.dataclass(frozen=True)
class Part:
    """A measurement.

    Attributes:
      model: the model that is measured; see `Settings.config`.
    """

    model: str = MAIN

    def measure(self, lab: "Lab") -> Result:
        """The result: named arrays.

        Raises:
          KvjaxError: what is asked for cannot be measured.
        """
        raise NotImplementedError

    def files(self, settings: Settings) -> Sequence[Path]:
        """The files that it reads, besides the model's."""
        return ()

    @property
    def inputs(self) -> Hashable:
        """A key: parts for which it is equal run the same prompts through the same model."""
        return self

    @property
    def name(self) -> str:
        """One line for progress."""
        shown = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if f.name != "model"]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached(Part):
    """A measurement of a cache.

    Attributes:
      cache: as text: ``h2o``, ``h2o(recent=40)``, ``full + int8``, see `experiments.config.baseline`; ``own:NAME`` of
        `experiments.papers.own`.
      budget: of its policy: slots (int) or a fraction of the prompt (float).
      block: tokens of a block of the prompt; None = one shot.
    """

    cache: str
    budget: int | float
    block: int | None = None

    @property
    def inputs(self) -> Hashable:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("cache", "budget")]
        return type(self), *(getattr(self, name) for name in names)


class Lab:
    """Loads models and texts once, and measures parts or finds them in a folder."""

    def __init__(self, settings: Settings, folder: Path, *, rerun: bool = False) -> None:
        """Takes a folder of results.

        Args:
          settings: of the run.
          folder: of the parts; made if it is not there.
          rerun: whether to measure everything once more.

        Raises:
          ConfigError: the folder cannot be written.
        """
        results.make_folder(folder)
        self.settings, self.folder, self.rerun = settings, folder, rerun
        self.measured: list[Part] = []  # in this process
        self._session: dict[str, Session] = {}
        self._found: dict[str, Result] = {}

    def get(self, part: Part) -> Result:
        """The result of a part, measured if it is not there yet."""
        name = self.digest(part)
        if name not in self._found:
            path = self.folder / f"{name}.npz"
            found = None if self.rerun else read(path)
            if found is None:
                found = self._measure(part, path)
            self._found[name] = found
        return self._found[name]

    def has(self, part: Part) -> bool:
        """Whether a part needs no measurement."""
        name = self.digest(part)
        return name in self._found or (not self.rerun and (self.folder / f"{name}.npz").is_file())

    def digest(self, part: Part) -> str:
        """Returns a digest that names a part's result: of its settings, and the contents of its files."""
        model = ExperimentConfig(model=self.settings.config(part.model), baselines=())
        files = [*identity.contents(model).values(), *map(identity.of_file, part.files(self.settings))]
        about = described(part, self.settings) | {"files": files}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[: identity.DIGITS]

    def _measure(self, part: Part, path: Path) -> Result:
        start = time.perf_counter()
        exact = "highest" if dtype_of(self.settings.config(part.model)) == jnp.float32 else None
        with jax.default_matmul_precision(exact):
            found = {name: np.asarray(value) for name, value in part.measure(self).items()}
        about = described(part, self.settings) | {
            "code": code(), "seconds": round(time.perf_counter() - start, 3)
        }  # fmt: skip
        found[ABOUT] = np.asarray(json.dumps(about))
        try:
            results.write(path, packed(found))
        except OSError as error:
            warnings.warn(
                f"a measurement is not saved, since {path} cannot be written: {error.strerror}.",
                stacklevel=2,
            )
        self.measured.append(part)
        machine.forget_programs()
        return found

    def model(self, name: str = MAIN) -> Model:
        """A model that a part names."""
        session = self._session.setdefault(name, Session())
        return session.model(ExperimentConfig(model=self.config(name), data=_SMALLEST, baselines=()))

    def config(self, name: str = MAIN) -> ModelConfig:
        """The config of a model that a part names."""
        return self.settings.config(name)

    def rows(self, part: Part, text: str, rows: int, length: int) -> np.ndarray:
        """[rows, length] int32 tokens of a text; see `experiments.papers.texts.rows_of`."""
        return texts.rows_of(self.model(part.model), self.settings.file(text), rows, length)

    def code_of(self, part: Part) -> str:
        """The digest of the sources that measured a part; see `code`."""
        return json.loads(str(self.get(part).get(ABOUT, "{}"))).get("code", code())


@functools.cache
def code() -> str:
    """A digest of the sources that measure; those that judge can change without them."""
    here = Path(experiments.__path__[0])
    folders = [here / name for name in MEASURE if (here / name).is_dir()]
    files = [here / name for name in MEASURE if (here / name).is_file()]
    found = [identity.of_sources([Path(kvjax.__path__[0]), *folders]), *map(identity.of_file, files)]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()[: identity.DIGITS]


# Of the checks before a model is loaded.
_SMALLEST = DataConfig(num_sequences=1, prompt_length=16, new_tokens=1)


def described(part: Part, settings: Settings) -> JsonObject:
    """All that a part's result depends on but the contents of files."""
    model = dataclasses.asdict(settings.config(part.model))
    fields = json.loads(json.dumps(dataclasses.asdict(part)))
    # Where files are does not matter.
    model["path"] = Path(model["path"]).name if model["path"] else None
    found = {"part": type(part).__name__, "fields": fields, "model": model, "seed": settings.seed}
    # Products of another form have other digits.
    form = products.setting()
    return found | ({} if form == products.FIXED else {"products": form})


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of an .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict(arrays))  # type: ignore[arg-type]
    return buffer.getvalue()


def read(path: Path) -> Result | None:
    """The arrays of an .npz file, or None where there is none or it is damaged."""
    try:
        with np.load(path) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def check_unique(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts in order, each once.

    Raises:
      ConfigError: something that is no part.
    """
    for part in parts:
        if not isinstance(part, Part):
            raise ConfigError(f"an entry needs {part!r}, which is not a part.")
    return tuple(dict.fromkeys(parts))


def by_inputs(parts: Iterable[Part]) -> list[Part]:
    """Parts with equal inputs one after the other, in the order of the first of them."""
    groups: dict[Hashable, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.inputs, []).append(part)
    return [part for group in groups.values() for part in group]
