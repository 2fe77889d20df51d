"""Writes the trace that a run has really executed, to be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from variable_batch_size.files import write
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Trace


def write_executed(path: Path, schedule: Schedule, steps_of_epochs: Sequence[int], *, origin: str) -> None:
    """Write the batch sizes of the steps that were made, with where they come from in comments.

    Args:
        path: the CSV file; replaced as a whole, so that a crash leaves the old one.
        schedule: the schedule of the run.
        steps_of_epochs: how many steps of each epoch were made, from epoch 0 on.
        origin: what the run was, in one line.
    """
    made = [schedule.steps(epoch)[:number] for epoch, number in enumerate(steps_of_epochs) if number]
    sizes = [schedule.batch_size(step) for steps in made for step in steps]
    if not sizes:
        return
    comment = [f"executed from {schedule.trace.name}: {origin}"]
    for epoch, number in enumerate(steps_of_epochs[:-1]):
        if number < len(schedule.steps(epoch)):
            comment.append(
                f"epoch {epoch} was left after {number} of its {len(schedule.steps(epoch))} steps: "
                "replayed, the epochs begin elsewhere"
            )
    trace = Trace.from_sequence(sizes)
    write(path, lambda temporary: trace.write(temporary, comment="\n".join(comment)))
