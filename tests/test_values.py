"""Values are replaced one at a time, each once, and a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload import OffloadedTensor, is_offloaded, map_values
from offload.errors import (
    DtypeMismatchError,
    MapError,
    MetaTensorError,
    ShapeMismatchError,
    UnsupportedOpError,
)
from tests.conftest import contents


class Tied(nn.Module):
    """An embedding, a linear layer, a head that shares the embedding's weight, and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)


NAMES = ("scale", "table.weight", "layer.weight", "layer.bias")


def double(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.fixture
def plain() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def checkpoint(plain: Tied, tmp_path: Path) -> Path:
    state = {name: tensor for name, tensor in plain.state_dict().items() if name != "head.weight"}
    path = tmp_path / "checkpoint" / "model.safetensors"
    path.parent.mkdir()
    save_file(state, path)
    return path


def loaded(checkpoint: Path, offload_dir: Path | None) -> Tied:
    """The model over its checkpoint, the buffers in memory."""
    with offload.init_empty_weights():
        model = Tied()
    model.head.weight = model.table.weight
    return offload.load_checkpoint_and_dispatch(model, checkpoint, offload_dir=offload_dir)


class StopAt:
    """Doubles, and keeps the names that it was called with; fails at one."""

    def __init__(self, name: str | None = None, error: type[BaseException] = ValueError) -> None:
        self.name, self.error = name, error
        self.seen: list[str] = []

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.seen.append(name)
        if name == self.name:
            raise self.error("as it was told")
        return tensor * 2


def assert_doubled(model: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(expected[name] * 2, offload.materialize(tensor)), name


# What is seen, and what becomes of it


@pytest.mark.parametrize("workers", [1, 3])
def test_each_value_is_replaced_once_and_ties_stay(checkpoint, plain, tmp_path, workers):
    model, call = loaded(checkpoint, tmp_path / "q"), StopAt()

    report = map_values(call, model, workers=workers)

    assert sorted(NAMES) == sorted(call.seen)
    assert sorted(NAMES) == sorted(report.replaced)
    assert ((), ()) == (report.kept, report.before)
    assert_doubled(model, plain)
    assert model.head.weight is model.table.weight
    assert is_offloaded(model.table.weight)
    assert isinstance(model.table.weight, nn.Parameter)


def test_plain_values_are_replaced_where_they_stand(plain):
    model = Tied()
    model.load_state_dict(plain.state_dict())

    map_values(double, model)

    assert_doubled(model, plain)
    assert model.head.weight is model.table.weight
    assert type(model.layer.weight) is nn.Parameter
    assert model.layer.weight.requires_grad


def test_a_dictionary_gets_the_new_values_and_its_ties_stay(tmp_path):
    shared, on_disk = torch.ones(3), OffloadedTensor.from_original_tensor(torch.ones(2), "w", tmp_path)
    tensors = {"a": shared, "b": shared, "w": on_disk, "view": on_disk.detach(), "step": 7}

    report = map_values(double, tensors)

    assert ("a", "w") == report.replaced
    assert tensors["a"] is tensors["b"]
    assert [2, 2, 2] == tensors["a"].tolist()
    assert [2, 2] == tensors["w"].tolist() == tensors["view"].tolist()
    assert tensors["w"] is on_disk
    assert 7 == tensors["step"]


def test_the_function_gets_the_tensor_on_disk_without_gradients(checkpoint, tmp_path):
    model, seen = loaded(checkpoint, tmp_path / "q"), {}

    def look(name, tensor):
        seen[name] = (is_offloaded(tensor), (tensor * 2).requires_grad)
        return tensor

    report = map_values(look, model)

    assert NAMES == report.kept
    assert {name: (name != "scale", False) for name in NAMES} == seen
    assert not list((tmp_path / "q").glob("*.safetensors"))


def test_shape_and_dtype_change_where_that_is_said_and_other_tensors_over_the_value_follow(tmp_path):
    weight = OffloadedTensor.from_original_tensor(torch.arange(6.0).view(2, 3), "w", tmp_path)
    tensors = {"w": weight, "same": weight.detach()}

    map_values(lambda name, tensor: tensor[0].half(), tensors, strict_shape=False, strict_dtype=False)

    for tensor in tensors.values():
        assert (torch.float16, (3,)) == (tensor.dtype, tensor.shape)
        assert [0, 1, 2] == tensor.tolist()


@pytest.mark.parametrize("on_disk", [True, False])
def test_another_shape_or_dtype_without_leave_is_refused_and_the_value_stands(tmp_path, on_disk):
    before = torch.ones(2, 3)
    tensors = {"w": OffloadedTensor.from_original_tensor(before, "w", tmp_path) if on_disk else before}

    with pytest.raises(
        ShapeMismatchError, match=r"'w' has shape \(2, 3\), the new value \(3, 2\): .*strict_shape=False"
    ):
        map_values(lambda name, tensor: tensor.t(), tensors)
    with pytest.raises(DtypeMismatchError, match=r"'w' has dtype torch.float32, .*float16: pass strict_dtype=False"):
        map_values(lambda name, tensor: tensor.half(), tensors)

    assert torch.equal(before, offload.materialize(tensors["w"]))


def test_what_is_no_tensor_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"'w': a torch\.Tensor is needed, not NoneType"):
        map_values(lambda name, tensor: None, {"w": torch.ones(2)})
    with pytest.raises(TypeError, match="a module or a dictionary of tensors is needed, not list"):
        map_values(double, [torch.ones(2)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers should be 1 or more, not 0"):
        map_values(double, {}, workers=0)
    with pytest.raises(MetaTensorError, match="1 tensors have no data, 'w' is one: load them first"):
        map_values(double, {"w": torch.ones(2, device="meta")})


def test_values_that_are_parts_of_a_checkpoints_value_get_files_of_their_own(tmp_path):
    save_file({"fused": torch.arange(8.0).view(4, 2)}, tmp_path / "model.safetensors")
    fused = OffloadedTensor.from_file(tmp_path / "model.safetensors", offload_dir=tmp_path / "q")
    tensors = {"up": fused[:2], "down": fused[2:]}

    map_values(double, tensors)

    assert [[0, 2], [4, 6]] == tensors["up"].tolist()
    assert [[8, 10], [12, 14]] == tensors["down"].tolist()
    assert ["down.safetensors", "up.safetensors"] == sorted(
        path.name for path in (tmp_path / "q").glob("*.safetensors")
    )
    assert torch.equal(torch.arange(8.0).view(4, 2), fused)


def test_a_part_of_a_value_that_is_written_to_says_what_to_do(tmp_path):
    whole = OffloadedTensor.from_original_tensor(torch.ones(4), "w", tmp_path)

    with pytest.raises(UnsupportedOpError, match="a view of a part of 'w'"):
        map_values(double, {"part": whole[:2]})


def test_a_function_that_writes_in_place_and_returns_its_tensor_has_changed_it(tmp_path):
    weight = OffloadedTensor.from_original_tensor(torch.ones(2), "w", tmp_path)

    report = map_values(lambda name, tensor: tensor.mul_(2), {"w": weight})

    assert ("w",) == report.replaced
    assert [2, 2] == weight.tolist()


# Which


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("layer.*", {"layer.weight", "layer.bias"}),
        (["*.bias", "scale"], {"layer.bias", "scale"}),
        ("head.*", {"table.weight"}),
        (nn.Linear, {"table.weight", "layer.weight", "layer.bias"}),
        ([nn.Embedding, "scale"], {"table.weight", "scale"}),
        (lambda name, tensor: tensor.dim() == 2 and name != "table.weight", {"layer.weight"}),
        (lambda name, tensor: False, set()),
    ],
)
def test_values_are_selected_by_names_classes_or_a_function(plain, select, expected):
    assert expected == set(map_values(double, plain, select=select).replaced)


def test_a_selection_of_nothing_says_what_there_is(plain):
    with pytest.raises(
        ValueError, match=r"'\*.wieght' is none of the 4 values \(scale, table.weight, layer.weight\.\.\.\)"
    ):
        map_values(double, plain, select=["*.bias", "*.wieght"])
    with pytest.raises(ValueError, match=r"Conv2d'> is none of the 4 values"):
        map_values(double, plain, select=nn.Conv2d)
    with pytest.raises(TypeError, match="is of modules, and this is a dictionary of tensors: give names"):
        map_values(double, {"w": torch.ones(1)}, select=nn.Linear)


# Stopped, and resumed


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_names_the_tensor_and_leaves_what_was_done(checkpoint, plain, tmp_path, error):
    model, call = loaded(checkpoint, tmp_path / "q"), StopAt("layer.bias", error)

    with pytest.raises(
        (MapError, KeyboardInterrupt), match=r"at 'layer.bias'.*: 3 of 4 values are done, and stay"
    ) as caught:
        map_values(call, model, resume="double")

    assert isinstance(caught.value.__cause__, error)
    assert torch.equal(plain.layer.weight * 2, model.layer.weight)
    assert torch.equal(plain.layer.bias, model.layer.bias)
    [run] = json.loads((tmp_path / "q" / ".offload-journal").read_text())["runs"]
    assert ("double", list(NAMES[:3]), False) == (run["name"], run["replaced"], run["finished"])


@pytest.mark.parametrize("anew", [True, False])
def test_a_run_goes_on_where_it_was_also_over_a_checkpoint_that_is_loaded_anew(checkpoint, plain, tmp_path, anew):
    """What is in memory is as in the checkpoint after loading, and is done again."""
    before = contents(checkpoint.parent)
    model, rest = loaded(checkpoint, tmp_path / "q"), StopAt()
    with pytest.raises(MapError):
        map_values(StopAt("layer.bias"), model, resume="double")
    if anew:
        del model
        model = loaded(checkpoint, tmp_path / "q")

    report = map_values(rest, model, resume="double")

    again = ["scale"] if anew else []
    assert [*again, "layer.bias"] == rest.seen
    assert (*again, "layer.bias") == report.replaced
    assert NAMES[len(again) : 3] == report.before
    assert_doubled(model, plain)
    assert model.head.weight is model.table.weight
    assert contents(checkpoint.parent) == before


def test_a_run_that_is_finished_is_not_done_again(checkpoint, plain, tmp_path):
    map_values(double, loaded(checkpoint, tmp_path / "q"), resume=True)
    model = loaded(checkpoint, tmp_path / "q")

    for _ in range(2):
        report = map_values(double, model, resume=True)

    assert NAMES == report.before
    assert_doubled(model, plain)
