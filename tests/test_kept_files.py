"""Files in the user's cache folder: whole or absent, this user's alone, and with a place of their own in any case."""

import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from kvjax import host, kept_files

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users and permissions are POSIX's")


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    """A folder for temporary files and no folders of the user."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(kept_files.tempfile, "gettempdir", lambda: str(folder))
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_the_folder_is_the_one_of_the_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert host.user_cache() == tmp_path / ".cache" / "kvjax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert host.user_cache() == tmp_path / ".cache" / "kvjax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert host.user_cache() == tmp_path / "xdg" / "kvjax"


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_user_without_a_home_folder_has_a_temporary_one(monkeypatch, temporary, home):
    if home is None:
        monkeypatch.setattr(Path, "home", no_home)
    else:
        monkeypatch.setenv("HOME", home)
    assert host.user_cache() == temporary / f"kvjax-{os.getuid()}"
    folder = kept_files.private_folder("native")
    assert folder == temporary / f"kvjax-{os.getuid()}" / "native"
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_has_another_in_its_place(monkeypatch, temporary, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept_files.private_folder("xla", "cpu") == temporary / f"kvjax-{os.getuid()}" / "xla" / "cpu"
    (temporary / f"kvjax-{os.getuid()}" / "products").write_text("")
    assert kept_files.private_folder("products") is None


def test_others_may_not_write_into_a_folder(monkeypatch, tmp_path):
    folder = tmp_path / "kvjax" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_files.private_folder("native") == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_folder_of_another_user_is_not_used(monkeypatch, temporary, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_files, "_is_mine", lambda about: about.st_ino != (tmp_path / "kvjax").stat().st_ino)
    with pytest.warns(UserWarning, match="kvjax belongs to another user: kvjax does not use this cache folder"):
        assert kept_files.private_folder("native") == temporary / f"kvjax-{os.getuid()}" / "native"


def test_a_file_is_written_in_place_of_anything(tmp_path):
    path = tmp_path / "kept"
    (path / "folder").mkdir(parents=True)
    kept_files.write(path, b"one")
    assert kept_files.read(path) == b"one" and stat.S_IMODE(path.stat().st_mode) == 0o600
    kept_files.write(path, b"two")
    other = tmp_path / "link"
    other.symlink_to(tmp_path / "nothing")
    kept_files.write(other, b"three")
    assert kept_files.read(other) == b"three" and sorted(tmp_path.glob("*")) == [path, other, tmp_path / "temporary"]
    assert kept_files.read(path) == b"two" and not list(tmp_path.glob(".*"))


def test_what_is_no_file_of_this_user_is_not_read(monkeypatch, tmp_path):
    path = tmp_path / "kept"
    assert kept_files.read(path) is None and kept_files.read(tmp_path) is None
    os.mkfifo(tmp_path / "pipe")
    assert kept_files.read(tmp_path / "pipe") is None
    path.write_bytes(b"one")
    (tmp_path / "link").symlink_to(path)
    assert kept_files.read(path) == b"one" and kept_files.read(tmp_path / "link") is None
    path.chmod(0o620)
    assert kept_files.read(path) is None
    path.chmod(0o644)
    monkeypatch.setattr(kept_files, "_is_mine", lambda about: False)
    assert kept_files.read(path) is None


def test_a_file_that_cannot_be_written_leaves_nothing(monkeypatch, tmp_path):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        kept_files.write(tmp_path / "kept", b"one")
    assert [each.name for each in tmp_path.iterdir()] == ["temporary"]


def hold(path, begun, seconds):
    with kept_files.locked(path):
        begun.set()
        time.sleep(seconds)


def test_one_thread_of_one_process_at_a_time(tmp_path):
    path, inside, most = tmp_path / "lock", [], []

    def enter():
        with kept_files.locked(path):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1] * 5


@pytest.mark.sampled(0)
def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path):
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "lock", begun, 60))
    process.start()
    assert begun.wait(60)
    start = time.monotonic()
    with kept_files.locked(tmp_path / "lock", seconds=0.2):
        pass  # goes on without the lock
    assert time.monotonic() - start >= 0.2
    process.kill()
    process.join()
    start = time.monotonic()
    with kept_files.locked(tmp_path / "lock", seconds=60):
        pass
    assert time.monotonic() - start < 30


def test_a_folder_without_locks_keeps_nobody_waiting(tmp_path):
    with kept_files.locked(tmp_path / "absent" / "lock"):
        pass
