"""Experts in one tensor: only those that tokens are routed to are read from the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import offload
from offload import OffloadedTensor
from offload.storage.handle import Handle
from offload.storage.pages import Range
from offload.tensor import ops
from offload.tensor.deferred import DeferredTensor, deferred
from offload.tensor.wrapper import handle_of
from tests.page_cache import needs_page_cache

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
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
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


@needs_page_cache
def test_an_expert_that_is_indexed_is_read_alone(
    plain: torch.Tensor, cold: OffloadedTensor, rows: torch.Tensor
) -> None:
    result = F.linear(rows, cold[torch.tensor(3)])

    assert torch.equal(F.linear(rows, plain[3]), result)
    assert in_memory(cold) <= 1.2 * plain[0].nbytes


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


def test_no_expert_has_rows(plain: torch.Tensor, cold: OffloadedTensor) -> None:
    result = F.grouped_mm(torch.empty(0, WIDTH), cold.transpose(-2, -1), offs=torch.zeros(EXPERTS, dtype=torch.int32))

    assert (0, INNER) == tuple(result.shape)


@pytest.mark.parametrize("transposed", [True, False])
def test_elsewhere_the_chosen_experts_are_sent(plain: torch.Tensor, rows: torch.Tensor, transposed: bool) -> None:
    """As on an accelerator, with a function that counts bytes instead of copying."""
    matrices = plain.transpose(-2, -1) if transposed else plain.transpose(-2, -1).contiguous()
    groups = torch.tensor([1, 3])

    chosen = ops._chosen(matrices, groups)

    assert matrices.stride()[1:] == chosen.stride()[1:]
    assert torch.equal(F.grouped_mm(rows, matrices, offs=ENDS), F.grouped_mm(rows, chosen, offs=ENDS[groups]))


def test_where_values_are_not_known_the_shape_is(plain: torch.Tensor) -> None:
    stored = OffloadedTensor.from_original_tensor(plain.bfloat16(), "experts")

    with FakeTensorMode(allow_non_fake_inputs=True):
        result = F.grouped_mm(torch.ones(5, WIDTH).bfloat16(), stored.transpose(-2, -1), offs=torch.ones_like(ENDS))

    assert (5, INNER) == tuple(result.shape)


@pytest.mark.parametrize("count", [EXPERTS - 1, EXPERTS + 1])
def test_another_number_of_groups_than_of_experts_is_an_error(
    plain: torch.Tensor, rows: torch.Tensor, count: int
) -> None:
    stored = OffloadedTensor.from_original_tensor(plain, "experts")
    ends = torch.zeros(count, dtype=torch.int32)
    ends[-1] = 5

    for weight in (plain, stored):
        with pytest.raises(RuntimeError, match="matrix batch sizes have to match"):
            F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


@pytest.fixture(params=["in one tensor", "each in its own"])
def stacks(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Two stacks of eight matrices of 128 KiB: first an expert's row is multiplied in the one, then in the other."""
    plain = {name: torch.randn(8, 256, 128) for name in ("up", "down", "other")}
    if request.param == "in one tensor":
        save_file(plain, tmp_path / "experts.safetensors")
        return dict(offload.load_file(tmp_path / "experts.safetensors"))
    each = {f"{name} {number}": matrix.clone() for name, stack in plain.items() for number, matrix in enumerate(stack)}
    save_file(each, tmp_path / "experts.safetensors")
    stored = offload.load_file(tmp_path / "experts.safetensors")
    return {name: stored_stack([stored[f"{name} {number}"] for number in range(8)]) for name in plain}


def stored_stack(matrices: list[torch.Tensor]) -> torch.Tensor:
    joined = torch.stack([deferred(matrix) for matrix in matrices])
    assert isinstance(joined, DeferredTensor)
    return joined.stored("joined")


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which matrices of which stacks are announced."""
    seen: list[tuple[str, int]] = []
    coming = ops.coming

    def look(views: Iterable[tuple[Handle, torch.Tensor]]) -> None:
        views = list(views)
        for handle, view_spec in views:
            name, _, number = handle.name.partition(" ")
            seen.append((name, int(number or view_spec.storage_offset() // (256 * 128))))
        coming(views)

    monkeypatch.setattr(ops, "coming", look)
    return seen


def multiply(stack: torch.Tensor, *experts: int) -> None:
    """One row with each of some experts."""
    counts = torch.zeros(8, dtype=torch.int32)
    counts[list(experts)] = 1
    F.grouped_mm(torch.ones(len(experts), stack.shape[1]), stack, offs=counts.cumsum(0, dtype=torch.int32))


def test_the_experts_of_the_stack_that_came_next_are_announced_with_those_of_the_first(
    stacks: dict[str, torch.Tensor], announced: list[tuple[str, int]]
) -> None:
    for expert in 3, 4:
        for name in ("up", "down"):
            multiply(stacks[name], 1, expert)
    assert ["up", "up", "down", "down"] * 2 == [name for name, _ in announced]
    announced.clear()

    multiply(stacks["up"], 2, 5)

    assert [("up", 2), ("up", 5), ("down", 2), ("down", 5)] == announced


@pytest.mark.parametrize(
    "order",
    [
        [("up", 1, 3), ("down", 1, 4)] * 2,  # other experts
        [("up", 1, 3), ("down", 1, 3)],  # the same once, which may be chance
        [("up", 1, 3), ("down", 1, 3), ("up", 1, 3), ("down", 1, 3), ("up", 1, 4), ("down", 1, 3)],  # others since
        [("up", 1, 3), ("down", 1, 3), ("up", 1, 3), ("other", 1, 3)],  # of different stacks
        [("up", *range(8)), ("down", *range(8))] * 2,  # all of them, which says nothing
        [("up", 1, 3), ("other", *range(8)), ("down", 1, 3)] * 2,  # another one in between
        [("up", 1, 3), ("up", 1, 3)] * 2,
    ],
)
def test_where_others_come_next_nothing_else_is_announced(
    stacks: dict[str, torch.Tensor], announced: list[tuple[str, int]], order: list[tuple[str, int]]
) -> None:
    for name, *experts in order:
        multiply(stacks[name], *experts)
    announced.clear()

    multiply(stacks["up"], 2, 5)

    assert [("up", 2), ("up", 5)] == announced


def remove(stacks: dict[str, torch.Tensor]) -> None:
    del stacks["down"]


def reshape(stacks: dict[str, torch.Tensor]) -> None:
    stacks["down"].data = torch.zeros(8, 2, 2)


@pytest.mark.parametrize("change", [remove, reshape])
def test_a_stack_that_is_gone_or_has_another_shape_now_is_not_announced(
    stacks: dict[str, torch.Tensor],
    announced: list[tuple[str, int]],
    change: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    for name in ("up", "down") * 2:
        multiply(stacks[name], 1, 3)
    change(stacks)
    announced.clear()

    multiply(stacks["up"], 2, 5)

    assert [("up", 2), ("up", 5)] == announced


def test_several_batches_may_use_one_stack_before_the_next(
    stacks: dict[str, torch.Tensor], announced: list[tuple[str, int]]
) -> None:
    for name in ("up", "down", "up", "down", "up"):
        multiply(stacks[name], 1, 3)
    announced.clear()

    multiply(stacks["up"], 2, 5)

    assert [("up", 2), ("up", 5), ("down", 2), ("down", 5)] == announced
