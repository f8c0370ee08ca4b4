"""Deferred tensors: recorded ops, and writes, give the same results as torch on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import contents
from safetensors.torch import load_file, save_file

import offload
from offload.errors import ForeignFileError, UnsupportedOpError, WriteError
from offload.models.values import source_of
from offload.tensor.deferred import DeferredTensor, deferred
from offload.tensor.recipes import Joined
from offload.tensor.saved import files_of

EXPERTS, INNER, WIDTH = 4, 6, 5
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def plain() -> Tensors:
    torch.manual_seed(0)
    return {f"{name}{expert}": torch.randn(INNER, WIDTH) for expert in range(EXPERTS) for name in ("gate", "up")}


@pytest.fixture
def file(tmp_path: Path, plain: Tensors) -> Path:
    save_file(plain, tmp_path / "checkpoint.safetensors")
    return tmp_path / "checkpoint.safetensors"


@pytest.fixture
def waiting(file: Path) -> Tensors:
    return {name: deferred(tensor) for name, tensor in offload.load_file(file).items()}


def fused(tensors: Tensors) -> torch.Tensor:
    gate = torch.stack([tensors[f"gate{expert}"] for expert in range(EXPERTS)], dim=0)
    up = torch.stack([tensors[f"up{expert}"] for expert in range(EXPERTS)], dim=0)
    return torch.cat([gate, up], dim=1)  # (experts, 2 * inner, width)


RECORDED: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "as it is": lambda t: t["gate0"],
    "all of it": lambda t: t["gate0"][...].to(device="cpu", dtype=torch.float32),
    "cast": lambda t: t["gate0"].to(torch.bfloat16),
    "cast twice": lambda t: t["gate0"].to(torch.bfloat16).to(torch.float32),
    "fused": fused,
    "fused and cast": lambda t: fused({name: tensor.to(torch.float16) for name, tensor in t.items()}),
    "stacked at the end": lambda t: torch.stack([t["gate0"], t["up0"]], dim=-1),
    "joined at the end": lambda t: torch.cat([t["gate0"], t["up0"]], dim=-1),
    "widened and back": lambda t: t["gate0"].double().float(),
    "some columns": lambda t: t["gate0"][:, 1:3],
    "every other row": lambda t: t["gate0"][::2],
    "a diagonal": lambda t: t["gate0"].diagonal(),
    "transposed": lambda t: t["gate0"].t(),
    "transposed and copied": lambda t: fused(t).transpose(1, 2).contiguous(),
    "a chunk": lambda t: t["gate0"].chunk(2)[1].contiguous(),
    "fused and taken apart": lambda t: fused(t).chunk(2, dim=1)[1].contiguous().chunk(EXPERTS, dim=0)[2].squeeze(0),
    "stacked, in another order of memory, and cast": lambda t: (
        torch.stack([torch.stack([t[f"{name}0"], t[f"{name}1"]]) for name in ("gate", "up")])
        .clone(memory_format=torch.channels_last)
        .to(torch.float16)
    ),
    "reshaped": lambda t: fused(t).transpose(0, 1).reshape(-1, WIDTH),
    "viewed with other sizes": lambda t: t["gate0"].view(3, 2, WIDTH).transpose(0, 1).reshape(INNER, WIDTH),
    "cut after a cast": lambda t: t["gate0"].to(torch.float64).view(-1)[3:7],
    "made contiguous and viewed": lambda t: t["gate0"].t().contiguous().view(-1)[1:],
    "cast and viewed as integers": lambda t: t["gate0"].to(torch.bfloat16).view(torch.int16),
    "of another dtype": lambda t: torch.cat([t["gate0"], t["up0"].double()]),
    "with a plain one": lambda t: torch.cat([t["gate0"], torch.ones(1, WIDTH)]),
    "with nothing": lambda t: torch.cat([t["gate0"], torch.empty(0)]),
    "nothing": lambda t: torch.cat([t["gate0"][:0], t["up0"][:0]]),
    "a number": lambda t: t["gate0"][1, 2],
    "a parameter": lambda t: torch.nn.Parameter(fused(t)).detach(),
    "padded by nothing": lambda t: torch.nn.functional.pad(fused(t), (0, 0)),
    "padded": lambda t: torch.nn.functional.pad(fused(t), (1, 2), value=3.0),
    "zeros of its shape": lambda t: torch.zeros_like(t["gate0"].t()),
    "ones of its shape": lambda t: torch.ones_like(fused(t), dtype=torch.float64),
    "computed": lambda t: torch.as_tensor((t["gate0"] * 2 + t["up0"]).sum(0)),
}


@pytest.mark.parametrize("made", RECORDED.values(), ids=RECORDED.keys())
@torch.no_grad()
def test_recorded_ops_give_the_values_that_torch_gives(
    made: Callable[[Tensors], torch.Tensor], plain: Tensors, waiting: Tensors
) -> None:
    expected = made(plain)

    result = made(waiting)

    assert (expected.shape, expected.dtype) == (result.shape, result.dtype)
    if isinstance(result, DeferredTensor):
        assert expected.is_contiguous() == result.is_contiguous()
        stored = result.stored("result")
        assert offload.is_offloaded(stored)
        assert torch.equal(expected, stored.materialize())
        assert torch.equal(expected, result.materialize())
        assert torch.equal(expected, result.alone())
    else:
        assert torch.equal(expected, result)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda t: t["gate0"][...].detach(), "gate0"),
        (lambda t: t["gate0"].double().float(), "gate0"),
        (fused, "experts.gate_up"),
    ],
    ids=["unchanged", "cast there and back", "fused"],
)
def test_assembling_writes_nothing(
    make: Callable[[Tensors], torch.Tensor], name: str, waiting: Tensors, plain: Tensors, file: Path, tmp_path: Path
) -> None:
    """What is stored as it is stays the value that it is."""
    before = contents(tmp_path)

    stored = make(waiting).stored("experts.gate_up", tmp_path / "offload")  # type: ignore[attr-defined]

    assert torch.equal(make(plain), stored.materialize())
    assert (file, name) == (stored.offload_path, stored.name)
    assert before == contents(tmp_path)


@torch.no_grad()
def test_an_assembled_value_that_is_written_to_gets_its_name_and_folder(
    waiting: Tensors, plain: Tensors, tmp_path: Path
) -> None:
    folder, expected = tmp_path / "offload", fused(plain)
    stored = fused(waiting).stored("experts.gate_up", folder)  # type: ignore[attr-defined]

    for tensor in (stored, expected):
        tensor[2, 3] = 7

    assert ["experts.gate_up.safetensors"] == [path.name for path in folder.iterdir()]
    assert folder / "experts.gate_up.safetensors" == stored.offload_path
    assert torch.equal(expected, load_file(stored.offload_path)["experts.gate_up"])
    assert torch.equal(fused(plain), fused(waiting).stored("another").materialize())  # type: ignore[attr-defined]


def test_a_part_of_a_value_gets_a_file_of_its_own_at_its_first_write(
    waiting: Tensors, plain: Tensors, file: Path
) -> None:
    stored = waiting["gate0"].chunk(2)[1].stored("half")  # type: ignore[attr-defined]

    assert file == stored.offload_path
    stored.update_values(stored.materialize() + 1)
    assert file != stored.offload_path
    assert torch.equal(plain["gate0"].chunk(2)[1] + 1, stored.materialize())
    assert torch.equal(plain["gate0"], load_file(file)["gate0"])


@pytest.mark.parametrize("block", [4, 20, 300])
@torch.no_grad()
def test_blocks_are_smaller_than_the_value(
    monkeypatch: pytest.MonkeyPatch, waiting: Tensors, plain: Tensors, block: int
) -> None:
    """Even if a row is larger than a block, or parts begin inside one."""
    monkeypatch.setattr("offload.tensor.recipes._WRITTEN", block)

    for make in (RECORDED["fused and cast"], RECORDED["joined at the end"], RECORDED["transposed and copied"]):
        expected, stored = make(plain), make(waiting).stored("value")  # type: ignore[attr-defined]
        for tensor in (expected, stored):
            tensor[0, 0] = 1
        assert torch.equal(expected, stored.materialize())


def test_large_results_are_on_disk_again(monkeypatch: pytest.MonkeyPatch, waiting: Tensors, plain: Tensors) -> None:
    monkeypatch.setattr("offload.tensor.deferred._BIG", 64)

    doubled = waiting["gate0"] * 2

    assert isinstance(doubled, DeferredTensor)
    assert torch.equal(plain["gate0"] * 2, doubled.stored("doubled").materialize())


@pytest.mark.parametrize("name", ["padded by nothing", "zeros of its shape", "ones of its shape"])
def test_ops_that_need_no_values_write_nothing(
    monkeypatch: pytest.MonkeyPatch, waiting: Tensors, private_place: Path, name: str
) -> None:
    monkeypatch.setattr("offload.tensor.deferred._BIG", 0)

    result = RECORDED[name](waiting)

    assert {} == contents(private_place)
    assert isinstance(result, DeferredTensor) == name.startswith("padded")


def test_moving_a_deferred_tensor_to_another_device_computes_it(waiting: Tensors, plain: Tensors) -> None:
    assert "meta" == fused(waiting).to("meta").device.type
    assert fused(plain).shape == fused(waiting).to("meta").shape


@pytest.mark.usefixtures("nothing_small")
def test_a_failure_midway_leaves_no_file(monkeypatch: pytest.MonkeyPatch, waiting: Tensors, tmp_path: Path) -> None:
    folder, real = tmp_path / "offload", Joined._in_box
    stored = RECORDED["fused and cast"](waiting).stored("experts", folder)  # type: ignore[attr-defined]
    expected, calls = stored.materialize(), []

    def full(*args: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("offload.tensor.recipes._WRITTEN", 100)
    monkeypatch.setattr(Joined, "_in_box", full)

    with pytest.raises(WriteError, match="No space left"), torch.no_grad():
        stored.zero_()

    monkeypatch.undo()
    assert [] == list(folder.iterdir())
    assert torch.equal(expected, stored.materialize())


def test_a_plain_part_keeps_the_value_it_had_when_it_was_joined(waiting: Tensors, plain: Tensors) -> None:
    ones = torch.ones(1, WIDTH)

    joined = torch.cat([waiting["gate0"], ones])
    ones.zero_()

    assert torch.equal(torch.cat([plain["gate0"], torch.ones(1, WIDTH)]), joined.stored("x").materialize())  # type: ignore[attr-defined]


@pytest.mark.parametrize("dim", [3, -4])
def test_an_unknown_dimension_is_an_error(waiting: Tensors, dim: int) -> None:
    for join in (torch.stack, torch.cat):
        with pytest.raises(IndexError, match="Dimension out of range"):
            join([waiting["gate0"], waiting["up0"]], dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_of_an_own_file_replaces_it_in_its_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randn(3, 4)
    offload.OffloadedTensor.from_original_tensor(value, "w", tmp_path)
    opened = offload.load_file(tmp_path, offload_dir=tmp_path)["w"]

    stored = deferred(opened).to(dtype).stored("w", tmp_path)  # type: ignore[attr-defined]

    assert ["w.safetensors"] == [path.name for path in tmp_path.iterdir()]
    assert torch.equal(value.to(dtype), stored.materialize())
    assert torch.equal(value.to(dtype), load_file(tmp_path / "w.safetensors")["w"])


def test_a_recipe_over_two_files_names_both(tmp_path: Path) -> None:
    """Saving over either is refused, a run records the state of both, and an error names the missing one."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        offload.save_checkpoint({"w": torch.ones(2, 3)}, folder)
    joined = torch.cat([deferred(offload.load_file(folder)["w"]) for folder in (first, second)]).stored("joined")
    files = [folder / "model.safetensors" for folder in (first, second)]

    slots = {"joined": joined}
    noted = source_of(joined)
    for folder in (first, second):
        with pytest.raises(ForeignFileError, match=f"refer to {folder}"):
            offload.save_checkpoint(slots, folder)
    files[1].unlink()

    assert files == files_of(joined)
    assert noted is not None
    assert 2 == noted.count("model.safetensors (")
    assert str(files[1]) in repr(joined)


