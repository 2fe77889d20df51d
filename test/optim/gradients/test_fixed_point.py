"""BucketAccumulator in fixed point: sums are independent of the cores, for any sequence of gradients."""

import math
import random

import pytest
import torch
from accumulators import ExactBucketAccumulator
from threaded_cores import run_on
from torch import nn

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.optim.gradients.accumulator import StepPlan
from variable_batch_size.optim.gradients.buckets import BucketAccumulator

CORES = [1, 2, 3, 5]


def run_steps(
    steps,
    *,
    cores,
    kind=ExactBucketAccumulator,
    shapes=((3,),),
    dtype=torch.float32,
    weights=None,
    scale=1.0,
    **options,
):
    """The gradient and the norms of every step, which must be equal on all cores.

    Args:
        steps: the minibatches of each step in order, each with a gradient for each parameter; None for no gradient.
        weights: of the minibatches, in the same order.
        scale: the factor of all gradients.
    """

    def run(core):
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        gradients = kind(torch.optim.SGD(parameters, lr=1.0), core, **options)
        found = []
        for number, minibatches in enumerate(steps):
            mean = StepPlan(len(minibatches))
            own = range(core.rank, len(minibatches), cores)
            is_idle = not own
            for place in own or [0]:  # a padding minibatch
                for p, values in zip(parameters, minibatches[place], strict=True):
                    p.grad = None
                    if values is not None:
                        p.grad = torch.as_tensor(values, dtype=dtype).expand(p.shape) * scale
                weight = None if weights is None else weights[number][place]
                gradients.accumulate(mean._replace(is_last=is_idle or place == own[-1]), weight)
            step = gradients.reduce(mean._replace(is_idle=is_idle))
            of_step = [None if p.grad is None else p.grad.clone() for p in parameters]
            found.append((of_step, step.measure() if options.get("measures") else step.weight))
            gradients.reset()
        return found

    of_cores = run_on(cores, run) if cores > 1 else [run(SingleProcess())]
    for other in of_cores[1:]:
        for (one, _), (another, _) in zip(of_cores[0], other, strict=True):
            assert same(one, another)
    return of_cores[0]


def same(one, other):
    """Whether lists of tensors, or None, have the same bytes."""
    return all(
        a is b or (a is not None and b is not None and a.numpy().tobytes() == b.numpy().tobytes())
        for a, b in zip(one, other, strict=True)
    )


def drawn(rng, *, scale=1.0, size=3):
    return [rng.gauss(0, scale) for _ in range(size)]


def gradients_of(found):
    return [of_step for of_step, _ in found]


def test_three_minibatches_have_the_mean_of_their_gradients():
    steps = [[[[1.0, 2.0, 4.0]], [[3.0, 0.0, -1.0]], [[5.0, 4.0, 3.0]]]]
    for cores in CORES:
        ((gradient,),) = gradients_of(run_steps(steps, cores=cores))
        assert gradient.tolist() == [3.0, 2.0, 2.0]


@pytest.mark.parametrize("cores", CORES)
def test_exact_sum_is_bitwise_equal_where_plain_sums_differ(cores):
    rng = random.Random(0)
    steps = [[[drawn(rng, size=50)] for _ in range(rng.randint(1, 12))] for _ in range(20)]
    how = {"shapes": [(50,)]}
    alone, found = (gradients_of(run_steps(steps, cores=number, **how)) for number in (1, cores))
    assert all(map(same, alone, found))
    plain, others = (
        gradients_of(run_steps(steps, cores=number, kind=BucketAccumulator, **how)) for number in (1, cores)
    )
    assert all(map(same, plain, others)) == (cores == 1)
    for exact, rounded in zip(alone, plain, strict=True):
        torch.testing.assert_close(exact, rounded, rtol=1e-6, atol=1e-7)


