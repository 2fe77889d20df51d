"""OwnNorms: gradient noise in the norm that fits a step: ℓ1 for steps by sign, the nuclear norm for those of Muon.

A step d(g) by sign is the direction that follows g most among those whose largest element is 1, so that ⟨d(g), g⟩ = ‖g‖
is the ℓ1 norm of g. With the largest singular value in place of the largest element, d(g) = U·Vᵀ for g = U·S·Vᵀ, and
‖g‖ is the nuclear norm. Let a sample's gradient have mean μ and, in each element, standard deviation σ. The noise scale
in such a norm,

    φ = ‖σ‖² / ‖μ‖²,

is the batch size at which the noise of a mean gradient is as large as its signal (Naganuma et al. 2026, "Adaptive batch
sizes using non-Euclidean gradient noise scales"). For matrices ‖σ‖ is Σ_r √(Σ_c σ²_rc) over rows r or over columns, the
smaller one: no less than the mean nuclear norm of a sample's noise, however its elements are correlated. The square of
a step's progress by sign, ⟨d(ḡ), μ⟩², is in proportion to 1/(1 + c·φ/B), with c = π/2 if μ/σ is the same in all
elements, and 2/π if it is normally distributed over them: the form of AdaScale's gain, whose noise scale is that of
‖·‖₂.

V = ‖σ‖² and G² = ‖μ‖² are estimated from n minibatches. The root of an unbiased variance is too low by the factor c₄(n)
for normal noise, and is divided by it. No estimate of ‖μ‖ is without bias: ‖ḡ‖ is too large where there is noise, and
far too large at B < φ. But one minibatch's step has no noise in common with the gradient of another. With L the mean of
‖g_i‖ and h the mean of ⟨d(g_i), g_k⟩ over all pairs i ≠ k, which estimates the progress of a step of one minibatch
without bias, G² = h·L. It is 0 on average where there is no signal, ‖μ‖² where there is little noise, and exact in
between if μ/σ is normally distributed. From N samples without replacement, the mean of the others is
(N·μ − b·g_i)/(N − b), so that h = ((N − b)·h' + b·L)/N.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.dtensor import is_dtensor
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.proxy import optimizers_of, parameters_of
from variable_batch_size.optim.token_weights import Weight
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.rule import Norms, Rule

OWN_NORM = "own norm"  # the value of `measure_noise`
EVERY = 16  # steps from one measurement to the next

Kind = Literal["euclidean", "sign", "nuclear"]
# parts of the names of optimizers, in this order, as SignSGD is not like SGD
_KINDS: Mapping[str, Kind] = {
    "muon": "nuclear",
    **dict.fromkeys(("lion", "sign", "adam", "adagrad", "adafactor", "rms", "rprop"), "sign"),
    "sgd": "euclidean",
}
_ROUNDS = 16  # of Newton's iteration: singular values of at least 1e-4 of the norm become 1


def make_own_norms(
    inner: Optimizer, communicator: Communicator, *, rule: Rule, exact: bool, is_view: bool, population: int | None
) -> "OwnNorms":
    """The OwnNorms of an optimizer; raises if one of its options excludes them."""
    refused = {
        "exact=True": exact,
        "gradient_as_bucket_view=True": is_view,
        type(rule).__name__: rule.preconditions,
        "sharded parameters": any(map(is_dtensor, parameters_of(inner))),
        "XLA, where a step that is measured would be another graph": communicator.is_one_program,
        "TorchTPU": not communicator.keeps_flat_gradients,
    }
    for what, is_used in refused.items():
        if is_used:
            raise ValueError(f"`measure_noise` must not be {OWN_NORM!r} with {what}: use True instead")
    return OwnNorms(inner, communicator, population=population)


class OwnNorms:
    """Sums what the estimates need over the minibatches of a step and over ranks.

    For each element of a parameter these are Σ g_i² and Σ d(g_i), which take the memory of two gradients in a step that
    is measured, and another reduction of that size. With weights w_i and gradients s_i of sums, g_i = s_i/w_i:

        σ² = (Σ s_i²/w_i / W − ḡ²)·W/(n − 1),   L = Σ ‖s_i‖ / W,
        h = (⟨Σ w_i·d(s_i), W·ḡ⟩ − Σ w_i·‖s_i‖) / (W² − Σ w_i²)

    The first step of several minibatches is measured, then again after :data:`EVERY` steps.
    """

    def __init__(self, inner: Optimizer, communicator: Communicator, *, population: int | None) -> None:
        self._inner, self._communicator, self._population = inner, communicator, population
        self._due = 0  # the number of the next step to measure
        self._sums: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}  # Σ s_i²/w_i and Σ w_i·d(s_i)
        self._numbers: torch.Tensor | None = None  # of each group Σ ‖s_i‖ and Σ w_i·‖s_i‖; then Σ w_i, Σ w_i², n
        list(self._groups())

    def _groups(self) -> Iterator[tuple[Kind, list[torch.nn.Parameter]]]:
        """The norm and the parameters of each parameter group."""
        for optimizer in optimizers_of(self._inner):
            kind = _kind_of(optimizer)
            for group in optimizer.param_groups:
                is_auxiliary = kind == "nuclear" and not group.get("use_muon", True)
                yield "sign" if is_auxiliary else kind, [p for p in group["params"] if p.requires_grad]

    def add(self, plan: StepPlan, weight: Weight | None) -> None:
        """Add the gradients of a minibatch, which are in ``p.grad``, if the step is measured."""
        if plan.num_minibatches < 2 or 0 < self._due - plan.step < EVERY:
            return
        groups = list(self._groups())
        if self._numbers is None:
            device = groups[0][1][0].device if groups[0][1] else self._inner.param_groups[0]["params"][0].device
            self._numbers = torch.zeros(2 * len(groups) + 3, device=device)
        if plan.is_padding:
            return
        numbers = self._numbers
        w = torch.as_tensor(1.0 if weight is None else weight).to(numbers)
        for index, (kind, parameters) in enumerate(groups):
            for p in parameters:
                if p.grad is not None:
                    size = self._add(p, _dense(p.grad), kind, w).to(numbers)
                    numbers[2 * index : 2 * index + 2] += torch.stack([size, size * w])
        numbers[-3:] += torch.stack([w, w * w, (w > 0).to(w)])

    def _add(self, p: torch.Tensor, gradient: torch.Tensor, kind: Kind, w: torch.Tensor) -> torch.Tensor:
        """Add a gradient; returns its norm, or in the Euclidean case its square per unit of weight."""
        w = w.to(gradient)
        inverse = torch.where(w > 0, 1 / w, 0.0)
        if kind == "euclidean":
            return gradient.square().sum() * inverse
        squares, steps = self._sums_of(p)
        direction = _polar(gradient) if _is_matrix(kind, gradient) else gradient.sign()
        squares += gradient.square() * inverse
        steps += direction * w
        return torch.where(w > 0, (direction * gradient).sum(), 0.0)

    def _sums_of(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if p not in self._sums:
            like = _dense(p.detach())
            self._sums[p] = torch.zeros_like(like), torch.zeros_like(like)
        return self._sums[p]

    def reduce(self, plan: StepPlan, *, multiple: int, is_weighted: bool) -> list[Noise | Norms | None]:
        """The noise of each group, given the step's gradient in ``p.grad``, which is `multiple` times the mean.

        None if nothing was measured. Euclidean groups have norms. Every rank must call it.
        """
        groups, numbers = list(self._groups()), self._numbers
        if numbers is None:
            return [None] * len(groups)
        self._due = plan.step + EVERY
        sums = [tensor for kind, group in groups if kind != "euclidean" for p in group for tensor in self._sums_of(p)]
        self._communicator.sum([*sums, numbers])
        *of_groups, total, squares, number = numbers.tolist()
        found: list[Noise | Norms | None] = []
        for index, (kind, parameters) in enumerate(groups):
            means = {p: _dense(p.grad) / multiple for p in parameters if p.grad is not None}
            sizes = of_groups[2 * index : 2 * index + 2]
            if not means or number < 2 or not all(map(math.isfinite, (*sizes, total))):
                found.append(None)
            elif kind == "euclidean":
                found.append(Norms(sizes[0] / total, float(sum(mean.square().sum() for mean in means.values()))))
            else:
                size = total if is_weighted else plan.batch_size
                found.append(self._noise(kind, means, sizes, (total, squares, number), size, plan))
        return found

    def _noise(
        self,
        kind: Kind,
        means: Mapping[torch.nn.Parameter, torch.Tensor],
        norms: list[float],
        totals: tuple[float, float, float],
        size: float,
        plan: StepPlan,
    ) -> Noise:
        total, squares, number = totals
        deviation = product = 0.0
        for p, mean in means.items():
            of_squares, steps = self._sums[p]
            variance = (of_squares / total - mean.square()).clamp_(min=0.0) * (size / (number - 1))
            if _is_matrix(kind, mean):
                variance = variance.flatten(1)
                deviation += float(min(variance.sum(axis).sqrt().sum() for axis in (0, 1)))
            else:
                deviation += float(variance.sqrt().sum()) / deviation_factor(number)
            product += float((steps * mean).sum())
        progress = (product * total - norms[1]) / (total**2 - squares)
        sizes: Any = {"minibatch_size": plan.batch_size / plan.num_minibatches, "population": self._population}
        return noise_in_norm(deviation, norms[0] / total, progress, **sizes)

    def reset(self) -> None:
        """Drop the sums of a step."""
        self._sums, self._numbers = {}, None

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._due = state["due"]


def _kind_of(optimizer: Optimizer) -> Kind:
    for name in (kind.__name__.lower() for kind in type(optimizer).__mro__):
        for part, kind in _KINDS.items():
            if part in name:
                return kind
    known = "SGD, Adam, Lion, Muon and the like"
    raise ValueError(
        f"`measure_noise={OWN_NORM!r}` must be used with {known}, got {type(optimizer).__name__}: use True instead"
    )


def _is_matrix(kind: Kind, tensor: torch.Tensor) -> bool:
    return kind == "nuclear" and tensor.dim() > 1


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as real numbers of at least 32 bits, each in a place of its own."""
    gradient = gradient.detach()
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _polar(gradient: torch.Tensor) -> torch.Tensor:
    """U·Vᵀ of U·S·Vᵀ, by Newton's iteration; singular values far below the norm remain below 1."""
    matrix = gradient.flatten(1)
    x: torch.Tensor
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(_ROUNDS):
        product = x @ x.T
        x = 1.875 * x + (0.375 * product @ product - 1.25 * product) @ x
    return (x.T if is_tall else x).reshape(gradient.shape)


