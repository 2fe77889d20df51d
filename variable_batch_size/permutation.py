"""Permutation: a shuffle of any size, computed one block of positions at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
"""Twice the four rounds after which a Feistel network with random round functions looks like a random permutation."""

_SMALLEST_BITS = 8
"""Narrower halves have too few round functions: below this, whole permutations of few samples would never occur."""


class Permutation:
    """A pseudo-random permutation of ``range(size)``, given by a key and never held in memory.

    A position x is split into two halves of its bits, and each half in turn is changed by a hash of the other one, a
    round key mixed in (a Feistel network: every round can be undone, so the whole is one-to-one):

        left ^= hash(right ^ key_1),  right ^= hash(left ^ key_2),  …

    That permutes the smallest power of two, from 256 on, that holds `size`. Where the result lies beyond `size`, it is
    put through again until it does not (cycle walking; from 128 elements on, fewer than two passes on average), which
    permutes ``range(size)`` itself.

    Args:
        size: how many elements are permuted.
        key: numbers that choose the permutation, such as a seed and an epoch.

    >>> shuffle = Permutation(10, key=(0, 0))
    >>> sorted(shuffle(np.arange(10)).tolist()) == list(range(10))
    True
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        bits = max(_SMALLEST_BITS, (size - 1).bit_length())
        self._right_bits = bits // 2
        self._left_bits = bits - bits // 2
        # numpy takes as many words as a number needs, which would make one key of (2**32, 0) and (0, 1)
        entropy = [word for number in key for word in (number % 2**32, number // 2**32 % 2**32)]
        self._keys = np.random.SeedSequence(entropy).generate_state(ROUNDS, np.uint32)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The elements at the given positions."""
        elements = self._pass(positions.astype(np.uint64).ravel())
        beyond = np.flatnonzero(elements >= self.size)
        while len(beyond):
            walked = self._pass(elements[beyond])
            elements[beyond] = walked
            beyond = beyond[walked >= self.size]
        return elements.view(np.int64).reshape(positions.shape)

    def _pass(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        right_bits = np.uint64(self._right_bits)
        left = (x >> right_bits).astype(np.uint32)
        right = (x & np.uint64(2**self._right_bits - 1)).astype(np.uint32)
        hashed = np.empty_like(left)
        for i in range(0, ROUNDS, 2):
            left ^= _hash(right, self._keys[i], self._left_bits, out=hashed)
            right ^= _hash(left, self._keys[i + 1], self._right_bits, out=hashed)
        x = left.astype(np.uint64)
        x <<= right_bits
        x |= right
        return x


def _hash(x: npt.NDArray[np.uint32], key: np.uint32, bits: int, out: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The top `bits` of a 32-bit hash: two multiplications carry every bit of x upwards, the shift in between down."""
    np.bitwise_xor(x, key, out=out)
    out *= np.uint32(0x85EBCA6B)
    out ^= out >> np.uint32(16)
    out *= np.uint32(0xC2B2AE35)
    out >>= np.uint32(32 - bits)
    return out
