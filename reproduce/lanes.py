"""Many trainings of a small GPT at once: lanes of one batched model, each with its own seed, batch size and settings.

A model of a million parameters leaves most of a GPU idle. Here, K of them train together: a product of matrices is one
product of K pairs, and an update is one kernel for all weights. Lanes share nothing but the launches of kernels: all
minibatches have the same shape, and each lane makes an update after as many of them as its batch size has.

Every lane clips the norm of its gradient at 1, and measures its gradient noise from the norms of its minibatches. Rules
of this library give its settings.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

from variable_batch_size.optim.hyperparameters import divisors_of
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.rule import Norms, Rule, Step

VOCABULARY = 256  # bytes
INITIAL = 0.02  # the standard deviation of initial weights
CLIP, WARMUP = 1.0, 0.05  # of the gradient's norm; of the samples
BLOCK, HELD_OUT_EVERY = 1 << 14, 20  # one block of bytes in that many is held out
UNTRAINED = math.log(VOCABULARY)  # nats per byte; the loss of a run that has diverged
NUM_PARTS = 8  # of a run, for each of which the noise is averaged
ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.775, 2.0315)  # of Newton and Schulz in Muon

Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A GPT without biases and without scales in its norms; context in bytes."""

    width: int
    heads: int
    layers: int
    context: int

    @property
    def hidden(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the matrices that Muon updates, each for all layers."""
        d, layers = self.width, self.layers
        return {"qkv": (layers, d, 3 * d), "out": (layers, d, d), "up": (layers, d, 4 * d), "down": (layers, 4 * d, d)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        d = self.width
        return {**self.hidden, "tokens": (VOCABULARY, d), "positions": (self.context, d), "head": (d, VOCABULARY)}


def initial_weights(size: Size, seed: int) -> torch.Tensor:
    """Normally distributed; those of the projections into the residual stream are smaller, as in GPT-2."""
    random = np.random.default_rng((seed, 0))
    parts = []
    for name, shape in size.shapes.items():
        deviation = INITIAL / math.sqrt(2 * size.layers) if name in ("out", "down") else INITIAL
        parts.append(random.standard_normal(math.prod(shape), dtype=np.float32) * np.float32(deviation))
    return torch.from_numpy(np.concatenate(parts))


def block(
    x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, up: torch.Tensor, down: torch.Tensor, heads: int, length: int
) -> torch.Tensor:
    """One layer. x: [lanes, positions of all windows, width]."""
    heads_of_all = torch.bmm(normalised(x, qkv), qkv).view(-1, length, 3, heads, x.shape[2] // heads)
    mixed = scaled_dot_product_attention(*heads_of_all.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)
    x = x + torch.bmm(mixed.transpose(1, 2).reshape(x.shape), out)
    return x + torch.bmm(gelu(torch.bmm(normalised(x, up), up)), down)


def normalised(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, x.shape[2:]).to(like.dtype)


def embedded(inputs: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The first residual stream; a product with one-hot vectors, whose gradient needs no atomic additions."""
    one_hot = inputs.flatten(1).unsqueeze(2) == torch.arange(VOCABULARY, device=inputs.device)
    x = torch.bmm(one_hot.to(tokens.dtype), tokens).view(*inputs.shape, -1) + positions.unsqueeze(1)
    return x.flatten(1, 2).float()


def losses_after(x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of each lane in nats per byte."""
    logits = torch.bmm(normalised(x, head), head).float()
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(len(x), -1).mean(1)


def text_of_library(num_bytes: int) -> bytes:
    """The first modules of Python's standard library in alphabetical order, one after the other; with its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    text = bytearray()
    for path in found:
        if "-packages/" not in path and len(text) < num_bytes:
            text += (folder / path).read_bytes() + b"\n\n"
    return bytes(text[:num_bytes])


class Text:
    """Bytes on a device; one block in :data:`HELD_OUT_EVERY` is held out."""

    def __init__(self, text: bytes, device: torch.device, *, block_size: int = BLOCK) -> None:
        numbers = np.frombuffer(text, dtype=np.uint8)
        is_held_out = np.arange(len(numbers)) // block_size % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        self.train = torch.from_numpy(numbers[~is_held_out]).to(device)
        self._held_out = torch.from_numpy(numbers[is_held_out]).to(device)

    def test_windows(self, number: int, context: int) -> torch.Tensor:
        """Windows at equal distances, the same for all runs."""
        starts = torch.linspace(0, len(self._held_out) - context - 1, number, device=self._held_out.device).long()
        return windows_at(starts, self._held_out, context)


def windows_at(starts: torch.Tensor, text: torch.Tensor, context: int) -> torch.Tensor:
    return text[starts.unsqueeze(-1) + torch.arange(context + 1, device=starts.device)].long()


@dataclass(frozen=True)
class Lane:
    """One training.

    Attributes:
        optimizer: "adamw", "lion" or "muon".
        settings: its parameter group at `ref_batchsize`: lr, weight_decay, betas, eps; momentum of Muon.
        rule: gives the settings at `batchsize`.
        batchsize, ref_batchsize: in windows.
        seed: of the initial weights and of the order of windows.
    """

    optimizer: str
    settings: Mapping[str, Any]
    rule: Rule
    batchsize: int
    ref_batchsize: int
    seed: int


@dataclass
class Tensors:
    """The static memory of all lanes, at fixed addresses, as CUDA graphs need it. [lanes, weights] if not said."""

    weights: torch.Tensor
    first: torch.Tensor  # moment
    second: torch.Tensor
    sums: torch.Tensor  # of the gradients of minibatches
    divisors: torch.Tensor  # of gradients whose norms are measured
    starts: torch.Tensor  # [lanes, windows]: of the minibatch, in the text
    totals: torch.Tensor  # [lanes, 2]: of the squared norms of minibatch gradients, and of losses
    measured: torch.Tensor  # [lanes, 4]: what `Lanes._measure` returns
    numbers: torch.Tensor  # [lanes, len(NUMBERS)]


# of the update of each lane; c1 and c2 correct Adam's bias
NUMBERS = ("lr", "weight_decay", "beta1", "beta2", "eps", "c1", "c2", "momentum", "is_lion", "is_due", "depth")


class Lanes:
    """Trains several runs of one length at once.

    Args:
        size: of the model.
        text: on the device.
        num_lanes: how many runs at once.
        minibatch_size: in windows; all batch sizes must be multiples.
        is_muon: whether all lanes are Muon's; otherwise they are AdamW's and Lion's.
        is_compiled: fuse kernels by ``torch.compile``. On CUDA, each part is a CUDA graph in any case.
        test_windows: number of windows of the test.
    """

    def __init__(
        self,
        size: Size,
        text: Text,
        *,
        num_lanes: int,
        minibatch_size: int,
        is_muon: bool,
        is_compiled: bool,
        test_windows: int,
    ) -> None:
        self.size, self.num_lanes, self.minibatch_size, self.is_muon = size, num_lanes, minibatch_size, is_muon
        self._text, self._device = text.train, text.train.device
        self._test = text.test_windows(test_windows, size.context)
        self._num_hidden = sum(map(math.prod, size.hidden.values()))
        num_weights = sum(map(math.prod, size.shapes.values()))
        zeros = [torch.zeros(num_lanes, num_weights, device=self._device) for _ in range(5)]
        starts = torch.zeros(num_lanes, minibatch_size, dtype=torch.long, device=self._device)
        others = [torch.zeros(num_lanes, number, device=self._device) for number in (2, 4, len(NUMBERS))]
        self.tensors = Tensors(*zeros, starts, *others)
        self.tensors.divisors.fill_(1.0)
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._copies = [part.to(dtype).requires_grad_() for part in self._parts(self.tensors.weights)]

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, fullgraph=True, dynamic=False) if is_compiled else function

        self._block, self._embedded, self._losses_after = map(compiled, (block, embedded, losses_after))
        self._add, self._adam_or_lion = compiled(add), compiled(update_by_adam_or_lion)
        self._accumulate, self._measure, self._update = map(
            self._captured, (self._accumulate_part, self._measure_part, self._update_part)
        )

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A view of each kind of weights in flat memory, [lanes, *shape]."""
        shapes = list(self.size.shapes.values())
        parts = flat.split(list(map(math.prod, shapes)), dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _captured(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function as a CUDA graph: the launches of a small model's kernels would take longer than the kernels."""
        if self._device.type != "cuda":
            return function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    # ------------------------------------------------------------------------------------------- on the device
    def losses(self, windows: torch.Tensor) -> torch.Tensor:
        """Of each lane, for windows [lanes, windows, context + 1]."""
        *layers, tokens, positions, head = self._copies
        x = self._embedded(windows[:, :, :-1], tokens, positions)
        for of_layer in zip(*(weights.unbind(1) for weights in layers), strict=True):
            x = self._block(x, *of_layer, self.size.heads, self.size.context)
        losses: torch.Tensor = self._losses_after(x, head, windows[:, :, 1:])
        return losses

    def _accumulate_part(self) -> None:
        """Add the gradients of one minibatch of each lane."""
        losses = self.losses(windows_at(self.tensors.starts, self._text, self.size.context))
        gradients = torch.autograd.grad(losses.sum(), self._copies)
        with torch.no_grad():
            self._add(self.tensors.sums, self.tensors.totals, self.tensors.divisors, losses, gradients)

    @torch.no_grad()
    def _measure_part(self) -> None:
        """Mean squared norm of minibatches, squared norm of the mean, loss, and the norm to clip, of each lane."""
        tensors = self.tensors
        depth = tensors.numbers[:, -1:]
        mean = tensors.sums / depth
        squares = [(mean / tensors.divisors).square().sum(1), mean.square().sum(1).sqrt()]
        of_squares, of_losses = (tensors.totals / depth).unbind(1)
        tensors.measured.copy_(torch.stack([of_squares, squares[0], of_losses, squares[1]], 1))

    @torch.no_grad()
    def _update_part(self) -> None:
        """Update the lanes that are due."""
        tensors = self.tensors
        depth, norm = tensors.numbers[:, -1:], tensors.measured[:, -1:]
        scale = (CLIP / (norm + 1e-6)).clamp(max=1.0) / depth
        begin = self._num_hidden if self.is_muon else 0
        whole = (tensors.weights, tensors.first, tensors.second, tensors.sums)
        if self.is_muon:
            self._update_by_muon(
                *(tensor[:, :begin] for tensor in (tensors.weights, tensors.first, tensors.sums)), scale
            )
        self._adam_or_lion(*(tensor[:, begin:] for tensor in whole), tensors.numbers, scale)
        is_due = tensors.numbers[:, -2:-1] > 0
        tensors.sums.masked_fill_(is_due, 0.0)
        tensors.totals.masked_fill_(is_due, 0.0)
        self._refresh_copies()

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        for copy, part in zip(self._copies, self._parts(self.tensors.weights), strict=True):
            copy.copy_(part)

    def _update_by_muon(
        self, weights: torch.Tensor, first: torch.Tensor, sums: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Muon with Nesterov momentum, each update as large as AdamW's (Liu et al. 2025, "Muon is scalable")."""
        columns = dict(zip(NUMBERS, self.tensors.numbers.split(1, dim=1), strict=True))
        gradient, momentum, is_due = sums * scale, columns["momentum"], columns["is_due"] > 0
        average = torch.lerp(gradient, first, momentum)
        update = self._orthogonal(torch.lerp(gradient, average, momentum))
        new = weights * (1 - columns["lr"] * columns["weight_decay"]) - columns["lr"] * update
        weights.copy_(torch.where(is_due, new, weights))
        first.copy_(torch.where(is_due, average, first))

    def _orthogonal(self, flat: torch.Tensor) -> torch.Tensor:
        """U·Vᵀ of each matrix, times 0.2·√(the larger side); queries, keys and values are matrices of their own."""
        d, shapes = self.size.width, list(self.size.hidden.values())
        qkv, out, up, down = (
            part.unflatten(1, shape)
            for part, shape in zip(flat.split(list(map(math.prod, shapes)), dim=1), shapes, strict=True)
        )
        squares = torch.cat([qkv.unflatten(3, (3, d)).transpose(2, 3), out.unsqueeze(2)], 2)  # [lanes, layers, 4, d, d]
        wide = torch.stack([up, down.mT], 2)
        squares = 0.2 * math.sqrt(d) * newton_schulz(squares.flatten(0, 2)).view(squares.shape)
        wide = 0.2 * math.sqrt(4 * d) * newton_schulz(wide.flatten(0, 2)).view(wide.shape)
        found = (squares[:, :, :3].transpose(2, 3), squares[:, :, 3], wide[:, :, 0], wide[:, :, 1].mT)
        return torch.cat([part.reshape(len(flat), -1) for part in found], 1)

    # --------------------------------------------------------------------------------------------- on the host
    def train(self, lanes: Sequence[Lane], *, num_samples: int, stop_at: float = math.inf) -> list[Row] | None:
        """Train to the end of the cosine.

        Returns:
            of each lane its test loss, its training loss in the last eighth, and the noise of each eighth; None if
            ``time.monotonic()`` reached `stop_at` before.
        """
        self._load(lanes)
        size, runs = self.minibatch_size, [_Run(lane, self.minibatch_size, num_samples) for lane in lanes]
        starts = self._all_starts(lanes, num_samples)
        depths = np.array([run.depth for run in runs])
        numbers = np.ones((self.num_lanes, len(NUMBERS)), dtype=np.float32)
        numbers[:, -1] = np.resize(depths, self.num_lanes)
        self._send(numbers)
        history = torch.zeros(num_samples // size, self.num_lanes, 4, device=self._device)
        for number in range(num_samples // size):
            self.tensors.starts.copy_(starts[:, number * size : (number + 1) * size])
            self._accumulate()
            due = np.flatnonzero((number + 1) % depths == 0)
            if not len(due):
                continue
            self._measure()
            history[number].copy_(self.tensors.measured)
            if any(runs[lane].measures for lane in due):
                measured = self.tensors.measured.tolist()
                for lane in due:
                    runs[lane].observe(*measured[lane][:2])
            numbers[:, -2] = 0.0
            for lane in due:
                numbers[lane, :-1] = runs[lane].next_numbers()
            self._send(numbers)
            self._update()
            for lane in due:
                if runs[lane].lane.rule.preconditions:
                    self._refresh_divisors(lane, runs[lane])
            if time.monotonic() > stop_at:
                return None
        losses = self._test_losses()
        found = history.double().cpu().numpy()
        return [run.row(losses[lane], found[run.depth - 1 :: run.depth, lane]) for lane, run in enumerate(runs)]

    def _load(self, lanes: Sequence[Lane]) -> None:
        assert len(lanes) <= self.num_lanes
        tensors = self.tensors
        for tensor in (tensors.weights, tensors.first, tensors.second, tensors.sums, tensors.totals):
            tensor.zero_()
        tensors.divisors.fill_(1.0)
        weights = {seed: initial_weights(self.size, seed) for seed in {lane.seed for lane in lanes}}
        for number, lane in enumerate(lanes):
            tensors.weights[number].copy_(weights[lane.seed])
            if lane.rule.preconditions:  # no norms before Adam has made enough updates
                tensors.divisors[number].fill_(math.inf)
        self._refresh_copies()

    def _all_starts(self, lanes: Sequence[Lane], num_samples: int) -> torch.Tensor:
        """The windows of all lanes in order, drawn independently; lanes without a run have those of the first one."""
        most = len(self._text) - self.size.context
        of_seeds = {
            seed: np.random.default_rng((seed, 1)).integers(most, size=num_samples)
            for seed in {lane.seed for lane in lanes}
        }
        seeds = [lane.seed for lane in lanes] + [lanes[0].seed] * (self.num_lanes - len(lanes))
        return torch.from_numpy(np.stack([of_seeds[seed] for seed in seeds])).to(self._device)

    def _send(self, numbers: np.ndarray[Any, Any]) -> None:
        found = torch.from_numpy(numbers.copy())
        if self._device.type == "cuda":
            found = found.pin_memory()
        self.tensors.numbers.copy_(found, non_blocking=True)

    @torch.no_grad()
    def _refresh_divisors(self, lane: int, run: _Run) -> None:
        """Those of this library for AdamScale, for each layer by itself."""
        if run.num_updates < run.lane.rule.min_updates:
            return
        parts = zip(self.size.shapes, self._parts(self.tensors.second), self._parts(self.tensors.divisors), strict=True)
        pairs = [
            pair
            for name, second, divisor in parts
            for pair in (
                zip(second[lane], divisor[lane], strict=True)
                if name in self.size.hidden
                else [(second[lane], divisor[lane])]
            )
        ]
        counts, settings = [float(run.num_updates)] * len(pairs), run.settings
        found = divisors_of([second for second, _ in pairs], counts, settings["betas"][1], settings["eps"], 1)
        for (_, divisor), new in zip(pairs, found, strict=True):
            divisor.copy_(new)

    def _test_losses(self) -> list[float]:
        total = torch.zeros(self.num_lanes, device=self._device)
        parts = self._test.split(self.minibatch_size)
        for part in parts:
            total += self.losses(part.expand(self.num_lanes, *part.shape).contiguous()).detach()
        return (total / len(parts)).tolist()


class _Run:
    """The host's part of a lane: which settings come next."""

    def __init__(self, lane: Lane, minibatch_size: int, num_samples: int) -> None:
        self.lane, self._minibatch_size, self._num_samples = lane, minibatch_size, num_samples
        self.depth = lane.batchsize // minibatch_size
        self.num_updates = 0
        self.measures = lane.rule.measures_noise and self.depth > 1
        self.settings = self._settings_of_step()
        betas = self.settings.get("betas", (0.0, 0.0))
        self._betas = tuple(betas)
        self._bias = [1.0, 1.0]  # the products of betas so far

    @property
    def _step(self) -> Step:
        lane = self.lane
        return Step(lane.batchsize, self._minibatch_size, lane.ref_batchsize, steps_done=self.num_updates)

    def _settings_of_step(self) -> dict[str, Any]:
        """Without the schedule."""
        rule, group = self.lane.rule, self.lane.settings
        return {**group, **rule.merged_settings(group, self._step, rule.group_factor(self._step, 0))}

    def observe(self, mean_of_squares: float, square_of_mean: float) -> None:
        if self.measures and math.isfinite(mean_of_squares):
            self.lane.rule.observe(self._step, [Norms(mean_of_squares, square_of_mean)])

    def next_numbers(self) -> list[float]:
        """Of the next update: the columns of NUMBERS except the last."""
        if self.measures:
            self.settings = self._settings_of_step()
        settings = self.settings
        self._bias = [product * beta for product, beta in zip(self._bias, self._betas, strict=True)]
        self.num_updates += 1
        # at the middle of the batch, so that the sum over all samples is the same for every batch size
        progress = (self.num_updates - 0.5) * self.lane.batchsize / self._num_samples
        return [
            settings["lr"] * schedule(progress),
            settings["weight_decay"],
            *self._betas,
            settings.get("eps", 0.0),
            *(1 - product for product in self._bias),
            settings.get("momentum", 0.0),
            float(self.lane.optimizer == "lion"),
            1.0,
        ]

    def row(self, test_loss: float, measured: np.ndarray[Any, Any]) -> Row:
        parts = [part.mean(0) for part in np.array_split(measured, min(NUM_PARTS, len(measured)))]
        return {
            "updates": self.num_updates,
            "loss": known(test_loss),
            "train_loss": known(float(parts[-1][2])),
            "noise": [self._noise_of(part) for part in parts] if self.depth > 1 else [],
        }

    def _noise_of(self, measured: np.ndarray[Any, Any]) -> list[float]:
        """V and G², per window: averages of norms give averages of the estimates, which are linear in them."""
        sizes = {"batch_size": self.lane.batchsize, "num_minibatches": self.depth}
        noise = Noise.from_norms(float(measured[0]), float(measured[1]), **sizes)
        return [noise.variance, noise.square_norm]


def known(loss: float) -> float:
    """The loss of a run; one that has diverged has learned nothing."""
    return min(loss, UNTRAINED) if math.isfinite(loss) else UNTRAINED


def schedule(progress: float) -> float:
    """Warm-up and cosine, over samples."""
    return min(1.0, progress / WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))


def add(
    sums: torch.Tensor,
    totals: torch.Tensor,
    divisors: torch.Tensor,
    losses: torch.Tensor,
    gradients: Sequence[torch.Tensor],
) -> None:
    """Add the gradients of a minibatch, their squared norms and the losses."""
    flat = torch.cat([gradient.flatten(1) for gradient in gradients], 1).float()
    sums.add_(flat)
    totals.add_(torch.stack([(flat / divisors).square().sum(1), losses], 1))


def update_by_adam_or_lion(
    weights: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    sums: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """AdamW (Loshchilov and Hutter 2019) or Lion (Chen et al. 2023), for the lanes that are due."""
    lr, weight_decay, beta1, beta2, eps, c1, c2, _, is_lion, is_due, _ = numbers.split(1, dim=1)
    gradient, is_lion, is_due = sums * scale, is_lion > 0, is_due > 0
    average = beta1 * first + (1 - beta1) * gradient
    squares = beta2 * second + (1 - beta2) * gradient.square()
    adam = average / c1 / ((squares / c2).sqrt() + eps)
    update = torch.where(is_lion, average.sign(), adam)
    new_first = torch.where(is_lion, beta2 * first + (1 - beta2) * gradient, average)
    new = weights * (1 - lr * weight_decay) - lr * update
    weights.copy_(torch.where(is_due, new, weights))
    first.copy_(torch.where(is_due, new_first, first))
    second.copy_(torch.where(is_due, squares, second))


def newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
    """Nearly U·Vᵀ of U·S·Vᵀ for each of [matrices, rows, columns], in bfloat16 (Jordan et al. 2024)."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()
