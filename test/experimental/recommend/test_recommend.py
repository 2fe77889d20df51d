"""vbs recommend: the fit of the exponent, what is stopped early, the plan of the branches, and the decision."""

import dataclasses
import math

import pytest

from variable_batch_size.experimental.recommend import recommended
from variable_batch_size.experimental.recommend.branching import Leg, Ran, Source
from variable_batch_size.experimental.recommend.recommend import (
    REFERENCE,
    Plan,
    Recommendation,
    Segment,
    State,
    _Branches,
    _with_a_rule_left,
    best_exponent,
    candidates,
    clearly_behind,
    exponent_over_seeds,
    extrapolated,
    halving,
    plan_of,
    segments_of,
    shrunk_rates,
)
from variable_batch_size.traces.trace import Trace

NAN, INF = math.nan, math.inf


def test_the_exponent_is_the_minimum_of_a_quadratic():
    # 2 · (a − 0.7)² + 1
    assert best_exponent({0.0: 1.98, 0.5: 1.08, 1.0: 1.18}) == pytest.approx(0.7)
    assert best_exponent({a: 2 * (a - 0.7) ** 2 + 1 for a in (0, 0.25, 0.5, 0.75, 1)}) == pytest.approx(0.7)


def test_the_exponent_stays_within_those_that_were_tried():
    assert best_exponent({0.0: 3.0, 0.5: 2.0, 1.0: 1.5}) == 1.0  # the minimum is at 1.25
    assert best_exponent({0.0: 1.0, 0.5: 1.4, 1.0: 1.5}) == 0.0  # a maximum
    assert best_exponent({0.0: 3.0, 0.5: 2.0, 1.0: 1.0}) == 1.0  # a line
    assert best_exponent({0.0: 1.0, 0.5: 1.0, 1.0: 1.0}) == 0.0


def test_diverged_exponents_are_left_out_of_the_fit():
    assert best_exponent({0.0: 2.0, 0.5: 1.0, 1.0: INF}) == 0.5
    assert best_exponent({0.0: 1.0, 0.5: NAN, 1.0: INF}) == 0.0
    assert best_exponent({0.0: 1.98, 0.5: 1.08, 1.0: 1.18, 1.5: INF}) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="every exponent has diverged"):
        best_exponent({0.0: INF, 0.5: NAN})


def test_the_interval_of_the_exponent_is_that_of_the_seeds():
    seeds = [{a: (a - best) ** 2 for a in (0.0, 0.5, 1.0)} for best in (0.5, 0.6, 0.7)]
    # mean 0.6, deviation 0.1, and t = 2.9200 for 90 % and three seeds: 0.169
    assert exponent_over_seeds(seeds) == pytest.approx((0.6, 0.25))
    seeds = [{a: (a - best) ** 2 for a in (0.0, 0.5, 1.0)} for best in (0.2, 0.6, 1.0)]
    assert exponent_over_seeds(seeds) == pytest.approx((0.6, 2.9200 * 0.4 / math.sqrt(3)), rel=1e-4)
    assert exponent_over_seeds(seeds[1:2] * 3) == pytest.approx((0.6, 0.25))  # not below what branches can resolve


def test_only_an_arm_clearly_behind_is_stopped():
    best = [1.0, 1.1, 1.2]
    # differences of 0.1 ± 0, of 0.1, 0.2 and 0.3, that is 0.2 ± 4.3027 · 0.1/√3 = 0.248, and of 0, 0.01, −0.005
    losses = {"a": best, "b": [1.1, 1.2, 1.3], "c": [1.1, 1.3, 1.5], "d": [1.0, 1.11, 1.195]}
    assert clearly_behind(losses) == {"b"}
    assert clearly_behind({"a": best}) == set()


def test_an_arm_that_diverges_with_more_seeds_is_stopped():
    assert clearly_behind({"a": [1.0, 1.1, 1.2], "b": [0.5, 0.5, INF]}) == {"b"}
    assert clearly_behind({"a": [1.0, INF], "b": [0.9, NAN], "c": [INF, INF]}) == {"c"}


def fake(losses):
    """A function for halving with these losses of two seeds at any time; and the calls that it has got."""
    calls = []

    def run(arms, begin, end):
        calls.append((tuple(arms), begin, end))
        return {arm: losses[arm] for arm in arms}

    return run, calls


LOSSES = {"a": [1.0, 1.0], "b": [1.0, 1.001], "c": [2.0, 2.001], REFERENCE: [1.0, 1.0]}