# Writes: deferred tensors become files of their own


@pytest.fixture
def numbers():
    return torch.arange(12.0).view(3, 4)


@pytest.fixture
def checkpoint(numbers, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"w": numbers, "v": numbers + 100}, folder / "model.safetensors")
    return folder


@pytest.fixture
def stored(checkpoint):
    return offload.load_file(checkpoint / "model.safetensors")


# Ways to make a deferred tensor from two tensors of a checkpoint, and the same from plain ones.
WAYS = {
    "as it is": lambda w, v: w,
    "cast": lambda w, v: w.to(torch.float16),
    "joined": lambda w, v: torch.cat([w, v]),
    "stacked": lambda w, v: torch.stack([w, v]),
    "a copy": lambda w, v: w.clone(),
    "another stride": lambda w, v: w.t().contiguous(),
    "computed": lambda w, v: w + v,
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def one_of(way, stored):
    made = way(*(deferred(stored[name]) for name in "wv"))
    return deferred(offload.OffloadedTensor.from_original_tensor(made, "m")) if type(made) is torch.Tensor else made


def seen_by_all(tensor):
    earlier = [torch.nn.Parameter(tensor), tensor.detach(), tensor[0], tensor.t() if tensor.dim() == 2 else tensor]
    tensor[0].mul_(3)
    tensor[-1] = -1.0
    return [*earlier, tensor[..., 1:3]]


def kept_by_copies(tensor):
    copies = [tensor.clone(), tensor.double(), torch.cat([tensor, tensor])]
    tensor.fill_(7)
    copies += [tensor.clone(), tensor.double(), torch.stack([tensor, tensor])]
    tensor.add_(1)
    copies[0].zero_()
    copies[3].sub_(5)
    return [*copies, tensor]


def kept_by(copy):
    """By the only copy of a written value."""

    def written(tensor):
        tensor.fill_(7)
        copied = copy(tensor)
        tensor.add_(1)
        return copied, tensor

    return written


def written_again(tensor):
    """After rows were set."""
    tensor[0] = 5.0
    tensor[0:2].fill_(7)
    copied = tensor.clone()
    tensor[-1].add_(1)
    tensor[1] = 9.0
    return tensor, copied


def filled(part):
    return lambda tensor: (part(tensor).fill_(7), tensor)[1:]


WRITES = {
    "seen by all tensors over it": seen_by_all,
    "not seen by copies": kept_by_copies,
    "not seen by a clone": kept_by(torch.clone),
    "not seen by a cast": kept_by(torch.Tensor.double),
    "not seen by a cat": kept_by(lambda one: torch.cat([one, one])),
    "not seen by a stack": kept_by(lambda one: torch.stack([one, one])),
    "not seen by a product": kept_by(lambda one: one * 2),
    "to rows that were set": written_again,
    "to a column": filled(lambda one: one[:, 1]),
    "to a transposed row": filled(lambda one: one.transpose(0, 1)[2]),
    "to a part of a row": filled(lambda one: one[1, 1:3]),
    "to parts of rows": filled(lambda one: one[:2, :2]),
    "to a row as integers": filled(lambda one: one[-1].view(torch.int32)),
}


@pytest.mark.parametrize("written", WRITES.values(), ids=WRITES)
@torch.no_grad()
def test_a_write_has_the_effect_that_it_has_on_a_plain_tensor(way, stored, numbers, written):
    plain, ours = written(way(numbers.clone(), numbers + 100)), written(one_of(way, stored))

    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found.materialize())
        assert torch.equal(expected, found.detach().stored("x").materialize())


