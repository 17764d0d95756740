"""A llama.cpp whose computations end the process or compute nothing, on demand: a preloaded library. Linux."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.compiled import library_directory

SOURCE = Path(__file__).with_name("broken_llama.c")


class BrokenLlama:
    """Breaks llama.cpp in processes that are started with `env`, from `breaks` on; `control` holds the switch."""

    def __init__(self, control: Path) -> None:
        control.mkdir(parents=True, exist_ok=True)
        self._switch = control / "broken-llama"
        library = library_directory(SOURCE, "libbroken_llama.so") / "libbroken_llama.so"
        self.env = {"LD_PRELOAD": str(library), "BROKEN_LLAMA": str(self._switch)}

    def breaks(self, how: str, only: str = "") -> None:
        """Breaks every computation from now on. `how`: `sigill` or `sigsegv` ends the process, `late` does so after
        three seconds, `zero` computes nothing. `only`: in processes with this text in their command line.
        """
        self._switch.write_text(f"{how} {only}".strip())

    def computes(self) -> None:
        """From now on computations are right again."""
        self._switch.unlink(missing_ok=True)
