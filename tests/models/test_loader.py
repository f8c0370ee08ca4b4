"""Filling models from checkpoints."""

import gc
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import contents
from safetensors.torch import load_file as load_in_memory
from safetensors.torch import save_file
from torch import nn

import offload
from offload import ON_DISK, OffloadedTensor
from offload.errors import CheckpointError, DeviceMapError, MetaTensorError, WriteError
from tests.models.networks import Network, network


@pytest.fixture
def net() -> Network:
    return network()


@pytest.fixture
def checkpoint(net: Network, tmp_path: Path) -> Path:
    """With tied weights saved once, as in transformers."""
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(params=["pytorch_model.bin", "pytorch_model.bin.index.json", "trainer.ckpt"])
def pickled(net: Network, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The same from torch.save: one file, shards, and beside training state."""
    path, state = tmp_path / request.param, net.state_dict()
    if path.suffix == ".json":
        shards = {name: f"{number % 2}.bin" for number, name in enumerate(state)}
        for shard in ("0.bin", "1.bin"):
            torch.save({name: tensor for name, tensor in state.items() if shards[name] == shard}, tmp_path / shard)
        path.write_text(json.dumps({"weight_map": shards}))
    elif path.suffix == ".ckpt":
        torch.save({"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}}, path)
    else:
        torch.save(state, path)
    return path


def empty_net() -> Network:
    with offload.init_empty_weights():
        return Network().eval()


def test_a_model_on_disk_computes_what_the_one_in_memory_does_and_loading_writes_nothing(net, checkpoint, tmp_path):
    x, before = torch.randn(4, 8), contents(tmp_path)
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, ON_DISK, offload_dir=tmp_path / "values")

    assert all(offload.is_offloaded(parameter) for parameter in loaded.parameters())
    assert loaded.base.weight is loaded.head.weight
    assert torch.equal(net(x), loaded(x))
    assert before == contents(tmp_path)


def test_a_model_is_loaded_from_what_torch_save_wrote(net, pickled, tmp_path):
    x, before = torch.randn(4, 8), contents(tmp_path)
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), pickled, offload_buffers=True, strict=True)
    in_memory = Network().eval()

    assert "all match" == str(offload.load_checkpoint_in_model(in_memory, pickled, "cpu"))
    assert all(offload.is_offloaded(parameter) for parameter in loaded.parameters())
    assert not any(offload.is_offloaded(parameter) for parameter in in_memory.parameters())
    for model in (loaded, in_memory):
        assert model.base.weight is model.head.weight
        assert torch.equal(net(x), model(x))
    assert before == contents(tmp_path)


def test_another_dtype_in_a_checkpoint_of_torch_save_is_converted_when_it_is_read(net, pickled, tmp_path):
    half, before = tmp_path / "half", contents(tmp_path)
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), pickled, offload_dir=half, dtype=torch.float16)

    assert torch.equal(net.base.weight.half(), loaded.base.weight.materialize())
    assert not half.exists()
    with torch.no_grad():
        loaded.base.weight.zero_()
    assert half == loaded.base.weight.offload_path.parent
    assert before == {name: found for name, found in contents(tmp_path).items() if not name.startswith("half")}


def test_a_write_goes_to_the_offload_dir_and_not_to_the_checkpoint(checkpoint, tmp_path):
    before = contents(tmp_path)
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, offload_dir=tmp_path / "values")
    with torch.no_grad():
        loaded.base.weight.zero_()

    after = contents(tmp_path)
    assert before == {name: after[name] for name in before}
    assert ["values/base.weight.safetensors"] == [name for name in after if name not in before]
    assert 0 == load_in_memory(tmp_path / "values" / "base.weight.safetensors")["base.weight"].abs().sum()


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Linear(3, 3, bias=False))
        self.b.weight = self.c.weight = self.a.weight


@pytest.mark.parametrize("form", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("names", ["abc", "ab", "b"])
def test_the_last_of_several_values_of_a_tied_weight_is_taken_as_in_torch(names, form, tmp_path):
    """A checkpoint that lacks some of the names is as good."""
    state = {f"{name}.weight": torch.full((3, 3), float(number)) for number, name in enumerate(names)}
    (save_file if form.endswith("safetensors") else torch.save)(state, tmp_path / form)
    plain = Three()
    plain.load_state_dict(state, strict=False)

    model = Three().to("meta")
    model.b.weight = model.c.weight = model.a.weight
    report = offload.load_checkpoint_in_model(model, tmp_path / form, strict=True)

    assert not report.differs
    assert model.a.weight is model.b.weight is model.c.weight
    assert torch.equal(plain.a.weight, offload.materialize(model.a.weight))
    assert offload.is_offloaded(model.a.weight)


@pytest.mark.parametrize("left_out", ["", "model."], ids=["as in the model", "under other names"])
def test_a_tied_language_model_with_a_head_in_its_checkpoint_has_that_head(left_out, tmp_path):
    """As accelerate has it; under other names, transformers' own conversion comes before."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=64, tie_word_embeddings=True)
    plain = AutoModelForCausalLM.from_config(config)
    state = {name: value for name, value in plain.state_dict().items() if name != "lm_head.weight"}
    state["lm_head.weight"] = torch.randn(64, 32)
    save_file({name.removeprefix(left_out): one for name, one in state.items()}, tmp_path / "model.safetensors")
    with offload.init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    offload.load_checkpoint_in_model(model, tmp_path / "model.safetensors")

    assert torch.equal(state["lm_head.weight"], model.lm_head.weight.materialize())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_buffer_that_is_also_kept_under_a_name_of_its_own_is_replaced_under_both(checkpoint):
    """That name is not persistent, and is not in any checkpoint."""
    model = empty_net()
    model.register_buffer("mean", model.norm.running_mean, persistent=False)
    offload.load_checkpoint_and_dispatch(model, checkpoint, strict=True)

    assert model.mean is model.norm.running_mean
    assert torch.equal(load_in_memory(checkpoint)["norm.running_mean"], model.mean)


def test_values_of_one_shape_share_no_metadata(checkpoint):
    """The meta tensor for their layout is created once for all of them."""
    loaded = offload.load_file(checkpoint)
    first, other = loaded["base.bias"], loaded["norm.bias"]
    first.unsqueeze_(0)

    assert (1, 8) == first.shape
    assert (8,) == other.shape
    assert torch.equal(load_in_memory(checkpoint)["norm.bias"], other + 0)


def test_a_list_of_layers_may_have_empty_places(tmp_path):
    """As in informer, where the last layer has no convolution."""
    save_file({"0.0.weight": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with offload.init_empty_weights():
        model = nn.Sequential(nn.ModuleList([nn.Linear(1, 1, bias=False), None]))
    offload.load_checkpoint_and_dispatch(model, tmp_path)

    assert offload.is_offloaded(model[0][0].weight)


def test_the_collector_does_not_go_over_a_model_while_its_tensors_are_opened(tmp_path):
    save_file({f"{n}.weight": torch.zeros(1, 1) for n in range(3000)}, tmp_path / "model.safetensors")
    with offload.init_empty_weights():
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3000)])
    gc.collect()
    before = gc.get_stats()
    offload.load_checkpoint_and_dispatch(model, tmp_path)

    passes = [now["collections"] - then["collections"] for now, then in zip(gc.get_stats(), before, strict=True)]
    assert passes[1] + passes[2] <= 1
    assert gc.isenabled()


