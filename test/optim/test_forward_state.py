"""ForwardState: what a forward pass changes in a model is refused in exact mode; otherwise it is named in a warning."""

import gc

import pytest
import stateful_runs
import torch
import torchmetrics
from stateful_runs import CHANGING, Counting, CountingBuffer, Layer, train
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset

import variable_batch_size as vbs

each_kind = pytest.mark.parametrize("name", CHANGING)


def refusal(names):
    return (
        f"the forward pass changes {names}, which the next one may read, so that the weights depend on the number of "
        "cores: change it once a step instead, after step() has returned True, pass its name as `ignored_state` if it "
        "has no influence on the loss, or train with exact=False"
    )


@pytest.fixture(scope="module")
def errors():
    return {has_model: stateful_runs.errors_of_all(has_model) for has_model in (True, False)}


@each_kind
@pytest.mark.parametrize("has_model", [True, False])
def test_exact_mode_refuses_it_on_one_core(errors, name, has_model):
    assert f"the forward pass changes {CHANGING[name][1]}, " in errors[has_model][name]


@pytest.fixture(scope="module", params=[2, 3])
def results(on_cores, request):
    functions = (stateful_runs.errors_of_all, stateful_runs.warnings_of_all)
    return [on_cores(request.param, function) for function in functions]


@each_kind
def test_exact_mode_refuses_it_on_every_core(errors, results, name):
    for found in results[0]:
        assert found[name] == errors[True][name]


@each_kind
def test_on_several_cores_the_first_one_warns_once(results, name):
    first, *others = (found[name] for found in results[1])
    assert len(first) == 1
    assert first[0].startswith(f"The forward pass changes {CHANGING[name][1]}, ")
    assert not any(others)


@each_kind
def test_one_core_accumulates_as_plain_pytorch_does(name):
    assert train(CHANGING[name][0], epochs=2)[1] == []


@pytest.fixture(scope="module")
def allowed():
    return stateful_runs.digests_of_allowed()


@pytest.mark.parametrize("cores", [2, 3])
def test_what_no_minibatch_leaves_to_the_next_is_allowed_and_has_the_same_bits(on_cores, allowed, cores):
    assert [messages for _, messages in allowed.values()] == [[]] * 3
    assert len({digest for digest, _ in allowed.values()}) == 3
    assert on_cores(cores, stateful_runs.digests_of_allowed) == [allowed] * cores


@pytest.mark.parametrize("ignored", ["1.calls", ["*.nothing", "1.ca*"]])
def test_what_is_ignored_is_allowed(ignored):
    class Calls(Counting):
        def forward(self, x):
            self.calls += 1
            return Layer.forward(self, x)

    assert train(Calls, exact=True, ignored_state=ignored) == train(Layer, exact=True)


def test_other_names_are_not_ignored():
    with pytest.raises(ValueError, match=r"^the forward pass changes 1.calls, which"):
        train(Counting, exact=True, ignored_state=["calls", "1.call"])


def test_long_lists_of_names_are_cut():
    class Many(Layer):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Counting() for _ in range(5)])

        def forward(self, x):
            return sum(part(x) for part in self.parts)

    with pytest.raises(
        ValueError, match=r"changes 1.parts.0.calls, 1.parts.1.calls, 1.parts.2.calls and 2 more, which"
    ):
        train(Many, exact=True)


def test_what_changes_in_a_later_epoch_only_is_refused_in_its_second_minibatch():
    class Late(Layer):
        def __init__(self):
            super().__init__()
            self.minibatches, self.scale = 0, torch.ones(())

        def forward(self, x):
            if self.minibatches >= 16:  # in the second epoch
                self.scale = self.scale * 0.99
            return super().forward(x) * self.scale

    ends = []

    def count(model, is_complete):
        model[1].minibatches += 1
        ends.append(is_complete)

    with pytest.raises(ValueError, match=r"^the forward pass changes 1.scale, which"):
        train(Late, exact=True, epochs=2, each=count)
    assert len(ends) == 16


@pytest.mark.parametrize("has_model", [True, False])
def test_submodules_that_are_run_instead_of_the_model_are_compared(has_model):
    def parts(model):
        return lambda x: model[3](model[2](model[1](model[0](x))))

    with pytest.raises(ValueError, match=r"^the forward pass changes (1\.)?calls, which"):
        train(CountingBuffer, exact=True, wrap=parts, has_model=has_model)


