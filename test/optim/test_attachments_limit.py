"""epochs(progress=…), (samples=…), (tokens=…): a run ends after the step that reaches its limit, within an epoch."""

import itertools

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

NUM_SAMPLES = 96
X = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(2))
DATA = torch.utils.data.TensorDataset(X, Y)
SIZES = [16, 32, 8]  # epochs of 4 steps (72 samples), of 5 (96), …
BEFORE = [0, *itertools.accumulate(SIZES * 10)]  # samples before each step
FROM = {
    "vbs": lambda how, **options: vbs.DataLoader(DATA, **how, **options),
    "torch": lambda how, **options: torch.utils.data.DataLoader(
        DATA, batch_sampler=vbs.CustomSampler(DATA, **how), **options
    ),
    "stream": lambda how, **options: torch.utils.data.DataLoader(
        vbs.Stream(samples, **how), batch_size=None, **options
    ),
}


def samples():
    return itertools.cycle(zip(X, Y, strict=True))


def make(source="vbs", *, rule="linear", trace=SIZES, on_end="cycle", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    how = {"trace": trace, "minibatch_size": 8, "on_end": on_end}
    loader = FROM[source](how, **options)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, loader, vbs.Optimizer(inner, loader, rule=rule, ref_batchsize=16, model=model)


def train(model, loader, optimizer, epochs, *, weight=None, after=lambda: None):
    """Train; returns the epochs, each with the number of its steps."""
    done = []
    for epoch in epochs:
        before = optimizer.steps_done
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step(weight=weight)
            after()
        done.append((epoch, optimizer.steps_done - before))
    return done


def states_after_steps(number, **options):
    """The state and the progress after each step of a run without a limit."""
    model, loader, optimizer = make(**options)
    found = [(None, 0.0)]
    while optimizer.steps_done < number:
        optimizer.set_epoch(optimizer.epoch + (optimizer.steps_done > 0))
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            if optimizer.step():
                found.append(({name: value.clone() for name, value in model.state_dict().items()}, optimizer.progress))
                if optimizer.steps_done == number:
                    break
    return found


def is_same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


# -------------------------------------------------------------------------------------------------------- where it ends


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [(0, 1)]),
        (48, [(0, 2)]),
        (49, [(0, 3)]),
        (72, [(0, 4)]),
        (73, [(0, 4), (1, 1)]),
        (200, [(0, 4), (1, 5), (2, 2)]),
    ],
)
def test_run_ends_after_the_step_that_reaches_the_samples(limit, expected):
    model, loader, optimizer = make()
    assert train(model, loader, optimizer, optimizer.epochs(samples=limit)) == expected
    assert optimizer.samples_done == next(total for total in BEFORE if total >= limit)
    assert list(optimizer.epochs(samples=limit)) == []


def test_run_ends_with_its_epochs_if_these_come_first():
    model, loader, optimizer = make()
    assert train(model, loader, optimizer, optimizer.epochs(1, samples=1000)) == [(0, 4)]


def test_tokens_are_the_sum_of_the_weights():
    model, loader, optimizer = make()
    train(model, loader, optimizer, optimizer.epochs(tokens=31), weight=5)  # 2, 4, 1 minibatches a step
    assert (optimizer.steps_done, optimizer.weight_done) == (3, 35)


def test_tokens_without_weights_raise():
    model, loader, optimizer = make()
    with pytest.raises(ValueError, match="a limit of `tokens` needs the number of tokens of each minibatch"):
        train(model, loader, optimizer, optimizer.epochs(tokens=31))


