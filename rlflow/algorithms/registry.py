"""Names for interchangeable functions: how a configuration value such as `policy_loss: ppo` finds its formula."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable)


class Registry(Generic[F]):
    """Functions of one kind by name: `@registry("name")` adds one, `registry["name"]` finds it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def __call__(self, name: str) -> Callable[[F], F]:
        """Decorator that registers a function; ValueError if the name is taken."""
        if name in self._functions:
            raise ValueError(f"{self.kind} {name!r} is registered twice")

        def register(function: F) -> F:
            self._functions[name] = function
            return function

        return register

    def __getitem__(self, name: str) -> F:
        """Raises ValueError with the nearest valid name and all names."""
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no {self.kind} named {name!r}{hint} Valid: {', '.join(self.names())}")
        return self._functions[name]

    def names(self) -> list[str]:
        return sorted(self._functions)
