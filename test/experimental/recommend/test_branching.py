"""Legs of branches: what they start from, that they resume, and how far they move."""

import dataclasses
import math

import pytest
import torch

from variable_batch_size.experimental.recommend import branching
from variable_batch_size.experimental.recommend.branching import InThisProcess, Leg, Legs, Source, rule_of, run_leg

SOURCE = Source("digits", None, None, "cpu", 1, None, 16, 16, 3200)
TRUNK = Leg(0, "constant", 16, 9, 0, 320)


def leg(**changes):
    return Leg(320, "linear", 64, 0, 0, 320)._replace(**changes)


def legs_in(folder, ended=None):
    return Legs(SOURCE, folder, InThisProcess(), lambda leg, ran: ended.append(leg) if ended is not None else None)


def test_legs_start_from_the_state_before_and_are_the_same_each_time():
    _, state = run_leg(SOURCE, TRUNK, None)
    (first, _), (again, _) = (run_leg(SOURCE, leg(), state) for _ in range(2))
    assert first.curve == again.curve
    assert [samples for samples, _ in first.curve] == [0, 64, 128, 192, 256, 320]
    reference, _ = run_leg(SOURCE, leg(arm="constant", batch_size=16), state)
    assert reference.curve[0] == first.curve[0]
    assert reference.curve[-1] != first.curve[-1]


def test_two_legs_continue_the_same_rule():
    _, state = run_leg(SOURCE, TRUNK, None)
    first, middle = run_leg(SOURCE, leg(arm="adascale"), state)
    second, _ = run_leg(SOURCE, leg(arm="adascale", begin=320, end=640), middle)
    assert second.curve[0][0] == 320 + 64
    assert second.noise > 0
    assert second.loss < first.loss


def test_the_sum_of_gradients_continues_from_the_momentum_of_means():
    # four minibatches at the reference batch size, where both rules do the same
    source = SOURCE._replace(ref_batchsize=64)
    _, state = run_leg(source, TRUNK._replace(batch_size=64), None)
    ends = {}
    for arm in ("linear", "linear_momentum"):
        _, saved = run_leg(source, leg(arm=arm, batch_size=64, end=64), state)
        ends[arm] = branching.torch.load(branching.io.BytesIO(saved), weights_only=True)[0]["0.weight"]
    assert torch.allclose(ends["linear"], ends["linear_momentum"], atol=1e-6)


def test_a_schedule_is_that_of_the_whole_training(tmp_path, monkeypatch):
    seen = []
    workload = branching.load_workload("digits", None)
    object.__setattr__(workload, "schedule", lambda fraction: seen.append(fraction) or 0.0)
    monkeypatch.setattr(branching, "_workload", lambda *_: workload)
    ran, _ = run_leg(SOURCE, leg(begin=0, end=128), run_leg(SOURCE, TRUNK, None)[1])
    assert seen[-3:] == [320 / 3200, 384 / 3200, 448 / 3200]
    assert ran.curve[0][1] == ran.curve[-1][1]  # at a learning rate of 0


def test_legs_that_have_ended_are_not_run_again(tmp_path, monkeypatch):
    parts = [(leg(), TRUNK), (leg(seed=1), TRUNK)]
    made = {**legs_in(tmp_path).run([(TRUNK, None)]), **legs_in(tmp_path).run(parts)}
    monkeypatch.setattr(branching, "run_leg", None)
    ended = []
    again = legs_in(tmp_path, ended)
    assert {**again.run([(TRUNK, None)]), **again.run(parts)} == made
    assert ended == [TRUNK, leg(), leg(seed=1)]


def test_error_of_a_failed_leg_names_it_and_the_reason(tmp_path, capsys):
    source = SOURCE._replace(source="another")
    with pytest.raises(ValueError, match=r"constant at 16, seed 9, .* failed: ValueError: the file of digits differs"):
        Legs(source, tmp_path, InThisProcess(), lambda leg, ran: None).run([(TRUNK, None)])


def test_movements_are_along_the_reference_with_other_seeds(tmp_path, monkeypatch):
    workload = dataclasses.replace(
        branching.load_workload("digits", None), model=lambda: torch.nn.Linear(2, 1, bias=False)
    )
    monkeypatch.setattr(branching, "_workload", lambda *_: workload)
    ends = {("ref", 0): (2.0, 1.0), ("ref", 1): (2.0, 2.0), ("arm", 0): (1.5, 4.0), ("arm", 1): (1.5, 1.0)}
    spans = {}
    for (arm, seed), end in ends.items():
        one, two = leg(arm=arm, seed=seed), leg(arm=arm, seed=seed, begin=320, end=640)
        for part, place in ((one, (1.0, 1.0)), (two, end)):
            state = {"weight": torch.tensor([place]), "buffer": torch.ones(3)}
            torch.save([state], tmp_path / f"{part.file_name}.pt")
        spans.setdefault(arm, []).append((one, two))
    spans["diverged"] = [None, spans["arm"][1]]
    legs = legs_in(tmp_path)
    # displacements (1, 0) and (1, 1), whose product is 1; and (0.5, 3) · (1, 1), (0.5, 0) · (1, 0)
    found = legs.moved("moved", spans, "ref")
    assert (found["ref"], found["arm"], found["diverged"][1]) == ([1.0, 1.0], [3.5, 0.5], 0.5)
    assert math.isnan(found["diverged"][0])
    legs.forget(one for own in spans.values() for span in own if span for one in span)
    assert legs.moved("moved", spans, "ref")["arm"] == [3.5, 0.5]


def test_a_leg_records_the_factor_of_its_learning_rate():
    _, state = run_leg(SOURCE, TRUNK, None)
    assert run_leg(SOURCE, leg(arm="root"), state)[0].factor == 2.0
    assert 1 < run_leg(SOURCE, leg(arm="adascale"), state)[0].factor < 4


def test_a_diverged_leg_ends_with_an_infinite_loss():
    ran, _ = run_leg(SOURCE._replace(lr=1e30), TRUNK, None)
    assert ran.loss == math.inf
    assert ran.curve[-1][0] < 320


def test_exponents_without_a_rule_have_one():
    assert rule_of("S^0.25").exponent == 0.25
    assert type(rule_of("root")).__name__ == "RootRule"
