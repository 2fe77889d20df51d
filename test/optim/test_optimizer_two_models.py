"""Two models with an optimizer each on one sampler, as in a GAN: right on any number of cores, or reported."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import variable_batch_size as vbs

SIZE = 8
TRACE = [32, 16, 8, 48, 32, 64, 32]
REAL = torch.randn(sum(TRACE), 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
NOISE = torch.randn(sum(TRACE), 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
REPORT = r"^The backward pass of this minibatch ran through a model after step\(\) of that model's optimizer"


def make_models():
    torch.manual_seed(0)

    def make(num_inputs, num_outputs):
        return nn.Sequential(nn.Linear(num_inputs, 8), nn.Tanh(), nn.Linear(8, num_outputs)).double()

    return make(4, 1), make(3, 4)


def make_optimizer(model, sampler, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.2)
    return vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=16, model=model, **options)


def make_sampler(**options):
    return vbs.CustomSampler(REAL, **{"trace": TRACE, "minibatch_size": SIZE, **options})


def critic_loss(critic, real, fake):
    return softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()


def generator_loss(critic, fake):
    return softplus(-critic(fake)).mean()


def parameters_of(*models):
    return [p for model in models for p in model.parameters()]


def weights(*models):
    return torch.cat([p.detach().flatten() for p in parameters_of(*models)])


def both_then_both(critic, generator, optimizers, real, noise):
    fake = generator(noise)
    critic_loss(critic, real, fake).backward(inputs=parameters_of(critic))
    generator_loss(critic, fake).backward(inputs=parameters_of(generator))
    for optimizer in optimizers:
        optimizer.step()


def both_then_both_with_zero_grad(critic, generator, optimizers, real, noise):
    fake = generator(noise)
    generator_loss(critic, fake).backward()
    optimizers[0].zero_grad()
    critic_loss(critic, real, fake).backward()
    for optimizer in optimizers:
        optimizer.step()


def both_then_both_with_a_frozen_critic(critic, generator, optimizers, real, noise):
    fake = generator(noise)
    critic.requires_grad_(True)
    critic_loss(critic, real, fake).backward()
    critic.requires_grad_(False)
    generator_loss(critic, fake).backward()
    for optimizer in optimizers:
        optimizer.step()


def one_after_the_other(critic, generator, optimizers, real, noise):
    """As in most tutorials."""
    fake = generator(noise)
    optimizers[0].zero_grad()
    critic_loss(critic, real, fake).backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    generator_loss(critic, fake).backward()
    optimizers[1].step()


def one_after_the_other_with_a_frozen_critic(critic, generator, optimizers, real, noise):
    fake = generator(noise)
    critic.requires_grad_(True)
    critic_loss(critic, real, fake).backward()
    optimizers[0].step()
    critic.requires_grad_(False)
    generator_loss(critic, fake).backward()
    optimizers[1].step()


RIGHT = [both_then_both, both_then_both_with_zero_grad, both_then_both_with_a_frozen_critic]
WRONG = [one_after_the_other, one_after_the_other_with_a_frozen_critic]


def train(rank, cores, run_minibatch, trace=TRACE, **options):
    critic, generator = make_models()
    sampler = make_sampler(num_replicas=cores, rank=rank, trace=trace)
    optimizers = [make_optimizer(model, sampler, **options) for model in (critic, generator)]
    for _ in optimizers[0].epochs(1):
        for indices in sampler:
            run_minibatch(critic, generator, optimizers, REAL[indices], NOISE[indices])
    return weights(critic, generator)


def train_on_cores(run_minibatch, options):
    group = torch.distributed.group.WORLD
    return train(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), run_minibatch, **options)


def train_plainly():
    """All minibatches of a step with the same weights, then both updates."""
    critic, generator = make_models()
    sampler = make_sampler()
    sampler.set_epoch(0)
    minibatches = iter(sampler)
    for size in TRACE:
        indices = [index for _ in range(size // SIZE) for index in next(minibatches)]
        fake = generator(NOISE[indices])
        losses = [critic_loss(critic, REAL[indices], fake), generator_loss(critic, fake)]
        gradients = [torch.autograd.grad(losses[0], parameters_of(critic), retain_graph=True)]
        gradients.append(torch.autograd.grad(losses[1], parameters_of(generator)))
        with torch.no_grad():
            for p, gradient in zip(parameters_of(critic, generator), [*gradients[0], *gradients[1]], strict=True):
                p -= 0.2 * size / 16 * gradient
    return weights(critic, generator)


@pytest.fixture
def no_reports(caplog):
    yield
    assert "backward pass" not in caplog.text


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("run_minibatch", RIGHT)
def test_both_backward_passes_before_both_steps_are_correct(run_minibatch, exact, no_reports):
    found = train(0, 1, run_minibatch, exact=exact)
    assert torch.allclose(found, train_plainly(), rtol=0, atol=1e-11 if exact else 1e-15)


def test_both_backward_passes_before_both_steps_are_correct_with_gradients_in_place(no_reports):
    found = train(0, 1, both_then_both, gradient_as_bucket_view=True)
    assert torch.allclose(found, train_plainly(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("cores", [2, 3])
def test_both_backward_passes_before_both_steps_are_correct_on_several_cores(cores, on_cores):
    for found in on_cores(cores, train_on_cores, both_then_both, {}):
        assert torch.allclose(found, train_plainly(), rtol=0, atol=1e-15)


def test_both_backward_passes_before_both_steps_give_the_same_bits_on_several_cores(on_cores):
    for found in on_cores(2, train_on_cores, both_then_both, {"exact": True}):
        assert torch.equal(found, train(0, 1, both_then_both, exact=True))


def test_exact_mode_waits_for_no_core_with_fewer_minibatches_in_the_first_step(on_cores):
    options = {"exact": True, "trace": [24, 40, 8]}
    for found in on_cores(2, train_on_cores, both_then_both, options):
        assert torch.equal(found, train(0, 1, both_then_both, **options))


@pytest.mark.parametrize("run_minibatch", WRONG)
def test_exact_mode_refuses_a_backward_pass_after_the_step_of_its_model(run_minibatch):
    with pytest.raises(RuntimeError, match=REPORT):
        train(0, 1, run_minibatch, exact=True)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_backward_pass_after_the_step_of_its_model_is_reported_once(options, caplog):
    train(0, 1, one_after_the_other if not options else views_one_after_the_other, **options)
    reports = [record for record in caplog.records if record.message.startswith("The backward pass of this minibatch")]
    assert len(reports) == 1 and reports[0].levelno == logging.WARNING


def views_one_after_the_other(critic, generator, optimizers, real, noise):
    """Without zero_grad(), which cannot drop gradients in buckets."""
    fake = generator(noise)
    critic_loss(critic, real, fake).backward()
    optimizers[0].step()
    generator_loss(critic, fake).backward()
    optimizers[1].step()


def test_exact_mode_refuses_samples_of_a_generator_that_was_just_updated():
    def run_minibatch(critic, generator, optimizers, real, noise):
        generator_loss(critic, generator(noise)).backward(inputs=parameters_of(generator))
        optimizers[1].step()
        with torch.no_grad():
            fake = generator(noise)
        critic_loss(critic, real, fake).backward()
        optimizers[0].step()

    with pytest.raises(RuntimeError, match=REPORT):
        train(0, 1, run_minibatch, exact=True)


@pytest.mark.parametrize("exact", [False, True])
def test_models_that_are_independent_may_run_one_after_the_other(exact, no_reports):
    def run_minibatch(one, other, optimizers, real, noise):
        for model, inputs, optimizer in zip((one, other), (real, noise), optimizers, strict=True):
            model(inputs).square().mean().backward()
            optimizer.step()

    train(0, 1, run_minibatch, exact=exact)


@pytest.mark.parametrize("exact", [False, True])
def test_steps_of_one_minibatch_may_follow_one_another(exact, no_reports):
    """As in plain PyTorch, and the same on any number of cores: the others are idle."""
    critic, generator = make_models()
    sampler = make_sampler(trace=[SIZE] * 5)
    optimizers = [make_optimizer(model, sampler, exact=exact) for model in (critic, generator)]
    plain = make_models()
    plain_optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    for indices in sampler:
        one_after_the_other(critic, generator, optimizers, REAL[indices], NOISE[indices])
        one_after_the_other(*plain, plain_optimizers, REAL[indices], NOISE[indices])
    assert torch.allclose(weights(critic, generator), weights(*plain), rtol=0, atol=1e-11)


def train_with_own_samplers(num_workers=None, evaluates=False, **options):
    """The critic makes two steps for each of the generator, each with all of its minibatches."""
    critic, generator = make_models()
    if options:
        critic, generator = nn.Sequential(critic, nn.Dropout(0.3)), nn.Sequential(generator, nn.Dropout(0.3))
    optimizers = [
        make_optimizer(critic, make_sampler(trace=[16, 16, 32, 32]), **options),
        make_optimizer(generator, make_sampler(trace=[16, 32]), **options),
    ]
    loaders = [optimizer.sampler for optimizer in optimizers]
    if num_workers is not None:
        loaders = [DataLoader(range(len(REAL)), batch_sampler=one, num_workers=num_workers) for one in loaders]
    minibatches = [iter(loader) for loader in loaders]

    def run_step(which):
        for indices in minibatches[which]:
            fake = generator(NOISE[indices] + (torch.rand(()) if options else 0))
            loss = generator_loss(critic, fake) if which else critic_loss(critic, REAL[indices], fake)
            loss.backward(inputs=list(optimizers[which].parameters()))
            optimizers[which].step()
            if not optimizers[which].is_accumulating:
                return

    for which in (0, 0, 1, 0, 0, 1):
        run_step(which)
        if evaluates:
            critic.eval()(REAL[torch.randperm(8)])
            critic.train()
    assert [optimizer.steps_done for optimizer in optimizers] == [4, 2]
    return weights(critic, generator)


def test_optimizers_with_their_own_samplers_are_the_same_on_any_number_of_cores(on_cores):
    expected = train_with_own_samplers()
    for found in on_cores(2, train_with_own_samplers):
        assert torch.allclose(found, expected, rtol=0, atol=1e-15)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(("num_workers", "evaluates"), [(None, False), (None, True), (0, True), (1, False)])
def test_random_numbers_do_not_depend_on_the_position_in_another_sampler(on_cores, num_workers, evaluates):
    """The critic's dropout in a minibatch of the generator, and what the loop draws for it."""
    expected = train_with_own_samplers(num_workers, evaluates, exact=True)
    for found in on_cores(2, in_exact_mode, num_workers, evaluates):
        assert torch.equal(found, expected)
    if evaluates:
        assert torch.equal(train_with_own_samplers(num_workers, exact=True), expected)


