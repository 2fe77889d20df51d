"""Minibatches that grow with the steps: the same samples in a step, so the same weights, and fewer minibatches."""

import pytest
import torch
from small_runs import classified, network, sgd, weights_of
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs

TRACE = [8, 16, 24, 32, 48, 64, 128, 96]
DATA = classified(500, 6, num_classes=3)


def train(largest, trace=TRACE, rule="linear", steps=8, is_weighted=False, **options):
    """The weights, the sizes of this core's minibatches, and on core 0 the mean losses."""
    model = network(6, 8, 3)
    sampler = vbs.CustomSampler(DATA, trace=trace, minibatch_size=8, max_minibatch_size=largest)
    optimizer = vbs.Optimizer(
        sgd(model, lr=0.01, momentum=0.9), sampler, ref_batchsize=16, rule=rule, model=model, **options
    )
    records, sizes = [], []
    optimizer.attach(vbs.Log(optimizer, to=[records.append], every=1))
    for x, y in DataLoader(DATA, batch_sampler=sampler):
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        weights = 1 + y if is_weighted else torch.full_like(losses, 1 / len(y))
        loss = losses @ weights.to(losses)
        loss.backward()
        optimizer.step(loss=loss, weight=weights.sum() if is_weighted else None)
        sizes.append(len(x))
        if optimizer.steps_done == steps:
            break
    losses = [record["loss"] for record in records if "loss" in record]
    return weights_of(model), sizes, losses


@pytest.mark.parametrize("is_weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_weights_and_losses_are_those_of_small_minibatches(on_cores, cores, is_weighted):
    small = train(None, is_weighted=is_weighted)
    of_cores = on_cores(cores, train, 32, TRACE, "linear", 8, is_weighted)
    assert of_cores[0][2] == pytest.approx(small[2], rel=1e-6)
    for weights, sizes, *_ in of_cores:
        assert max(sizes) == 32
        torch.testing.assert_close(weights, small[0], rtol=1e-12, atol=1e-14)


def test_cores_run_fewer_minibatches():
    assert train(None)[1] == [8] * (sum(TRACE) // 8)
    assert train(16)[1] == [8, 8, 8, 8, 8, 8] + [16] * (sum(TRACE[3:]) // 16)
    assert train(64)[1] == [8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 16, 32, 32, 64, 64, 32, 32, 32]


def test_noise_of_larger_minibatches_has_the_same_mean():
    """Of per-sample gradients, whatever the minibatches: over many draws from one state of the weights."""

    x, y = DATA.tensors

    def noise(largest, seed):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        sampler = vbs.CustomSampler(DATA, trace=64, minibatch_size=8, max_minibatch_size=largest, seed=seed)
        optimizer = vbs.Optimizer(sgd(model, lr=0.0), sampler, ref_batchsize=16, rule="linear", measure_noise=True)
        for minibatch in sampler:
            nn.functional.cross_entropy(model(x[minibatch]), y[minibatch]).backward()
            if optimizer.step():
                return optimizer.noise.variance
        raise AssertionError

    small, large = (torch.tensor([noise(largest, seed) for seed in range(80)]) for largest in (None, 32))
    error = (small.var() / 80 + large.var() / 80).sqrt()
    assert abs(small.mean() - large.mean()) < 3 * error
    assert error < 0.15 * small.mean()


def test_stream_has_the_same_minibatches():
    how = {"trace": TRACE, "minibatch_size": 8, "max_minibatch_size": 32, "num_replicas": 3}
    for rank in range(3):
        sampler = vbs.CustomSampler(dataset_size=500, shuffle=False, rank=rank, **how)
        stream = vbs.Stream(range(500), rank=rank, dataset_size=500, **how)
        assert [part.tolist() for part in stream] == list(sampler)
    with pytest.raises(ValueError, match="`max_minibatch_size` must be None with `is_sharded`"):
        vbs.Stream(range(500), is_sharded=True, rank=0, **how)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("`exact`", {"exact": True, "seed_minibatches": False}),
        ("`seed_minibatches`", {"seed_minibatches": True}),
        ("a rule that sums gradients", {"rule": "linear_momentum"}),  # momentum is in units of the minibatch
    ],
)
def test_sizes_that_depend_on_cores_are_refused_where_bits_must_not(name, options):
    with pytest.raises(ValueError, match=f"with {name}: the size of minibatches would depend on the number of cores"):
        train(32, **options)
    train(15, **options)  # less than twice the smallest


def differ_in_the_largest():
    train(32 if torch.distributed.get_rank() else None)


def test_cores_with_different_largest_minibatches_are_refused(on_cores):
    message = "must have the same settings, but differ in max_minibatch_size: None on rank 0, 32 on rank 1"
    with pytest.raises(Exception, match=message):
        on_cores(2, differ_in_the_largest)


def test_a_policy_chooses_larger_minibatches_with_the_batch_size():
    policy = vbs.policies.FunctionPolicy(lambda now: 16 if now.steps_done < 2 else 64, every=1, lead=1)
    sizes = train(32, trace=policy, steps=10)[1]
    assert sizes == [8] * sizes.count(8) + [32] * sizes.count(32)
    assert sizes.count(32) >= 4


def test_autoscale_takes_less_time_with_larger_minibatches():
    """With a clock by which a minibatch takes 1 s, a sample 0.01 s and an update 4 s."""

    def seconds_to(progress, largest):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        policy = vbs.Autoscale(max_batch_size=256, every=6, lead=1)
        sampler = vbs.CustomSampler(DATA, trace=policy, minibatch_size=8, max_minibatch_size=largest)
        optimizer = vbs.Optimizer(sgd(model, lr=0.05), sampler, ref_batchsize=16, rule="adascale", model=model)
        (x, y), clock, sizes = DATA.tensors, [0.0], set()
        optimizer._driver.clock = lambda: clock[0]
        for _ in optimizer.epochs(1000):
            for minibatch in sampler:
                nn.functional.cross_entropy(model(x[minibatch]), y[minibatch]).backward()
                clock[0] += 1 + 0.01 * len(minibatch) + (4 if optimizer._cursor.next.is_last else 0)
                sizes.add(len(minibatch))
                optimizer.step()
                if optimizer.progress > progress:
                    return clock[0], sizes
        raise AssertionError

    (alone, _), (together, sizes) = (seconds_to(400, largest) for largest in (None, 64))
    assert sizes <= {8, 16, 32, 64}
    assert together < 0.7 * alone
