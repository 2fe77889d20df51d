"""GradientBuckets: the layout of gradients, flags and norms, and squared norms of tensors of any type."""

import pickle

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.optim.gradients.gradient_buckets import GradientBuckets
from variable_batch_size.optim.gradients.norms import squared_norm


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_gradients_are_aligned_to_64_bytes_and_flags_and_norms_come_last():
    memory = GradientBuckets(parameters(3, 20), num_numbers=4)
    (flat,) = memory.flats
    assert flat.shape == (16 + 32 + 2 + 4,)
    assert [view.storage_offset() for view in memory.views] == [0, 16]
    memory.views[0].fill_(1)
    memory.views[1].fill_(2)
    memory.mark_present([False, True])
    memory.numbers.fill_(3)
    empty = [0] * 13, [0] * 12
    assert flat.tolist() == [1] * 3 + empty[0] + [2] * 20 + empty[1] + [0, 1] + [3] * 4


def test_gradient_that_fills_its_slot_leaves_no_gap():
    memory = GradientBuckets(parameters(8, 1, dtype=torch.float64), num_numbers=1)
    assert memory.flats[0].shape == (8 + 8 + 2 + 1,)


def test_each_dtype_has_a_bucket_and_norms_are_in_an_exact_one():
    narrow, exact = parameters(2, dtype=torch.bfloat16), parameters(2)
    memory = GradientBuckets([*narrow, *exact], num_numbers=2)
    assert [(flat.dtype, len(flat)) for flat in memory.flats] == [(torch.bfloat16, 32 + 1), (torch.float32, 16 + 1 + 2)]
    memory.numbers.fill_(5)
    assert memory.flats[1][-2:].tolist() == [5, 5]


def test_norms_are_in_double_precision_if_a_gradient_is():
    single, double = parameters(2), parameters(2, dtype=torch.float64)
    assert GradientBuckets([*single, *double], num_numbers=2).numbers.dtype == torch.float64
    memory = GradientBuckets([*single, *parameters(2, dtype=torch.complex128)], num_numbers=2)
    assert memory.flats[-1] is memory.numbers
    assert memory.numbers.dtype == torch.float64


@pytest.mark.parametrize("given", [[], parameters(2, dtype=torch.bfloat16)])
def test_without_an_exact_bucket_norms_have_a_separate_one(given):
    memory = GradientBuckets(given, num_numbers=2)
    assert memory.flats[-1] is memory.numbers
    assert len(memory.flats) == len(given) + 1
    assert (memory.numbers.dtype, memory.numbers.tolist()) == (torch.float32, [0, 0])


def test_buckets_match_unchanged_parameters():
    first, second = given = parameters(2, 2)
    memory = GradientBuckets(given, num_numbers=1)
    assert memory.matches([first, second], 1)
    assert not memory.matches([first, second], 2)
    assert not memory.matches([first], 1)
    assert not memory.matches([second, first], 1)
    assert not memory.matches([first, nn.Parameter(second.detach())], 1)
    second.data = torch.zeros(3)
    assert not memory.matches(given, 1)
    assert memory.matches(given, 1, checks_shapes=False)
    second.data = torch.zeros(2, dtype=torch.float64)
    assert not memory.matches(given, 1, checks_shapes=False)


def test_gradients_are_copied_from_buckets_of_other_parameters():
    first, second, third = parameters(2, 2, 2)
    old = GradientBuckets([first, second], num_numbers=1)
    old.views[0].fill_(1)
    old.views[1].fill_(2)
    new = GradientBuckets([third, second], num_numbers=1)
    new.copy_from(old)
    assert [view.tolist() for view in new.views] == [[0, 0], [2, 2]]


def test_a_copy_has_the_gradients_and_the_norms():
    memory = GradientBuckets(parameters(2, 3), num_numbers=3)
    for number, view in enumerate(memory.views, start=1):
        view.fill_(number)
    memory.numbers.fill_(3)
    copy = pickle.loads(pickle.dumps(memory))
    assert [view.tolist() for view in copy.views] == [[1, 1], [2, 2, 2]]
    assert copy.numbers.tolist() == [3, 3, 3]
    copy.zero_()
    assert [view.tolist() for view in copy.views] == [[0, 0], [0, 0, 0]]


