"""Files of stored sequences: complete or not there, within the limit of the directory, and removed when unusable."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import stat
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from inference.worker.kv.disk_tier import AbandonedError, DiskTier
from inference.worker.kv.entry_format import InvalidEntryError, blank_header
from tests.rigs.stored_entries import KEY, PLENTY, read, sequence_of, state_of, write

OTHER_KEY = {**KEY, "kv_type": "q8_0"}
SMALL, LARGE = [[number for number in range(200) if len(state_of(number)) == size][:10] for size in (1000, 400_000)]


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "kv", KEY, PLENTY)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != "lock")


def numbers(tier: DiskTier) -> list[int]:
    """The numbers of the valid files, the last used first."""
    return [entry.head.sequence.tokens[0] for entry in tier.find() if entry is not None]


def file_of(tier: DiskTier, root: Path, number: int) -> Path:
    (path,) = root.rglob(tier.name_of(sequence_of(number)))
    return path


def test_a_file_returns_what_was_written(tier: DiskTier, tmp_path: Path) -> None:
    """Only the owner can read it."""
    for number in (*SMALL[:2], *LARGE[:2]):
        assert write(tier, number) == []
        assert read(tier, number) == number
    assert sorted(numbers(tier)) == sorted((*SMALL[:2], *LARGE[:2]))
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("place", [0, 9, 20, 150, -1])
def test_a_damaged_file_is_not_read(tier: DiskTier, tmp_path: Path, place: int) -> None:
    """One byte is enough, at any place."""
    write(tier, SMALL[0])
    path = file_of(tier, tmp_path, SMALL[0])
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidEntryError):
        read(tier, SMALL[0])


@pytest.mark.parametrize("damage", ["cut", "empty", "head", "longer", "renamed"])
def test_an_unusable_file_is_removed_with_one_log_line(
    tier: DiskTier, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are found."""
    for number in SMALL[:3]:
        write(tier, number)
    path = file_of(tier, tmp_path, SMALL[1])
    content = path.read_bytes()
    changed = {
        "cut": content[:-1], "empty": b"", "head": content[:140] + b"?" + content[141:], "longer": content + b"?",
        "renamed": file_of(tier, tmp_path, SMALL[0]).read_bytes(),
    }  # fmt: skip
    path.write_bytes(changed[damage])
    assert sorted(numbers(tier)) == sorted((SMALL[0], SMALL[2]))
    assert not path.exists()
    assert len(caplog.messages) == 1
    assert "removed" in caplog.text
    assert sorted(numbers(tier)) == sorted((SMALL[0], SMALL[2]))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
@pytest.mark.timeout(20)
def test_reading_does_not_wait_for_what_is_no_file(tier: DiskTier, tmp_path: Path, kind: str) -> None:
    """A pipe without a writer would block all later reads."""
    write(tier, SMALL[0])
    path = file_of(tier, tmp_path, SMALL[0])
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises((InvalidEntryError, OSError)):
        read(tier, SMALL[0])
    assert numbers(tier) == []


