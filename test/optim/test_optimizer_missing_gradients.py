"""Parameters without a gradient on some cores, or in some steps, are treated as plain PyTorch treats them."""

import functools
import threading

import missing_gradients
import pytest
import torch
from noted_programs import NotingCore, Programs
from threaded_cores import run_on as run_on_threads

import variable_batch_size.optim.optimizer as module

READ = {"skip_nonfinite": True}
RUNS = {
    "sgd": ("sgd", "some", READ),
    "adamw": ("adamw", "some", READ),
    "exact": ("sgd", "some", {"exact": True}),
    "weights": ("sgd", "weights", {}),
    "adamw, weights": ("adamw", "weights", {}),
    "not read": ("sgd", "one core", {}),
    "refused": ("sgd", "some", {}),
}
# where an XLA device decides what becomes of a step
ON_DEVICE = {
    "on device": ("sgd", "one core", {"rule": "adascale"}),
    "on device, refused": ("sgd", "some", {"rule": "adascale"}),
    "on device, weights, refused": ("sgd", "some, weights", {"rule": "adascale"}),
}
BACKENDS = [("gloo", 1), ("gloo", 2), ("gloo", 3), ("threads", 1), ("threads", 3)]
XLA = [
    *(pytest.param("xla", cores, marks=pytest.mark.xla) for cores in (1, 2)),
    *(pytest.param("xla", cores, marks=[pytest.mark.xla, pytest.mark.long]) for cores in (4, 8)),
]


@pytest.fixture(scope="module")
def results_on(run_on):
    @functools.cache
    def run(backend, cores):
        if backend != "threads":
            return run_on(backend, cores, missing_gradients.train_all, backend, RUNS | ON_DEVICE)
        here = threading.local()

        def train(core):
            here.core = NotingCore(core, Programs())
            with torch.enable_grad():
                return missing_gradients.train_all("cpu", RUNS, rank=core.rank, num_replicas=cores)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "communicator_for", lambda *_: here.core)
            return run_on_threads(cores, train)

    return run


@pytest.mark.parametrize("name", [name for name in RUNS if name != "refused"])
@pytest.mark.parametrize(("backend", "cores"), [*BACKENDS, *XLA])
def test_the_weights_are_those_of_plain_pytorch_on_every_core(results_on, backend, cores, name):
    inner, missing, _ = RUNS[name]
    for results in results_on(backend, cores):
        weights, steps = results[name]
        assert steps == len(missing_gradients.SIZES)
        torch.testing.assert_close(weights, missing_gradients.expected(inner, missing), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("backend", "cores"), [("threads", 3), *XLA[1:]])
def test_steps_that_deviate_where_the_host_reads_nothing_are_refused_on_every_core(results_on, backend, cores):
    for results in results_on(backend, cores):
        assert "had a gradient in some steps of the epoch" in results["refused"]
        assert "pass `skip_nonfinite=True`" in results["refused"]


@pytest.mark.parametrize(("backend", "cores"), BACKENDS[:3])
def test_elsewhere_their_weights_are_correct(results_on, backend, cores):
    for results in results_on(backend, cores):
        weights, _ = results["refused"]
        torch.testing.assert_close(weights, missing_gradients.expected("sgd", "some"), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("backend", "cores"), XLA[1:])
@pytest.mark.parametrize("name", ["on device, refused", "on device, weights, refused"])
def test_steps_that_deviate_where_the_device_decides_are_refused_on_every_core(results_on, backend, cores, name):
    for results in results_on(backend, cores):
        assert "had a gradient in some steps of the epoch" in results[name]


@pytest.mark.parametrize(("backend", "cores"), XLA)
def test_where_the_device_decides_the_weights_are_those_of_the_host(results_on, backend, cores):
    expected, _ = results_on("gloo", 1)[0]["on device"]
    for results in results_on(backend, cores):
        weights, _ = results["on device"]
        torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)
