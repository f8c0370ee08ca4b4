"""A model already on disk stays where it is; one held by another library is refused."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import DeviceError, UnsupportedOpError
from offload.tensor.views import handle_of


def files(folder):
    return sorted(path.name for path in folder.iterdir())


NAMES = ["0.bias.safetensors", "0.weight.safetensors"]


def on_disk(folder=None):
    torch.manual_seed(0)
    return offload.disk_offload(nn.Sequential(nn.Linear(2, 3)), folder)


def test_it_stays_where_it_is(tmp_path):
    model = on_disk(tmp_path / "kept")
    handles = [handle_of(parameter) for parameter in model.parameters()]

    for folder in (None, tmp_path / "kept", tmp_path / "other"):
        offload.disk_offload(model, folder)

        assert [handle_of(parameter) for parameter in model.parameters()] == handles


def test_a_model_that_compressed_tensors_holds_is_refused_until_it_lets_go(tmp_path):
    held = pytest.importorskip("compressed_tensors.offload")
    model = nn.Sequential(nn.Linear(2, 3))
    held.set_onload_device(model, "cpu")

    with pytest.raises(UnsupportedOpError, match=r"compressed_tensors\.offload\.remove_dispatch"):
        offload.disk_offload(model, tmp_path / "kept")
    held.remove_dispatch(model, True)

    assert offload.is_offloaded(offload.disk_offload(model, tmp_path / "kept")[0].weight)
    assert files(tmp_path / "kept") == NAMES


def test_hooks_of_parameters_are_kept():
    """An optimizer's in backward, for example; their handles still remove them."""
    model, called = nn.Linear(2, 3), []
    before = model.weight.register_hook(lambda grad: called.append("grad"))
    model.weight.register_post_accumulate_grad_hook(lambda weight: called.append(weight is model.weight))
    offload.disk_offload(model)(torch.ones(2)).sum().backward()
    before.remove()
    model(torch.ones(2)).sum().backward()

    assert ["grad", True, True] == called


def test_nothing_on_disk_is_computed_on_the_meta_device():
    """It would not be a meta tensor, and ops on it would give nothing."""
    for make in (
        lambda: OffloadedTensor.empty(2, name="w", device="meta"),
        lambda: OffloadedTensor.full((2,), 1.0, name="w", device="meta"),
        lambda: offload.disk_offload(nn.Linear(2, 3), execution_device="meta"),
    ):
        with pytest.raises(DeviceError, match="ops can't run on 'meta': use one of cpu"):
            make()


class Saved(nn.Linear):
    def save_pretrained(self, path, **options):
        path.mkdir(exist_ok=True)
        (path / "mark").write_text(self.mark, encoding="utf-8")


def test_a_shallow_copy_saves_itself(tmp_path):
    model = offload.disk_offload(Saved(2, 3))
    shallow = copy.copy(model)
    model.mark, shallow.mark = "one", "other"
    shallow.save_pretrained(tmp_path / "other")
    model.save_pretrained(path=tmp_path / "one")

    for mark in ("one", "other"):
        assert mark == (tmp_path / mark / "mark").read_text(encoding="utf-8")


def test_a_model_that_saves_from_disk_is_still_of_its_class():
    """Others look classes up in tables, and pickles are read without `offload`."""
    model = offload.disk_offload(Saved(2, 3))

    for one in (model, offload.disk_offload(model), copy.copy(model), copy.deepcopy(model)):
        assert Saved is one.__class__
        assert type(one) is type(model)
    assert Saved is type(pickle.loads(pickle.dumps(model)))
    for name in ("__name__", "__module__", "__qualname__"):
        assert getattr(Saved, name) == getattr(type(model), name)
    assert inspect.signature(Saved.save_pretrained) == inspect.signature(type(model).save_pretrained)


def test_a_model_that_is_parametrized_and_not_any_more_still_looks_before_it_saves(tmp_path):
    """torch gives it another class, and then the old one."""
    model = offload.disk_offload(Saved(2, 3))
    kind = type(model)

    nn.utils.parametrizations.orthogonal(model)
    assert "ParametrizedSaved" == model.__class__.__name__
    nn.utils.parametrize.remove_parametrizations(model, "weight")

    assert type(model) is kind
