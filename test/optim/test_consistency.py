"""All cores start with the same weights and settings, or raise immediately and name the difference."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs


def build(**different):
    """An optimizer; on rank 1 with other arguments."""
    rank = dist.get_rank()
    how = {
        "trace": [8, 8],
        "minibatch_size": 4,
        "seed": 0,
        "ref_batchsize": 8,
        "lr": 0.1,
        "rule": "linear",
        "clip": None,
        "exact": False,
        "frozen": False,
        "options": {},
    }
    how |= different if rank == 1 else {}
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[1].running_mean.fill_(rank)
    model[1].register_buffer("is_ready", torch.tensor(rank == 0))
    model[1].register_buffer("expanded", torch.full((2, 1), float(rank)).expand(2, 3))
    sampler = vbs.CustomSampler(
        dataset_size=64, trace=how["trace"], minibatch_size=how["minibatch_size"], seed=how["seed"]
    )
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=how["lr"])
    model[2].bias.requires_grad_(not how["frozen"])
    rule = vbs.rules.make_rule(how["rule"])
    options = {"clip_grad_norm": how["clip"], "exact": how["exact"], **how["options"]}
    optimizer = vbs.CustomOptimizer(
        inner, sampler, rule=rule, ref_batchsize=how["ref_batchsize"], model=model, **options
    )
    return model, optimizer


DIFFERENT = [
    ({"seed": 3}, "seed: 0 on rank 0, 3 on rank 1"),
    ({"trace": [8, 16]}, "trace: 2 steps, sha256 .* on rank 0, 2 steps, sha256 .* on rank 1"),
    ({"minibatch_size": 2}, "minibatch_size: 4 on rank 0, 2 on rank 1"),
    ({"ref_batchsize": 16}, "ref_batchsize: 8 on rank 0, 16 on rank 1"),
    ({"rule": "root"}, "rule: LinearRule on rank 0, RootRule on rank 1"),
    ({"lr": 0.2}, "settings: .*0.1.* on rank 0, .*0.2.* on rank 1"),
    ({"frozen": True}, r"frozen parameters: \[\] on rank 0, \[3\] on rank 1"),
    ({"clip": 0.5}, "clip_grad_norm: None on rank 0, 0.5 on rank 1"),
    ({"exact": True}, r"exact \(and in seed_minibatches, threads\): False on rank 0, True on rank 1"),
    (
        {
            "options": {
                "smooth_steps": 3,
                "max_factor": 2.0,
                "skip_nonfinite": True,
                "gradient_as_bucket_view": True,
                "measure_noise": True,
                "reduce_scatter_once": True,
            }
        },
        r"smooth_steps \(and in max_factor, skip_nonfinite, gradient_as_bucket_view, measure_noise, "
        r"reduce_scatter_once\): 0 on rank 0, 3 on rank 1",
    ),
    ({"seed": 3, "ref_batchsize": 16}, r"seed \(and in ref_batchsize\): 0 on rank 0, 3 on rank 1"),
]


def messages():
    found = []
    for different, _ in DIFFERENT:
        with pytest.raises(ValueError) as raised:
            build(**different)
        found.append(str(raised.value))
    return found


def test_cores_with_different_settings_raise_on_all_cores(on_cores):
    for found in on_cores(2, messages):
        for message, (_, expected) in zip(found, DIFFERENT, strict=True):
            with pytest.raises(ValueError, match="ranks must have the same settings, but differ in " + expected):
                raise ValueError(message)


def with_other_settings_of_the_rule():
    rank = dist.get_rank()
    sampler = vbs.CustomSampler(dataset_size=64, trace=[8], minibatch_size=4)
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError) as raised:
        vbs.LEGWRuleOptimizer(inner, sampler, ref_batchsize=8, warmup_samples=10 + rank)
    return str(raised.value)


def test_the_settings_of_the_rule_are_compared_too(on_cores):
    for message in on_cores(2, with_other_settings_of_the_rule):
        assert "settings of the rule: {'warmup_samples': 10} on rank 0, {'warmup_samples': 11} on rank 1" in message


def states():
    model, optimizer = build()
    late = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    late.grad = torch.ones(2)
    optimizer.add_param_group({"params": [late]})
    return {**model.state_dict(), "late": late.detach(), "has_gradient": late.grad is not None}


def test_parameters_buffers_and_added_groups_are_broadcast_from_core_0(on_cores):
    first, second = on_cores(2, states)
    for name in first:
        assert torch.equal(torch.as_tensor(first[name]), torch.as_tensor(second[name])), name
    assert first["late"].tolist() == [0.0, 0.0]
    assert second["1.running_mean"].tolist() == [0.0] * 3
    assert bool(second["1.is_ready"])
    assert second["1.expanded"].tolist() == [[0.0] * 3] * 2
    assert not first["has_gradient"]


def plain_run(between=lambda *_: None, *, model=None, passes_model=True, trace=(12, 8, 4) * 4, sizes=(3, 5, 2)):
    """Three epochs of three steps; `between` is called before each minibatch. Returns the error."""
    torch.manual_seed(0)
    layers = [nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers) if model is None else model
    sampler = vbs.CustomSampler(dataset_size=24, trace=list(trace), minibatch_size=4)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    options = {"model": model} if passes_model else {}
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, **options)
    x = torch.linspace(-1, 1, 24 * 3).view(24, 3)
    try:
        for _ in optimizer.epochs(3):
            for indices in sampler:
                between(model, inner, optimizer)
                model(x[indices]).square().mean().backward()
                optimizer.step()
        return f"no error in {optimizer.epoch + 1} epochs"
    except RuntimeError as error:
        return f"after step {optimizer.steps_done}: {error}"


def change_lr(model, inner, optimizer):
    if optimizer.steps_done == 1 and dist.get_rank() == 1:
        inner.param_groups[0]["lr"] = 0.05


def plateau(model, inner, optimizer):
    if not hasattr(inner, "plateau"):
        inner.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(inner, patience=0, factor=0.5)
    if not optimizer.is_accumulating:
        inner.plateau.step(optimizer.steps_done * (-1.0) ** dist.get_rank())


def load_weights(model, inner, optimizer):
    if optimizer.steps_done == 1 and dist.get_rank() == 0:
        for p in model.parameters():
            p.data.mul_(1.5)


def freeze_differently(model, inner, optimizer):
    if optimizer.steps_done == 1:
        model[dist.get_rank()].requires_grad_(False)


def freeze_on_one_core(model, inner, optimizer):
    if optimizer.steps_done == 1 and dist.get_rank() == 1:
        model[0].requires_grad_(False)


def unfreeze_on_one_core(model, inner, optimizer):
    if optimizer.steps_done == 0:
        model[0].requires_grad_(False)
    elif optimizer.steps_done == 1 and dist.get_rank() == 1:
        model[0].requires_grad_(True)


def freeze_alike(model, inner, optimizer):
    model[0].requires_grad_(optimizer.steps_done != 1)
    model[1].requires_grad_(optimizer.steps_done != 2)


class MomentumEncoder(nn.Module):
    """As in MoCo: the second network follows the first one in every forward pass."""

    def __init__(self):
        super().__init__()
        self.encoder, self.momentum_encoder = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.encoder.parameters(), self.momentum_encoder.parameters(), strict=True):
                other.mul_(0.9).add_(own, alpha=0.1)
        return self.encoder(x) - self.momentum_encoder(x) + 1


def half_of_a_model(passes_model):
    """Both optimizers make steps, on the shares of each core."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sampler = vbs.CustomSampler(dataset_size=8, trace=[8], minibatch_size=4)
    inner, rest = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())
    unrelated = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    options = {"model": model} if passes_model else {}
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, **options)
    with pytest.raises(RuntimeError) as raised:
        for indices in sampler:
            model(torch.full((4, 3), float(sum(indices)))).sum().backward()
            unrelated.step()
            optimizer.step()
            unrelated.step()
            rest.step()
    return str(raised.value)


