"""Imports modules at first use, with the garbage collector off.

An import leaves no garbage. NOT with the collector on: after torch's import our modules would
trigger a full collection, which takes 110 ms of CPU on every rank (bench/LOG.md).
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["attributes", "load"]


def load(module: str) -> Any:
    """Import a module."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if was_enabled:
            gc.enable()


def attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that imports the attributes of `package` at first use.

    Args:
        modules: by attribute, the module that defines it, or the submodule that is the attribute.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = load(modules[name])
        if modules[name] != f"{package}.{name}":
            value = getattr(value, name)
        setattr(importlib.import_module(package), name, value)
        return value

    return get
