"""The state of a scheduler as a checkpoint holds it: without functions, and back in the containers it came from."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any, Protocol


class Stateful(Protocol):
    """Something with a state, such as a scheduler of torch."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def state_of(scheduler: Stateful) -> dict[str, Any]:
    """Its state without functions, which are part of how it was made and are there when it is made again."""
    state: dict[str, Any] = _without_functions(scheduler.state_dict())
    return state


def load_state(scheduler: Stateful, saved: dict[str, Any]) -> None:
    """Put a scheduler that was made in the same way into a saved state."""
    scheduler.load_state_dict(_in_containers_of(scheduler.state_dict(), saved))


def _without_functions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_functions(part) for key, part in value.items() if not inspect.isroutine(part)}
    return [_without_functions(part) for part in value] if isinstance(value, list) else value


def _in_containers_of(present: Any, saved: Any) -> Any:
    """A saved value with a Counter, which is saved as a dictionary, where there is one at present."""
    if isinstance(present, Counter):
        return Counter(saved)
    if isinstance(present, dict) and isinstance(saved, dict):
        return {key: _in_containers_of(present.get(key), part) for key, part in saved.items()}
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_in_containers_of(*pair) for pair in zip(present, saved, strict=True)]
    return saved
