"""Experts in one tensor: only those that tokens are routed to are read from the file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import OffloadedTensor
from offload.kernels import native
from offload.prefetch.pages import Range
from offload.tensor import groups as of_groups
from offload.tensor.deferred import deferred
from offload.tensor.experts import Between, multiplied_by_experts
from offload.tensor.views import handle_of
from tests.page_cache import dropped, needs_page_cache

EXPERTS, INNER, WIDTH = 16, 512, 1024  # 2 MiB per expert
ENDS = torch.tensor([0, 2, 2, *[5] * 13], dtype=torch.int32)  # rows 0 and 1 go to expert 1, the others to expert 3

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")


@pytest.fixture
def plain() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(EXPERTS, INNER, WIDTH)


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(5, WIDTH)


@pytest.fixture
def cold(plain: torch.Tensor, tmp_path: Path) -> OffloadedTensor:
    """In a file that is on the disk and not in memory."""
    stored = OffloadedTensor.from_original_tensor(plain, "experts", tmp_path)
    stored.flush()
    path = stored.offload_path
    del stored
    dropped(path)
    return OffloadedTensor.from_file(path)


def in_memory(stored: OffloadedTensor) -> int:
    handle = handle_of(stored)
    handle.base()
    return Range(handle.file, *handle.extent, shared=handle.owned).cached_bytes()


@needs_page_cache
def test_a_grouped_product_reads_the_experts_that_have_rows(
    plain: torch.Tensor, cold: OffloadedTensor, rows: torch.Tensor
) -> None:
    assert 0 == in_memory(cold)

    result = F.grouped_mm(rows, cold.transpose(-2, -1), offs=ENDS)

    assert torch.equal(F.grouped_mm(rows, plain.transpose(-2, -1), offs=ENDS), result)
    assert in_memory(cold) <= 2.2 * plain[0].nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_are_those_in_memory(
    plain: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, transposed: bool
) -> None:
    plain = plain[:, :64, :64].to(dtype).contiguous()
    stored = OffloadedTensor.from_original_tensor(plain, "experts")
    gradients = []
    for weight in (plain, stored):
        x = rows[:, :64].to(dtype).requires_grad_()
        weight.requires_grad_()
        result = F.grouped_mm(x, weight.transpose(-2, -1) if transposed else weight, offs=ENDS)
        result.square().sum().backward()
        gradients.append((result.detach(), x.grad, weight.grad))

    for expected, got in zip(*gradients, strict=True):
        assert torch.equal(expected, got)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_without_rows_is_empty(cold: OffloadedTensor, dtype: torch.dtype) -> None:
    """Also of experts that are cast as they are read."""
    experts = deferred(cold).to(dtype).stored("experts").transpose(-2, -1)  # type: ignore[attr-defined]

    result = F.grouped_mm(torch.empty(0, WIDTH, dtype=dtype), experts, offs=torch.zeros(EXPERTS, dtype=torch.int32))

    assert (0, INNER) == tuple(result.shape)


@pytest.mark.parametrize("transposed", [True, False])
def test_only_chosen_experts_are_sent_to_another_device(
    plain: torch.Tensor, rows: torch.Tensor, transposed: bool
) -> None:
    matrices = plain.transpose(-2, -1) if transposed else plain.transpose(-2, -1).contiguous()
    groups = torch.tensor([1, 3])

    chosen = of_groups._stacked([matrices[group] for group in groups])

    assert matrices.stride()[1:] == chosen.stride()[1:]
    assert torch.equal(F.grouped_mm(rows, matrices, offs=ENDS), F.grouped_mm(rows, chosen, offs=ENDS[groups]))


def test_a_grouped_product_of_unknown_values_has_its_shape(plain: torch.Tensor) -> None:
    stored = OffloadedTensor.from_original_tensor(plain.bfloat16(), "experts")

    with FakeTensorMode(allow_non_fake_inputs=True):
        result = F.grouped_mm(torch.ones(5, WIDTH).bfloat16(), stored.transpose(-2, -1), offs=torch.ones_like(ENDS))

    assert (5, INNER) == tuple(result.shape)


@pytest.mark.parametrize("count", [EXPERTS - 1, EXPERTS + 1])
def test_a_wrong_number_of_groups_is_an_error(plain: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    stored = OffloadedTensor.from_original_tensor(plain, "experts")
    ends = torch.zeros(count, dtype=torch.int32)
    ends[-1] = 5

    for weight in (plain, stored):
        with pytest.raises(RuntimeError, match="matrix batch sizes have to match"):
            F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


@pytest.mark.fused
@pytest.mark.skipif(native.library() is None, reason="the kernels were not built")
def test_experts_of_a_copy_are_not_those_of_the_value_that_it_was_copied_from(plain: torch.Tensor) -> None:
    """A copy of a recipe is another value with the same recipe."""
    parts = [plain[:2, :64, :32].contiguous(), plain[:2, :32, :32].contiguous()]
    stored = [deferred(OffloadedTensor.from_original_tensor(one, "experts")).bfloat16().stored("x") for one in parts]
    between = Between(torch.nn.Module(), lambda products, _: F.silu(products[:, :32]) * products[:, 32:], is_silu=True)

    def sums(number: int, up: torch.Tensor) -> torch.Tensor:
        x, picks, weights = torch.ones(1, 32).bfloat16(), torch.tensor([[number]]), torch.ones(1, 1)
        found = multiplied_by_experts(x, picks, weights, up, stored[1], between)
        assert found is not None
        return found

    copied = copy.deepcopy(stored[0])
    expected = sums(1, copied)
    sums(0, stored[0])
    stored[0].zero_()

    assert torch.equal(expected, sums(1, copied))
    assert not sums(1, stored[0]).any()
