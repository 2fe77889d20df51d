"""A small training run on a stream that can be stopped and resumed on another number of cores."""

import contextlib
import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import variable_batch_size as vbs

MINIBATCH = 4
SIZES = tuple(MINIBATCH * n for n in (1, 3, 5, 2, 7, 1, 4, 6, 2, 3, 8, 1, 9, 2, 4, 5, 1, 3))
NUM_SAMPLES = sum(SIZES)
STOP_AFTER = 9  # steps
NUM_SHORT = sum(SIZES[:12]) + 5 * MINIBATCH + 1  # samples of a stream that ends within the step of 9 minibatches

_generator = torch.Generator().manual_seed(1)
INPUTS = torch.randn(NUM_SAMPLES + 50, 6, generator=_generator)
TARGETS = torch.randint(0, 3, (NUM_SAMPLES + 50,), generator=_generator)


class Stopped(Exception):
    """Simulates a lost machine."""


def samples():
    """More samples than the trace needs, each with its index."""
    for number in range(len(INPUTS)):
        yield {"x": INPUTS[number], "y": TARGETS[number], "number": number}


def few_samples():
    for sample in samples():
        if sample["number"] == NUM_SHORT:
            return
        yield sample


class Resumable(IterableDataset):
    """The same samples, starting at any of them."""

    def __init__(self):
        self._next = self._first = 0
        self.numbers_read = []

    def __iter__(self):
        self._next = self._first
        while self._next < len(INPUTS):
            number = self._next
            self._next += 1
            self.numbers_read.append(number)
            yield {"x": INPUTS[number], "y": TARGETS[number], "number": number}

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state_dict):
        self._first = state_dict["next"]


def hugging_face_stream():
    import datasets

    return datasets.IterableDataset.from_generator(samples).with_format("torch")


@dataclass(frozen=True)
class Case:
    """A way to read a stream.

    Attributes:
        samples: returns the samples of the stream.
        num_workers: of the loader.
        is_stateful: whether the loader is torchdata's, and part of the checkpoint.
        saves_stream: whether the stream is part of the checkpoint.
    """

    samples: object = lambda: samples
    num_workers: int = 0
    is_stateful: bool = False
    saves_stream: bool = False


CASES = {
    "no workers": Case(),
    "one worker": Case(num_workers=1),
    "three workers": Case(num_workers=3),
    "stream with a state": Case(Resumable, saves_stream=True),
    "Hugging Face stream": Case(hugging_face_stream, num_workers=3),
    "stateful loader": Case(Resumable, is_stateful=True),
    "stateful loader with three workers": Case(Resumable, num_workers=3, is_stateful=True),
    "stateful loader of a Hugging Face stream": Case(hugging_face_stream, num_workers=2, is_stateful=True),
}


def network():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return net


def loader_of(stream, case):
    if not case.is_stateful:
        return DataLoader(stream, batch_size=None, num_workers=case.num_workers)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(stream, batch_size=None, num_workers=case.num_workers)


def train(directory, case, *, stop_after=None):
    """Train to the end or for a number of steps; returns the weights, and this core's samples of each step."""
    stream = vbs.Stream(case.samples(), trace=SIZES, minibatch_size=MINIBATCH)
    loader = loader_of(stream, case)
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, stream, ref_batchsize=16, model=model)
    saved = [loader] if case.is_stateful else [stream] if case.saves_stream else []
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, schedulers=saved, every_steps=3)
    taken, numbers = {}, []
    with contextlib.suppress(Stopped):
        for _ in checkpoint.epochs(1):
            for minibatch in loader:
                nn.functional.cross_entropy(model(minibatch["x"]), minibatch["y"]).backward()
                numbers += minibatch["number"].tolist()
                if optimizer.step():
                    taken[optimizer.steps_done - 1] = [] if optimizer.is_idle else numbers
                    numbers = []
                checkpoint.step()
                if optimizer.steps_done == stop_after:
                    raise Stopped
    return {"weights": model.state_dict(), "taken": taken, "steps_done": optimizer.steps_done}


def train_indexed():
    """The same with indexed samples, in one process."""
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH, shuffle=False)
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=16, model=model)
    weights_after = {}
    for indices in sampler:
        nn.functional.cross_entropy(model(INPUTS[indices]), TARGETS[indices]).backward()
        if optimizer.step():
            weights_after[optimizer.steps_done] = {name: value.clone() for name, value in model.state_dict().items()}
    return weights_after


def begin_all(directory, names):
    """These cases until they are stopped; a number stands for a stream that ends early, with as many workers."""
    with _few_processors():
        return {
            name: train(directory / name, CASES[name], stop_after=STOP_AFTER)
            if name in CASES
            else train(directory / f"short {name}", Case(lambda: few_samples, num_workers=name))
            for name in names
        }


def end_all(directory, names):
    """These cases, resumed where they were stopped."""
    with _few_processors():
        return {name: train(directory / name, CASES[name]) for name in names if name in CASES}


@contextlib.contextmanager
def _few_processors():
    """Torch warns about more workers than processors, and newer Python versions about forking with threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
