"""The gradients of a step on several cores, compared with numbers computed by hand."""

import itertools
import math

import pytest
import torch
from accumulators import BucketViewAccumulator, ExactBucketAccumulator, ExactTracedAccumulator
from threaded_cores import run_on
from torch import nn

from variable_batch_size.cores.communicator import Communicator, SingleProcess
from variable_batch_size.optim.gradients.accumulator import Measured, StepPlan
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.gradients.traced import TracedAccumulator
from variable_batch_size.rules.rule import Norms

KINDS = [
    BucketAccumulator,
    BucketViewAccumulator,
    TracedAccumulator,
    ExactBucketAccumulator,
    ExactTracedAccumulator,
]
TWO = StepPlan(2)


def optimizer_of(num_groups=1, dtype=torch.float64):
    """An optimizer with two parameters of one element, each in a separate group if there are two groups."""
    parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2)]
    groups = [{"params": parameters}] if num_groups == 1 else [{"params": [p]} for p in parameters]
    return parameters, torch.optim.SGD(groups, lr=1.0)


def make(kind, communicator, *, num_groups=1, dtype=torch.float64, **options):
    parameters, inner = optimizer_of(num_groups, torch.float32 if kind is ExactTracedAccumulator else dtype)
    return parameters, kind(inner, communicator, **options)


def take_all(parameters, gradients, minibatches, *, mean=TWO, weights=None):
    """Accumulates minibatches, each with a gradient for each parameter; None for no gradient."""
    for number, values in enumerate(minibatches):
        for p, value in zip(parameters, values, strict=True):
            if value is None:
                continue
            if p.grad is None:
                p.grad = torch.full_like(p, value)
            else:
                p.grad.add_(value)
        is_last = number + 1 == len(minibatches)
        gradients.accumulate(mean._replace(is_last=is_last), None if weights is None else weights[number])


def measured(*norms, is_finite=True, weight=None, num_weighted=None):
    return Measured(list(norms), is_finite, weight, num_weighted)


def values_of(parameters):
    return [None if p.grad is None else p.grad.item() for p in parameters]


def reduced(minibatches_of_cores, *, kind=BucketAccumulator, idle=(), weights=None, mean=None, **options):
    """On each core, the gradients after the reduction and, if measured, the norms."""
    num_minibatches = sum(len(own) for rank, own in enumerate(minibatches_of_cores) if rank not in idle)
    mean = mean or StepPlan(num_minibatches)

    def run(core):
        parameters, gradients = make(kind, core, **options)
        own = None if weights is None else weights[core.rank]
        take_all(parameters, gradients, minibatches_of_cores[core.rank], mean=mean, weights=own)
        step = gradients.reduce(mean._replace(is_idle=core.rank in idle))
        return values_of(parameters), step.measure() if options.get("measures") else step.weight

    return run_on(len(minibatches_of_cores), run)


