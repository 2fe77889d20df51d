"""NormLayers: per-sample gradients of normalization layers, which fall out of the backward pass.

A normalization layer computes y = x̂·w + b, so the gradients of one sample are the sums over its positions of dy·x̂ and
of dy. They are returned as the gradient of an additional input for each of w and b, its collector, where autograd adds
those of all uses of the layer, in compiled models, too. Together with the norm of the mean gradient of w and b they
give the noise of these parameters from one minibatch, which predicts that of all parameters (Gray et al. 2024,
"Normalization layer per-example gradients are sufficient to predict gradient noise scale in transformers").
"""

import contextlib
import copy
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from variable_batch_size.cores.dtensor import is_dtensor
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.rules.rule import Rule

MEASURES = "norm layers"  # the value of `measure_noise`
EVERY = 16  # steps from one measurement to the next, as it takes host time (bench/README.md)

_KNOWN = {kind.forward for kind in (nn.LayerNorm, nn.GroupNorm)} | {getattr(nn, "RMSNorm", nn.LayerNorm).forward}
_Form = tuple[str, tuple[int, ...], float]  # the kind of a layer, its shape or number of groups, and epsilon


def make_norm_layers(
    model: nn.Module | None,
    trained: Iterable[nn.Parameter],
    *,
    sampler: MinibatchSource,
    rule: Rule,
    exact: bool,
    is_one_program: bool,
) -> "NormLayers":
    """The NormLayers of an optimizer; raises if one of its options excludes them."""
    if sampler.needs_weights:
        reason = "its minibatches hold different numbers of samples"
        raise ValueError(f"`measure_noise` must not be {MEASURES!r} with a TokenBudget: {reason}")
    if rule.preconditions or exact:
        what = "exact=True" if exact else type(rule).__name__
        raise ValueError(f"`measure_noise` must not be {MEASURES!r} with {what}: use minibatches of half the size")
    every = 1 if is_one_program else EVERY  # there, it would be another graph
    return NormLayers(model, trained, num_samples=sampler.minibatch_size, every=every)


