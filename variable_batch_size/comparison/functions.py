"""Functions of the user's that a command names: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_function(name: str) -> Callable[[], Any]:
    """The function of that name; its module is looked for in the working directory first."""
    module_name, _, function_name = name.rpartition(":")
    function = getattr(load_module(module_name), function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def load_module(name: str) -> Any:
    """A module by its name, or the one that a file is."""
    if not name.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a command, unlike a script, does not look there by itself
        return importlib.import_module(name)
    if not Path(name).exists():
        raise ValueError(f"there is no file {name}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where classes of the module look for it
    spec.loader.exec_module(module)
    return module
