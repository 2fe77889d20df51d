"""Known gains of Linear(2, 2) with loss = Σ outputs, minibatches of one sample, reference 1."""

import pytest

with_known_gains = pytest.mark.parametrize(
    ("inputs", "gain"),
    [
        ([[1, 0], [0, 1]], 4 / 3),
        ([[-1, 1], [1, -1]], 2),
        ([[1, 4], [5, 0.5]], 1.4688796680497926),
        ([[-0.2, 3], [5, 0.5]], 1.8472893901708),
    ],
)

TWO_STEPS = [[[-0.2, 3.3], [5.2, 0.7]], [[1, 4], [3.1, 0.1]]]
GAIN_OF_TWO_STEPS = 1.6720968158031417
