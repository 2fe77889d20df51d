"""Tests, on a small parameter, whether updates of an inner optimizer have the form that a rule assumes."""

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import copy_for_run
from variable_batch_size.optim.proxy import name_of, optimizers_of, parameters_of
from variable_batch_size.optim.wrappers import is_zero
from variable_batch_size.rules.per_optimizer import PerOptimizerRule
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.rules.rule import Rule

RuleLike = Rule | str

_BETAS, _TOLERANCE = (0.5, 0.75), 1e-3

_Question = Callable[[Optimizer, Mapping[str, Any]], bool | None]


class _Trial:
    """A new optimizer of the same class and settings, for one small parameter with a constant gradient, on the host."""

    def __init__(self, inner: Optimizer, group: Mapping[str, Any], **other: Any) -> None:
        shape = (2,) * group["params"][0].dim()
        self._p = torch.nn.Parameter(torch.full(shape, 3.0, dtype=torch.float64, device="cpu"))
        self._gradient = 1 + torch.arange(self._p.numel(), dtype=torch.float64, device="cpu").view(shape)
        settings = {name: _plain(value) for name, value in group.items() if name != "params"}
        # so that only the form of an update matters
        simple: dict[str, Any] = dict.fromkeys(("capturable", "differentiable", "foreach", "fused"), False)
        simple["lr"] = settings.get("lr") or 1e-3  # 0 at the beginning of a warm-up
        if isinstance(settings.get("eps"), float):
            simple["eps"] = 1e-16
        if _has_two_betas(settings):
            simple["betas"] = _BETAS
        settings |= {name: value for name, value in (simple | other).items() if name in settings}
        arguments = inspect.signature(type(inner)).parameters
        given = {name: settings.get(name, _plain(value)) for name, value in inner.defaults.items() if name in arguments}
        self._optimizer = type(inner)([self._p], **given)
        for name, value in vars(inner).items():
            if isinstance(value, bool | int | float | str):
                setattr(self._optimizer, name, value)
        (self.group,) = self._optimizer.param_groups
        self.group.update(settings)
        if callable(getattr(self._optimizer, "train", None)):  # schedule-free optimizers
            self._optimizer.train()  # type: ignore[attr-defined]

    @property
    def state(self) -> dict[str, Any]:
        return self._optimizer.state[self._p]  # type: ignore[no-any-return]

    def updates(self, number: int, *, factor: float = 1.0) -> torch.Tensor:
        """The change made by the last of `number` updates, with the gradient times a factor."""
        step: Any = type(self._optimizer).step
        before = self._p.detach()
        for _ in range(number):
            before = self._p.detach().clone()
            self._p.grad = factor * self._gradient
            # without the hooks that torch calls for all optimizers
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(self._optimizer)
        return before - self._p.detach()


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else copy.deepcopy(value)


def _has_two_betas(settings: Mapping[str, Any]) -> bool:
    betas = settings.get("betas")
    return isinstance(betas, tuple | list) and len(betas) == 2


def _tried(question: _Question) -> _Question:
    """The answer is None if the optimizer cannot be made, makes no update from a gradient alone, or a random one."""

    @functools.wraps(question)
    def answer(inner: Optimizer, group: Mapping[str, Any]) -> bool | None:
        before = torch.get_rng_state()
        try:
            some, others = (_Trial(inner, group).updates(1) for _ in range(2))
            return question(inner, group) if some.any() and torch.equal(some, others) else None
        except Exception:
            return None
        finally:
            # another thread may have drawn in the meantime
            if threading.current_thread() is threading.main_thread() and not torch.equal(before, torch.get_rng_state()):
                torch.set_rng_state(before)

    return answer


