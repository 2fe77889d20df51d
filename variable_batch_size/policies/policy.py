"""Policy: decides the batch size of the next steps from what a run has measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, final

from typing_extensions import Unpack

from variable_batch_size.checks import check_positive
from variable_batch_size.policies.bounds import Bounds, BoundsOptions
from variable_batch_size.policies.situation import Situation


class Decision(NamedTuple):
    """A batch size, and why it is this one."""

    batch_size: int
    reason: str


class Policy(ABC):
    """How the batch size of the next steps follows from a situation.

    A policy of your own needs one method:

    >>> class HalfTheNoise(Policy):
    ...     def decide(self, situation):
    ...         return situation.noise_scale / 2 if situation.knows_noise else situation.ref_batchsize
    >>> policy = HalfTheNoise(max_batch_size=1024)
    >>> policy.answer(Situation(cores=4, minibatch_size=32, ref_batchsize=128, noise_scale=500.0))
    Decision(batch_size=256, reason='')

    Args:
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided; at least as many as the minibatches that a loader reads
            ahead, which is its `num_workers` times its `prefetch_factor`.
        bounds: `min_batch_size`, `max_batch_size`, `min_per_core`, `max_per_core`, `max_growth` and `threshold`, as
            :class:`Bounds` has them.
    """

    needs_noise: ClassVar[bool] = False
    """Whether the policy cannot decide without the noise of the gradient."""

    needs_loss: ClassVar[bool] = False
    """Whether it cannot without a loss, or another metric, which a simulation does not have."""

    def __init__(self, *, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]) -> None:
        check_positive(every=every, lead=lead)
        self.every = int(every)
        self.lead = int(lead)
        self.bounds = Bounds(**bounds)
        self.why = ""

    @abstractmethod
    def decide(self, situation: Situation) -> float:
        """The batch size that the next steps should have; it is rounded to whole minibatches within the bounds.

        It may leave a reason in ``self.why``, for the log.
        """

    def worth(self, situation: Situation, batch_size: int) -> float:
        """What the policy goes by, for `threshold`: the batch size itself, unless it knows better."""
        return float(batch_size)

    def answer(self, situation: Situation) -> Decision:
        """The batch size of the next steps, within the bounds, and why."""
        self.why = ""
        wish = self.decide(situation)
        size, now = self.bounds.nearest(wish, situation), situation.batch_size
        if now is None or size == now or self._must_leave(situation, now):
            return Decision(size, self.why)
        if not self.bounds.is_worth_it(self.worth(situation, size), self.worth(situation, now)):
            return Decision(now, f"{size} is not worth a change")
        return Decision(size, self.why)

    def _must_leave(self, situation: Situation, now: int) -> bool:
        minibatches, rest = divmod(now, situation.minibatch_size)
        return rest > 0 or minibatches not in self.bounds.minibatches(situation)

    def state_dict(self) -> dict[str, Any]:
        """What the policy has to remember from one decision to the next: numbers, lists and dictionaries."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take over what :meth:`state_dict` returned."""

    @property
    def description(self) -> str:
        """What the policy is, with its settings; the same on all cores, and when a run goes on."""
        settings = {
            name: value
            for name, value in {**vars(self), **vars(self.bounds)}.items()
            if not name.startswith("_") and name != "why" and isinstance(value, (bool, int, float, str))
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"


@final
class FunctionPolicy(Policy):
    """A function of the situation as a policy, for one that needs another `every` or bounds.

    >>> policy = FunctionPolicy(lambda situation: 64 * situation.cores, every=5, max_batch_size=512)
    >>> policy.answer(Situation(cores=10, minibatch_size=32, ref_batchsize=128)).batch_size
    512
    """

    def __init__(
        self,
        function: Callable[[Situation], float],
        *,
        every: int = 20,
        lead: int = 16,
        **bounds: Unpack[BoundsOptions],
    ) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self._function = function

    def decide(self, situation: Situation) -> float:
        return self._function(situation)


def policy_of(source: Policy | Callable[[Situation], float]) -> Policy:
    """A policy as it is, and a function as one."""
    return source if isinstance(source, Policy) else FunctionPolicy(source)
