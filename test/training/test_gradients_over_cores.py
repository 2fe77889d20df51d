"""The gradients of a step on several cores, by hand-made numbers."""

import math

import pytest
import torch
from threaded_cores import run_on
from torch import nn

from variable_batch_size.cores.communicator import Alone
from variable_batch_size.rules.rule import Norms
from variable_batch_size.training.flat_gradients import FlatGradients
from variable_batch_size.training.kept_gradients import KeptGradients
from variable_batch_size.training.separate_gradients import SeparateGradients

KINDS = [FlatGradients, KeptGradients, SeparateGradients]


def optimizer_of(num_groups=1, dtype=torch.float64):
    """With two parameters of one element, each in a group of its own if there are two."""
    parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2)]
    groups = [{"params": parameters}] if num_groups == 1 else [{"params": [p]} for p in parameters]
    return parameters, torch.optim.SGD(groups, lr=1.0)


def make(kind, communicator, *, num_groups=1, dtype=torch.float64, **options):
    parameters, inner = optimizer_of(num_groups, dtype)
    return parameters, kind(inner, communicator, **options)


def take_all(parameters, gradients, minibatches):
    """Takes minibatches, each of a gradient for each parameter; None for none."""
    for number, values in enumerate(minibatches, start=1):
        for p, value in zip(parameters, values, strict=True):
            if value is None:
                continue
            if p.grad is None:
                p.grad = torch.full_like(p, value)
            else:
                p.grad.add_(value)
        gradients.take(is_last=number == len(minibatches), is_only=False)


def values_of(parameters):
    return [None if p.grad is None else p.grad.item() for p in parameters]


def reduced(minibatches_of_cores, weights, *, kind=FlatGradients, **options):
    """On each core, the gradients after the reduction, and the norms where they are measured."""

    def run(core):
        parameters, gradients = make(kind, core, **options)
        take_all(parameters, gradients, minibatches_of_cores[core.rank])
        gradients.reduce(weights[core.rank])
        return values_of(parameters), gradients.norms() if options.get("measures") else None

    return run_on(len(weights), run)