def test_a_directory_in_the_place_of_an_entry_gives_way(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each write of this sequence would fail and pause all writes."""
    write(tier, SMALL[0])
    path = file_of(tier, tmp_path, SMALL[0])
    path.unlink()
    path.mkdir()
    (path / "x").write_text("x")
    write(tier, SMALL[0])
    assert not tier.is_paused
    assert numbers(tier) == [SMALL[0]]
    assert len(caplog.messages) == 1
    assert "it is a directory" in caplog.text


def test_a_header_with_more_tokens_than_the_context_costs_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file is sparse: the head that it announces is a GiB long."""
    key = {**KEY, "context_length": 4096}
    tier = DiskTier(tmp_path / "kv", key, 2**40)
    write(tier, SMALL[0], key=key)
    header = bytearray(blank_header(2**31))
    struct.pack_into("<Q", header, 16, 2**28)
    path = file_of(tier, tmp_path, SMALL[0]).with_name("x.kv")
    path.write_bytes(header)
    os.truncate(path, 2**31)
    tracemalloc.start()
    try:
        assert numbers(tier) == [SMALL[0]]
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert not path.exists()
    assert "longer than the context" in caplog.text


def test_a_file_of_another_form_of_the_model_is_removed(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only if it is in the wrong directory. In its own directory it is not touched."""
    write(tier, SMALL[0])
    other = DiskTier(tmp_path / "kv", OTHER_KEY, PLENTY)
    assert numbers(other) == []
    own = file_of(tier, tmp_path, SMALL[0])
    with pytest.raises(FileNotFoundError):
        read(other, SMALL[0])
    write(tier, SMALL[1])
    write(other, SMALL[0], key=OTHER_KEY)
    content = own.read_bytes()
    own.write_bytes(content.replace(b'"f16"', b'"q80"'))
    assert numbers(tier) == [SMALL[1]]
    assert len(caplog.messages) == 1


def test_the_oldest_files_of_all_models_give_way(tmp_path: Path) -> None:
    """The limit holds for the whole directory; a use makes a file newer, and a pinned one leaves last."""
    now = [1000.0]
    first, second = (DiskTier(tmp_path, key, 1_300_000, lambda: now[0]) for key in (KEY, OTHER_KEY))
    for number in LARGE[:3]:
        now[0] += 1
        assert write(first, number) == []
    now[0] += 1
    first.touch(first.name_of(sequence_of(LARGE[0])), now[0])
    now[0] += 1
    first.touch(first.name_of(sequence_of(LARGE[1])), now[0] + 60)
    assert sorted(numbers(first)) == sorted(LARGE[:3])
    now[0] += 1
    assert write(second, LARGE[3], key=OTHER_KEY) == []
    assert sorted(numbers(first)) == sorted([LARGE[0], LARGE[1]])
    now[0] += 1
    removed = write(first, LARGE[4])
    assert removed == [first.name_of(sequence_of(LARGE[0]))]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1_300_000
    now[0] += 1
    write(first, LARGE[5])
    assert numbers(second) == []
    now[0] += 100
    write(first, LARGE[6])
    assert sorted(numbers(first)) == sorted([LARGE[1], LARGE[5], LARGE[6]])


def test_a_clock_that_jumps_only_changes_the_order(tmp_path: Path) -> None:
    """Files from a far future are found, and are the first to be removed; nothing is kept for ever."""
    now = [1000.0]
    tier = DiskTier(tmp_path, KEY, 1_300_000, lambda: now[0])
    now[0] = 4e9
    write(tier, LARGE[0])
    write(tier, LARGE[1], pinned_until=4e9 + 60)
    now[0] = 1000.0
    write(tier, LARGE[2])
    assert {entry.modified_at for entry in tier.find() if entry is not None} == {0.0, 1000.0}
    write(tier, LARGE[3])
    write(tier, LARGE[4])
    assert sorted(numbers(tier)) == sorted(LARGE[2:5])


def test_an_error_pauses_the_writes_with_one_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged disk leaves no file behind, files are still read, and a minute later it is tried again."""
    ticks = [0.0]
    tier = DiskTier(tmp_path, KEY, PLENTY, ticks=lambda: ticks[0])
    write(tier, SMALL[0])

    def damaged(*_arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", damaged)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                write(tier, SMALL[1])
    assert tier.is_paused
    (message,) = caplog.messages
    assert message.startswith(f"cannot write stored sequences to {tmp_path} (Input/output error); no sequences are")
    assert message.endswith("written to disk for the next 60 s")
    assert [path.name for path in files(tmp_path)] == [tier.name_of(sequence_of(SMALL[0]))]
    assert read(tier, SMALL[0]) == SMALL[0]
    ticks[0] = 61.0
    assert not tier.is_paused
    write(tier, SMALL[1])
    assert read(tier, SMALL[1]) == SMALL[1]


class Disk:
    """The disk below `root` has room for `max_bytes`; other writes fail."""

    def __init__(self, root: Path, max_bytes: int, patch: pytest.MonkeyPatch) -> None:
        self.max_bytes = max_bytes
        write_at = os.pwrite

        def pwrite(handle: int, data: memoryview, offset: int) -> int:
            used = sum(path.stat().st_size for path in root.rglob("*.kv"))
            if used + os.fstat(handle).st_size > self.max_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write_at(handle, data, offset)

        patch.setattr(os, "pwrite", pwrite)


def test_the_oldest_files_give_way_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all models, but no pinned one, with one log line a minute, although the limit is not reached."""
    now, ticks = [1000.0], [0.0]
    first, second = (DiskTier(tmp_path, key, PLENTY, lambda: now[0], lambda: ticks[0]) for key in (KEY, OTHER_KEY))
    Disk(tmp_path, 1_300_000, monkeypatch)
    write(first, LARGE[0], pinned_until=2000.0)
    for number in LARGE[1:3]:
        now[0] += 1
        write(first, number)
    now[0] += 1
    assert write(first, LARGE[3]) == [first.name_of(sequence_of(LARGE[1]))]
    now[0] += 1
    assert write(second, LARGE[4], key=OTHER_KEY) == []
    assert sorted(numbers(first)) == sorted([LARGE[0], LARGE[3]])
    line = f"the disk is full: removing the oldest stored sequences in {tmp_path} for new ones"
    assert caplog.messages == [line, line], "one of each worker"
    now[0] += 1
    assert write(first, LARGE[5]) == [first.name_of(sequence_of(LARGE[3]))]
    assert len(caplog.messages) == 2
    ticks[0] += 61.0
    now[0] += 1
    write(first, LARGE[6])
    assert len(caplog.messages) == 3
    assert not first.is_paused


def test_writes_pause_while_the_disk_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other programs take what becomes free: the writes pause. Pinned files alone make no room."""
    ticks = [0.0]
    tier = DiskTier(tmp_path, KEY, PLENTY, ticks=lambda: ticks[0])
    for number in LARGE[:8]:
        write(tier, number)
    disk = Disk(tmp_path, 0, monkeypatch)
    removed = 0
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            write(tier, LARGE[9])
        assert tier.is_paused
        ticks[0] += 61.0
        removed = removed or 8 - len(numbers(tier))
        assert removed == 8 - len(numbers(tier)) <= 4
    assert len(caplog.messages) == 3
    assert all(path.suffix == ".kv" for path in files(tmp_path))
    disk.max_bytes = PLENTY
    write(tier, LARGE[9])
    for number in numbers(tier):
        tier.touch(tier.name_of(sequence_of(number)), time.time() + 60.0)
    disk.max_bytes = 0
    with pytest.raises(OSError, match="No space"):
        write(tier, LARGE[8])
    assert len(numbers(tier)) == 9 - removed


def test_a_limit_of_file_sizes_is_an_error_like_others(tmp_path: Path) -> None:
    """The kernel stops the write in its middle; no file remains."""
    script = (
        "import resource, sys; from pathlib import Path; from tests.rigs.stored_entries import *;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "tier = DiskTier(Path(sys.argv[1]), KEY, PLENTY);"
        f"write(tier, {SMALL[0]})\n"
        f"try: write(tier, {LARGE[0]})\n"
        "except OSError as error: print(error.strerror, tier.is_paused)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "File too large True\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert numbers(DiskTier(tmp_path, KEY, PLENTY)) == [SMALL[0]]
    assert len(files(tmp_path)) == 1


def test_a_file_in_the_place_of_the_directory_is_reported_once(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tier, SMALL[0])
    own = file_of(tier, tmp_path, SMALL[0]).parent
    shutil.rmtree(own)
    own.touch()
    assert numbers(tier) == numbers(tier) == []
    assert caplog.text.count(f"cannot list stored sequences in {own} (Not a directory); no sequences are written") == 1
    assert tier.is_paused


def test_a_directory_that_cannot_be_written_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a read-only file system. Unusable files stay there, and are not found."""
    tier = DiskTier(tmp_path, KEY, PLENTY)
    for number in SMALL[:2]:
        write(tier, number)
    path = file_of(tier, tmp_path, SMALL[1])
    path.write_bytes(b"damaged")
    opened = os.open

    def read_only(path: str | Path, flags: int, *more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *more)

    def refuse(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert numbers(tier) == [SMALL[0]]
    tier.touch(path.name, time.time())
    assert read(tier, SMALL[0]) == SMALL[0]
    with pytest.raises(OSError, match="Read-only"):
        write(tier, SMALL[2])
    assert tier.is_paused
    tier.remove(tier.name_of(sequence_of(SMALL[0])))
    lines = [text.partition(" (")[0] for text in caplog.messages]
    first = file_of(tier, tmp_path, SMALL[0])
    assert lines == [
        f"stored sequence {path} removed: it is shorter than its header",
        f"cannot remove the stored sequence {path}",
        f"cannot write stored sequences to {tmp_path}",
        f"cannot remove the stored sequence {first}",
    ]


def test_a_slow_disk_pauses_the_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is written nevertheless."""
    ticks = [0.0]

    def tick() -> float:
        ticks[0] += 11.0
        return ticks[0]

    tier = DiskTier(tmp_path, KEY, PLENTY, ticks=tick)
    write(tier, SMALL[0])
    assert "is slow" in caplog.text
    assert tier.is_paused
    assert read(tier, SMALL[0]) == SMALL[0]


def test_an_abandoned_write_leaves_no_file(tier: DiskTier, tmp_path: Path) -> None:
    """As when the worker ends during the write."""
    with pytest.raises(AbandonedError):
        write(tier, LARGE[0], lambda: True)
    assert files(tmp_path) == []
    assert not tier.is_paused


def start_writer(directory: Path, max_bytes: int, seed: int) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.rigs.stored_entries", "disk", str(directory), str(max_bytes), str(seed)],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    child.stdout.close()
    return child


def test_a_kill_in_the_middle_of_a_write_leaves_complete_files_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next write removes what the killed one left."""
    chosen = random.Random(3)
    tier = DiskTier(tmp_path, KEY, PLENTY)
    for seed in range(6):
        child = start_writer(tmp_path, PLENTY, seed % 2)
        time.sleep(chosen.uniform(0.0, 0.1))
        child.kill()
        child.wait()
        for number in numbers(tier):
            assert read(tier, number) == number
    assert caplog.messages == []
    write(tier, SMALL[0])
    assert all(path.suffix == ".kv" for path in files(tmp_path))


def test_two_services_share_a_directory_within_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both write as fast as they can; at each moment the complete files fit and are right."""
    limit = 12_000_000
    children = [start_writer(tmp_path, limit, seed) for seed in (1, 2)]
    tier = DiskTier(tmp_path, KEY, limit)
    try:
        for _ in range(20):
            time.sleep(0.05)
            sizes = []
            for path in files(tmp_path):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            assert sum(sizes) <= limit
            for number in numbers(tier)[:3]:
                try:
                    assert read(tier, number) == number
                except FileNotFoundError:
                    continue
            assert all(child.poll() is None for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert len(numbers(tier)) > 2
    assert caplog.messages == []
