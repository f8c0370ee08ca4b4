"""A product with a packed weight that was made ready is never of another value than the weight has."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload import OffloadedTensor, budget
from offload.errors import ChangedFileError, MissingFileError
from offload.kernels import native
from offload.tensor import bound, products, small
from offload.tensor.bound import BoundWeight
from offload.tensor.products import compute_exactly
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of
from tests.checkpoints.forms import FORMS
from tests.engines import Clock
from tests.processes import in_fork

pytestmark = [
    pytest.mark.fused,
    pytest.mark.usefixtures("still_clock"),
    pytest.mark.skipif(native.library() is None, reason="the kernels were not built"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]

BOUND = ("fp8-llama", "bnb-int8", "ct-w4a16", "gptq", "gguf-q8_0", "gguf-q4_k_m-bfloat16")


def loaded(form: str, folder: Path) -> nn.Module:
    FORMS[form].write(folder)
    return offload.from_pretrained(folder, **FORMS[form].options)


def multiplied_layers(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and offload.is_offloaded(module.weight):
            with torch.no_grad():
                module(activations(module))
            if getattr(module.weight._bound, "product", None) is not None:
                yield module


def activations(layer: nn.Linear, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, layer.in_features, generator=generator).to(layer.weight.dtype)


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[nn.Linear]:
    """One whose product is ready."""
    model = loaded("gguf-q8_0", tmp_path)
    with torch.no_grad():
        yield next(multiplied_layers(model))


@pytest.fixture
def weight(layer: nn.Linear) -> OffloadedTensor:
    return layer.weight  # type: ignore[return-value]


@pytest.fixture
def x(layer: nn.Linear) -> torch.Tensor:
    return activations(layer)


def unbound(x: torch.Tensor, weight: OffloadedTensor, bias: Any = None) -> torch.Tensor:
    """The product, made anew."""
    weight._bound = None
    return F.linear(x, weight, bias)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that products take from now on."""
    ways: list[str] = []
    multiply, other = BoundWeight.multiply, products._product_with_rows

    def way(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = multiply(self, *args, **kwargs)
        ways.extend(["bound"] if found is not None else [])
        return found

    def not_bound(*args: Any) -> Any:
        ways.append("anew")
        return other(*args)

    monkeypatch.setattr(BoundWeight, "multiply", way)
    monkeypatch.setattr(products, "_product_with_rows", not_bound)
    return ways


@pytest.mark.parametrize("form", [name for name in BOUND if name in FORMS])
def test_a_bound_product_has_the_bits_of_another_one(form: str, tmp_path: Path, calls: list[str]) -> None:
    layers = list(multiplied_layers(loaded(form, tmp_path)))
    assert len(layers) > 3

    for layer in layers:
        bias = activations(nn.Linear(layer.out_features, 1))[0].to(layer.weight.dtype)
        for given in (activations(layer), activations(layer, 3), activations(layer, 4).view(2, 2, -1)):
            for added in (None, bias):
                calls.clear()
                with torch.no_grad():
                    found = F.linear(given, layer.weight, added)
                    assert calls == ["bound"]
                    expected = unbound(given, layer.weight, added)
                    F.linear(given, layer.weight)
                assert torch.equal(expected, found)


@pytest.mark.parametrize("form", [name for name in BOUND if name in FORMS])
def test_all_that_a_weight_is_made_of_is_watched(form: str, tmp_path: Path) -> None:
    """Also scales that are computed, and kept."""
    for layer in multiplied_layers(loaded(form, tmp_path)):
        watched = {handle for handle, *_ in layer.weight._bound._watched}

        assert set(stored_in([handle_of(layer.weight)])) == watched


@pytest.mark.parametrize("grad", [True, False])
def test_a_bias_of_another_kind_is_treated_as_without_a_bound_product(
    weight: OffloadedTensor, x: torch.Tensor, calls: list[str], grad: bool
) -> None:
    weight.requires_grad_(False)
    bias = TwoTensor(torch.ones(len(weight)), torch.ones(len(weight)))
    with torch.set_grad_enabled(grad):
        assert torch.equal(F.linear(x, weight.materialize(), bias).a, F.linear(x, weight, bias).a)
        for wrong in ([1.0], 3):
            with pytest.raises(TypeError):
                F.linear(x, weight, wrong)
        with pytest.raises(TypeError):
            F.linear(x, weight, None, None)

    assert "bound" not in calls


def new_value(weight: OffloadedTensor) -> None:
    weight.update_values(torch.ones_like(weight))


def written(weight: OffloadedTensor) -> None:
    weight.mul_(2)


def part_written(weight: OffloadedTensor) -> None:
    weight[0, 0] = 3


def assigned(weight: OffloadedTensor) -> None:
    weight.data = torch.zeros_like(weight)


def given_another_packed_one(weight: OffloadedTensor) -> None:
    weight.data = weight.t()


def turned(weight: OffloadedTensor) -> None:
    weight.t_()


def made_exact(weight: OffloadedTensor) -> None:
    compute_exactly(handle_of(weight))


@pytest.mark.parametrize(
    "change", [new_value, written, part_written, assigned, given_another_packed_one, turned, made_exact]
)
def test_another_value_is_seen_by_the_next_product(
    weight: OffloadedTensor, x: torch.Tensor, change: Callable[[Any], None]
) -> None:
    change(weight)

    assert torch.equal(F.linear(x, weight.materialize()), F.linear(x, weight))


def test_a_piece_that_has_another_source_is_noticed(weight: OffloadedTensor, x: torch.Tensor) -> None:
    """As after a write to the tensor that it is, which switches that one to a file of its own."""
    F.linear(x, weight)
    known = weight._bound
    assert known is not None
    assert known.multiply(x, weight) is not None
    handle = next(stored_in([handle_of(weight)]))
    handle.set_source(copy.copy(handle.source))

    assert known.multiply(x, weight) is None


def test_exact_products_are_those_with_the_dense_weight(weight: OffloadedTensor, x: torch.Tensor) -> None:
    with offload.exact():
        found = F.linear(x, weight)

    assert torch.equal(F.linear(x, weight.materialize()), found)


@pytest.mark.parametrize("is_there", [True, False])
def test_another_file_is_noticed_after_a_tenth_of_a_second(
    weight: OffloadedTensor, x: torch.Tensor, still_clock: Clock, is_there: bool
) -> None:
    expected, file = F.linear(x, weight), weight.offload_path
    text = file.read_bytes()
    file.unlink()
    if is_there:
        file.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
        os.utime(file, ns=(1, 1))

    assert torch.equal(expected, F.linear(x, weight))
    still_clock.time += 0.11
    with pytest.raises(ChangedFileError if is_there else MissingFileError, match=file.name):
        F.linear(x, weight)


def test_a_file_is_looked_at_ten_times_a_second_at_most(
    weight: OffloadedTensor, x: torch.Tensor, still_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    check = type(handle_of(weight).file).check
    monkeypatch.setattr(type(handle_of(weight).file), "check", lambda file: (looks.append(file.path), check(file)))

    for _ in range(100):
        still_clock.time += 0.01
        F.linear(x, weight)

    assert 9 <= len(looks) <= 10


def test_a_weight_that_was_dropped_is_read_again(weight: OffloadedTensor, x: torch.Tensor, calls: list[str]) -> None:
    expected = unbound(x, weight)
    for change in (lambda: budget.evict(weight), lambda: offload.set_max_memory(0), small.release_small):
        undo = change()
        assert torch.equal(expected, F.linear(x, weight))
        assert torch.equal(expected, F.linear(x, weight))
        assert "bound" == calls[-1]
        if hasattr(undo, "close"):
            undo.close()


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, lambda: torch.autocast("cpu", torch.float16)])
def test_modes_see_the_ops_that_they_see_without_a_bound_product(
    weight: OffloadedTensor, x: torch.Tensor, calls: list[str], mode: Callable[[], Any]
) -> None:
    with mode():
        expected = F.linear(x, weight.materialize())
        found = F.linear(x, weight)

    assert "bound" not in calls
    assert expected.dtype == found.dtype
    torch.testing.assert_close(expected, found, atol=1e-2, rtol=1e-2)