@pytest.mark.parametrize("kind", KINDS)
def test_cores_with_uneven_shares_get_the_weighted_sum(kind):
    found = reduced([[[1, 2], [3, 4]], [[5, 12]]], [0.5, 0.25], kind=kind)
    # (1 + 3)/2 + 5/4 and (2 + 4)/2 + 12/4
    assert [gradients for gradients, _ in found] == [[3.25, 6.0]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_core_divides_out_its_own_loss_scale(kind):
    def run(core):
        parameters, gradients = make(kind, core, measures=True)
        loss_scale = [4.0, 0.5][core.rank]
        take_all(
            parameters, gradients, [[[1 * loss_scale, 2 * loss_scale]], [[3 * loss_scale, 4 * loss_scale]]][core.rank]
        )
        gradients.reduce(0.5, loss_scale=loss_scale)
        return values_of(parameters), gradients.norms()

    # (1 + 3)/2 and (2 + 4)/2; (1 + 4)/2 + (9 + 16)/2
    assert run_on(2, run) == [([2.0, 3.0], ([Norms(15.0, pytest.approx(13.0))], True))] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("measures", [False, True])
def test_what_weighs_nothing_leaves_no_mark_not_even_nan(kind, measures):
    found = reduced([[[1, 2]], [[math.nan, 7]]], [1.0, 0.0], kind=kind, measures=measures)
    assert [gradients for gradients, _ in found] == [[1.0, 2.0]] * 2
    if measures:
        assert [norms for _, norms in found] == [([Norms(5.0, 5.0)], True)] * 2


def test_a_gradient_that_one_core_has_is_there_on_all_and_one_that_none_has_on_none():
    found = reduced([[[1, None]], [[None, None]], [[None, None]]], [1.0, 1.0, 0.0])
    assert [gradients for gradients, _ in found] == [[1.0, None]] * 3


def test_a_gradient_that_only_an_idle_core_has_is_on_none():
    found = reduced([[[1, None]], [[None, 3]]], [1.0, 0.0])
    assert [gradients for gradients, _ in found] == [[1.0, None]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_squared_norms_of_minibatches_are_summed_with_their_weights_over_cores_and_groups(kind):
    found = reduced([[[1, 2], [3, 4]], [[5, 12]]], [0.5, 0.5], kind=kind, measures=True, num_groups=2)
    # (1 + 9)/2 + 25/2 and (4 + 16)/2 + 144/2; of the sums 4.5 and 9
    for gradients, (norms, is_finite) in found:
        assert gradients == [4.5, 9.0]
        assert norms == [Norms(17.5, 20.25), Norms(82.0, 81.0)]
        assert is_finite


def test_beside_narrow_gradients_norms_travel_in_float32():
    found = reduced([[[1, 2]], [[3, 4]]], [0.5, 0.5], measures=True, dtype=torch.bfloat16)
    for gradients, (norms, _) in found:
        assert gradients == [2.0, 3.0]
        assert norms == [Norms(pytest.approx(15.0), pytest.approx(13.0))]


def test_one_core_that_is_not_finite_is_known_to_all():
    found = reduced([[[1, 2]], [[math.inf, 2]]], [0.5, 0.5], measures=True)
    assert [is_finite for _, (_, is_finite) in found] == [False, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("weight", [1.0, 0.5, 2.0])
def test_a_core_alone_weighs_its_own_minibatches(kind, num_minibatches, weight):
    parameters, gradients = make(kind, Alone(), measures=True)
    for _ in range(2):  # the second step begins anew
        with torch.no_grad():
            take_all(parameters, gradients, [[1, 2], [3, 4]][:num_minibatches])
            gradients.reduce(weight)
        expected = [1, 2] if num_minibatches == 1 else [4, 6]
        assert values_of(parameters) == [weight * value for value in expected]
        squares = 5 if num_minibatches == 1 else 30
        of_sum = sum((weight * value) ** 2 for value in expected)
        assert gradients.norms() == ([Norms(weight * squares, pytest.approx(of_sum))], True)
        assert gradients.norm().item() == pytest.approx(math.sqrt(of_sum))
        gradients.clear()


def test_a_single_minibatch_of_the_only_core_is_used_as_it_is():
    parameters, gradients = make(FlatGradients, Alone())
    own = parameters[0].grad = torch.ones(1, dtype=torch.float64)
    gradients.take(is_last=True, is_only=False)
    gradients.reduce(1.0)
    assert parameters[0].grad is own
    assert parameters[1].grad is None


def test_the_only_minibatch_of_a_step_is_not_measured_by_itself():
    parameters, gradients = make(FlatGradients, Alone(), measures=True)
    for p in parameters:
        p.grad = torch.full_like(p, 3.0)
    gradients.take(is_last=True, is_only=True)
    gradients.reduce(1.0)
    assert gradients.norms() == ([Norms(0.0, 18.0)], True)


def test_what_was_never_measured_is_zero():
    parameters, gradients = make(FlatGradients, Alone(), num_groups=2)
    take_all(parameters, gradients, [[3, 4]])
    gradients.reduce(1.0)
    assert gradients.norms() == ([Norms(0.0, 9.0), Norms(0.0, 16.0)], True)


def test_gradients_are_divided_before_they_are_measured_and_those_without_a_divisor_do_not_count():
    divisors = {}
    parameters, gradients = make(FlatGradients, Alone(), num_groups=2, measures=True, divisors=divisors)
    take_all(parameters, gradients, [[3, 4]])
    gradients.reduce(1.0)
    assert gradients.norms() == ([None, None], True)
    gradients.clear()
    divisors[parameters[1]] = torch.full((1,), 2.0, dtype=torch.float64)
    take_all(parameters, gradients, [[3, 4]])
    gradients.reduce(1.0)
    assert gradients.norms() == ([None, Norms(4.0, 4.0)], True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_without_a_divisor_must_be_finite_all_the_same(kind):
    parameters, gradients = make(kind, Alone(), measures=True, divisors={})
    take_all(parameters, gradients, [[3, math.nan]])
    gradients.reduce(1.0)
    assert gradients.norms() == ([None], False)


def test_a_group_may_be_added_between_two_minibatches():
    parameters, inner = optimizer_of()
    gradients = FlatGradients(inner, Alone(), measures=True)
    with torch.no_grad():
        parameters[0].grad = torch.full((1,), 3.0, dtype=torch.float64)
        gradients.take(is_last=False, is_only=False)
        late = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        inner.add_param_group({"params": [late]})
        late.grad = torch.full((4,), 2.0, dtype=torch.float64)
        parameters[0].grad = torch.full((1,), 1.0, dtype=torch.float64)
        gradients.take(is_last=True, is_only=False)
        gradients.reduce(0.5)
    assert gradients.norms() == ([Norms(5.0, 4.0), Norms(8.0, 4.0)], True)
    assert late.grad.tolist() == [1.0] * 4


def test_a_frozen_parameter_that_was_given_a_gradient_counts():
    parameters, gradients = make(FlatGradients, Alone())
    parameters[1].requires_grad_(False)
    take_all(parameters, gradients, [[1, 2], [3, None]])
    gradients.reduce(1.0)
    assert values_of(parameters) == [4.0, 2.0]
    gradients.clear()
    take_all(parameters, gradients, [[1, None], [3, None]])
    gradients.reduce(1.0)
    assert values_of(parameters) == [4.0, None]


def test_a_parameter_frozen_within_a_step_keeps_what_it_had():
    parameters, gradients = make(FlatGradients, Alone())
    with torch.no_grad():
        take_all(parameters, gradients, [[1, 2]])  # the only one so far: used as it is
        gradients.reduce(1.0)
        gradients.clear()
        for p, value in zip(parameters, (1.0, 2.0), strict=True):
            p.grad = torch.full_like(p, value)
        gradients.take(is_last=False, is_only=False)
        parameters[1].requires_grad_(False)
        parameters[0].grad = torch.full_like(parameters[0], 3.0)
        gradients.take(is_last=True, is_only=False)
        gradients.reduce(1.0)
    assert values_of(parameters) == [4.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_step_is_dropped(kind):
    parameters, gradients = make(kind, Alone(), measures=True)
    with torch.no_grad():
        parameters[0].grad = (
            parameters[0].grad.add_(5) if kind is KeptGradients else torch.full_like(parameters[0], 5.0)
        )
        gradients.take(is_last=False, is_only=False)
        gradients.discard()
        take_all(parameters, gradients, [[1, 2]])
        gradients.reduce(1.0)
    assert values_of(parameters) == [1.0, 2.0]
    assert gradients.norms() == ([Norms(5.0, 5.0)], True)


# ----------------------------------------------------------------------------------------------------------------- kept


def test_kept_gradients_stay_the_same_views_of_one_tensor():
    parameters, gradients = make(KeptGradients, Alone(), measures=True)
    views = [p.grad for p in parameters]
    for _ in range(2):
        take_all(parameters, gradients, [[1, 2], [3, 4]])
        gradients.reduce(0.5)
        assert values_of(parameters) == [2.0, 3.0]
        gradients.clear()
        assert values_of(parameters) == [0.0, 0.0]
    assert all(p.grad is view for p, view in zip(parameters, views, strict=True))


def test_kept_gradients_have_room_for_a_parameter_that_comes_later():
    parameters, inner = optimizer_of()
    gradients = KeptGradients(inner, Alone(), measures=True)
    late = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    inner.add_param_group({"params": [late]})
    with torch.no_grad():
        parameters[0].grad.add_(3.0)
        late.grad = torch.full((4,), 2.0, dtype=torch.float64)
        gradients.take(is_last=True, is_only=False)
        gradients.reduce(1.0)
    assert [p.grad.tolist() for p in (*parameters, late)] == [[3.0], [0.0], [2.0] * 4]
    assert gradients.norms() == ([Norms(9.0, 9.0), Norms(16.0, 16.0)], True)


def test_kept_gradients_refuse_other_parameters_within_a_step():
    parameters, gradients = make(KeptGradients, Alone(), measures=True)
    parameters[0].grad.add_(3.0)
    gradients.take(is_last=False, is_only=False)
    parameters[1].requires_grad_(False)
    message = "^with `keep_gradients` the trainable parameters must stay the same within a step, and where they are$"
    with pytest.raises(RuntimeError, match=message):
        gradients.take(is_last=True, is_only=False)


def test_kept_gradients_say_which_one_was_replaced():
    parameters, gradients = make(KeptGradients, Alone())
    parameters[1].grad = torch.ones(1, dtype=torch.float64)
    message = (
        r"^with `keep_gradients` a gradient must stay in its place, but that of parameter 1, of the shape \(1,\), "
        r"was replaced between backward\(\) and step\(\)$"
    )
    with pytest.raises(RuntimeError, match=message):
        gradients.take(is_last=True, is_only=False)