def deviation_factor(number: float) -> float:
    """c₄(n), the mean of the root of an unbiased variance of n normally distributed values, over their deviation.

    >>> round(deviation_factor(2), 6), round(deviation_factor(4), 6)
    (0.797885, 0.921318)
    """
    return math.sqrt(2 / (number - 1)) * math.exp(math.lgamma(number / 2) - math.lgamma((number - 1) / 2))


def noise_in_norm(
    deviation: float, mean_norm: float, progress: float, *, minibatch_size: float, population: float | None = None
) -> Noise:
    """The noise of a step in some norm.

    Args:
        deviation: ‖σ‖, per sample or unit of weight.
        mean_norm: L, the mean of ‖g_i‖ over the minibatches.
        progress: h', the mean of ⟨d(g_i), g_k⟩ over pairs of different minibatches.
        minibatch_size: b, in samples.
        population: N, samples from which those of the step are drawn without replacement; None for no end.

    >>> noise_in_norm(6.0, 2.0, 0.5, minibatch_size=4)
    Noise(variance=36.0, square_norm=1.0)
    >>> noise_in_norm(6.0, 2.0, 0.5, minibatch_size=4, population=12)
    Noise(variance=36.0, square_norm=2.0)
    """
    if population is not None:
        progress += (mean_norm - progress) * minibatch_size / population
    return Noise(deviation**2, progress * mean_norm)
