"""Small values that are computed from others are computed once, and never stale."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload import OffloadedTensor, budget
from offload.errors import ChangedFileError, MissingFileError
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor import recipes, small
from offload.tensor.recipes import Joined, Piece
from offload.tensor.views import handle_of
from offload.tensor.wrapper import wrap_handle
from tests.engines import Clock
from tests.processes import in_fork

pytestmark = pytest.mark.usefixtures("still_clock")

WIDTH = 48


class Layer(nn.Module):
    """A norm and a scale, which are stored in another dtype than they are wanted in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(2, WIDTH, dtype=torch.bfloat16), requires_grad=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file({"norm": torch.randn(WIDTH), "scale": torch.randn(2, WIDTH)}, path)
    return path


@pytest.fixture
def layer(file: Path) -> Layer:
    layer = Layer()
    offload.load_checkpoint_and_dispatch(layer, file, device_map="disk", dtype=torch.bfloat16)
    return layer


@pytest.fixture
def norm(layer: Layer) -> OffloadedTensor:
    assert handle_of(layer.norm).composed is not None
    return layer.norm  # type: ignore[return-value]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pieces that values are computed from, each time."""
    names: list[str] = []
    put = recipes.Piece.put

    def counted(self: Any, place: torch.Tensor, view_spec: torch.Tensor) -> None:
        names.append(self.handle.name)
        put(self, place, view_spec)

    monkeypatch.setattr(recipes.Piece, "put", counted)
    return names


def test_a_small_value_is_computed_once_for_all_its_ops_and_views(layer: Layer, computed: list[str]) -> None:
    expected = layer.scale.materialize()  # type: ignore[operator]

    for _ in range(3):
        assert torch.equal(expected * 2, layer.scale * 2)
        assert torch.equal(expected[1] + expected[0], layer.scale[1] + layer.scale[0])
        assert torch.equal(expected.t().contiguous(), layer.scale.t().contiguous())

    assert ["scale"] == computed


