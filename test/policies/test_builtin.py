"""Every policy respects its bounds in any situation and follows its definition."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.policies.policy import Decision, policy_of

SECONDS = st.one_of(st.none(), st.just(0.0), st.floats(1e-9, 1e3))
NOISE = st.one_of(st.none(), st.sampled_from([0.0, math.inf, math.nan, -1.0]), st.floats(1e-6, 1e9))


def situation(**numbers):
    return vbs.policies.Situation(**{"cores": 4, "minibatch_size": 32, "ref_batchsize": 128, **numbers})


@st.composite
def cases(draw):
    """A policy with consistent bounds, and a situation."""
    m, cores = draw(st.integers(1, 64)), draw(st.integers(1, 40))
    low = draw(st.integers(1, 500))
    high = low + draw(st.integers(0, 5000))
    bounds = {
        "min_batch_size": draw(st.sampled_from([None, low])),
        "max_batch_size": high,
        "min_per_core": draw(st.one_of(st.none(), st.integers(1, 200))),
        "max_per_core": draw(st.one_of(st.none(), st.integers(200, 2000))),
        "max_growth": draw(st.floats(1.01, 4)),
        "threshold": draw(st.floats(1.0, 1.5)),
    }
    kinds = {
        "autoscale": lambda: vbs.Autoscale(**bounds),
        "per core": lambda: vbs.policies.PerCore(draw(st.one_of(st.none(), st.integers(1, 300))), **bounds),
        "norm test": lambda: vbs.policies.NormTest(eta=draw(st.floats(0.01, 0.99)), **bounds),
        "critical batch": lambda: vbs.policies.CriticalBatch(cost=draw(st.floats(0.01, 0.99)), **bounds),
        "on plateau": lambda: vbs.policies.OnPlateau(patience=1, factor=draw(st.floats(1.1, 9)), **bounds),
        "function": lambda: vbs.policies.FunctionPolicy(
            lambda _: draw(st.one_of(st.integers(1, 10**6), st.floats(1, 1e9))), **bounds
        ),
    }
    policy = kinds[draw(st.sampled_from(list(kinds)))]()
    found = vbs.policies.Situation(
        cores=cores,
        minibatch_size=m,
        ref_batchsize=draw(st.integers(1, 1000)),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 400).map(lambda n: n * m))),
        noise_scale=draw(NOISE),
        seconds_accumulating=draw(SECONDS),
        seconds_updating=draw(SECONDS),
        loss=draw(st.one_of(st.none(), st.floats())),
        capacity=draw(st.one_of(st.none(), st.integers(64, 10**5))),
    )
    return policy, found


@settings(max_examples=250, deadline=None)
@given(cases())
def test_bounds_are_never_broken(case):
    policy, found = case
    m, bounds = found.minibatch_size, policy.bounds
    try:
        allowed = bounds.minibatches(found)
    except ValueError as error:
        assert f"no batch size satisfies all bounds on {found.cores} cores" in str(error)
        return
    for _ in range(3):  # a policy may have a memory
        size, _ = policy.answer(found)
        assert size % m == 0
        assert size // m in allowed
        assert (bounds.min_batch_size or 1) <= size <= bounds.max_batch_size
        assert found.capacity is None or size <= found.capacity
        shares = [m * len(range(rank, size // m, found.cores)) for rank in range(found.cores)]
        assert bounds.min_per_core is None or min(shares) >= bounds.min_per_core
        assert bounds.max_per_core is None or max(shares) <= bounds.max_per_core
        if found.batch_size is not None:
            largest = bounds.max_growth * found.batch_size + 1e-6
            assert size <= largest or size == allowed.start * m


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_change_is_made_only_if_it_reaches_the_threshold(case):
    policy, found = case
    try:
        size, _ = policy.answer(found)
    except ValueError:
        return
    now = found.batch_size
    if now is not None and size != now and now // found.minibatch_size in policy.bounds.minibatches(found):
        ratio = policy.worth(found, size) / max(policy.worth(found, now), 1e-300)
        threshold = policy.bounds.threshold
        assert ratio >= threshold * (1 - 1e-9) or ratio <= (1 + 1e-9) / threshold


# --------------------------------------------------------------------------------------------------------- one by one


def test_autoscale_starts_at_the_reference_on_all_cores_and_tries_a_second_depth_once():
    policy = vbs.Autoscale(max_batch_size=4096)
    assert policy.answer(situation()) == Decision(128, "first decision")
    assert policy.answer(situation(cores=3)).batch_size == 192  # the least multiple of 3 minibatches from 128 on
    assert policy.answer(situation(batch_size=128)) == Decision(128, "noise unknown")  # nothing is timed yet
    for depth, other in ((1, 2), (2, 3), (5, 8)):
        decision = policy.answer(situation(batch_size=128 * depth, timed_depths=(depth,), noise_scale=500.0))
        assert decision == Decision(128 * other, f"times unknown, trying {other} minibatches per core after {depth}")
    both = situation(batch_size=256, timed_depths=(1, 2), seconds_accumulating=1.0, seconds_updating=4.0)
    assert policy.answer(both) == Decision(256, "noise unknown")  # a larger batch would not measure it


def test_autoscale_needs_two_minibatches_to_know_the_noise():
    known = {"seconds_accumulating": 1.0, "seconds_updating": 4.0}
    decision = vbs.Autoscale(max_batch_size=4096).answer(situation(cores=1, ref_batchsize=32, batch_size=32, **known))
    assert decision == Decision(64, "noise unknown, trying two minibatches")
    several = situation(cores=3, ref_batchsize=32, batch_size=32, is_fresh=True)
    assert vbs.Autoscale(max_batch_size=4096).answer(several).batch_size == 96  # no core is idle


def test_autoscale_keeps_the_share_of_each_core_after_a_restart_on_other_cores_without_times():
    policy = vbs.Autoscale(max_batch_size=4096)
    for cores, size in ((4, 640), (3, 672), (1, 640), (15, 480), (16, 512), (6, 576)):  # the nearest multiples
        decision = policy.answer(situation(cores=cores, batch_size=640, noise_scale=500.0, is_fresh=True))
        assert decision == Decision(size, "times unknown")


def test_autoscale_at_its_largest_size_tries_half_the_depth():
    policy = vbs.Autoscale(max_batch_size=256)
    decision = policy.answer(situation(batch_size=256, timed_depths=(2,)))
    assert decision == Decision(128, "times unknown, trying 1 minibatches per core after 2")
    assert vbs.Autoscale(max_batch_size=128).answer(situation(batch_size=128, timed_depths=(1,))).batch_size == 128


def test_autoscale_that_may_hardly_grow_tries_a_second_depth_on_some_cores():
    decision = vbs.Autoscale(max_batch_size=4096, max_growth=1.3).answer(situation(batch_size=128, timed_depths=(1,)))
    assert decision.batch_size == 160


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        ({"noise_scale": 10_000.0}, 1920),  # d* = √(10,000·3 / (1·4·32)) = 15.3
        ({"noise_scale": 0.0}, 128),  # more samples are worth nothing
        ({"noise_scale": math.inf}, 2048),  # everything, but twice as much at once
        ({"noise_scale": 10_000.0, "seconds_updating": 1.0}, 128),  # an update costs nothing
        ({"noise_scale": 10_000.0, "seconds_accumulating": 0.0}, 2048),  # a minibatch more costs nothing
    ],
)
def test_autoscale_maximizes_goodput(numbers, size):
    times = {"seconds_accumulating": 1.0, "seconds_updating": 4.0}
    assert vbs.Autoscale(max_batch_size=4096).answer(situation(batch_size=1024, **{**times, **numbers}))[0] == size


def test_autoscale_does_not_change_for_a_small_gain():
    times = {"seconds_accumulating": 1.0, "seconds_updating": 4.0, "noise_scale": 10_000.0}
    decision = vbs.Autoscale(max_batch_size=4096).answer(situation(batch_size=1664, **times))
    assert decision == Decision(1664, "1920 is not worth a change")
    resumed = vbs.Autoscale(max_batch_size=4096).answer(situation(batch_size=1664, is_fresh=True, **times))
    assert resumed == Decision(1920, "goodput +0 %")


def test_per_core_follows_the_cores():
    assert [vbs.policies.PerCore().answer(situation(cores=cores))[0] for cores in (1, 3, 16)] == [32, 96, 512]
    assert vbs.policies.PerCore(96, max_batch_size=200).answer(situation(cores=3))[0] == 192


def test_the_norm_test_grows_to_the_first_size_that_passes():
    policy = vbs.policies.NormTest(eta=0.5, max_growth=math.inf)
    first = policy.answer(situation(noise_scale=100.0, batch_size=128))
    assert first == Decision(128, "first estimate of the noise")
    assert policy.answer(situation(noise_scale=100.0, batch_size=128))[0] == 320  # 100·0.75/0.25 = 300
    assert policy.answer(situation(noise_scale=math.inf, batch_size=64, capacity=1000))[0] == 992
    assert policy.answer(situation(noise_scale=math.nan, batch_size=32))[0] == 64
    for size in (128, 320, 640):
        mean_square = 1 + 100.0 / size  # ‖ḡ‖² with G² = 1 and V = 100
        assert (100.0 / size > 0.25 * mean_square) == (size < 300)


def test_the_norm_test_returns_from_a_leap():
    policy = vbs.policies.NormTest(eta=0.5)
    policy.answer(situation(noise_scale=1e6, batch_size=64))
    size, sizes = 64, []
    for noise_scale in (1e6, 1e6, 100.0, 100.0, 100.0, 10.0):
        size = policy.answer(situation(noise_scale=noise_scale, batch_size=size))[0]
        sizes.append(size)
    assert sizes == [128, 256, 320, 320, 320, 160]  # at most doubled; halved where a half would still pass
    other = vbs.policies.NormTest(eta=0.5)
    other.load_state_dict(policy.state_dict())
    assert other.answer(situation(noise_scale=100.0, batch_size=256))[0] == 320  # it resumes with known noise


def test_critical_batch_doubles_while_the_cost_is_low():
    policy = vbs.policies.CriticalBatch(cost=0.2)
    assert policy.answer(situation(noise_scale=1000.0, batch_size=224))[0] == 448
    assert policy.answer(situation(noise_scale=1000.0, batch_size=256))[0] == 256
    assert policy.answer(situation(noise_scale=1000.0))[0] == 256  # of the reference
    assert policy.answer(situation(batch_size=32))[0] == 64


def test_on_plateau_uses_the_metric_or_else_the_loss():
    policy = vbs.policies.OnPlateau(factor=4, patience=2, min_delta=0.1)
    losses = [1.0, 0.95, 0.95, 0.8, 0.79, 0.78, 0.5]  # the third is still the second, which counts once
    assert [policy.answer(situation(batch_size=64, loss=loss))[0] for loss in losses] == [64, 64, 64, 64, 64, 256, 64]
    policy.tell(0.3)
    policy.tell(0.7)
    assert policy.answer(situation(batch_size=64, loss=9.0))[0] == 64
    policy.tell(0.8)
    assert policy.answer(situation(batch_size=64)) == Decision(256, "2 values no better than 0.3")


def test_on_plateau_with_higher_is_better():
    policy = vbs.policies.OnPlateau(patience=1, is_higher_better=True)
    policy.tell(80.0)
    policy.tell(81.0)
    assert policy.answer(situation(batch_size=64))[0] == 64
    policy.tell(80.5)
    assert policy.answer(situation(batch_size=64))[0] == 128


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_metric_that_is_not_finite_changes_nothing_and_is_logged_once(value, is_first, caplog):
    policy = vbs.policies.OnPlateau(patience=2)
    if not is_first:
        policy.tell(1.0)
    for _ in range(5):
        policy.tell(value)
        assert policy.answer(situation(batch_size=64)) == Decision(64, "the metric is not finite")
    assert [record.message for record in caplog.records] == [
        f"OnPlateau: the metric is {value}, so the run may have diverged; it is not a plateau"
    ]
    other = vbs.policies.OnPlateau(patience=2)
    other.load_state_dict(policy.state_dict())
    assert other.answer(situation(batch_size=64)) == Decision(64, "the metric is not finite")
    for loss, size in ((0.9, 64), (0.9, 64), (0.95, 128)):
        other.tell(loss)
        assert other.answer(situation(batch_size=64))[0] == size


def test_on_plateau_resumes_from_its_state():
    policy, other = vbs.policies.OnPlateau(patience=2), vbs.policies.OnPlateau(patience=2)
    policy.tell(1.0)
    policy.tell(1.0)
    other.load_state_dict(policy.state_dict())
    for each in (policy, other):
        each.tell(1.0)
        assert each.answer(situation(batch_size=64))[0] == 128


def test_a_function_is_a_policy():
    policy = policy_of(lambda situation: 32 * situation.steps_done + 1)
    assert policy.answer(situation(steps_done=3))[0] == 96
    assert policy_of(policy) is not policy
    assert policy_of(policy).answer(situation(steps_done=3))[0] == 96


def test_descriptions_are_equal_only_for_equal_policies():
    assert vbs.Autoscale(max_batch_size=64).description != vbs.Autoscale(max_batch_size=128).description
    assert vbs.policies.PerCore().description != vbs.policies.PerCore(64).description
    plateau = vbs.policies.OnPlateau()
    before = plateau.description
    plateau.tell(1.0)
    assert plateau.description == before == vbs.policies.OnPlateau().description
    assert "patience=10" in before
    assert "every=20" in before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vbs.policies.PerCore(0), "`samples` must be a positive integer, got 0"),
        (lambda: vbs.policies.PerCore(every=0), "`every` must be a positive integer, got 0"),
        (lambda: vbs.policies.PerCore(lead=0), "`lead` must be a positive integer, got 0"),
        (lambda: vbs.policies.NormTest(eta=1.0), "`eta` must be between 0 and 1, got 1.0"),
        (lambda: vbs.policies.CriticalBatch(cost=0), "`cost` must be between 0 and 1, got 0"),
        (lambda: vbs.policies.OnPlateau(factor=1), "`factor` must be above 1, got 1"),
        (lambda: vbs.policies.OnPlateau(min_delta=1), "`min_delta` must be at least 0 and below 1, got 1"),
        (lambda: vbs.policies.make_policy("auto"), "`policy` must be one of 'autoscale', 'per_core'"),
    ],
)
def test_invalid_settings_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_policy_has_a_name():
    made = {name: vbs.policies.make_policy(name, **settings) for name, settings in SETTINGS.items()}
    assert {name: type(policy) for name, policy in made.items()} == dict(vbs.policies.POLICIES)


SETTINGS = {
    "autoscale": {"max_batch_size": 64},
    "per_core": {},
    "norm_test": {"eta": 0.5},
    "critical_batch": {},
    "on_plateau": {},
}
