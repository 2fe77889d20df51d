"""Prices over time, and the numbers of cores that are rented at them."""

import pytest

import variable_batch_size as vbs
from variable_batch_size.lab.planning.profile import Measured
from variable_batch_size.lab.planning.rental import RENTALS, Cheapest, Offer, Prices
from variable_batch_size.lab.planning.simulate import Span
from variable_batch_size.policies.builtin import parse_named

REF = 32


def profile(updating):
    """Seconds of an update on 1, 2 and 4 cores with a minibatch of 32 each; accumulating takes as long as on one."""
    rows = [Measured(1, cores, 32, updating[0], time) for cores, time in zip((1, 2, 4), updating, strict=True)]
    return vbs.planning.Profile(rows)


# with infinite noise the progress of a step is its batch size / 32, and so that of n minibatches is n
def simulate(policy, *, price, updating=(1.0, 1.25, 2.0), spans=((4, 1e9),), progress=1000, **options):
    return vbs.planning.simulate(
        policy,
        profile=profile(updating),
        noise=lambda progress, batch_size: float("inf"),
        availability=vbs.planning.Availability([Span(*span) for span in spans], name="market"),
        minibatch_size=32,
        ref_batchsize=REF,
        progress=progress,
        price=price,
        **options,
    )


def per_core(situation):
    return 32 * situation.cores


