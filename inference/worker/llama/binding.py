"""Imports the low-level functions of llama-cpp-python without its `__init__`.

The `__init__` imports the `Llama` class with chat formats, a disk cache and `multiprocessing`, which a worker does not
use. This module registers the package without running its `__init__`, which runs at the first access to an attribute
that only the `__init__` defines.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

PACKAGE = "llama_cpp"


class _Package(ModuleType):
    """The package; its modules are imported at the first access."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if spec is None or spec.loader is None or (name.startswith("__") and name != "__version__"):
            raise AttributeError(name)
        if not name.startswith("__") and importlib.util.find_spec(f"{PACKAGE}.{name}") is not None:
            return importlib.import_module(f"{PACKAGE}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # from here on an ordinary module
        spec.loader.exec_module(self)
        return getattr(self, name)


def _register_package() -> None:
    """Registers the package, unless it is imported already. If it is missing, the import below raises the error."""
    if PACKAGE in sys.modules or (spec := importlib.util.find_spec(PACKAGE)) is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Package
    sys.modules[PACKAGE] = package


_register_package()

if TYPE_CHECKING:
    lib: Any
else:
    from llama_cpp import llama_cpp as lib

__all__ = ["lib"]
