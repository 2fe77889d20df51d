"""ModuleHook: a forward pre-hook that has no effect on copies of its module, nor after its owner is gone."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Method = Callable[[torch.nn.Module], None]


class ModuleHook:
    """Calls a method with the module that is about to run. It keeps neither of the two alive.

    A copy made with ``copy.deepcopy`` removes itself. In a pickled module it is a plain Python function, so loading
    does not need this package. With `is_compiled`, ``torch.compile`` leaves the call out; otherwise the call breaks the
    graph.
    """

    def __init__(self, module: torch.nn.Module | None, method: Method | None, *, is_compiled: bool = True) -> None:
        self._module = None if module is None else weakref.ref(module)
        self.method = None if method is None else weakref.WeakMethod(method)
        self._is_compiled = is_compiled
        self._run_eagerly: Method = self._run
        if not is_compiled:
            self._run_eagerly = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not (self._is_compiled and torch.compiler.is_compiling()):
            self._run_eagerly(module)

    def _run(self, module: torch.nn.Module) -> None:
        method = None if self.method is None else self.method()
        if method is None:
            _remove(module, lambda hook: hook is self)
        elif self._module is not None and self._module() is module:  # not of a shallow copy, which shares its hooks
            method(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleHook":
        return ModuleHook(None, None)

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # called with the module and its arguments, it returns the arguments

    @property
    def __name__(self) -> str:  # torch.jit.script reads it first
        advice = "call torch.jit.script before or after it, or model._forward_pre_hooks.clear() after the training"
        raise RuntimeError(f"a model cannot be scripted in the middle of a pass, due to hooks: {advice}")


def add_hook(
    module: torch.nn.Module, method: Method, *, is_compiled: bool = True, replaces: bool = False
) -> RemovableHandle:
    """Call a method of an object before each run of a module; it may replace that of another object of the class."""
    if replaces:
        _remove(module, lambda hook: hook.method is not None and _function(hook.method()) is _function(method))
    return module.register_forward_pre_hook(ModuleHook(module, method, is_compiled=is_compiled))


def add_hook_to_all(method: Method, *, is_compiled: bool = True) -> RemovableHandle:
    """Call a method of an object before each run of any module, without keeping the object alive."""
    # torch warns that the hook of a compiled module is called twice: once for itself, once for the module inside
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
    reference = weakref.WeakMethod(method)

    def run(module: torch.nn.Module) -> None:
        if (alive := reference()) is None:
            handle.remove()
        else:
            alive(module)

    run_eagerly: Method = run if is_compiled else torch.compiler.disable(run)  # type: ignore[no-untyped-call]

    def before_forward(module: torch.nn.Module, args: Any) -> None:
        if not (is_compiled and torch.compiler.is_compiling()):
            run_eagerly(module)

    handle = register_module_forward_pre_hook(before_forward)
    return handle


def _function(method: Any) -> Any:
    return getattr(method, "__func__", None)


def _remove(module: torch.nn.Module, is_removed: Callable[[ModuleHook], bool]) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, ModuleHook) and is_removed(hook):
            del module._forward_pre_hooks[key]
