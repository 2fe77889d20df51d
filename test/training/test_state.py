"""The state of an optimizer: what is in it, also as the first version of the format has it."""

import copy
import math

import pytest
import torch
from torch import nn

import variable_batch_size as vbs


def make(trace=(1, 2, 2), *, kind=torch.optim.SGD, rule=None, dataset_size=3, **options):
    """A weight whose gradient is what it is given; minibatches of one sample, two steps in the first epoch."""
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


def test_the_state_is_the_position_the_counts_and_what_the_rule_remembers():
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
        "adam_bias": {},
        "weights": {"is_weighted": False, "done": 0.0},
        "gradients": {},
        "noise": None,
    }
    assert state == optimizer.inner.state_dict()


def test_a_state_that_is_loaded_is_the_state():
    weight, optimizer = make(skip_nonfinite=True, smooth_steps=2)
    run(weight, optimizer, 1, 1, math.nan)
    state = optimizer.state_dict()
    _, other = make(skip_nonfinite=True, smooth_steps=2)
    other.load_state_dict(copy.deepcopy(state))
    assert other.state_dict() == state
    assert (other.epoch, other.epoch_step, other.steps_done, other.samples_done) == (0, 2, 2, 3)
    assert (other.steps_skipped, other.progress) == (1, 1.0)


@pytest.mark.parametrize("rule", [vbs.rules.LinearRule, vbs.rules.AdamRule, vbs.rules.AdamScaleRule])
def test_a_run_that_is_put_back_to_its_beginning_leaves_no_mark_of_what_came_after(rule):
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


def test_adam_under_the_adam_rule_remembers_its_betas():
    weight, optimizer = make(kind=torch.optim.Adam, rule=vbs.rules.AdamRule())
    run(weight, optimizer, 1)
    assert optimizer.state_dict()["variable_batch_size"]["adam_bias"] == {
        0: {"num_updates": 1, "first": 0.9, "second": 0.999}
    }


def test_what_adam_divides_by_is_known_from_the_first_step_after_loading():
    weight, optimizer = make([2, 2, 2], kind=torch.optim.Adam, rule=vbs.rules.AdamScaleRule(), dataset_size=6)
    run(weight, optimizer, 1, 3)
    other_weight, other = make([2, 2, 2], kind=torch.optim.Adam, rule=vbs.rules.AdamScaleRule(), dataset_size=6)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.sampler.set_epoch(0, 1)
    for w, o in ((weight, optimizer), (other_weight, other)):
        run(w, o, 1, 5)
    assert other.noise == optimizer.noise
    assert other.noise is not None


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_what_adam_divides_by_is_unknown_again_in_a_run_that_goes_back_to_its_start(gradient_as_bucket_view):
    options = {"kind": torch.optim.Adam, "rule": vbs.rules.AdamScaleRule(), "dataset_size": 6}
    weight, optimizer = make([2, 2, 2], gradient_as_bucket_view=gradient_as_bucket_view, **options)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        for value in (1.0, 3.0):
            (weight * value).sum().backward()
            optimizer.step()
        assert optimizer.noise is None  # as the first step has nothing to be divided by
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.sampler.set_epoch(0)


def test_how_large_exact_gradients_were_goes_on_with_a_run():
    weight, optimizer = make(exact=True)
    run(weight, optimizer, 1, 1, 3)
    state = optimizer.state_dict()
    _, other = make(exact=True)
    assert other.state_dict()["variable_batch_size"]["gradients"] != state["variable_batch_size"]["gradients"]
    other.load_state_dict(copy.deepcopy(state))
    assert other.state_dict() == state


def test_a_state_without_ours_is_refused_in_words():
    _, optimizer = make()
    message = r"^the state has no 'variable_batch_size': it was saved by another kind of optimizer$"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(optimizer.inner.state_dict())


# ------------------------------------------------------------------------------------------------------- between epochs


def test_after_set_epoch_what_is_read_speaks_of_the_epochs_first_step():
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


def test_the_warning_of_a_step_left_says_which(caplog):
    weight, optimizer = make([1, 1, 1, 1, 2, 2])
    go_to(optimizer, 1)
    run(weight, optimizer, 1)
    go_to(optimizer, 1, 1)
    assert caplog.messages == []  # a step that is complete is not left
    run(weight, optimizer, 1)
    go_to(optimizer, 2)
    assert caplog.messages == ["core 0 left step 1 of epoch 1 unfinished: its gradients are discarded"]
    assert caplog.records[0].name == "variable_batch_size.optim.optimizer"


# ------------------------------------------------------------------------------------------------------------- one step


def test_alone_lockstep_changes_nothing():
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


def test_hooks_of_a_step_get_the_optimizer_and_no_arguments():
    weight, optimizer = make()
    seen = []
    optimizer.register_step_pre_hook(lambda *arguments: seen.append(arguments))
    optimizer.register_step_post_hook(lambda *arguments: seen.append(arguments))
    run(weight, optimizer, 1)
    assert seen == [(optimizer, (), {})] * 2


def test_nothing_is_logged_unless_it_is_asked_for(caplog):
    caplog.set_level("INFO")
    weight, optimizer = make()
    run(weight, optimizer, 1, 1, 1)
    assert caplog.messages == []


def test_a_rule_that_measures_may_be_told_to_update_whatever_the_gradient():
    weight, optimizer = make(rule=vbs.rules.AdaScaleRule(), skip_nonfinite=False)
    run(weight, optimizer, math.nan)
    assert weight.isnan().all()
    assert optimizer.steps_skipped == 0


def test_every_skipped_step_is_counted_and_said(caplog):
    weight, optimizer = make(skip_nonfinite=True)
    run(weight, optimizer, math.nan, 1, math.inf)
    assert optimizer.steps_skipped == 2
    assert caplog.messages == [
        "epoch 0, step 1/2: the gradient is not finite, the update is skipped (1 so far)",
        "epoch 0, step 2/2: the gradient is not finite, the update is skipped (2 so far)",
    ]


class Watching(vbs.Rule):
    """Looks at norms, of sums or of means."""

    measures_noise = True

    def __init__(self, sums_gradients):
        self.sums_gradients = sums_gradients
        self.seen = []

    def factor(self, step):
        return 1.0

    def observe(self, step, norms):
        self.seen += norms


@pytest.mark.parametrize("sums_gradients", [False, True])
def test_a_rule_is_shown_the_norms_of_the_mean(sums_gradients):
    rule = Watching(sums_gradients)
    weight, optimizer = make([2], rule=rule)
    run(weight, optimizer, 1, 3)
    assert rule.seen == [vbs.rules.Norms(5.0, 4.0)]
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
