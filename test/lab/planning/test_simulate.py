"""simulate: against sums by hand and a search over all fixed batch sizes."""

import math

import numpy as np
import pytest

import variable_batch_size as vbs
from variable_batch_size.lab.planning.profile import Measured
from variable_batch_size.lab.planning.simulate import simulate_with_ends

REF, MINIBATCH = 128, 32


def profile(accumulating=1.0, updating=2.0, cores=(1, 2, 4, 8), extrapolates=False):
    rows = tuple(Measured(1, number, MINIBATCH, accumulating, updating + 0.1 * (number - 1)) for number in cores)
    return vbs.planning.Profile(rows, extrapolates=extrapolates)


def simulate(policy, *, noise=1000.0, cores=4, progress=100, **options):
    options = {"profile": profile(), "availability": vbs.planning.Availability.constant(cores), **options}
    curve = noise if callable(noise) else vbs.planning.NoiseCurve.constant(noise)
    return vbs.planning.simulate(
        policy, noise=curve, minibatch_size=MINIBATCH, ref_batchsize=REF, progress=progress, **options
    )


def fixed(size):
    return lambda situation: size


def test_fixed_batch_by_hand():
    run = simulate(fixed(512), price=2.0)
    worth = vbs.rules.Noise(1000.0, 1.0).gain(512, REF)
    assert run.updates == math.ceil(100 / worth)
    assert run.samples == 512 * run.updates
    assert run.progress == pytest.approx(worth * run.updates)
    assert run.seconds == pytest.approx(run.updates * (3 * 1.0 + 2.3))
    assert run.device_seconds == pytest.approx(4 * run.seconds)
    assert run.cost == pytest.approx(2 * 4 * run.seconds / 3600)
    assert list(run.trace) == [512] * run.updates
    assert run.restarts == 0


def test_current_step_is_lost_when_cores_change():
    availability = vbs.planning.Availability.of_recording(vbs.traces.Recording.from_counts([0, 10, 20], [4, 2]))
    run = simulate(fixed(128), availability=availability, progress=7)
    # 4 cores: 2.3 s a step, 4 of them in 10 s; 2 cores: depth 2, 3.1 s, 3 in 10 s
    assert (run.updates, run.seconds, run.restarts) == (7, pytest.approx(10 + 3 * 3.1), 1)
    assert [(moment.cores, moment.seconds) for moment in run.moments[:-1]] == [(4, 0), (2, 10)]
    slow = simulate(fixed(128), availability=availability, progress=7, restart_seconds=5)
    # 2 cores have 5 s left for 1 step, then 4 cores again 5 s for 2
    assert (slow.updates, slow.seconds, slow.restarts) == (7, pytest.approx(20 + 5 + 2 * 2.3), 2)
    assert slow.device_seconds == pytest.approx(10 * 4 + 10 * 2 + (5 + 2 * 2.3) * 4)


def test_time_without_cores_passes_and_costs_nothing():
    availability = vbs.planning.Availability.of_recording(
        vbs.traces.Recording.from_counts([0, 10, 110, 120], [4, 0, 4])
    )
    run = simulate(fixed(128), availability=availability, progress=6)
    assert (run.seconds, run.device_seconds) == (pytest.approx(110 + 2 * 2.3), pytest.approx(4 * (10 + 2 * 2.3)))


def test_spans_too_short_for_a_step_are_rejected():
    availability = vbs.planning.Availability.of_recording(vbs.traces.Recording.from_counts([0, 1, 2], [4, 2]))
    with pytest.raises(ValueError, match="no step fits between two changes of the number of cores"):
        simulate(fixed(128), availability=availability)


def test_policy_receives_the_situation_of_a_run():
    seen = []

    def decide(situation):
        seen.append(situation)
        return 128 * (1 + len(seen) % 2)

    simulate(vbs.policies.FunctionPolicy(decide, every=10, lead=5), progress=60)
    assert [found.steps_done for found in seen[:4]] == [0, 10, 20, 30]
    assert [found.batch_size for found in seen[:4]] == [None, 256, 128, 256]
    assert seen[0].noise_scale is None
    assert seen[1].noise_scale == pytest.approx(1000)
    assert seen[1].seconds_updating is None
    assert (seen[2].seconds_accumulating, seen[2].seconds_updating) == (pytest.approx(1.0), pytest.approx(2.3))


