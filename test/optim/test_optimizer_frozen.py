"""Progress with a rule for each of two optimizers, where the parameters of the first one are frozen in some steps.

A step in which none of them has a gradient is worth what the averages of the noise say about its batch size, as a step
of a single minibatch is. Expected numbers are those of a plain loop, with every formula written out.
"""

import math

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.schedules.permutation import Permutation

NUM_SAMPLES, MINIBATCH, REF_BATCHSIZE, GAMMA = 64, 4, 8, 0.95
COUNTS = (2, 5, 1, 4, 7, 3, 1, 2, 5, 4, 3, 7, 2, 6, 4, 5)  # minibatches of each step
LRS = (0.05, 0.01)  # of both optimizers
# steps in which both groups of the first optimizer, or only its first group, are frozen
FROZEN = {"never": ((), ()), "in some steps": ((3, 4, 6, 8, 11, 12), (2, 5, 9)), "at first": ((0, 1, 2, 8), (4,))}
X, Y = torch.randn(2, NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TOKENS = torch.randint(1, 6, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(2)).double()


def network():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def frozen_in(step, name):
    """Whether the weight and the bias of the first layer are frozen."""
    both, one = FROZEN[name]
    return (step in both or step in one), step in both


def loss_of(model, indices, *, weighted):
    losses = (model(X[indices]) - Y[indices]).square().mean(1)
    return (losses * TOKENS[indices]).sum() if weighted else losses.mean()


# ------------------------------------------------------------------------------------------------- with the library


def train(second, frozen, *, weighted=False, how="requires_grad", state=None, until=None):
    """The progress, the factors and the weights after each step, and at last the state."""
    model = network()
    weight, bias, *others = model.parameters()
    first = torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=LRS[0])
    inner = [first, (torch.optim.Adam if second == "adam:half-life" else torch.optim.SGD)(others, lr=LRS[1])]
    loader = vbs.DataLoader(torch.arange(NUM_SAMPLES), trace=[MINIBATCH * n for n in COUNTS], minibatch_size=MINIBATCH)
    rules = ["adascale", second]
    optimizer = vbs.Optimizer(inner, loader, rule=rules, ref_batchsize=REF_BATCHSIZE, model=model)
    optimizer.attach(torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA), per="progress")
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    found = []
    for _ in optimizer.epochs():
        for indices in loader:
            are_frozen = dict(zip((weight, bias), frozen_in(optimizer.steps_done, frozen), strict=True))
            for p, is_frozen in are_frozen.items():
                p.requires_grad_(not (is_frozen and how == "requires_grad"))
            loss_of(model, indices, weighted=weighted).backward()
            for p, is_frozen in are_frozen.items():
                if is_frozen and p.grad is not None:
                    p.grad = None if how == "no gradient" else torch.zeros_like(p)
            if optimizer.step(weight=TOKENS[indices].sum() if weighted else None):
                factors = [optimizer.factor(group) for group in range(3)]
                found.append([optimizer.progress, *factors, *weights_of(model)])
                if optimizer.steps_done == until:
                    return found, (model.state_dict(), optimizer.state_dict())
    return found, None


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


# ------------------------------------------------------------------------------------------------------- by hand


class Averages:
    """V and G² of some groups, averaged with θ = max(0.95, 1 − S/1000), and which groups had a gradient at last."""

    def __init__(self, num_groups):
        self.sums = [[0.0, 0.0, 0.0] for _ in range(num_groups)]  # V, G² and the sum of the weights
        self.are_active = [False] * num_groups
        self.weight = self.samples = 0.0

    def observe(self, size, weights, squares, means):
        """Add a step, from each minibatch's weight, and of each group its squared norms and that of the mean."""
        self.weight, self.samples = self.weight + sum(weights), self.samples + size
        of_step, num_minibatches = sum(weights), len(weights)
        if num_minibatches < 2 or not any(map(any, squares)):
            return
        self.are_active = [any(of_group) for of_group in squares]
        decay = max(0.95, 1 - size / REF_BATCHSIZE / 1000)
        population = NUM_SAMPLES * self.weight / self.samples
        for sums, of_group, mean in zip(self.sums, squares, means, strict=True):
            if any(of_group):
                mean_of_squares = sum(w * square for w, square in zip(weights, of_group, strict=True)) / of_step
                variance = (mean_of_squares - mean) * of_step / (num_minibatches - 1)
                estimate = (variance, mean - variance / of_step + variance / population, 1.0)
                sums[:] = [decay * old + (1 - decay) * new for old, new in zip(sums, estimate, strict=True)]

    def gain(self, size, groups):
        known = [self.sums[group] for group in groups if self.sums[group][2]]
        if not known:
            return min(1.0, size / REF_BATCHSIZE)
        variance, square = (max(0.0, sum(sums[i] / sums[2] for sums in known)) for i in range(2))
        of_sample = self.weight / self.samples
        return (variance / (REF_BATCHSIZE * of_sample) + square) / (variance / (size * of_sample) + square)

    def gain_of_all(self, size):
        return self.gain(size, [group for group, is_active in enumerate(self.are_active) if is_active])