def test_buffers_are_loaded_and_stay_in_memory_unless_asked(net, checkpoint):
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint)
    on_disk = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, offload_buffers=True)

    assert torch.equal(net.norm.running_mean, loaded.norm.running_mean)
    assert not offload.is_offloaded(loaded.norm.running_mean)
    assert offload.is_offloaded(on_disk.norm.running_mean)
    assert torch.equal(net(torch.ones(2, 8)), on_disk(torch.ones(2, 8)))


def test_another_dtype_is_converted_when_it_is_read(net, checkpoint, tmp_path):
    options = {"offload_dir": tmp_path / "half", "offload_buffers": True}
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, dtype=torch.float16, **options)
    by_model = offload.load_checkpoint_and_dispatch(empty_net().to(torch.bfloat16), checkpoint)  # with none given

    assert torch.float16 == loaded.base.weight.dtype
    assert torch.int64 == loaded.norm.num_batches_tracked.dtype
    assert torch.equal(net.base.weight.half(), loaded.base.weight.materialize())
    assert torch.equal(net.base.weight.bfloat16(), by_model.base.weight.materialize())
    in_no_checkpoint = ["scale.safetensors"]
    assert in_no_checkpoint == [path.name for path in (tmp_path / "half").iterdir()]
    with torch.no_grad():
        loaded.base.weight.add_(1)
    assert tmp_path / "half" / "base.weight.safetensors" == loaded.base.weight.offload_path
    assert torch.equal(net.base.weight.half() + 1, loaded.base.weight.materialize())