@pytest.mark.parametrize(
    ("source", "num_workers"), [("vbs", 0), ("vbs", 2), ("torch", 0), ("torch", 2), ("stream", 0), ("stream", 2)]
)
def test_run_ends_at_the_progress_of_adascale_and_minibatches_read_ahead_change_nothing(source, num_workers, recwarn):
    options = {"rule": "adascale", "source": source}
    expected = states_after_steps(7, **options)
    for steps in (3, 6):
        limit = (expected[steps - 1][1] + expected[steps][1]) / 2
        model, loader, optimizer = make(num_workers=num_workers, **options)
        train(model, loader, optimizer, optimizer.epochs(progress=limit))
        assert optimizer.steps_done == steps
        assert optimizer.progress == expected[steps][1] >= limit > expected[steps - 1][1]
        assert is_same(model.state_dict(), expected[steps][0])
    assert not recwarn


def test_closure_of_a_minibatch_that_was_read_ahead_changes_nothing():
    model, loader, optimizer = make("torch", num_workers=2)
    expected = states_after_steps(3)[3][0]
    for _ in optimizer.epochs(samples=50):
        for x, y in loader:

            def closure(x=x, y=y):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
    assert is_same(model.state_dict(), expected)


def test_another_optimizer_of_the_sampler_runs_the_last_minibatch_too():
    loader = vbs.DataLoader(DATA, SIZES, minibatch_size=8, on_end="cycle")
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    first, second = (
        vbs.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), loader, rule="linear", ref_batchsize=16, model=model)
        for model in models
    )
    for _ in first.epochs(samples=50):
        for x, y in loader:
            sum(nn.functional.cross_entropy(model(x), y) for model in models).backward()
            first.step()
            second.step()
    assert (first.steps_done, second.steps_done) == (3, 3)


def test_trace_that_is_too_short_is_reported(caplog):
    model, loader, optimizer = make(on_end="stop")
    train(model, loader, optimizer, optimizer.epochs(samples=100))
    assert caplog.messages == ["trace ended before reaching samples=100, after 56 samples, progress 3.5"]


def test_limits_are_checked():
    _, _, optimizer = make()
    for name in ("progress", "samples", "tokens"):
        with pytest.raises(ValueError, match=f"`{name}` must be a positive number, got 0"):
            optimizer.epochs(**{name: 0})


# -------------------------------------------------------------------------------------------------------------- resumed


def run_with_checkpoint(directory, limit, *, attaches=True, **options):
    model, loader, optimizer = make(rule="adascale", **options)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer)
    if attaches:
        optimizer.attach(checkpoint)
    epochs = optimizer.epochs(samples=limit) if attaches else checkpoint.epochs(samples=limit)
    done = train(model, loader, optimizer, epochs, after=lambda: None if attaches else checkpoint.step())
    return done, {**model.state_dict(), "progress": torch.tensor(optimizer.progress)}


@pytest.mark.parametrize(("attaches", "num_workers"), [(True, 0), (False, 0), (True, 2)])
def test_run_that_reached_its_limit_resumes_with_a_larger_one(tmp_path, attaches, num_workers):
    options = {"attaches": attaches, "num_workers": num_workers}
    done, expected = run_with_checkpoint(None, 200, **options)
    assert done == [(0, 4), (1, 5), (2, 2)]
    found = []
    for limit in (40, 40, 72, 73, 73, 200):  # 72 is the end of an epoch
        steps, state = run_with_checkpoint(tmp_path, limit, **options)
        found.append(steps)
    assert found == [[(0, 2)], [], [(0, 2)], [(1, 1)], [], [(1, 4), (2, 2)]]
    assert is_same(state, expected)
    sizes = [int(row.split(",")[1]) for row in (tmp_path / "executed.csv").read_text().splitlines()[2:]]
    assert sizes == (SIZES * 4)[: len(sizes)]
    assert sum(sizes) == 216


def ends_on_cores():
    model, loader, optimizer = make(rule="adascale")
    done = train(model, loader, optimizer, optimizer.epochs(progress=4.5))
    return done, optimizer.steps_done, optimizer.progress, model[0].weight.detach()


def test_all_cores_end_at_the_same_step(on_cores):
    alone = ends_on_cores()
    first, second = on_cores(2, ends_on_cores)
    assert first[:3] == second[:3]
    assert first[:2] == alone[:2]
    assert torch.equal(first[3], second[3])