def test_halving_doubles_the_samples_of_what_is_left_within_its_limits():
    run, calls = fake(LOSSES)
    rungs = halving("abc", run, first=10, seeds=2, most=200, end=1000)
    # 4 · 2 · 10 = 80 samples, then 3 · 2 · 10 = 60, and 3 · 2 · 20 = 120 more would be above 200
    assert calls == [(("a", "b", "c", REFERENCE), 0, 10), (("a", "b", REFERENCE), 10, 20)]
    assert [end for end, _ in rungs] == [10, 20]
    run, calls = fake(LOSSES)
    halving("abc", run, first=10, seeds=2, most=260, end=1000)
    assert calls[2:] == [(("a", "b", REFERENCE), 20, 40)]
    run, calls = fake(LOSSES)
    halving("abc", run, first=10, seeds=2, most=10**6, end=19)  # the next state
    assert len(calls) == 1


def test_halving_ends_when_one_is_left():
    run, calls = fake(LOSSES)
    halving("ac", run, first=10, seeds=2, most=10**6, end=1000)
    assert len(calls) == 1


def test_a_stopped_arm_stays_as_far_behind_the_best_as_it_was():
    rungs = ((10, {"a": [1.0], "c": [1.5], REFERENCE: [1.25]}), (20, {"a": [0.5], REFERENCE: [0.625]}))
    state = State(Segment(0, 100, 100, 64), rungs)
    assert state.leads("a") == [-0.125]
    assert state.leads("c") == [0.375]
    assert state.stopped == {"c": 10}


def test_segments_have_a_size_that_three_quarters_of_what_varies_do_not_exceed():
    sizes = [32] * 10 + [64] * 10 + [32] * 5 + [256] * 2  # 320, 640, 160 and 512 samples
    first, second = segments_of(sizes, ref_batchsize=32, num_samples=1632, states=(0, 0.5))
    assert first == Segment(0, 816, 496, 64)
    assert second == Segment(816, 1632, 656, 256)
    for num, size in ((12, 64), (11, 128)):  # 768 of 1,024 samples, and 704 of 960
        assert (
            segments_of([64] * num + [128] * 2, ref_batchsize=32, num_samples=1024, states=(0,))[0].batch_size == size
        )
    assert segments_of([70] * 10, ref_batchsize=32, num_samples=700, states=(0,)) == [Segment(0, 700, 700, 64)]


SOURCE = Source("digits", None, None, "cpu", 1, None, 32, 32, 320_000)
RULES = ("constant", "root", "linear")


def planned(sizes, *, source=SOURCE, rules=RULES, seeds=3, budget=0.1):
    return plan_of(Trace.from_sequence(sizes), source, rules, seeds=seeds, budget=budget)


def test_the_plan_keeps_within_its_budget():
    plan = planned([256] * 1250)
    assert plan.comparison == 4 * 3 * 320_000
    assert plan.samples == 0.1 * plan.comparison - 160_000
    assert [segment.begin for segment in plan.branched] == [0, 32_000, 160_000]
    # 80 % of 224,000 samples for three states: 59,733, of which half for 4 arms with 3 seeds: 2,488
    assert plan.most == 59_733
    assert plan.first(plan.branched[0]) == 2_304
    assert plan.sizes == [32, 128, 256]
    assert len(plan.sizes) * plan.seeds * plan.samples_of_sizes <= 0.2 * plan.samples


def test_the_state_with_the_fewest_varied_samples_is_left_out_where_branches_would_be_too_short():
    # 4 · 768 samples are more than the 2,488 of three states, and less than the 3,733 of two
    assert [segment.begin for segment in planned([32] * 4 + [768] * 420).branched] == [32_000, 160_000]
    rarely = [*[32] * 4, *[768] * 40, *[32] * 1500, 768, *[32] * 2500, *[768] * 210]  # once from 10 % to 50 %
    assert [segment.begin for segment in planned(rarely).branched] == [0, 160_000]


def test_a_start_at_a_large_batch_size_is_not_left_out():
    for first in ([], [64], [32] * 3):  # within the first four updates
        assert [segment.begin for segment in planned([*first, *[768] * 420]).branched] == [0, 160_000]
    one_other = [*[768] * 20, *[32] * 4520, *[768] * 210]
    assert [segment.begin for segment in planned(one_other, budget=0.075).branched] == [160_000]  # the main one