class NormLayers:
    """Measures the samples' gradients of the affine parameters of a model's LayerNorm, RMSNorm and GroupNorm layers.

    RMSNorm is any layer with a weight whose class name ends in "RMSNorm", and T5's LayerNorm; epsilon is ``eps`` or
    ``variance_epsilon``, by default that of the weight's dtype. The first dimension of the layers' input must be the
    samples of the minibatch. A layer may run several times, as may the model, with the same sample at each index.
    """

    def __init__(
        self, model: nn.Module | None, trained: Iterable[nn.Parameter], *, num_samples: int, every: int = 1
    ) -> None:
        if model is None:
            raise ValueError(f"`measure_noise={MEASURES!r}` needs the model: pass `model=`")
        if num_samples < 2:
            raise ValueError(
                f"`minibatch_size` must be at least 2 with `measure_noise={MEASURES!r}`, got {num_samples}"
            )
        own = set(trained)
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
                reason = "its attention has `batch_first=False`, so that positions are the first dimension"
                raise ValueError(f"`measure_noise={MEASURES!r}` cannot identify the samples of this model: {reason}")
        self.parameters: list[nn.Parameter] = []
        self.num_samples = num_samples  # of the next minibatch
        self.every = every  # steps from one measurement to the next
        self.is_on = True  # whether the next minibatch is measured
        self._hooks: list[_Hook] = []
        num_owners = Counter(p for module in model.modules() for p in set(module.parameters(recurse=False)))
        for name, module in model.named_modules():
            found = [p for p in module.parameters(recurse=False) if p in own]
            is_shared = any(num_owners[p] > 1 for p in found)  # then a sample's gradient is the sum over layers
            form = _form_of(module) if found and not is_shared else None
            if form is not None and (type(module).forward in _KNOWN or _has_form(module, form)):
                parts = [part for part in ("weight", "bias") if getattr(module, part, None) in own]
                self._measure(name, module, form, parts)
                self.parameters += found
        if not self.parameters:
            problem = f"`measure_noise={MEASURES!r}` needs LayerNorm, RMSNorm or GroupNorm layers with a trained weight"
            raise ValueError(f"{problem} of their own, and the model has none: use minibatches of half the size")
        self._zero = torch.zeros(1).to(self.parameters[0].device)

    def _measure(self, name: str, module: nn.Module, form: _Form, parts: list[str]) -> None:
        """Measure a layer, with a hook in place of an earlier optimizer's."""
        for key, other in list(module._forward_hooks.items()):
            if isinstance(other, _Hook):
                del module._forward_hooks[key]
        self._hooks.append(_Hook(self, name, module, form, parts))
        module.register_forward_hook(self._hooks[-1], with_kwargs=True)

    def expect(self, upcoming: StepPlan | None) -> None:
        """Before each minibatch; None after the last one of an epoch."""
        self.is_on = upcoming is not None and upcoming.step % self.every == 0
        number = self.num_samples if upcoming is None else upcoming.batch_size // upcoming.num_minibatches
        if number != self.num_samples:
            self.num_samples = number
            for hook in self._hooks:
                hook.make_collectors()

    def take(
        self, plan: StepPlan, *, squared_norm: torch.Tensor | None = None, inverse_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """m·Σ‖g_s‖² over the m samples of the latest minibatch, on the device; 0 for padding, or if it is not measured.

        The loss is a mean over the samples, so that m·g_s is the gradient of sample s; or a sum, which has a weight.

        Args:
            plan: of the minibatch.
            squared_norm: of the layers' gradients now. If they were clipped or unscaled since the backward pass, the
                samples' gradients are multiplied by the same factor.
            inverse_scale: what the samples' gradients are multiplied by, if `squared_norm` is not known.
        """
        found = self._gradients()
        self.drop()
        if not found or plan.is_padding:
            return torch.zeros_like(self._zero)
        gradients = torch.cat([gradient.to(self._zero.device) for gradient in found], 1)
        of_samples = gradients.square().sum().view(1) * len(gradients)
        if squared_norm is not None:
            of_sum = gradients.sum(0).square().sum()
            return of_samples * torch.where(of_sum > 0, squared_norm.to(of_sum) / of_sum, 1.0)
        return of_samples if inverse_scale is None else of_samples * inverse_scale.to(of_samples.device).square()

    def drop(self) -> None:
        """Drop the samples' gradients of the latest minibatch."""
        for collector in self._collectors():
            collector.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        return [collector.grad for collector in self._collectors() if collector.grad is not None]

    def _collectors(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(hook.collectors.values() for hook in self._hooks)

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a layer has no hook, until a copy of its optimizer adds one
        return self.__dict__ | {"_hooks": [hook.layer for hook in self._hooks if hook.layer[1] is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        layers, self._hooks = self._hooks, []
        for layer in layers:
            self._measure(*layer)  # type: ignore[misc]


class _Hook:
    """Returns the samples' gradients of one layer as the gradients of its collectors."""

    def __init__(self, owner: NormLayers, name: str, module: nn.Module, form: _Form, parts: list[str]) -> None:
        self._owner, self._name, self._form = owner, name, form
        self._module = weakref.ref(module)  # which has the hook
        self._parameters: dict[str, nn.Parameter] = {part: getattr(module, part) for part in parts}
        self.collectors: dict[str, torch.Tensor] = {}
        self.make_collectors()

    @property
    def layer(self) -> tuple[str, nn.Module | None, _Form, list[str]]:
        """What the hook is made of."""
        return self._name, self._module(), self._form, list(self._parameters)

    def make_collectors(self) -> None:
        """One for each parameter, with a row for each sample."""
        for part, p in self._parameters.items():
            collector: Any = torch.zeros(self._owner.num_samples, p.numel()).to(p.device).requires_grad_()
            collector.register_hook(partial(self._check_first, part))
            self.collectors[part] = collector

    def _check_first(self, part: str, _: torch.Tensor) -> None:
        """In each backward pass: what an earlier one has left may be that of gradients that were dropped since."""
        if self.collectors[part].grad is not None:
            raise RuntimeError(
                f"`measure_noise={MEASURES!r}` needs one backward pass through each layer in a minibatch: add the "
                "losses and call backward() on the sum, or use minibatches of half the size"
            )

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        owner = self._owner
        if not owner.is_on or not torch.is_grad_enabled() or not output.requires_grad:
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        samples = owner.num_samples
        if is_dtensor(x) or x.shape[0] != samples:
            raise ValueError(
                f"`measure_noise={MEASURES!r}` needs the {samples} samples of a minibatch as the first dimension, but "
                f"the input of {self._name!r} has the shape {tuple(x.shape)}: use minibatches of half the size"
            )
        kind, shape, _ = self._form
        if kind != "groups" and x.dim() == 3 and len(shape) == 1 and x.shape[1] == samples:
            raise ValueError(
                f"`measure_noise={MEASURES!r}` cannot tell {samples} samples from {samples} positions: the input of "
                f"{self._name!r} has the shape {tuple(x.shape)}: use another `minibatch_size`"
            )
        collectors = [
            self.collectors[part] if part in self.collectors and getattr(module, part).requires_grad else None
            for part in ("weight", "bias")
        ]
        if all(collector is None for collector in collectors):
            return None
        apply: Any = _Measure.apply
        return apply(output, x.detach(), *collectors, *self._form)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # it takes the same arguments and returns None


class _Measure(torch.autograd.Function):
    """The identity, whose backward pass returns the samples' gradients of weight and bias as those of collectors."""

    @staticmethod
    def forward(
        ctx: Any, y: Any, x: Any, of_weight: Any, of_bias: Any, kind: str, shape: tuple[int, ...], eps: float
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.form, ctx.is_measured = (kind, shape, eps), (of_weight is not None, of_bias is not None)
        # not a view, which no layer after it could modify in place
        if torch.compiler.is_compiling():
            return y.clone()  # the compiler fuses it
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        has_weight, has_bias = ctx.is_measured
        dy_wide = dy.float()
        of_weight = _over_positions(dy_wide * _normalized(x.float(), ctx.form), ctx.form) if has_weight else None
        of_bias = _over_positions(dy_wide, ctx.form) if has_bias else None
        return dy, None, of_weight, of_bias, None, None, None


def _form_of(module: nn.Module) -> _Form | None:
    """How a layer normalizes its input; None for other layers."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    if isinstance(module, nn.GroupNorm):
        return "groups", (module.num_groups,), module.eps
    if isinstance(module, nn.LayerNorm):
        return "mean", tuple(module.normalized_shape), module.eps
    name, eps = type(module).__name__, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if name.endswith("RMSNorm") or (name == "T5LayerNorm" and eps is not None):
        return "root", tuple(weight.shape), torch.finfo(weight.dtype).eps if eps is None else eps
    return None


def _has_form(module: nn.Module, form: _Form) -> bool:
    """Whether the gradient of a layer's weight is the sum over positions of dy·x̂, tried on a copy; a shard has none."""
    if any(map(is_dtensor, module.parameters())):
        return form[0] == "root"
    trial: Any = copy.deepcopy(module).to("cpu", torch.float32)
    kind, shape, _ = form
    size = (2, trial.weight.numel(), 3) if kind == "groups" else (2, 3, *shape)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(size, generator=generator, dtype=torch.float32) for _ in range(2))
    try:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(trial(x), [trial.weight.requires_grad_()], dy)
    except Exception:  # another kind of input
        return False
    expected = _over_positions(dy * _normalized(x, form), form).sum(0)
    return torch.allclose(gradient.flatten(), expected, rtol=1e-3, atol=1e-4)


def _normalized(x: torch.Tensor, form: _Form) -> torch.Tensor:
    """What a layer multiplies by its weight."""
    kind, shape, eps = form
    if kind == "groups":
        return nn.functional.group_norm(x, shape[0], None, None, eps)
    if kind == "mean":
        return nn.functional.layer_norm(x, shape, None, None, eps)
    dims = tuple(range(-len(shape), 0))
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


def _over_positions(product: torch.Tensor, form: _Form) -> torch.Tensor:
    """The sum over the positions of each sample."""
    kind, shape, _ = form
    if kind == "groups":
        return product.flatten(2).sum(2) if product.dim() > 2 else product
    return product.reshape(len(product), -1, math.prod(shape)).sum(1)