def test_keys_that_differ_are_reported_or_refused_before_anything_is_loaded(checkpoint, tmp_path):
    state, odd = load_in_memory(checkpoint), tmp_path / "odd.safetensors"
    state["stranger"] = state.pop("base.bias")
    save_file(state, odd)
    model = Network()
    before = model.base.weight
    report = offload.load_checkpoint_in_model(Network(), odd)

    assert ["base.bias"] == report.missing_keys
    assert ["stranger"] == report.unexpected_keys
    names = r"odd\.safetensors does not fit this Network: 1 missing: base\.bias; 1 unexpected: stranger"
    with pytest.raises(CheckpointError, match=names):
        offload.load_checkpoint_and_dispatch(model, odd, strict=True)
    save_file(state | {"norm.bias": torch.zeros(9)}, odd)
    mismatch = r"1 mismatched: norm\.bias \(checkpoint \(9,\), model \(8,\)\)"
    with pytest.raises(CheckpointError, match=rf"{names}; {mismatch}"):
        offload.load_checkpoint_and_dispatch(model, odd)
    assert before is model.base.weight


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_a_folder_without_buffers_says_that_they_are_missing(offload_buffers, tmp_path, caplog):
    model, again = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.ones(2, 3))
    offload.disk_offload(model, tmp_path / "kept", offload_buffers=offload_buffers)
    offload.load_checkpoint_and_dispatch(again, tmp_path / "kept")

    assert offload_buffers == torch.equal(model.running_mean, again.running_mean)
    assert offload_buffers != ("3 missing: running_mean" in caplog.text)


def test_nothing_may_stay_without_data(checkpoint, tmp_path):
    """torch accepts `cpu @ meta` and returns uninitialized memory."""
    save_file({"base.weight": load_in_memory(checkpoint)["base.weight"]}, tmp_path / "less.safetensors")

    with pytest.raises(MetaTensorError, match=r"base\.bias"):
        offload.load_checkpoint_and_dispatch(empty_net(), tmp_path / "less.safetensors")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_file({"encoder.w": torch.ones(2)}, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match="belongs to another model than this Network"):
        offload.load_checkpoint_and_dispatch(Network(), tmp_path)


def test_a_buffer_that_the_map_leaves_out_is_named_before_anything_is_loaded(checkpoint):
    model, device_map = empty_net(), dict.fromkeys(("base", "head", "norm"), "disk")

    with pytest.raises(DeviceMapError, match="'scale'"):
        offload.load_checkpoint_and_dispatch(model, checkpoint, device_map=device_map)
    assert model.norm.weight.is_meta


def test_an_offload_dir_that_cannot_be_is_named_at_the_first_write(checkpoint, tmp_path):
    (tmp_path / "file").write_text("mine")
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, offload_dir=tmp_path / "file" / "values")

    with pytest.raises(WriteError, match="offload_dir"), torch.no_grad():
        loaded.base.weight.zero_()
    assert "mine" == (tmp_path / "file").read_text()


@torch.no_grad()
def test_an_offload_folder_opens_again_with_the_values_as_last_updated(tmp_path):
    first = offload.disk_offload(Network().eval(), tmp_path, offload_buffers=True)
    first.base.bias.fill_(2.0)
    x = torch.randn(3, 8)
    expected = first(x)
    del first
    gc.collect()
    again = offload.load_checkpoint_and_dispatch(empty_net(), tmp_path, offload_dir=tmp_path)

    assert torch.equal(expected, again(x))
    again.base.bias.fill_(4.0)
    assert 4.0 == OffloadedTensor.from_file(again.base.bias.offload_path)[0].item()


def test_disk_offload_moves_a_model_in_memory_to_disk(net, tmp_path):
    x = torch.randn(3, 8)
    expected = net(x)
    moved = offload.disk_offload(net, tmp_path)

    assert moved is net
    assert all(offload.is_offloaded(parameter) for parameter in net.parameters())
    assert net.base.weight is net.head.weight
    assert torch.equal(expected, net(x))
    assert {"head.weight", "base.bias", "norm.weight", "norm.bias"} == set(offload.load_file(tmp_path))


