"""A run whose cores are killed, stopped and added while it trains: for tests, tools/live_soak.py and bench/live.py."""

import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from variable_batch_size.cores import live

NUM_SAMPLES, MINIBATCH = 96, 4
SIZES = [16, 4, 32, 8, 24, 12]
MOST_SECONDS = 600  # of a run
REMOVED = 3  # the exit code of a core that others have removed


@dataclass(frozen=True)
class Settings:
    """What is trained, and how."""

    steps: int = 60
    rule: str = "adascale"
    exact: bool = False
    ddp: bool = False
    stream: bool = False
    num_workers: int = 0
    bare: bool = False  # whether the loader is torch's own
    weighted: bool = False  # whether minibatches have weights; the first layer is frozen in the first epoch then
    seconds: float = 0.002  # that a minibatch takes
    width: int = 16


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if index >= NUM_SAMPLES:
            raise IndexError
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(6, generator=generator), torch.randint(3, (), generator=generator)


def samples_in_order():
    return map(Samples().__getitem__, range(NUM_SAMPLES))


class Model(torch.nn.Module):
    """A network with a number for each sample, which a sample that is lost or repeated changes."""

    def __init__(self, width, has_norm):
        super().__init__()
        # exact runs have the same random numbers, too
        layers = [torch.nn.Tanh(), torch.nn.Dropout(0.1 * has_norm), torch.nn.Linear(width, 3)]
        # with four samples in a minibatch, BatchNorm lets rounding errors grow
        norm = [torch.nn.BatchNorm1d(width)] if has_norm else []
        self.net = torch.nn.Sequential(torch.nn.Linear(6, width), *norm, *layers)
        self.used = torch.nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, index, x):
        return self.net(x) + self.used[index][:, None], self.used[index].mean()


def loader_of(settings):
    how = {"trace": (SIZES * settings.steps)[: settings.steps], "minibatch_size": MINIBATCH}
    if settings.stream:
        stream = vbs.Stream(samples_in_order, dataset_size=NUM_SAMPLES, **how)
        return torch.utils.data.DataLoader(stream, batch_size=None)
    if settings.bare:
        return torch.utils.data.DataLoader(Samples(), batch_sampler=vbs.CustomSampler(Samples(), **how))
    return vbs.DataLoader(Samples(), num_workers=settings.num_workers, **how)


def optimizer_of(model, loader, settings):
    options = {"ref_batchsize": 8, "model": model, "exact": settings.exact}
    if settings.rule == "adamw":
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        return vbs.Optimizer(inner, loader, rule="adam", **options)
    lr = 0.02 * min(1, 16 / settings.width)  # at 0.02 a wide network would let rounding errors grow
    return vbs.Optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), loader, rule="adascale", **options)


def train(settings, diary=None):
    """Train, and return the weights and the number of steps; what a core does is written to its diary."""
    # the weights of the first core are sent to the others
    torch.manual_seed(0 if live.current() is None or live.current().core == 1 else os.getpid())
    model = Model(settings.width, has_norm=settings.exact)
    if settings.ddp:
        model = DistributedDataParallel(model)
    loader = loader_of(settings)
    optimizer = optimizer_of(model, loader, settings)
    note, records, test_loader = Diary(diary), [], vbs.EvaluationLoader(Samples(), minibatch_size=10)
    optimizer.attach(vbs.Log(optimizer, every=1, to=[records.append]))
    for epoch in optimizer.epochs():
        note("begins", optimizer.steps_done)
        next(model.parameters()).requires_grad_(epoch > 0 or not settings.weighted)
        for index, x, y in loader:
            out, used = model(index, x)
            weight = (1 + index % 7).sum() if settings.weighted else None
            loss = (torch.nn.functional.cross_entropy(out, y) + used) * (1 if weight is None else weight)
            loss.backward()
            if settings.seconds:
                time.sleep(settings.seconds * pace(diary, settings.steps - optimizer.steps_done))
            step, is_idle = optimizer.steps_done, optimizer._cursor.next.is_padding
            note("ran", step, [] if is_idle else index.tolist())
            if optimizer.step(loss=loss, weight=weight):
                note("updated", step)
                if records:
                    note("logged", *map(records.pop().get, ("step", "samples", "weight")))
        metrics = vbs.Metrics("cores", "samples", device="cpu")
        metrics.add(cores=1)
        for index, *_ in test_loader:
            metrics.add(samples=len(index))
        note("evaluated", *metrics.read().values())
    return [p.detach() for p in model.parameters()], optimizer.steps_done


def pace(directory, steps_left):
    """The factor of the seconds of a minibatch: the run must not end before all events, and then without a wait."""
    if (directory / "all has happened").exists():
        return 0
    return 20 if (directory / "events are left").exists() and steps_left < 20 else 1


