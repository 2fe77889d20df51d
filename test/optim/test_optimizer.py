"""CustomOptimizer in one process: its effect on an inner optimizer, and its errors."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from small_runs import sgd, train
from torch import nn

import variable_batch_size as vbs

KINDS = [
    vbs.LinearRuleOptimizer,
    vbs.RootRuleOptimizer,
    vbs.ConstantOptimizer,
    vbs.LinearRuleMomentumOptimizer,
]


def make(trace=(64, 96), *, inner=None, kind=vbs.LinearRuleOptimizer, dataset_size=1000, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Linear(4, 3)
    inner = inner(model.parameters()) if inner else sgd(model)
    sampler = vbs.CustomSampler(dataset_size=dataset_size, trace=trace, minibatch_size=32)
    return model, sampler, kind(inner, sampler, ref_batchsize=128, **options)


def loss_of(model, indices):
    generator = torch.Generator().manual_seed(indices[0])
    x = torch.randn(len(indices), 4, generator=generator)
    return model(x).square().mean()


def run_epoch(model, sampler, optimizer):
    train(model, optimizer, sampler, loss_of)


# ------------------------------------------------------------------------------------------------------- steps


def test_step_is_true_exactly_when_the_weights_changed():
    model, sampler, optimizer = make([64, 96])
    before = model.weight.detach().clone()
    updates = []
    for indices in sampler:
        loss_of(model, indices).backward()
        optimizer.step()
        updates.append(optimizer.updated)
        assert torch.equal(model.weight, before) != updates[-1]
        before = model.weight.detach().clone()
    assert updates == [False, True, False, False, True]


def test_update_equals_that_of_one_large_batch():
    model, sampler, optimizer = make([64, 96], inner=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    plain_optimizer = sgd(plain, momentum=0.9)
    batches = list(vbs.CustomSampler(dataset_size=1000, trace=[64, 96], minibatch_size=32))
    for batch, lr in ((batches[:2], 0.1 * 64 / 128), (batches[2:], 0.1 * 96 / 128)):
        plain_optimizer.zero_grad()
        x = torch.cat([torch.randn(32, 4, generator=torch.Generator().manual_seed(b[0])) for b in batch])
        plain(x).square().mean().backward()
        plain_optimizer.param_groups[0]["lr"] = lr
        plain_optimizer.step()
    run_epoch(model, sampler, optimizer)
    torch.testing.assert_close(model.weight, plain.weight)


def test_attributes_refer_to_the_step_of_the_latest_minibatch():
    model, sampler, optimizer = make([64, 96])
    assert (optimizer.batch_size, optimizer.steps_done, optimizer.samples_done) == (64, 0, 0)
    seen = []
    for indices in sampler:
        loss_of(model, indices).backward()
        optimizer.step()
        seen.append((optimizer.batch_size, optimizer.current_lr(), optimizer.steps_done, optimizer.samples_done))
        assert not optimizer.is_idle
    assert seen == [
        (64, 0.05, 0, 0),
        (64, 0.05, 1, 64),
        (96, 0.1 * 0.75, 1, 64),
        (96, 0.1 * 0.75, 1, 64),
        (96, 0.1 * 0.75, 2, 160),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rate_is_restored_after_the_step(kind):
    model, sampler, optimizer = make(
        [64, 512, 32], kind=kind, inner=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-2)
    )
    run_epoch(model, sampler, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["weight_decay"] == 1e-2


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise OSError("no update today")


def test_learning_rate_is_restored_when_the_step_fails():
    model, sampler, optimizer = make([64], inner=lambda p: Failing(p, lr=0.1))
    with pytest.raises(OSError, match="no update today"):
        run_epoch(model, sampler, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


class Counting(torch.optim.SGD):
    """Like some published optimizers, keeps a count in its parameter group, and records its lr."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group.setdefault("seen", []).append(group["lr"])
        return super().step(closure)


def test_only_settings_changed_by_the_rule_are_restored():
    model, sampler, optimizer = make([64, 512, 32], inner=lambda p: Counting(p, lr=0.1))
    run_epoch(model, sampler, optimizer)
    assert optimizer.param_groups[0]["count"] == 3
    assert optimizer.param_groups[0]["seen"] == [0.05, 0.4, 0.025]


def test_custom_rule():
    class InverseRule(vbs.Rule):
        def factor(self, step):
            return 1 / step.scale

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    sampler = vbs.CustomSampler(dataset_size=1000, trace=[64, 512], minibatch_size=32)
    optimizer = vbs.CustomOptimizer(
        Counting(model.parameters(), lr=0.1), sampler, rule=InverseRule(), ref_batchsize=128
    )
    run_epoch(model, sampler, optimizer)
    assert optimizer.param_groups[0]["seen"] == [0.2, 0.025]


