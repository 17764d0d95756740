"""Adds a model to the text of models.yaml. Comments, order and layout of the file stay as they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.state_files import write_atomic


def with_entry(text: str, name: str, fields: Mapping[str, Any]) -> str:
    """`text` with the model `name` at the end of `models:`.

    Raises ValueError with the lines to add by hand if anything else would change, or `text` is not valid YAML.
    """
    try:
        before = yaml.safe_load(text) or {}
        changed = _insert(text, name, fields)
        after = yaml.safe_load(changed)
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(_by_hand(name, fields)) from error
    if after != {**before, "models": {**(before.get("models") or {}), name: dict(fields)}}:
        raise ValueError(_by_hand(name, fields))
    return changed


def _by_hand(name: str, fields: Mapping[str, Any]) -> str:
    block = textwrap.indent(_block(name, fields), "  ").rstrip()
    return f"the model cannot be added without a change of other content; add this under `models:`\n{block}"


def _block(name: str, fields: Mapping[str, Any]) -> str:
    return yaml.safe_dump({name: dict(fields)}, sort_keys=False, allow_unicode=True, width=10**6)


def _insert(text: str, name: str, fields: Mapping[str, Any]) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    models = _models(text)
    if models is None:
        head = text if not text or text.endswith("\n") else text + newline
        return head + newline.join(["models:", *_lines(name, fields, 2), ""])
    if isinstance(models, yaml.MappingNode) and models.flow_style and models.value:
        inside = yaml.safe_dump({name: dict(fields)}, default_flow_style=True, allow_unicode=True, width=10**6)
        at = models.end_mark.index - 1
        return text[:at].rstrip() + f", {inside.strip()[1:-1]}" + text[at:]
    if isinstance(models, yaml.MappingNode) and models.flow_style:
        block = newline + newline.join(_lines(name, fields, 2))
        return text[: models.start_mark.index].rstrip(" ") + block + text[models.end_mark.index :]
    is_block = isinstance(models, yaml.MappingNode)
    if isinstance(models, yaml.ScalarNode) and models.value:  # `models: null`
        begin = models.start_mark.index
        return _insert(text[:begin].rstrip(" ") + text[models.end_mark.index :], name, fields)
    lines = _lines(name, fields, models.value[0][0].start_mark.column if is_block else 2)
    # the end of the last line of `models:`, with a comment behind its value
    end = text.find("\n", _end(models) - (text[_end(models) - 1] == "\n"))
    head = text + newline if end < 0 else text[: end + 1]
    # a blank line before the new entry, if there are blank lines in `models:`
    if is_block and f"{newline}{newline}" in text[models.start_mark.index : _end(models)]:
        lines.insert(0, "")
    return head + newline.join([*lines, ""]) + ("" if end < 0 else text[end + 1 :])


def _lines(name: str, fields: Mapping[str, Any], indent: int) -> list[str]:
    return textwrap.indent(_block(name, fields), " " * indent).splitlines()


def _models(text: str) -> yaml.Node | None:
    """The value of `models:`; None without this key."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == "models"), None)


def _end(node: yaml.Node) -> int:
    """The index after the last character of `node`, without the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


class BusyError(HeadgateError):
    """Another command is changing the same files."""

    exit_code = Exit.TRY_LATER


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Excludes other commands that change files in `directory`. Raises BusyError while another command does so."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BusyError(f"another command is changing {directory}; try again") from None
    try:
        yield
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of `path` (of the target of a symbolic link) in one step.

    The mode stays, and the owner if this user may set it.
    """
    target = path.resolve()
    kept = target.stat() if target.exists() else None
    write_atomic(target, text.encode())
    target.chmod(0o644 if kept is None else stat.S_IMODE(kept.st_mode))
    if kept is not None and (kept.st_uid, kept.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.chown(target, kept.st_uid, kept.st_gid)
