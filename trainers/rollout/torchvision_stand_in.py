"""What vLLM imports of torchvision, where that does not load: beside a torch that computes on processors alone.

Copied into an engine's own folder as the package torchvision. Nothing of it does anything: images arrive as patches.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return __getattr__(name)


class _Modules(MetaPathFinder, Loader):
    """Has every module of the package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


if __name__ == "torchvision":
    sys.meta_path.append(_Modules())
