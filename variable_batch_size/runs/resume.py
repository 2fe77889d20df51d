"""What may change when a run is resumed, and where it continues."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from variable_batch_size.checks import check_one_of
from variable_batch_size.optim.consistency import differences
from variable_batch_size.schedules.schedule import BaseSchedule, ScheduleHistory

MAY_CHANGE = (
    "trace",
    "on_end",
    "dataset_size",
    "minibatch_size",
    "seed",
    "shuffle",
    "rule",
    "ref_batchsize",
    "exact",
    "seed_minibatches",
    "threads",
)
"""What ``accept`` may name. With another inner optimizer the state means something else: that is a new run."""

_CHANGE_THE_SCHEDULE = ("trace", "on_end", "dataset_size", "minibatch_size")


class ResumePoint(NamedTuple):
    """Where a run goes on.

    Args:
        schedule: its steps, past and to come.
        epoch: the number of the epoch.
        first_step: how many of its steps are done.
        steps_of_epochs: how many steps of each epoch before this one were made.
    """

    schedule: BaseSchedule
    epoch: int
    first_step: int
    steps_of_epochs: list[int]


def check_accept(accept: Collection[str]) -> frozenset[str]:
    """The names of what may change, or a refusal of one that is unknown."""
    if isinstance(accept, str):
        raise ValueError(f"`accept` must be a set of names, got the text {accept!r}")
    for name in accept:
        check_one_of(MAY_CHANGE, accept=name)
    return frozenset(accept)


def refused(saved: Mapping[str, object], now: Mapping[str, object], accept: Collection[str]) -> list[str]:
    """In what a run is not the one that was saved and may not be another, each in words."""
    accepted = {*accept, *(("settings of the rule",) if "rule" in accept else ())}
    return differences(saved, {name: value for name, value in now.items() if name not in accepted})


def past_state(past: ScheduleHistory) -> dict[str, Any]:
    """A past as a checkpoint holds it."""
    sizes, counts = (torch.from_numpy(values.copy()) for values in (past.sizes, past.counts))
    return {"sizes": sizes, "counts": counts, "starts": list(past.starts), "has_ended": past.has_ended}


def place_of(state: Mapping[str, Any], schedule: BaseSchedule, now: Mapping[str, object]) -> ResumePoint:
    """Where a run stands in a schedule, which need not be the one that it was saved with.

    An epoch that ended because its trace did goes on, if the trace now does.
    """
    place = ResumePoint(schedule, state["epoch"], state["epoch_step"], list(state["steps_of_epochs"]))
    if "past" not in state:  # of the first version
        changed = [name for name in _CHANGE_THE_SCHEDULE if state["run"].get(name) != now[name]]
        if changed:
            raise ValueError(f"{', '.join(changed)} must stay: the checkpoint is too old to hold the rows of its trace")
        return place
    saved = state["past"]
    past = ScheduleHistory(saved["sizes"].numpy(), saved["counts"].numpy(), tuple(saved["starts"]), saved["has_ended"])
    if past.has_ended and not place.first_step and place.epoch:
        *before, number = place.steps_of_epochs
        longer = schedule.after(past.without_last_epoch())
        if past.starts[-2] + number == past.num_rows and number < len(longer.steps(place.epoch - 1)):
            return ResumePoint(longer, place.epoch - 1, number, before)
    return place._replace(schedule=schedule.after(past))


def refuse_other_sums(state: Mapping[str, Any], now: Mapping[str, object], *, sums_gradients: bool) -> None:
    """Refuse a change that would leave the momentum of summed gradients at another size."""
    changed = [name for name in ("rule", "minibatch_size") if state["run"].get(name) != now[name]]
    if changed and (sums_gradients or state.get("sums_gradients", False)):
        raise ValueError(
            f"{' and '.join(changed)} must stay where a rule sums gradients instead of averaging them: the momentum so "
            "far is that of sums over as many minibatches"
        )
