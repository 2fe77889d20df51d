"""The attributes of a run between two calls of step()."""

import copy
import math

import pytest
import torch
from torch import nn

import variable_batch_size as vbs


def make(trace=(2, 4), *, rule=None, ref_batchsize=2, lrs=(1.0, 0.5), **options):
    """Two weights in separate groups, with the input as gradient; minibatches of one sample."""
    weights = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in lrs]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, lrs, strict=True)]
    sampler = vbs.CustomSampler(dataset_size=64, trace=list(trace), minibatch_size=1, shuffle=False)
    optimizer = vbs.CustomOptimizer(
        torch.optim.SGD(groups, lr=1.0),
        sampler,
        rule=rule or vbs.rules.LinearRule(),
        ref_batchsize=ref_batchsize,
        **options,
    )
    return weights, optimizer


def run(weights, optimizer, *gradients):
    for values in gradients:
        for weight, value in zip(weights, values, strict=True):
            weight.grad = torch.full_like(weight, value)
        optimizer.step()


def test_repr_names_the_inner_optimizer_and_the_reference():
    _, optimizer = make(lrs=(1.0,))
    assert repr(optimizer).startswith("<CustomOptimizer of SGD: ")
    assert "at batch size 2, epoch 0, 0 steps done>" in repr(optimizer)


class Counting(vbs.Rule):
    """Stores an additional number in its parameter group."""

    def __init__(self):
        self.limit, self.num_asked = 4.0, 0

    def factor(self, step):
        self.num_asked += 1
        return min(step.scale, self.limit)


def test_state_of_a_rule_or_policy_does_not_change_the_identity_of_a_run():
    policy = vbs.policies.FunctionPolicy(
        lambda situation: policy.__dict__.update(latest=situation.steps_done) or 2, every=1
    )
    weight = nn.Parameter(torch.zeros(1))
    sampler = vbs.CustomSampler(dataset_size=64, trace=policy, minibatch_size=1)
    optimizer = vbs.CustomOptimizer(torch.optim.SGD([weight], lr=1.0), sampler, rule=Counting(), ref_batchsize=2)
    before = dict(optimizer.description)
    assert before["settings of the rule"] == "{'limit': 4.0, 'num_asked': 0}"
    assert "latest" not in before["trace"]
    run([weight], optimizer, *[[1.0]] * 8)
    assert optimizer.rule.num_asked > 0
    assert policy.latest == 0  # when it was first requested
    assert optimizer.description == before


def test_description_contains_everything_that_samples_and_state_depend_on():
    _, optimizer = make()
    described = optimizer.description
    assert described.pop("trace").startswith("2 steps, sha256 ")
    assert described == {
        "on_end": "stop",
        "dataset_size": 64,
        "minibatch_size": 1,
        "seed": 0,
        "shuffle": False,
        "rule": "LinearRule",
        "settings of the rule": "{}",
        "ref_batchsize": 2,
        "optimizer": "SGD",
        "exact": False,
        "seed_minibatches": False,
    }


@pytest.mark.parametrize(("options", "is_seeding"), [({}, True), ({"seed_minibatches": False}, False)])
def test_description_of_an_exact_run_contains_the_number_of_threads(options, is_seeding):
    _, optimizer = make(exact=True, **options)
    described = optimizer.description
    assert (described["exact"], described["seed_minibatches"]) == (True, is_seeding)
    assert described["threads"] == torch.get_num_threads()


def test_minibatches_may_be_seeded_without_being_exact():
    _, optimizer = make(seed_minibatches=True)
    described = optimizer.description
    assert (described["exact"], described["seed_minibatches"], "threads" in described) == (False, True, False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"sampler": [0]}, r"^`sampler` must be a CustomSampler, a Stream or a DataLoader that reads one, got list$"),
        ({"rule": 3}, r"^`rule` must be a Rule or a name such as 'linear', got 3$"),
        ({"rule": vbs.rules.AdamRule()}, r"^`inner` must be an Adam-style optimizer with betas and eps, got SGD: use "),
        ({"ref_batchsize": 0}, r"^`ref_batchsize` must be a positive integer, got 0$"),
    ],
)
def test_error_messages_of_invalid_arguments(parts, message):
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    sampler = vbs.CustomSampler(dataset_size=64, trace=[2], minibatch_size=1)
    right = {"sampler": sampler, "rule": vbs.rules.LinearRule(), "ref_batchsize": 2}
    with pytest.raises(ValueError, match=message):
        vbs.CustomOptimizer(inner, **{**right, **parts})