class Diary:
    """What a core has done, a line each."""

    def __init__(self, directory):
        self._file = None if directory is None else open(Path(directory) / f"{os.getpid()}.jsonl", "a")  # noqa: SIM115

    def __call__(self, *words):
        if self._file is not None:
            self._file.write(json.dumps([time.time(), *words]) + "\n")
            self._file.flush()


def read_diaries(directory):
    """The lines of each process, by its id."""
    found = {}
    for path in Path(directory).glob("*.jsonl"):
        found[int(path.stem)] = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return found


class Cores:
    """The store and the cores of a run, each forked from this process, which starts them much faster than launch()."""

    def __init__(self, settings, directory, *, first, most=4, timeout=10.0):
        self.settings, self.directory = settings, Path(directory)
        self._how = {"least": 1, "most": most, "first": first, "timeout": timeout}
        self.alive = {}  # the number of each core, by the id of its process
        self.killed = {}  # when, by the same
        self.failed, self.removed = [], []
        self.num_joins = 0
        self._has_begun = False
        self._store_pid, self.address = fork_store()
        self._store = live.connect(self.address)
        for _ in range(first):
            self.add()

    def add(self):
        """Start another core."""
        core = live.new_core(self._store)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            self._run(core)
        self.alive[pid] = core
        return pid

    def _run(self, core):
        code = 1
        try:
            with open(self.directory / f"output-{os.getpid()}.txt", "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            membership = live.Membership(self.address, core, **self._how)
            with live.taking_part(membership):
                result = train(self.settings, self.directory)
                torch.save(result, self.directory / f"part-{core}.pt")  # it may be killed meanwhile
                os.replace(self.directory / f"part-{core}.pt", self.directory / f"result-{core}.pt")
            code = 0
        except live.LeftRunError as error:
            print(error, flush=True)
            code = 0 if "has ended" in str(error) else REMOVED
        except BaseException:
            logging.exception("core %d", core)
        finally:
            logging.shutdown()
            os._exit(code)

    def joined(self):
        """The processes that have the state of the run."""
        there = {pid: core for pid, core in self.alive.items() if pid not in self.killed}
        return [pid for pid, core in there.items() if self._store.check([f"joined/{core}"])]

    def has_results(self):
        return any(self.directory.glob("result-*.pt"))

    def has_begun(self):
        """Whether the first step is complete, in which exact runs choose their units."""
        self._has_begun = self._has_begun or any(
            '"updated"' in path.read_text() for path in self.directory.glob("*.jsonl")
        )
        return self._has_begun

    def disturb(self, event, rng):
        """Cause an event if it is possible; returns whether it was."""
        joined = self.joined()
        if event == "add":
            if len(self.alive) >= self._how["most"]:
                return False
            self.num_joins += 1
            self.add()
            return True
        if len(joined) < 2:
            return False
        if event == "stop":
            self.stop(rng.choice(joined))
            return True
        for pid in rng.sample(joined, len(joined) - 1 if event == "kill all but one" else 1):
            self.killed[pid] = time.time()
            os.kill(pid, signal.SIGKILL)
        return True

    def stop(self, pid):
        """Let a core hang until the others have removed it."""
        os.kill(pid, signal.SIGSTOP)
        latest = max(
            words[2] for lines in read_diaries(self.directory).values() for words in lines if words[1] == "ran"
        )
        while not any(
            words[1:] == ["updated", latest + 1] for lines in read_diaries(self.directory).values() for words in lines
        ):
            time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
        while pid not in self.removed:
            time.sleep(0.02)
            self.reap()

    def reap(self):
        """Record which processes have ended."""
        for pid in list(self.alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                core = self.alive.pop(pid)
                if not (self.directory / f"result-{core}.pt").exists():
                    live.report_death(self._store, core)
                code = os.waitstatus_to_exitcode(status)
                if code == REMOVED:
                    self.removed.append(pid)
                elif code not in (0, -signal.SIGKILL):
                    self.failed.append(pid)

    def end(self):
        for pid in [*self.alive, self._store_pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.alive = {}

    def results(self):
        return [torch.load(path) for path in sorted(self.directory.glob("result-*.pt"))]

    def outputs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self.directory.glob("output-*.txt"))


def fork_store():
    """A store in a separate process: its id and address."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(server.port).encode())
        signal.pause()
    os.close(writing)
    port = os.read(reading, 20).decode()
    os.close(reading)
    return pid, f"127.0.0.1:{port}"


@contextmanager
def alone(**how):
    """Let this process be the only core of a run; its membership."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    how = {"least": 1, "most": 4, "first": 1, "timeout": 10.0, **how}
    membership = live.Membership(f"127.0.0.1:{store.port}", live.new_core(store), **how)
    with live.taking_part(membership):
        yield membership


def in_fork(function):
    """The result of a function that runs in a forked process: this one must have no threads, as it forks again."""
    with tempfile.NamedTemporaryFile() as file:
        pid = os.fork()
        if not pid:
            try:
                torch.save(function(), file.name)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        return torch.load(file.name)


def disturbed(settings, *, cores, seed, most=4, wait=(0.02, 0.4), events=None, timeout=10.0):
    """Disturb a run; returns what was done, and raises AssertionError if a promise is broken.

    Args:
        settings: of the run.
        cores: that it begins with.
        seed: of the times and kinds of disturbances.
        most: the maximum number of cores at the same time.
        wait: the shortest and longest time until the next disturbance.
        events: of "kill", "kill all but one", "add" and "stop", in order; None for random ones until the end.
        timeout: the time after which a core that is stopped is removed.
    """
    rng = random.Random(seed)
    train(Settings(steps=2, seconds=0.0))  # imports what the cores would import, each by itself
    expected, _ = in_fork(lambda: train(replace(settings, seconds=0.0, ddp=False, num_workers=0)))
    with tempfile.TemporaryDirectory() as directory:
        run = Cores(settings, directory, first=cores, most=most, timeout=timeout)
        left, due, end = events and list(events), time.time() + 0.5, time.time() + MOST_SECONDS
        if left:
            (run.directory / "events are left").touch()
        try:
            while run.alive and not run.failed:
                assert time.time() < end, f"the run hangs\n{run.outputs()}"
                time.sleep(0.005)
                run.reap()
                if time.time() < due or run.has_results() or not run.has_begun():
                    continue
                due = time.time() + rng.uniform(*wait)
                if events is None:
                    is_kill = len(run.joined()) > 1 and rng.random() < 0.6
                    run.disturb(rng.choice(["kill", "kill", "kill", "kill all but one"]) if is_kill else "add", rng)
                elif left and run.disturb(left[0], rng):
                    left.pop(0)
                elif not left and run.num_joins == len(run.joined()) + len(run.killed) + len(run.removed) - cores:
                    (run.directory / "all has happened").touch()
            assert not left, f"the run has ended before {left}\n{run.outputs()}"
            error = check(run, settings, expected)
            done = {"kills": len(run.killed), "joins": run.num_joins, "removed": len(run.removed), "error": error}
            return {**done, "seconds": recovery_times(run)}
        finally:
            run.end()


def check(run, settings, expected):
    """Raise unless the run has ended as an undisturbed one, with each sample in its step once; the largest error."""
    assert not run.failed, run.outputs()
    results, errors = run.results(), []
    assert results, run.outputs()
    for weights, steps in results:
        assert steps == settings.steps
        for own, other in zip(weights, expected, strict=True):
            errors.append(float((own - other).abs().max()))
            if settings.exact:
                assert torch.equal(own, other), (own - other).abs().max()
            else:
                torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    diaries = read_diaries(run.directory)
    words = [line[1:] for lines in diaries.values() for line in lines]
    # fewer if a core has died while it evaluated
    assert all(number <= NUM_SAMPLES for word, *rest in words if word == "evaluated" for number in rest[1:])
    logged, weight = {rest[0]: rest[-1] for word, *rest in words if word == "logged"}, 0
    for step in range(settings.steps):
        samples = check_step(step, diaries, run.killed, run.removed)
        weight += sum(1 + sample % 7 for sample in samples)
        assert not settings.weighted or logged.get(step + 1, weight) == weight, step
    return max(errors)


def check_step(step, diaries, killed, removed):
    """Raise unless each sample of a step was used once, and only what dead cores had run was run again."""
    used, lost = Counter(), Counter()
    for pid, lines in diaries.items():
        ran = Counter(sample for _, word, *rest in lines if word == "ran" and rest[0] == step for sample in rest[1])
        updates = [words[2] for words in lines if words[1] == "updated"]
        # one that has woken up may complete the step that the others have repeated without it
        has_updated = step in (updates[:-1] if pid in removed else updates)
        assert has_updated or not ran or pid in killed or pid in removed, (step, pid)
        (used if has_updated else lost).update(ran)
    num_samples = SIZES[step % len(SIZES)]
    # a core may have died after the update and before it could record it
    assert not used or max(used.values()) == 1, (step, used)
    assert len(set(used) | set(lost)) == num_samples, (step, used, lost)
    # only what dead cores have run is run again
    assert sum(used.values()) + len(set(lost) - set(used)) == num_samples
    return set(used) | set(lost)


def recovery_times(run):
    """For each death, the seconds until all others have made the update that the dead core has not."""
    diaries, found = read_diaries(run.directory), []
    for pid, when in run.killed.items():
        updates = [words[2] for words in diaries.get(pid, []) if words[1] == "updated"]
        upcoming = updates[-1] + 1 if updates else None
        times = [
            w[0] for other, lines in diaries.items() if other != pid for w in lines if w[1:] == ["updated", upcoming]
        ]
        if times and max(times) > when:
            found.append(max(times) - when)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for given in json.loads(sys.argv[1]):
        settings = Settings(**given.pop("settings", {}))
        print(json.dumps(disturbed(settings, **given)), flush=True)
