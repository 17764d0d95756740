"""Downloads GGUF files from a Hugging Face hub (HF_ENDPOINT): resumes, verifies checksums, checks the disk first."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx2

from headgate.shared.errors import HeadgateError
from headgate.shared.units import MIB, format_bytes, format_duration
from inference.file_stamp import parts_of
from inference.models_dir import HubSource, ModelFile, is_projector

ENDPOINT = "https://huggingface.co"
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 30.0
DESCRIPTION_SECONDS = 60.0
TRIES = 5
"""Attempts in a row without new bytes after which a download fails."""
RETRY_SECONDS = 1.0
SPARE_BYTES = 256 * MIB
"""Disk space that stays free."""
CHUNK_BYTES = MIB
MAX_ANSWER_BYTES = 32 * MIB
_PART_SUFFIX = ".part"
_STATUS_SECONDS = 0.2

Report = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """How far the download of one file is. `str()` gives one line with a bar."""

    file: str
    done_bytes: int
    total_bytes: int
    bytes_per_second: float

    def __str__(self) -> str:
        rate, share = self.bytes_per_second, 100 * self.done_bytes // max(1, self.total_bytes)
        left = format_duration(round((self.total_bytes - self.done_bytes) / rate)) if rate > 0 else "-"
        filled = "#" * (share // 5)
        done = format_bytes(self.done_bytes)
        return f"[{filled:<20}] {share} %  {done}  {format_bytes(int(rate))}/s  {left} left"


class HubError(HeadgateError):
    """The hub refused or could not be reached, a file arrived damaged, or the disk is too small or not writable."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `bytes` is 0 if the hub does not list the size.

    `sha256` is None for a file that the hub does not keep in its large file storage.
    """

    name: str
    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Download:
    """The files of one model, the commit that they are from, and the folder that they are saved in."""

    source: HubSource
    commit: str
    files: tuple[HubFile, ...]
    folder: Path

    def target(self, file: HubFile) -> Path:
        """Where the complete file is."""
        return self.folder.joinpath(*file.name.split("/"))

    def part(self, file: HubFile) -> Path:
        """Where the file is until it is complete. Hidden, so that it is not taken for a model."""
        target = self.target(file)
        return target.with_name(f".{target.name}{_PART_SUFFIX}")

    def missing(self) -> list[HubFile]:
        """The files that do not exist in full size."""
        return [file for file in self.files if _size(self.target(file)) != file.bytes]

    def result(self) -> ModelFile:
        """The downloaded model."""
        projector = next((self.target(file) for file in self.files if is_projector(file.name)), None)
        return ModelFile(self.target(self.files[0]), projector)


class Hub:
    """A hub, with the address and token in `environ` (HF_ENDPOINT, HF_TOKEN). Close it after use."""

    def __init__(self, environ: Mapping[str, str], *, say: Report, status: Callable[[Progress], None]) -> None:
        """`say` receives lines, `status` the progress, which replaces the previous one. Raises HubError."""
        self.endpoint = (environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        self._shown = re.sub(r"//[^/]*@", "//", self.endpoint)
        """The endpoint for messages, without user name and password."""
        token = environ.get("HF_TOKEN")
        try:
            self._client = httpx2.Client(
                headers={"User-Agent": "headgate", **({"Authorization": f"Bearer {token}"} if token else {})},
                timeout=httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
                follow_redirects=True,
            )
        except (ValueError, httpx2.InvalidURL) as error:
            raise HubError(f"HF_ENDPOINT, HF_TOKEN or a proxy variable is invalid: {error}") from error
        self._say = say
        self._status = status

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def plan(self, source: HubSource, models_dir: Path) -> Download:
        """The files of `source`: all parts of the model, and the best projector of the repository. Raises HubError."""
        answer = self._json(source, f"{self.endpoint}/api/models/{quote(source.repository)}?blobs=true")
        try:
            files = {file.name: file for file in map(_file, answer["siblings"])}
            commit = str(answer["sha"])
        except (KeyError, TypeError, ValueError) as error:
            raise HubError(f"{self._shown} answered without a list of files for {source.repository}") from error
        try:
            first = source.choose(list(files))
        except ValueError as error:
            raise HubError(str(error)) from None
        folder = first.rpartition("/")[0]
        names = [f"{folder}/{part.name}" if folder else part.name for part in parts_of(Path(first))]
        if absent := [name for name in names if name not in files]:
            raise HubError(f"{source.repository} lacks {absent[0]}, a part of this model; choose another quantization")
        projectors = sorted(filter(is_projector, files), key=_preference)
        chosen = tuple(files[name] for name in (*names, *projectors[:1]))
        if unknown := [file.name for file in chosen if file.bytes < 1]:
            raise HubError(
                f"{self._shown} lists {unknown[0]} without its size, so a download that ends early would not be "
                f"noticed; a file that you copied here yourself is added with: headgate add FILE.gguf"
            )
        return Download(source, commit, chosen, source.folder(models_dir))

    def fetch(self, download: Download) -> ModelFile:
        """Downloads what is missing. Raises HubError; a later call continues where this one stopped."""
        missing = download.missing()
        _check_space(download, missing)
        for file in missing:
            try:
                self._fetch(download, file)
            except OSError as error:
                where = error.filename or download.target(file)
                what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
                raise HubError(f"cannot write {where}: {what}; the same command continues the download") from error
        return download.result()

    def _fetch(self, download: Download, file: HubFile) -> None:
        part, target = download.part(file), download.target(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part) as out:
            hasher, done = hashlib.sha256(), 0
            for chunk in iter(lambda: out.read(CHUNK_BYTES), b""):
                hasher.update(chunk)
                done += len(chunk)
            if done > file.bytes:
                hasher, done = _restart(out)
            failures, before = 0, done
            progress = _Meter(file, done, self._say, self._status)
            while done < file.bytes:
                try:
                    for restarted, chunk in self._chunks(download, file, done):
                        if restarted:
                            hasher, done = _restart(out)
                        out.write(chunk)
                        hasher.update(chunk)
                        done += len(chunk)
                        progress.at(done)
                    if done < file.bytes:
                        raise httpx2.RemoteProtocolError("the connection ended early")
                except httpx2.RequestError as error:
                    failures = 0 if done > before else failures + 1
                    before = done
                    if failures >= TRIES:
                        raise HubError(
                            f"{self._host()} stopped sending {file.name} ({_reason(error)}); the same command "
                            f"continues at {format_bytes(done)}"
                        ) from error
                    self._say(f"{file.name}: {_reason(error)}; continuing at {format_bytes(done)}")
                    time.sleep(RETRY_SECONDS)
            out.flush()
            os.fsync(out.fileno())
            if done != file.bytes or file.sha256 not in (None, hasher.hexdigest()):
                part.unlink()
                raise HubError(
                    f"{file.name} arrived damaged: its size or its SHA-256 is not that of the hub; it was removed, "
                    f"download it again"
                )
            part.replace(target)
        progress.finished()

    def _chunks(self, download: Download, file: HubFile, begin: int) -> Iterator[tuple[bool, bytes]]:
        """The bytes from `begin` on in chunks. True with the first one: the server sends the file from its start."""
        path = f"{quote(download.source.repository)}/resolve/{quote(download.commit)}/{quote(file.name)}"
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begin}-"} if begin else {})
        with self._client.stream("GET", f"{self.endpoint}/{path}", headers=headers) as response:
            if response.status_code >= 500 or response.status_code in (408, 429):
                raise httpx2.RemoteProtocolError(f"status {response.status_code}")
            self._check(download.source, response)
            restarted = begin > 0 and response.status_code != 206
            for chunk in response.iter_raw():
                yield restarted, chunk
                restarted = False

    def _json(self, source: HubSource, url: str) -> Any:
        ends = time.monotonic() + DESCRIPTION_SECONDS
        try:
            with self._client.stream("GET", url) as response:
                self._check(source, response)
                raw = bytearray()
                for chunk in response.iter_bytes():
                    raw += chunk
                    if time.monotonic() > ends:
                        raise httpx2.ReadTimeout(f"no complete answer within {DESCRIPTION_SECONDS:g} s")
                    if len(raw) > MAX_ANSWER_BYTES:
                        raise HubError(f"the answer of {self._host()} about {source.repository} is too long")
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise HubError(
                f"{self._shown} cannot be reached ({_reason(error)}). Set HF_ENDPOINT to use another hub, HTTPS_PROXY "
                f"to use a proxy. A file that you copied here yourself is added with: headgate add FILE.gguf"
            ) from error
        try:
            return httpx2.Response(200, content=bytes(raw)).json()
        except (ValueError, RecursionError) as error:
            raise HubError(f"{self._shown} is not a hub: its answer is not JSON; check HF_ENDPOINT") from error

    def _check(self, source: HubSource, response: httpx2.Response) -> None:
        """Raises HubError for an error status."""
        status, name = response.status_code, source.repository
        if status in (200, 206):
            return
        if status in (401, 403):
            raise HubError(
                f"{self._host()} refuses {name} ({status}): the name is wrong, or the repository is private or gated. "
                f"Accept its terms at {self._shown}/{name}, and set HF_TOKEN to a token from "
                f"{self._shown}/settings/tokens"
            )
        if status == 404:
            raise HubError(f"{self._host()} has no {source}; check the spelling at {self._shown}/{name}")
        wait = response.headers.get("retry-after")
        raise HubError(f"{self._host()} answered {status} for {name}; try again {f'in {wait} s' if wait else 'later'}")

    def _host(self) -> str:
        return self._shown.partition("://")[2]


def _file(entry: Any) -> HubFile:
    name = str(entry["rfilename"])
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise ValueError(name)
    stored = entry.get("lfs") or {}
    sha256 = stored.get("sha256")
    return HubFile(name, int(stored.get("size") or entry.get("size") or 0), None if sha256 is None else str(sha256))


def _preference(name: str) -> tuple[int, str]:
    """Projectors in half precision first, as they are small and exact."""
    lower = name.lower()
    rank = next((at for at, kind in enumerate(("bf16", "f16", "q8", "f32")) if kind in lower), 4)
    return ({1: 0, 0: 1}.get(rank, rank), name)  # f16 before bf16, whose name contains it


def _check_space(download: Download, missing: list[HubFile]) -> None:
    need = sum(file.bytes - min(file.bytes, _size(download.part(file)) or 0) for file in missing)
    if not need:
        return
    place = next(folder for folder in (download.folder, *download.folder.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if need + SPARE_BYTES > free:
        raise HubError(
            f"{download.source} needs {format_bytes(need)} more, and {place} has {format_bytes(free)} free "
            f"({format_bytes(SPARE_BYTES)} stay free); free some, choose a smaller quantization, or set "
            f"INFERENCE_MODELS_DIR to another disk"
        )


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """The partial file, for this process alone."""
    with part.open("a+b") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(f"another process is downloading {part.name[1 : -len(_PART_SUFFIX)]}") from None
        out.seek(0)
        yield out


def _restart(out: BinaryIO) -> tuple[Any, int]:
    out.seek(0)
    out.truncate()
    return hashlib.sha256(), 0


class _Meter:
    """Reports the progress of one file."""

    def __init__(self, file: HubFile, done: int, say: Report, status: Callable[[Progress], None]) -> None:
        self._file = file
        self._resumed_bytes = done
        self._began = self._shown_at = time.monotonic()
        self._say = say
        self._status = status
        resumed = f", {format_bytes(done)} of it are here" if done else ""
        say(f"downloading {file.name} ({format_bytes(file.bytes)}{resumed})")

    def at(self, done: int) -> None:
        """Reports that `done` bytes are saved."""
        now = time.monotonic()
        if now - self._shown_at < _STATUS_SECONDS and done < self._file.bytes:
            return
        self._shown_at = now
        rate = (done - self._resumed_bytes) / max(now - self._began, 1e-3)
        self._status(Progress(self._file.name, done, self._file.bytes, rate))

    def finished(self) -> None:
        """Reports that the file is complete and verified."""
        seconds = time.monotonic() - self._began
        how = "SHA-256 verified" if self._file.sha256 else "size verified"
        self._say(f"{self._file.name}: complete after {format_duration(round(seconds))}, {how}")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
