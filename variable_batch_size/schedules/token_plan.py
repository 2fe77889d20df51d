"""TokenPlan: divides the samples of an epoch into minibatches with a limit of tokens, from a histogram of lengths.

Lengths are divided into buckets for which padding each sample to the longest of its bucket adds the fewest tokens. In
the order of the buckets, shuffled within each, samples are cut into minibatches; the last samples of a bucket that do
not fill one are padded like those of the next bucket. Packed minibatches combine samples of several buckets instead.

All of this depends on how many samples a bucket has, not on which ones. So every epoch has the same number of
minibatches of the same shapes, and the samples of any minibatch are found without those before it. Nothing is sorted,
and only the numbers of samples of each bucket in blocks of the data set are stored.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, final, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of, check_positive
from variable_batch_size.schedules.permutation import Permutation

Integers = npt.NDArray[np.int64]
TooLong = Literal["raise", "drop", "truncate"]
TOO_LONG: tuple[TooLong, ...] = get_args(TooLong)
Key = tuple[int, ...]

_AT_ONCE = 2**20  # lengths that are read, or compared, at once
_SIGNIFICANT = 7  # bits of the lengths that may be the longest of a bucket
_PACKED_BUCKETS = 64
_BLOCK = 16  # samples of a block, for each bucket
_FEW = 256  # a Permutation of fewer elements takes more time


class Shape(NamedTuple):
    """The shape of minibatches, with padding."""

    rows: int  # samples; 1 if they are packed
    length: int  # tokens in a row
    num_minibatches: int  # of an epoch


class _Group(NamedTuple):
    """Minibatches that are made alike."""

    shape: Shape
    # the samples of each: in the order of the buckets, the place of the first one of the first minibatch, and how many
    parts: tuple[tuple[int, int], ...]


@final
class TokenPlan:
    """The minibatches of an epoch, each of at most `tokens` tokens, padding included.

    Args:
        lengths: the tokens of each sample: a sequence, an array or a memory-mapped file, which is read as needed.
        tokens: the most that a minibatch has: rows times the padded length, or the sum of the lengths if `packed`.
        packed: whether the samples of a minibatch are concatenated into one row of `tokens`.
        max_shapes: the most shapes that minibatches have; a packed one always has the shape (1, `tokens`).
        multiple_of: padded lengths are multiples of this, as some accelerators prefer.
        too_long: for samples with more than `tokens`: ``"raise"``; ``"drop"`` them; or ``"truncate"``, which counts
            them as `tokens` long, so the data set must truncate them.

    Attributes:
        num_samples: of an epoch, without dropped ones; each is in one minibatch.
        num_dropped: samples that are too long.
        num_tokens: of the samples of an epoch, without padding.
        num_minibatches: of an epoch.
        shapes: of these minibatches, by increasing length.
        description: what the minibatches depend on, with a hash of the lengths.

    >>> plan = TokenPlan([5, 2, 8, 2, 3, 7, 2, 2], tokens=16, max_shapes=3)
    >>> [tuple(shape) for shape in plan.shapes]
    [(5, 3, 1), (1, 8, 1), (2, 8, 1)]
    >>> plan.samples([0, 1, 2])
    [[1, 3, 4, 6, 7], [0, 2], [5]]
    """

    def __init__(
        self,
        lengths: Any,
        *,
        tokens: int,
        packed: bool = False,
        max_shapes: int = 32,
        multiple_of: int = 1,
        too_long: TooLong = "raise",
    ) -> None:
        check_positive(tokens=tokens, max_shapes=max_shapes, multiple_of=multiple_of)
        check_one_of(TOO_LONG, too_long=too_long)
        if tokens % multiple_of:
            raise ValueError(f"`tokens` must be a multiple of {multiple_of} (`multiple_of`), got {tokens}")
        if max_shapes < 2:
            raise ValueError(f"`max_shapes` must be at least 2, one of them for the last samples, got {max_shapes}")
        self.tokens, self.packed = int(tokens), packed
        self._lengths = _as_array(lengths)
        counts, digest = self._read(too_long)
        self.description: dict[str, str | int | bool | None] = {
            "lengths": f"{len(self._lengths)} samples, sha256 {digest}",
            "tokens": self.tokens,
            "packed": packed,
            "too_long": too_long,
            **({} if packed else {"max_shapes": int(max_shapes), "multiple_of": int(multiple_of)}),
        }
        self.num_dropped = int(counts[-1])
        counts = counts[:-1]
        self.num_samples, self.num_tokens = int(counts.sum()), int(counts @ np.arange(len(counts)))
        if not self.num_samples:
            raise ValueError(f"`lengths` must have a sample of at most {tokens} tokens, got none")
        if packed:
            self._edges = _best_edges(counts, _PACKED_BUCKETS)[-1]
            self._groups = _packed_groups(self._numbers(counts, self._edges), self._edges, self.tokens)
        else:
            choices = _best_edges(counts, max_shapes - 1, multiple_of=multiple_of, tokens=self.tokens)
            planned = [_padded_groups(self._numbers(counts, edges), edges, self.tokens) for edges in choices]
            best = min(range(len(choices)), key=lambda number: _num_padded(planned[number]))
            self._edges, self._groups = choices[best], planned[best]
        self._bucket_ends = self._numbers(counts, self._edges).cumsum()
        self._group_ends = np.cumsum([group.shape.num_minibatches for group in self._groups])
        self.num_minibatches = int(self._group_ends[-1])
        self.shapes = _shapes(self._groups)
        self._index = _Index(self._lengths, self._edges, self.tokens + (too_long == "drop"))

    def _read(self, too_long: TooLong) -> tuple[Integers, str]:
        """How many samples have each length, the last number of those that are too long; and a hash of all lengths."""
        counts, digest = np.zeros(self.tokens + 2, dtype=np.int64), hashlib.sha256()
        for first in range(0, len(self._lengths), _AT_ONCE):
            part = self._lengths[first : first + _AT_ONCE].astype(np.int64)
            for is_wrong, rule in (
                (part < 1, "at least 1"),
                (part > self.tokens, f"at most {self.tokens} (`tokens`), or `too_long` be 'drop' or 'truncate'"),
            ):
                if is_wrong.any() and (rule == "at least 1" or too_long == "raise"):
                    sample = int(is_wrong.argmax())
                    raise ValueError(f"`lengths[{first + sample}]` must be {rule}, got {part[sample]}")
            part = np.minimum(part, self.tokens + (too_long == "drop"))
            counts += np.bincount(part, minlength=self.tokens + 2)
            digest.update(part.astype("<i8").tobytes())
        return counts, digest.hexdigest()[:16]

    @staticmethod
    def _numbers(counts: Integers, edges: Integers) -> Integers:
        """The number of samples of each bucket."""
        return np.diff(counts.cumsum()[edges], prepend=0)

    @property
    def padding(self) -> float:
        """The fraction of padding in all tokens of an epoch."""
        return 1 - self.num_tokens / _num_padded(self._groups)

    def as_dict(self) -> dict[str, Any]:
        """The numbers of the plan, for JSON."""
        names = ("tokens", "packed", "num_samples", "num_dropped", "num_tokens", "num_minibatches", "padding")
        shapes = [shape._asdict() for shape in self.shapes]
        return {**{name: getattr(self, name) for name in names}, "shapes": shapes}

    def samples(self, numbers: Sequence[int] | Integers, key: Key | None = None) -> list[list[int]]:
        """The samples of minibatches, given by their number in the epoch.

        Args:
            numbers: from 0.
            key: such as a seed and an epoch, selects the order of minibatches and of samples within buckets; None to
                keep the order by length and number.
        """
        at = np.asarray(numbers, dtype=np.int64)
        if key is not None:
            at = _shuffled(at, self.num_minibatches, (*key, 0))
        groups = self._group_ends.searchsorted(at, side="right")
        places: list[Integers] = [np.empty(0, dtype=np.int64)] * len(at)
        for number in np.unique(groups).tolist():
            group, which = self._groups[number], np.flatnonzero(groups == number)
            within = at[which] - (self._group_ends[number] - group.shape.num_minibatches)
            parts = [first + within[:, None] * count + np.arange(count) for first, count in group.parts]
            for place, found in zip(which.tolist(), np.concatenate(parts, axis=1), strict=True):
                places[place] = found
        found = self._samples_at(np.concatenate(places), key).tolist()
        ends = np.cumsum([len(one) for one in places]).tolist()
        return [found[end - len(one) : end] for one, end in zip(places, ends, strict=True)]

    def _samples_at(self, places: Integers, key: Key | None) -> Integers:
        """The samples at places in the order of the buckets."""
        buckets = self._bucket_ends.searchsorted(places, side="right")
        samples = np.empty_like(places)
        for bucket in np.unique(buckets).tolist():
            which = np.flatnonzero(buckets == bucket)
            first = int(self._bucket_ends[bucket - 1]) if bucket else 0
            within = places[which] - first
            if key is not None:
                within = _shuffled(within, int(self._bucket_ends[bucket]) - first, (*key, bucket + 1))
            samples[which] = self._index.find(bucket, within)
        return samples

    def padded_length(self, lengths: Sequence[int]) -> int:
        """The length of the rows of a minibatch of samples of these lengths, padding included."""
        return padded_length(self.shapes, lengths)


def read_lengths(path: str) -> npt.NDArray[Any]:
    """The lengths in a .npy file, which is read as needed, or in a text file with one number in each line."""
    if path.endswith(".npy"):
        lengths: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        return lengths
    try:
        return np.array(Path(path).read_text(encoding="utf-8").split(), dtype=np.int64)
    except ValueError as error:
        raise ValueError(f"{path}: a file of lengths must be .npy, or have one integer in each line: {error}") from None


def padded_length(shapes: Sequence[Shape], lengths: Sequence[int]) -> int:
    """The shortest rows, among those of some shapes, that a minibatch of samples of these lengths fits into."""
    rows, longest = len(lengths), max(lengths)
    fitting = [shape.length for shape in shapes if shape.rows == rows and shape.length >= longest]
    if not fitting:
        known = ", ".join(f"{shape.rows} x {shape.length}" for shape in shapes)
        raise ValueError(f"a minibatch of {rows} samples of up to {longest} tokens has none of the shapes {known}")
    return min(fitting)


def _shuffled(positions: Integers, size: int, key: Key) -> Integers:
    """The elements at some positions of a permutation of ``range(size)``."""
    if size >= _FEW:
        return Permutation(size, key)(positions)
    order = Permutation(_FEW, key)(np.arange(_FEW))
    return order[order < size][positions]


def _as_array(lengths: Any) -> npt.NDArray[Any]:
    array = lengths if isinstance(lengths, np.ndarray) else np.asarray(lengths)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        got = f"{type(lengths).__name__} of shape {array.shape} and dtype {array.dtype}"
        raise ValueError(f"`lengths` must be a sequence or array of integers, one for each sample, got {got}")
    return array


def _num_padded(groups: Sequence[_Group]) -> int:
    return sum(shape.rows * shape.length * shape.num_minibatches for shape, _ in groups)


def _shapes(groups: Sequence[_Group]) -> tuple[Shape, ...]:
    """The distinct shapes of groups."""
    found: dict[tuple[int, int], int] = {}
    for rows, length, number in (group.shape for group in groups):
        found[length, rows] = found.get((length, rows), 0) + number
    return tuple(Shape(rows, length, number) for (length, rows), number in sorted(found.items()))


def _best_edges(counts: Integers, most: int, *, multiple_of: int = 1, tokens: int | None = None) -> list[Integers]:
    """The longest lengths of buckets, for 1, 2, … `most` buckets: those with the fewest padded tokens.

    With `tokens`, a sample also costs a quarter of its share of a minibatch, so rows should leave less of it unused.

    By dynamic programming: n buckets up to a length are n − 1 buckets up to some shorter length, and one from there.
    """
    present = np.flatnonzero(counts)
    units = -(-present // multiple_of)
    step = 1 << np.maximum(np.frexp(units)[1] - _SIGNIFICANT, 0)
    lengths = np.unique(np.minimum(-(-units // step) * step, units[-1])) * multiple_of
    prices = 4 * lengths + (0 if tokens is None else tokens // (tokens // lengths))
    below = np.concatenate([[0], counts.cumsum()[lengths]])
    # what a bucket costs that begins after one length, or at 0, and ends with another
    costs = (below[None, 1:] - below[:, None]) * prices
    costs[np.tri(len(below), len(lengths), -1, dtype=np.bool_)] = impossible = np.iinfo(np.int64).max // 2
    totals, befores = costs[0], []
    found = [lengths[-1:]]
    for number in range(1, min(most, len(lengths))):
        choices = costs[1:] + totals[:, None]
        befores.append(choices.argmin(0))
        totals = np.minimum(choices.min(0), impossible)
        ends = [len(lengths) - 1]
        for before in befores[::-1]:
            ends.insert(0, int(before[ends[0]]))
        assert len(ends) == number + 1
        found.append(lengths[ends])
    return found


def _padded_groups(numbers: Integers, edges: Integers, tokens: int) -> list[_Group]:
    """Cut the samples, in the order of the buckets, into minibatches of the most rows; the last one may have fewer."""
    groups, first = [], 0
    for end, length in zip(numbers.cumsum().tolist(), edges.tolist(), strict=True):
        rows = tokens // length
        if number := (end - first) // rows:
            groups.append(_Group(Shape(rows, length, number), ((first, rows),)))
            first += number * rows
    rest = int(numbers.sum()) - first
    return groups + ([_Group(Shape(rest, int(edges[-1]), 1), ((first, rest),))] if rest else [])


def _packed_groups(numbers: Integers, edges: Integers, tokens: int) -> list[_Group]:
    """Fill minibatches with the longest samples that fit, and repeat each while there are enough samples for it."""
    left, places = numbers.tolist(), (numbers.cumsum() - numbers).tolist()
    groups = []
    while any(left):
        room, taken = tokens, {}
        for bucket in reversed(range(len(left))):
            if count := min(left[bucket], room // int(edges[bucket])):
                taken[bucket], room = count, room - count * int(edges[bucket])
        number = min(left[bucket] // count for bucket, count in taken.items())
        parts = tuple((places[bucket], count) for bucket, count in taken.items())
        groups.append(_Group(Shape(1, tokens, number), parts))
        for bucket, count in taken.items():
            left[bucket] -= number * count
            places[bucket] += number * count
    return groups


class _Index:
    """Finds the n-th sample of a bucket, from the numbers of samples of each bucket before each block of the data.

    Args:
        lengths: of the samples.
        edges: the longest lengths of the buckets.
        longest: the length that longer samples count as; beyond all edges if they are in no bucket.
    """

    def __init__(self, lengths: npt.NDArray[Any], edges: Integers, longest: int) -> None:
        self._edges, self._longest = [0, *edges.tolist()], longest
        self._block = block = min(_BLOCK * len(edges), len(lengths))
        num_full = len(lengths) // block
        self._full = lengths[: num_full * block].reshape(num_full, block)
        self._last = np.zeros(block, dtype=lengths.dtype)  # the rest, followed by lengths of no bucket
        self._last[: len(lengths) - num_full * block] = lengths[num_full * block :]
        small = np.int32 if len(lengths) < 2**31 else np.int64
        self._before = np.zeros((len(edges), num_full + 2), dtype=small)
        bucket_of, width = edges.searchsorted(np.arange(longest + 1)), len(edges) + 1
        bucket_of[0] = len(edges)
        for blocks in self._parts(np.arange(num_full + 1)):
            buckets = bucket_of[np.minimum(self._lengths(blocks).astype(np.int64), longest)]
            cells = np.arange(len(blocks))[:, None] * width + buckets
            counts = np.bincount(cells.ravel(), minlength=len(blocks) * width).reshape(-1, width)[:, :-1]
            self._before[:, blocks + 1] = self._before[:, blocks[:1]] + counts.cumsum(0).T

    def _parts(self, numbers: Integers) -> Iterator[Integers]:
        at_once = max(1, _AT_ONCE // self._block)
        return (numbers[first : first + at_once] for first in range(0, len(numbers), at_once))

    def _lengths(self, blocks: Integers) -> npt.NDArray[Any]:
        """The lengths in some blocks, in a row for each."""
        lengths = np.asarray(self._full[np.minimum(blocks, len(self._full) - 1)])
        lengths[blocks == len(self._full)] = self._last
        return lengths

    def find(self, bucket: int, numbers: Integers) -> Integers:
        """The samples of a bucket with these numbers, by rising index."""
        before, found = self._before[bucket], []
        for part in self._parts(numbers):
            blocks = before.searchsorted(part, side="right") - 1
            lengths = self._lengths(blocks)
            is_in = lengths > self._edges[bucket]
            if self._edges[bucket + 1] != self._longest:
                is_in &= lengths <= self._edges[bucket + 1]
            counts = np.count_nonzero(is_in, axis=1)
            if (counts != before[blocks + 1] - before[blocks]).any():
                raise RuntimeError("`lengths` have changed since they were first read: pass a copy")
            at = counts.cumsum() - counts + part - before[blocks]
            found.append(blocks * self._block + np.flatnonzero(is_in)[at] % self._block)
        return np.concatenate(found)
