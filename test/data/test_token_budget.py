import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import variable_batch_size as vbs

LENGTHS = [5, 2, 8, 2, 3, 7, 2, 2, 16, 1, 1, 4, 4, 9, 12, 3, 3, 3, 6, 10] * 3


def budget_of(trace, *, cores=1, rank=0, **options):
    return vbs.TokenBudget(LENGTHS, trace, tokens=16, num_replicas=cores, rank=rank, **options)


def steps_on(cores, trace, *, epoch=0, first_step=0, **options):
    """The minibatches of each step, in the order of the step, from those of all cores."""
    budgets = [budget_of(trace, cores=cores, rank=rank, **options) for rank in range(cores)]
    for budget in budgets:
        budget.set_epoch(epoch, first_step)
    read, schedule = [list(budget) for budget in budgets], budgets[0].schedule
    assert [len(own) for own in read] == [len(budget) for budget in budgets]
    found = []
    for step in schedule.steps(epoch)[first_step:]:
        own = [[read[rank].pop(0) for _ in range(schedule.rounds_for(step, rank))] for rank in range(cores)]
        number = schedule.num_minibatches(step)
        found.append([own[place % cores][place // cores] for place in range(number)])
        for rank in range(cores):  # padding is a copy of another minibatch of the step
            assert all(minibatch in found[-1] for minibatch in own[rank])
    return found


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(2, 5),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
)
@settings(max_examples=25)
def test_steps_have_the_same_minibatches_on_any_number_of_cores(numbers, cores, packed, lockstep, epoch):
    options = {"packed": packed, "lockstep": lockstep, "on_end": "cycle", "epoch": epoch}
    trace = [16 * number for number in numbers]
    expected = steps_on(1, trace, **options)
    assert steps_on(cores, trace, **options) == expected
    samples = list(itertools.chain.from_iterable(itertools.chain.from_iterable(expected)))
    assert len(samples) == len(set(samples))
    skipped = len(expected) // 2
    assert steps_on(cores, trace, first_step=skipped, **options) == expected[skipped:]


def test_a_step_has_as_many_minibatches_as_its_tokens_have_budgets():
    steps = steps_on(2, [16, 48, 32, 80])
    assert [len(minibatches) for minibatches in steps] == [1, 3, 2, 5]


def test_an_epoch_takes_the_steps_that_fit():
    budget = budget_of([64] * 100)
    number = budget.plan.num_minibatches
    assert len(budget.get_epochtrace(0)) == number // 4
    assert budget.schedule.steps(1).start == number // 4


def test_loader_with_workers_yields_the_same():
    budget = budget_of("0:32 96:64")
    options = {"batch_sampler": budget, "collate_fn": list, "num_workers": 2}
    found = list(torch.utils.data.DataLoader(range(len(LENGTHS)), **options))
    assert found == list(budget_of("0:32 96:64"))


@pytest.mark.parametrize("size", [59, 61])
def test_a_data_set_of_another_length_raises(size):
    loader = torch.utils.data.DataLoader(range(size), batch_sampler=budget_of(32))
    with pytest.raises(ValueError, match=f"`lengths` must have one number for each of the {size} samples .* got 60"):
        next(iter(loader))


def test_order_depends_on_the_seed_and_the_epoch():
    one, other, later = budget_of(16), budget_of(16, seed=1), budget_of(16)
    later.set_epoch(1)
    assert len({str(list(budget)) for budget in (one, other, later)}) == 3


def test_without_shuffling_samples_are_sorted_by_length():
    samples = list(itertools.chain.from_iterable(budget_of(16, shuffle=False, max_shapes=200)))
    assert [LENGTHS[sample] for sample in samples] == sorted(LENGTHS)


def optimizer_of(trace, *, rule="linear", budget_options=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    budget = budget_of(trace, **(budget_options or {}))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return vbs.CustomOptimizer(inner, budget, rule=rule, ref_batchsize=32, model=model, **options), model


def run(optimizer, model, num_epochs=1):
    for _ in optimizer.epochs(num_epochs):
        for samples in optimizer.sampler:
            lengths = torch.tensor([[float(LENGTHS[sample])] for sample in samples])
            model(lengths).sum().backward()
            optimizer.step(weight=int(lengths.sum()))


def test_a_step_without_a_weight_raises():
    optimizer, model = optimizer_of(32)
    for _ in optimizer.sampler:
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(ValueError, match=r"`weight` must be passed to step\(\): minibatches of a TokenBudget"):
            optimizer.step()
        break


def test_rules_use_the_tokens_of_the_trace_and_weights_count_those_of_the_samples(caplog):
    optimizer, model = optimizer_of(64, log_steps=5)
    with caplog.at_level(logging.INFO):
        run(optimizer, model)
    assert optimizer.factor() == 2.0
    assert optimizer.samples_done == 64 * optimizer.steps_done
    used = steps_on(1, 64)
    assert optimizer.weight_done == sum(LENGTHS[sample] for step in used for own in step for sample in own)
    assert "batch size 64, learning rate 0.02, 320 tokens in all" in caplog.text


def test_a_policy_decides_tokens():
    optimizer, model = optimizer_of(lambda situation: 16 * (1 + situation.steps_done // 5))
    run(optimizer, model, num_epochs=2)
    sizes = optimizer.sampler.schedule.trace.sizes.tolist()
    assert set(sizes) >= {16, 48}
    replayed, own = optimizer_of(sizes[: optimizer.steps_done])
    run(replayed, own, num_epochs=2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own.parameters(), strict=True))


def test_norms_of_samples_are_refused():
    with pytest.raises(ValueError, match="`measure_noise` must not be 'norm layers' with a TokenBudget: its minibatch"):
        optimizer_of(32, measure_noise="norm layers")


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([16, 24], "batchsize must be a multiple of 16 .*, got 24"),
        ([16_000], r"batchsize must be at most \d+ \(all full minibatches in \d+ tokens\), got 16000"),
        ("", "`trace` must be given"),
    ],
)
def test_wrong_traces_raise(trace, message):
    with pytest.raises(ValueError, match=message):
        budget_of(trace)


def test_epochs_beyond_the_trace_raise_in_tokens():
    with pytest.raises(ValueError, match=r"holds 1 epoch of \d+ tokens, got epoch 1"):
        budget_of([16, 32]).set_epoch(1)


def test_what_its_minibatches_depend_on_is_compared_when_a_run_resumes():
    before = budget_of(16).description
    assert before.keys() == {"lengths", "tokens", "packed", "max_shapes", "multiple_of", "too_long", "seed", "shuffle"}
    other = vbs.TokenBudget([*LENGTHS[:-1], 11], 16, tokens=16, num_replicas=1, rank=0).description
    assert {name for name in before if before[name] != other[name]} == {"lengths"}


def test_the_readable_description_of_a_budget():
    text = repr(budget_of(16, cores=2, rank=1))
    assert text.startswith("<TokenBudget of")
    assert "60 samples in" in text
    assert "minibatches of 16 tokens, core 1 of 2, epoch 0>" in text