@pytest.mark.parametrize("kind", KINDS)
def test_cores_with_uneven_shares_get_the_mean(kind):
    found = reduced([[[1, 2], [3, 4]], [[5, 12]]], kind=kind)
    assert [gradients for gradients, _ in found] == [pytest.approx([3.0, 6.0])] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_sum_get_summed_gradients_and_norms_of_the_mean(kind):
    found = reduced([[[1, 2], [3, 4]], [[2, 6]]], kind=kind, sums_gradients=True, measures=True)
    for gradients, numbers in found:
        assert gradients == pytest.approx([6.0, 12.0])
        # of the mean: (1² + 2² + 3² + 4² + 2² + 6²)/3 and 2² + 4²
        assert numbers.norms == [Norms(pytest.approx(70 / 3), pytest.approx(20.0))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("measures", [False, True])
def test_idle_core_has_no_effect_not_even_nan(kind, measures):
    found = reduced([[[1, 2]], [[math.nan, 7]]], idle=[1], kind=kind, measures=measures, mean=StepPlan(1))
    assert [gradients for gradients, _ in found] == [[1.0, 2.0]] * 2
    if measures:
        assert all(numbers.is_finite and numbers.norms[0].square_of_mean == 5.0 for _, numbers in found)


def test_gradient_of_one_core_is_on_all_and_missing_gradient_is_on_none():
    found = reduced([[[1, None]], [[None, None]], [[None, None]]], idle=[2], mean=StepPlan(1))
    assert [gradients for gradients, _ in found] == [[1.0, None]] * 3


@pytest.mark.parametrize("kind", [BucketAccumulator, ExactBucketAccumulator])
def test_gradient_of_only_an_idle_core_is_on_none(kind):
    found = reduced([[[1, None]], [[None, 3]]], idle=[1], kind=kind)
    assert [gradients for gradients, _ in found] == [[1.0, None]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_squared_norms_of_minibatches_are_averaged_over_cores_for_each_group(kind):
    found = reduced([[[1, 2], [3, 4]], [[5, 12]]], kind=kind, measures=True, num_groups=2)
    # (1 + 9 + 25)/3 and (4 + 16 + 144)/3; of the means 3 and 6
    for gradients, numbers in found:
        assert gradients == pytest.approx([3.0, 6.0])
        expected = [Norms(35 / 3, 9.0), Norms(164 / 3, 36.0)]
        assert numbers.norms == [pytest.approx(pair) for pair in expected]
        assert numbers.is_finite


@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize(
    ("of_second_core", "expected", "norms_by_group"),
    [
        # the first minibatches as they were then: ((1² + 2²) + 3² + 5²)/3 and (4² + 12²)/3; of the means 3 and 6
        ([[5, 12]], [3.0, 6.0], [Norms(13.0, 9.0), Norms(160 / 3, 36.0)]),
        # ((1² + 2²) + 3² + (5² + 12²) + 3²)/4 and (4² + 2²)/4; of the means 3 and 5
        ([[5, 12], [3, 2]], [3.0, 5.0], [Norms(48.0, 9.0), Norms(5.0, 25.0)]),
    ],
)
def test_no_norm_is_lost_if_a_parameter_moves_to_a_new_group_within_a_step(
    weight, of_second_core, expected, norms_by_group
):
    minibatches = [[[1, 2], [3, 4]], of_second_core]
    mean = StepPlan(sum(map(len, minibatches)))

    def run(core):
        parameters, inner = optimizer_of()
        gradients = BucketAccumulator(inner, core, measures=True)
        own = minibatches[core.rank]
        for number, values in enumerate(own):
            if number + 1 == len(own):  # within the step; on a core with one minibatch before it
                inner.add_param_group({"params": [inner.param_groups[0]["params"].pop()]})
            for p, value in zip(parameters, values, strict=True):
                p.grad = torch.full_like(p, value * (weight or 1))
            gradients.accumulate(mean._replace(is_last=number + 1 == len(own)), weight)
        norms = gradients.reduce(mean).measure().norms
        return values_of(parameters), norms

    for values, norms in run_on(2, run):
        assert values == pytest.approx(expected)
        assert norms == [pytest.approx(pair) for pair in norms_by_group]


def test_norms_of_low_precision_gradients_are_reduced_in_float32():
    found = reduced([[[1, 2]], [[3, 4]]], measures=True, dtype=torch.bfloat16)
    for gradients, numbers in found:
        assert gradients == [2.0, 3.0]
        assert numbers.norms == [Norms(pytest.approx(15.0), pytest.approx(13.0))]


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_gradient_on_one_core_is_detected_on_all(kind):
    found = reduced([[[1, 2]], [[math.inf, 2]]], measures=True, kind=kind)
    assert [numbers.is_finite for _, numbers in found] == [False, False]


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_weighted_step_has_the_mean_over_all_weights(kind, as_tensors):
    weights = [[2.0, 6.0], [8.0]]
    if as_tensors:
        weights = [[torch.tensor(weight) for weight in own] for own in weights]
    found = reduced([[[1, 2], [3, 4]], [[4, 26]]], kind=kind, weights=weights, measures=True, num_groups=2)
    for gradients, numbers in found:
        assert gradients == [0.5, 2.0]
        # Σ ‖s‖²/w / W: (1/2 + 9/6 + 16/8)/16 and (4/2 + 16/6 + 676/8)/16
        expected = [Norms(4 / 16, 0.25), Norms((2 + 16 / 6 + 84.5) / 16, 4.0)]
        assert numbers.norms == [pytest.approx(pair) for pair in expected]
        assert (numbers.weight, numbers.num_weighted) == (16.0, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("weight", [3.0, 1.0, 0.5])
def test_zero_weight_has_no_effect(kind, as_tensors, weight):
    weights = [[weight, 0.0], [5.0]]
    if as_tensors:
        weights = [[torch.tensor(weight) for weight in own] for own in weights]
    found = reduced([[[6, 2], [0, 0]], [[9, 9]]], kind=kind, weights=weights, idle=[1], measures=True)
    for gradients, numbers in found:
        assert gradients == pytest.approx([6 / weight, 2 / weight])
        assert numbers == measured(
            Norms(pytest.approx(40 / weight / weight), pytest.approx(40 / weight**2)), weight=weight, num_weighted=1
        )


@pytest.mark.parametrize("kind", KINDS)
def test_zero_weight_step_is_detected_without_synchronization_and_is_finite(kind):
    for num_minibatches, nothing in itertools.product((1, 2), (0, torch.tensor(0))):
        parameters, gradients = make(kind, SingleProcess())
        take_all(parameters, gradients, [[7, 0], [0, 0]][:num_minibatches], weights=[nothing] * num_minibatches)
        step = gradients.reduce(StepPlan(2))
        assert step.weighs_nothing
        assert values_of(parameters) == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_weights_has_none(kind):
    parameters, gradients = make(kind, SingleProcess())
    take_all(parameters, gradients, [[1, 2]])
    assert gradients.reduce(StepPlan(1)).weight is None


@pytest.mark.parametrize("kind", KINDS)
def test_single_core_divides_by_its_own_weight(kind):
    for num_minibatches, one in itertools.product((1, 2), (2.0, torch.tensor(2.0))):
        parameters, gradients = make(kind, SingleProcess())
        take_all(parameters, gradients, [[1, 2], [3, 6]][:num_minibatches], weights=[one] * num_minibatches)
        gradients.reduce(TWO)
        assert values_of(parameters) == ([0.5, 1.0] if num_minibatches == 1 else [1.0, 2.0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_single_core_computes_the_mean_of_its_minibatches(kind, num_minibatches):
    parameters, gradients = make(kind, SingleProcess(), measures=True)
    mean = StepPlan(2)
    for _ in range(2):  # the second step starts from zero
        with torch.no_grad():
            take_all(parameters, gradients, [[1, 2], [3, 4]][:num_minibatches], mean=mean)
            step = gradients.reduce(mean)
        expected = [1, 2] if num_minibatches == 1 else [4, 6]
        assert values_of(parameters) == [value / 2 for value in expected]
        squares = 5 if num_minibatches == 1 else 30
        of_mean = sum((value / 2) ** 2 for value in expected)
        found = [Norms(pytest.approx(squares / 2), pytest.approx(of_mean))]
        assert step.measure() == measured(*found)
        assert step.norm().item() == pytest.approx(math.sqrt(of_mean))
        gradients.reset()


def test_single_minibatch_on_one_core_is_used_without_a_copy():
    parameters, gradients = make(BucketAccumulator, SingleProcess())
    own = parameters[0].grad = torch.ones(1, dtype=torch.float64)
    gradients.accumulate(StepPlan(2))
    gradients.reduce(StepPlan(1))
    assert parameters[0].grad is own
    assert parameters[1].grad is None


def test_only_minibatch_of_a_step_is_not_measured_separately():
    parameters, gradients = make(BucketAccumulator, SingleProcess(), measures=True)
    for p in parameters:
        p.grad = torch.full_like(p, 3.0)
    gradients.accumulate(StepPlan(1))
    step = gradients.reduce(StepPlan(1))
    assert step.measure() == measured(Norms(18.0, 18.0))


def test_unmeasured_norms_are_zero():
    parameters, gradients = make(BucketAccumulator, SingleProcess(), num_groups=2)
    take_all(parameters, gradients, [[3, 4]])
    step = gradients.reduce(TWO)
    assert step.measure() == measured(Norms(0.0, 9 / 4), Norms(0.0, 16 / 4))


def test_gradients_are_preconditioned_before_measuring_and_others_are_left_out():
    divisors = {}
    parameters, gradients = make(BucketAccumulator, SingleProcess(), num_groups=2, measures=True, divisors=divisors)
    take_all(parameters, gradients, [[3, 4]])
    step = gradients.reduce(StepPlan(1))
    assert step.measure() == measured(None, None)
    gradients.reset()
    divisors[parameters[1]] = torch.full((1,), 2.0, dtype=torch.float64)
    take_all(parameters, gradients, [[3, 4]])
    step = gradients.reduce(StepPlan(1))
    assert step.measure() == measured(None, Norms(4.0, 4.0))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_without_its_former_divisor_is_left_out(kind):
    divisors = {}
    parameters, gradients = make(kind, SingleProcess(), measures=True, divisors=divisors)
    for expected in (Norms(9.0, 9.0), None):
        divisors.clear()
        if expected:
            divisors[parameters[0]] = torch.ones(1)
        take_all(parameters, gradients, [[3, 4]], mean=StepPlan(1))
        step = gradients.reduce(StepPlan(1))
        assert step.measure() == measured(expected)
        gradients.reset()


def test_gradient_without_a_divisor_is_checked_in_its_own_precision():
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    divisors = {parameters[0]: torch.ones(1)}
    gradients = BucketAccumulator(torch.optim.SGD(parameters), SingleProcess(), measures=True, divisors=divisors)
    take_all(parameters, gradients, [[3, 1e25]])
    step = gradients.reduce(StepPlan(1))
    assert step.measure() == measured(Norms(9.0, 9.0))  # the maximum of float32 is 3e38


@pytest.mark.parametrize("kind", KINDS)
def test_norm_is_that_of_the_mean_if_gradients_are_summed(kind):
    parameters, gradients = make(kind, SingleProcess(), sums_gradients=True)
    take_all(parameters, gradients, [[1, 2], [5, 6]])
    step = gradients.reduce(StepPlan(2))
    assert values_of(parameters) == [6.0, 8.0]
    assert step.norm().item() == pytest.approx(5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_without_a_divisor_must_be_finite(kind):
    parameters, gradients = make(kind, SingleProcess(), measures=True, divisors={})
    take_all(parameters, gradients, [[3, math.nan]])
    step = gradients.reduce(StepPlan(1))
    assert step.measure() == measured(None, is_finite=False)


def test_a_group_may_be_added_between_two_minibatches():
    parameters, inner = optimizer_of()
    gradients = BucketAccumulator(inner, SingleProcess(), measures=True)
    with torch.no_grad():
        parameters[0].grad = torch.full((1,), 3.0, dtype=torch.float64)
        gradients.accumulate(StepPlan(2, is_last=False))
        late = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        inner.add_param_group({"params": [late]})
        late.grad = torch.full((4,), 2.0, dtype=torch.float64)
        parameters[0].grad = torch.full((1,), 1.0, dtype=torch.float64)
        gradients.accumulate(StepPlan(2))
        step = gradients.reduce(StepPlan(2))
    assert step.measure() == measured(Norms(5.0, 4.0), Norms(8.0, 4.0))
    assert late.grad.tolist() == [1.0] * 4
    assert parameters[1].grad is None


def test_gradients_before_an_added_group_are_kept():
    parameters, inner = optimizer_of()
    gradients = BucketAccumulator(inner, SingleProcess())
    parameters[0].grad = torch.full((1,), 3.0, dtype=torch.float64)
    gradients.accumulate(StepPlan(2, is_last=False))
    late = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    inner.add_param_group({"params": [late]})
    late.grad = torch.full((1,), 2.0, dtype=torch.float64)
    gradients.accumulate(StepPlan(2))
    gradients.reduce(StepPlan(1))
    assert values_of([*parameters, late]) == [3.0, None, 2.0]


def test_a_parameter_may_have_another_shape_in_the_next_step():
    parameters, gradients = make(BucketAccumulator, SingleProcess())
    for size in (1, 3):
        parameters[0].data = torch.zeros(size, dtype=torch.float64)
        take_all(parameters, gradients, [[1, 2], [3, 4]])
        gradients.reduce(TWO)
        assert parameters[0].grad.tolist() == [2.0] * size
        gradients.reset()


class Alike(Communicator):
    """One of many identical cores that count the elements they send."""

    rank = 0

    def __init__(self, num_replicas):
        self.num_replicas = num_replicas
        self.num_sent = 0

    def sum(self, tensors):
        self.num_sent = sum(tensor.numel() for tensor in tensors)
        for tensor in tensors:
            tensor.mul_(self.num_replicas)

    def broadcast(self, tensors):
        raise AssertionError("no broadcast is expected")


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("weight", [None, 5.0])
def test_thousands_of_equal_cores_agree(kind, num_groups, weight):
    cores = Alike(4095)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(num_groups)]
    inner = torch.optim.SGD([{"params": [p]} for p in parameters])
    gradients = kind(inner, cores, measures=True)
    for _ in range(2):
        own = [float(number) for number in range(1, num_groups + 1)]
        take_all(parameters, gradients, [own], mean=StepPlan(4095), weights=weight and [weight])
        step = gradients.reduce(StepPlan(4095))
        unit = weight or 1.0
        assert values_of(parameters) == pytest.approx([value / unit for value in own])
        norms = [Norms(pytest.approx(value**2 / unit**2), pytest.approx(value**2 / unit**2)) for value in own]
        whole = {"weight": 4095 * weight, "num_weighted": 4095} if weight else {}
        assert step.measure() == measured(*norms, **whole)
        gradients.reset()


def test_frozen_parameter_without_a_gradient_is_not_reduced():
    cores = Alike(2)
    parameters, gradients = make(BucketAccumulator, cores)
    sizes = []
    for is_frozen in (False, True):
        parameters[1].requires_grad_(not is_frozen)
        take_all(parameters, gradients, [[1, None if is_frozen else 2]])
        gradients.reduce(TWO)
        gradients.reset()
        sizes.append(cores.num_sent)
    assert sizes[0] - sizes[1] == 8 + 1  # its slot and the flag that it is present


@pytest.mark.parametrize("size", [1e-7, 1e-6, 3.0])
def test_single_minibatch_is_clipped_as_in_torch(size):
    for mean, sums_gradients in ((StepPlan(1), False), (StepPlan(4), True)):
        parameters, gradients = make(BucketAccumulator, SingleProcess(), sums_gradients=sums_gradients)
        take_all(parameters, gradients, [[size, None]], mean=mean)
        step = gradients.reduce(mean)
        step.clip_(1e-6 / 4 if sums_gradients else 1e-6)  # of the mean
        plain = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        plain.grad = torch.full_like(plain, size)
        torch.nn.utils.clip_grad_norm_([plain], 1e-6)
        assert parameters[0].grad.item() == pytest.approx(plain.grad.item(), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"model_parallel": SingleProcess()}])
def test_scalar_low_precision_gradient_is_clipped_with_others(options):
    parameters = [nn.Parameter(torch.zeros((), dtype=torch.bfloat16)), nn.Parameter(torch.zeros(1))]
    gradients = BucketAccumulator(torch.optim.SGD(parameters), SingleProcess(), **options)
    take_all(parameters, gradients, [[3.0, 4.0]])
    step = gradients.reduce(StepPlan(1))
    step.clip_(1.0)
    assert [p.grad.dtype for p in parameters] == [torch.bfloat16, torch.float32]
    assert values_of(parameters) == pytest.approx([0.6, 0.8], rel=4e-3)


def test_clipping_without_gradients_does_nothing():
    parameters, gradients = make(BucketAccumulator, SingleProcess())
    take_all(parameters, gradients, [[None, None]])
    step = gradients.reduce(StepPlan(1))
    step.clip_(1.0)
    assert values_of(parameters) == [None, None]


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator, TracedAccumulator, ExactBucketAccumulator])
@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("weight", [None, 3.0])
def test_step_without_trainable_parameters_has_no_gradient(kind, num_minibatches, cores, weight):
    def run(core):
        parameters, inner = optimizer_of()
        for p in parameters:
            p.requires_grad_(False)
        gradients = kind(inner, core, measures=True)
        mean, weights = StepPlan(2), weight and [weight] * num_minibatches
        take_all(parameters, gradients, [[None, None]] * num_minibatches, mean=mean, weights=weights)
        step = gradients.reduce(mean)
        return values_of(parameters), step.measure()

    count = num_minibatches * cores
    whole = {"weight": count * weight, "num_weighted": count} if weight else {}
    assert run_on(cores, run) == [([None, None], measured(Norms(0.0, 0.0), **whole))] * cores


def test_a_single_minibatch_of_several_dtypes_is_divided_by_its_weight_in_each_of_them():
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    gradients = BucketAccumulator(torch.optim.SGD(parameters), SingleProcess())
    take_all(parameters, gradients, [[1, 1]], weights=[torch.tensor(3.0, dtype=torch.float64)])
    gradients.reduce(StepPlan(1))
    assert [p.grad.dtype for p in parameters] == [torch.float32, torch.float64]
    assert parameters[0].grad.item() == pytest.approx(1 / 3, rel=1e-7)
    assert parameters[1].grad.item() == pytest.approx(1 / 3, rel=1e-15)


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.complex64, torch.complex128)])
def test_float64_next_to_float32_is_divided_by_float64_weights_on_all_cores(kind, dtypes):
    def run(core):
        parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in dtypes]
        gradients = kind(torch.optim.SGD(parameters), core)
        take_all(parameters, gradients, [[1, 1]], weights=[1.5])
        gradients.reduce(TWO)
        return parameters[1].grad.item().real

    assert run_on(2, run) == [pytest.approx(2 / 3, rel=1e-15)] * 2