def test_linear_momentum_equals_the_linear_rule_at_a_constant_batch_size():
    results = []
    for kind in (vbs.LinearRuleOptimizer, vbs.LinearRuleMomentumOptimizer):
        model, sampler, optimizer = make(
            [96] * 6, kind=kind, inner=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2)
        )
        run_epoch(model, sampler, optimizer)
        results.append(model.weight)
    torch.testing.assert_close(*results)


# ------------------------------------------------------------------------------------------------- inner optimizers


@pytest.mark.parametrize(
    "inner",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    ],
)
def test_any_torch_optimizer_can_be_wrapped(inner):
    model, sampler, optimizer = make([64, 96, 32, 128], inner=inner, kind=vbs.ConstantOptimizer)
    run_epoch(model, sampler, optimizer)
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    plain_optimizer = inner(plain.parameters())
    minibatches = iter(vbs.CustomSampler(dataset_size=1000, trace=[64, 96, 32, 128], minibatch_size=32))
    for n in (2, 3, 1, 4):
        plain_optimizer.zero_grad()
        for _ in range(n):
            x = torch.randn(32, 4, generator=torch.Generator().manual_seed(next(minibatches)[0]))
            (plain(x).square().mean() / n).backward()
        plain_optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)


def test_lbfgs_raises():
    with pytest.raises(ValueError, match="`inner` must update from one gradient, got LBFGS"):
        make([64], inner=lambda p: torch.optim.LBFGS(p))


def test_sparse_adam_is_refused():
    with pytest.raises(ValueError, match=r"`inner` must take dense gradients, got SparseAdam: use Adam or SGD"):
        make([64], inner=lambda p: torch.optim.SparseAdam(p))


# --------------------------------------------------------------------------------------------------- a torch citizen


@pytest.mark.parametrize("on_inner", [False, True])
def test_scheduler_works_on_the_optimizer_and_on_the_inner_optimizer(on_inner):
    model, sampler, optimizer = make([64, 64, 64, 64], inner=lambda p: Counting(p, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.inner if on_inner else optimizer, step_size=2, gamma=0.1)
    for indices in sampler:
        loss_of(model, indices).backward()
        if optimizer.step():
            scheduler.step()
    assert optimizer.param_groups[0]["seen"] == pytest.approx([0.05, 0.05, 0.005, 0.005])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_reduce_on_plateau_and_one_cycle_accept_the_optimizer():
    _, _, optimizer = make([64], inner=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(1.0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)


def test_param_groups_are_those_of_the_inner_optimizer_also_after_loading_a_state():
    _, _, optimizer = make([64])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert optimizer.defaults is optimizer.inner.defaults


def test_step_hooks_run():
    model, sampler, optimizer = make([64])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run_epoch(model, sampler, optimizer)
    assert calls == ["before", "after"] * 2


def test_zero_grad_on_the_optimizer_or_the_model_is_harmless():
    weights = []
    for zero_grad in (lambda model, optimizer: None, lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad()):
        model, sampler, optimizer = make([96, 64], inner=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        for indices in sampler:
            zero_grad(model, optimizer)
            loss_of(model, indices).backward()
            optimizer.step()
        weights.append(model.weight.detach())
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])


def test_earlier_gradients_are_not_counted():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    loss_of(model, [5]).backward()
    _, sampler, optimizer = make([32], model=model)
    run_epoch(model, sampler, optimizer)
    fresh, sampler, optimizer = make([32])
    run_epoch(fresh, sampler, optimizer)
    assert torch.equal(model.weight, fresh.weight)


@pytest.mark.parametrize("to_inner", [False, True])
def test_a_parameter_group_can_be_added(to_inner):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    inner = Counting(model[0].parameters(), lr=0.1)
    sampler = vbs.CustomSampler(dataset_size=1000, trace=[64, 64], minibatch_size=32)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128)
    first = [p.detach().clone() for p in model.parameters()]
    for i, indices in enumerate(sampler):
        if i == 2:
            assert not torch.equal(model[0].weight, first[0])
            assert torch.equal(model[1].weight, first[2])
            model.zero_grad()
            adding = optimizer.inner if to_inner else optimizer
            adding.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
        loss_of(model, indices).backward()
        optimizer.step()
    assert not torch.equal(model[1].weight, first[2])
    assert optimizer.param_groups[1]["seen"] == [0.005]
    assert optimizer.current_lr(1) == 0.005


