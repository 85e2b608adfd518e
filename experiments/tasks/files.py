"""Reads the published files of tasks. What is damaged is reported with its file and line."""

import contextlib
import csv
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lines import divided, numbered
from kvjax.errors import ConfigError
from kvjax.typing import Json, JsonObject


class Row(NamedTuple):
    """A record of a file.

    Attributes:
      values: what it holds, by name.
      file: the file.
      line: the line that it begins on, from 1; of a JSON list, the number of the record.
      unit: what `line` counts.
    """

    values: Mapping[str, Any]
    file: Path
    line: int
    unit: str = "line"

    @property
    def place(self) -> str:
        """The record's place, for messages."""
        return f"{self.file}, {self.unit} {self.line}"

    def text(self, name: str) -> str:
        """The text of a field.

        Raises:
          ConfigError: there is no such field, or it is no text.
        """
        value = self.value(name)
        if not isinstance(value, str):
            raise ConfigError(f"{self.place}: {name!r} should be text, but is {value!r:.80}.")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts of a field that holds a list; a single text or number counts as a list of one.

        Raises:
          ConfigError: as `text`.
        """
        value = self.value(name)
        found = value if isinstance(value, list) else [value]
        if not found or not all(isinstance(each, str | int | float) for each in found):
            raise ConfigError(f"{self.place}: {name!r} should be a list of texts, but is {value!r:.80}.")
        return tuple(str(each) for each in found)

    def whole(self, name: str, default: int) -> int:
        """The whole number of a field, or `default` if there is none.

        Raises:
          ConfigError: it is below 1, or no whole number.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise ConfigError(f"{self.place}: {name!r} should be a whole number of at least 1, but is {value!r:.80}.")
        return int(value)

    def value(self, name: str) -> Json:
        """A field.

        Raises:
          ConfigError: there is no such field.
        """
        if name not in self.values:
            raise ConfigError(
                f"{self.place}: there is no {name!r}; the record has {', '.join(self.values) or 'nothing'}."
            )
        return self.values[name]

    @contextlib.contextmanager
    def checked(self, form: str) -> Iterator[None]:
        """Turns errors about the record's content into one that says where it is, and what form it should have."""
        try:
            yield
        except ConfigError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            shown = json.dumps(dict(self.values), ensure_ascii=False)[:160]
            raise ConfigError(f"{self.place}: not {form} ({type(error).__name__}: {error}); it reads {shown}") from None


def existing(task: str, *paths: Path) -> Path:
    """The first path that is a file.

    Raises:
      ConfigError: none is.
    """
    for path in paths:
        if path.is_file():
            return path
    raise ConfigError(f"task {task}: there is no file {' or '.join(str(path) for path in paths)}.")


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
      ConfigError: it cannot be read, or is not UTF-8.
    """
    # As text files are read elsewhere: whatever ends a line is a line feed.
    return _read(path).replace("\r\n", "\n").replace("\r", "\n")


def words(path: Path) -> list[str]:
    """The words of a text file.

    Raises:
      ConfigError: as `read_text`, or there are none.
    """
    found = read_text(path).split()
    if not found:
        raise ConfigError(f"{path} contains no text.")
    return found


def json_lines(path: Path) -> Iterator[Row]:
    """The records of a file with one JSON object a line; blank lines are skipped.

    Raises:
      ConfigError: a line that is no JSON object.
    """
    for number, line in numbered(_read(path)):
        yield _object(line, path, number)


def json_list(path: Path) -> Iterator[Row]:
    """The records of a file that is one JSON list of objects.

    Raises:
      ConfigError: it is not.
    """
    records = _json(read_text(path), path)
    if not isinstance(records, list):
        raise ConfigError(f"{path}: should be a list of records, but is a {type(records).__name__}.")
    for number, values in enumerate(records, 1):
        if not isinstance(values, dict):
            raise ConfigError(f"{path}, record {number}: should be an object, but is {values!r:.80}.")
        yield Row(values, path, number, "record")


def json_object(path: Path) -> JsonObject:
    """A file that is one JSON object.

    Raises:
      ConfigError: it is not.
    """
    found = _json(read_text(path), path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: should be a JSON object, but is a {type(found).__name__}.")
    return found


def tab_separated(path: Path) -> Iterator[Row]:
    """The records of a file of tab-separated values whose first line names the columns; nothing is quoted.

    Raises:
      ConfigError: a line of another number of values.
    """
    first, *lines = (line.removesuffix("\r") for line in divided(_read(path).rstrip("\r\n") + "\n"))
    names = first.split("\t")
    for number, line in enumerate(lines, 2):
        yield Row(_columns(names, line.split("\t"), path, number), path, number)


def zipped_csv(path: Path) -> Iterator[Row]:
    """The records of the CSV files in a ZIP file; lines count from the beginning of each.

    Raises:
      ConfigError: a damaged archive, one without CSV files, or a record of another number of values.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist() if name.endswith(".csv")}
    # RuntimeError and NotImplementedError: encrypted, or compressed in a way that Python does not know.
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{path} is not a readable ZIP file: {error}.") from None
    if not parts:
        raise ConfigError(f"{path} contains no CSV file.")
    for name, content in parts.items():
        inside = path / name
        reader = csv.reader(io.StringIO(_decoded(content, inside), newline=""), strict=True)
        try:
            names = next(reader, [])
            while True:
                line = reader.line_num + 1
                values = next(reader, None)
                if values is None:
                    break
                yield Row(_columns(names, values, inside, line), inside, line)
        except csv.Error as error:
            raise ConfigError(f"{inside}, line {reader.line_num}: not CSV ({error}).") from None


def _read(path: Path) -> str:
    """A file's text as it is."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    return _decoded(content, path)


def _columns(names: Sequence[str], values: Sequence[str], path: Path, line: int) -> dict[str, str]:
    if len(values) != len(names):
        raise ConfigError(f"{path}, line {line}: has {len(values)} values, but the header names {len(names)} columns.")
    return dict(zip(names, values, strict=True))


def _object(text: str, path: Path, line: int) -> Row:
    values = _json(text, path, line)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}, line {line}: should be a JSON object, but is {values!r:.80}.")
    return Row(values, path, line)


def _json(text: str, path: Path, line: int | None = None) -> Json:
    """The value of a JSON text, which is one line of a file or, where `line` is None, all of it."""
    place = f"{path}, line {line}" if line else str(path)

    def no_value(name: str) -> Json:
        raise ConfigError(f"{place}: not valid JSON ({name} is not a JSON value).")

    try:
        found = json.loads(text, parse_constant=no_value)
        # A half of a pair of escapes, which no text can hold.
        json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = error.pos if line else error.colno
        raise ConfigError(f"{path}, line {line or error.lineno}: not JSON ({error.msg}, character {where}).") from None
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: {error.object[error.start]!r} is an unpaired surrogate.") from None
    except (RecursionError, ValueError) as error:  # such as an integer of thousands of digits
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{place}: JSON that cannot be read ({what}).") from None
    return found


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text ({error.reason}).") from None
