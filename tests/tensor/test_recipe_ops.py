"""Ops on recipes: only picked rows are computed, and results equal those of plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import offload
from offload import OffloadedTensor
from offload.prefetch.engine import track
from offload.storage.handle import Access
from offload.tensor.deferred import DeferredTensor, deferred
from offload.tensor.recipes import Plain, Recipe
from offload.tensor.views import handle_of

E, N, K = 8, 48, 64

pytestmark = pytest.mark.usefixtures("nothing_small")


@pytest.fixture
def matrices(tmp_path: Path) -> tuple[OffloadedTensor, torch.Tensor]:
    """Eight matrices in a file, joined; and the same in memory."""
    plain = [torch.randn(N, K) for _ in range(E)]
    save_file({f"{number}": matrix for number, matrix in enumerate(plain)}, tmp_path / "experts.safetensors")
    stored = offload.load_file(tmp_path / "experts.safetensors")
    joined = torch.stack([deferred(stored[f"{number}"]) for number in range(E)])
    return _stored(joined), torch.stack(plain)


def _stored(tensor: torch.Tensor) -> OffloadedTensor:
    assert isinstance(tensor, DeferredTensor)
    stored = tensor.stored("joined")
    assert handle_of(stored).composed is not None
    return stored


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements are computed at each read."""
    seen: list[int] = []
    value = Plain.value

    def look(self: Plain, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = value(self, *args, **kwargs)
        seen.append(found.numel())
        return found

    monkeypatch.setattr(Plain, "value", look)
    return seen


@pytest.mark.parametrize(
    "pick",
    [
        lambda one: one[torch.tensor([[1, 5], [5, 1]])],
        lambda one: one[torch.tensor([-1, 2]), torch.tensor([3, 4])],
        lambda one: one[torch.tensor([3]), :, torch.tensor([5])],
        lambda one: torch.index_select(one, 0, torch.tensor([6, 6, 0])),
        lambda one: torch.index_select(one, 1, torch.tensor([6, 6, 0])),
        lambda one: one.gather(0, torch.tensor([[[1, 2]]])),
        lambda one: one[torch.tensor([True, False] * 4)],
        lambda one: F.embedding(torch.tensor([[7, 0], [0, 7]]), one[2]),
        lambda one: F.embedding(torch.tensor([7, 5]), one[2], padding_idx=5),
        lambda one: F.embedding(torch.tensor([7, 5], dtype=torch.int32), one.flatten(0, 1)),
        lambda one: one[torch.tensor([], dtype=torch.int64)],
    ],
)
def test_picked_rows_are_those_of_plain_tensors(
    matrices: tuple[OffloadedTensor, torch.Tensor], pick: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    stored, plain = matrices
    assert torch.equal(pick(stored), pick(plain))


def test_picked_rows_are_taken_from_the_pieces(matrices: tuple[Any, torch.Tensor], carried_out: list[int]) -> None:
    F.embedding(torch.tensor([3, 300, 301, 3]), matrices[0].flatten(0, 1))

    assert [] == carried_out


def test_an_unknown_row_raises_the_error_of_torch(matrices: tuple[OffloadedTensor, torch.Tensor]) -> None:
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(torch.tensor([N]), matrices[0][1])


def test_the_gradient_of_an_embedding_is_of_the_whole_table(matrices: tuple[OffloadedTensor, torch.Tensor]) -> None:
    grads = []
    for one in matrices:
        table = torch.nn.Parameter(one[2])
        F.embedding(torch.tensor([[1, 5], [5, 1]]), table, padding_idx=1).pow(2).sum().backward()  # type: ignore[no-untyped-call]
        grads.append(table.grad)
    assert isinstance(grads[0], torch.Tensor)
    assert isinstance(grads[1], torch.Tensor)
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_multiplied_with_their_matrices_alone(
    matrices: tuple[OffloadedTensor, torch.Tensor], dtype: torch.dtype, carried_out: list[int]
) -> None:
    stored, plain = matrices
    stored = _stored(deferred(stored).to(dtype))
    rows, ends = torch.randn(15, K).to(dtype), torch.tensor([0, 3, 3, 3, 9, 9, 15, 15], dtype=torch.int32)
    result = torch._grouped_mm(rows, stored.transpose(1, 2), offs=ends)
    assert torch.equal(result, torch._grouped_mm(rows, plain.to(dtype).transpose(1, 2), offs=ends))
    assert max(carried_out) == N * K


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_joined_weight_multiplies_as_the_whole_one(
    tmp_path: Path, dtype: torch.dtype, rows: int, has_bias: bool
) -> None:
    gate, up = torch.randn(512, 256).to(dtype), torch.randn(520, 256).to(dtype)
    save_file({"gate": gate, "up": up}, tmp_path / "w.safetensors")
    stored = offload.load_file(tmp_path / "w.safetensors")
    weight = _stored(torch.cat([deferred(stored["gate"]), deferred(stored["up"])]))
    x, bias = torch.randn(rows, 256).to(dtype), torch.randn(1032).to(dtype) if has_bias else None
    wanted = F.linear(x, torch.cat([gate, up]), bias)
    assert all(torch.equal(F.linear(x, weight, bias), wanted) for _ in range(3))


def test_an_expert_is_read_without_its_neighbours(matrices: tuple[OffloadedTensor, torch.Tensor]) -> None:
    recipe = handle_of(matrices[0]).composed
    assert isinstance(recipe, Recipe)
    assert all(handle.access is Access.PICKED for handle in recipe.handles())
    assert all(track(handle, *handle.extent).is_part for handle in recipe.handles())
    [handle] = _whole(matrices[0]).handles()
    assert handle.access is not Access.PICKED


def _whole(tensor: OffloadedTensor) -> Recipe:
    """A cast of a whole value that has a file."""
    wide = OffloadedTensor.from_original_tensor(offload.materialize(tensor).double(), "wide")
    cast = handle_of(_stored(deferred(wide).float())).composed
    assert isinstance(cast, Recipe)
    return cast
