"""OpenSteps: steps whose number of minibatches is not known in advance; OpenSchedule: those that are complete."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import Unpack

from variable_batch_size.checks import check_positive_number
from variable_batch_size.schedules.schedule import BaseSchedule, Integers, Layout, ScheduleHistory, run_lengths
from variable_batch_size.traces.trace import Trace

_ENDLESS = 2**62  # the end of an epoch, while that is not known


@dataclass(frozen=True)
class OpenSteps:
    """Takes the place of a trace: a step ends when every core has ended its part, after any number of minibatches.

        sampler = vbs.CustomSampler(prompts, vbs.OpenSteps(), minibatch_size=4)
        optimizer = vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=64, model=model)
        for minibatch in optimizer.minibatches(own):
            loss_of(model(minibatch)).backward()
            optimizer.step(weight=num_tokens(minibatch))

    The batch size of a step is the number of its minibatches on all cores times `minibatch_size`, and is known once the
    gradients are summed.

    Args:
        timeout: seconds that a core waits for the others to end a step, before it raises with the cores' positions.
    """

    timeout: float = 600.0

    def __post_init__(self) -> None:
        check_positive_number(timeout=self.timeout)


@final
class OpenSchedule(BaseSchedule):
    """A schedule whose rows are the completed steps. Epochs begin where a run begins them.

    A row has its batch size, and the number of samples that the cores have read from their loaders in the step. The sum
    of these numbers is the position in the data.
    """

    is_open = True
    on_end = "hold"
    name = "open steps"
    description = "open steps"
    num_epochs = None
    is_endless = True

    def __init__(self, steps: OpenSteps, **layout: Unpack[Layout]) -> None:
        super().__init__(**layout)
        if self.max_minibatch_size > self.minibatch_size:
            rule = "`max_minibatch_size` must be None with OpenSteps"
            raise ValueError(f"{rule}, whose batch sizes are not known in advance, got {self.max_minibatch_size}")
        self.timeout = steps.timeout
        self._rows: list[int] = []
        self._reads: list[int] = []

    @property
    def num_done(self) -> int:
        """Number of completed steps."""
        return len(self._rows)

    def append(self, num_minibatches: int, num_read: int) -> int:
        """Add a completed step, by the minibatches that all cores have run and read; returns its batch size."""
        self._rows.append(num_minibatches * self.minibatch_size)
        self._reads.append(num_read * self.minibatch_size)
        return self._rows[-1]

    def samples_read(self, epoch: int, num_steps: int | None = None) -> int:
        """The samples of an epoch that its completed steps have read, or only the first `num_steps` of them."""
        steps = self.steps(epoch)[:num_steps]
        return sum(self._reads[steps.start : steps.stop])

    @property
    def trace(self) -> Trace:
        return Trace.from_sequence(self._rows)

    def steps(self, epoch: int) -> range:
        """The steps of an epoch; the end of the current one is not known."""
        self._check_epoch(epoch)
        starts = [*self._starts, len(self._rows)]
        start = starts[min(epoch, len(self._starts))]
        return range(start, starts[epoch + 1] if epoch + 1 < len(self._starts) else _ENDLESS)

    def begin_epoch(self, epoch: int, first_step: int = 0) -> None:
        self._starts += [len(self._rows)] * (epoch + 1 - len(self._starts))

    def check_position(self, epoch: int, first_step: int) -> None:
        """Raise if a pass begins anywhere else than after the completed steps."""
        if epoch + 1 < len(self._starts):
            raise ValueError(f"epoch {epoch} of open steps is over: the run is in epoch {len(self._starts) - 1}")
        done = len(self._rows) - self.steps(epoch).start
        if first_step != done:
            raise ValueError(
                f"`first_step` must be {done}, the completed open steps of epoch {epoch}, got {first_step}"
            )

    def steps_from(self, epoch: int, first_step: int) -> Iterator[int]:
        """The steps of an epoch from its `first_step` on, as long as it has samples that were not read."""
        for step in self.steps(epoch)[first_step:]:
            if self.samples_read(epoch) + self.minibatch_size > self.capacity:
                return
            yield step

    def ended_early(self, epoch: int, num_steps: int) -> bool:
        return False

    def samples_before(self, step: int) -> int:
        return sum(self._rows[:step])

    def batch_size(self, step: int) -> int:
        """The samples of a step, summed over cores; 0 until it is complete."""
        return self._rows[step] if step < len(self._rows) else 0

    def past(self, epoch: int, first_step: int) -> ScheduleHistory:
        starts = [*self._starts, *[len(self._rows)] * (epoch + 1 - len(self._starts))][: epoch + 1]
        rows = np.array(self._rows[: starts[-1] + first_step], dtype=np.int64)
        return ScheduleHistory(*run_lengths(rows), tuple(starts), has_ended=False)

    def after(self, past: ScheduleHistory) -> "OpenSchedule":
        """This schedule, with the rows of the history, each of which has read its samples unless a state is loaded."""
        self._rows, self._starts = past.rows().tolist(), list(past.starts)
        self._reads = list(self._rows)
        return self

    def num_minibatches_for(self, epoch: int, rank: int, first_step: int = 0) -> int:
        """An estimate, as cores read minibatches when they need them."""
        left = (self.capacity - self.samples_read(epoch)) // self.minibatch_size
        return -(-left // self.num_replicas)

    def _next_sizes(self, epoch: int, step: int, used: int) -> Integers:
        raise RuntimeError("open steps have no size before they are complete")

    def state_dict(self) -> dict[str, Any]:
        """The completed steps, run-length encoded, and their epochs."""
        encoded = {}
        for name, values in (("rows", self._rows), ("reads", self._reads)):
            groups = [(value, len([*group])) for value, group in itertools.groupby(values)]
            encoded[name] = [list(pair) for pair in groups]
        return {**encoded, "starts": list(self._starts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows, self._reads = (
            [value for value, count in state[name] for _ in range(count)] for name in ("rows", "reads")
        )
        self._starts = list(state["starts"])