def test_autoscale_grows_to_the_best_fixed_batch_and_stays_there():
    run = simulate(vbs.Autoscale(max_batch_size=8192), noise=20_000.0, progress=2000)
    times = {"accumulating": 1.0, "updating": 2.3}
    goodput = vbs.policies.Goodput(cores=4, minibatch_size=MINIBATCH, ref_batchsize=REF, noise_scale=20_000.0, **times)
    best = goodput(goodput.best(range(4, 257)))
    assert goodput(run.trace[-1] // MINIBATCH) > best / 1.05
    assert run.trace[0] == 128


def random_case(seed, progress):
    """A profile, growing noise, and cores."""
    draws = np.random.RandomState(seed)
    cores = int(draws.choice([1, 2, 4, 8]))
    accumulating = float(np.exp(draws.uniform(-6, 1)))
    overhead = accumulating * float(np.exp(draws.uniform(-2, 3)))
    row = Measured(1, cores, MINIBATCH, accumulating, accumulating + overhead)
    start = float(np.exp(draws.uniform(2, 8)))
    noise = vbs.planning.NoiseCurve([0.0, progress], [start, start * float(np.exp(draws.uniform(0, 4)))])
    return {"profile": vbs.planning.Profile((row,)), "noise": noise, "cores": cores, "progress": progress}


LARGEST = 8192


@pytest.mark.parametrize(("num_cases", "progress"), [(8, 5_000), pytest.param(24, 20_000, marks=pytest.mark.long)])
def test_autoscale_is_close_to_the_best_fixed_batch_and_better_than_per_core(num_cases, progress):
    against_fixed, against_cores = [], []
    for seed in range(num_cases):
        case = random_case(seed, progress)
        whole = MINIBATCH * case["cores"]
        grid = sorted({-(-REF // whole) * whole * 2**k for k in range(7)} | {LARGEST // whole * whole})
        best = min(simulate(fixed(size), **case).seconds for size in grid if size <= LARGEST)
        mine = simulate(vbs.Autoscale(max_batch_size=LARGEST), **case).seconds
        against_fixed.append(mine / best)
        against_cores.append(simulate(vbs.policies.PerCore(), **case).seconds / mine)
    assert max(against_fixed) < 1.1
    assert np.exp(np.mean(np.log(against_cores))) > 1.2


def test_extrapolation_must_be_enabled():
    with pytest.raises(
        ValueError,
        match="profile was measured with 1 to 4 cores, got 9: more than a factor of 2 beyond that range needs",
    ):
        simulate(fixed(1024), profile=profile(cores=(1, 2, 4)), cores=9)
    told = simulate(fixed(1024), profile=profile(cores=(1, 2, 4), extrapolates=True), cores=9)
    within = simulate(fixed(1024), profile=profile(cores=(1, 2, 4)), cores=8)
    assert told.seconds > 0
    assert within.seconds > 0


def test_a_negative_price_is_rejected_in_the_cost():
    for price in (-0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"`price` must be a non-negative number, got {price}"):
            simulate(fixed(128), price=price)
    assert simulate(fixed(128), price=0).cost == 0
    assert simulate(fixed(128)).cost is None


def test_the_basis_is_that_of_the_least_certain_times():
    counts = vbs.traces.Recording.from_counts([0, 10, 20], [4, 3])
    changing = vbs.planning.Availability.of_recording(counts)
    assert simulate(fixed(128)).basis == "measured"
    assert simulate(fixed(128), availability=changing, progress=7).basis == "interpolated"
    assert simulate(fixed(128), availability=changing, progress=2).basis == "measured"  # ends on 4 cores
    assert simulate(fixed(128), profile=profile(cores=(1, 2)), cores=4).basis == "extrapolated"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"progress": 0}, "`progress` must be a positive number, got 0"),
        ({"restart_seconds": -1}, "`restart_seconds` must be a non-negative number, got -1"),
        ({"restart_seconds": math.inf}, "`restart_seconds` must be a non-negative number, got inf"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(fixed(128), **options)


def test_availability_without_cores_or_time_is_rejected():
    with pytest.raises(ValueError, match="no cores are available at any time"):
        vbs.planning.Availability.of_recording(vbs.traces.Recording.from_counts([0, 1], [0]))
    with pytest.raises(ValueError, match="`seconds_per_row` must be a positive number, got 0"):
        vbs.planning.Availability.of_market(vbs.Trace.of([1, 2]), seconds_per_row=0)


def test_availability_of_a_market():
    spans = vbs.planning.Availability.of_market(vbs.Trace.of([2, 2, 3]), seconds_per_row=60).spans
    assert spans == [(2, 120), (3, 60)]


@pytest.mark.parametrize(("times", "counts"), [([0, 61], [4]), ([0, 20, 20.5, 61], [4, 0, 4])])
def test_no_restart_between_equal_end_and_beginning_of_a_recording(times, counts):
    availability = vbs.planning.Availability.of_recording(vbs.traces.Recording.from_counts(times, counts))
    run = simulate(fixed(128), availability=availability, restart_seconds=7.0)
    gaps = counts.count(0) * math.floor(run.seconds / 61 + 1 - 20 / 61)
    assert run.restarts == gaps
    if not gaps:
        assert run.seconds == simulate(fixed(128)).seconds


def test_cores_are_on_as_few_machines_as_possible():
    rows = [Measured(1, 1, 32, 1.0, 1.0), Measured(1, 2, 32, 1.0, 1.5), Measured(2, 4, 32, 1.0, 3.0)]
    seen = []

    def decide(situation):
        seen.append((situation.cores, situation.machines))
        return 128

    counts = vbs.traces.Recording.from_counts([0, 10, 20], [4, 2])
    spans = vbs.planning.Availability.of_recording(counts, cores_per_machine=2)
    run = simulate(decide, profile=vbs.planning.Profile(rows), availability=spans, progress=7)
    # 4 cores on two machines: 3 s a step, 3 in 10 s; 2 on one: depth 2, 2.5 s, 4 in 10 s
    assert (run.updates, run.seconds) == (7, pytest.approx(20))
    assert {(4, 2), (2, 1)} == set(seen)
    for unknown in (vbs.planning.Availability.of_recording(counts), vbs.planning.Availability.constant(2)):
        with pytest.raises(
            ValueError, match=r"is unknown: set `cores_per_machine` .--cores-per-machine., which determines how"
        ):
            simulate(fixed(128), profile=vbs.planning.Profile(rows), availability=unknown)
    alone = simulate(fixed(128), profile=vbs.planning.Profile(rows), cores=1)  # there is one way to place one core
    assert alone.seconds == pytest.approx(100 * 4)
    with pytest.raises(ValueError, match="`cores_per_machine` must be a positive integer, got 0"):
        vbs.planning.Availability.constant(2, cores_per_machine=0)


def test_steps_since_the_last_checkpoint_are_lost_when_cores_change():
    availability = vbs.planning.Availability.of_recording(vbs.traces.Recording.from_counts([0, 10, 20], [4, 2]))
    run = simulate(fixed(128), availability=availability, progress=8, checkpoint_seconds=4)
    # 4 cores: 4 steps of 2.3 s, saved after 2, at 4.6 s, which is the first end of a step after 4 s, and after 4; 0.8 s
    # are left. 2 cores: 3 steps of 3.1 s, saved after 2, at 6.2 s, so the third is lost, and 0.7 s. 4 cores: 2 more
    assert (run.updates, run.samples, run.seconds) == (8, 8 * 128, pytest.approx(20 + 2 * 2.3))
    assert run.lost_seconds == pytest.approx(0.8 + 3.1 + 0.7)
    assert (len(run.trace), run.progress, run.restarts) == (8, pytest.approx(8), 2)
    assert [round(moment.progress, 6) for moment in run.moments] == [0, 4, 7, 6, 6, 8]
    signalled = simulate(fixed(128), availability=availability, progress=8)
    assert (signalled.seconds, signalled.lost_seconds) == (pytest.approx(20 + 2.3), pytest.approx(0.8 + 0.7))


def test_a_checkpoint_that_never_fits_is_rejected():
    availability = vbs.planning.Availability.of_recording(vbs.traces.Recording.from_counts([0, 10, 20], [4, 2]))
    with pytest.raises(ValueError, match="no checkpoint fits between two changes of the number of cores"):
        simulate(fixed(128), availability=availability, checkpoint_seconds=11)
    with pytest.raises(ValueError, match="`checkpoint_seconds` must be a positive number, got 0"):
        simulate(fixed(128), checkpoint_seconds=0)


def test_the_noise_is_that_of_the_batch_size():
    noise = vbs.planning.NoiseCurves(
        [vbs.planning.NoiseCurve.constant(scale, batch_size=size) for size, scale in ((128, 128.0), (512, 1536.0))]
    )
    seen = []

    def decide(situation):
        seen.append(situation.noise_scale)
        return 512

    run = simulate(decide, noise=noise, progress=390)
    # gain of 512 at φ = 1536: (12 + 1) / (3 + 1)
    assert run.updates == 120
    assert seen[0] is None
    assert seen[-1] == pytest.approx(1536)


def test_the_interval_of_the_time_is_that_of_guessed_times_and_the_noise():
    given = {"minibatch_size": MINIBATCH, "ref_batchsize": REF, "progress": 100, "profile": profile()}
    constant = vbs.planning.NoiseCurve.constant(1000.0)
    between = vbs.planning.Availability.constant(3)
    run = simulate_with_ends(fixed(96), noise=constant, availability=between, **given)
    assert run.seconds == simulate(fixed(96), cores=3).seconds
    factor = profile().ends[1].guess
    assert factor > 1
    assert [end.seconds for end in run.ends] == pytest.approx([run.seconds / factor, run.seconds * factor])
    measured = {**given, "availability": vbs.planning.Availability.constant(4)}
    assert simulate_with_ends(fixed(128), noise=constant, **measured).ends is None
    # runs with more noise make more progress with a batch size above the reference
    noise = vbs.planning.NoiseCurves([vbs.planning.NoiseCurve.constant(at, batch_size=512) for at in (900.0, 1100.0)])
    run = simulate_with_ends(fixed(512), noise=noise, **measured)
    expected = [simulate(fixed(512), noise=noise.ends[end](0.0, 512)).seconds for end in (1, 0)]
    assert [end.seconds for end in run.ends] == expected
    assert expected[0] < run.seconds < expected[1]