def made_branches(curves, *, sizes=(256,) * 1250):
    """Branches from the start with these test losses of two seeds, after 0, 1,152 and 2,304 samples."""
    plan = planned(sizes, seeds=2)
    branches = _Branches(plan, plan.segments[0], None, None, None, [(0, 2.0), (32_000, 1.5), (160_000, 1.0)])
    for arm, losses in curves.items():
        for seed, (start, middle, end) in enumerate(losses):
            legs = [Leg(0, arm, 256, seed, 0, 1152), Leg(0, arm, 256, seed, 1152, 2304)]
            rans = [Ran(((0, start), (1152, middle)), 1.0), Ran(((2304, end),), 1.0)]
            branches.made[arm, seed] = list(zip(legs, rans, strict=True))
    return branches


def test_a_rule_fails_at_the_start_if_it_is_clearly_behind_the_unscaled_learning_rate_and_the_reference():
    behind = [(2.0, 2.2, 1.9), (2.0, 2.3, 1.901)]
    careful = [(2.0, 1.9, 1.8), (2.0, 1.9, 1.801)]
    ahead = [(2.0, 1.4, 1.2), (2.0, 1.4, 1.2)]
    arms = {"constant": careful, "root": ahead, "linear": behind, REFERENCE: ahead}
    branches = made_branches(arms)
    assert [arm for arm in arms if branches._fails_at_start(arm)] == ["linear"]
    # not if the trace starts at the reference batch size, or if even that has not lowered the loss yet
    assert not made_branches(arms, sizes=(32,) * 4 + (256,) * 1250)._fails_at_start("linear")
    assert not made_branches(arms | {REFERENCE: [(2.0, 9.0, 7.0)] * 2})._fails_at_start("linear")


def test_at_the_start_losses_up_to_those_of_the_reference_are_no_divergence():
    rising = {REFERENCE: [(2.0, 9.0, 7.0), (2.0, 5.0, 3.0)]}
    assert made_branches(rising)._limit() == 9.0
    assert made_branches({REFERENCE: [(2.0, 1.8, 1.7)] * 2})._limit() == 3.0  # 2 + (2 − 1)


def test_a_stopped_rule_remains_if_the_others_diverge_later():
    first = {"a": [2.0, 2.0], "b": [1.0, 1.0], "c": [1.1, 1.0], REFERENCE: [0.0, 0.0]}
    rungs = [(10, first), (20, {"b": [INF, 1.0], "c": [INF, INF], REFERENCE: [0.0, 0.0]})]
    assert _with_a_rule_left(rungs) == [(10, first | {"b": [INF, INF], "c": [INF, INF]})]
    fine = [rungs[0], (20, {"b": [INF, 1.0], "c": [1.0, 1.0], REFERENCE: [0.0, 0.0]})]
    assert _with_a_rule_left(fine) == fine


def test_a_state_without_another_batch_size_is_not_branched():
    plan = planned([32] * 3000 + [256] * 900)  # from 96,000 samples on
    assert [segment.begin for segment in plan.branched] == [32_000, 160_000]
    assert [segment.num_varied for segment in plan.segments] == [0, 64_000, 160_000]
    assert [plan.weight(segment) for segment in plan.branched] == pytest.approx([2 / 7, 5 / 7])


def test_progress_adds_up_and_an_early_lead_fades():
    plan = planned([256] * 1250)
    last = plan.branched[-1]  # in the middle, 0.75 of the training is done

    def loss_at(samples):
        return 1 - 0.1 * math.log(samples)

    assert plan.predicted(last, rate=1.0, lead=0.04, loss_at=loss_at) == pytest.approx(0.003)  # a tenth
    assert plan.predicted(last, rate=0.5, lead=0.0, loss_at=loss_at) == pytest.approx(0.1 * math.log(2))
    assert plan.predicted(last, rate=-3.0, lead=0.0, loss_at=loss_at) == pytest.approx(0.1 * math.log(100))  # at most
    half = planned([32] * 5000 + [256] * 625)  # half of the samples vary: 1 − 0.5 · 0.5 of the progress
    assert half.predicted(half.branched[-1], rate=0.5, lead=0.0, loss_at=loss_at) == pytest.approx(
        -0.1 * math.log(0.75)
    )


def test_the_training_reaches_the_second_state_to_measure_its_slope():
    assert planned([256] * 100 + [32] * 10_000).trunk == 32_000
    assert planned([256] * 1250).trunk == 160_000


def test_the_loss_is_extrapolated_from_the_last_four_fifths_and_never_rises():
    trunk = [(0, 9.0), (10, 9.0), (40, 1.0), (80, 0.5), (160, 0.25)]  # 40/n
    assert extrapolated(trunk)(320) == pytest.approx(0.125)
    assert extrapolated([(0, 9.0), (40, 1.0), (160, 1.2)])(320) == pytest.approx(1.2)
    assert extrapolated([(0, 9.0), (40, -1.0), (80, -1.5), (160, -1.75)])(320) == pytest.approx(-1.875)  # 40/n − 2


