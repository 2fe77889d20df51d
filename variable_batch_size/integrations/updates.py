"""Updates: an optimizer of the library as a loop sees it that calls ``step()`` once for each update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from variable_batch_size.integrations.going_on import load_state, state_of
from variable_batch_size.training.optimizer import CustomOptimizer


class Updates(Optimizer):
    """Stands where a framework wants its optimizer, after something else has run all minibatches of the step.

    Its ``step()`` changes nothing, and sees that there was an update.

    Args:
        variable: who makes the updates.
    """

    # Accelerate then takes it as it is, and asks it whether the step was skipped
    _is_accelerate_prepared = True

    def __init__(self, variable: CustomOptimizer) -> None:
        self.variable = variable
        self._steps_seen = variable.steps_made
        # sets up hooks and profiling as Optimizer.__init__ does, without a second set of param_groups and state
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.variable.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.variable.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.variable.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was made without an update, as its gradient was not finite."""
        return not self.variable.updated

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """See that a step was made since the latest call."""
        if self.variable.steps_made != self._steps_seen + 1:
            raise RuntimeError(
                f"{self.variable.steps_made - self._steps_seen} steps were made where the loop counts one: whoever "
                "replaces `training_step` must call that of its base"
            )
        self._steps_seen = self.variable.steps_made

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: there are no gradients after a step."""

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.variable)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_state(self.variable, state_dict)
