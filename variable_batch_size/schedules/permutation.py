"""Permutation: a shuffle of any size, computed for blocks of positions on demand."""

import hashlib
import math
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

# Each round divides the correlation of two positions with a common digit by the base. Over millions of keys,
# correlations are measurable after six rounds for 256 elements and after five for 4096, but not after eight and six.
_FEW, _ROUNDS, _ROUNDS_OF_FEW = 4096, 6, 8
_SMALLEST_BASE = 16  # with a smaller base, eight rounds would not be enough

# numpy would convert integers and scalars at every use, but not 0-dimensional arrays
_HALF, _ODD, _OTHER_ODD = (np.array(n, dtype=np.uint64) for n in (32, 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93))


class Permutation:
    """A pseudo-random permutation of ``range(size)``, selected by a key such as a seed and an epoch, and never stored.

    A position has two digits in the bases a and b, both about √size. Each round shifts each digit by a keyed hash of
    the other one. Every round is invertible, so the whole is a permutation (a Feistel network):

        position = left · b + right
        left = (left + hash(right ^ key_1)) mod a,  right = (right + hash(left ^ key_2)) mod b,  …

    This permutes ``range(a · b)``, which barely exceeds `size` from 256 elements on. Elements at or above `size` are
    permuted again until they are below it (cycle walking), which permutes ``range(size)``.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self._left_base, self._right_base = (np.array(base, dtype=np.uint64) for base in _bases(size))
        digest = hashlib.blake2b(" ".join(map(str, key)).encode()).digest()
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._keys = keys[: _ROUNDS_OF_FEW if size < _FEW else _ROUNDS].reshape(-1, 2)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The elements at the given positions."""
        # of few elements, most are beyond `size` for many passes
        permuted = self._pass if self.size >= _SMALLEST_BASE**2 else self._table.__getitem__
        elements = permuted(positions.astype(np.uint64).ravel())
        beyond = (elements >= self.size).nonzero()[0]
        while len(beyond):
            elements[beyond] = walked = permuted(elements[beyond])
            beyond = beyond[walked >= self.size]
        return elements.view(np.int64).reshape(positions.shape)

    @cached_property
    def _table(self) -> Words:
        """All elements after one pass."""
        return self._pass(np.arange(int(self._left_base * self._right_base), dtype=np.uint64))

    def _pass(self, x: Words) -> Words:
        left = x // self._right_base
        right = x - left * self._right_base
        for left_key, right_key in self._keys:
            _move(left, self._left_base, by=right ^ left_key)
            _move(right, self._right_base, by=left ^ right_key)
        left *= self._right_base
        left += right
        return left


@lru_cache  # the same in every epoch
def _bases(size: int) -> tuple[int, int]:
    """Two bases near √size with the smallest product; one is even, as shifts of odd digits are even permutations."""
    least = max(_SMALLEST_BASE, math.isqrt(size - 1) + 1)
    evens = range(least + least % 2, least + 32, 2)
    return min(((base, max(_SMALLEST_BASE, -(-size // base))) for base in evens), key=math.prod)


def _move(digit: Words, base: Words, *, by: Words) -> None:
    """Add a hash of `by`, which is overwritten, to a digit: mixed upwards and downwards, then scaled to the base."""
    by *= _ODD
    by ^= by >> _HALF
    by *= _OTHER_ODD
    by >>= _HALF
    by *= base
    by >>= _HALF
    digit += by
    np.minimum(digit, digit - base, out=digit)  # below the base, the unsigned difference wraps around
