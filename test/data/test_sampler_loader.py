"""vbs.DataLoader, loaders in place of samplers, rules by name, and other short ways to write a training."""

import inspect

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

DATASET = torch.utils.data.TensorDataset(torch.arange(96.0)[:, None], torch.arange(96) % 3)
OPTIONS = {"minibatch_size": 8, "num_replicas": 1, "rank": 0}


def sgd(model=None):
    return torch.optim.SGD((model or nn.Linear(1, 3)).parameters(), lr=0.1)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 3}, {"shuffle": False}, {"seed": 5}])
def test_loader_yields_what_a_loader_with_a_sampler_yields(options):
    of_sampler = {name: options[name] for name in ("shuffle", "seed") if name in options}
    of_loader = {name: value for name, value in options.items() if name not in of_sampler}
    loader = vbs.DataLoader(DATASET, trace="0:16 2:32", minibatch_size=8, **options)
    sampler = vbs.CustomSampler(DATASET, "0:16 2:32", minibatch_size=8, **of_sampler)
    by_hand = torch.utils.data.DataLoader(DATASET, batch_sampler=sampler, **of_loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert [x.tolist() for x, _ in loader] == [x.tolist() for x, _ in by_hand]
        assert len(loader) == len(by_hand) > 5
    assert loader.sampler is loader.batch_sampler


def test_loader_has_all_arguments_of_the_sampler(caplog):
    own = {"lockstep": True, "verbose": True, "num_replicas": 3, "rank": 0}
    with caplog.at_level("INFO"):
        loader = vbs.DataLoader(DATASET, trace=[16, 24], minibatch_size=8, **own)
    assert loader.sampler.schedule.lockstep and "trace: 1 epochs" in caplog.text
    names = set(inspect.signature(vbs.CustomSampler).parameters)
    assert names - set(inspect.signature(vbs.DataLoader).parameters) == {"dataset_size"}


def test_loader_on_a_core_of_several():
    found = []
    for rank in range(3):
        loader = vbs.DataLoader(DATASET, trace=48, minibatch_size=8, num_replicas=3, rank=rank, shuffle=False)
        found.append([x.flatten().tolist() for x, _ in loader])
    assert sorted(value for core in found for minibatch in core for value in minibatch) == list(range(96))


@pytest.mark.parametrize(("lockstep", "numbers"), [(False, [8, 4]), (True, [8, 8])])
def test_loaders_in_lockstep_have_the_same_number_of_minibatches_on_all_cores(lockstep, numbers):
    loaders = [
        vbs.DataLoader(DATASET, trace=24, minibatch_size=8, num_replicas=2, rank=rank, lockstep=lockstep)
        for rank in range(2)
    ]
    assert [len(list(loader)) for loader in loaders] == numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8}, "`batch_size` must not be given: `trace` and `minibatch_size` determine the minibatches"),
        ({"sampler": [0]}, "`sampler` must not be given"),
        ({"drop_last": True}, "`drop_last` must not be given"),
        ({"in_order": False}, "`in_order` must be True"),
        ({"trace": None}, "`trace` must be given: a path, stages such as '0:64 20:128', batch sizes or a policy"),
        ({"trace": 12}, r"trace: batchsize must be a multiple of 8 \(the minibatch size\), got 12"),
    ],
)
def test_wrong_arguments_of_a_loader_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vbs.DataLoader(DATASET, **{"trace": 16, "minibatch_size": 8, **options})


def test_data_without_a_length_are_refused():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(10))

    with pytest.raises(
        ValueError, match=r"`dataset` must have a length, got Endless: use vbs\.Stream for data without"
    ):
        vbs.DataLoader(Endless(), trace=16, minibatch_size=8)


def loaders():
    stream = vbs.Stream(range(96), trace=16, **OPTIONS)
    sampler = vbs.CustomSampler(DATASET, trace=16, **OPTIONS)
    return {
        "vbs.DataLoader": vbs.DataLoader(DATASET, trace=16, **OPTIONS),
        "DataLoader": torch.utils.data.DataLoader(DATASET, batch_sampler=sampler),
        "DataLoader of a stream": torch.utils.data.DataLoader(stream, batch_size=None),
        "sampler": sampler,
        "stream": stream,
    }


@pytest.mark.parametrize("kind", loaders())
def test_optimizer_takes_a_loader_instead_of_its_sampler(kind):
    loader = loaders()[kind]
    optimizer = vbs.LinearRuleOptimizer(sgd(), loader, ref_batchsize=16)
    source = {"sampler": loader, "stream": loader, "DataLoader of a stream": getattr(loader, "dataset", None)}
    assert optimizer.sampler is source.get(kind, getattr(loader, "batch_sampler", None))


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (
            torch.utils.data.DataLoader(DATASET, batch_size=8),
            r"a DataLoader without one: make it with vbs\.DataLoader\(",
        ),
        (DATASET, "TensorDataset$"),
        ([1, 2], "list$"),
    ],
)
def test_loader_without_a_sampler_of_the_library_is_refused(loader, found):
    message = f"^`sampler` must be a CustomSampler, a Stream or a DataLoader that reads one, got {found}"
    with pytest.raises(ValueError, match=message):
        vbs.Optimizer(sgd(), loader, rule="linear", ref_batchsize=16)