def test_disk_offload_refuses_empty_weights_and_other_objects_than_modules():
    with pytest.raises(MetaTensorError, match=r"base\.weight"):
        offload.disk_offload(empty_net())
    with pytest.raises(TypeError, match="a dict is not a module: offload its parts"):
        offload.disk_offload({"w": torch.ones(2)})  # type: ignore[type-var]


def test_running_statistics_in_a_checkpoint_are_updated_in_a_file_of_their_own(net, checkpoint):
    """The schema of batch norm does not declare these writes: none may be left in a private mapping."""
    before = checkpoint.read_bytes()
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, offload_buffers=True)
    x = torch.randn(8, 8)
    net.train()(x)
    loaded.train()(x)

    stored = OffloadedTensor.from_file(loaded.norm.running_mean.offload_path)
    assert checkpoint != loaded.norm.running_mean.offload_path
    assert torch.equal(net.norm.running_mean, stored.materialize())
    assert before == checkpoint.read_bytes()


@pytest.mark.parametrize("load", [offload.load_checkpoint_and_dispatch, offload.load_checkpoint_in_model])
def test_a_dtype_may_be_named_and_one_that_would_lose_the_weights_is_an_error(load, checkpoint):
    model = empty_net()
    for dtype in (torch.int8, "int8", "float17"):
        with pytest.raises(ValueError, match="is not a floating-point dtype of torch"):
            load(model, checkpoint, dtype=dtype)
    load(model, checkpoint, dtype="float16")

    assert {torch.float16} == {parameter.dtype for parameter in model.parameters()}


def test_everything_that_holds_a_parameter_follows_it_to_disk():
    """A part is offloaded: tied weights, lists and optimizer state follow, and so does its grad."""
    models, x = [network(), network()], torch.ones(2, 8)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(x).sum().backward()
        optimizer.step()
    listed = list(models[1].parameters())
    offload.disk_offload(models[1].base)

    weight = models[1].base.weight
    assert offload.is_offloaded(weight)
    assert models[1].head.weight is weight
    assert listed[0] is weight
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(models[0].base.weight.grad, weight.grad)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(x).sum().backward()
        optimizer.step()
    assert torch.equal(models[0].base.weight, weight)


HOLDERS: dict[str, tuple[Callable[[Network], object], str]] = {
    "a graph": (lambda model: model(torch.ones(2, 8)), "head.weight, norm.weight"),
    "weak": (lambda model: weakref.ref(model.base.weight), "head.weight"),
}


@pytest.mark.parametrize(("held", "names"), HOLDERS.values(), ids=HOLDERS)
def test_a_warning_names_the_parameters_that_torch_does_not_let_change(held, names, net, caplog):
    """The model gets a new one, with the grad of the old one; an optimizer made before has the old one."""
    net(torch.ones(2, 8)).sum().backward()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    old, holder = net.base.weight, held(net)
    offload.disk_offload(net)

    assert offload.is_offloaded(net.base.weight)
    assert net.base.weight is net.head.weight
    assert torch.equal(old.grad, net.base.weight.grad)
    assert old is optimizer.param_groups[0]["params"][0]
    assert not offload.is_offloaded(old)
    warned = [record.args[1:] for record in caplog.records if "Make optimizers of them again" in record.getMessage()]
    assert [(names,)] == warned
    del holder


def test_the_log_says_what_is_a_recipe_and_why_and_what_is_referenced(tmp_path, caplog):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2, dtype=torch.float16)}, path)
    model = nn.Linear(3, 2, device="meta", dtype=torch.float16)
    with caplog.at_level(logging.DEBUG, "offload"):
        offload.load_checkpoint_and_dispatch(model, path, {"": "disk", "bias": "cpu"})
        offload.load_checkpoint_and_dispatch(nn.Linear(3, 2, bias=False), path)

    assert {record.getMessage() for record in caplog.records if record.name == "offload.models"} == {
        f"weight: a recipe over {path}: cast, as torch.float16",
        "bias: read into memory, for cpu",
        "Linear is ready; its values: cast 1 (24 bytes), in memory 1 (0 bytes)",
        f"weight: stays in {path}",
        f"{path}: 1 unexpected: bias",
        "Linear is ready; its values: referenced 1 (24 bytes)",
    }
