"""The state of an optimizer: its contents and format."""

import copy
import math

import pytest
import torch
from torch import nn

import variable_batch_size as vbs


def make(trace=(1, 2, 2), *, kind=torch.optim.SGD, rule=None, dataset_size=3, **options):
    """A weight with the input as gradient; minibatches of one sample, two steps in the first epoch."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sampler = vbs.CustomSampler(dataset_size=dataset_size, trace=list(trace), minibatch_size=1, shuffle=False)
    inner = kind([weight], lr=1.0)
    rule = rule or vbs.rules.LinearRule()
    return weight, vbs.CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=1, **options)


def run(weight, optimizer, *gradients):
    for value in gradients:
        weight.grad = torch.full_like(weight, value)
        optimizer.step()


def go_to(optimizer, epoch, first_step=0):
    optimizer.sampler.set_epoch(epoch, first_step)
    optimizer.set_epoch(epoch, first_step)


def test_state_contains_position_counts_and_rule_state():
    weight, optimizer = make(skip_nonfinite=True, smooth_steps=2)
    run(weight, optimizer, 1, 1, math.nan)
    go_to(optimizer, 1)
    run(weight, optimizer, 1)
    state = optimizer.state_dict()
    jump = {"factor": 1.0, "batch_size": 1, "steps_left": 1}
    assert state.pop("variable_batch_size") == {
        "epoch": 1,
        "epoch_step": 0,
        "steps_done": 2,
        "samples_done": 3,
        "steps_skipped": 1,
        "rule": {},
        "progress": 1.0,
        "transitions": [jump],
        "transition_of_all": jump,
        "weights": {"is_weighted": False, "done": 0.0},
        "gradients": {},
        "noise": None,
    }
    assert state == optimizer.inner.state_dict()


def test_state_round_trip():
    weight, optimizer = make(skip_nonfinite=True, smooth_steps=2)
    run(weight, optimizer, 1, 1, math.nan)
    state = optimizer.state_dict()
    _, other = make(skip_nonfinite=True, smooth_steps=2)
    other.load_state_dict(copy.deepcopy(state))
    assert other.state_dict() == state
    assert (other.epoch, other.epoch_step, other.steps_done, other.samples_done) == (0, 2, 2, 3)
    assert (other.steps_skipped, other.progress) == (1, 1.0)


@pytest.mark.parametrize("rule", [vbs.rules.LinearRule, vbs.rules.AdamRule, vbs.rules.AdamScaleRule])
def test_loading_the_initial_state_removes_all_later_state(rule):
    weight, optimizer = make([2, 2, 3, 2], dataset_size=9, kind=torch.optim.Adam, rule=rule(), smooth_steps=3)
    beginning, found = copy.deepcopy(optimizer.state_dict()), []
    for _ in range(2):
        optimizer.load_state_dict(beginning)
        go_to(optimizer, 0)
        with torch.no_grad():
            weight.zero_()
        run(weight, optimizer, 1, 3, -1, 4, 1, 5, -9, 2, 6)
        found.append((weight.item(), optimizer.progress, optimizer.factor()))
    assert found[0] == found[1]


def test_adam_rule_saves_the_beta_history():
    weight, optimizer = make(kind=torch.optim.Adam, rule=vbs.rules.AdamRule())
    run(weight, optimizer, 1)
    state = optimizer.state_dict()["state"][0]
    keys = ("num_updates_of_products", "beta1_product", "beta2_product")
    assert [state[key] for key in keys] == [1, 0.9, 0.999]


def test_preconditioner_is_available_in_the_first_step_after_loading():
    weight, optimizer = make(
        [2, 2, 2], kind=torch.optim.Adam, rule=vbs.rules.AdamScaleRule(min_updates=1), dataset_size=6
    )
    run(weight, optimizer, 1, 3)
    other_weight, other = make(
        [2, 2, 2], kind=torch.optim.Adam, rule=vbs.rules.AdamScaleRule(min_updates=1), dataset_size=6
    )
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.sampler.set_epoch(0, 1)
    for w, o in ((weight, optimizer), (other_weight, other)):
        run(w, o, 1, 5)
    assert other.noise == optimizer.noise
    assert other.noise is not None


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_preconditioner_is_reset_when_the_initial_state_is_loaded(gradient_as_bucket_view):
    options = {"kind": torch.optim.Adam, "rule": vbs.rules.AdamScaleRule(min_updates=1), "dataset_size": 6}
    weight, optimizer = make([2, 2, 2], gradient_as_bucket_view=gradient_as_bucket_view, **options)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        for value in (1.0, 3.0):
            (weight * value).sum().backward()
            optimizer.step()
        assert optimizer.noise is None  # because the first step has no preconditioner
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.sampler.set_epoch(0)


def test_fixed_point_scales_are_restored():
    weight, optimizer = make(exact=True)
    run(weight, optimizer, 1, 1, 3)
    state = optimizer.state_dict()
    _, other = make(exact=True)
    assert other.state_dict()["variable_batch_size"]["gradients"] != state["variable_batch_size"]["gradients"]
    other.load_state_dict(copy.deepcopy(state))
    assert other.state_dict() == state


def test_state_without_ours_raises():
    _, optimizer = make()
    message = (
        r"^the state has no 'variable_batch_size', so it was not saved by this library: load .* into `optimizer.inner`$"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(optimizer.inner.state_dict())


# ------------------------------------------------------------------------------------------------------- between epochs


def test_after_set_epoch_attributes_refer_to_the_first_step_of_the_epoch():
    weight, optimizer = make()
    run(weight, optimizer, 1, 1, 1)
    assert optimizer.current_lr() == 2.0
    go_to(optimizer, 0)
    assert (optimizer.batch_size, optimizer.factor(), optimizer.current_lr()) == (1, 1.0, 1.0)


def test_a_sampler_that_skips_steps_moves_the_optimizer():
    weight, optimizer = make()
    optimizer.sampler.set_epoch(0, 1)
    assert (optimizer.epoch_step, optimizer.batch_size) == (1, 2)
    run(weight, optimizer, 1, 1)
    assert optimizer.epoch_step == 2


def test_warning_names_the_incomplete_step(caplog):
    weight, optimizer = make([1, 1, 1, 1, 2, 2])
    go_to(optimizer, 1)
    run(weight, optimizer, 1)
    go_to(optimizer, 1, 1)
    assert caplog.messages == []  # a complete step is not abandoned
    run(weight, optimizer, 1)
    go_to(optimizer, 2)
    assert caplog.messages == ["core 0 left step 1 of epoch 1 unfinished: its gradients are discarded"]
    assert caplog.records[0].name == "variable_batch_size.optim.optimizer"


# ------------------------------------------------------------------------------------------------------------- one step


def test_lockstep_on_one_core_changes_nothing():
    runs = []
    for lockstep in (False, True):
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        sampler = vbs.CustomSampler(dataset_size=3, trace=[1, 2], minibatch_size=1, shuffle=False, lockstep=lockstep)
        inner = torch.optim.SGD([weight], lr=1.0)
        optimizer = vbs.CustomOptimizer(inner, sampler, rule=vbs.rules.LinearRule(), ref_batchsize=1)
        run(weight, optimizer, 1, 3, 5)
        runs.append((weight.item(), optimizer.state_dict()["variable_batch_size"]))
    assert runs[0] == runs[1]
    assert runs[0][0] == -9.0


def test_step_hooks_receive_the_optimizer_and_no_arguments():
    weight, optimizer = make()
    seen = []
    optimizer.register_step_pre_hook(lambda *arguments: seen.append(arguments))
    optimizer.register_step_post_hook(lambda *arguments: seen.append(arguments))
    run(weight, optimizer, 1)
    assert seen == [(optimizer, (), {})] * 2


def calls_of_state_hooks(optimizer):
    """The calls of all hooks on the state of an optimizer, whose learning rate they change and restore."""
    seen = []

    def scaled(one, state, by):
        assert one is optimizer
        seen.append((by, state["param_groups"][0]["lr"]))
        groups = [{**group, "lr": group["lr"] * by} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def noted(name):
        return lambda one, *state: seen.append((name, one is optimizer, *map(sorted, state)))

    optimizer.register_state_dict_pre_hook(noted("before saving"))
    optimizer.register_state_dict_post_hook(lambda one, state: scaled(one, state, 4.0))
    optimizer.register_state_dict_post_hook(lambda one, state: state.update(mine=1))
    optimizer.register_load_state_dict_pre_hook(noted("before loading"))
    optimizer.register_load_state_dict_pre_hook(lambda one, state: scaled(one, state, 0.25))
    optimizer.register_load_state_dict_post_hook(noted("after loading"))
    state = optimizer.state_dict()
    before = set(state)
    optimizer.load_state_dict(state)
    assert set(state) == before
    return [tuple(one) for one in seen], state["param_groups"], optimizer.param_groups[0]["lr"]


def test_state_dict_hooks_are_called_as_on_a_torch_optimizer():
    _, optimizer = make()
    plain = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=1.0)
    plain_calls, plain_state, plain_lr = calls_of_state_hooks(plain)
    calls, state, lr = calls_of_state_hooks(optimizer)
    for one in calls:
        if one[0] == "before loading":
            one[2].remove("variable_batch_size")
    assert calls == plain_calls
    assert (state, lr) == (plain_state, plain_lr)
    assert len(calls) == 5


def test_nothing_is_logged_by_default(caplog):
    caplog.set_level("INFO")
    weight, optimizer = make()
    run(weight, optimizer, 1, 1, 1)
    assert caplog.messages == []


def test_skip_nonfinite_can_be_disabled_for_measuring_rules():
    weight, optimizer = make(rule=vbs.rules.AdaScaleRule(), skip_nonfinite=False)
    run(weight, optimizer, math.nan)
    assert weight.isnan().all()
    assert optimizer.steps_skipped == 0


def test_every_skipped_step_is_counted_and_logged(caplog):
    weight, optimizer = make(skip_nonfinite=True)
    run(weight, optimizer, math.nan, 1, math.inf)
    assert optimizer.steps_skipped == 2
    assert caplog.messages == [
        "epoch 0, step 1/2: the gradient is not finite, the update is skipped (1 so far)",
        "epoch 0, step 2/2: the gradient is not finite, the update is skipped (2 so far)",
    ]


class Watching(vbs.Rule):
    """Observes norms, of sums or of means."""

    measures_noise = True

    def __init__(self, sums_gradients):
        self.sums_gradients = sums_gradients
        self.seen = []

    def factor(self, step):
        return 1.0

    def observe(self, step, norms):
        self.seen += norms


@pytest.mark.parametrize("sums_gradients", [False, True])
def test_rule_observes_the_norms_of_the_mean(sums_gradients):
    rule = Watching(sums_gradients)
    weight, optimizer = make([2], rule=rule)
    run(weight, optimizer, 1, 3)
    assert optimizer.rule.seen == [vbs.rules.Norms(5.0, 4.0)]
    assert weight.item() == (-4.0 if sums_gradients else -2.0)


def test_the_gradient_of_added_parameters_is_dropped_and_that_of_others_is_not():
    weight, optimizer = make()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    late = nn.Parameter(torch.zeros(1))
    late.grad = torch.ones(1)
    weight.grad = torch.ones_like(weight)
    optimizer.add_param_group({"params": [late]})
    assert late.grad is None
    assert weight.grad is not None