def test_cancellation_gives_the_same_result_on_any_cores():
    """Plain float64 sums do not: (1 + 2⁻⁶⁰) − 1 is 0, and (1 − 1) + 2⁻⁶⁰ is not."""
    steps = [[[[1.0, 1.0]], [[1.0, 2.0**-60]], [[1.0, -1.0]]], [[[1.0, 2.0**-60]], [[1.0, 1.0]], [[1.0, -1.0]]]]
    alone = gradients_of(run_steps(steps, cores=1, shapes=[(2,)]))
    for cores in CORES[1:]:
        assert all(map(same, alone, gradients_of(run_steps(steps, cores=cores, shapes=[(2,)]))))


def test_in_the_first_step_all_cores_use_the_units_of_the_first_minibatch():
    steps = [[[[1.0, 0.0]], [[2.0**-6, 2.0**-38]]]]  # less than half a unit of 2⁻³⁶
    for cores in CORES:
        ((gradient,),) = gradients_of(run_steps(steps, cores=cores, shapes=[(2,)]))
        assert gradient.tolist() == [0.5 + 2.0**-7, 0.0]


@pytest.mark.parametrize("power", [10, 13, 40, 90, -10, -13, -40, -90])
def test_exploding_or_vanishing_minibatch_is_summed_exactly(power):
    rng = random.Random(power)
    steps = [[[drawn(rng)] for _ in range(5)] for _ in range(6)]
    steps[2][3] = [[math.ldexp(value, power) for value in steps[2][3][0]]]
    steps[2][1] = [[-value for value in steps[2][3][0]]]  # so that the rest shows the last bits
    steps[3] = [[[math.ldexp(value, power) for value in minibatch[0]]] for minibatch in steps[3]]
    alone = gradients_of(run_steps(steps, cores=1))
    for cores in CORES[1:]:
        assert all(map(same, alone, gradients_of(run_steps(steps, cores=cores))))
    for (gradient,), minibatches in zip(alone, steps, strict=True):
        values = torch.tensor(minibatches, dtype=torch.float32).double().squeeze(1)
        # to the rounding of the largest in float32, also right after gradients that were 2^90 times larger or smaller
        torch.testing.assert_close(gradient.double(), values.mean(0), rtol=1e-6, atol=2e-7 * values.abs().max().item())


def test_late_gradient_that_is_2_to_the_40_times_smaller_is_not_lost():
    tiny = 2.0**-45
    steps = [
        [[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]],
        [[[1.0, 2.0, 3.0], [tiny, -tiny / 3, 0.0]], [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]],
    ]
    for cores in CORES:
        (_, late) = run_steps(steps, cores=cores, shapes=[(3,), (3,)])[1][0]
        assert late.tolist() == pytest.approx([tiny / 2, -tiny / 6, 0.0], rel=1e-6)