def test_frozen_parameter_with_a_gradient_counts():
    parameters, gradients = make(BucketAccumulator, SingleProcess())
    parameters[1].requires_grad_(False)
    take_all(parameters, gradients, [[1, 2], [3, None]])
    gradients.reduce(StepPlan(1))
    assert values_of(parameters) == [4.0, 2.0]
    gradients.reset()
    take_all(parameters, gradients, [[1, None], [3, None]])
    gradients.reduce(StepPlan(1))
    assert values_of(parameters) == [4.0, None]


def test_parameter_frozen_within_a_step_keeps_its_gradient():
    parameters, gradients = make(BucketAccumulator, SingleProcess())
    with torch.no_grad():
        take_all(parameters, gradients, [[1, 2]])  # the only one so far: used without a copy
        gradients.reduce(StepPlan(1))
        gradients.reset()
        for p, value in zip(parameters, (1.0, 2.0), strict=True):
            p.grad = torch.full_like(p, value)
        gradients.accumulate(StepPlan(2, is_last=False))
        parameters[1].requires_grad_(False)
        parameters[0].grad = torch.full_like(parameters[0], 3.0)
        gradients.accumulate(StepPlan(2))
        gradients.reduce(StepPlan(1))
    assert values_of(parameters) == [4.0, 2.0]