def test_prices_of_a_file(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text("# of a zone\ntime,price\n10,2\n3610,.5\n10810,9\n")
    assert Prices.read(file) == Prices([0.0, 3600.0, 10800.0], [2.0, 0.5])
    file.write_text("time,price\n2026-03-01T12:00:00Z,2\n2026-03-01T13:00:00Z,0.5\n2026-03-01T15:00:00Z,0.5\n")
    assert Prices.read(file) == Prices([0.0, 3600.0, 10800.0], [2.0, 0.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,price\n0,-1\n1,1\n", r"p.csv:2: a price must be a non-negative number, got '-1'"),
        ("time,price\n0,nan\n1,1\n", r"p.csv:2: a price must be a non-negative number, got 'nan'"),
        ("time,price\n0,x\n1,1\n", r"p.csv:2: a price must be a non-negative number, got 'x'"),
        ("time,price\n0,1\n0,1\n", r"p.csv:3: a time must be later than the previous one, got 0 s"),
        ("time,price\n0,1\n", r"p.csv: a series of prices needs two different times, got one"),
        ("time,price\nx,1\n", r"p.csv:2: times must be all numbers, or all dates like"),
    ],
)
def test_invalid_prices_are_rejected_with_their_place(tmp_path, text, message):
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        Prices.read(tmp_path / "p.csv")


def test_the_cost_is_that_of_the_prices_at_each_time():
    # 2 an hour for 100 s, then 1 for 200 s, repeated
    prices = Prices([0.0, 100.0, 300.0], [2.0, 1.0])
    assert prices.cost(0, 300) == pytest.approx(400 / 3600)
    assert prices.cost(50, 100) == pytest.approx(150 / 3600)
    assert prices.cost(250, 700) == pytest.approx((50 + 2 * 400 + 50 * 2) / 3600)
    # 4 cores for 10 s, 2 for 30 s, of steps of 2 and 1.25 s
    run = simulate(per_core, price=prices, spans=((4, 10), (2, 30)), progress=4 * 5 + 2 * 24)
    assert (run.seconds, run.device_seconds) == (pytest.approx(40), pytest.approx(100))
    assert run.cost == pytest.approx(2 * (4 * 10 + 2 * 30) / 3600)
    long = simulate(per_core, price=prices, spans=((4, 1e9),), progress=4 * 1000)  # 2,000 s
    assert long.cost == pytest.approx(4 * (6 * 400 + 2 * 100 + 100) / 3600)


OFFERS = [Offer(1, 1000.0, 1000.0), Offer(2, 625.0, 1250.0), Offer(4, 500.0, 2000.0)]


@pytest.mark.parametrize(
    ("rental", "spent", "seconds", "cores"),
    [
        ("cheapest", 0, 0, 1),
        # 0.99 hours are 3564 s, then what is left of them
        ("by_deadline:hours=1", 0, 0, 1),
        ("by_deadline:hours=1", 0, 3564 - 700, 2),
        ("by_deadline:hours=1", 0, 3564 - 300, 4),
        ("by_deadline:hours=1", 0, 4000, 4),
        # 0.99 of 3000, then of what is left
        ("within_budget:money=3000", 0, 0, 4),
        ("within_budget:money=3000", 2970 - 1300, 0, 2),
        ("within_budget:money=3000", 2970 - 1100, 0, 1),
        ("within_budget:money=3000", 2970 - 900, 0, 1),
    ],
)
def test_choices_by_hand(rental, spent, seconds, cores):
    found = parse_named(f"{rental}{',' if ':' in rental else ':'}max_batch_size=1024", RENTALS)
    assert found.choose(OFFERS, seconds=seconds, spent=spent, cores=0) == cores


def test_cores_are_not_changed_for_little():
    cheapest = Cheapest(max_batch_size=1024)
    close = [Offer(1, 100.0, 100.0), Offer(2, 52.0, 104.0), Offer(4, 50.0, 200.0)]
    assert [cheapest.choose(close, seconds=0, spent=0, cores=now) for now in (0, 1, 2, 4)] == [1, 1, 2, 1]


def rent(name, **options):
    # no accumulation: with infinite noise it would be worth as much as it takes
    return RENTALS[name](max_batch_size=128, max_per_core=32, **options)


def test_the_cheapest_number_of_cores_is_rented():
    # 1 core: 1 progress in 1 s, 2: 2 in 1.25 s, 4: 4 in 2 s; so 1, 1.25 and 2 device seconds each
    run = simulate(rent("cheapest"), price=36.0)
    assert (run.seconds, run.cost, run.restarts) == (pytest.approx(1000), pytest.approx(10.0), 0)
    assert {moment.cores for moment in run.moments} == {1}
    everything = simulate(per_core, price=36.0)
    assert (everything.seconds, everything.cost) == (pytest.approx(500), pytest.approx(20.0))


def test_the_deadline_is_kept_with_the_fewest_dollars():
    # 1000 in 1000, 625 and 500 s, so 10, 12.5 and 20; a restart of 200 s is worth no change
    for hours, cores, cost in ((1100, 1, 10.0), (700, 2, 12.5), (510, 4, 20.0), (300, 4, 20.0)):
        run = simulate(rent("by_deadline", hours=hours / 3600), price=36.0, restart_seconds=200)
        assert ({moment.cores for moment in run.moments}, run.cost) == ({cores}, pytest.approx(cost))
        assert run.seconds <= hours or hours == 300
    # with changes for nothing, 700 s suffice for 2 cores at first and 1 in the end
    run = simulate(rent("by_deadline", hours=700 / 3600), price=36.0)
    assert run.seconds <= 700
    assert run.cost < 12.5
    assert [moment.cores for moment in run.moments] == [2, 1, 1]
    # with one core only for 300 s, 700 are left for 393 s: 3 cores make 3 in 1.625 s, which is between those of 2 and 4
    spans = ((1, 300), (4, 1e9))
    run = simulate(rent("by_deadline", hours=700 / 3600), price=36.0, spans=spans, restart_seconds=10)
    assert run.seconds <= 700
    assert [moment.cores for moment in run.moments] == [1, 3, 3]


def test_the_budget_is_kept_with_the_fewest_hours():
    for money, cores, seconds in ((21, 4, 500), (13, 2, 625), (10.5, 1, 1000), (5, 1, 1000)):
        run = simulate(rent("within_budget", money=money), price=36.0, restart_seconds=200)
        assert ({moment.cores for moment in run.moments}, run.seconds) == ({cores}, pytest.approx(seconds))
        assert run.cost <= money or money == 5
    # at twice the price for the first 100 s, 1 core: 2 are spent; of 14, 12 are left for 900, which cost 11.25 on 2
    prices = Prices([0.0, 100.0, 1e9], [72.0, 36.0])
    run = simulate(rent("within_budget", money=14), price=prices, restart_seconds=10)
    assert [moment.cores for moment in run.moments] == [1, 2, 2]
    assert run.cost == pytest.approx(2 + 0.2 + 11.25)


def test_no_cores_are_rented_above_the_largest_price():
    prices = Prices([0.0, 100.0, 300.0], [36.0, 72.0])
    run = simulate(rent("cheapest", max_price=36.0), price=prices, progress=150, restart_seconds=10)
    # 100 of progress, 200 s later a restart and 50 more
    assert (run.seconds, run.restarts) == (pytest.approx(300 + 10 + 50), 1)
    assert run.cost == pytest.approx(160 * 36 / 3600)
    with pytest.raises(ValueError, match="`max_price` must be at least 36, the lowest price, got 35"):
        simulate(rent("cheapest", max_price=35), price=prices)


def test_cores_that_are_never_cheap_enough_are_refused():
    prices = Prices([0.0, 100.0, 200.0], [72.0, 36.0])
    with pytest.raises(ValueError, match="market: no cores are available at a price of at most 50, the `max_price`"):
        simulate(rent("cheapest", max_price=50), price=prices, spans=((2, 100), (0, 100)))
    run = simulate(rent("cheapest", max_price=50), price=prices, spans=((2, 150), (0, 50)), progress=60)
    assert run.seconds == pytest.approx(310)  # 50 steps from 100 s on, 10 from 300 s on


def test_prices_that_change_at_any_time_are_reached():
    """Sums of these times are just before a change."""
    prices, now = Prices([0.0, 2.81, 76.78], [36.0, 72.0]), 0.0
    for _ in range(1000):
        seconds = prices.at(now)[1]
        assert now + seconds > now
        now += seconds
    assert now == pytest.approx(500 * 76.78)
    run = simulate(rent("cheapest"), price=prices)
    assert run.progress >= 1000


def test_a_run_saves_before_it_leaves_cores_by_choice():
    given = {"price": 36.0, "checkpoint_seconds": 1e6}
    chosen = simulate(rent("by_deadline", hours=700 / 3600), **given)
    assert [moment.cores for moment in chosen.moments] == [2, 1, 1]
    assert chosen.seconds <= 700
    assert chosen.lost_seconds < 1.25  # the current step
    # 2 cores leave after 100 s and come back: what they have made since the start is lost
    forced = simulate(rent("within_budget", money=13), spans=((2, 100), (1, 1e9)), **given)
    assert forced.lost_seconds == pytest.approx(100)


def test_a_step_continues_where_the_cores_stay_and_a_restart_too():
    # reviews after 600 s, and steps of 7 s on a core: no step is lost; a restart of 900 s is not cut short
    run = simulate(rent("cheapest"), price=36.0, updating=(7.0, 14.0, 28.0), progress=1000)
    assert (run.seconds, run.lost_seconds) == (pytest.approx(7000), 0)
    spans = ((4, 10), (0, 10), (4, 1e9))
    run = simulate(rent("cheapest"), price=36.0, spans=spans, restart_seconds=900, progress=1000)
    assert run.seconds == pytest.approx(10 + 10 + 900 + 990)


def test_invalid_rentals_are_rejected():
    with pytest.raises(ValueError, match="Cheapest needs a price, to choose the number of cores"):
        simulate(rent("cheapest"), price=None)
    with pytest.raises(ValueError, match="`hours` must be a positive number, got 0"):
        rent("by_deadline", hours=0)
    with pytest.raises(ValueError, match="`money` must be a positive number, got nan"):
        rent("within_budget", money=float("nan"))
    with pytest.raises(ValueError, match="`max_price` must be a non-negative number, got -1"):
        rent("cheapest", max_price=-1)


def test_rates_are_for_batch_sizes_of_at_least_the_reference():
    # without noise a step is worth 1, and has 4 minibatches: 4 s on one core, 1 + 1.15 on two, 1.3 on four
    given = {"minibatch_size": 32, "ref_batchsize": 128, "progress": 100, "price": 36.0}
    run = vbs.planning.simulate(
        RENTALS["by_deadline"](hours=200 / 3600, max_batch_size=256),
        profile=profile((1.0, 1.15, 1.3)),
        noise=lambda progress, batch_size: 1e-9,
        availability=vbs.planning.Availability.constant(4),
        restart_seconds=100,
        **given,
    )
    assert [moment.cores for moment in run.moments if moment.seconds == 0] == [4]
    assert run.seconds <= 200


def test_numbers_of_cores_without_an_allowed_batch_size_are_not_rented():
    rental = RENTALS["by_deadline"](hours=0.001, max_batch_size=64, min_per_core=32)
    run = simulate(rental, price=36.0)
    assert {moment.cores for moment in run.moments} == {2}


def test_only_numbers_of_cores_whose_times_are_known_are_rented():
    alone = vbs.planning.Profile([Measured(1, 1, 32, 1.0, 1.0)])
    together = vbs.planning.Profile([Measured(2, 4, 32, 1.0, 1.0)], "p.csv")
    given = {
        "availability": vbs.planning.Availability.constant(4, cores_per_machine=4),
        "price": 1.0,
        "ref_batchsize": 32,
    }
    given |= {"noise": lambda progress, batch_size: 1e9, "minibatch_size": 32, "progress": 10}
    run = vbs.planning.simulate(rent("by_deadline", hours=1e-6), profile=alone, **given)
    assert {moment.cores for moment in run.moments} == {1}
    with pytest.raises(ValueError, match=r"p.csv must have a row with several cores on one machine, to time their"):
        vbs.planning.simulate(rent("cheapest"), profile=together, **given)