# ------------------------------------------------------------------------------------ frozen and unused parameters


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.uses_both = False

    def forward(self, x):
        return self.used(x) + self.frozen(x) + (self.unused(x) if self.uses_both else 0)


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def test_frozen_and_unused_parameters_are_not_updated():
    torch.manual_seed(0)
    model = Branches()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, sampler, optimizer = make([64, 96], model=model, inner=decaying)
    run_epoch(model, sampler, optimizer)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != name.startswith("used"), name
    assert model.unused.weight.grad is None


def plain_branches(change_at):
    """Plain PyTorch over the minibatches of a trace of [64] * 4, with a change before step `change_at`."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = decaying(model.parameters())
    minibatches = iter(vbs.CustomSampler(dataset_size=1000, trace=[64] * 4, minibatch_size=32))
    for step in range(4):
        if step == 2:
            change_at(model)
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(32, 4, generator=torch.Generator().manual_seed(next(minibatches)[0]))
            (model(x).square().mean() / 2).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "uses_both", True),
        lambda model: model.frozen.requires_grad_(True),
        lambda model: model.used.weight.requires_grad_(False),
    ],
    ids=["used later", "unfrozen later", "frozen later"],
)
def test_parameter_may_be_unused_in_some_steps(change):
    torch.manual_seed(0)
    model = Branches()
    _, sampler, optimizer = make([64] * 4, model=model, inner=decaying, kind=vbs.ConstantOptimizer)
    for i, indices in enumerate(sampler):
        if i == 4:
            change(model)
        loss_of(model, indices).backward()
        optimizer.step()
    plain = plain_branches(change)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_gradients_keep_the_layout_of_channels_last_parameters():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    make([32], model=model, gradient_as_bucket_view=True)
    weight = model[0].weight
    assert weight.grad.stride() == weight.stride()
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_all_gradients_of_one_dtype_lie_in_one_buffer():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 3).double())
    make([32], model=model, gradient_as_bucket_view=True)
    storages = [{p.grad.untyped_storage().data_ptr() for p in layer.parameters()} for layer in model]
    assert storages[0] == storages[1]
    assert len(storages[0]) == len(storages[2]) == 1
    assert storages[0] != storages[2]


# ---------------------------------------------------------------------------------------------------------- clipping


def test_the_mean_gradient_is_clipped_before_the_update():
    model, sampler, optimizer = make([96], clip_grad_norm=0.01, inner=lambda p: torch.optim.SGD(p, lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    run_epoch(model, sampler, optimizer)
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before, strict=True)]).norm().item()
    assert moved == pytest.approx(0.01 * 96 / 128, rel=1e-3)


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_clip_grad_norm_must_be_positive(value):
    with pytest.raises(ValueError, match="`clip_grad_norm` must be positive, got"):
        make([96], clip_grad_norm=value)


# ------------------------------------------------------------------------------------------------ calls out of order


WAYS = [
    ("sampler",),
    ("optimizer",),
    ("sampler", "optimizer"),
    ("optimizer", "sampler"),
    ("sampler", "sampler", "optimizer", "optimizer"),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_set_epoch_on_either_moves_both_once(way):
    model, sampler, optimizer = make([512, 512])
    both = {"sampler": sampler, "optimizer": optimizer}
    for epoch, passes in ((0, 1), (1, 2), (1, 3)):
        for name in way:
            both[name].set_epoch(epoch)
            assert (sampler.epoch, optimizer.epoch, optimizer.epoch_step) == (epoch, epoch, 0)
        assert sampler.num_passes == passes
        run_epoch(model, sampler, optimizer)
        assert (optimizer.epoch_step, optimizer.steps_done) == (1, passes)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_set_epoch_on_either_restarts_the_epoch(way):
    model, sampler, optimizer = make([64, 96])
    both = {"sampler": sampler, "optimizer": optimizer}
    loss_of(model, next(iter(sampler))).backward()
    optimizer.step()
    for name in way:
        both[name].set_epoch(0)
    assert not optimizer.is_accumulating
    run_epoch(model, sampler, optimizer)
    assert (optimizer.steps_done, sampler.num_passes) == (2, 1)


def test_optimizer_joins_the_pass_of_a_loader_that_has_prefetched():
    model, sampler, optimizer = make([64, 96])
    sampler.set_epoch(0)
    minibatches = iter(sampler)
    first = next(minibatches)
    optimizer.set_epoch(0)
    train(model, optimizer, (first, *minibatches), loss_of)
    assert (optimizer.steps_done, sampler.num_passes) == (2, 1)
    optimizer.set_epoch(0)
    next(iter(sampler))  # read only
    optimizer.set_epoch(0)
    run_epoch(model, sampler, optimizer)
    assert (optimizer.steps_done, sampler.num_passes) == (4, 3)


def test_an_optimizer_starts_where_its_sampler_is():
    sampler = make([512, 512])[1]
    sampler.set_epoch(1)
    model = nn.Linear(3, 2)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=32)
    assert (optimizer.epoch, optimizer.batch_size) == (1, 512)


def test_two_optimizers_on_one_sampler_take_the_same_steps():
    model, sampler, optimizer = make([64, 96, 512])
    other_model = nn.Linear(4, 3)
    other = vbs.LinearRuleOptimizer(sgd(other_model), sampler, ref_batchsize=32)
    for begin in (sampler, optimizer, other):
        begin.set_epoch(0)
        found = []
        for indices in sampler:
            loss_of(model, indices).backward()
            loss_of(other_model, indices).backward()
            found.append((optimizer.step(), other.step()))
        assert [one for one, _ in found] == [another for _, another in found]
        assert sum(one for one, _ in found) == 3
    assert optimizer.steps_done == other.steps_done == 9


def test_deleted_optimizer_does_not_follow_the_sampler():
    _, sampler, optimizer = make([64, 96])
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    sampler.set_epoch(0)


def test_a_copy_follows_its_own_sampler():
    _, sampler, optimizer = make([512, 512])
    other = copy.deepcopy(optimizer)
    other.sampler.set_epoch(1)
    assert (optimizer.epoch, other.epoch, sampler.epoch) == (0, 1, 0)
    sampler.set_epoch(0)
    assert other.epoch == 1


@pytest.mark.parametrize("who", ["sampler", "optimizer"])
def test_set_epoch_in_the_middle_of_a_pass_ends_it(who):
    model, sampler, optimizer = make([64, 96])
    minibatches = iter(sampler)
    loss_of(model, next(minibatches)).backward()
    optimizer.step()
    {"sampler": sampler, "optimizer": optimizer}[who].set_epoch(0)
    with pytest.raises(RuntimeError, match=r"^set_epoch\(\) was called in the middle of a pass: begin another one"):
        next(minibatches)


def test_a_step_beyond_the_end_of_the_epoch_is_an_error():
    model, sampler, optimizer = make([64, 96])
    run_epoch(model, sampler, optimizer)
    with pytest.raises(RuntimeError, match="epoch 0 has 2 steps and all are done: call set_epoch"):
        optimizer.step()


def test_a_second_pass_without_set_epoch_is_an_error():
    model, sampler, optimizer = make([64, 96])
    run_epoch(model, sampler, optimizer)
    with pytest.raises(RuntimeError, match="epoch 0 is read for the second time: call set_epoch"):
        run_epoch(model, sampler, optimizer)


def test_an_epoch_beyond_the_trace_is_an_error():
    _, _, optimizer = make([512, 512])
    with pytest.raises(ValueError, match="trace holds 2 epochs of 1000 samples, got epoch 2"):
        optimizer.set_epoch(2)


def test_incomplete_step_is_discarded_with_a_warning(caplog):
    weights = []
    for breaks in (False, True):
        model, sampler, optimizer = make([512, 512])
        if breaks:
            for i, indices in enumerate(sampler):
                if i == 3:
                    break
                loss_of(model, indices).backward()
                optimizer.step()
        sampler.set_epoch(1)
        optimizer.set_epoch(1)
        run_epoch(model, sampler, optimizer)
        weights.append(model.weight)
    assert torch.equal(*weights)
    assert "core 0 left step 0 of epoch 0 unfinished: its gradients are discarded" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ref_batchsize": 0}, "`ref_batchsize` must be a positive integer, got 0"),
        ({"ref_batchsize": 1.5}, "`ref_batchsize` must be a positive integer, got 1.5"),
        ({"ref_batchsize": 128, "log_steps": -1}, "`log_steps` must be a non-negative integer, got -1"),
    ],
)
def test_invalid_options_raise(options, message):
    model = nn.Linear(4, 3)
    sampler = vbs.CustomSampler(dataset_size=1000, trace=[64], minibatch_size=32)
    with pytest.raises(ValueError, match=message):
        vbs.LinearRuleOptimizer(sgd(model), sampler, **options)


def test_sampler_for_other_cores_raises():
    model = nn.Linear(4, 3)
    sampler = vbs.CustomSampler(dataset_size=1000, trace=[64], minibatch_size=32, num_replicas=4, rank=1)
    with pytest.raises(ValueError, match="the sampler is for rank 1 of 4, but this is rank 0 of 1"):
        vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=128)


@pytest.mark.parametrize("wrong", ["inner", "sampler", "rule"])
def test_invalid_inner_optimizer_sampler_or_rule_raises(wrong):
    model = nn.Linear(4, 3)
    parts = {
        "inner": sgd(model),
        "sampler": vbs.CustomSampler(dataset_size=1000, trace=[64], minibatch_size=32),
        "rule": vbs.rules.LinearRule(),
        wrong: "something else",
    }
    with pytest.raises(ValueError, match=f"`{wrong}` must be"):
        vbs.CustomOptimizer(**parts, ref_batchsize=128)


# ------------------------------------------------------------------------------------------------------ state and log


def test_the_state_loads_with_weights_only(tmp_path):
    model, sampler, optimizer = make([64, 96], inner=lambda p: torch.optim.AdamW(p, lr=0.01))
    run_epoch(model, sampler, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    _, _, other = make([64, 96], inner=lambda p: torch.optim.AdamW(p, lr=0.5))
    other.load_state_dict(state)
    assert (other.epoch, other.epoch_step, other.steps_done, other.samples_done) == (0, 2, 2, 160)
    assert other.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("stop_after", range(1, 13))
def test_run_stopped_anywhere_resumes_bit_for_bit(stop_after):
    trace = [64, 96, 512, 32, 256]

    def start():
        return make(trace, dataset_size=700, inner=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    def run(model, sampler, optimizer, first_epoch=0, first_step=0, stop_after=None):
        num_minibatches = 0
        for epoch in range(first_epoch, 2):
            sampler.set_epoch(epoch, first_step if epoch == first_epoch else 0)
            optimizer.set_epoch(epoch, first_step if epoch == first_epoch else 0)
            for indices in sampler:
                if num_minibatches == stop_after:
                    return
                num_minibatches += 1
                loss_of(model, indices).backward()
                optimizer.step()

    whole = start()
    run(*whole)
    stopped = start()
    run(*stopped, stop_after=stop_after)
    resumed = start()
    resumed[0].load_state_dict(stopped[0].state_dict())
    resumed[2].load_state_dict(stopped[2].state_dict())
    run(*resumed, first_epoch=resumed[2].epoch, first_step=resumed[2].epoch_step)
    assert torch.equal(resumed[0].weight, whole[0].weight)
    assert resumed[2].steps_done == whole[2].steps_done == 5


def test_state_of_another_optimizer_raises():
    _, _, optimizer = make([64])
    with pytest.raises(ValueError, match="the state has no 'variable_batch_size'"):
        optimizer.load_state_dict(optimizer.inner.state_dict())


def test_log_steps_sets_the_interval(caplog):
    caplog.set_level(logging.INFO, logger="variable_batch_size")
    model, sampler, optimizer = make([64, 96, 32, 128, 160], log_steps=2)
    run_epoch(model, sampler, optimizer)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("log_line")]
    assert lines == [
        "epoch 0, step 2/5: batch size 96, learning rate 0.075, 160 samples in all",
        "epoch 0, step 4/5: batch size 128, learning rate 0.1, 320 samples in all",
    ]


def test_function_with_a_whole_step_can_be_compiled():
    weights = []
    for wrap in (lambda function: function, torch.compile(backend="eager")):
        model, sampler, optimizer = make([64, 96])

        @wrap
        def train(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            return optimizer.step()

        assert [train(torch.ones(1, 4)) for _ in sampler] == [False, True, False, False, True]
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_parameters_in_two_optimizers_of_a_sampler_raise():
    trunk, heads = nn.Linear(4, 3), [nn.Linear(3, 1), nn.Linear(3, 1)]
    sampler = vbs.CustomSampler(dataset_size=64, trace=[32], minibatch_size=32)
    first, second = (
        vbs.ConstantOptimizer(torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1), sampler)
        for head in heads
    )
    sampler.set_epoch(0)
    for _ in sampler:
        hidden = trunk(torch.ones(1, 4))
        sum(head(hidden).sum() for head in heads).backward()
        first.step()
        with pytest.raises(RuntimeError, match=r"^two optimizers of one sampler have the same parameters"):
            second.step()
    third = vbs.ConstantOptimizer(sgd(trunk), sampler)
    sampler.set_epoch(0)
    for _ in sampler:  # instead of the first one
        trunk(torch.ones(1, 4)).sum().backward()
        assert third.step()
