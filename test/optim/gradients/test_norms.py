"""Norms of large tensors on a CPU, against float64: of themselves, and in the noise scale, clipping and records."""

import pytest
import torch
from accumulators import BucketViewAccumulator
from torch import nn

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.gradients.norms import norms_of
from variable_batch_size.rules.noise import Noise


def of_half(x):
    """As of a row-wise sparse gradient."""
    indices = torch.arange(0, len(x), 2)
    return torch.sparse_coo_tensor(indices[None], x[::2], x.shape, check_invariants=True)


LAYOUTS = {
    "dense": lambda x: x,
    "zeros between": lambda x: x * (torch.arange(len(x)) % 3 == 0)[:, None],
    "numel with a rest": lambda x: x.flatten()[:-77],
    "transposed": lambda x: x.T,
    "channels last": lambda x: x.view(256, 128, 8, 4).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(1024, -1),
    "sparse": of_half,
    "complex": lambda x: torch.view_as_complex(x.view(-1, 2)),
}


WIDE, NARROW = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
KINDS = [(layout, dtype) for layout in LAYOUTS for dtype in (*WIDE, *NARROW) if layout != "complex" or dtype in WIDE]


@pytest.mark.parametrize(("layout", "dtype"), KINDS)
def test_norm_of_a_large_tensor_is_that_in_float64(layout, dtype):
    generator = torch.Generator().manual_seed(0)
    x = LAYOUTS[layout](torch.randn(1024, 1024, generator=generator).to(dtype))
    wide = torch.view_as_real(x) if x.is_complex() else x.to_dense()
    small = torch.ones(4, dtype=x.dtype)
    norms = norms_of([small, x], like=small)
    assert {norm.dtype for norm in norms} == {torch.float64 if dtype is torch.float64 else torch.float32}
    assert norms[0] == 2.0
    assert norms[1].item() == pytest.approx(wide.double().square().sum().sqrt().item(), rel=5e-7)


@pytest.mark.parametrize("size", [1024, 1024**2])
def test_norm_of_a_tensor_with_an_element_that_is_not_finite_is_not_finite(size):
    for value in (float("nan"), float("inf")):
        x = torch.ones(size + 5)
        x[-1] = value
        (norm,) = norms_of([x], like=x)
        assert not norm.isfinite()


@pytest.mark.parametrize(("factor", "signal"), [(2.0**-3, 0.999), (2.0**6, 0.005)], ids=["early", "late"])
@pytest.mark.parametrize("num_rows", [2048, 50257], ids=["1 million", "25 million"])
def test_noise_scale_of_an_embedding_is_that_in_float64(num_rows, factor, signal):
    """All minibatches have the same gradient in some rows, and each has rows of its own, as those of rare tokens."""
    n, common = 8, num_rows // 4
    rows = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(0))
    of_common, of_own = (part.double().square().sum().item() for part in (rows[:common], rows[common:]))
    rows[common:] *= factor
    of_own *= factor**2
    mean_of_squares, square_of_mean = of_common + of_own / n, of_common + of_own / n**2
    assert of_common / square_of_mean == pytest.approx(signal, rel=0.05)
    expected = Noise.from_norms(mean_of_squares, square_of_mean, batch_size=n, num_minibatches=n)

    parameter = nn.Parameter(torch.zeros(1).expand(rows.shape))  # of no memory
    gradients = BucketAccumulator(torch.optim.SGD([parameter]), SingleProcess(), measures=True)
    for number in range(n):
        parameter.grad = torch.zeros_like(rows)
        for part in (slice(common), slice(common + number, None, n)):
            parameter.grad[part] = rows[part]
        gradients.accumulate(StepPlan(n, is_last=number + 1 == n))
    (norms,) = gradients.reduce(StepPlan(n)).measure().norms
    found = Noise.from_norms(*norms, batch_size=n, num_minibatches=n)
    assert found.variance == pytest.approx(expected.variance, rel=1e-4)
    assert found.scale == pytest.approx(expected.scale, rel=1e-4)


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_norm_of_a_large_gradient_is_recorded_and_clipped_as_in_float64(kind, num_minibatches):
    parameter = nn.Parameter(torch.zeros(2048, 1024))
    gradients = kind(torch.optim.SGD([parameter]), SingleProcess())
    plan = StepPlan(num_minibatches)
    for number in range(1, num_minibatches + 1):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.add_(0.3)
        gradients.accumulate(plan._replace(is_last=number == num_minibatches))
    step = gradients.reduce(plan)
    assert step.norm().item() == pytest.approx(0.3 * parameter.numel() ** 0.5, rel=2e-6)
    step.clip_(1.0)
    assert parameter.grad.double().norm().item() == pytest.approx(1.0, rel=4e-6)
