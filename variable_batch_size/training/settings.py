"""Settings: the parameter groups of the inner optimizer for one step, then as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.training.adam_bias import AdamBias, is_decoupled

Group = dict[str, Any]


class Settings:
    """Gives the parameter groups what a rule wants them to have in one step.

    Args:
        inner: the optimizer whose groups they are.
        communicator: knows in which form numbers may change without compiling again.

    Attributes:
        adam_bias: what is remembered of betas that vary; part of the state of a run.
    """

    def __init__(self, inner: Optimizer, communicator: Communicator) -> None:
        self._inner = inner
        self._communicator = communicator
        self.adam_bias = AdamBias(inner)

    @contextmanager
    def of_step(self, rule: Rule, step: Step, factors: Sequence[float]) -> Iterator[list[float]]:
        """Within, the groups have the settings that the rule gives this step; yields their learning rates."""
        groups = self._inner.param_groups
        found = list(groups)
        changed: list[tuple[Group, Group]] = []  # groups, and their values before
        split: list[tuple[Group, Group, Group]] = []  # groups, a part of them, and what was given to that alone
        try:
            parts: list[Group] = []
            lrs = []
            for number, (group, factor) in enumerate(zip(found, factors, strict=True)):
                settings = rule.of_group(number)[0].settings(self._as_rules_see(group), step, factor)
                lrs.append(float(settings.get("lr", group["lr"])))
                variants = [(params, self._varying(values)) for params, values in self._variants(group, settings)]
                if len(variants) == 1:
                    values = variants[0][1]
                    changed.append((group, {name: group[name] for name in values}))
                    group.update(values)
                    parts.append(group)
                else:
                    own = [{**values, "params": params} for params, values in variants]
                    split += [(group, group | values, values) for values in own]
                    parts += [part for _, part, _ in split[-len(own) :]]
            groups[:] = parts
            yield lrs
        finally:
            groups[:] = found
            for group, values in changed:
                group.update(values)
            for group, part, values in split:  # what the optimizer has noted there, such as a count of its own
                group.update({name: value for name, value in part.items() if name not in values})

    def _as_rules_see(self, group: Group) -> Group:
        """The group, which says if its weight decay is decoupled also where AdamW does not."""
        return {**group, "decoupled_weight_decay": True} if is_decoupled(self._inner, group) else group

    def _variants(self, group: Group, settings: Group) -> list[tuple[list[Any], Group]]:
        """The parameters of the group and their settings; several where these are not the same for all."""
        return self.adam_bias.variants(group, settings) if "betas" in settings else [(group["params"], settings)]

    def _varying(self, settings: Group) -> Group:
        """The settings in a form in which they may change without compiling again."""
        varying, share = self._communicator.varying, self._communicator.varying_share
        values = {name: varying(value) if isinstance(value, float) else value for name, value in settings.items()}
        return values | {name: tuple(map(share, settings[name])) for name in ("betas",) if name in settings}