def test_fake_tensors_have_fake_products(weight: OffloadedTensor, x: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = F.linear(mode.from_tensor(x), weight)

    assert (1, len(weight)) == found.shape


def test_products_that_autograd_and_transforms_follow_are_not_bound(
    weight: OffloadedTensor, x: torch.Tensor, calls: list[str]
) -> None:
    dense = weight.materialize()
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        F.linear(given, weight).sum().backward()
    assert torch.equal(torch.ones(1, len(dense)) @ dense, given.grad)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, x), weight))
        assert torch.equal(F.linear(x, dense), found.tangent)
    torch.func.vmap(lambda row: F.linear(row, weight))(x)

    assert "bound" not in calls


def test_a_frozen_weight_is_bound_where_gradients_are_enabled(layer: nn.Linear, x: torch.Tensor, calls: Any) -> None:
    layer.requires_grad_(False)
    with torch.enable_grad():
        assert not layer(x).requires_grad
        assert ["bound"] == calls
        layer.requires_grad_(True)
        assert layer(x).requires_grad


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:, :-1],
        lambda x: x.expand(native.MOST_ROWS + 1, -1),
        lambda x: x.to_sparse(),
        lambda x: x[:0],
    ],
    ids=["another dtype", "another width", "too many rows", "sparse", "no rows"],
)
def test_other_activations_are_treated_as_without_a_bound_product(
    weight: OffloadedTensor, x: torch.Tensor, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def outcome(with_weight: torch.Tensor) -> Any:
        try:
            return F.linear(other(x), with_weight)
        except RuntimeError as error:
            return str(error)

    expected, found = outcome(weight.materialize()), outcome(weight)

    assert expected == found if isinstance(expected, str) else torch.equal(expected, found)


@pytest.mark.parametrize("other", [lambda x: x.t().contiguous().t(), lambda x: x.neg()._neg_view(), lambda x: x[::2]])
def test_activations_that_lie_otherwise_have_the_same_products(
    weight: OffloadedTensor, layer: nn.Linear, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    given = other(activations(layer, 4))

    assert torch.equal(F.linear(given.resolve_neg().contiguous(), weight), F.linear(given, weight))


def test_copies_and_other_processes_bind_for_themselves(
    weight: OffloadedTensor, x: torch.Tensor, calls: list[str]
) -> None:
    expected = F.linear(x, weight)

    for other in (copy.deepcopy(weight), ForkingPickler.loads(ForkingPickler.dumps(weight)), weight.detach()):
        assert other._bound is None
        assert torch.equal(expected, F.linear(x, other))
        other.data = torch.zeros_like(weight)
        assert not F.linear(x, other).any()
    assert in_fork(lambda: torch.equal(expected, F.linear(x, weight)))
    assert torch.equal(expected, F.linear(x, weight))
    weight.update_values(torch.ones_like(weight))
    assert in_fork(lambda: torch.equal(F.linear(x, torch.ones(weight.shape)), F.linear(x, weight)))


def test_swapped_tensors_have_the_products_of_their_values(weight: OffloadedTensor, x: torch.Tensor) -> None:
    expected, other = F.linear(x, weight), torch.ones(weight.shape)
    torch.utils.swap_tensors(weight, other)

    assert torch.equal(expected, F.linear(x, other))
    assert torch.equal(F.linear(x, torch.ones(weight.shape)), F.linear(x, weight))


def test_threads_see_the_old_value_or_the_new_one(weight: OffloadedTensor, x: torch.Tensor) -> None:
    values = [F.linear(x, weight), F.linear(x, torch.ones(weight.shape)), F.linear(x, torch.zeros(weight.shape))]
    wrong: list[torch.Tensor] = []

    def use() -> None:
        with torch.no_grad():
            for _ in range(200):
                found = F.linear(x, weight)
                wrong.extend([] if any(torch.equal(found, one) for one in values) else [found])

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    weight.update_values(torch.ones(weight.shape))
    weight.update_values(torch.zeros(weight.shape))
    for thread in threads:
        thread.join()

    assert not wrong
    assert not F.linear(x, weight).any()


# Rows that are picked from a bound table


@pytest.fixture
def table(tmp_path: Path) -> Iterator[OffloadedTensor]:
    """An embedding that is bound."""
    model = loaded("gguf-q8_0", tmp_path)
    with torch.no_grad():
        table = model.get_input_embeddings().weight  # type: ignore[operator]
        F.embedding(torch.tensor([0]), table)
        assert table._bound.product is not None
        yield table


@pytest.mark.parametrize("rows", [torch.tensor([[3]]), torch.tensor([5, 1, 5]), torch.tensor(2), torch.empty(0).long()])
def test_rows_of_a_bound_table_are_those_of_the_value(table: OffloadedTensor, rows: torch.Tensor) -> None:
    expected = F.embedding(rows, table.materialize())

    assert torch.equal(expected, table._bound.pick(rows, table))
    assert torch.equal(expected, F.embedding(rows, table))
    with torch.inference_mode():
        assert F.embedding(rows, table).is_inference()


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (torch.tensor([10_000_000]), {}),
        (torch.tensor([-1]), {}),
        (torch.tensor([1]), {"padding_idx": 10_000_000}),
        (torch.tensor([1, 0]), {"padding_idx": 1}),
        (torch.tensor([1], dtype=torch.int32), {}),
        (torch.tensor([1.0]), {}),
        (torch.arange(native.MOST_ROWS + 1) % 7, {}),
        (torch.tensor([[1, 2], [3, 4]]).t(), {}),
        (torch.tensor([1], device="meta"), {}),
    ],
)
def test_other_picks_end_as_with_the_dense_table(table: OffloadedTensor, rows: torch.Tensor, options: Any) -> None:
    def outcome(of: torch.Tensor) -> Any:
        try:
            return F.embedding(rows, of, **options)
        except (RuntimeError, IndexError, AssertionError) as error:
            return type(error)

    expected, found = outcome(table.materialize()), outcome(table)

    assert expected is found if isinstance(expected, type) else torch.equal(expected, found) or rows.is_meta


