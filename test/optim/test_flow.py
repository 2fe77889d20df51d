"""How the numbers of a step reach the rule: on the device the results are those of reading at once."""

import copy
import itertools
import math
import pickle
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from count_operations import CountOperations
from count_reads import CountReads
from kernel_in_numpy import as_operation
from torch import nn
from torch.testing import assert_close

import variable_batch_size as vbs
from variable_batch_size.optim import flow
from variable_batch_size.optim.attachments import Follower
from variable_batch_size.optim.gradients.accumulator import StepGradient
from variable_batch_size.rules.noise import NoiseMeter

TRACE = [4 * n for n in (2, 1, 3, 6, 1, 2, 5, 4, 4, 1, 2, 8)]
BAD = (0, 3, 4, 9)  # steps with a gradient that is not finite
INNER = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, fused=True),
}
RULES = ("adascale", "adamscale", "surge", "linear", "legw:20")


@pytest.fixture
def on_device(monkeypatch):
    """Treats the CPU as an accelerator."""
    monkeypatch.setattr(flow, "_HOSTS", ())


class Run:
    """A training on random data, in double precision, whose gradients are not finite in some steps."""

    def __init__(self, rule="adascale", inner="momentum", *, dtype=torch.float64, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        groups = [{"params": list(self.model[:2].parameters())}, {"params": list(self.model[3].parameters())}]
        self.sampler = vbs.CustomSampler(dataset_size=1000, trace=TRACE, minibatch_size=4)
        rule = vbs.rules.make_rule(rule)
        self.dtype, self.inner = dtype, INNER[inner](groups)
        options = {"model": self.model, "ref_batchsize": 8, "skip_nonfinite": True, **options}
        self.optimizer = vbs.CustomOptimizer(self.inner, self.sampler, rule=rule, **options)

    def steps(self, *, bad=BAD, weights=None, first=0):
        """Train, and yield what is known after each step."""
        generator = torch.Generator().manual_seed(1)
        done, optimizer = 0, self.optimizer
        data = {step: [] for step in range(len(TRACE))}
        for step, size in enumerate(TRACE):
            for _ in range(size // 4):
                data[step].append((torch.randn(4, 6, generator=generator), torch.rand((), generator=generator)))
        self.sampler.set_epoch(0, first)
        minibatches = iter(self.sampler)
        for step in range(first, len(TRACE)):
            for number, (x, w) in enumerate(data[step]):
                next(minibatches)
                loss = self.model(x.to(self.dtype)).square().mean() * (1 + w)
                weight = None if weights is None else float(math.ceil(5 * w)) * (step != 6)
                (loss * math.inf if step in bad and number == 0 else loss).backward()
                done += optimizer.step(weight=weight)
            yield self.found()

    def found(self):
        optimizer = self.optimizer
        numbers = {
            "lr": [optimizer.current_lr(group) for group in (0, 1)] if optimizer.updated else None,
            "updated": optimizer.updated,
            "skipped": optimizer.steps_skipped,
            "progress": optimizer.progress,
            "report": optimizer.report(),
        }
        inner = {p: cloned(state) for p, state in self.inner.state_dict()["state"].items()}
        return {**numbers, "model": cloned(self.model.state_dict()), "inner": inner}


def cloned(tensors):
    """A copy as deepcopy() makes it, in a fraction of its time."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}


def assert_same(one, other, tolerance=1e-12):
    assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def pairs():
    return [
        (rule, inner)
        for rule in RULES
        for inner in INNER
        if not (rule == "adamscale" and inner in ("sgd", "momentum")) and not (rule == "legw:20" and inner != "sgd")
    ]


def ways(pairs):
    """Each pair in two runs, with and without weights and other options; in four in the long form."""
    smooth = {"smooth_steps": 3, "max_factor": 2.5, "clip_grad_norm": 0.5}
    for number, pair in enumerate(pairs):
        for weights, options in itertools.product((None, "weighted"), ({}, smooth)):
            is_long = (weights is None) ^ (options == {}) ^ (number % 2 == 1)
            kind = f"{'-'.join(pair)}-{weights or 'plain'}-{'smooth' if options else 'as it is'}"
            yield pytest.param(*pair, weights, options, id=kind, marks=pytest.mark.long if is_long else ())


@pytest.mark.parametrize(("rule", "inner", "weights", "options"), [*ways(pairs())])
def test_numbers_on_the_device_are_those_read_at_once(monkeypatch, rule, inner, weights, options):
    expected = list(Run(rule, inner, **options).steps(weights=weights))
    monkeypatch.setattr(flow, "_HOSTS", ())
    run = Run(rule, inner, **options)
    assert run.optimizer._flow.way == "on the device"
    for found, one in zip(run.steps(weights=weights), expected, strict=True):
        assert_same(found, one)
    assert run.optimizer.steps_skipped == len(BAD) + (weights is not None)


@pytest.mark.parametrize(
    ("rule", "inner", "weights", "options"),
    [*ways([("adascale", "momentum"), ("adascale", "adamw"), ("adamscale", "adam"), ("surge", "sgd")])],
)
def test_numbers_of_a_kernel_are_those_read_at_once(monkeypatch, rule, inner, weights, options):
    expected = list(Run(rule, inner, **options).steps(weights=weights))
    monkeypatch.setattr(flow, "_HOSTS", ())
    monkeypatch.setattr(
        flow, "cuda_operations", SimpleNamespace(as_operation=as_operation, are_available=lambda device: True)
    )
    run = Run(rule, inner, **options)
    for found, one in zip(run.steps(weights=weights), expected, strict=True):
        assert_same(found, one)
    assert isinstance(run.optimizer._flow._twin, flow._OperationTwin)


@pytest.mark.parametrize("has_kernel", [False, True])
def test_step_of_weight_0_is_skipped_on_a_device_whose_weight_the_host_does_not_know(monkeypatch, has_kernel):
    options = {"smooth_steps": 3}  # a step that was made would also move the transition
    expected = list(Run(**options).steps(weights="weighted"))
    monkeypatch.setattr(flow, "_HOSTS", ())
    monkeypatch.setattr(StepGradient, "weighs_nothing", False)
    kernels = SimpleNamespace(as_operation=as_operation, are_available=lambda device: has_kernel)
    monkeypatch.setattr(flow, "cuda_operations", kernels)
    for found, one in zip(Run(**options).steps(weights="weighted"), expected, strict=True):
        assert_same(found, one)


@pytest.mark.parametrize("rule", ["adascale", "linear"])
def test_reading_numbers_changes_nothing(on_device, rule):
    *_, expected = Run(rule).steps()
    run = Run(rule)
    run.found, found = lambda: None, run.found
    list(run.steps())
    assert_same(found(), expected, tolerance=0)


@pytest.mark.parametrize("rule", ["linear", "adascale", "surge", "adamscale"])
def test_no_number_is_read_from_the_device(on_device, rule):
    inner = "adam" if rule == "adamscale" else "momentum"
    run = Run(rule, inner)
    step, reads = run.optimizer.step, []

    def counted(**options):
        with CountReads() as count:
            is_complete = step(**options)
        reads.append((run.optimizer.steps_done, count.num_reads))
        return is_complete

    run.found, run.optimizer.step = lambda: None, counted
    for state in run.inner.state.values():
        state["step"] = torch.zeros(())
    list(run.steps(bad=(3, 4)))
    by_adam = 2 * 4 if rule == "adamscale" else 0  # its step counts, which are on a GPU if parameters are
    assert max(number for steps_done, number in reads if steps_done > 1) <= by_adam
    assert max(number for steps_done, number in reads if steps_done == 1) > 0
    assert run.optimizer.steps_skipped == 2


NUM_AT_ONCE = 3  # estimates, in these tests


class GainOfTheStepBefore(vbs.rules.Rule):
    """AdaScale with a gain that does not contain the step's own norms after the first estimates, read at once."""

    measures_noise = True

    def __init__(self):
        self.meter, self.latest = NoiseMeter(), None

    def observe(self, step, norms):
        if self.latest is not None:
            self.meter.observe(*self.latest)
        self.latest = step, norms
        num_estimates = max((average.count for average in self.meter.averages), default=0)
        if num_estimates < NUM_AT_ONCE and (step.num_minibatches > 1 or (step.weight is not None and num_estimates)):
            self.meter.observe(*self.latest)
            self.latest = None

    def factor(self, step):
        return self.meter.gain(step.batch_size, step.ref_batchsize)

    def group_factor(self, step, group):
        return self.meter.gain(step.batch_size, step.ref_batchsize, group)


def not_fused(monkeypatch):
    monkeypatch.setattr(flow, "_NUM_AT_ONCE", NUM_AT_ONCE)
    monkeypatch.setitem(INNER, "momentum", lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9))


@pytest.mark.parametrize("weights", [None, "weighted"])
def test_other_optimizers_get_the_gain_of_the_step_before(monkeypatch, weights):
    not_fused(monkeypatch)
    monkeypatch.setattr(vbs.rules, "make_rule", lambda _: GainOfTheStepBefore())
    names = ("lr", "progress", "model", "inner")
    steps = Run(skip_nonfinite=False).steps(bad=(), weights=weights)
    expected = [{name: one[name] for name in names} for one in steps]
    monkeypatch.undo()
    not_fused(monkeypatch)
    monkeypatch.setattr(flow, "_HOSTS", ())
    run = Run(skip_nonfinite=None)
    assert run.optimizer._flow.way == "one step late"
    assert run.optimizer.description["gain"] == "one step late"
    assert not run.optimizer.skip_nonfinite
    for found, one in zip(run.steps(bad=(), weights=weights), expected, strict=True):
        assert_same({name: found[name] for name in names}, one, tolerance=0)


# steps 0, 2 and 3 give estimates; then step 4 changes the mean weight of a sample, and step 5 has the gain 1
@pytest.mark.parametrize(("weights", "num_same"), [(None, 6), ("weighted", 4)])
def test_the_first_gains_are_not_late(monkeypatch, weights, num_same):
    """In the first steps, weights and gradients change fast: late gains would cost AdaScale 4 to 12 % more updates."""
    not_fused(monkeypatch)
    expected = list(Run(skip_nonfinite=False).steps(bad=(), weights=weights))
    monkeypatch.setattr(flow, "_HOSTS", ())
    found = list(Run(skip_nonfinite=None).steps(bad=(), weights=weights))
    assert_same([one["lr"] for one in found[:num_same]], [one["lr"] for one in expected[:num_same]], tolerance=0)
    assert found[num_same]["lr"] != expected[num_same]["lr"]


def test_late_norms_that_are_not_finite_are_not_averaged(monkeypatch, on_device):
    not_fused(monkeypatch)
    run = Run("linear", skip_nonfinite=None, measure_noise=True, model=None)
    assert run.optimizer._flow.way == "one step late"
    for number, _ in enumerate(run.steps(bad=())):
        if number == 4:
            before = run.optimizer.noise
            for p in run.model.parameters():
                p.register_hook(lambda gradient: gradient * math.nan)
    assert run.optimizer.noise == before


@pytest.mark.parametrize("hosts", [("cpu",), ()])
def test_nonfinite_norms_that_are_read_at_once_are_not_averaged(monkeypatch, hosts):
    """Norms are read at once on the host, and for the first estimates also on an accelerator."""
    not_fused(monkeypatch)
    monkeypatch.setattr(flow, "_HOSTS", hosts)
    run = Run(skip_nonfinite=False, model=None)
    noise = [run.optimizer.noise for _ in run.steps(bad=(3,))]
    assert noise[2] != noise[0]
    assert all(p.isnan().all() for p in run.model[3].parameters())  # as in a plain loop
    assert noise[2:] == [noise[2]] * (len(TRACE) - 2)


def test_nonfinite_updates_are_skipped_at_once_if_asked_for(monkeypatch):
    not_fused(monkeypatch)
    expected = list(Run().steps())
    monkeypatch.setattr(flow, "_HOSTS", ())
    for found, one in zip(Run().steps(), expected, strict=True):
        assert_same(found, one, tolerance=0)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("weights", [None, "weighted"])
def test_run_resumes_as_if_never_stopped(monkeypatch, weights, is_fused):
    if not is_fused:
        not_fused(monkeypatch)
    monkeypatch.setattr(flow, "_HOSTS", ())
    options = {"skip_nonfinite": is_fused, "smooth_steps": 3}
    bad = BAD if is_fused else ()
    *_, expected = Run(**options).steps(weights=weights, bad=bad)
    for stop in (1, 5) if weights else (4, 8):
        first = Run(**options)
        for _ in zip(range(stop), first.steps(weights=weights, bad=bad), strict=False):
            pass
        second = Run(**options)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        *_, found = second.steps(weights=weights, bad=bad, first=stop)
        assert_same(found, expected, tolerance=0 if is_fused else 1e-15)


def test_parameters_without_a_state_are_updated_at_once(on_device):
    """A first update that the device skips would leave the momentum undefined."""
    results = []
    for hosts in (("cpu",), ()):
        flow._HOSTS = hosts
        run = Run()
        for p in run.model[3].parameters():
            p.requires_grad_(False)
        found = []
        for one in run.steps(bad=(5, 6, 8)):
            found.append(one)
            if len(found) == 5:
                for p in run.model[3].parameters():
                    p.requires_grad_(True)
        results.append(found)
    assert_same(*results)


def test_a_group_may_be_added(on_device):
    results = []
    for hosts in (("cpu",), ()):
        flow._HOSTS = hosts
        run = Run()
        head = run.model[3]
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        head.register_forward_hook(lambda module, args, output, extra=extra: output * extra)
        found = []
        for one in run.steps(bad=(5, 6)):
            found.append(one)
            if len(found) == 5:
                run.optimizer.add_param_group({"params": [extra]})
        results.append((found, extra.detach().clone()))
    assert_same(*results)


def test_schedule_by_progress_is_one_step_late(on_device):
    run = Run()
    progress = [0.0]
    for _ in run.steps():
        late = run.optimizer.late_progress
        assert late in (progress[-1], run.optimizer.progress)  # a host that has read knows more, but does not use it
        if run.optimizer.steps_done > 2:
            assert late == progress[-1]
        progress.append(run.optimizer.progress)


def test_grad_scaler_skips_on_the_device(on_device):
    results = []
    for hosts in (("cpu",), ()):
        flow._HOSTS = hosts
        run = Run(skip_nonfinite=None, dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        for number, _ in enumerate(run.sampler):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            loss = run.model(x).square().mean()
            scaler.scale(loss * math.inf if number in (9, 20) else loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
        results.append((run.found(), scaler.get_scale()))
    assert_same(*results, tolerance=1e-6)


def test_copy_of_an_optimizer_continues_identically(on_device):
    run = Run()
    steps = run.steps()
    for _ in range(6):
        next(steps)
    twin = copy.deepcopy(run.optimizer)
    assert twin.progress == run.optimizer.progress
    assert twin.state_dict()["variable_batch_size"]["rule"] == run.optimizer.state_dict()["variable_batch_size"]["rule"]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_has_the_latest_numbers_though_none_was_read(monkeypatch, on_device, copied, is_fused):
    if not is_fused:
        not_fused(monkeypatch)
    run = Run(skip_nonfinite=None, model=None)
    run.found = lambda: None
    for _ in zip(range(6), run.steps(bad=()), strict=False):
        pass
    other = copied(run.optimizer)
    assert (other.progress, other.gain()) == (run.optimizer.progress, run.optimizer.gain())


@pytest.mark.parametrize("stop", [2, 5, 6, 7, 10])
def test_schedule_by_progress_resumes_as_if_never_stopped(on_device, stop):
    def following(run, first=0):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.inner, 0.5)
        step = run.optimizer.step

        def followed(**options):
            is_complete = step(**options)
            Follower.checked(scheduler, "progress", 1).follow(run.optimizer)
            return is_complete

        run.optimizer.step = followed
        return scheduler

    whole = Run()
    following(whole)
    *_, expected = whole.steps(bad=())
    first = Run()
    scheduler = following(first)
    for _ in zip(range(stop), first.steps(bad=()), strict=False):
        pass
    second = Run()
    other = following(second)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    other.load_state_dict(scheduler.state_dict())
    *_, found = second.steps(bad=(), first=stop)
    assert_same(found, expected, tolerance=0)


def test_nothing_is_skipped_if_that_is_switched_off(on_device):
    run = Run("linear", measure_noise=True, skip_nonfinite=False)
    *_, found = run.steps(bad=(3,))
    assert run.optimizer._flow.way == "on the device"
    assert run.optimizer.steps_skipped == 0
    assert not found["model"]["0.weight"].isfinite().all()


def test_report_is_that_of_the_latest_step(on_device):
    run = Run("linear", measure_noise=True)
    run.found = lambda: None
    for _ in zip(range(6), run.steps(), strict=False):
        pass
    assert run.optimizer.report() == pytest.approx(run.optimizer.report(), rel=0, abs=0, nan_ok=True)
    assert run.optimizer.report()["noise_scale"] == run.optimizer.noise_scale


def test_buffer_may_change_its_shape(on_device):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x):
            self.seen = torch.cat([self.seen, torch.ones(1)])
            return x

    results = []
    for hosts in (("cpu",), ()):
        flow._HOSTS = hosts
        run = Run()
        run.model[2] = Growing()
        results.append(list(run.steps()))
    assert_same(*results)


def test_state_of_an_optimizer_that_is_not_fused_may_be_loaded(monkeypatch):
    results = []
    for hosts in (("cpu",), ()):
        with pytest.MonkeyPatch.context() as patch:
            not_fused(patch)
            first = Run()
            for _ in zip(range(4), first.steps(), strict=False):
                pass
        monkeypatch.setattr(flow, "_HOSTS", hosts)
        second = Run()
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        results.append(list(second.steps(first=4)))
    assert_same(*results)


def test_rule_may_be_changed(on_device):
    results = []
    for hosts in (("cpu",), ()):
        flow._HOSTS = hosts
        run = Run("legw:100", "sgd")
        found = []
        for one in run.steps(bad=()):
            found.append(one)
            if len(found) == 5:
                run.optimizer.rule.warmup_samples = 20
        results.append(found)
    assert_same(*results)


@pytest.mark.parametrize(("rule", "most"), [("linear", 5), ("adascale", 140)])
def test_operations_of_an_update_on_the_device(on_device, rule, most):
    """The host pays for each, on XLA by tracing it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    sampler = vbs.CustomSampler(dataset_size=1000, trace=16, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=8)
    numbers = []
    for _ in islice(sampler, 16):
        model(torch.randn(4, 8)).square().sum().backward()
        with CountOperations() as operations:
            optimizer.step()
        numbers.append(operations.num)
    assert numbers[11] == numbers[15] <= most  # without the first two steps, whose numbers are those of the host
