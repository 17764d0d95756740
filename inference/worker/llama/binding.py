"""Opens llama-cpp-python's low-level functions without the package around them; decides nothing.

The package's own entry imports its `Llama` class with chat formats, a disk cache and `multiprocessing`, of which a
worker uses nothing. Here the package is known by its name before that entry has run; it runs when something is asked of
the package that only the entry gives.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

PACKAGE = "llama_cpp"


class _Package(ModuleType):
    """The package; its modules are imported when they are named."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if spec is None or spec.loader is None or (name.startswith("__") and name != "__version__"):
            raise AttributeError(name)
        if not name.startswith("__") and importlib.util.find_spec(f"{PACKAGE}.{name}") is not None:
            return importlib.import_module(f"{PACKAGE}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # it becomes the whole package, once
        spec.loader.exec_module(self)
        return getattr(self, name)


def _know_the_package() -> None:
    """Unless it was imported before, or is not there: then the import below says so."""
    if PACKAGE in sys.modules or (spec := importlib.util.find_spec(PACKAGE)) is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Package
    sys.modules[PACKAGE] = package


_know_the_package()

if TYPE_CHECKING:
    lib: Any
else:
    from llama_cpp import llama_cpp as lib

__all__ = ["lib"]
