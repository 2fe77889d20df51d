"""FirstNames: what the first version of the module called some things that can be read of an optimizer."""

from __future__ import annotations

from variable_batch_size.training.scheduled import ScheduledOptimizer


class FirstNames(ScheduledOptimizer):
    """Names for scripts that were written for the first version."""

    def get_lr(self) -> tuple[float, ...]:
        """The learning rates of all parameter groups at `ref_batchsize`; :meth:`current_lr` is the scaled one."""
        return tuple(group["lr"] for group in self.param_groups)

    def get_bs(self) -> int:
        """The batch size of the step that the next minibatch belongs to; 0 if all steps of the epoch are done."""
        schedule = self.sampler.schedule
        steps = schedule.steps(self.epoch)
        return schedule.batch_size(steps[self.epoch_step]) if self.epoch_step < len(steps) else 0
