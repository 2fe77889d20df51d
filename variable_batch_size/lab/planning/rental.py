"""Rental: how many cores to rent, to spend the least, or the least within a deadline, or to be fast within a budget.

With the best batch size, R cores make r(R) steps of progress in a second. At a price p of a core they cost p·R / r(R)
for a step of progress. A choice compares the rest of the run on each number of cores, as if the present price and
noise lasted, and is reviewed when the price or the number of available cores changes, and after some time.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.checks import check_not_negative_number, check_positive_number, refuse
from variable_batch_size.policies.autoscale import Autoscale
from variable_batch_size.traces.recording import read_timed

_WORTHWHILE = 1.05  # the factor in time or cost for which another number of cores is rented
_ROUNDING = 1e-6  # seconds: a sum of times may be just before a change of the price, and never reach it
_RESERVE = 0.99  # of a deadline or a budget, for restarts and batch sizes that are not the best ones yet


@dataclass(frozen=True)
class Prices:
    """The price of a device-hour over time, repeated after its end.

    >>> prices = Prices([0.0, 3600.0, 10800.0], [2.0, 1.0])
    >>> prices.cost(0.0, 7200.0), prices.cost(7200.0, 7200.0)
    (3.0, 3.0)
    >>> prices.at(1800.0), prices.at(10800.0)
    ((2.0, 1800.0), (2.0, 3600.0))
    """

    times: Sequence[float]  # in seconds, ascending from 0, one more than prices
    prices: Sequence[float]  # ``prices[i]`` is the price from ``times[i]`` to ``times[i + 1]``

    @classmethod
    def constant(cls, price: float) -> "Prices":
        """The same price at all times."""
        check_not_negative_number(price=price)
        return cls([0.0, math.inf], [price])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Prices":
        """Read a CSV file with a column of times, in seconds or as dates, and one of prices.

        A price lasts until the next row's time. The last row only gives the end.
        """
        times: list[float] = []
        prices: list[float] = []
        for place, seconds, text in read_timed(path):
            try:
                prices.append(float(text))
            except ValueError:
                prices.append(math.nan)
            if not 0 <= prices[-1] < math.inf:
                refuse(place, "a price must be a non-negative number", repr(text)[:80])
            if times and seconds <= times[-1]:
                refuse(place, "a time must be later than the previous one", f"{seconds:.15g} s")
            times.append(seconds)
        if len(times) < 2:
            refuse(os.fspath(path), "a series of prices needs two different times", "one")
        return cls([time - times[0] for time in times], prices[:-1])

    def at(self, time: float) -> tuple[float, float]:
        """The price at this time, and the seconds until the next one."""
        if math.isinf(self.times[-1]):
            return self.prices[0], math.inf
        time %= self.times[-1]
        index = int(np.searchsorted(self.times, time + _ROUNDING, side="right")) - 1
        if index == len(self.prices):
            index, time = 0, time - self.times[-1]
        return self.prices[index], self.times[index + 1] - time

    def cost(self, begin: float, seconds: float) -> float:
        """The cost of one device for some seconds from a time on."""
        if math.isinf(self.times[-1]):
            return self.prices[0] * seconds / 3600
        return self._until(begin + seconds) - self._until(begin)

    def _until(self, time: float) -> float:
        so_far = np.concatenate(([0.0], np.cumsum(np.diff(self.times) * self.prices)))
        periods, rest = divmod(time, self.times[-1])
        return float(periods * so_far[-1] + np.interp(rest, self.times, so_far)) / 3600


class Offer(NamedTuple):
    """A number of cores to rent, and the time and cost of the rest of the run on them, with a restart if needed."""

    cores: int
    seconds: float
    cost: float


class Rental(ABC):
    """Chooses the number of cores, and leaves the batch size to :class:`Autoscale`, with the same options.

    Args:
        max_batch_size: the largest batch size.
        max_price: of a device-hour, above which no cores are rented; None for no bound.
    """

    review_seconds = 600.0  # between choices at the same price and availability

    def __init__(self, *, max_batch_size: int, max_price: float | None = None, **options: Any) -> None:
        if max_price is not None:
            check_not_negative_number(max_price=max_price)
        self.max_price = max_price
        self.policy = Autoscale(max_batch_size=max_batch_size, **options)

    def choose(self, offers: Sequence[Offer], *, seconds: float, spent: float, cores: int) -> int:
        """The number of cores to rent after some seconds and some money.

        It is the present number unless another is clearly better.
        """
        enough = [offer for offer in offers if self.is_enough(offer, seconds, spent)]
        worth = self.worth if enough else self.worth_if_none_is_enough
        best = min(enough or offers, key=lambda offer: (worth(offer), offer.seconds))
        now = [offer for offer in enough if offer.cores == cores]
        return cores if now and worth(now[0]) <= _WORTHWHILE * worth(best) else best.cores

    def is_enough(self, offer: Offer, seconds: float, spent: float) -> bool:
        """Whether an offer, if it lasts, keeps the deadline or the budget after some seconds and some money."""
        return True

    @abstractmethod
    def worth(self, offer: Offer) -> float:
        """What to minimize among offers that are enough."""

    def worth_if_none_is_enough(self, offer: Offer) -> float:
        """What to minimize if no offer is enough."""
        return self.worth(offer)


class Cheapest(Rental):
    """Spends the least.

    >>> offers = [Offer(1, 100.0, 10.0), Offer(2, 60.0, 12.0), Offer(4, 40.0, 16.0)]
    >>> Cheapest(max_batch_size=1024).choose(offers, seconds=0.0, spent=0.0, cores=0)
    1
    """

    def worth(self, offer: Offer) -> float:
        return offer.cost


class ByDeadline(Rental):
    """Rents the cheapest number of cores that is fast enough for a deadline in hours; the fastest if none is.

    >>> offers = [Offer(1, 100.0, 10.0), Offer(2, 60.0, 12.0), Offer(4, 40.0, 16.0)]
    >>> ByDeadline(hours=0.02, max_batch_size=1024).choose(offers, seconds=0.0, spent=0.0, cores=0)
    2
    """

    def __init__(self, *, hours: float, max_batch_size: int, max_price: float | None = None, **options: Any) -> None:
        super().__init__(max_batch_size=max_batch_size, max_price=max_price, **options)
        check_positive_number(hours=hours)
        self._seconds = 3600 * hours * _RESERVE
        self.review_seconds = min(self.review_seconds, max(1.0, 36 * hours))

    def is_enough(self, offer: Offer, seconds: float, spent: float) -> bool:
        return seconds + offer.seconds <= self._seconds

    def worth(self, offer: Offer) -> float:
        return offer.cost

    def worth_if_none_is_enough(self, offer: Offer) -> float:
        return offer.seconds


class WithinBudget(Rental):
    """Rents the fastest number of cores within a budget of money; the cheapest if none is within it.

    >>> offers = [Offer(1, 100.0, 10.0), Offer(2, 60.0, 12.0), Offer(4, 40.0, 16.0)]
    >>> WithinBudget(money=14, max_batch_size=1024).choose(offers, seconds=0.0, spent=0.0, cores=0)
    2
    """

    def __init__(self, *, money: float, max_batch_size: int, max_price: float | None = None, **options: Any) -> None:
        super().__init__(max_batch_size=max_batch_size, max_price=max_price, **options)
        check_positive_number(money=money)
        self._money = money * _RESERVE

    def is_enough(self, offer: Offer, seconds: float, spent: float) -> bool:
        return spent + offer.cost <= self._money

    def worth(self, offer: Offer) -> float:
        return offer.seconds

    def worth_if_none_is_enough(self, offer: Offer) -> float:
        return offer.cost


RENTALS: Mapping[str, type[Rental]] = {
    "cheapest": Cheapest,
    "by_deadline": ByDeadline,
    "within_budget": WithinBudget,
}
