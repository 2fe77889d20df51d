"""Part: what happens around the minibatches and steps of a run; Hooks: what the parts of a run override."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, final

from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.flow import Outcome
from variable_batch_size.optim.gradients.accumulator import StepGradient
from variable_batch_size.optim.proxy import OptimizerProxy
from variable_batch_size.optim.run import Run
from variable_batch_size.rules.rule import Step


class Part:
    """What happens around minibatches and steps: a log, a checkpoint, an average of the weights, a test now and then.

        class Evaluation(vbs.Part):
            def begin_pass(self, run):
                self.run = run

            def after_step(self, plan, step, outcome):
                if self.run.steps_done % 100 == 0:
                    print(self.run.samples_done, evaluate(model))

        optimizer.attach(Evaluation())

    Override what is needed: other methods are not called. They are called on every core, in this order; a core that is
    idle in a step has it, too, with padding. From `after_backward` to `after_step`, gradients are switched off.
    """

    @property
    def names(self) -> Sequence[str]:
        """In words, what must be the same on all cores: by default nothing."""
        return ()

    def on_attach(self, optimizer: OptimizerProxy) -> None:
        """``optimizer.attach(part)`` was called: the place to refuse."""

    def begin_pass(self, run: Run) -> None:
        """The run has moved to an epoch, or within one. Also called when the part is attached."""

    def watch(self, is_on: bool) -> None:
        """Add hooks to the model, or remove them: no minibatch runs outside of a pass."""

    def on_request(self, *, is_first: bool, is_run_next: bool) -> None:
        """The loop requests a minibatch: the first of a pass or another, which it runs next or reads ahead."""

    def before_first_minibatch(self) -> None:
        """The first minibatch of a pass has run, and does not count yet: the place to raise."""

    def after_backward(self, plan: StepPlan) -> None:
        """A minibatch has run: ``p.grad`` is its gradient."""

    def before_reduce(self, plan: StepPlan) -> None:
        """This core has run all of its minibatches of a step."""

    def before_update(self, step: Step, gradient: StepGradient) -> None:
        """``p.grad`` is the mean gradient of the step, before clipping."""

    def after_step(self, plan: StepPlan, step: Step, outcome: Outcome) -> None:
        """A step is complete and counted; with ``outcome.reason``, its update was skipped."""

    def before_minibatch(self, upcoming: StepPlan | None) -> None:
        """The next minibatch may run; None if the epoch has no more."""

    def after_minibatch(self, plan: StepPlan, loss: Any) -> None:
        """All is done for a minibatch, and for its step if it was the last one: the place to save."""

    def state_dict(self) -> dict[str, Any]:
        """What an attached part needs to resume, for a checkpoint: called on all cores, of which core 0 saves it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""


P = ParamSpec("P")


@final
class Hooks:
    """The methods that parts override, in the order of the parts: what is not overridden costs nothing."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = parts = tuple(parts)
        self.begin_pass = _overridden(parts, Part.begin_pass)
        self.watch = _overridden(parts, Part.watch)
        self.on_request = _overridden(parts, Part.on_request)
        self.before_first_minibatch = _overridden(parts, Part.before_first_minibatch)
        self.after_backward = _overridden(parts, Part.after_backward)
        self.before_reduce = _overridden(parts, Part.before_reduce)
        self.before_update = _overridden(parts, Part.before_update)
        self.after_step = _overridden(parts, Part.after_step)
        self.before_minibatch = _overridden(parts, Part.before_minibatch)
        self.after_minibatch = _overridden(parts, Part.after_minibatch)


def _overridden(parts: Sequence[Part], method: Callable[Concatenate[Any, P], None]) -> tuple[Callable[P, None], ...]:
    name = method.__name__
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not method)
