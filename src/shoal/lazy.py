"""Imports at first use, while no garbage is collected.

Nothing that loads is garbage. NOT with the collector on: after torch's import our modules make a
collection of all objects due, which takes 110 ms of CPU on every rank (bench/LOG.md).
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
    """Return a `__getattr__` that imports the attributes of a package when first asked for.

    Args:
        modules: the module that has each attribute, or that is the attribute: a part of `package`.
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