def test_rates_are_measured_where_that_tells_more_than_the_factor_of_the_learning_rate():
    sure = [0.5, 0.5, 0.5]
    assert shrunk_rates(sure, [1.0, 1.0, 1.0], 1.0) == sure
    # the standard error is 0.25 = nominal/4: half of each
    unsure = [0.5 - 0.25 * math.sqrt(3), 0.5, 0.5 + 0.25 * math.sqrt(3)]
    assert shrunk_rates(unsure, [1.0, 1.0, 1.0], 1.0)[1] == pytest.approx(0.75)
    # a reference that is as unsure makes the rates as unsure
    assert shrunk_rates([1.0, 1.0, 1.0], [4 * (one + 0.5) for one in unsure], 1.0)[1] < 1
    assert shrunk_rates(sure, [1.0, -1.0, -1.0], 0.7) == [0.7] * 3  # no movement but noise
    assert shrunk_rates([NAN, NAN, 0.5], [1.0] * 3, 0.7) == [0.7] * 3
    assert shrunk_rates([NAN, 0.5, 0.5], [1.0] * 3, 0.7) == pytest.approx([0.7, 0.5, 0.5])


def test_a_trace_that_never_leaves_the_reference_raises():
    with pytest.raises(ValueError, match="the trace must have batch sizes other than the reference 32 within"):
        planned([32] * 10_000)
    with pytest.raises(ValueError, match="other than the reference 32 within 320,000 samples"):
        planned([32] * 10_000 + [64])  # after the training


def test_one_sample_too_few_for_a_branch_raises():
    message = r"a branch at batch size 1024 must have at least 4,096 samples, 4 common multiples .*, got 3,733: train"
    with pytest.raises(ValueError, match=message):
        planned([1024] * 313)
    assert planned([1024] * 313, budget=0.11).branched


def recommendation(losses, *, seeds=3):
    """A state with a rung of losses."""
    plan = planned([256] * 1250, seeds=seeds)
    states = tuple(State(segment, ((2304, losses),), references=(0.5, 0.5, 0.5)) for segment in plan.branched)
    return Recommendation(plan, SOURCE, states, ((0, 2.0), (32_000, 1.0), (80_000, 0.9), (160_000, 0.8)), "", 1, 1.0)


FLAT = [0.5, 0.5, 0.5]


def test_the_rule_with_the_best_lead_is_recommended():
    found = recommendation({"constant": [0.9, 0.91, 0.9], "root": [0.8, 0.81, 0.8], "linear": FLAT, REFERENCE: FLAT})
    assert (found.rule, found.level_with, found.more_samples) == ("linear", {}, {})
    assert found.lead.mean == pytest.approx(0.0)
    assert found.exponent.mean == pytest.approx(1.0)


def test_doubt_is_stated_with_the_samples_that_would_decide():
    linear = [0.50, 0.52, 0.54]  # 0.02 behind on average, ± 4.3027 · 0.02/√3 = 0.0497
    found = recommendation({"constant": [0.9, 0.91, 0.9], "root": FLAT, "linear": linear, REFERENCE: FLAT})
    assert found.rule == "root"
    assert found.level_with["linear"] == pytest.approx((0.02, 0.049683), rel=1e-4)
    # 3 · (0.0497/0.02)² = 18.5, so 16 more seeds of two arms with 2,304 samples from three states
    assert found.more_samples == {"linear": 16 * 2 * 3 * 2304}
    same = recommendation({"constant": [0.9, 0.91, 0.9], "root": FLAT, "linear": FLAT, REFERENCE: FLAT})
    assert same.more_samples in ({"linear": None}, {"root": None})


def test_of_rules_that_cannot_be_told_apart_the_usual_one_is_recommended():
    worse = [0.50, 0.52, 0.54]  # 0.02 behind on average, and not clearly
    losses = {
        "constant": [0.9, 0.91, 0.9],
        "root": [0.8, 0.81, 0.8],
        "linear": worse,
        "adascale": FLAT,
        REFERENCE: FLAT,
    }
    found = recommendation(losses)
    sgd = found._replace(plan=dataclasses.replace(found.plan, rules=("constant", "root", "linear", "adascale")))
    assert sgd.rule == "linear"
    assert sgd.level_with["adascale"] == pytest.approx((-0.02, 0.049683), rel=1e-4)
    clear = recommendation({**losses, "linear": [0.52, 0.52, 0.521]})
    assert clear._replace(plan=sgd.plan).rule == "adascale"


