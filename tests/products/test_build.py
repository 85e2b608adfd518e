"""The native library is built once, is checked before it is loaded, and a build that fails is remembered."""

import json
import subprocess
import threading
import time

import pytest

from kvjax import kept_files
from kvjax.products import build

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvjax" / "native"


@pytest.fixture
def commands(monkeypatch):
    """The compilers that were run."""
    found, run = [], subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: (found.append(command), run(command, **options))[1]
    )
    return found


@pytest.fixture
def compiled(monkeypatch, tmp_path, folder, commands):
    """Returns what the library of `SOURCE` answers; it is built with the machine's compiler."""
    if not any(map(build.shutil.which, build.COMPILERS)):
        pytest.skip("there is no C++ compiler")
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "answer.cc"
    source.write_text(SOURCE)
    return lambda: build.library(build.Recipe((source,), (), ("-shared", "-fPIC"))).answer()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_built_once(compiled, folder, commands):
    assert [compiled() for _ in range(3)] == [42] * 3 and len(commands) == 1
    (path,) = folder.glob("*.so")
    assert path.name.endswith(f"-{path.stat().st_size}.so") and path.stat().st_mode & 0o77 == 0


def replace(path, content):
    """Writes another file: this process has the old one in its memory, and would not survive a change of it."""
    path.unlink()
    path.write_bytes(content)


def cut(path):
    replace(path, path.read_bytes()[:1000])


def empty(path):
    replace(path, b"")


def other_bytes(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    replace(path, content)


def link(path):
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def a_folder(path):
    path.unlink()
    (path / "within").mkdir(parents=True)


def others_may_write(path):
    path.chmod(0o666)


@pytest.mark.parametrize("damage", [cut, empty, other_bytes, link, a_folder, others_may_write])
def test_what_is_damaged_is_built_again(compiled, folder, commands, damage):
    compiled()
    (path,) = folder.glob("*.so")
    damage(path)
    assert compiled() == 42 and len(commands) == 2
    assert compiled() == 42 and len(commands) == 2, "the one that was built again is kept"


def test_threads_build_it_once(compiled, commands):
    found = []
    threads = [threading.Thread(target=lambda: found.append(compiled())) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [42] * 4 and len(commands) == 1


def test_where_nothing_can_be_kept_it_is_built_for_this_process(compiled, folder, commands, monkeypatch):
    monkeypatch.setattr(kept_files, "private_folder", lambda *names: None)
    assert compiled() == 42 and not folder.exists() and len(commands) == 1


def failing(monkeypatch, tmp_path, text):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", text))
    with pytest.raises(build.BuildError) as raised:
        build.library(build.Recipe((), (), ()))
    return str(raised.value)


FAILS = "echo 'x.cc:1: error: not today' >&2; exit 1"


def test_a_failure_is_remembered_for_a_day(monkeypatch, tmp_path, folder, commands):
    assert failing(monkeypatch, tmp_path, FAILS).endswith("x.cc:1: error: not today")
    (kept,) = folder.glob("*.failed")
    again = failing(monkeypatch, tmp_path, FAILS)
    # The compiler was written again, which is another one.
    assert len(commands) == 2
    with pytest.raises(build.BuildError, match=r"not today \(remembered for a day in .*; delete it to try again\)"):
        build.library(build.Recipe((), (), ()))
    assert len(commands) == 2 and again.endswith("not today")
    (kept,) = set(folder.glob("*.failed")) - {kept}
    for content in (
        json.dumps({"reason": "old", "time": time.time() - 1.1 * build.DAY}), "", "{", "[1]", "null", "[" * 100_000,
        '{"reason": 3, "time": 1e12}', json.dumps({"reason": "later", "time": time.time() + 3600}),
        '{"reason": "never", "time": NaN}', '{"reason": "never", "time": "1e999"}',
    ):  # fmt: skip
        before = len(commands)
        kept.write_text(content)
        with pytest.raises(build.BuildError, match=r"today$"):
            build.library(build.Recipe((), (), ()))
        assert len(commands) == before + 1, content


def test_a_compiler_that_takes_too_long_is_remembered(monkeypatch, tmp_path, folder):
    monkeypatch.setattr(build, "SECONDS", 0.2)
    assert "takes more than 0.2 s" in failing(monkeypatch, tmp_path, "exec sleep 30")
    with pytest.raises(build.BuildError, match="remembered"):
        build.library(build.Recipe((), (), ()))


def test_a_compiler_that_is_not_there_is_looked_for_again(monkeypatch, tmp_path, folder):
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(build.BuildError, match="was not built"):
        build.library(build.Recipe((), (), ()))
    assert not list(folder.glob("*.failed"))


def test_what_a_compiler_makes_is_no_library(monkeypatch, tmp_path, folder):
    """An error, not the end of the process."""
    text = 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"'
    assert "cannot be loaded" in failing(monkeypatch, tmp_path, text)