def test_a_loop_may_request_the_next_minibatch_before_the_step():
    model = stateful_runs.network(Counting)
    loader = vbs.DataLoader(TensorDataset(torch.ones(32, 5)), [8], minibatch_size=4, on_end="cycle")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=8, model=model, exact=True)
    for _ in optimizer.epochs(1):
        minibatches = iter(loader)
        (x,) = next(minibatches)
        loss = model(x).sum()
        (x,) = next(minibatches)
        loss.backward()
        with pytest.raises(ValueError, match=r"^the forward pass changes 1.calls, which"):
            optimizer.step()
        break


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's compiler
@pytest.mark.parametrize("name", ["new spectral_norm", "running scale", "codebook", "counter in a buffer"])
@pytest.mark.parametrize("has_model", [True, False])
def test_compiled_models_are_compared(name, has_model):
    def compiled(model):
        return torch.compile(model, backend="eager")

    layer, changed = CHANGING[name]
    with pytest.raises(ValueError, match=f"^the forward pass changes (_orig_mod.)?{changed}, "):
        train(layer, exact=True, wrap=compiled, has_model=has_model)


@pytest.mark.parametrize("has_model", [True, False])
def test_a_compiled_model_is_compiled_as_often_as_in_plain_mode(has_model):
    def num_graphs(exact):
        torch.compiler.reset()
        counters.clear()
        train(Layer, exact=exact, epochs=2, seed_minibatches=False, wrap=compiled, has_model=has_model)
        return counters["stats"]["unique_graphs"]

    def compiled(model):
        return torch.compile(model, backend="eager")

    assert num_graphs(True) == num_graphs(False) > 0


def test_an_optimizer_that_is_dropped_leaves_no_hook_on_all_modules():
    model = nn.Linear(5, 1)
    sampler = vbs.CustomSampler(dataset_size=16, trace=[8], minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=8, exact=True)
    hooks = nn.modules.module._global_forward_pre_hooks
    before = set(hooks)
    next(iter(sampler))
    assert set(hooks) > before
    del optimizer
    gc.collect()
    model(torch.ones(4, 5))
    assert set(hooks) <= before


def test_an_update_of_another_optimizer_is_no_change_by_a_forward_pass():
    both = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    sampler = vbs.CustomSampler(dataset_size=16, trace=[8], minibatch_size=4)
    optimizers = [
        vbs.Optimizer(torch.optim.SGD(part.parameters(), lr=0.1), sampler, rule="linear", ref_batchsize=8, **options)
        for part, options in zip(both.values(), [{"model": both, "exact": True}] * 2, strict=True)
    ]
    for _ in sampler:
        sum(part(torch.ones(4, 3)).sum() for part in both.values()).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [optimizer.steps_done for optimizer in optimizers] == [1, 1]


def test_a_metric_in_the_model_has_no_influence():
    class Measured(Layer):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def forward(self, x):
            self.mean(x.detach())
            return super().forward(x)

    assert train(Measured, exact=True) == train(Layer, exact=True)


def test_after_two_minibatches_of_a_pass_nothing_is_copied_or_compared(monkeypatch):
    reads = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *args: reads.append(len(ends)) or equal(*args))
    ends = []

    class WithBuffer(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x):
            return super().forward(x) * self.scale

    train(WithBuffer, exact=True, epochs=3, each=lambda model, is_complete: ends.append(is_complete))
    assert set(reads) == {0, 1}


def test_a_model_in_fully_shard_is_compared(on_cores):
    first, second = on_cores(2, stateful_runs.sharded)
    assert len(first) == 1
    assert first[0].startswith("The forward pass changes 1.calls, ")
    assert second == []


@pytest.mark.xla
@pytest.mark.parametrize("cores", [1, 2])
def test_xla_cores_refuse_and_warn_alike(on_xla, cores):
    results = on_xla(cores, stateful_runs.on_an_xla_core)
    for name, (error, _) in results[0].items():
        assert f"the forward pass changes {CHANGING[name][1]}, " in error
        assert {result[name][0] for result in results} == {error}
        assert sum(len(result[name][1]) for result in results) == (cores > 1)