@pytest.mark.parametrize("kind", [BucketAccumulator, ExactBucketAccumulator])
@pytest.mark.parametrize("before", [1.0, None])
def test_parameter_frozen_within_a_step_keeps_its_position_on_all_cores(kind, before):
    def run(core):
        parameters, gradients = make(kind, core)
        take_all(parameters, gradients, [[before, 2.0]], mean=StepPlan(3))
        if core.rank == 0:
            parameters[0].requires_grad_(False)
            take_all(parameters, gradients, [[None, 5.0]], mean=StepPlan(3))
        gradients.reduce(StepPlan(3))
        return values_of(parameters)

    expected = [None if before is None else pytest.approx(2 / 3), pytest.approx(3.0)]
    assert run_on(2, run) == [expected] * 2


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator, ExactBucketAccumulator])
def test_cores_that_freeze_different_parameters_later_raise(kind):
    def run(core):
        parameters, gradients = make(kind, core)
        take_all(parameters, gradients, [[1.0, 2.0]])
        gradients.reduce(TWO)
        gradients.reset()
        parameters[core.rank].requires_grad_(False)
        if kind is not BucketViewAccumulator:
            parameters[1 - core.rank].grad = torch.ones_like(parameters[0])
        gradients.accumulate(TWO)
        message = (
            r"^Ranks disagree on which parameters require gradients\. If you freeze parameters at random, use the same "
            r"seed on every rank\.$"
        )
        with pytest.raises(RuntimeError, match=message):
            gradients.reduce(TWO)

    run_on(2, run)


