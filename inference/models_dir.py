"""Finds GGUF files below INFERENCE_MODELS_DIR: models without an entry in models.yaml, and files of `hf:` sources."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from inference.file_stamp import parts_of

HUB = "hf:"
DEFAULT_QUANTIZATION = "Q4_K_M"
"""The quantization of an `hf:` source without one, if the repository has several."""
MAX_DEPTH = 4
"""Folders below the directory: ORGANIZATION/REPOSITORY/QUANTIZATION, and one more."""
MAX_ENTRIES = 20_000
"""Files and folders that are read, so that `/` as the directory does not delay the start."""
MAX_FILES = 500
"""Models in the directory, with and without an entry in models.yaml; further ones are ignored."""

_SOURCE = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:(?P<file>(?:/[^/:]+)+\.gguf)|:(?P<quantization>[\w.-]+))?", re.ASCII
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A GGUF file (the first part of a split model) and the image projector beside it."""

    path: Path
    mmproj: Path | None = None


@dataclass(frozen=True, slots=True)
class HubSource:
    """`hf:ORGANIZATION/REPOSITORY`, with `:QUANTIZATION` or `/FILE.gguf`."""

    repository: str
    file: str | None
    quantization: str | None

    @classmethod
    def parse(cls, text: str) -> HubSource:
        """The source in `text`. Raises ValueError with the expected form."""
        match = _SOURCE.fullmatch(text)
        if match is None or any(part in (".", "..") for part in re.split("[/:]", text)):
            raise ValueError(
                f"{text!r} is not a source on the hub; write hf:ORGANIZATION/REPOSITORY:QUANTIZATION (for example "
                f"hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M) or hf:ORGANIZATION/REPOSITORY/FILE.gguf"
            )
        file = match["file"]
        return cls(match["repository"], file.removeprefix("/") if file else None, match["quantization"])

    def __str__(self) -> str:
        end = f"/{self.file}" if self.file else f":{self.quantization}" if self.quantization else ""
        return f"{HUB}{self.repository}{end}"

    def folder(self, models_dir: Path) -> Path:
        """Where the files of the repository are downloaded to."""
        return models_dir.joinpath(*self.repository.split("/")).absolute()

    def downloaded(self, models_dir: Path) -> ModelFile:
        """The complete download of this source. Raises ValueError without one."""
        folder = self.folder(models_dir)
        files = {path.relative_to(folder).as_posix(): path for path in _gguf_files(folder)}
        try:
            path = files[self.choose(list(files))]
        except ValueError as error:
            raise ValueError(f"{self} is not in {folder}; download it: headgate pull {self}") from error
        if missing := next((part for part in parts_of(path) if not part.is_file()), None):
            raise ValueError(f"{missing} is missing; continue the download: headgate pull {self}")
        projectors = [path for name, path in files.items() if is_projector(name)]
        return ModelFile(path, projectors[0] if len(projectors) == 1 else None)

    def choose(self, names: Sequence[str]) -> str:
        """The file of this source, or its first part, among those of its repository.

        Raises ValueError with the choices.
        """
        models = [name for name in names if name.lower().endswith(".gguf") and not is_projector(name)]
        models = sorted((name for name in models if _part(name) <= 1), key=lambda name: (len(name), name))
        if not models:
            raise ValueError(
                f"{self.repository} has no GGUF model; look for a repository with the same name and -GGUF at its end"
            )
        if self.file is not None:
            if self.file in models:
                return self.file
            raise ValueError(f"{self.repository} has no model {self.file}; {_choices(models)}")
        if self.quantization is None and len(models) == 1:
            return models[0]
        wanted = self.quantization or DEFAULT_QUANTIZATION
        ending = re.compile(rf"(^|[^0-9a-z]){re.escape(wanted.lower())}$")
        found = [name for name in models if ending.search(model_name(PurePosixPath(name).name).lower())]
        if not found:
            what = f"no quantization {wanted}" if self.quantization else "several quantizations; name one of them"
            raise ValueError(f"{self.repository} has {what}; {_choices(models)}")
        return found[0]


def _choices(models: Sequence[str]) -> str:
    return f"its models: {', '.join(models[:20])}{' ...' if len(models) > 20 else ''}"


def is_projector(name: str) -> bool:
    """Whether a file is an image projector, by its name as llama.cpp's converter writes it."""
    return "mmproj" in PurePosixPath(name).name.lower()


def _part(name: str) -> int:
    """The number of a part of a split file; 0 for a whole file."""
    match = _PART.search(name[: -len(".gguf")])
    return int(match[1]) if match else 0


def model_name(file_name: str) -> str:
    """The name of a model by its file: without `.gguf` and without the number of the part."""
    return _PART.sub("", re.sub(r"\.gguf$", "", file_name, flags=re.IGNORECASE))


def _gguf_files(directory: Path) -> Iterator[Path]:
    """GGUF files below `directory`, sorted within their folders.

    Skipped are hidden and unreadable files and folders, names that cannot be printed, folders deeper than MAX_DEPTH,
    and links to a folder that contains the link.
    """
    left = MAX_ENTRIES
    folders: list[tuple[Path, tuple[os.stat_result, ...]]] = [(directory, ())]
    while folders:
        folder, outer = folders.pop()
        try:
            here = folder.stat()
            if any(os.path.samestat(here, other) for other in outer):
                continue
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue
        inner = []
        for entry in entries:
            left -= 1
            if left < 0:
                return
            if entry.name.startswith(".") or not _can_name_a_model(entry.name):
                continue
            try:
                if entry.name.endswith(".gguf") and entry.is_file() and os.access(entry.path, os.R_OK):
                    yield folder / entry.name
                elif len(outer) < MAX_DEPTH and entry.is_dir():
                    inner.append((folder / entry.name, (*outer, here)))
            except OSError:
                continue
        folders += reversed(inner)


def _can_name_a_model(name: str) -> bool:
    """Whether the name of a file can be the name of a model."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.isprintable()


def models_below(directory: Path) -> list[ModelFile]:
    """The models below `directory`: no projectors and no later parts of split files.

    The only projector of a folder is used for the models there and in direct subfolders without projectors.
    Projectors in `directory` itself are not used.
    """
    projectors: dict[Path, list[Path]] = {}
    models: list[Path] = []
    for path in _gguf_files(directory.absolute()):
        if is_projector(path.name):
            projectors.setdefault(path.parent, []).append(path)
        elif _part(path.name) <= 1 and len(models) < MAX_FILES:
            models.append(path)
    projectors.pop(directory.absolute(), None)

    def projector(folder: Path) -> Path | None:
        found = next((projectors[each] for each in (folder, folder.parent) if each in projectors), [])
        return found[0] if len(found) == 1 else None

    return [ModelFile(path, projector(path.parent)) for path in models]