@torch.no_grad()
def test_a_written_value_has_its_own_name_in_a_named_folder_and_the_checkpoint_stays(way, checkpoint, stored, tmp_path):
    before, tensor = contents(checkpoint), one_of(way, stored)
    tensor.mul_(0)

    value = tensor.stored("x", tmp_path / "values")

    assert (tmp_path / "values" / "x.safetensors") == value.offload_path
    assert torch.equal(torch.zeros(tensor.shape, dtype=tensor.dtype), value.materialize())
    assert before == contents(checkpoint)
    assert stored["w"].materialize().any()


@torch.no_grad()
def test_an_inplace_op_returns_the_written_tensor(stored):
    tensor = deferred(stored["w"])

    assert tensor.add_(1) is tensor
    assert torch.add(tensor, 1, out=tensor) is tensor
    assert torch.ops.aten.add_.Scalar(tensor, 1) is tensor


@torch.no_grad()
def test_the_shape_of_a_deferred_tensor_can_not_be_changed(stored):
    tensor = deferred(stored["w"])

    for change in (torch.Tensor.t_, lambda tensor: tensor.resize_(2, 2), torch.Tensor.squeeze_):
        with pytest.raises(UnsupportedOpError, match="shape"):
            change(tensor)


@torch.no_grad()
def test_data_can_be_written_and_replaced(way, stored, numbers):
    def written(tensor, others):
        parameter = torch.nn.Parameter(tensor)
        earlier = parameter.detach()
        parameter.data[0] = 5
        parameter.data = others[0]
        parameter.data.add_(1)
        then = parameter.clone()
        parameter.data = others[1]
        return [earlier, then, parameter, *others]

    plain = way(numbers.clone(), numbers + 100)
    tensor = one_of(way, stored)
    plain_others = [torch.full_like(plain, 8), torch.full_like(plain, 9)]
    others = [plain_others[0].clone(), offload.OffloadedTensor.from_original_tensor(plain_others[1], "9")]

    expected, found = written(plain, plain_others), written(tensor, others)
    for one, other in zip(expected[:3], found[:3], strict=True):
        assert torch.equal(one, other.materialize())
    assert torch.equal(torch.full_like(plain, 9), found[4].materialize())


def test_data_of_another_kind_is_refused(stored, numbers):
    tensor = deferred(stored["w"])

    for other in (numbers.t(), numbers.double(), numbers[0]):
        with pytest.raises(UnsupportedOpError, match="its data can't become"):
            tensor.data = other
    assert torch.equal(numbers, tensor.materialize())