@pytest.mark.parametrize("kind", [BucketAccumulator, ExactBucketAccumulator])
@pytest.mark.parametrize("weight", [None, 2.0])
def test_a_core_that_freezes_a_parameter_in_the_first_step_is_not_taken_for_one_without_weights(kind, weight):
    def run(core):
        parameters, gradients = make(kind, core)
        parameters[0].requires_grad_(core.rank == 1)
        for p in parameters:
            p.grad = torch.ones_like(p) if p.requires_grad else None
        gradients.accumulate(TWO, weight)
        with pytest.raises(RuntimeError, match=r"^Ranks disagree on which parameters require gradients"):
            gradients.reduce(TWO)

    run_on(2, run)


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator, ExactBucketAccumulator])
def test_core_in_another_epoch_raises(kind):
    def run(core):
        parameters, gradients = make(kind, core)
        for epoch in (4, 5):
            gradients.begin_epoch(epoch)
            take_all(parameters, gradients, [[1.0, 2.0]])
            gradients.reduce(TWO)
            gradients.reset()
        if core.rank == 0:
            gradients.begin_epoch(6)
        take_all(parameters, gradients, [[1.0, 2.0]])
        message = rf"^Ranks are in different epochs; this one is in epoch {6 - core.rank}\. Call step\(\) after every"
        with pytest.raises(RuntimeError, match=message):
            gradients.reduce(TWO)

    run_on(2, run)