def test_zero_and_missing_gradients_are_preserved():
    steps = [[[None, [0.0] * 3], [None, [0.0] * 3]], [[None, [1.0] * 3], [None, None]], [[[2.0] * 3, None]]]
    for cores in CORES:
        found = gradients_of(run_steps(steps, cores=cores, shapes=[(3,), (3,)]))
        values = [[None if gradient is None else gradient.tolist() for gradient in of_step] for of_step in found]
        assert values == [[None, [0.0] * 3], [None, [0.5] * 3], [[2.0] * 3, None]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_non_finite_element_does_not_affect_others_or_the_next_step(bad):
    rng = random.Random(1)
    steps = [[[drawn(rng)] for _ in range(4)] for _ in range(4)]
    steps[1][0], steps[1][2] = [[1.0, -(2.0**40) / 3, 1.0]], [[bad, 2.0**40 / 3, 1.0]]
    alone = gradients_of(run_steps(steps, cores=1))
    assert alone[1][0][0].item() == bad or math.isnan(bad)
    assert alone[1][0].isfinite().tolist() == [False, True, True]
    for cores in CORES[1:]:
        found = gradients_of(run_steps(steps, cores=cores))
        assert same([alone[1][0][1:]], [found[1][0][1:]])
        assert all(same(one, other) for one, other in zip(alone[2:], found[2:], strict=True))
    assert all(gradient.isfinite().all() for (gradient,) in alone[2:])


def test_idle_core_with_nan_has_no_effect():
    steps = [[[[1.0] * 3]] * 2]

    def run(core):
        p = nn.Parameter(torch.zeros(3))
        gradients = ExactBucketAccumulator(torch.optim.SGD([p], lr=1.0), core, measures=True)
        p.grad = torch.full((3,), 1.0 if core.rank < 2 else math.nan)
        gradients.accumulate(StepPlan(2))
        step = gradients.reduce(StepPlan(2, is_idle=core.rank == 2))
        return p.grad.tolist(), step.measure().is_finite

    assert run_on(3, run) == [([1.0] * 3, True)] * 3
    assert gradients_of(run_steps(steps, cores=2))[0][0].tolist() == [1.0] * 3


@pytest.mark.parametrize("weights", [None, "tokens"])
def test_squared_norms_and_weights_are_exact(weights):
    rng = random.Random(2)
    steps = [[[drawn(rng, scale=10.0 ** rng.randint(-6, 3))] for _ in range(rng.randint(2, 9))] for _ in range(8)]
    tokens = [[rng.choice([0, 1, 7, 0.1, 2**24 + 1]) for _ in minibatches] for minibatches in steps]
    how = {"measures": True, "weights": weights and tokens}
    alone = run_steps(steps, cores=1, **how)
    for cores in CORES[1:]:
        found = run_steps(steps, cores=cores, **how)
        assert [measured for _, measured in found] == [measured for _, measured in alone]
        assert all(map(same, gradients_of(found), gradients_of(alone)))
    if weights:
        for (_, measured), of_step in zip(alone, tokens, strict=True):
            assert measured.weight == pytest.approx(sum(of_step), rel=1e-7)
            assert measured.num_weighted == sum(token > 0 for token in of_step)
    plain = run_steps(steps, cores=1, kind=BucketAccumulator, **how)
    for (_, measured), (_, other) in zip(alone, plain, strict=True):
        assert measured.norms[0] == pytest.approx(other.norms[0], rel=1e-5)


@pytest.mark.parametrize("power", [20, 40, -40])
@pytest.mark.parametrize("cores", [1, 3])
def test_gradients_scaled_by_a_power_of_two_have_the_same_bits(power, cores):
    rng = random.Random(power)
    steps = [[[drawn(rng, scale=10.0 ** rng.randint(-2, 2))] for _ in range(rng.randint(1, 5))] for _ in range(4)]
    plain, scaled = (run_steps(steps, cores=cores, measures=True, scale=2.0**exponent) for exponent in (0, power))
    unscaled = [[gradient / 2.0**power for gradient in of_step] for of_step in gradients_of(scaled)]
    assert all(map(same, gradients_of(plain), unscaled))
    for (_, one), (_, other) in zip(plain, scaled, strict=True):
        assert one.norms[0] == pytest.approx([square / 4.0**power for square in other.norms[0]], rel=1e-6)


def test_gradient_of_the_user_is_not_modified():
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    gradients = ExactBucketAccumulator(torch.optim.SGD([p], lr=1.0), SingleProcess())
    held = torch.tensor([1.0, 1 / 3, 2.0**-60, 0.0], dtype=torch.float64)
    kept = held.clone()
    p.grad = held
    gradients.accumulate(StepPlan(2, is_last=False))
    assert torch.equal(held, kept)
    p.grad = torch.ones(1, dtype=torch.float64).expand(4)
    gradients.accumulate(StepPlan(2))
    gradients.reduce(StepPlan(2))
    assert p.grad.tolist() == pytest.approx([1.0, 2 / 3, 0.5, 0.5])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_layout_of_a_gradient_does_not_matter(memory_format):
    p = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=memory_format))
    gradients = ExactBucketAccumulator(torch.optim.SGD([p], lr=1.0), SingleProcess())
    gradient = torch.arange(120.0).view(2, 3, 4, 5)
    for layout in (torch.contiguous_format, torch.channels_last):
        p.grad = gradient.clone().to(memory_format=layout)
        gradients.accumulate(StepPlan(2, is_last=layout is torch.channels_last))
    gradients.reduce(StepPlan(2))
    assert torch.equal(p.grad, gradient)


