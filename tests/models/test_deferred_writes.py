"""What is still to be put together may be written to: it is a file of its own from then on."""

from __future__ import annotations

import pytest
import torch
from conftest import contents
from safetensors.torch import save_file

import offload
from offload.errors import UnsupportedOpError
from offload.models.deferred import DeferredTensor, deferred
from offload.tensor import rules


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


# How a deferred tensor comes about, from two of a checkpoint; the same with plain ones.
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


@torch.no_grad()
def test_a_write_to_a_part_is_a_write_to_the_whole(way, stored, numbers):
    plain, tensor = way(numbers, numbers + 100), one_of(way, stored)

    for one in (plain, tensor):
        one[-1] = -1.0

    assert torch.equal(plain, tensor.materialize())
    assert torch.equal(plain, tensor.stored("x").materialize())


@torch.no_grad()
def test_all_that_share_the_values_see_it_whenever_they_were_made(way, stored, numbers):
    def written(tensor):
        earlier = [torch.nn.Parameter(tensor), tensor.detach(), tensor[0], tensor.t() if tensor.dim() == 2 else tensor]
        tensor[0].mul_(3)
        return [*earlier, tensor[..., 1:3]]

    plain, ours = written(way(numbers.clone(), numbers + 100)), written(one_of(way, stored))

    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found.materialize())


@torch.no_grad()
def test_what_was_copied_before_keeps_its_values_and_what_is_copied_after_has_the_new(way, stored, numbers):
    def written(tensor):
        copies = [tensor.clone(), tensor.double(), torch.cat([tensor, tensor])]
        tensor.fill_(7)
        copies += [tensor.clone(), tensor.double(), torch.stack([tensor, tensor])]
        tensor.add_(1)
        copies[0].zero_()
        copies[3].sub_(5)
        return [*copies, tensor]

    plain, ours = written(way(numbers.clone(), numbers + 100)), written(one_of(way, stored))

    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found.materialize())


@pytest.mark.parametrize(
    "copy",
    [torch.clone, torch.Tensor.double, lambda one: torch.cat([one, one]), lambda one: torch.stack([one, one])],
    ids=["clone", "double", "cat", "stack"],
)
@torch.no_grad()
def test_a_copy_of_what_was_written_stays_when_that_is_written_again(way, stored, numbers, copy):
    def written(tensor):
        tensor.fill_(7)
        copied = copy(tensor)
        tensor.add_(1)
        return copied, tensor

    plain, ours = written(way(numbers.clone(), numbers + 100)), written(one_of(way, stored))

    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found.materialize())


@torch.no_grad()
def test_the_checkpoint_is_not_written_to(way, checkpoint, stored):
    before = contents(checkpoint)
    tensor = one_of(way, stored)

    tensor.zero_()

    assert before == contents(checkpoint)
    assert torch.equal(torch.zeros(tensor.shape, dtype=tensor.dtype), tensor.materialize())
    assert stored["w"].materialize().any()


@torch.no_grad()
def test_in_a_named_folder_it_has_its_own_name(way, stored, tmp_path):
    tensor = one_of(way, stored)
    tensor.zero_()

    value = tensor.stored("x", tmp_path / "values")

    assert (tmp_path / "values" / "x.safetensors") == value.offload_path
    assert not value.materialize().any()


@torch.no_grad()
def test_the_written_tensor_is_what_an_op_gives_back(stored):
    tensor = deferred(stored["w"])

    assert tensor.add_(1) is tensor
    assert torch.add(tensor, 1, out=tensor) is tensor
    assert torch.ops.aten.add_.Scalar(tensor, 1) is tensor


@torch.no_grad()
def test_its_shape_can_not_be_written(stored):
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


@torch.no_grad()
def test_what_is_cut_in_many_is_cut_once(stored, numbers, monkeypatch):
    """A stack of experts: not once for each of them."""
    cut = []
    view_of = rules.view_of
    monkeypatch.setattr(rules, "view_of", lambda *args: cut.append(args) or view_of(*args))

    pieces = [piece.detach() for piece in deferred(stored["w"]).unbind(1)]
    values = [piece.materialize() for piece in pieces]

    assert all(map(torch.equal, numbers.unbind(1), values))
    assert 4 == len(cut)


def test_data_of_another_kind_is_refused(stored, numbers):
    tensor = deferred(stored["w"])

    for other in (numbers.t(), numbers.double(), numbers[0]):
        with pytest.raises(UnsupportedOpError, match="its data can't become"):
            tensor.data = other
    assert torch.equal(numbers, tensor.materialize())


def test_a_model_that_sets_some_of_its_values_while_it_is_loaded(tmp_path):
    """zaya's `_init_weights` does so also where the checkpoint has them; here cast besides."""
    from transformers import ZayaForCausalLM

    from bench.architectures import prepared

    folder = prepared("zaya", "ZayaForCausalLM", tmp_path).folder
    plain = ZayaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    model = offload.from_pretrained(folder, dtype=torch.bfloat16)

    theirs, ours = plain.state_dict(), model.state_dict()
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], offload.materialize(ours[name])) for name in theirs)
    assert all(map(offload.is_offloaded, model.parameters()))
