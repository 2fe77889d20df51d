"""TokenBudget: minibatches of as many samples as fit into a number of tokens."""

from collections.abc import Callable, Sequence, Sized
from typing import Any, final

from variable_batch_size.data.sampler import CustomSampler, Description, TraceOrPolicy
from variable_batch_size.schedules.schedule import Minibatches, OnEnd
from variable_batch_size.schedules.token_plan import Shape, TokenPlan, TooLong


@final
class TokenBudget(CustomSampler):
    """Yields minibatches of samples of similar length, as many as fit into `tokens`; the trace is in tokens.

        budget = vbs.TokenBudget(lengths, trace="0:16384 100:65536", tokens=8192)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=budget, collate_fn=collate)
        optimizer = vbs.Optimizer(inner, budget, rule="adam:half-life", ref_batchsize=16384)
        for epoch in optimizer.epochs(3):
            for inputs, targets in loader:
                loss_fn(model(inputs), targets, reduction="sum").backward()
                optimizer.step(weight=(targets != IGNORED).sum())

    A minibatch counts as `tokens` tokens, the most that it holds, padding included: a step of 65,536 is eight
    minibatches of 8,192. Rules and positions use these numbers, which are known beforehand; the gradient is the mean
    over the weights passed to ``step()``, such as the actual tokens, which ``optimizer.weight_done`` counts.

    Each sample is in one minibatch of an epoch. Which samples a minibatch has, and which minibatches a step, depends on
    the lengths, the trace, the seed and the epoch only (:class:`TokenPlan`). An epoch takes steps while they fit, as
    with a :class:`CustomSampler`.

    Args:
        lengths: the tokens of each sample of the data set: a sequence, an array, or a memory-mapped one, as from
            ``numpy.load(path, mmap_mode="r")``.
        trace: the tokens of every step, as the batch sizes for :class:`CustomSampler`; multiples of `tokens`. Or a
            policy, or a function of the situation.
        tokens: the most that a minibatch holds: rows times their padded length, or, if `packed`, its samples together.
        packed: whether the samples of a minibatch become one row without padding in between.
        max_shapes: the most shapes of padded minibatches, each of which XLA compiles once. More shapes need less
            padding.
        multiple_of: padded lengths are multiples of this, as some accelerators prefer.
        too_long: what happens to samples of more than `tokens`: ``"raise"``; ``"drop"`` never uses them; ``"truncate"``
            counts them as `tokens`, the length with which the data set must then return them.
        shuffle: whether minibatches, and samples of similar length, are shuffled, differently in each epoch; otherwise
            they are sorted by length. `seed`, `on_end`, `num_replicas`, `rank`, `process_group` and `lockstep` are
            those of :class:`CustomSampler`.

    >>> lengths = [5, 2, 8, 2, 3, 7, 2, 2]
    >>> budget = TokenBudget(lengths, trace=[16, 32], tokens=16, num_replicas=1, rank=0, shuffle=False)
    >>> list(budget)
    [[1, 3, 6, 7, 4], [0, 5], [2]]
    """

    needs_weights = True
    unit = "tokens"
    _at_once = 64  # minibatches that are computed together

    def __init__(
        self,
        lengths: Any,
        trace: TraceOrPolicy = "",
        *,
        tokens: int,
        packed: bool = False,
        max_shapes: int = 32,
        multiple_of: int = 1,
        too_long: TooLong = "raise",
        seed: int = 0,
        shuffle: bool = True,
        on_end: OnEnd | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        lockstep: bool = False,
    ) -> None:
        of_shapes: Any = {"max_shapes": max_shapes, "multiple_of": multiple_of, "too_long": too_long}
        self.plan = TokenPlan(lengths, tokens=tokens, packed=packed, **of_shapes)
        super().__init__(
            trace=trace,
            dataset_size=self.plan.num_minibatches * self.plan.tokens,
            minibatch_size=self.plan.tokens,
            num_replicas=num_replicas,
            rank=rank,
            process_group=process_group,
            seed=seed,
            shuffle=shuffle,
            on_end=on_end,
            lockstep=lockstep,
        )

    @property
    def num_samples(self) -> int:
        """The length of the data set, including samples that are too long."""
        return self.plan.num_samples + self.plan.num_dropped

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of an epoch's minibatches, by rising length."""
        return self.plan.shapes

    @property
    def description(self) -> Description:
        """What the samples of a step depend on, besides the trace and the tokens of a minibatch."""
        return {**self.plan.description, "seed": self.seed, "shuffle": self.shuffle}

    def __repr__(self) -> str:
        plan, core = self.plan, f"core {self.rank} of {self.num_replicas}"
        of = f"{plan.num_samples:,} samples in {plan.num_minibatches:,} minibatches of {plan.tokens:,} tokens"
        return f"<TokenBudget of {self.schedule.name}: {of}, {core}, epoch {self.epoch}>"

    def _check_dataset(self, dataset: Any) -> None:
        if isinstance(dataset, Sized) and len(dataset) != self.num_samples:
            rule = f"`lengths` must have one number for each of the {len(dataset)} samples of the loader's data set"
            raise ValueError(f"{rule}, got {self.num_samples}")

    def _order(self) -> Callable[[Minibatches], Sequence[list[int]]]:
        key = (self.seed, self.epoch) if self.shuffle else None
        return lambda minibatches: self.plan.samples(minibatches.starts // minibatches.size, key)

    def padded_length(self, lengths: Sequence[int]) -> int:
        """How long to make the rows of a minibatch of samples of these lengths, so that it has one of the `shapes`."""
        return self.plan.padded_length(lengths)
