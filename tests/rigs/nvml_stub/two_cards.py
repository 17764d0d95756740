"""A machine with two NVIDIA cards that llama.cpp numbers in another order than NVML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rigs.nvml_stub import GIB, NvidiaGpu, NvmlStub

FIRST, SECOND = "GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-000000000000"


def two_cards(root: Path) -> NvmlStub:
    """As NVML reports them."""
    first = NvidiaGpu(FIRST, "00000000:01:00.0", "NVIDIA First", 24 * GIB, GIB // 2, GIB)
    second = NvidiaGpu(SECOND, "00000000:41:00.0", "NVIDIA Second", 16 * GIB, GIB // 4, 0)
    return NvmlStub(root, [first, second])


async def listing() -> list[dict[str, Any]]:
    """As llama.cpp lists them."""
    return [_cuda(0, "0000:41:00.0"), _cuda(1, "0000:01:00.0"), {"type": "cpu", "backend": "CPU"}]


def _cuda(number: int, pci: str) -> dict[str, Any]:
    return {"ggml_name": f"CUDA{number}", "backend": "CUDA", "name": "card", "type": "gpu", "pci": pci,
            "total_bytes": 10, "free_bytes": 9}  # fmt: skip
