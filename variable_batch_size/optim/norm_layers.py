"""NormLayers: per-sample gradients of normalization layers, which fall out of the backward pass.

A normalization layer computes y = x̂·w + b, so the gradients of one sample are the sums over its positions of dy·x̂ and
of dy. Their squared norms, summed over samples and layers, are returned as the gradient of an additional input, the
collector: nothing is stored on the way, so that it works in compiled models, too. Together with the norm of the mean
gradient of w and b they give the noise of these parameters from one minibatch, which predicts that of all parameters
(Gray et al. 2024, "Normalization layer per-example gradients are sufficient to predict gradient noise scale in
transformers").
"""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterable
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
    samples of the minibatch, or samples times positions if there are two dimensions.
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
        self._num_uses: dict[str, int] = {}  # of each layer, in forward passes since the latest minibatch
        num_owners = Counter(p for module in model.modules() for p in set(module.parameters(recurse=False)))
        for name, module in model.named_modules():
            found = [p for p in module.parameters(recurse=False) if p in own]
            is_shared = any(num_owners[p] > 1 for p in found)  # then a sample's gradient is the sum over layers
            form = _form_of(module) if found and not is_shared else None
            if form is not None and (type(module).forward in _KNOWN or _has_form(module, form)):
                _add_hook(module, _Hook(self, name, module, form, own))
                self.parameters += found
        if not self.parameters:
            problem = f"`measure_noise={MEASURES!r}` needs LayerNorm, RMSNorm or GroupNorm layers with a trained weight"
            raise ValueError(f"{problem} of their own, and the model has none: use minibatches of half the size")
        self.collector = torch.zeros(2).to(self.parameters[0].device).requires_grad_()

    def expect(self, upcoming: StepPlan | None) -> None:
        """Before each minibatch; None after the last one of an epoch."""
        self.is_on = upcoming is not None and upcoming.step % self.every == 0
        if upcoming is not None:
            self.num_samples = upcoming.batch_size // upcoming.num_minibatches

    def note_use(self, name: str) -> None:
        """A forward pass of a layer, unless it is repeated within a backward pass."""
        if torch._C._current_graph_task_id() == -1:
            self._num_uses[name] = self._num_uses.get(name, 0) + 1

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
        uses, self._num_uses = self._num_uses, {}
        found, self.collector.grad = self.collector.grad, None
        several = next((name for name, number in uses.items() if number > 1), None)
        if several is not None and found is not None:
            raise RuntimeError(
                f"`measure_noise={MEASURES!r}` needs one forward pass of each layer in a minibatch, but {several!r} "
                f"ran {uses[several]} times: evaluate in torch.no_grad(), or use minibatches of half the size"
            )
        if found is None or plan.is_padding:
            return torch.zeros_like(self.collector)[:1]
        of_samples, of_sum = found[:1], found[1:]
        if squared_norm is not None:
            return of_samples * torch.where(of_sum > 0, squared_norm.to(of_sum) / of_sum, 1.0)
        return of_samples if inverse_scale is None else of_samples * inverse_scale.to(found.device).square()


class _Hook:
    """Adds the samples' squared norms of one layer to the gradient of the collector."""

    def __init__(self, owner: NormLayers, name: str, module: nn.Module, form: _Form, own: set[nn.Parameter]) -> None:
        self._owner, self._name, self._form = owner, name, form
        self._is_trained = [getattr(module, part, None) in own for part in ("weight", "bias")]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        owner = self._owner
        if not owner.is_on or not torch.is_grad_enabled() or not output.requires_grad:
            return None
        if not torch.compiler.is_compiling():
            owner.note_use(self._name)
        x = args[0] if args else next(iter(kwargs.values()))
        samples = owner.num_samples
        if is_dtensor(x) or not (x.shape[0] == samples or (x.dim() == 2 and x.shape[0] % samples == 0)):
            raise ValueError(
                f"`measure_noise={MEASURES!r}` needs the {samples} samples of a minibatch as the first dimension, but "
                f"the input of {self._name!r} has the shape {tuple(x.shape)}: use minibatches of half the size"
            )
        weight: Any = module.weight
        bias: Any = getattr(module, "bias", None)
        has_weight, has_bias = self._is_trained
        trained = has_weight and weight.requires_grad, has_bias and bias.requires_grad
        if not any(trained):
            return None
        apply: Any = _Measure.apply
        return apply(output, x.detach(), owner.collector, samples, *self._form, *trained)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # it takes the same arguments and returns None


class _Measure(torch.autograd.Function):
    """The identity, whose backward pass returns m·Σ‖g_s‖² and ‖Σ g_s‖² as the gradient of the collector."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Any,
        x: Any,
        collector: Any,
        samples: int,
        kind: str,
        shape: tuple[int, ...],
        eps: float,
        has_weight: bool,
        has_bias: bool,
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.samples, ctx.form, ctx.trained = samples, (kind, shape, eps), (has_weight, has_bias)
        # not a view, which no layer after it could modify in place
        if torch.compiler.is_compiling():
            return y.clone()  # the compiler fuses it
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            if hasattr(ctx, "is_done"):
                raise RuntimeError(
                    f"`measure_noise={MEASURES!r}` needs one backward pass through each layer in a minibatch: add the "
                    "losses and call backward() on the sum, or use minibatches of half the size"
                )
            ctx.is_done = True
        has_weight, has_bias = ctx.trained
        dy_wide = dy.float()
        found = [dy_wide * _normalized(x.float(), ctx.form)] if has_weight else []
        found += [dy_wide] if has_bias else []
        # few operations, as the host must stay ahead of the device
        gradients = torch.cat([_over_positions(one, ctx.form, ctx.samples) for one in found], 1)
        flat, total = gradients.flatten(), gradients.sum(0)
        squares = torch.stack([torch.dot(flat, flat) * ctx.samples, torch.dot(total, total)])
        return dy, None, squares, None, None, None, None, None, None


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
    expected = _over_positions(dy * _normalized(x, form), form, 2).sum(0)
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


def _over_positions(product: torch.Tensor, form: _Form, samples: int) -> torch.Tensor:
    """The sum over the positions of each sample."""
    kind, shape, _ = form
    if kind == "groups":
        return product.flatten(2).sum(2) if product.dim() > 2 else product
    return product.reshape(samples, -1, math.prod(shape)).sum(1)


def _add_hook(module: nn.Module, hook: _Hook) -> None:
    """Add a hook in place of an earlier optimizer's."""
    for key, other in list(module._forward_hooks.items()):
        if isinstance(other, _Hook):
            del module._forward_hooks[key]
    module.register_forward_hook(hook, with_kwargs=True)