def test_the_loss_at_the_end_is_extrapolated_and_its_interval_grows_with_what_is_unknown():
    found = recommendation({"constant": FLAT, "root": FLAT, "linear": FLAT, REFERENCE: FLAT})
    found = found._replace(trunk=((0, 9.0), (40_000, 1.0), (80_000, 0.5), (160_000, 0.25)))  # 40,000/n
    assert found.reference_loss == pytest.approx(0.125)
    assert found.lead == pytest.approx((0.0, 1.25 * 0.125))
    flat = found._replace(trunk=((0, 9.0), (40_000, 0.5), (160_000, 0.5)))
    assert flat.lead.error == pytest.approx(0)
    noisy = [state._replace(references=(0.4, 0.5, 0.6)) for state in flat.states]
    assert flat._replace(states=tuple(noisy)).lead.error == pytest.approx(1.645 * 0.1 * math.sqrt(2 / 3))


def test_a_start_that_no_branch_has_tried_is_reported():
    found = recommendation({"constant": FLAT, "root": FLAT, "linear": FLAT, REFERENCE: FLAT})
    assert not found.is_start_untried
    later = found._replace(states=found.states[1:])
    assert later.is_start_untried
    assert later.rule == "constant"  # the most careful of those that are level
    assert recommended.sentences(later)[0].startswith(
        "Undecided, as no rule was tried at the start, at batch size 256: warm up, and use constant"
    )
    calm = tuple(((0, 0.5), (512, 0.45)) for _ in range(3))
    assert "The start has no branches" in recommended._jumps(
        later._replace(states=tuple(state._replace(curves=calm) for state in later.states))
    )


def test_a_jump_that_raises_the_loss_takes_the_updates_until_it_is_back():
    found = recommendation({"constant": FLAT, "root": FLAT, "linear": FLAT, REFERENCE: FLAT})
    up = tuple(((0, 0.5), (512, 0.9 + seed), (1024, 0.6), (2304, 0.5)) for seed in (0, 0.01, 0.02))
    down = tuple(((0, 0.5), (512, 0.45), (1024, 0.4), (2304, 0.3)) for _ in range(3))
    states = [state._replace(curves=curves) for state, curves in zip(found.states, (down, up, down), strict=True)]
    assert found._replace(states=tuple(states)).steps_to_recover == {32_000: 9}


@pytest.mark.parametrize(
    ("optimizer", "group", "rules"),
    [
        ("SGD", {"momentum": 0.9}, ["linear_momentum", "adascale"]),
        ("SGD", {"momentum": 0}, ["adascale"]),
        ("AdamW", {"betas": (0.9, 0.99), "eps": 1e-8}, ["adam", "adamscale", "surge"]),
        ("NAdam", {"betas": (0.9, 0.99), "eps": 1e-8}, ["adamscale", "surge"]),
        ("Muon", {"weight_decay": 0.1}, ["muon", "surge"]),
        ("Muon", {"weight_decay": 0.0}, ["surge"]),
    ],
)
def test_candidates_are_the_rules_for_an_optimizer_that_differ(optimizer, group, rules):
    assert candidates(optimizer, [{"lr": 0.1, **group}]) == [*RULES, *rules]


def test_plans_are_the_same_whatever_the_trace_does_after_the_training():
    assert planned([256] * 1250 + [8192]) == planned([256] * 1250)
    assert isinstance(planned([256] * 1250), Plan)


@pytest.mark.browser
def test_the_page_draws_the_losses_by_exponent_and_the_expected_curve(browser, tmp_path):
    from chromium import PHONE, requested_by

    losses = {"constant": [0.9, 0.91, 0.9], "root": [0.8, 0.81, 0.8], "linear": [INF, 0.6, 0.5], REFERENCE: FLAT}
    page = tmp_path / "report.html"
    source = SOURCE._replace(workload="<b>mine</b>")
    text = recommended.page(recommendation(losses)._replace(source=source), command="vbs recommend mine")
    page.write_text(text, encoding="utf-8")
    with browser(PHONE, is_dark=True) as driver:
        driver.get(page.as_uri())
        assert driver.find_element("tag name", "h1").text == "Recommended for <b>mine</b>"
        shown = [
            len(driver.find_elements("css selector", f"#{name} .scatterlayer .trace"))
            for name in ("exponents", "curve")
        ]
        assert shown == [3, 3]
        points = driver.find_elements("css selector", "#exponents .scatterlayer .point")
        assert len(points) == 6  # of two exponents: linear has diverged
        assert driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
        assert driver.get_log("browser") == []
        assert requested_by(driver) == [page.as_uri()]
