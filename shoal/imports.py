"""Objects of the user's by import path: "package.module:name", or "path/to/file.py:name"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(spec: str) -> Any:
    """What "package.module:name", "file.py:name" or either with ":name.attribute" refers to.

    The working directory is searched too, whatever started the process.

    Raises:
        ValueError: the form is wrong, or there is no such module, file or attribute. An error inside the module passes
            through.

    Example:
        >>> load_object("math:pi")
        3.141592653589793
    """
    module_name, colon, path = spec.rpartition(":")
    if not colon or not module_name.strip(".") or module_name.startswith(".") or not all(path.split(".")):
        raise ValueError(f'{spec!r} is no import path; expected "package.module:name" or "file.py:name"')
    found: Any = _file(module_name) if module_name.endswith(".py") else _module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            known = ", ".join(sorted(known for known in vars(found) if not known.startswith("_"))[:20])
            raise ValueError(f"{spec!r}: {module_name!r} has no {name!r}; it has {known}")
        found = getattr(found, name)
    return found


def call_object(spec: str, options: dict[str, Any], key: str) -> Any:
    """The result of calling the object of an import path with `options`.

    Raises:
        ValueError: it cannot be called, or does not take an option; the message names `key`, where options came from.
    """
    return require_arguments(spec, options, key)(**options)


def require_arguments(spec: str, options: dict[str, Any], key: str) -> Callable[..., Any]:
    """The object of an import path, which can be called with `options`.

    Raises:
        ValueError: it cannot be called, or does not take an option; the message names `key`, where options came from.
    """
    found = load_object(spec)
    if not callable(found):
        raise ValueError(
            f"{spec!r} is {type(found).__name__}, which cannot be called; expected a class or function"
        )
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ValueError(f"{spec!r} does not take {key} = {options}: {error}") from None
    return found


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{name!r}: there is no module {error.name!r} on the Python path or in {here}; install it, or add the folder "
            "that holds it to PYTHONPATH"
        ) from error


def _file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"{path!r}: no such file in {Path.cwd()}")
    name = f"_file_{file.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module is none
        raise
    return module