def test_each_group_has_its_learning_rate_and_factor_before_and_after_the_update():
    weights, optimizer = make([4, 2], rule=vbs.rules.LinearMomentumRule())
    seen = [(optimizer.factor(), optimizer.factor(1), optimizer.current_lr(), optimizer.current_lr(1))]
    for _ in range(6):
        run(weights, optimizer, (1, 1))
        seen.append((optimizer.factor(), optimizer.factor(1), optimizer.current_lr(), optimizer.current_lr(1)))
    assert seen == [(2.0, 2.0, 0.5, 0.25)] * 5 + [(1.0, 1.0, 0.5, 0.25)] * 2


def test_the_learning_rate_read_after_an_update_is_that_of_the_update():
    weights, optimizer = make([2, 2], lrs=(1.0,))
    run(weights, optimizer, (1,), (1,))
    optimizer.param_groups[0]["lr"] = 0.125  # a scheduler changes it
    assert (optimizer.current_lr(), optimizer.factor()) == (1.0, 1.0)
    run(weights, optimizer, (1,))
    assert optimizer.current_lr() == 0.125


def test_a_smoothed_factor_can_be_read_before_and_after_its_update():
    weights, optimizer = make([2, 4, 4], lrs=(1.0,), smooth_steps=2)
    run(weights, optimizer, (1,), (1,), (1,))
    assert (optimizer.factor(), optimizer.current_lr()) == (1.5, 1.5)
    run(weights, optimizer, (1,), (1,), (1,))
    assert (optimizer.factor(), optimizer.current_lr()) == (1.5, 1.5)
    run(weights, optimizer, (1,))
    assert (optimizer.factor(), optimizer.current_lr()) == (2.0, 2.0)


def test_a_group_that_was_added_since_the_latest_update_has_its_next_learning_rate():
    weights, optimizer = make([2, 4], lrs=(1.0,))
    run(weights, optimizer, (1,), (1,))
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.25})
    assert (optimizer.current_lr(), optimizer.current_lr(1)) == (1.0, 0.25)
    assert (optimizer.factor(), optimizer.factor(1)) == (1.0, 1.0)


def test_a_warm_up_counts_the_steps_of_the_run():
    weights, optimizer = make([2, 2, 2], rule=vbs.rules.LEGWRule(warmup_samples=8), lrs=(1.0,))
    seen = []
    for _ in range(3):
        run(weights, optimizer, (1,), (1,))
        seen.append(optimizer.current_lr())
    assert seen == [0.25, 0.5, 0.75]


def test_gain_and_noise_of_the_requested_groups_and_sizes():
    weights, optimizer = make([2, 4], rule=vbs.rules.AdaScaleRule(), ref_batchsize=1)
    assert optimizer.noise is None
    assert math.isnan(optimizer.noise_scale)
    run(weights, optimizer, (1, 1), (3, 1))
    # L = 5 and 1, T = 4 and 1: V = 2 and 0, G² = 3 and 1
    assert optimizer.noise == vbs.rules.Noise(2.0, 4.0)
    assert optimizer.noise_scale == 0.5
    assert optimizer.gain() == pytest.approx(6 / 5)
    assert optimizer.gain(4) == pytest.approx(6 / 4.5)
    assert optimizer.gain(group=0) == pytest.approx(5 / 4)
    assert optimizer.gain(4, 1) == pytest.approx(1)
    report = optimizer.report()
    assert (report["gain"], report["noise_scale"]) == (pytest.approx(6 / 5), 0.5)


def test_gain_of_a_rule_without_noise_raises():
    _, optimizer = make()
    assert optimizer.report() == {}
    for question in (optimizer.gain, lambda: optimizer.noise, lambda: optimizer.noise_scale):
        with pytest.raises(RuntimeError, match=r"^LinearRule measures no noise: .* pass `measure_noise=True`$"):
            question()


def test_noise_measured_under_another_rule_is_reported_and_restored():
    weights, optimizer = make([2, 2], lrs=(1.0,), ref_batchsize=1, measure_noise=True)
    run(weights, optimizer, (1,), (3,))
    assert optimizer.noise == vbs.rules.Noise(2.0, 3.0)
    report = optimizer.report()
    assert (report["gain"], report["noise_scale"]) == (pytest.approx(5 / 4), pytest.approx(2 / 3))
    _, other = make([2, 2], lrs=(1.0,), ref_batchsize=1, measure_noise=True)
    other.load_state_dict(optimizer.state_dict())
    assert other.noise == optimizer.noise
    _, other = make([2, 2], lrs=(1.0,), ref_batchsize=1)
    other.load_state_dict(optimizer.state_dict())  # with noise that is no longer measured
    assert other.report() == {}


def test_state_without_noise_starts_its_measurement():
    _, optimizer = make()
    _, other = make(measure_noise=True)
    other.load_state_dict(optimizer.state_dict())
    assert other.noise is None