def test_copy_has_the_requested_dtype():
    memory = GradientBuckets(parameters(2), num_numbers=1, dtype=torch.float64)
    memory.views[0].fill_(1 + 1e-12)
    copy = pickle.loads(pickle.dumps(memory))
    assert copy.views[0].tolist() == [1 + 1e-12] * 2
    assert copy.matches(copy.parameters, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_are_on_the_device_of_their_parameters(dtype):
    p = nn.Parameter(torch.zeros(2, dtype=dtype, device="meta"))
    memory = GradientBuckets([p], num_numbers=3)
    assert {tensor.device.type for tensor in (*memory.flats, *memory.views, memory.numbers)} == {"meta"}


def test_entire_bucket_is_multiplied_and_zeroed():
    memory = GradientBuckets([*parameters(1), *parameters(1, dtype=torch.bfloat16)], num_numbers=1)
    for flat in memory.flats:
        flat.fill_(3)
    memory.mul_(0.5)
    assert all(flat.eq(1.5).all() for flat in memory.flats)
    memory.zero_()
    assert not any(flat.any() for flat in memory.flats)


@pytest.mark.parametrize("numbers", [(), (0,), (2,), (1, 2), (0, 1, 2, 3)])
def test_flags_are_read_back_also_after_a_sum_over_cores(numbers):
    narrow, exact = parameters(2, 2, dtype=torch.bfloat16), parameters(2, 2)
    memory = GradientBuckets([narrow[0], exact[0], narrow[1], exact[1]], num_numbers=1)
    is_present = [number in numbers for number in range(4)]
    memory.mark_present([True, False, False, False])
    memory.mark_present(is_present)
    memory.mul_(3.0)
    assert memory.present_on_any_rank() == is_present


def test_a_view_has_the_layout_of_its_parameter():
    p = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (view,) = GradientBuckets([p], num_numbers=0).views
    assert (view.shape, view.stride()) == (p.shape, p.stride())


# -------------------------------------------------------------------------------------------------------- squared norms


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_a_squared_norm_is_in_float32_at_least(dtype, expected):
    like = torch.zeros(1, dtype=dtype)
    for tensors, square in (([torch.tensor([1.0, 2.0]), torch.tensor([[2.0]])], 9), ([], 0)):
        found = squared_norm([tensor.to(dtype) for tensor in tensors], like=like)
        assert (found.dtype, found.shape, found.item()) == (expected, (), pytest.approx(square))


def test_tensors_of_several_dtypes_have_one_squared_norm():
    tensors = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64), torch.tensor([12.0], dtype=torch.float16)]
    assert squared_norm(tensors, like=torch.zeros(1)).item() == pytest.approx(169)


def test_low_precision_dtype_does_not_overflow():
    tensor = torch.full((4,), 300.0, dtype=torch.float16)
    for like in (tensor, tensor.float()):
        assert squared_norm([tensor, tensor], like=like).item() == pytest.approx(720_000)


def test_low_precision_dtype_does_not_overflow_next_to_another():
    narrow = torch.full((4,), 6e4, dtype=torch.float16)
    assert squared_norm([narrow, torch.zeros(1)], like=narrow).item() == pytest.approx(1.44e10, rel=1e-3)


def test_squared_norm_is_on_the_requested_device():
    for tensors in ([], [torch.ones(2)], [torch.ones(2), torch.ones(2, dtype=torch.float64)]):
        assert squared_norm(tensors, like=torch.zeros(1, device="meta")).device.type == "meta"


@pytest.mark.parametrize("beside", [torch.float32, torch.float16])
def test_float64_is_not_rounded(beside):
    tensors = [torch.tensor([1 + 1e-12], dtype=torch.float64), torch.tensor([1.0], dtype=beside)]
    assert squared_norm(tensors, like=tensors[0]).item() == pytest.approx(2 + 2e-12, rel=1e-15)


def test_squared_norm_of_complex_numbers_uses_both_parts():
    assert squared_norm([torch.tensor([3 + 4j, 12j])], like=torch.zeros(1)).item() == pytest.approx(169)


def test_squared_norm_of_a_sparse_tensor_equals_that_of_the_dense_one():
    twice_the_same = torch.sparse_coo_tensor([[1, 1, 2]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
    assert squared_norm([twice_the_same], like=torch.zeros(1)).item() == pytest.approx(25)


def test_buckets_are_made_anew_where_references_cannot_be_counted(monkeypatch):
    """Before torch 2.6."""

    def train():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        sampler = vbs.CustomSampler(dataset_size=24, trace=[8, 4, 12], minibatch_size=4)
        optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=4)
        data = torch.randn(24, 4)
        for indices in sampler:
            model(data[indices]).square().mean().backward()
            optimizer.step()
        return model.weight

    expected = train()
    monkeypatch.setattr("variable_batch_size.optim.gradients.gradient_buckets._COUNTS_REFERENCES", False)
    assert torch.equal(train(), expected)
