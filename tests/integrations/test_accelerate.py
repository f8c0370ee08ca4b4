"""Taking over models that accelerate dispatched; and models on disk passed to accelerate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict, set_module_tensor_to_device
from conftest import contents
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import offload
from offload.errors import (
    CorruptFileError,
    DeviceMapError,
    MetaTensorError,
    MissingFileError,
    ShapeMismatchError,
    UnsupportedOpError,
)
from offload.models.hooks import held_values, release
from tests.processes import run_script


class Net(nn.Module):
    """Two linear layers in a list, a norm with running statistics, and a buffer that is not in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((1,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linears[1](self.norm(self.linears[0](x))) * self.scale


class Tied(Net):
    """Its linear layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linears[1].weight = self.linears[0].weight


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    made = kind().eval()
    made.norm.running_mean.normal_()
    made.norm.weight.requires_grad_(False)
    return made


def by_hooks_alone(model: Net, folder: Path) -> None:
    attach_align_device_hook(model, execution_device="cpu", offload=True)


def to_memory(model: Net, folder: Path) -> None:
    accelerate.cpu_offload(model)


def to_memory_with_buffers(model: Net, folder: Path) -> None:
    accelerate.cpu_offload(model, offload_buffers=True)


def to_memory_by_blocks(model: Net, folder: Path) -> None:
    accelerate.cpu_offload(model, preload_module_classes=["ModuleList", "Net", "Tied"])


def to_disk(model: Net, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder))


def to_disk_with_buffers(model: Net, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder), offload_buffers=True)


def by_a_map(model: Net, folder: Path) -> None:
    accelerate.dispatch_model(model, {"linears": "disk", "norm": "disk"}, offload_dir=str(folder))


def by_a_mixed_map(model: Net, folder: Path) -> None:
    device_map = {"linears.0": "cpu", "norm": "cpu", "linears.1": "disk"}
    accelerate.dispatch_model(model, device_map, offload_dir=str(folder), offload_buffers=True)


def from_a_checkpoint(model: Net, folder: Path) -> None:
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.bin")
    device_map = {"linears": "disk", "norm": "cpu"}
    accelerate.load_checkpoint_and_dispatch(
        model, str(folder / "model.bin"), device_map, offload_folder=str(folder / "dat")
    )


WAYS = [
    by_hooks_alone,
    to_memory,
    to_memory_with_buffers,
    to_memory_by_blocks,
    to_disk,
    to_disk_with_buffers,
    by_a_map,
    by_a_mixed_map,
    from_a_checkpoint,
]
Dispatch = Callable[[Net, Path], None]


def hooks_in(model: nn.Module) -> list[Any]:
    return [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]


# Taking over


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("dispatch", WAYS)
def test_a_dispatched_model_runs_from_our_files(
    dispatch: Dispatch, offload_buffers: bool, used: bool, tmp_path: Path
) -> None:
    plain, x = net(), torch.randn(3, 4)
    model = net()
    dispatch(model, tmp_path / "theirs")
    if used:
        model(x)
    before = contents(tmp_path)

    moved = offload.disk_offload(model, tmp_path / "ours", offload_buffers=offload_buffers)

    assert moved is model
    assert not hooks_in(model)
    assert not hasattr(model, "hf_device_map")
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert all(offload_buffers == offload.is_offloaded(buffer) for buffer in model.buffers())
    for name, expected in plain.state_dict().items():
        assert torch.equal(expected, model.state_dict()[name]), name
        assert expected.dtype == model.state_dict()[name].dtype, name
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in model.parameters()]
    assert torch.equal(plain(x), model(x))
    assert before == {name: data for name, data in contents(tmp_path).items() if not name.startswith("ours")}


@pytest.mark.parametrize("dispatch", [to_memory, by_a_map])
def test_a_model_taken_over_trains_as_the_plain_one(dispatch: Dispatch, tmp_path: Path) -> None:
    plain, model, x = net(), net(), torch.randn(3, 4)
    dispatch(model, tmp_path / "theirs")
    offload.disk_offload(model, tmp_path / "ours")

    for each in (plain, model):
        each.train()
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        each(x).pow(2).sum().backward()
        optimizer.step()

    for name, expected in plain.state_dict().items():
        assert torch.equal(expected, model.state_dict()[name]), name


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("dispatch", [by_hooks_alone, to_memory, to_memory_by_blocks, by_a_map])
def test_tied_weights_stay_one(dispatch: Dispatch, used: bool, tmp_path: Path) -> None:
    """accelerate empties each name separately, at the latest after a forward."""
    plain, model, x = net(Tied), net(Tied), torch.randn(3, 4)
    dispatch(model, tmp_path / "theirs")
    if used:
        model(x)
    if used or dispatch is not by_a_map:
        assert model.linears[0].weight is not model.linears[1].weight

    offload.disk_offload(model, tmp_path / "ours")

    assert model.linears[0].weight is model.linears[1].weight
    assert model.linears[0].bias is not model.linears[1].bias
    assert torch.equal(plain(x), model(x))
    assert "linears.1.weight" not in offload.load_file(tmp_path / "ours")


def test_equal_values_that_are_not_tied_stay_two(tmp_path: Path) -> None:
    model = net(Tied)
    with torch.no_grad():
        for linear in model.linears:
            linear.bias.zero_()
    by_a_map(model, tmp_path / "theirs")

    offload.disk_offload(model, tmp_path / "ours")

    assert model.linears[0].bias is not model.linears[1].bias


def test_tied_weights_that_accelerate_wrote_twice_and_forgot_are_two(tmp_path: Path) -> None:
    """Its own disk_offload does not record ties: they can't be distinguished from weights that happen to be equal."""
    plain, model, x = net(Tied), net(Tied), torch.randn(3, 4)
    to_disk(model, tmp_path / "theirs")

    offload.disk_offload(model)

    assert model.linears[0].weight is not model.linears[1].weight
    assert torch.equal(plain(x), model(x))


def test_a_model_that_can_tie_its_weights_is_tied_again(tmp_path: Path) -> None:
    """Like transformers models, with `tie_weights`."""

    class Tying(Tied):
        def tie_weights(self) -> None:
            self.linears[1].weight = self.linears[0].weight

    plain, model, x = net(Tying), net(Tying), torch.randn(3, 4)
    to_disk(model, tmp_path / "theirs")

    offload.disk_offload(model)

    assert model.linears[0].weight is model.linears[1].weight
    assert torch.equal(plain(x), model(x))


class PlusOne(ModelHook):
    """A user's hook."""

    def __init__(self) -> None:
        self.attached = 0

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.attached += 1
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.attached -= 100
        return module

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + 1


@pytest.mark.parametrize("first", [True, False], ids=["before accelerate's", "after accelerate's"])
def test_a_hook_of_the_user_s_stays(first: bool) -> None:
    x = torch.randn(3, 4)
    model, mine, also_mine = net(), PlusOne(), PlusOne()
    if first:
        add_hook_to_module(model.linears[0], mine)
    accelerate.cpu_offload(model)
    if not first:
        add_hook_to_module(model.linears[0], mine, append=True)
    attached = mine.attached
    add_hook_to_module(model.norm, SequentialHook(also_mine, SequentialHook(also_mine, model.norm._hf_hook)))
    expected = model(x)

    offload.disk_offload(model)

    assert model.linears[0]._hf_hook is mine
    assert [also_mine, also_mine] == list(model.norm._hf_hook.hooks)
    assert attached == mine.attached
    assert torch.equal(expected, model(x))
    remove_hook_from_submodules(model)
    assert torch.equal(net()(x), model(x))


def test_forward_hooks_of_torch_s_stay() -> None:
    model, seen = net(), []
    model.norm.register_forward_hook(lambda *args: seen.append(args[0]))
    accelerate.cpu_offload(model)

    offload.disk_offload(model)(torch.randn(3, 4))

    assert [model.norm] == seen


def test_a_dispatched_model_refuses_to_move_and_one_taken_over_does_not(tmp_path: Path) -> None:
    model = net()
    by_a_map(model, tmp_path)
    with pytest.raises(RuntimeError, match="move a model"):
        model.to("cpu")

    offload.disk_offload(model)

    assert model.to("cpu") is model
    assert model.half().linears[0].weight.dtype == torch.float16
    assert offload.is_offloaded(model.linears[0].weight)


def test_what_the_next_forward_would_use_is_what_is_taken() -> None:
    """accelerate overwrites a value assigned meanwhile with its own."""
    model, x = net(), torch.randn(3, 4)
    accelerate.cpu_offload(model)
    model.linears[0].weight = nn.Parameter(torch.zeros(4, 4))
    expected = model(x)

    offload.disk_offload(model)

    assert torch.equal(expected, model(x))


def test_a_buffer_taken_over_is_not_the_one_in_the_state_dict_that_was_given() -> None:
    model = net()
    state_dict = model.state_dict()
    accelerate.cpu_offload(model, offload_buffers=True, state_dict=state_dict)

    offload.disk_offload(model)
    model.norm.running_mean.zero_()

    assert 0 < state_dict["norm.running_mean"].abs().sum()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int32, torch.bool],
)
@pytest.mark.parametrize("shape", [(3, 5), ()])
def test_every_dtype_that_accelerate_writes_is_read(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    model = nn.Module()
    value = torch.randint(0, 2, shape).to(dtype)
    model.value = nn.Parameter(value, requires_grad=False)
    accelerate.disk_offload(model, str(tmp_path))

    offload.disk_offload(model)

    assert torch.equal(value.view(-1).view(torch.uint8), model.value.materialize().view(-1).view(torch.uint8))
    assert (dtype, shape) == (model.value.dtype, model.value.shape)


def indexed(model: nn.Module, folder: Path, **entry: str) -> Path:
    """The model's state in a safetensors file, with its weights held in an index of it, as transformers does."""
    path = folder / "model.safetensors"
    save_file({f"stored.{name}": tensor.clone() for name, tensor in model.state_dict().items()}, path)
    index = {
        name: {"safetensors_file": str(path), "weight_name": f"stored.{name}", **entry} for name in model.state_dict()
    }
    attach_align_device_hook(
        model, execution_device="cpu", offload=True, weights_map=OffloadedWeightsLoader(index=index)
    )
    return path


def test_an_entry_of_a_safetensors_file_is_referenced_and_not_copied(tmp_path: Path) -> None:
    model, x = net(), torch.randn(3, 4)
    path = indexed(model, tmp_path)
    before = contents(tmp_path)

    offload.disk_offload(model, tmp_path / "ours")

    assert {path} == {parameter.offload_path for parameter in model.parameters()}
    assert torch.equal(net()(x), model(x))
    assert before == contents(tmp_path)


def test_an_entry_that_accelerate_converts_is_converted_once(tmp_path: Path) -> None:
    """Through the index's dtype to the model's."""
    model = net().double()
    x = torch.randn(3, 4).double()
    indexed(model, tmp_path, dtype="float16")
    expected = model(x)

    offload.disk_offload(model, tmp_path / "ours")

    assert torch.float64 == model.linears[0].weight.dtype
    assert torch.equal(expected, model(x))


def test_two_names_of_one_entry_are_tied(tmp_path: Path) -> None:
    model = net(Tied)
    indexed(model, tmp_path)
    for module in model.linears:
        module._hf_hook.weights_map.dataset.index["linears.1.weight"]["weight_name"] = "stored.linears.0.weight"

    offload.disk_offload(model)

    assert model.linears[0].weight is model.linears[1].weight


def test_transformers_own_disk_map_is_taken_over_in_place(
    llama_folder: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(llama_folder)
    model = AutoModelForCausalLM.from_pretrained(
        llama_folder, device_map={"": "disk"}, offload_folder=str(tmp_path / "theirs")
    )
    model(tokens)
    assert hooks_in(model)
    before = contents(llama_folder)

    offload.disk_offload(model, tmp_path / "ours")

    assert not hooks_in(model)
    assert {llama_folder} == {parameter.offload_path.parent for parameter in model.parameters()}
    assert not (tmp_path / "ours").exists()
    assert model.model.embed_tokens.weight is model.lm_head.weight
    assert torch.equal(plain(tokens).logits, model(tokens).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(plain.generate(tokens, **options), model.generate(tokens, **options))
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(plain(tokens).logits, again(tokens).logits)
    assert before == contents(llama_folder)


def test_weights_are_taken_over_in_little_memory(tmp_path: Path) -> None:
    """256 MB in accelerate's folder; a sixteenth of that in memory."""
    script = """
        import sys, json, torch, accelerate, offload
        from torch import nn
        from offload.memory import anonymous_bytes
        from accelerate.hooks import attach_align_device_hook
        from accelerate.utils import OffloadedWeightsLoader

        def model(layers, width, folder):
            index = {f"{n}.weight": {"dtype": "float32", "shape": [width, width]} for n in range(layers)}
            for name in index:
                with open(f"{folder}/{name}.dat", "wb") as file:
                    file.truncate(4 * width * width)
            with offload.init_empty_weights():
                made = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            held = OffloadedWeightsLoader(save_folder=folder, index=index)
            attach_align_device_hook(made, execution_device="cpu", offload=True, weights_map=held)
            return made

        offload.disk_offload(model(1, 8, sys.argv[1]))  # imports, first calls
        large = model(16, 2048, sys.argv[1])
        before = anonymous_bytes()
        seen = []
        real = offload.OffloadedTensor.from_original_tensor.__func__
        def watched(cls, *args, **kwargs):
            made = real(cls, *args, **kwargs)
            seen.append(anonymous_bytes() - before)
            return made
        offload.OffloadedTensor.from_original_tensor = classmethod(watched)
        offload.disk_offload(large)
        assert all(offload.is_offloaded(p) for p in large.parameters())
        print(json.dumps([seen, anonymous_bytes() - before]))
    """

    seen, after = json.loads(run_script(script, tmp_path))

    assert 16 == len(seen)
    assert max(*seen, after) < 16e6


# What can't be taken over


def test_a_missing_file_of_accelerate_s_is_named_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model, x = net(), torch.randn(3, 4)
    to_disk(model, tmp_path / "theirs")
    path = tmp_path / "theirs" / "linears.1.bias.dat"
    data = path.read_bytes()
    path.unlink()

    with pytest.raises(MissingFileError, match=r"linears\.1\.bias\.dat, from which accelerate was to read 'linears\.1"):
        offload.disk_offload(model, tmp_path / "ours")

    path.write_bytes(data)
    assert torch.equal(net()(x), model(x))
    assert torch.equal(net()(x), offload.disk_offload(model, tmp_path / "ours")(x))


def test_a_file_of_accelerate_s_of_another_length_is_refused(tmp_path: Path) -> None:
    model = net()
    to_disk(model, tmp_path)
    (tmp_path / "linears.0.weight.dat").write_bytes(b"1234")

    with pytest.raises(CorruptFileError, match=r"has 4 bytes, and 'linears\.0\.weight' takes 64"):
        offload.disk_offload(model)
    assert b"1234" == (tmp_path / "linears.0.weight.dat").read_bytes()


def test_an_index_with_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    model = net()
    to_disk(model, tmp_path)
    model.norm._hf_hook.weights_map.dataset.index["norm.bias"]["dtype"] = "float33"

    with pytest.raises(CorruptFileError, match="'float33' as a dtype"):
        offload.disk_offload(model)


def test_a_value_that_the_hook_has_not_is_named() -> None:
    model = net()
    weights = model.state_dict()
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    del weights["norm.bias"]

    with pytest.raises(MetaTensorError, match=r"'norm\.bias' is empty, and accelerate's hook has no value"):
        offload.disk_offload(model)


def test_a_value_of_another_shape_is_refused() -> None:
    model = net()
    weights = {**model.state_dict(), "norm.bias": torch.ones(5)}
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)

    with pytest.raises(ShapeMismatchError, match=r"'norm\.bias' has shape \(4,\).*\(5,\)"):
        offload.disk_offload(model)


def test_eight_bit_weights_whose_scales_stand_apart_are_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    weights = {"weight": model.weight.data, "SCB": torch.ones(2)}
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)

    with pytest.raises(UnsupportedOpError, match="'weight' is an 8-bit weight of bitsandbytes"):
        offload.disk_offload(model)


@pytest.mark.parametrize("load", [offload.load_checkpoint_and_dispatch, offload.load_checkpoint_in_model])
def test_a_checkpoint_is_not_loaded_under_hooks_that_would_put_their_own_values_over_it(
    load: Callable[..., object], tmp_path: Path
) -> None:
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    model = net()
    accelerate.cpu_offload(model)

    with pytest.raises(DeviceMapError, match=r"accelerate's hooks hold 6 tensors .* call offload\.disk_offload"):
        load(model, tmp_path / "model.safetensors")
    offload.disk_offload(model)
    load(model, tmp_path / "model.safetensors")


def test_meta_without_hooks_is_refused_as_ever() -> None:
    with offload.init_empty_weights():
        model = Net()

    with pytest.raises(MetaTensorError, match=r"linears\.0\.weight"):
        offload.disk_offload(model)


def test_a_model_without_hooks_needs_no_accelerate() -> None:
    script = """
        import sys, offload, torch
        offload.disk_offload(torch.nn.Linear(2, 2), execution_device="cpu")
        assert "accelerate" not in sys.modules
    """

    run_script(script, fresh=True)


# Hooks that stay


def test_where_modules_run_on_an_accelerator_hooks_still_move_inputs_and_hold_nothing() -> None:
    model, x = net(), torch.randn(3, 4)
    accelerate.cpu_offload(model)
    remembered = net()
    for module, original in zip(model.modules(), remembered.modules(), strict=True):
        module._parameters.update(original._parameters)

    release(model, keep_moves=True)

    assert 4 == len(hooks_in(model))
    assert {} == held_values(model)
    assert torch.equal(remembered(x), model(x))
    assert not any(parameter.is_meta for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert torch.equal(remembered(x), model(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_model_that_runs_on_an_accelerator_takes_inputs_from_the_cpu_as_before(tmp_path: Path) -> None:
    model, x = net(), torch.randn(3, 4)
    accelerate.dispatch_model(model, {"linears": "disk", "norm": 0}, offload_dir=str(tmp_path), main_device=0)
    expected = model(x)

    offload.disk_offload(model)

    assert all(offload.is_offloaded(p) and p.device.type != "cpu" for p in model.parameters())
    assert expected.device == model(x).device
    assert torch.equal(expected, model(x))


# And back


@pytest.mark.parametrize("dispatch", [way for way in WAYS if way is not from_a_checkpoint])
@pytest.mark.parametrize("kind", [Net, Tied])
def test_accelerate_takes_a_model_on_disk_as_it_is(dispatch: Dispatch, kind: type[Net], tmp_path: Path) -> None:
    plain, x = net(kind), torch.randn(3, 4)
    model = offload.disk_offload(net(kind), tmp_path / "ours")
    before = contents(tmp_path / "ours")

    dispatch(model, tmp_path / "theirs")

    assert torch.equal(plain(x), model(x))
    assert hooks_in(model)
    assert before == contents(tmp_path / "ours")
    if (dispatch, kind) != (to_memory_by_blocks, Tied):  # then accelerate leaves a plain model's second name empty
        remove_hook_from_submodules(model)
        assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("dispatch", [way for way in WAYS if way is not from_a_checkpoint])
def test_accelerate_takes_a_model_that_came_back_to_memory(dispatch: Dispatch, tmp_path: Path) -> None:
    plain, x = net(), torch.randn(3, 4)
    model = offload.materialize(offload.disk_offload(net()))

    dispatch(model, tmp_path)

    assert torch.equal(plain(x), model(x))
    remove_hook_from_submodules(model)
    assert {nn.Parameter} == {type(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("dispatch", WAYS)
def test_there_and_back_and_there_again(dispatch: Dispatch, tmp_path: Path) -> None:
    plain, x = net(), torch.randn(3, 4)
    model = offload.disk_offload(net())
    dispatch(model, tmp_path / "theirs")

    offload.disk_offload(model, tmp_path / "ours")

    assert not hooks_in(model)
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert torch.equal(plain(x), model(x))


def test_an_infered_map_that_fits_leaves_the_weights_on_disk() -> None:
    """`dispatch_model` to one device is a `to`, which reads nothing."""
    plain, x = net(), torch.randn(3, 4)
    model = offload.disk_offload(net())

    accelerate.dispatch_model(model, accelerate.infer_auto_device_map(model))

    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert torch.equal(plain(x), model(x))


def test_accelerate_empties_a_parameter_on_disk_to_a_plain_one() -> None:
    weight = offload.disk_offload(nn.Linear(2, 2)).weight

    emptied = type(weight)(weight.to("meta"), requires_grad=False)

    assert emptied.is_meta
    assert nn.Parameter is type(emptied)
    assert not emptied.requires_grad


def test_a_parameter_on_disk_that_is_registered_in_an_empty_model_is_emptied() -> None:
    """accelerate and peft pass on its attributes, too."""
    weight = offload.disk_offload(nn.Linear(2, 2)).weight
    weight.mark = "kept"

    with accelerate.init_empty_weights():
        module = nn.Module()
        module.register_parameter("weight", weight)

    assert nn.Parameter is type(module.weight)
    assert module.weight.is_meta
    assert module.weight.requires_grad
    assert "kept" == module.weight.mark
    assert offload.is_offloaded(weight)


@pytest.mark.parametrize("value", [None, torch.ones(2, 2)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_accelerate_sets_a_tensor_of_a_module_on_disk(device: str, value: torch.Tensor | None) -> None:
    module = offload.disk_offload(nn.Linear(2, 2).requires_grad_(False))
    expected = module.weight.materialize() if value is None else value

    set_module_tensor_to_device(module, "weight", device, value)

    assert not module.weight.requires_grad
    assert torch.device(device) == module.weight.device
    if device == "cpu":
        assert offload.is_offloaded(module.weight)
        assert torch.equal(expected, module.weight)


def test_a_hook_that_moves_a_whole_model_moves_no_bytes() -> None:
    plain, x = net(), torch.randn(3, 4)
    model, hook = accelerate.cpu_offload_with_hook(net(), execution_device="cpu")

    offload.disk_offload(model)

    assert torch.equal(plain(x), model(x))
    hook.offload()
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    hook.remove()
    assert not hooks_in(model)


def test_a_state_dict_on_disk_can_be_offloaded_to_accelerate_s_folder(tmp_path: Path) -> None:
    model = offload.disk_offload(net())

    offload_state_dict(str(tmp_path), model.state_dict())

    held = OffloadedWeightsLoader(save_folder=str(tmp_path))
    assert all(torch.equal(value, held[name]) for name, value in net().state_dict().items())


def test_an_align_hook_on_a_module_on_disk_runs_it() -> None:
    x = torch.randn(3, 4)
    model = offload.disk_offload(net())

    add_hook_to_module(model.norm, AlignDevicesHook(execution_device="cpu", offload=True, offload_buffers=True))

    assert torch.equal(net()(x), model(x))