def log_on_one_core(*, is_attached):
    """A log, whose records are sums over all cores, on core 0 only."""
    model = nn.Linear(3, 3)
    sampler = vbs.CustomSampler(dataset_size=8, trace=[8], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=8)
    log = vbs.Log(optimizer, every=1, to=[]) if dist.get_rank() == 0 else None
    if log is not None and is_attached:
        optimizer.attach(log)
    with pytest.raises(RuntimeError) as raised:
        for _ in sampler:
            loss = model(torch.ones(4, 3)).sum()
            loss.backward()
            optimizer.step(loss=loss)
            if log is not None and not is_attached:
                log.step(loss)
    return str(raised.value)


def what_became_different():
    found = {
        change.__name__: plain_run(change)
        for change in (change_lr, plateau, load_weights, freeze_differently, freeze_on_one_core)
    }
    found["unfreeze_on_one_core"] = plain_run(unfreeze_on_one_core)
    found["freeze_alike"] = plain_run(freeze_alike)
    found["momentum encoder"] = plain_run(model=MomentumEncoder())
    found["log"] = [log_on_one_core(is_attached=is_attached) for is_attached in (True, False)]
    found["half"] = [half_of_a_model(passes_model) for passes_model in (True, False)]
    return found


@pytest.fixture(scope="module")
def differences(on_cores):
    return on_cores(2, what_became_different)


def test_different_learning_rates_are_detected_in_the_next_step(differences):
    for rank, found in enumerate(differences):
        lr = (0.1, 0.05)[rank]
        assert found["change_lr"].startswith("after step 1: Ranks have different learning rates")
        assert f"before the rule, are [{lr}]" in found["change_lr"]
        assert found["plateau"].startswith("after step 1: Ranks have different learning rates")


def test_log_on_one_core_is_detected_before_it_communicates(differences):
    for rank, found in enumerate(differences):
        for text, has in zip(found["log"], ("Log, ", ""), strict=True):
            own = (f"{has}the gradient norm every 1 steps", "none")[rank]
            assert text.startswith(f"Ranks have different logs, checkpoints or schedulers; this one has {own}. Make")


def test_different_weights_are_detected_in_the_first_step_of_an_epoch(differences):
    for found in differences:
        assert found["load_weights"].startswith("after step 3: Ranks have different weights")
        assert found["momentum encoder"].startswith("after step 0: Ranks have different weights")


@pytest.mark.parametrize("way", ["freeze_differently", "freeze_on_one_core", "unfreeze_on_one_core"])
def test_layers_of_different_sizes_that_are_frozen_on_some_cores_raise(differences, way):
    for found in differences:
        assert found[way].startswith("after step 1: Ranks disagree on which parameters require gradients")


def test_layers_that_are_frozen_on_all_cores_train(differences):
    assert {found["freeze_alike"] for found in differences} == {"no error in 3 epochs"}


def test_torch_optimizer_of_a_part_of_the_model_raises(differences):
    message = "of a model on several cores must belong to optimizers of this library, but Adam has some"
    for found in differences:
        assert all(message in one for one in found["half"])