@pytest.mark.parametrize("kind", KINDS)
def test_incomplete_step_is_dropped(kind):
    parameters, gradients = make(kind, SingleProcess(), measures=True)
    with torch.no_grad():
        parameters[0].grad = (
            parameters[0].grad.add_(5) if kind is BucketViewAccumulator else torch.full_like(parameters[0], 5.0)
        )
        gradients.accumulate(StepPlan(2, is_last=False))
        gradients.begin_epoch(0)
        take_all(parameters, gradients, [[1, 2]])
        step = gradients.reduce(StepPlan(1))
    assert values_of(parameters) == [1.0, 2.0]
    assert step.measure() == measured(Norms(5.0, 5.0))


# ----------------------------------------------------------------------------------------------------------------- kept


def test_bucket_views_stay_views_of_one_tensor():
    parameters, gradients = make(BucketViewAccumulator, SingleProcess(), measures=True)
    views = [p.grad for p in parameters]
    for _ in range(2):
        take_all(parameters, gradients, [[1, 2], [3, 4]])
        gradients.reduce(StepPlan(2))
        assert values_of(parameters) == [2.0, 3.0]
        gradients.reset()
        assert values_of(parameters) == [0.0, 0.0]
    assert all(p.grad is view for p, view in zip(parameters, views, strict=True))


