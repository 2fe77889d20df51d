"""PolicyTiming: when a policy decides, and the situation passed to it."""

import variable_batch_size as vbs
from variable_batch_size.policies.timing import PolicyTiming


class Counting(vbs.Policy):
    """Adds one minibatch each time, and records the situations."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked = []

    def decide(self, situation):
        self.asked.append(situation)
        return 32 * len(self.asked)


SITUATION = vbs.policies.Situation(cores=2, minibatch_size=32, ref_batchsize=64, steps_done=7)


def test_rows_are_decided_in_blocks_up_to_the_lead():
    asking = PolicyTiming(vbs.policies.PerCore(every=20, lead=16))
    assert [asking.num_rows(ahead) for ahead in (0, 1, 16, 17, 36)] == [26, 25, 10, 0, 0]  # a short one to begin with
    asking.note_steps(64, 2, None, depth=1)
    assert [asking.num_rows(ahead) for ahead in (0, 1, 16, 17, 36)] == [36, 35, 20, 0, 0]
    asking.restart(64)
    assert asking.num_rows(0) == 26
    assert PolicyTiming(vbs.policies.PerCore(every=3, lead=2)).num_rows(0) == 5


def test_policy_does_not_decide_again_before_its_decision_was_executed():
    asking = PolicyTiming(Counting())
    assert asking.answer(SITUATION).batch_size == 32
    for number in (0, 4):
        asking.note_steps(32, 2, 1.0, depth=1, number=number)
        assert asking.answer(SITUATION) == (32, "last decision not executed yet")
    asking.note_steps(64, 2, 1.0, depth=1, number=10)  # of another batch size
    assert asking.answer(SITUATION).batch_size == 32
    asking.note_steps(32, 2, 1.0, depth=1)
    assert asking.answer(SITUATION).batch_size == 64
    assert asking.answer(SITUATION).batch_size == 64
    assert [found.batch_size for found in asking.policy.asked] == [None, 32]


def test_times_are_passed_once_two_depths_were_timed():
    asking = PolicyTiming(Counting())
    asking.answer(SITUATION)
    asking.note_steps(32, 2, None, depth=1, number=9)  # without a time
    asking.answer(SITUATION)
    asking.note_steps(64, 2, 4.0, depth=1, number=9)
    asking.answer(SITUATION)
    asking.note_steps(96, 2, 5.0, depth=2, number=9)
    asking.answer(SITUATION)
    told = [(s.seconds_accumulating, s.seconds_updating, s.timed_depths, s.is_fresh) for s in asking.policy.asked]
    assert told == [
        (None, None, (), True),
        (None, None, (), False),
        (None, None, (1,), False),
        (1.0, 4.0, (1, 2), False),
    ]
    assert {found.steps_done for found in asking.policy.asked} == {7}


def test_after_a_restart_it_decides_immediately_with_all_times():
    asking = PolicyTiming(Counting())
    asking.answer(SITUATION)
    asking.note_steps(32, 2, 4.0, depth=1, number=9)
    asking.note_steps(64, 2, 5.0, depth=2, number=9)
    asking.answer(SITUATION)
    asking.restart(32)
    assert asking.answer(SITUATION).batch_size == 96
    latest = asking.policy.asked[-1]
    assert (latest.batch_size, latest.largest_batch_size) == (32, 64)
    assert (latest.seconds_updating, latest.is_fresh) == (4.0, True)
    asking.restart(32, on_same_minibatches=False)
    asking.answer(SITUATION)
    assert asking.policy.asked[-1].seconds_updating is None
    asking.restart(None)
    asking.answer(SITUATION)
    assert asking.policy.asked[-1].batch_size is None


def test_decision_of_another_core_is_taken_over():
    asking = PolicyTiming(Counting())
    asking.take_over(128)
    assert asking.answer(SITUATION).batch_size == 128
    asking.note_steps(128, 2, 1.0, depth=2, number=5)
    asking.take_over(128)  # again, which is no change
    asking.answer(SITUATION)
    assert asking.policy.asked[0].batch_size == 128


def test_state_is_saved():
    asking, other = PolicyTiming(vbs.policies.OnPlateau(patience=1)), PolicyTiming(vbs.policies.OnPlateau(patience=1))
    asking.answer(SITUATION)
    asking.policy.tell(1.0)
    asking.policy.tell(1.0)
    asking.note_steps(64, 2, 4.0, depth=1, number=5)
    asking.note_steps(96, 2, 5.0, depth=2, number=5)
    other.load_state_dict(asking.state_dict(), cores=2)
    assert other.state_dict() == asking.state_dict()
    old = {key: value for key, value in asking.state_dict().items() if key not in ("largest", "is_fresh")}
    old["times"] = {"seconds": {1: [4.0] * 5, 2: [5.0] * 5}, "before": None}
    other.load_state_dict(old, cores=2)
    assert other.times.seconds(2) == (1.0, 4.0)
    assert other.answer(SITUATION) == (128, "1 values no better than 1")