@pytest.mark.parametrize("change", [new_value, written, part_written, assigned, turned, made_exact])
def test_another_value_is_seen_by_the_next_pick(table: OffloadedTensor, change: Callable[[Any], None]) -> None:
    change(table)

    assert torch.equal(table.materialize()[[3, 1]], F.embedding(torch.tensor([3, 1]), table))


def test_a_pick_reads_no_other_rows(table: OffloadedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is neither read as a whole nor counted as such."""
    asked: list[list[int]] = []
    prefetch = bound.prefetch_rows
    monkeypatch.setattr(bound, "has_rows_here", lambda handle: False)
    monkeypatch.setattr(bound, "prefetch_rows", lambda *given: (asked.append(given[2].tolist()), prefetch(*given)))
    monkeypatch.setattr(bound, "ensure_resident", lambda *given: pytest.fail("all of it is read"))

    F.embedding(torch.tensor([3, 1]), table)

    assert [[3, 1]] == asked


def test_modes_and_graphs_see_a_pick(table: OffloadedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, expected = torch.tensor([3]), table.materialize()[[3]]
    monkeypatch.setattr(bound, "pick", lambda *_: pytest.fail("it is picked past them"))
    with Seen():
        assert torch.equal(expected, F.embedding(rows, table))
    with torch.enable_grad():
        table.requires_grad_()
        F.embedding(rows, table).sum().backward()

    assert 1 == table.grad[3, 0]
    assert not table.grad[2].any()


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_that_asks_for_a_gradient_is_scaled_without_a_graph(tmp_path: Path, grad: bool) -> None:
    weight = OffloadedTensor.from_original_tensor(torch.arange(4.0), "weight", tmp_path).requires_grad_()
    with torch.set_grad_enabled(grad):
        found = weight * torch.ones(4)

    assert grad == found.requires_grad
    assert torch.equal(torch.arange(4.0), found.detach())
