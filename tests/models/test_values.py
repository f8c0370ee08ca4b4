"""Values are replaced one at a time, each once, and a stopped run can be resumed."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload import OffloadedTensor, is_offloaded, map_values
from offload.checkpoints.verify import verify
from offload.errors import (
    DtypeMismatchError,
    MapError,
    MetaTensorError,
    NameInUseError,
    OffloadError,
    ShapeMismatchError,
    UnsupportedOpError,
    WriteError,
)
from tests.conftest import contents
from tests.faults import killed_at_each


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
    """The model over its checkpoint, with buffers in memory."""
    with offload.init_empty_weights():
        model = Tied()
    model.head.weight = model.table.weight
    return offload.load_checkpoint_and_dispatch(model, checkpoint, offload_dir=offload_dir)


class StopAt:
    """Doubles values, and records the names it was called with; fails at one."""

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


# Values and results


def test_each_value_is_replaced_once_and_ties_stay(checkpoint, plain, tmp_path):
    model, call = loaded(checkpoint, tmp_path / "q"), StopAt()
    report = map_values(call, model)

    assert sorted(NAMES) == sorted(call.seen)
    assert sorted(NAMES) == sorted(report.replaced)
    assert ((), ()) == (report.kept, report.before)
    assert_doubled(model, plain)
    assert model.head.weight is model.table.weight
    assert is_offloaded(model.table.weight)
    assert isinstance(model.table.weight, nn.Parameter)


def test_a_plain_parameter_stays_the_one_that_its_optimizer_knows(plain):
    """The same object with another value, as after `module.half()`."""
    model = Tied()
    model.load_state_dict(plain.state_dict())
    before, tied = dict(model.named_parameters()), torch.nn.Parameter(model.layer.bias.detach())
    model.other = nn.Module()
    model.other.bias = tied  # over the same memory, but a separate object
    map_values(double, model)

    assert all(before[name] is parameter for name, parameter in model.named_parameters() if name in before)
    assert model.other.bias is tied
    assert tied.data_ptr() == model.layer.bias.data_ptr()
    del model.other
    assert_doubled(model, plain)
    assert model.head.weight is model.table.weight
    assert model.layer.weight.requires_grad


def test_the_result_of_a_function_is_not_changed(plain):
    """It may return one tensor twice, or another model's: later writes to a value affect no other."""
    donor, tensors = torch.ones(3), {"a": torch.zeros(3), "b": torch.zeros(3)}
    layers = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False))
    map_values(lambda name, tensor: donor.view_as(tensor), tensors)
    map_values(lambda name, tensor: donor.view_as(tensor), layers)
    tensors["a"].zero_()
    layers[0].weight.data.zero_()

    assert [1, 1, 1] == donor.tolist() == tensors["b"].tolist() == layers[1].weight[0].tolist()


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


def test_shape_and_dtype_change_on_request_and_other_tensors_over_the_value_follow(tmp_path):
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

    shapes = r"'w' has shape \(2, 3\), the new value \(3, 2\): .*strict_shape=False"
    with pytest.raises(ShapeMismatchError, match=shapes):
        map_values(lambda name, tensor: tensor.t(), tensors)
    with pytest.raises(DtypeMismatchError, match=r"'w' has dtype torch.float32, .*float16: pass strict_dtype=False"):
        map_values(lambda name, tensor: tensor.half(), tensors)

    assert torch.equal(before, offload.materialize(tensors["w"]))


def test_a_value_that_is_not_a_tensor_is_refused_by_name(tmp_path):
    words = r"fn returned None for 'w': .*the same tensor .*0 of 1 values were replaced"
    with pytest.raises(TypeError, match=words) as caught:
        map_values(lambda name, tensor: None, {"w": torch.ones(2)})
    assert isinstance(caught.value, OffloadError)
    with pytest.raises(TypeError, match="a module or a dictionary of tensors is needed, not list"):
        map_values(double, [torch.ones(2)])  # type: ignore[arg-type]
    with pytest.raises(MetaTensorError, match="1 tensors have no data, such as 'w': load them first"):
        map_values(double, {"w": torch.ones(2, device="meta")})


def test_values_that_are_parts_of_a_checkpoints_value_get_files_of_their_own_and_parts_of_others_do_not(tmp_path):
    save_file({"fused": torch.arange(8.0).view(4, 2)}, tmp_path / "model.safetensors")
    fused = OffloadedTensor.from_file(tmp_path / "model.safetensors", offload_dir=tmp_path / "q")
    tensors = {"up": fused[:2], "down": fused[2:]}
    whole = OffloadedTensor.from_original_tensor(torch.ones(4), "w", tmp_path / "own")
    map_values(double, tensors)

    assert [[0, 2], [4, 6]] == tensors["up"].tolist()
    assert [[8, 10], [12, 14]] == tensors["down"].tolist()
    assert {"down.safetensors", "up.safetensors"} == {path.name for path in (tmp_path / "q").glob("*.safetensors")}
    assert torch.equal(torch.arange(8.0).view(4, 2), fused)
    with pytest.raises(UnsupportedOpError, match="a view of a part of 'w'"):
        map_values(double, {"part": whole[:2]})