def in_exact_mode(num_workers, evaluates):
    return train_with_own_samplers(num_workers, evaluates, exact=True)


class Drawing(nn.Module):
    """Records the random number that it draws in each minibatch."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        drawn = torch.rand((), dtype=x.dtype)
        self.drawn.append(drawn.item())
        return x * drawn


def draws_of_halves(order):
    """What is drawn in the minibatches of two samplers, whose optimizers train a half of one model each."""
    model = nn.Sequential(nn.Linear(4, 4), Drawing(), nn.Linear(4, 1)).double()
    optimizers = []
    for half, seed in ((model[0], 0), (model[2], 1)):
        inner = torch.optim.SGD(half.parameters(), lr=0.1)
        sampler = make_sampler(trace=[8, 16, 24], seed=seed)
        optimizers.append(vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, model=model, seed_minibatches=True))
    minibatches = [iter(optimizer.sampler) for optimizer in optimizers]
    found = [[], []]
    for which in order:
        model[1].drawn.clear()
        for indices in minibatches[which]:
            model(REAL[indices]).square().mean().backward(inputs=list(optimizers[which].parameters()))
            optimizers[which].step()
            if not optimizers[which].is_accumulating:
                break
        found[which] += model[1].drawn
    return found


def test_two_optimizers_of_one_model_may_have_their_own_samplers():
    expected = draws_of_halves((0, 1, 0, 1, 0, 1))
    assert len({*expected[0], *expected[1]}) == 12
    assert draws_of_halves((0, 0, 0, 1, 1, 1)) == expected
    assert draws_of_halves((1, 1, 0, 1, 0, 0)) == expected
