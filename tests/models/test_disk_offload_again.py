"""A model already on disk moves to a newly named folder; one held by another library is refused."""

import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import DeviceError, UnsupportedOpError
from offload.prefetch.value import page_state_of
from offload.tensor.views import handle_of


def files(folder):
    return sorted(path.name for path in folder.iterdir())


NAMES = ["0.bias.safetensors", "0.weight.safetensors"]


def on_disk(folder=None):
    torch.manual_seed(0)
    return offload.disk_offload(nn.Sequential(nn.Linear(2, 3)), folder)


@pytest.mark.parametrize("was_named", [True, False])
def test_the_values_of_a_model_on_disk_go_to_the_folder_that_is_named(was_named, tmp_path):
    model = on_disk(tmp_path / "before" if was_named else None)
    expected = {name: value.materialize() for name, value in model.state_dict().items()}
    offload.disk_offload(model, tmp_path / "kept")

    assert files(tmp_path / "kept") == NAMES
    assert {parameter.offload_dir for parameter in model.parameters()} == {tmp_path / "kept"}
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters())
    del model
    found = offload.load_file(tmp_path / "kept")
    assert all(torch.equal(expected[name], found[name].materialize()) for name in expected)
    assert not was_named or files(tmp_path / "before") == NAMES


def test_without_another_folder_it_stays_where_it_is(tmp_path):
    """A link to its folder is its folder."""
    model = on_disk(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    handles = [handle_of(parameter) for parameter in model.parameters()]

    for folder in (None, tmp_path / "kept", tmp_path / "link"):
        offload.disk_offload(model, folder)

        assert [handle_of(parameter) for parameter in model.parameters()] == handles


def test_parameters_over_one_file_still_share_it_after_a_move(tmp_path):
    model = on_disk()
    model.other = nn.Linear(2, 3, bias=False)
    model.other.weight = nn.Parameter(model[0].weight.detach())
    offload.disk_offload(model, tmp_path / "kept")
    with torch.no_grad():
        model[0].weight.zero_()

    assert not model.other.weight.any()
    assert files(tmp_path / "kept") == NAMES


def test_a_part_of_a_value_is_moved_as_a_separate_value(tmp_path):
    both = OffloadedTensor.from_original_tensor(torch.arange(6.0).view(3, 2), "both")
    model = nn.Linear(2, 1, bias=False)
    model.weight = nn.Parameter(both[1:2])
    offload.disk_offload(model, tmp_path / "kept")

    assert offload.load_file(tmp_path / "kept")["weight"].tolist() == [[2.0, 3.0]]


def test_a_referenced_value_is_not_copied_and_its_first_write_goes_to_the_folder(tmp_path):
    plain = nn.Sequential(nn.Linear(2, 3))
    offload.save_checkpoint(plain, tmp_path / "saved")
    model = offload.load_checkpoint_and_dispatch(nn.Sequential(nn.Linear(2, 3)), tmp_path / "saved")

    offload.disk_offload(model, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    with torch.no_grad():
        model[0].weight.zero_()

    assert files(tmp_path / "kept") == ["0.weight.safetensors"]
    assert torch.equal(plain[0].bias, model[0].bias.materialize())


def test_the_budget_of_a_model_is_kept(tmp_path):
    offload.save_checkpoint(nn.Sequential(nn.Linear(2, 3)), tmp_path / "saved")
    model = offload.load_checkpoint_and_dispatch(nn.Sequential(nn.Linear(2, 3)), tmp_path / "saved", max_memory="8MiB")
    pool = page_state_of(handle_of(model[0].weight)).pool
    offload.disk_offload(model, tmp_path / "kept")

    assert pool is not None
    assert page_state_of(handle_of(model[0].weight)).pool is pool


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


def test_the_models_of_a_pipeline_go_to_disk_each_to_its_own_folder(tmp_path):
    """As of diffusers, whose pipelines are no modules and have `components`."""
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    expected = [part.weight.detach().clone() for part in (one, other)]
    pipeline = SimpleNamespace(components={"unet": one, "vae": other, "scheduler": object(), "safety_checker": None})

    assert pipeline is offload.disk_offload(pipeline, tmp_path)

    assert [tmp_path / "unet", tmp_path / "vae"] == [part.weight.offload_path.parent for part in (one, other)]
    assert all(map(torch.equal, expected, [part.weight.materialize() for part in (one, other)]))
