"""Promise: a run that is stopped anywhere and resumed equals the uninterrupted run."""

import random
from collections import Counter

import pytest
import stoppable_run
from stoppable_run import MINIBATCH, NUM_EPOCHS, NUM_SAMPLES, NUM_STEPS, SIZES, Session, Settings, Stopped

import variable_batch_size as vbs

BACKENDS = ["gloo", pytest.param("xla", marks=pytest.mark.xla)]

WAYS = [
    Settings(),
    Settings(rule="momentum", every_steps=3),
    Settings(rule="adascale", options={"smooth_steps": 4}),
    Settings(rule="adamscale", options={"clip_grad_norm": 0.5}, every_steps=2),
    Settings(dropout=0.5, noise=True, options={"max_factor": 2.0}),
]
DROPOUT = Settings(dropout=0.5)


def stop_points(number, rng):
    """Completed steps, and lost minibatches of the next step, from the first to beyond the last."""
    sizes = [*SIZES[:NUM_STEPS], MINIBATCH]
    steps = [rng.randrange(NUM_STEPS + 1) for _ in range(number)]
    return [(step, rng.randrange(sizes[step] // MINIBATCH)) for step in steps]


STOPS = list(zip(stop_points(25, random.Random(0)), WAYS * 5, strict=True))
QUICK, LONG = STOPS[:16], STOPS[16:]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    found = {}

    def result(settings):
        key = str(settings)
        if key not in found:
            found[key] = stoppable_run.run(tmp_path_factory.mktemp("whole"), settings)
        return found[key]

    return result


def check_same(result, expected):
    for part in ("model", "optimizer", "samples", "drawn"):
        assert stoppable_run.same(result[part], expected[part]), part


def test_stop_points_cover_all_cases():
    stops = [stop for stop, _ in QUICK]
    assert sum(minibatch > 0 for _, minibatch in stops) > 8
    assert sum(minibatch == 0 for _, minibatch in stops) > 4
    assert len({step for step, _ in stops}) > 12


@pytest.mark.parametrize(
    ("stop_at", "settings"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]
)
def test_to_the_last_bit(tmp_path, never_stopped, stop_at, settings):
    check_same(stoppable_run.run_and_stop(tmp_path, stop_at, settings), never_stopped(settings))


@pytest.mark.parametrize("step", [9, 10, 18, NUM_STEPS])
def test_to_the_last_bit_at_the_ends_of_epochs(tmp_path, never_stopped, step):
    settings = Settings(dropout=0.5, noise=True)
    check_same(stoppable_run.run_and_stop(tmp_path, (step, 0), settings), never_stopped(settings))


def test_to_the_last_bit_when_stopped_repeatedly(tmp_path, never_stopped):
    samples = {}
    for stop_at in [(2, 1), (2, 3), (9, 0), (10, 5), (21, 1)]:
        session = Session(tmp_path, DROPOUT)
        with pytest.raises(Stopped):
            session.train(stop_at=stop_at)
        samples |= session.samples
    result = stoppable_run.run(tmp_path, DROPOUT)
    check_same({**result, "samples": samples | result["samples"]}, never_stopped(DROPOUT))


def test_to_the_last_bit_with_loader_workers_that_prefetch(tmp_path, never_stopped):
    settings = Settings(dropout=0.5, num_workers=2)
    for number, stop_at in enumerate([(4, 1), (15, 0)]):
        check_same(stoppable_run.run_and_stop(tmp_path / str(number), stop_at, settings), never_stopped(settings))


def test_every_sample_of_an_epoch_is_used_once(tmp_path):
    schedule = vbs.Schedule(vbs.Trace.of(SIZES), dataset_size=NUM_SAMPLES, minibatch_size=MINIBATCH)
    samples = stoppable_run.run_and_stop(tmp_path, (11, 1), Settings(num_workers=1, every_steps=4))["samples"]
    for epoch in range(NUM_EPOCHS):
        steps = schedule.steps(epoch)
        counts = Counter(number for (of, _), numbers in samples.items() if of == epoch for number in numbers)
        assert set(counts.values()) == {1}
        assert len(counts) == schedule.samples_before(steps.stop) - schedule.samples_before(steps.start)
        assert [step for of, step in sorted(samples) if of == epoch] == list(range(1, len(steps) + 1))


def weights(result):
    return {name: value for name, value in result["model"].items() if "running" not in name and "tracked" not in name}


@pytest.mark.parametrize("backend", BACKENDS)
def test_to_the_last_bit_on_two_cores(long_runs_on, backend):
    results, _ = long_runs_on(backend)
    for rank, result in enumerate(results):
        for resumed in result["resumed"]:
            parts = ("model", "optimizer", "samples") if rank == 0 else ("optimizer", "samples")
            for part in parts:
                assert stoppable_run.same(resumed[part], result["dropout"][part]), f"{part} on core {rank}"
            assert stoppable_run.same(weights(resumed), weights(result["dropout"]))
    assert not stoppable_run.same(weights(results[0]["dropout"]), weights(results[0]["whole"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_started_on_one_core_resumes_on_two(long_runs_on, never_stopped, backend):
    for result in long_runs_on(backend)[0]:
        assert (
            stoppable_run.largest_difference(result["from alone"]["model"], never_stopped(Settings())["model"]) < 1e-5
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_started_on_two_cores_resumes_on_one(long_runs_on, never_stopped, backend):
    _, directory = long_runs_on(backend)
    result = stoppable_run.run(directory / "left")
    assert stoppable_run.largest_difference(result["model"], never_stopped(Settings())["model"]) < 1e-5
    assert min(result["samples"]) == (1, 3)  # 12 steps were completed before, 10 of them in epoch 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_cores_use_the_samples_of_one_core(long_runs_on, never_stopped, backend):
    results, _ = long_runs_on(backend)
    for resumed in zip(*(result["resumed"] for result in results), strict=True):
        for step, numbers in never_stopped(Settings())["samples"].items():
            assert sorted(number for core in resumed for number in core["samples"][step]) == sorted(numbers)