def test_a_large_value_is_computed_at_each_use(layer: Layer, computed: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(recipes, "SMALL", WIDTH)
    again = recipes.Joined(handle_of(layer.norm).layout, handle_of(layer.norm).composed.pieces, [(0,)])  # type: ignore

    assert again.small is None
    assert torch.equal(again.value(), again.value())
    assert ["norm", "norm"] == computed


def replaced(tensor: OffloadedTensor) -> torch.Tensor:
    tensor.update_values(torch.ones(WIDTH, dtype=torch.bfloat16))
    return torch.ones(WIDTH, dtype=torch.bfloat16)


def written(tensor: OffloadedTensor) -> torch.Tensor:
    before = tensor.materialize()
    tensor[3] = 7
    before[3] = 7
    return before


def assigned(tensor: OffloadedTensor) -> torch.Tensor:
    tensor.data = torch.zeros(WIDTH, dtype=torch.bfloat16)
    return torch.zeros(WIDTH, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [replaced, written, assigned])
def test_a_new_value_is_seen_by_the_next_op(norm: OffloadedTensor, change: Callable[..., torch.Tensor]) -> None:
    _ = norm + 1
    expected = change(norm)

    assert torch.equal(expected + 1, norm + 1)


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_write_to_a_source_is_seen(file: Path, tmp_path: Path, is_owned: bool) -> None:
    """Recipes of checkpoints have sources of their own; of others, this one's are not kept, or followed."""
    w = OffloadedTensor.from_file(file, "norm")
    if is_owned:
        w.add_(1)
    recipe = Handle.compose(Joined(contiguous(torch.float16, (WIDTH,)), [Piece(handle_of(w))], [(0,)]), "w")
    cast = wrap_handle(recipe, torch.device("cpu"))
    assert torch.equal(w.materialize().half() + 1, cast + 1)

    w.mul_(3)

    assert torch.equal(w.materialize().half() + 1, cast + 1)


def test_an_array_of_a_small_value_can_not_be_written_to(file: Path) -> None:
    layer = Layer().half()
    offload.load_checkpoint_and_dispatch(layer, file, device_map="disk", dtype=torch.float16)
    array = layer.norm.numpy()

    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_the_next_op_does_not_see_a_write_to_a_guest(norm: OffloadedTensor) -> None:
    """As compiled code does, which is given the memory itself."""
    expected = norm.materialize()
    norm._guest.zero_()

    assert torch.equal(expected, norm.materialize())


def test_results_do_not_share_the_memory_of_a_small_value(norm: OffloadedTensor) -> None:
    expected = norm.materialize()
    for result in (norm.materialize(), norm.clone(), norm.contiguous(), norm.to(torch.bfloat16), norm.reshape(-1)):
        result.detach().zero_() if type(result) is torch.Tensor else None

    assert torch.equal(expected, norm.materialize())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_changed_file_is_noticed_after_a_tenth_of_a_second(
    norm: OffloadedTensor, file: Path, still_clock: Clock, is_there: bool
) -> None:
    _ = norm + 1  # computes it
    expected = norm + 1  # looks at the file
    os.replace(file, file.with_suffix(".old"))
    if is_there:
        save_file({"norm": torch.zeros(WIDTH), "scale": torch.zeros(2, WIDTH)}, file)

    assert torch.equal(expected, norm + 1)
    still_clock.time += 0.11
    with pytest.raises(ChangedFileError if is_there else MissingFileError, match=file.name):
        _ = norm + 1


def test_a_file_is_looked_at_ten_times_a_second_at_most(
    norm: OffloadedTensor, still_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ = norm + 1
    looks: list[Path] = []
    check = type(handle_of(norm).file).check
    monkeypatch.setattr(type(handle_of(norm).file), "check", lambda file: (looks.append(file.path), check(file)))
    for _ in range(100):
        still_clock.time += 0.01
        _ = norm + 1

    assert 9 <= len(looks) <= 10


@pytest.mark.parametrize("ask", [lambda norm: budget.evict(norm), lambda _: offload.set_max_memory("8MiB")])
def test_small_values_go_when_memory_is_asked_back(
    norm: OffloadedTensor, computed: list[str], ask: Callable[[Any], Any]
) -> None:
    expected = norm + 1
    assert 2 * WIDTH <= offload.memory_summary().computed
    undo = ask(norm)

    assert 0 == offload.memory_summary().computed
    assert torch.equal(expected, norm + 1)
    assert ["norm", "norm"] == computed
    if undo is not None:
        undo.close()


def test_small_values_take_a_bounded_amount_of_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.release_small()
    monkeypatch.setattr(small, "_ALL", 10 * 2 * WIDTH)
    layers = [Layer() for _ in range(30)]
    for layer in layers:
        offload.load_checkpoint_and_dispatch(layer, file, device_map="disk", dtype=torch.bfloat16)
        _ = layer.norm + 1

        assert small.small_bytes() <= 10 * 2 * WIDTH

    assert all(torch.equal(layers[0].norm + 1, layer.norm + 1) for layer in layers)


def test_memory_of_a_small_value_goes_with_its_tensor(file: Path) -> None:
    small.release_small()
    layer = Layer()
    offload.load_checkpoint_and_dispatch(layer, file, device_map="disk", dtype=torch.bfloat16)
    _ = layer.norm + 1
    assert 2 * WIDTH == small.small_bytes()
    del layer

    assert 0 == small.small_bytes()


def test_copies_and_other_processes_compute_for_themselves(norm: OffloadedTensor) -> None:
    expected = norm + 1

    assert torch.equal(expected, copy.deepcopy(norm) + 1)
    assert torch.equal(expected, ForkingPickler.loads(ForkingPickler.dumps(norm)) + 1)
    assert in_fork(lambda: torch.equal(expected, norm + 1))
    norm.update_values(torch.ones(WIDTH, dtype=torch.bfloat16))
    assert in_fork(lambda: torch.equal(torch.full_like(expected, 2), norm + 1))


def test_a_value_that_inference_mode_computed_can_be_used_by_autograd(norm: OffloadedTensor) -> None:
    with torch.inference_mode():
        _ = norm + 1
    x = torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (x * norm).sum().backward()

    assert torch.equal(norm.materialize(), x.grad)  # type: ignore[arg-type]


def test_threads_see_one_value_while_memory_is_asked_back(norm: OffloadedTensor) -> None:
    expected, wrong = norm + 1, []

    def use() -> None:
        wrong.extend(1 for _ in range(300) if not torch.equal(expected, norm + 1))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        small.release_small()
    for thread in threads:
        thread.join()

    assert not wrong