def test_rounding_large_gradients_in_chunks_changes_nothing():
    p, q = nn.Parameter(torch.zeros(200_001)), nn.Parameter(torch.zeros(200_001))
    generator = torch.Generator().manual_seed(0)
    made = [ExactBucketAccumulator(torch.optim.SGD([parameter], lr=1.0), SingleProcess()) for parameter in (p, q)]
    values = torch.randn(2, 200_001, generator=generator)
    strided = torch.empty(200_001, 2)[:, 0]
    for number in range(2):
        p.grad, q.grad = values[number].clone(), strided.copy_(values[number])
        for gradients in made:
            gradients.accumulate(StepPlan(2, is_last=number == 1))
    for gradients in made:
        gradients.reduce(StepPlan(2))
    assert torch.equal(p.grad, q.grad)
    torch.testing.assert_close(p.grad, values.mean(0))


def test_units_are_restored_from_a_state_and_saving_changes_nothing():
    rng = random.Random(4)
    steps = [[[drawn(rng, scale=1e-3)] for _ in range(3)] for _ in range(6)]
    whole = gradients_of(run_steps(steps, cores=1))
    found, state = [], None
    for minibatches in steps:
        p = nn.Parameter(torch.zeros(3))
        gradients = ExactBucketAccumulator(torch.optim.SGD([p], lr=1.0), SingleProcess())
        gradients.load_state_dict(state or {})
        for number, (values,) in enumerate(minibatches):
            p.grad = torch.tensor(values)
            gradients.accumulate(StepPlan(3, is_last=number == 2))
        gradients.reduce(StepPlan(3))
        found.append([p.grad.clone()])
        gradients.reset()
        state = gradients.state_dict()
        assert gradients.state_dict() == state
    assert all(map(same, whole, found))
    assert state["has_asked"]


def test_gradients_referenced_by_the_user_do_not_prevent_the_next_step():
    p = nn.Parameter(torch.zeros(3))
    gradients = ExactBucketAccumulator(torch.optim.SGD([p], lr=1.0), SingleProcess())
    kept = []
    for value in (1.0, 2.0, 3.0):
        p.grad = torch.full((3,), value)
        gradients.accumulate(StepPlan(1))
        gradients.reduce(StepPlan(1))
        kept += [p.grad, gradients._buckets.views[0]]
        gradients.reset()
    assert [gradient.tolist() for gradient in kept[::2]] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_complex_parameters_and_steps_with_too_many_minibatches_raise():
    with pytest.raises(ValueError, match=r"^`exact` must be False for complex parameters$"):
        ExactBucketAccumulator(
            torch.optim.SGD([nn.Parameter(torch.zeros(1, dtype=torch.complex64))], lr=1.0), SingleProcess()
        )
    gradients = ExactBucketAccumulator(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), SingleProcess())
    with pytest.raises(ValueError, match=r"^With `exact`, a step can have at most 8192 minibatches, got 8193\.$"):
        gradients.accumulate(StepPlan(8193, is_last=False))


def test_group_added_within_a_step_raises():
    p = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([p], lr=1.0)
    gradients = ExactBucketAccumulator(inner, SingleProcess())
    p.grad = torch.ones(1)
    gradients.accumulate(StepPlan(2, is_last=False))
    inner.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match=r"^With `exact`, no parameter group can be added within a step\.$"):
        gradients.accumulate(StepPlan(2))


def test_parameter_added_within_a_step_keeps_the_sums_of_every_exponent_bucket():
    p, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1), requires_grad=False)
    gradients = ExactBucketAccumulator(torch.optim.SGD([p, late], lr=1.0), SingleProcess())
    for value in ([1.0, 2.0], [3.0 * 2**40, 4.0]):
        p.grad = torch.tensor(value)
        gradients.accumulate(StepPlan(3, is_last=False))
    late.requires_grad_(True)
    p.grad, late.grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    gradients.accumulate(StepPlan(3))
    gradients.reduce(StepPlan(3))
    assert p.grad.tolist() == [pytest.approx(2.0**40 + 1), 3.0]
    assert late.grad.tolist() == [2.0]
