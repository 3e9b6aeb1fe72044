"""Breaking the cores on purpose: one line of one function is another, and the tests must notice."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["broken"]


def _functions(space: dict[str, Any], module: str) -> Iterator[tuple[str, FunctionType]]:
    for name, found in space.items():
        if inspect.isfunction(found) and found.__module__ == module:
            yield name, found
        elif inspect.isclass(found) and found.__module__ == module:
            for inner, method in vars(found).items():
                method = method.fget if isinstance(method, property) else method
                if inspect.isfunction(method):
                    yield f"{name}.{inner}", method


@contextmanager
def broken(module: ModuleType, line: str, instead: str) -> Iterator[None]:
    """While inside, `module` has `instead` where its source has `line`, which must be there once."""
    source = inspect.getsource(module)
    assert source.count(line) == 1, f"{module.__name__} has {line!r} {source.count(line)} times"
    space: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(line, instead), str(module.__file__), "exec", dont_inherit=True), space)
    changed = dict(_functions(space, module.__name__))
    before: list[tuple[FunctionType, CodeType]] = []
    for name, function in _functions(vars(module), module.__name__):
        if function.__code__.co_freevars == changed[name].__code__.co_freevars:
            before.append((function, function.__code__))
            function.__code__ = changed[name].__code__
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code