def test_bucket_views_have_space_for_a_later_parameter():
    parameters, inner = optimizer_of()
    gradients = BucketViewAccumulator(inner, SingleProcess(), measures=True)
    late = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    inner.add_param_group({"params": [late]})
    with torch.no_grad():
        parameters[0].grad.add_(3.0)
        late.grad = torch.full((4,), 2.0, dtype=torch.float64)
        gradients.accumulate(StepPlan(2))
        step = gradients.reduce(StepPlan(1))
    assert [p.grad.tolist() for p in (*parameters, late)] == [[3.0], [0.0], [2.0] * 4]
    assert step.measure() == measured(Norms(9.0, 9.0), Norms(16.0, 16.0))


def test_other_parameters_within_a_step_raise_with_bucket_views():
    parameters, gradients = make(BucketViewAccumulator, SingleProcess(), measures=True)
    parameters[0].grad.add_(3.0)
    gradients.accumulate(StepPlan(2, is_last=False))
    parameters[1].requires_grad_(False)
    message = r"^With `gradient_as_bucket_view`, parameters must not be frozen, added, converted or moved within a"
    with pytest.raises(RuntimeError, match=message):
        gradients.accumulate(StepPlan(2))


def test_error_names_the_replaced_bucket_view():
    parameters, gradients = make(BucketViewAccumulator, SingleProcess())
    parameters[1].grad = torch.ones(1, dtype=torch.float64)
    message = (
        r"^With `gradient_as_bucket_view`, p\.grad must not be replaced, but the gradient of parameter 1 \(shape "
        r"\(1,\)\) was replaced between backward\(\) and step\(\)\. Modify it in place\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        gradients.accumulate(StepPlan(2))


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator, ExactBucketAccumulator])
@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("options", [{}, {"measures": True}])
@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.float16, [4e4, 4e4, -2e4, 2e4]), (torch.bfloat16, [256, 1, 1, 2])]
)
def test_low_precision_gradients_are_summed_in_float32_on_any_number_of_cores(kind, weight, options, dtype, values):
    expected = torch.tensor(values, dtype=torch.float64).mean() / (weight or 1)
    for cores in (1, 2, 4):

        def work(communicator):
            parameters, gradients = make(kind, communicator, dtype=dtype, **options)
            share = values[communicator.rank :: communicator.num_replicas]
            before = [p.grad for p in parameters]
            weights = None if weight is None else [torch.tensor(weight)] * len(share)
            take_all(parameters, gradients, [[value, value] for value in share], mean=StepPlan(4), weights=weights)
            gradients.reduce(StepPlan(4)).clip_(1e6)
            assert all(p.grad is view for p, view in zip(parameters, before, strict=True) if view is not None)
            return [p.grad for p in parameters]

        for found in run_on(cores, work):
            assert [(gradient.dtype, gradient.item()) for gradient in found] == [(dtype, expected.to(dtype).item())] * 2


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator])
def test_norm_of_float16_gradients_that_exceeds_float16_is_clipped(kind, cores):
    def work(communicator):
        parameters, gradients = make(kind, communicator, dtype=torch.float16)
        take_all(parameters, gradients, [[6e4, 6e4]] * (2 // cores))
        gradients.reduce(TWO).clip_(1.0)
        return values_of(parameters)

    for found in run_on(cores, work):
        assert found == pytest.approx([0.5**0.5] * 2, rel=1e-3)


def test_one_float16_minibatch_is_divided_by_a_large_weight_on_the_device():
    parameters, gradients = make(BucketAccumulator, SingleProcess(), dtype=torch.float16)
    take_all(parameters, gradients, [[6e4, 6e4]], mean=StepPlan(1), weights=[torch.tensor(3e6)])
    gradients.reduce(StepPlan(1))
    assert values_of(parameters) == pytest.approx([0.02] * 2, rel=1e-3)