def test_a_function_that_writes_in_place_and_returns_its_tensor_has_changed_it(tmp_path):
    weight = OffloadedTensor.from_original_tensor(torch.ones(2), "w", tmp_path)
    report = map_values(lambda name, tensor: tensor.mul_(2), {"w": weight})

    assert ("w",) == report.replaced
    assert [2, 2] == weight.tolist()


# Selecting


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


def test_selecting_nothing_is_an_error_that_lists_the_names(plain):
    with pytest.raises(
        ValueError, match=r"'\*.wieght' is none of the 4 values \(scale, table.weight, layer.weight and 1 more\)"
    ):
        map_values(double, plain, select=["*.bias", "*.wieght"])
    with pytest.raises(ValueError, match=r"Conv2d'> is none of the 4 values"):
        map_values(double, plain, select=nn.Conv2d)
    with pytest.raises(TypeError, match="selects modules, but this is a dictionary of tensors: select by name"):
        map_values(double, {"w": torch.ones(1)}, select=nn.Linear)


# Stopping and resuming


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_names_the_tensor_and_leaves_what_was_done(checkpoint, plain, tmp_path, error):
    model, call = loaded(checkpoint, tmp_path / "q"), StopAt("layer.bias", error)
    words = r"at 'layer.bias'.*: 3 of 4 values were replaced and stay so; resume='double' continues"

    with pytest.raises((MapError, KeyboardInterrupt), match=words) as caught:
        map_values(call, model, resume="double")

    assert isinstance(caught.value.__cause__, error)
    assert torch.equal(plain.layer.weight * 2, model.layer.weight)
    assert torch.equal(plain.layer.bias, model.layer.bias)


@pytest.mark.parametrize("anew", [True, False])
def test_a_run_resumes_over_a_checkpoint_that_is_loaded_again(checkpoint, plain, tmp_path, anew):
    """Values in memory are those of the checkpoint after loading, and are processed again."""
    before = contents(checkpoint.parent)
    model, rest = half_done(checkpoint, tmp_path / "q"), StopAt()
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


def test_a_run_that_is_finished_is_not_done_again_and_its_folder_is_an_offload_folder(checkpoint, plain, tmp_path):
    """Its values are taken, but not while another model uses them."""
    map_values(double, loaded(checkpoint, tmp_path / "q"), resume="double")
    model = loaded(checkpoint, tmp_path / "q")
    for _ in range(2):
        report = map_values(double, model, resume="double")

    assert NAMES == report.before
    assert_doubled(model, plain)
    with pytest.raises(NameInUseError, match=r"'table\.weight' is in use"):
        map_values(double, loaded(checkpoint, tmp_path / "q"), resume="double")
    assert verify(tmp_path / "q").is_whole
    for name, tensor in offload.load_file(tmp_path / "q").items():
        assert torch.equal(plain.state_dict()[name] * 2, tensor)


def test_several_runs_follow_each_other_and_are_resumed_in_their_order(checkpoint, plain, tmp_path):
    model = loaded(checkpoint, tmp_path / "q")
    map_values(double, model, resume="first")
    with pytest.raises(MapError):
        map_values(StopAt("layer.weight"), model, resume="second", select="*.weight")
    del model
    model, first, second = loaded(checkpoint, tmp_path / "q"), StopAt(), StopAt()

    map_values(first, model, resume="first")
    map_values(second, model, resume="second", select="*.weight")

    assert ["scale"] == first.seen
    assert ["layer.weight"] == second.seen
    assert torch.equal(plain.table.weight * 4, model.table.weight)
    assert torch.equal(plain.layer.weight * 4, model.layer.weight)
    assert torch.equal(plain.layer.bias * 2, model.layer.bias)


def half_done(checkpoint, folder):
    """A model whose run `double` has failed at the last of four values."""
    model = loaded(checkpoint, folder)
    with pytest.raises(MapError):
        map_values(StopAt("layer.bias"), model, resume="double")
    return model


def test_values_of_another_checkpoint_or_in_another_dtype_are_computed_again(checkpoint, plain, tmp_path):
    """Also those of a run over what an earlier one left, if that was not resumed before it."""
    half_done(checkpoint, tmp_path / "q")
    with offload.init_empty_weights():
        halves = Tied().half()
    halves.head.weight = halves.table.weight
    offload.load_checkpoint_and_dispatch(halves, checkpoint, offload_dir=tmp_path / "q")
    assert () == map_values(double, halves, resume="double").before
    assert torch.equal(plain.layer.weight.half() * 2, halves.layer.weight)
    del halves

    save_file({name: tensor + 1 for name, tensor in load_file(checkpoint).items()}, checkpoint)
    model = loaded(checkpoint, tmp_path / "q")
    map_values(double, model, resume="double")
    assert torch.equal((plain.layer.weight + 1) * 2, model.layer.weight)
    map_values(double, model, resume="again")
    del model

    model = loaded(checkpoint, tmp_path / "q")
    assert () == map_values(double, model, resume="again").before
    assert torch.equal((plain.layer.weight + 1) * 2, model.layer.weight)


