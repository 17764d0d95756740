"""Reads AMD devices from the kernel's files, without a process or a device context; decides nothing.

The amdgpu driver shows video memory and the number ROCm knows a device by in /sys/bus/pci/devices/ADDRESS.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AmdFigures:
    """Bytes of video memory, and the UUID as ROCR_VISIBLE_DEVICES takes it (None where the chip has none)."""

    total_bytes: int
    used_bytes: int
    uuid: str | None


def amd_figures(pci: str, root: Path = Path("/")) -> AmdFigures | None:
    """The device at a PCI address such as `0000:03:00.0`; None when it is no AMD device or not there any more."""
    folder = root / "sys/bus/pci/devices" / pci.lower()
    try:
        total = int((folder / "mem_info_vram_total").read_text())
        used = int((folder / "mem_info_vram_used").read_text())
    except (OSError, ValueError):
        return None
    return AmdFigures(total, used, _uuid(folder))


def _uuid(folder: Path) -> str | None:
    try:
        number = (folder / "unique_id").read_text().strip().removeprefix("0x").lower()
    except OSError:
        return None
    return f"GPU-{number.zfill(16)}" if number.strip("0") else None
