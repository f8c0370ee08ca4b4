"""Deferred tensors may be written to: they then become files of their own."""

from __future__ import annotations

import pytest
import torch
from conftest import contents
from safetensors.torch import save_file

import offload
from offload.errors import UnsupportedOpError
from offload.tensor import recipes
from offload.tensor.deferred import DeferredTensor, deferred


@pytest.fixture
def numbers():
    return torch.arange(12, dtype=torch.float32).view(3, 4)


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
    return (
        made if isinstance(made, DeferredTensor) else deferred(offload.OffloadedTensor.from_original_tensor(made, "m"))
    )


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
    def written(tensor):
        part(tensor).fill_(7)
        return [tensor]

    return written


WRITES = {
    "seen by all tensors over it": seen_by_all,
    "not seen by copies": kept_by_copies,
    "not seen by a clone": kept_by(torch.clone),
    "not seen by a cast": kept_by(torch.Tensor.double),
    "not seen by a cat": kept_by(lambda one: torch.cat([one, one])),
    "not seen by a stack": kept_by(lambda one: torch.stack([one, one])),
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


# Setting rows to a number


def set_by_item(rows, number):
    rows[...] = number


SETTINGS = {
    "an item": set_by_item,
    "fill_": torch.Tensor.fill_,
    "fill_ with a tensor": lambda rows, number: rows.fill_(torch.tensor(number)),
    "copy_": lambda rows, number: rows.copy_(torch.tensor(number)),
    "zero_": lambda rows, number: rows.zero_(),
}


@pytest.mark.parametrize("rows", [0, -1, slice(1, 3), slice(None)], ids=str)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("way", [way for name, way in WAYS.items() if name != "computed"])  # which is in our file
@torch.no_grad()
def test_rows_are_set_to_a_number_and_nothing_is_written(way, setting, rows, stored, numbers, tmp_path, private_place):
    """They become part of the recipe, even with a named folder; views see them, copies made before do not."""
    plain = way(numbers.clone(), numbers + 100).clone()
    copied, tensor = plain.clone(), one_of(way, stored)
    before, view, parameter = tensor.clone(), tensor[1:], torch.nn.Parameter(tensor)

    for one in (plain, parameter):
        setting(one[rows], -1.0 / 3)

    for expected, found in ((plain, tensor), (plain[1:], view), (copied, before), (plain, parameter)):
        assert torch.equal(expected, found.materialize())
    assert torch.equal(plain, tensor.stored("x", tmp_path / "values").materialize())
    assert {} == contents(private_place)
    assert not (tmp_path / "values").exists()


@torch.no_grad()
def test_many_rows_may_be_set_one_by_one(tmp_path):
    save_file({"w": torch.rand(64, 3)}, tmp_path / "model.safetensors")
    tensor = deferred(offload.load_file(tmp_path / "model.safetensors")["w"])
    expected = tensor.materialize().clone()
    for row in range(40):
        for one in (expected, tensor):
            one[row] = float(row)

    assert torch.equal(expected, tensor.materialize())


@torch.no_grad()
def test_rows_of_a_written_value_go_to_the_named_folder(stored, numbers, tmp_path):
    """A value in a private folder would be removed with it."""
    tensor = deferred(stored["w"])
    tensor.mul_(2)
    copied = tensor.clone()
    tensor[0] = 5.0

    value = tensor.stored("x", tmp_path / "values")

    assert (tmp_path / "values" / "x.safetensors") == value.offload_path
    assert [[5.0] * 4, *(numbers * 2).tolist()[1:]] == value.tolist()
    assert torch.equal(numbers * 2, copied.materialize())


@torch.no_grad()
def test_a_number_that_the_dtype_can_not_hold_is_refused_at_once(stored, numbers):
    tensor = deferred(stored["w"])

    with pytest.raises(RuntimeError, match="without overflow"):
        tensor[0].fill_(1e300)

    assert torch.equal(numbers, tensor.materialize())


@torch.no_grad()
def test_a_row_of_a_table_in_which_one_was_set_is_looked_up_alone(tmp_path, monkeypatch):
    """The others are not read, and no memory is allocated for them."""
    table = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    save_file({"w": table}, tmp_path / "model.safetensors")
    tensor = deferred(offload.load_file(tmp_path / "model.safetensors")["w"])
    tensor[3] = 0.0
    value = tensor.stored("x")
    made, scratch_for = [], recipes.scratch_for
    monkeypatch.setattr(
        recipes, "scratch_for", lambda layout, device: made.append(layout.nbytes) or scratch_for(layout, device)
    )

    found = torch.nn.functional.embedding(torch.tensor([3, 4, 1023, 3]), value)

    table[3] = 0.0
    assert torch.equal(table[[3, 4, 1023, 3]], found)
    assert [] == made


@pytest.mark.parametrize(("name", "class_name"), [("zaya", "ZayaForCausalLM"), ("chinese_clip", "ChineseCLIPModel")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_may_set_some_of_its_values_while_it_is_loaded(name, class_name, dtype, tmp_path, private_place):
    """Their `_init_weights` do so even for values in the checkpoint; that writes nothing."""
    import transformers

    from bench.architectures import prepared

    model_class = getattr(transformers, class_name)
    folder = prepared(name, class_name, tmp_path).folder
    plain = model_class.from_pretrained(folder, dtype=dtype)

    model = offload.from_pretrained(folder, model_class=model_class, dtype=dtype)

    theirs, ours = plain.state_dict(), model.state_dict()
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], offload.materialize(ours[name])) for name in theirs)
    assert all(map(offload.is_offloaded, model.parameters()))
    assert {} == contents(private_place)
