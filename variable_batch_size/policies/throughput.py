"""Throughput: how long steps take on numbers of cores and with minibatches that were not measured.

The model of Pollux (Qiao et al. 2021), for minibatches of b samples on R cores of N machines:

    T_accumulate(b)    = αc + βc·b
    T_network(N, R)    = αn + βn·(R − 2)   if N > 1,   αr + βr·(R − 2)   if R > 1,   0 alone
    T_update(N, R, b)  = (T_accumulate^γ + T_network^γ)^(1/γ)

γ from 1, where computing and communicating follow each other, to 10, where the longer one hides the other.
"""

from __future__ import annotations

from typing import NamedTuple


class Throughput(NamedTuple):
    """The seven parameters, seconds and seconds per sample or core.

    >>> model = Throughput(0.01, 0.001, 0.2, 0.01, 0.05, 0.005, 1.0)
    >>> round(model.accumulating(32), 3), round(model.updating(1, 4, 32), 3), round(model.updating(2, 4, 32), 3)
    (0.042, 0.102, 0.262)
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def accumulating(self, minibatch_size: float) -> float:
        """Seconds of a minibatch that is only accumulated."""
        return self.alpha_c + self.beta_c * minibatch_size

    def network(self, machines: int, cores: int) -> float:
        """Seconds of an all-reduce."""
        if cores == 1:
            return 0.0
        alpha, beta = (self.alpha_n, self.beta_n) if machines > 1 else (self.alpha_r, self.beta_r)
        return alpha + beta * max(cores - 2, 0)

    def updating(self, machines: int, cores: int, minibatch_size: float) -> float:
        """Seconds of the minibatch that completes a step."""
        computing, communicating = self.accumulating(minibatch_size), self.network(machines, cores)
        longer = max(computing, communicating)
        # divided by the longer one, for a high power of a short time is 0
        powers = (computing / longer) ** self.gamma + (communicating / longer) ** self.gamma
        return float(longer * powers ** (1 / self.gamma))

    def step(self, machines: int, cores: int, minibatch_size: float, depth: int) -> float:
        """Seconds of a step in which every core runs `depth` minibatches."""
        return (depth - 1) * self.accumulating(minibatch_size) + self.updating(machines, cores, minibatch_size)
