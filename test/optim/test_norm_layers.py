"""Noise by the samples' gradients of normalization layers: against all per-sample gradients, in every kind of run."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from count_operations import CountOperations
from torch import nn
from torch.distributed.fsdp import fully_shard

import variable_batch_size as vbs
from variable_batch_size.optim import flow
from variable_batch_size.optim.norm_layers import EVERY
from variable_batch_size.rules.noise import Noise

NUM_SAMPLES, LENGTH, WIDTH, MINIBATCH = 256, 6, 8, 16


class LlamaRMSNorm(nn.Module):
    """As in transformers."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class Flattened(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.reshape(-1, x.shape[-1])).reshape(x.shape)


class OverChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Moved(nn.LayerNorm):
    """Normalizes another dimension than that of LayerNorm."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "of two dimensions": lambda: nn.LayerNorm((LENGTH, WIDTH)),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "RMSNorm of transformers": lambda: LlamaRMSNorm(WIDTH),
    "GroupNorm": OverChannels,
    "rows": lambda: Flattened(WIDTH),
}


def network(layer=LAYERS["LayerNorm"]):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, WIDTH), layer(), nn.GELU(), nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, 3)
    )
    with torch.no_grad():
        for module in model.modules():
            for p in module.parameters(recurse=False):
                p.add_(torch.randn_like(p) * 0.3)
    return model


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM_SAMPLES, LENGTH, 4, generator=generator), torch.randint(
        3, (NUM_SAMPLES, LENGTH), generator=generator
    )


X, Y = data()


@pytest.fixture(autouse=True)
def _forget_compiled():
    """Each test may compile the same layers again."""
    torch._dynamo.reset()


def loss_of(model, x, y, reduction="mean"):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def is_norm(module):
    return isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | LlamaRMSNorm)


def sample_gradients(model, indices, parameters):
    """The gradient of each sample by itself."""
    found = []
    for index in indices:
        gradients = torch.autograd.grad(loss_of(model, X[index : index + 1], Y[index : index + 1]), parameters)
        found.append(torch.cat([gradient.flatten() for gradient in gradients]).double())
    return torch.stack(found)


def norm_parameters(model):
    return [p for module in model.modules() if is_norm(module) for p in module.parameters(recurse=False)]


def make(model, /, *, trace=MINIBATCH, lr=0.0, minibatch_size=MINIBATCH, **options):
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=minibatch_size)
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"rule": "constant", "measure_noise": "norm layers", "model": model, **options}
    return sampler, vbs.Optimizer(inner, sampler, ref_batchsize=MINIBATCH, **options)


def train(model, sampler, optimizer, *, num_epochs=1, num_steps=None, is_weighted=False, run=None):
    for _ in optimizer.epochs(num_epochs):
        for indices in sampler:
            x, y = X[indices], Y[indices]
            loss_of(run or model, x, y, "sum" if is_weighted else "mean").backward()
            optimizer.step(**({"weight": y.numel()} if is_weighted else {}))
            if optimizer.steps_done == num_steps:
                return indices
    return None


def noise_of(gradients, population):
    """V and G² by single samples."""
    pair = float((gradients**2).sum(1).mean()), float((gradients.mean(0) ** 2).sum())
    return Noise.from_norms(*pair, batch_size=len(gradients), num_minibatches=len(gradients), population=population)


def layers_of(optimizer):
    return optimizer._flow.noise_meter().of_samples.average.noise


def layers(names, compiled):
    """The layers, eager and compiled; some of them compiled in the long form only, as compiling takes seconds."""
    for name in names:
        yield pytest.param(name, False, id=f"{name}-eager")
        yield pytest.param(name, True, id=f"{name}-compiled", marks=() if name in compiled else pytest.mark.long)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize(("name", "compiled"), [*layers(LAYERS, ["LayerNorm", "RMSNorm of transformers", "GroupNorm"])])
def test_noise_of_the_layers_is_that_of_all_samples_gradients(name, compiled):
    model = network(LAYERS[name])
    sampler, optimizer = make(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else None
    indices = train(model, sampler, optimizer, num_steps=1, run=run)
    model = network(LAYERS[name])
    truth = noise_of(sample_gradients(model, indices, norm_parameters(model)), NUM_SAMPLES)
    found = layers_of(optimizer)
    assert found.variance == pytest.approx(truth.variance, rel=1e-5)
    assert found.square_norm == pytest.approx(truth.square_norm, rel=1e-4, abs=1e-6 * truth.variance)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_model_is_compiled_with_and_without_the_measurement_and_not_again():
    model = network()
    sampler, optimizer = make(model, trace=[MINIBATCH, 2 * MINIBATCH] * 5)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    train(model, sampler, optimizer, run=torch.compile(model, backend=backend, fullgraph=True))
    assert optimizer.steps_done == 10
    assert len(graphs) == 2


def test_policy_receives_the_noise_of_single_minibatches():
    model, seen = network(), []
    policy = vbs.policies.FunctionPolicy(lambda situation: seen.append(situation) or MINIBATCH, every=5, lead=1)
    sampler, optimizer = make(model, trace=policy)
    train(model, sampler, optimizer)
    assert {situation.batch_size for situation in seen[1:]} == {MINIBATCH}
    assert all(situation.knows_noise for situation in seen[1:])


def test_autoscale_does_not_probe_for_the_noise():
    model, reasons = network(), []
    sampler, optimizer = make(model, trace=vbs.policies.Autoscale(max_batch_size=64, every=4, lead=1))
    optimizer.on_decision(lambda record: reasons.append(record["why"]))
    train(model, sampler, optimizer, num_epochs=2)
    assert len(reasons) > 2
    assert not any("noise unknown" in reason for reason in reasons)


def test_a_step_that_is_not_measured_has_one_operation_more_than_with_noise_measured():
    """The host pays for each."""
    numbers = []
    for measure_noise in (True, "norm layers"):
        model = network()
        sampler, optimizer = make(model, measure_noise=measure_noise)
        sampler.must_be_read = False
        for _ in range(3):
            loss_of(model, X[:MINIBATCH], Y[:MINIBATCH]).backward()
            with CountOperations() as operations:
                optimizer.step()
        numbers.append(operations.num)
    assert numbers[1] - numbers[0] <= 1


def test_weights_give_the_noise_per_token():
    (model, *plain), (other, *weighted) = (
        (lambda model: (model, *make(model)))(network()),
        (lambda model: (model, *make(model)))(network()),
    )
    train(model, *plain, num_steps=1)
    train(other, *weighted, num_steps=1, is_weighted=True)
    assert layers_of(weighted[1]).variance == pytest.approx(LENGTH * layers_of(plain[1]).variance, rel=1e-5)
    assert layers_of(weighted[1]).square_norm == pytest.approx(layers_of(plain[1]).square_norm, rel=1e-4)
    assert weighted[1].noise_scale_in_samples == pytest.approx(plain[1].noise_scale, rel=1e-3)


def test_layers_are_measured_without_bias_over_500_draws(monkeypatch):
    monkeypatch.setattr("variable_batch_size.optim.norm_layers.EVERY", 1)
    model = network()
    gradients = sample_gradients(model, range(NUM_SAMPLES), norm_parameters(model))
    sampler, optimizer = make(model, smoothing=0.99999)
    train(model, sampler, optimizer, num_epochs=32)
    assert optimizer.steps_done == 32 * NUM_SAMPLES // MINIBATCH == 512
    found = layers_of(optimizer)
    rng, draws = np.random.default_rng(0), []
    for _ in range(400):
        draws.append(noise_of(gradients[rng.permutation(NUM_SAMPLES)[:MINIBATCH]], NUM_SAMPLES))
    mean = gradients.mean(0)
    for name, truth in (("variance", float(gradients.var(0).sum())), ("square_norm", float(mean @ mean))):
        error = np.std([getattr(draw, name) for draw in draws]) / 512**0.5
        assert getattr(found, name) == pytest.approx(truth, abs=2 * error)


def test_slope_is_learned_with_several_minibatches_and_used_with_one(monkeypatch):
    monkeypatch.setattr("variable_batch_size.optim.norm_layers.EVERY", 1)  # so that a short run has enough of them
    model = network()
    every = sample_gradients(model, range(NUM_SAMPLES), list(model.parameters()))
    layers = sample_gradients(model, range(NUM_SAMPLES), norm_parameters(model))
    scales = [float(g.var(0).sum() / (g.mean(0) ** 2).sum()) for g in (every, layers)]
    sampler, optimizer = make(model, trace=[4 * MINIBATCH] * 80 + [MINIBATCH] * 160, smoothing=0.99)
    train(model, sampler, optimizer, num_epochs=30)
    report = optimizer.report()
    assert optimizer.batch_size == MINIBATCH
    assert scales[0] / scales[1] > 1.15  # not 1
    assert report["norm_layers_slope"] == pytest.approx(scales[0] / scales[1], rel=0.05)
    assert report["norm_layers_noise_scale"] == pytest.approx(scales[1], rel=0.1)
    assert optimizer.noise_scale / report["norm_layers_noise_scale"] == pytest.approx(scales[0] / scales[1], rel=0.05)
    assert optimizer.noise.variance == pytest.approx(float(every.var(0).sum()), rel=0.1)


def test_without_several_minibatches_the_noise_scale_is_that_of_the_layers():
    model = network()
    sampler, optimizer = make(model)
    train(model, sampler, optimizer, num_epochs=10)
    report = optimizer.report()
    assert report["norm_layers_slope"] == 1.0
    assert optimizer.noise_scale == pytest.approx(report["norm_layers_noise_scale"], rel=0.3)
    assert 0 < report["noise_scale_low"] < optimizer.noise_scale < report["noise_scale_high"]


def test_only_some_steps_are_measured_and_updates_are_the_same():
    (model, *measured), (other, *plain) = (
        (lambda model: (model, *make(model, lr=0.1)))(network()),
        (lambda model: (model, *make(model, lr=0.1, measure_noise=True)))(network()),
    )
    train(model, *measured)
    train(other, *plain)
    assert measured[1]._flow.noise_meter().of_samples.average.count == -(-measured[1].steps_done // EVERY)
    for some, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(some, same)
    assert plain[1].noise is None


def test_loss_scale_is_removed():
    model = network()
    sampler, optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for _ in optimizer.epochs(1):
        for indices in sampler:
            scaler.scale(loss_of(model, X[indices], Y[indices])).backward()
            scaler.step(optimizer)
            scaler.update()
            break
    model = network()
    truth = noise_of(sample_gradients(model, indices, norm_parameters(model)), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(truth.variance, rel=1e-5)


def unscaled(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    return 1.0


def clipped(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.2
    return 0.1 / float(norm)


@pytest.mark.parametrize("change", [unscaled, clipped])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_samples_are_scaled_as_the_gradients_are_before_a_step(change, num_minibatches):
    model = network()
    sampler, optimizer = make(model, trace=num_minibatches * MINIBATCH)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    truth, same = [], network()
    for _ in optimizer.epochs(1):
        for indices in sampler:
            scaler.scale(loss_of(model, X[indices], Y[indices])).backward()
            factor = change(model, optimizer, scaler)
            truth.append(sample_gradients(same, indices, norm_parameters(same)) * factor)
            scaler.step(optimizer)
            scaler.update()
            if len(truth) == num_minibatches:
                break
    expected = noise_of(torch.cat(truth), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(expected.variance, rel=1e-4)
    assert layers_of(optimizer).square_norm == pytest.approx(expected.square_norm, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_second_backward_pass_through_a_layer_is_refused(compiled):
    model = network()
    _, optimizer = make(model)
    optimizer.set_epoch(0)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    loss_of(run, X[:MINIBATCH], Y[:MINIBATCH]).backward()
    loss = loss_of(run, X[:MINIBATCH], Y[:MINIBATCH])
    with pytest.raises(RuntimeError, match="needs one backward pass through each layer in a minibatch: add"):
        loss.backward()


def test_backward_pass_whose_gradients_are_dropped_does_not_count():
    model = network()
    sampler, optimizer = make(model)
    optimizer.set_epoch(0)
    indices = next(iter(sampler))
    loss_of(model, X[:MINIBATCH], Y[:MINIBATCH]).backward()
    optimizer.zero_grad()
    loss_of(model, X[indices], Y[indices]).backward()
    optimizer.step()
    model = network()
    truth = noise_of(sample_gradients(model, indices, norm_parameters(model)), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(truth.variance, rel=1e-5)


class Twice(nn.Module):
    """Applies one of its norm layers twice."""

    def __init__(self, in_between):
        super().__init__()
        self.body, self.in_between = network(), in_between

    def forward(self, x):
        first, norm, act, second, other_norm, last = self.body
        x = second(act(norm(first(x))))
        self.in_between()
        return last(other_norm(norm(x)))


class InTwoPasses(nn.Module):
    """Runs on two views of each sample."""

    def __init__(self, in_between):
        super().__init__()
        self.body, self.in_between = network(), in_between

    def forward(self, x):
        one = self.body(x)
        self.in_between()
        return one * self.body(x.flip(1))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # likewise
@pytest.mark.parametrize("way", ["eager", "one graph", "two graphs"])
@pytest.mark.parametrize("kind", [Twice, InTwoPasses])
def test_layer_that_runs_twice_is_measured(kind, way):
    model = kind(torch._dynamo.graph_break if way == "two graphs" else lambda: None)
    sampler, optimizer = make(model)
    run = None if way == "eager" else torch.compile(model, backend="aot_eager", fullgraph=way == "one graph")
    indices = train(model, sampler, optimizer, num_steps=1, run=run)
    model = kind(lambda: None)
    truth = noise_of(sample_gradients(model, indices, norm_parameters(model)), NUM_SAMPLES)
    found = layers_of(optimizer)
    assert found.variance == pytest.approx(truth.variance, rel=1e-5)
    assert found.square_norm == pytest.approx(truth.square_norm, rel=1e-4, abs=1e-6 * truth.variance)


def test_layers_that_share_a_weight_do_not_count():
    model = network()
    model.append(nn.LayerNorm(3))
    model[4].weight = model[1].weight
    _, optimizer = make(model)
    measured = optimizer._accumulator.norm_layers.parameters
    assert [id(p) for p in measured] == [id(p) for p in model[6].parameters()]


def test_parameters_of_no_optimizer_do_not_count():
    model = network()
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=MINIBATCH, minibatch_size=MINIBATCH)
    inner = torch.optim.SGD([model[0].weight, model[1].bias, *model[4].parameters()], lr=0.0)
    options = {"rule": "constant", "measure_noise": "norm layers", "model": model}
    optimizer = vbs.Optimizer(inner, sampler, ref_batchsize=MINIBATCH, **options)
    indices = train(model, sampler, optimizer, num_steps=1)
    model = network()
    truth = noise_of(sample_gradients(model, indices, [model[1].bias, *model[4].parameters()]), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(truth.variance, rel=1e-5)


def test_state_resumes():
    model = network()
    trace = [2 * MINIBATCH, MINIBATCH] * 8
    sampler, optimizer = make(model, trace=trace)
    train(model, sampler, optimizer, num_steps=9)
    other = network()
    sampler, resumed = make(other, trace=trace)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.noise == optimizer.noise
    for name in ("noise_scale_low", "noise_scale_high", "norm_layers_noise_scale", "norm_layers_slope"):
        assert resumed.report()[name] == optimizer.report()[name]


def test_copies_and_pickles_of_the_model_run():
    model = network()
    make(model)
    same = copy.deepcopy(model)
    assert torch.equal(same(X[:MINIBATCH]), model(X[:MINIBATCH]))
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(X[:3]), same[5](same[4](same[3](same[2](model[1](same[0](X[:MINIBATCH]))))))[:3])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_copies_of_a_model_with_its_optimizer_measure(copied):
    model = network()
    sampler, optimizer = make(model)
    other, *parts = copied((model, sampler, optimizer))
    train(other, *parts, num_steps=1)
    train(model, sampler, optimizer, num_steps=1)
    assert layers_of(parts[1]) == layers_of(optimizer)


@pytest.mark.parametrize(
    "shape", [(MINIBATCH, MINIBATCH, WIDTH), (MINIBATCH * LENGTH, WIDTH), (LENGTH, MINIBATCH, WIDTH)]
)
def test_samples_that_may_be_positions_are_refused(shape):
    """As many positions as samples, or each position of each sample, may have either of them first."""
    model = nn.Sequential(nn.LayerNorm(WIDTH))
    make(model)
    with pytest.raises(
        ValueError, match=r"^`measure_noise='norm layers'` (needs the|cannot tell) 16 samples .* of '0'"
    ):
        model(torch.randn(shape))


def test_image_as_wide_as_there_are_samples_is_measured():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Flatten(), nn.Linear(MINIBATCH * MINIBATCH * WIDTH, 3))
    sampler, optimizer = make(model)
    optimizer.set_epoch(0)
    indices = next(iter(sampler))
    model(torch.randn(MINIBATCH, MINIBATCH, MINIBATCH, WIDTH))[range(MINIBATCH), Y[indices, 0]].mean().backward()
    optimizer.step()
    assert layers_of(optimizer).variance > 0


def test_activation_checkpointing_is_one_forward_pass():
    model = network()
    sampler, optimizer = make(model)
    run = lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)  # noqa: E731
    indices = train(model, sampler, optimizer, num_steps=1, run=run)
    model = network()
    truth = noise_of(sample_gradients(model, indices, norm_parameters(model)), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(truth.variance, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "compiled"), [*layers(["LayerNorm", "rows", "GroupNorm"], ["rows"])])
def test_next_layer_may_work_in_place(name, compiled):
    def in_place():
        model = network(LAYERS[name])
        model[2] = nn.ReLU(inplace=True)
        return model

    model = in_place()
    sampler, optimizer = make(model)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    indices = train(model, sampler, optimizer, num_steps=1, run=run)
    model = in_place()
    truth = noise_of(sample_gradients(model, indices, norm_parameters(model)), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(truth.variance, rel=1e-5)


def test_frozen_layers_do_not_count():
    model = network()
    model[1].weight.requires_grad_(False)
    sampler, optimizer = make(model)
    indices = train(model, sampler, optimizer, num_steps=1)
    model = network()
    used = [model[1].bias, *model[4].parameters()]
    truth = noise_of(sample_gradients(model, indices, used), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(truth.variance, rel=1e-5)


def test_layers_that_are_frozen_during_a_run_do_not_count():
    model = network()
    sampler, optimizer = make(model)
    model[1].requires_grad_(False)
    indices = train(model, sampler, optimizer, num_steps=1)
    model = network()
    truth = noise_of(sample_gradients(model, indices, list(model[4].parameters())), NUM_SAMPLES)
    assert layers_of(optimizer).variance == pytest.approx(truth.variance, rel=1e-5)


def test_other_first_dimensions_are_refused():
    model = network()
    make(model)
    with pytest.raises(
        ValueError, match=r"needs the 16 samples of a minibatch as the first dimension, but the input of '1'"
    ):
        model(X[:MINIBATCH].transpose(0, 1))
    with torch.no_grad():
        model(X[:5])


def test_layer_that_normalizes_in_another_way_does_not_count():
    model = network(lambda: Moved(LENGTH))
    with pytest.raises(ValueError, match="and the model has none"):
        make(model)
    model[1] = nn.LayerNorm(WIDTH)
    _, optimizer = make(model)
    assert len(optimizer._accumulator.norm_layers.parameters) == 2


def test_layers_are_recognized_whatever_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        _, optimizer = make(network(LAYERS["RMSNorm of transformers"]))
    finally:
        torch.set_default_dtype(before)
    assert len(optimizer._accumulator.norm_layers.parameters) == 2


LAYER = nn.LayerNorm(3)
REFUSED = [
    (nn.Linear(3, 3), {}, r"needs LayerNorm, RMSNorm or GroupNorm .*: use minibatches of half the size$"),
    (LAYER, {"model": None}, r"^`measure_noise='norm layers'` needs the model: pass `model=`$"),
    (LAYER, {"minibatch_size": 1}, r"^`minibatch_size` must be at least 2 with `measure_noise='norm layers'`, got 1$"),
    (LAYER, {"measure_noise": "layers"}, r"^`measure_noise` must be one of 'norm layers', 'own norm', got 'layers'"),
    (LAYER, {"exact": True}, r"^`measure_noise` must not be 'norm layers' with exact=True: use minibatches of half"),
    (nn.TransformerEncoderLayer(4, 2, 4), {}, r"cannot identify the samples of this model: its attention has `batch"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSED)
def test_what_cannot_be_measured_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        make(model, **options)


MIXED = [MINIBATCH * n for n in (1, 1, 2, 1, 3, 1, 1, 1, 2, 1, 1, 1, 1)]


def numbers_of_a_run(*, fused, is_weighted, num_skipped=0):
    model = network().double()
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=MIXED, minibatch_size=MINIBATCH)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    options = {"model": model, "measure_noise": "norm layers", "skip_nonfinite": num_skipped > 0}
    optimizer = vbs.Optimizer(inner, sampler, rule="adascale", ref_batchsize=8, **options)
    found = []
    for _ in optimizer.epochs(2):
        for indices in sampler:
            loss = loss_of(model, X[indices].double(), Y[indices], "sum" if is_weighted else "mean")
            (loss * (math.nan if optimizer.steps_done < num_skipped else 1)).backward()
            if optimizer.step(**({"weight": torch.tensor(6.0 * len(indices))} if is_weighted else {})):
                found.append([optimizer.progress, *optimizer.report().values()])
    return optimizer._flow.way, found


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["samples", "weights"])
def test_numbers_on_the_device_are_those_read_at_once(monkeypatch, is_weighted, every):
    monkeypatch.setattr("variable_batch_size.optim.norm_layers.EVERY", every)
    way, expected = numbers_of_a_run(fused=True, is_weighted=is_weighted)
    assert way == "at once"
    monkeypatch.setattr(flow, "_HOSTS", ())
    way, found = numbers_of_a_run(fused=True, is_weighted=is_weighted)
    assert way == "on the device"
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, nan_ok=True)
    way, found = numbers_of_a_run(fused=False, is_weighted=is_weighted)
    assert way == "one step late"
    assert found[:5] == [pytest.approx(other, rel=1e-9, nan_ok=True) for other in expected[:5]]  # read at once


@pytest.mark.parametrize("num_skipped", [1, 3])
def test_numbers_on_the_device_are_those_read_at_once_after_skipped_steps(monkeypatch, num_skipped):
    """A GradScaler begins with such steps; the first of the next ones has no measurement."""
    _, expected = numbers_of_a_run(fused=True, is_weighted=False, num_skipped=num_skipped)
    monkeypatch.setattr(flow, "_HOSTS", ())
    way, found = numbers_of_a_run(fused=True, is_weighted=False, num_skipped=num_skipped)
    assert way == "on the device"
    assert found == [pytest.approx(other, rel=1e-9, nan_ok=True) for other in expected]


def noise_on_cores(is_sharded, is_weighted):
    model = network()
    if is_sharded:
        for layer in (model[1], model[3]):
            fully_shard(layer)
        fully_shard(model)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=5 * MIXED, minibatch_size=MINIBATCH)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"model": model, "measure_noise": "norm layers"}
    optimizer = vbs.Optimizer(inner, sampler, rule="constant", ref_batchsize=MINIBATCH, **options)
    for _ in optimizer.epochs(5):
        for indices in sampler:
            loss_of(model, X[indices], Y[indices], "sum" if is_weighted else "mean").backward()
            optimizer.step(**({"weight": Y[indices].numel()} if is_weighted else {}))
    return optimizer.report()


@pytest.mark.parametrize(("is_sharded", "is_weighted"), [(False, False), (False, True), (True, False)])
def test_noise_is_the_same_on_three_cores(on_cores, is_sharded, is_weighted):
    expected = noise_on_cores(False, is_weighted)
    assert math.isfinite(expected["noise_scale_low"])
    for found in on_cores(3, noise_on_cores, is_sharded, is_weighted):
        assert found == pytest.approx(expected, rel=1e-4)