def test_values_that_a_run_without_a_name_has_changed_are_not_taken_up_again(checkpoint, plain, tmp_path):
    """It may have stopped half-way; in the model that it was called with, the run before it is still done."""
    model = loaded(checkpoint, tmp_path / "q")
    map_values(double, model, resume="double")
    with pytest.raises(MapError):
        map_values(StopAt("layer.weight"), model)
    assert NAMES == map_values(double, model, resume="double").before
    del model

    model = loaded(checkpoint, tmp_path / "q")
    report = map_values(double, model, resume="double")

    assert ("layer.weight", "layer.bias") == report.before
    assert_doubled(model, plain)


@pytest.mark.parametrize("anew", ["loaded", "written to"])
def test_a_value_in_memory_that_is_another_one_since_goes_through_the_function_again(checkpoint, plain, anew):
    model = Tied()
    for _ in range(2):
        offload.load_checkpoint_in_model(model, checkpoint, "cpu")
        assert not map_values(double, model, resume="double").before
        assert NAMES == map_values(double, model, resume="double").before
        if anew == "written to":
            model.load_state_dict(plain.state_dict())
            assert not map_values(double, model, resume="double").before
        assert_doubled(model, plain)


@pytest.mark.parametrize("resume", [True, False, "", 1])
def test_a_run_is_resumed_by_its_name(resume):
    with pytest.raises(TypeError, match=f"resume is the name of a run, as 'first pass', not {resume!r}"):
        map_values(double, {"w": torch.ones(1)}, resume=resume)


def test_a_full_disk_stops_the_run_with_the_error_of_the_value(tmp_path, monkeypatch):
    weights = {name: OffloadedTensor.from_original_tensor(torch.ones(2), name, tmp_path) for name in "abc"}

    def full_at_b(name, tensor):
        if name == "b":
            monkeypatch.setattr(os, "posix_fallocate", refuse)
        return tensor * 2

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WriteError, match=r"tensor 'b'.*could not be written"):
        map_values(full_at_b, weights, resume="double")
    monkeypatch.undo()

    report = map_values(double, weights, resume="double")
    assert (("a",), ("b", "c")) == (report.before, report.replaced)
    assert [2, 2, 2] == [weight[0].item() for weight in weights.values()]
    assert not list(tmp_path.glob(".offload-tmp-*"))


def test_a_killed_run_resumes_and_processes_no_value_twice(private_place):
    """At each call that changes files; replaced values are not passed to the function."""
    folder = private_place
    plain = {name: torch.full((3000,), number + 1.0) for number, name in enumerate("abc")}
    offload.save_checkpoint(plain, folder / "model")

    def load():
        return offload.load_file(folder / "model", offload_dir=folder / "values")

    def begin():
        shutil.rmtree(folder / "values", ignore_errors=True)
        return load()

    def check(_, call):
        tensors, seen = load(), []

        def counted(name, tensor):
            assert torch.equal(plain[name], tensor), name
            seen.append(name)
            return tensor * 2

        report = map_values(counted, tensors, resume="double")
        assert sorted(plain) == sorted([*seen, *report.before])
        for name, value in plain.items():
            assert torch.equal(value * 2, tensors[name].materialize()), (name, call)

    def act(tensors):
        map_values(lambda name, tensor: tensor * 2, tensors, resume="double")

    died_at = killed_at_each(begin, act, check)

    assert {"os.replace", "os.pwrite"} <= {call.name for call in died_at}


# Results beside the original


def test_a_result_stays_on_disk_beside_its_tensor_in_a_file_of_its_own(tmp_path):
    weight = OffloadedTensor.from_original_tensor(torch.arange(6.0).view(2, 3), "w", tmp_path)
    sums = offload.offloaded_like(lambda tensor: tensor.sum(0), weight, "sums")
    turned = offload.offloaded_like(torch.t, weight, "t")  # a view
    weight.mul_(2)

    assert is_offloaded(sums)
    assert ("w.sums", tmp_path / "w.sums.safetensors") == (sums.name, sums.offload_path)
    assert [3, 5, 7] == sums.tolist()
    assert torch.equal(torch.arange(6.0).view(2, 3).t(), turned)


def test_a_plain_tensor_in_gives_a_plain_tensor_out():
    tensor = torch.ones(2, requires_grad=True)
    result = offload.offloaded_like(lambda tensor: tensor * 2, tensor, "double")

    assert type(result) is torch.Tensor
    assert result.requires_grad


def test_results_of_a_referenced_tensor_are_never_written_beside_the_checkpoint(checkpoint, tmp_path):
    before = contents(checkpoint.parent)
    private = OffloadedTensor.from_file(checkpoint, "scale")
    named = OffloadedTensor.from_file(checkpoint, "scale", offload_dir=tmp_path / "q")
    results = [offload.offloaded_like(torch.neg, tensor, "negative") for tensor in (private, named)]

    assert before == contents(checkpoint.parent)
    assert tmp_path / "q" / "scale.negative.safetensors" == results[1].offload_path
    assert results[0].offload_path.parent != checkpoint.parent