@_tried
def grows_with_gradient(inner: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether twice the gradient and weight decay make twice the update."""
    trial = _Trial(inner, group, weight_decay=2 * group.get("weight_decay", 0.0))
    return _is_close(trial.updates(1, factor=2.0), 2 * _Trial(inner, group).updates(1))


@_tried
def has_second_moment(inner: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the state has ``exp_avg_sq`` after an update."""
    trial = _Trial(inner, group)
    trial.updates(1)
    return "exp_avg_sq" in trial.state


@_tried
def follows_lr(inner: Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Whether an update grows in proportion with its own learning rate."""

    def last_update(factor: float) -> torch.Tensor:
        trial = _Trial(inner, group)
        trial.updates(3)  # the first may set what the later ones use
        trial.group["lr"] *= factor
        return trial.updates(1)

    once, more, twice = (last_update(factor) for factor in (1.0, 1.5, 2.0))
    if not once.any():
        return None
    # momentum of an earlier learning rate may be part of the update
    has_effect = bool((twice - once).norm() > 0.01 * once.norm())
    return has_effect and _is_close(2 * (more - once), twice - once)


@_tried
def corrects_bias_as_adam(inner: Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Whether an update depends on the number of updates as Adam's does."""
    if not _has_two_betas(group):
        return False
    trial, later = (_Trial(inner, group, weight_decay=0.0) for _ in range(2))
    for one in (trial, later):
        one.updates(2)
    if "step" not in later.state:
        return False
    later.state["step"] = later.state["step"] + 5
    first, second = ((1 - beta**3) / (1 - beta**8) for beta in _BETAS)
    return _is_close(later.updates(1), trial.updates(1) * first / second**0.5)


def _is_close(some: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((some - others).norm() <= _TOLERANCE * others.norm())


def checked_rule(rule: RuleLike | Sequence[RuleLike], inner: Optimizer, model: torch.nn.Module | None) -> Rule:
    """A copy of the rule, or one rule that combines copies of several; raises if a rule does not fit.

    A copy refers to the same model, parameters and inner optimizers, if the rule does.
    """
    optimizers = optimizers_of(inner)
    rule = make_rule(rule) if isinstance(rule, str) else rule
    rules: list[Any] = list(rule) if isinstance(rule, list | tuple) else [rule] * len(optimizers)
    rules = [make_rule(one) if isinstance(one, str) else one for one in rules]
    for one in rules:
        if not isinstance(one, Rule):
            hint = ": pass an object, not the class" if isinstance(one, type) and issubclass(one, Rule) else ""
            raise ValueError(f"`rule` must be a Rule or a name such as 'linear', got {one!r}{hint}")
    for one, optimizer in zip(rules, optimizers, strict=False):
        one.check(name_of(optimizer), optimizer.param_groups)
        check_inner(one, optimizer)
    shared = [inner, *optimizers, *parameters_of(inner), *([] if model is None else [model])]
    if isinstance(rule, Rule):
        return copy_for_run(rule, *shared)
    rules = [copy_for_run(one, *shared) for one in rules]
    return PerOptimizerRule(rules, num_groups=[len(optimizer.param_groups) for optimizer in optimizers])


def check_inner(rule: Rule, inner: Optimizer) -> None:
    """Raise if updates of an inner optimizer do not have the form that a rule assumes."""
    if not rule.checks_inner:
        return
    inner = inner.optim if is_zero(inner) else inner  # type: ignore[attr-defined]
    name, advice = name_of(inner), "or set `checks_inner = False` on the rule if that is intended"
    for group in _distinct(inner):
        if rule.corrects_bias and corrects_bias_as_adam(inner, group) is False:
            found = f"got {name}, whose updates do not depend on the `step` of its state as theirs do"
            raise ValueError(f"`inner` must use the bias correction of Adam and AdamW, {found}: use RootRule, {advice}")
        if rule.preconditions and has_second_moment(inner, group) is False:
            raise ValueError(f"`inner` must keep second moments in its state as `exp_avg_sq`, as Adam does, got {name}")
        if rule.sums_gradients and grows_with_gradient(inner, group) is False:
            reason = f"got {name}: the rule sums gradients, but updates of {name} do not grow with them"
            other = "Use LinearRule, RootRule or AdamRule"
            raise ValueError(f"`inner` must be an SGD-style optimizer, {reason}. {other}, {advice}")
        if rule.scales_lr and follows_lr(inner, group) is False:
            how = f"in proportion to the learning rate of their step, which {type(rule).__name__} scales"
            found = f"but those of {name} are not"
            raise ValueError(f"`inner` must make updates {how}, {found}: use ConstantRule, {advice}")


def _distinct(inner: Optimizer) -> list[Mapping[str, Any]]:
    """A parameter group of each kind; their learning rates make no difference."""
    kinds: dict[str, Mapping[str, Any]] = {}
    for group in inner.param_groups:
        if group["params"]:
            settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            settings["weight_decay"] = bool(settings.get("weight_decay"))
            kinds.setdefault(f"{group['params'][0].dim()} {settings}", group)
    return list(kinds.values())