def by_hand(second, frozen, *, weighted=False):
    model = network()
    weight, bias, *others = parameters = list(model.parameters())
    groups, averages = [[weight], [bias], others], Averages(2)
    state = {p: [torch.zeros_like(p), torch.zeros_like(p), 1.0, 1.0] for p in others}
    epoch, offset, progress, found = 0, 0, 0.0, []
    for step, number in enumerate(COUNTS):
        size = MINIBATCH * number
        if offset + size > NUM_SAMPLES:
            epoch, offset = epoch + 1, 0
        indices = torch.as_tensor(Permutation(NUM_SAMPLES, key=(0, epoch))(range_of(offset, size)))
        offset += size
        weights, gradients = [], []
        for own in indices.split(MINIBATCH):
            weights.append(float(TOKENS[own].sum()) if weighted else 1.0)
            of_sum = torch.autograd.grad(loss_of(model, own, weighted=weighted), parameters)
            is_trained = [*(not one for one in frozen_in(step, frozen)), True, True]
            gradients.append(
                {p: g / weights[-1] for p, g, own in zip(parameters, of_sum, is_trained, strict=True) if own}
            )
        mean = {p: sum(w * g[p] for w, g in zip(weights, gradients, strict=True)) / sum(weights) for p in gradients[0]}
        norms = [
            [[square_of(one, group) for one in gradients] for group in groups],
            [square_of(mean, g) for g in groups],
        ]
        units = weights if weighted else [float(MINIBATCH)] * number
        averages.observe(size, units, *(one[:2] for one in norms))
        lr, scale = GAMMA ** int(progress + 1e-9), size / REF_BATCHSIZE
        factors = [
            averages.gain(size, [0]),
            averages.gain(size, [1]),
            1.0 if second == "constant" else math.sqrt(scale),
        ]
        with torch.no_grad():
            for p in set(mean) - set(others):
                p -= LRS[0] * lr * factors[p is bias] * mean[p]
            for p in others:
                p -= LRS[1] * lr * (mean[p] if second == "constant" else adam(state[p], mean[p], scale))
        progress += averages.gain_of_all(size)
        found.append([progress, *factors, *weights_of(model)])
    return found


def range_of(first, number):
    return torch.arange(first, first + number).numpy()


def square_of(gradients, group):
    return sum(float(gradients[p].square().sum()) for p in group if p in gradients)


def adam(state, gradient, scale):
    """The step of Adam with β^S, √S times the learning rate and 1/√S of ε."""
    for place, beta, power in ((0, 0.9**scale, gradient), (1, 0.999**scale, gradient.square())):
        state[place] = beta * state[place] + (1 - beta) * power
        state[place + 2] *= beta
    first, second = (state[place] / (1 - state[place + 2]) for place in (0, 1))
    return math.sqrt(scale) * first / (second.sqrt() + 1e-8 / math.sqrt(scale))


# ------------------------------------------------------------------------------------------------------------ tests

SECOND = ["adam:half-life", "constant"]


def assert_same(found, expected):
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-9)


def of_cores(second, frozen, options):
    return train(second, frozen, **options)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_progress_factors_and_weights_are_those_by_hand(on_cores, cores, second, frozen, weighted):
    expected = by_hand(second, frozen, weighted=weighted)
    options = {"weighted": weighted}
    results = [of_cores(second, frozen, options)] if cores == 1 else on_cores(cores, of_cores, second, frozen, options)
    for found, _ in results:
        assert_same(found, expected)


@pytest.mark.parametrize("how", ["no gradient", "zeros"])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_a_parameter_without_a_gradient_or_with_zeros_counts_as_a_frozen_one(on_cores, cores, how):
    expected = by_hand("constant", "in some steps")
    args = ("constant", "in some steps", {"how": how})
    for found, _ in [of_cores(*args)] if cores == 1 else on_cores(cores, of_cores, *args):
        assert_same(found, expected)


@pytest.mark.parametrize("until", [4, 5, 9])  # right before, within and after steps with frozen groups
def test_a_run_that_resumes_on_other_cores_has_the_same_progress(on_cores, until):
    expected = by_hand("constant", "in some steps")
    found, state = on_cores(3, of_cores, "constant", "in some steps", {"until": until})[0]
    found += on_cores(2, of_cores, "constant", "in some steps", {"state": state})[0][0]
    assert_same(found, expected)


def test_steps_with_frozen_groups_are_worth_more_than_the_lower_bound_of_the_gain():
    """Otherwise these programs would not show what such a step is worth."""
    progress = [row[0] for row in by_hand("constant", "in some steps")]
    worth = [after - before for before, after in zip([0.0, *progress], progress, strict=False)]
    assert [step for step in (4, 8, 11) if worth[step] > 1.1] == [4, 8, 11]