def test_noise_of_a_measuring_rule_is_used_even_with_measure_noise():
    weights, optimizer = make([2], lrs=(1.0,), rule=vbs.rules.AdaScaleRule(), ref_batchsize=1, measure_noise=True)
    run(weights, optimizer, (1,), (3,))
    assert optimizer.noise == optimizer.rule.meter.noise() == vbs.rules.Noise(2.0, 3.0)
    assert optimizer.state_dict()["variable_batch_size"]["noise"] is None


def test_listeners_are_called_before_the_first_and_after_each_update_and_step():
    weights, optimizer = make([1, 2, 1], lrs=(1.0,), skip_nonfinite=True)
    first = copy.deepcopy(optimizer.state_dict())
    seen = [(optimizer.updated, optimizer.steps_made, optimizer.steps_done)]
    for value in (1, 1, 1, math.nan):
        run(weights, optimizer, (value,))
        seen.append((optimizer.updated, optimizer.steps_made, optimizer.steps_done))
    assert seen == [(False, 0, 0), (True, 1, 1), (False, 1, 1), (True, 2, 2), (False, 3, 3)]
    optimizer.load_state_dict(first)
    assert (optimizer.steps_made, optimizer.steps_done) == (3, 0)


def test_step_that_raises_updates_nothing():
    weights, optimizer = make([1], lrs=(1.0,))
    run(weights, optimizer, (1,))
    assert optimizer.updated is True
    with pytest.raises(RuntimeError, match="all are done"):
        optimizer.step()
    assert optimizer.updated is False


# ------------------------------------------------------------------------------------------------ norms of the gradient


def norms_seen(optimizer, weights, gradients):
    seen = []
    for values in gradients:
        before = optimizer.steps_done
        run(weights, optimizer, values)
        if optimizer.steps_done > before:
            seen.append(None if optimizer.gradient_norm is None else optimizer.gradient_norm.item())
    return seen


@pytest.mark.parametrize("rule", [vbs.rules.LinearRule, vbs.rules.LinearMomentumRule])
def test_the_norm_is_that_of_the_mean_gradient_before_it_is_clipped(rule):
    weights, optimizer = make([2, 1], rule=rule(), clip_grad_norm=0.5)
    assert optimizer.gradient_norm is None
    optimizer.record_grad_norm(every=1)
    assert norms_seen(optimizer, weights, [(1, 2), (5, 6), (6, 8)]) == pytest.approx([5.0, 10.0])


def test_norms_are_recorded_in_every_requested_step():
    weights, optimizer = make([1] * 9, lrs=(1.0,))
    optimizer.record_grad_norm(every=2)
    optimizer.record_grad_norm(every=3)
    seen = norms_seen(optimizer, weights, [(number,) for number in range(1, 10)])
    assert seen == [None, 2.0, 3.0, 4.0, None, 6.0, None, 8.0, 9.0]


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_interval_of_recorded_norms_must_be_positive(every):
    _, optimizer = make()
    with pytest.raises(ValueError, match=f"^`every` must be a positive integer, got {every}$"):
        optimizer.record_grad_norm(every=every)


def test_smoothing_of_the_optimizer_is_that_of_the_rule_or_of_its_own_meter():
    for options in ({"rule": vbs.rules.AdaScaleRule()}, {"measure_noise": True}):
        weights, optimizer = make([2, 2], lrs=(1.0,), ref_batchsize=1, smoothing=0.5, **options)
        run(weights, optimizer, (1,), (3,), (1,), (1,))
        # L = 5 and 1, T = 4 and 1: V = 2 and 0
        assert optimizer.noise.variance == pytest.approx((0.5 * 2 + 0) / 1.5)
    rule = vbs.rules.AdaScaleRule(smoothing=0.9)
    _, optimizer = make(rule=rule, smoothing=lambda scale: 0.5)
    assert rule.smoothing == 0.9
    assert optimizer.rule.smoothing(1) == 0.5
    with pytest.raises(
        ValueError, match=r"^`smoothing` must be None, as LinearRule measures no noise: pass `measure_n"
    ):
        make(smoothing=0.5)


def test_settings_of_a_rule_that_are_not_set_leave_the_description_of_a_run_as_it_was():
    _, optimizer = make(rule=vbs.rules.AdaScaleRule())
    assert optimizer.description["settings of the rule"] == "{'starts_with_mean': False}"
    _, optimizer = make(rule=vbs.rules.AdaScaleRule(), smoothing="paper")
    assert optimizer.description["settings of the rule"] == "{'starts_with_mean': False, 'smoothing': 'paper'}"
