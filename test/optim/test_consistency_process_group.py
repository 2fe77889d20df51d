"""A run on a process group: several independent runs, and tensor parallelism within each core."""

import pytest
import sharded_models
import torch
import torch.distributed as dist
from sharded_models import Transformer, in_one_block
from torch.distributed.device_mesh import init_device_mesh

import variable_batch_size as vbs

SPLIT = ["root", "adascale"]  # runs with tensor parallelism: with clipping, and with measured noise


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return "no error"


def sampler_of(**options):
    return vbs.CustomSampler(dataset_size=8, trace=[4], minibatch_size=4, **options)


def in_pairs():
    """Two concurrent runs, on the even and on the odd processes; and one whose cores are pairs of processes."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    # the seeds differ, so that interference between the runs would be visible
    separate = sharded_models.train(
        sharded_models.plain, Transformer, "adascale", process_group=own, seed=dist.get_rank() % 2
    )
    metrics = vbs.Metrics("rank", device="cpu", process_group=own)
    metrics.add(rank=dist.get_rank())
    buffer = torch.nn.BatchNorm1d(1)
    buffer.running_mean.fill_(dist.get_rank())
    vbs.share_buffers(buffer, process_group=own)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return {
        "separate": separate,
        "sum": metrics.read(),
        "buffer": float(buffer.running_mean),
        "cores": [(s.rank, s.num_replicas) for s in (sampler_of(), sampler_of(process_group=mesh["model"]))],
        "errors": [
            error_of(sampler_of, process_group=groups[1 - dist.get_rank() % 2]),
            error_of(sampler_of, process_group=mesh),
            error_of(sampler_of, process_group="data"),
        ],
        "split": sharded_models.all_of([("split", in_one_block, name) for name in SPLIT]),
        "decided": [decided(way) for way in (sharded_models.split, sharded_models.sharded_and_split)],
        "written": written_by(),
        "joined": joined_later(),
    }


def decided(spread):
    """Seeded differently on each process, with a policy and dropout: processes that share samples must agree."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model, options = spread(in_one_block())
    sampler = vbs.CustomSampler(dataset_size=48, trace=sharded_models.erratic(), minibatch_size=4, **options)
    inner = sharded_models.sgd(model.parameters())
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=8, model=model, seed_minibatches=True)
    x, y = sharded_models.data()
    sizes = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            answers = torch.nn.functional.dropout(model(x[indices]), 0.3)
            torch.nn.functional.cross_entropy(answers, y[indices]).backward()
            if optimizer.step():
                sizes.append(optimizer.batch_size)
    return sharded_models.state_of(model), sizes


def joined_later():
    """A layer initialized independently on each process, added to a model that is sharded over pairs of processes."""
    model, options = sharded_models.split(sharded_models.model_of(in_one_block))
    sampler = sampler_of(**options)
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model)
    late = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))
    optimizer.add_param_group({"params": [late]})
    return late.tolist()


def written_by():
    """A checkpoint and a log of a run whose cores are pairs of processes: each is written once."""
    model, options = sharded_models.split(sharded_models.model_of(in_one_block))
    sampler = vbs.CustomSampler(dataset_size=48, trace=[8] * 4, minibatch_size=4, **options)
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model)
    records = []
    log = vbs.Log(optimizer, every=2, to=[records.append])
    x, y = sharded_models.data()
    for indices in sampler:
        loss = sharded_models.loss_of(model, x[indices], y[indices])
        loss.backward()
        optimizer.step()
        log.step(loss)
    return records


@pytest.fixture(scope="module")
def results(on_cores):
    return on_cores(4, in_pairs)


def assert_same(found, expected, *, tolerance=1e-5):
    assert not isinstance(found, str), found
    for name, value in expected["state"].items():
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(found["state"][name], value, rtol=0, atol=tolerance, msg=name)
    assert found["updates"] == expected["updates"]
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.tensor(found["noise"]), torch.tensor(expected["noise"]), rtol=1e-4, atol=1e-5)


def test_process_groups_train_independently(results):
    for rank, result in enumerate(results):
        expected = sharded_models.train(sharded_models.plain, Transformer, "adascale", seed=rank % 2)
        assert_same(result["separate"], expected)
        assert result["sum"] == {"rank": 2.0 if rank % 2 == 0 else 4.0}
        assert result["buffer"] == rank % 2


def test_without_a_group_all_processes_are_the_cores(results):
    assert [result["cores"] for result in results] == [[(rank, 4), (rank % 2, 2)] for rank in range(4)]


def test_group_without_this_process_raises(results):
    for result in results:
        other, grid, name = result["errors"]
        assert other == "`process_group` must contain this process, got a group of other processes"
        assert "as mesh[\"data\"], got a mesh with dimensions ('data', 'model')" in grid
        assert name == "`process_group` must be a ProcessGroup or a DeviceMesh, got str"


def test_a_group_needs_torch_distributed():
    with pytest.raises(ValueError, match=r"`process_group` must be None if torch\.distributed is not initialized"):
        sampler_of(process_group="data")


@pytest.mark.parametrize("name", SPLIT)
def test_tensor_parallel_pairs_train_as_one_plain_process(results, name):
    expected = sharded_models.train(sharded_models.plain, in_one_block, name)
    for result in results:
        assert_same(result["split"]["split", "in_one_block", name], expected)


def test_one_process_of_all_writes_the_log(results):
    records = [result["written"] for result in results]
    assert [len(own) for own in records] == [2, 0, 0, 0]


def test_added_parameter_group_is_broadcast_from_the_first_process(results):
    assert [result["joined"] for result in results] == [[0.0, 0.0]] * 4


@pytest.mark.parametrize("way", [0, 1], ids=["split", "sharded and split"])
def test_processes_that_share_samples_have_equal_parameters_random_numbers_and_decisions(results, way):
    state, sizes = results[0]["decided"][way]
    assert len(set(sizes)) > 1
    for result in results[1:]:
        assert result["decided"][way][1] == sizes
        assert sharded_models.largest_difference(result["decided"][way][0], state) < 1e-6
    if way == 0:  # each process has initialized its shard of a sharded model, too
        expected, plain_sizes = decided(sharded_models.plain)
        assert sizes == plain_sizes
        assert sharded_models.largest_difference(state, expected) < 1e-5