def test_rules_by_name_are_the_rules():
    loader = vbs.DataLoader(DATASET, trace=16, **OPTIONS)
    assert vbs.Optimizer is vbs.CustomOptimizer
    for name, kind in vbs.rules.RULES.items():
        model = nn.Linear(1, 3)
        inner = torch.optim.Adam(model.parameters()) if name in ("adam", "adamscale") else sgd(model)
        if name == "muon":
            if not hasattr(torch.optim, "Muon"):  # before torch 2.9
                continue
            inner = torch.optim.Muon([nn.Parameter(torch.zeros(3, 3))])
        text = f"{name}:64" if name == "legw" else name
        assert type(vbs.Optimizer(inner, loader, rule=text, ref_batchsize=16).rule) is kind
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 3))
    inner = [torch.optim.AdamW(model[0].parameters()), sgd(model[1])]
    both = vbs.Optimizer(inner, loader, rule=["adam:half-life", vbs.rules.RootRule()], ref_batchsize=16).rule
    assert [type(rule) for rule in both.rules] == [vbs.rules.AdamRule, vbs.rules.RootRule]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("linaer", r"`rule` must be one of 'linear', .*, got 'linaer' \(did you mean 'linear'\?\)"),
        ("adam:x", "`form` must be one of "),
        (3, "`rule` must be a Rule or a name such as 'linear', got 3"),
        (vbs.rules.LinearRule, r"`rule` must be a Rule or a name .*LinearRule'>: pass an object, not the class"),
        (["linear", "root"], "`rule`.*2.*1|1.*2"),
    ],
)
def test_wrong_rules_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        vbs.Optimizer(sgd(), vbs.DataLoader(DATASET, trace=16, **OPTIONS), rule=rule, ref_batchsize=16)


MAKERS = [
    lambda **options: vbs.Optimizer(sgd(), vbs.DataLoader(DATASET, trace=16, **OPTIONS), rule="linear", **options),
    lambda **options: vbs.LinearRuleOptimizer(sgd(), vbs.DataLoader(DATASET, trace=16, **OPTIONS), **options),
    lambda **options: vbs.AdaScaleOptimizer(sgd(), vbs.DataLoader(DATASET, trace=16, **OPTIONS), **options),
]


@pytest.mark.parametrize("make", MAKERS)
def test_reference_batch_size_has_two_spellings(make):
    assert make(ref_batchsize=32).ref_batchsize == make(ref_batch_size=32).ref_batchsize == 32
    with pytest.raises(
        ValueError, match="`ref_batchsize` must be given: the batch size at which the settings of `inner`"
    ):
        make()
    with pytest.raises(ValueError, match="`ref_batchsize` and `ref_batch_size` are the same: pass one of them"):
        make(ref_batchsize=32, ref_batch_size=32)
    with pytest.raises(ValueError, match="`ref_batch_size` must be a positive integer, got 0"):
        make(ref_batch_size=0)


def test_constant_optimizer_needs_no_reference_batch_size():
    loader = vbs.DataLoader(DATASET, trace=16, **OPTIONS)
    assert vbs.ConstantOptimizer(sgd(), loader).ref_batchsize == 1
    assert vbs.ConstantOptimizer(sgd(), loader, ref_batch_size=8).ref_batchsize == 8


def test_number_of_updates_of_some_epochs():
    sampler = vbs.CustomSampler(dataset_size=96, trace="0:16 4:32", minibatch_size=8)
    assert [sampler.num_updates(number) for number in (1, 2, 3)] == [5, 8, 11]
    assert [len(sampler.get_epochtrace(epoch)) for epoch in range(3)] == [5, 3, 3]
    with pytest.raises(ValueError, match="`num_epochs` must be a positive integer, got 0"):
        sampler.num_updates(0)
    decided = vbs.CustomSampler(dataset_size=96, trace=vbs.Autoscale(max_batch_size=64), minibatch_size=8)
    with pytest.raises(ValueError, match="a policy decides the number of updates: let schedules depend on samples"):
        decided.num_updates(1)


def test_objects_are_readable():
    loader = vbs.DataLoader(DATASET, trace="0:16 2:32", **OPTIONS)
    sampler = "<CustomSampler of trace: 96 samples, minibatches of 8, core 0 of 1, epoch 0>"
    assert repr(loader.sampler) == sampler
    assert repr(loader) == f"<DataLoader of TensorDataset with {sampler}>"
    optimizer = vbs.Optimizer(sgd(), loader, rule="root", ref_batchsize=16)
    rest = "RootRule(), lr 0.1 at batch size 16, epoch 0, 0 steps done>"
    assert repr(optimizer) == f"<CustomOptimizer of SGD: {rest}"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LinearOptimizer", ": did you mean vbs.LinearRuleOptimizer?"),
        ("dataloader", ": did you mean vbs.DataLoader?"),
        ("AdaScaleRule", ": did you mean vbs.rules.AdaScaleRule?"),
        ("rampup", ": did you mean vbs.traces.rampup?"),
        ("qwertyuiop", ""),
    ],
)
def test_wrong_name_names_the_right_one(name, hint):
    with pytest.raises(AttributeError) as raised:
        getattr(vbs, name)
    assert str(raised.value) == f"variable_batch_size has no attribute {name!r}{hint}"


def test_console_prints_rounded_numbers(capsys):
    record = {"epoch": 0, "step": 1200, "loss": 0.123456, "batch_size": 64, "lr": 1e-5, "factor": 2.0, "accuracy": 0.5}
    record |= {"samples_per_second": 12345.6, "noise_scale": float("nan"), "reason": "probe"}
    vbs.Console()(record)
    vbs.Console(everything=True)({"factor": 2.0})
    line = "epoch 0  step 1,200  loss 0.1235  batch size 64  lr 1e-05  accuracy 0.5"
    assert capsys.readouterr().out == f"{line}  samples per second 12,346  noise scale nan  reason probe\nfactor 2\n"
