"""Names the bundled demo models and finds their files."""

from pathlib import Path

__all__ = ["BUNDLED", "UnknownBundledModelError", "bundled_path"]

BUNDLED: tuple[str, ...] = ("demo", "demo-mini")
"""Names that may follow `bundled:` in models.yaml."""


class UnknownBundledModelError(KeyError):
    """No bundled model has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"no bundled model {self.name!r}; there are: {', '.join(BUNDLED)}"


def bundled_path(name: str) -> Path:
    """The GGUF file of the bundled model `name`, which models.yaml names as `bundled:NAME`.

    Raises UnknownBundledModelError (a KeyError) with a list of the known names.
    """
    if name not in BUNDLED:
        raise UnknownBundledModelError(name)
    return Path(__file__).parent / "models" / f"{name}.gguf"
