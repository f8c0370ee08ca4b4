"""Modules, optimizers and function transforms work with offloaded parameters as with plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadedTensor
from tests.equal import assert_equal


class Model(nn.Module):
    """An embedding tied to the head; a norm with buffers; a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layer = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(F.gelu(self.layer(self.embed(tokens)))))


@pytest.fixture
def plain() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def on_disk(plain: Model) -> Model:
    return offload.disk_offload(copy.deepcopy(plain), offload_buffers=True)


TOKENS = torch.tensor([0, 3, 7, 3])


def parameters_on_disk(module: nn.Module) -> bool:
    return all(isinstance(p, nn.Parameter) and offload.is_offloaded(p) for p in module.parameters())


# Parameters


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float64)],
)
def test_a_conversion_of_a_module_leaves_it_on_disk(convert: Any, plain: Model, on_disk: Model) -> None:
    """With its values, ties, and parameters that are the same objects."""
    before = list(on_disk.parameters())
    convert(plain)
    convert(on_disk)

    assert parameters_on_disk(on_disk)
    assert_equal(plain, on_disk)
    assert on_disk.head.weight is on_disk.embed.weight
    assert all(one is other for one, other in zip(before, on_disk.parameters(), strict=True))


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to("cpu"),
        lambda m: m.cpu(),
        lambda m: m.float(),
        lambda m: m.to(torch.float32),
        lambda m: m.half().float(),
        lambda m: m.share_memory(),
        lambda m: m.requires_grad_(False),
        lambda m: m.type(torch.float32),
    ],
    ids=["device", "cpu", "float", "dtype", "half", "share_memory", "requires_grad", "type"],
)
def test_a_module_is_converted_while_its_graph_is_alive(convert: Any, plain: Model, on_disk: Model) -> None:
    """Backward then gives the same as in memory, to the same parameters."""
    before = list(on_disk.parameters())
    outputs = [module.eval()(TOKENS).sum() for module in (plain, on_disk)]

    for module, output in zip((plain, on_disk), outputs, strict=True):
        convert(module)
        output.backward()

    assert parameters_on_disk(on_disk)
    assert_equal(plain, on_disk)
    assert all(one is other for one, other in zip(before, on_disk.parameters(), strict=True))
    for one, other in zip(plain.parameters(), on_disk.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_equal(one.grad, other.grad)


def test_a_module_that_stays_where_it_is_can_be_flattened_after() -> None:
    """Compilers use `__tensor_flatten__`; only a module that moves a parameter to itself does not find it."""
    weight = offload.disk_offload(nn.Linear(2, 2).to("cpu")).to("cpu").weight

    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(weight)


def test_parameters_that_share_a_file_convert_one_by_one() -> None:
    """Two parameters over one value are not one object: each gets its own new value, as in torch."""
    weight = torch.randn(3, 3)
    w = OffloadedTensor.from_original_tensor(weight, "w")
    module = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    for layer in module:
        layer.weight = nn.Parameter(w)
    module.half()

    for layer in module:
        assert offload.is_offloaded(layer.weight)
        assert_equal(weight.half(), layer.weight)
    assert_equal(weight, w)


def test_a_module_goes_to_meta(plain: Model, on_disk: Model) -> None:
    """No file is read, and it comes back empty."""
    for parameter in on_disk.parameters():
        parameter.offload_path.unlink()
    plain.to("meta")
    on_disk.to("meta")

    assert all(tensor.is_meta for tensor in on_disk.state_dict().values())
    assert [p.shape for p in plain.parameters()] == [p.shape for p in on_disk.parameters()]
    assert not any(tensor.is_meta for tensor in on_disk.to_empty(device="cpu").state_dict().values())


# State and optimizers


def test_a_state_dict_reads_nothing(on_disk: Model) -> None:
    state = on_disk.state_dict()

    assert all(offload.is_offloaded(tensor) and not tensor.requires_grad for tensor in state.values())
    assert state["embed.weight"].offload_path == on_disk.embed.weight.offload_path
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


@pytest.mark.parametrize("source_on_disk", [False, True])
def test_loading_a_state_copies_into_the_files(source_on_disk: bool, on_disk: Model) -> None:
    """The parameters stay the same objects over the same files."""
    torch.manual_seed(1)
    other = Model()
    expected = copy.deepcopy(other)
    paths = [p.offload_path for p in on_disk.parameters()]
    on_disk.load_state_dict((offload.disk_offload(other) if source_on_disk else other).state_dict())

    assert_equal(expected, on_disk)
    assert paths == [p.offload_path for p in on_disk.parameters()]
    weight = on_disk.layer.weight
    assert_equal(expected.layer.weight, safetensors.torch.load_file(weight.offload_path)[weight.name])


def test_loading_a_state_with_assign_takes_the_tensors(plain: Model) -> None:
    """As parameters, over their files; this fills a meta model."""
    state = offload.disk_offload(copy.deepcopy(plain)).state_dict()
    with torch.device("meta"):
        model = Model()
    model.load_state_dict(state, assign=True)

    assert parameters_on_disk(model)
    assert_equal(plain, model)
    assert state["layer.weight"].offload_path == model.layer.weight.offload_path
    assert model.layer.weight.requires_grad


def test_swap_tensors_exchanges_parameters() -> None:
    """Some loaders and `module.to` use it."""
    a = nn.Parameter(OffloadedTensor.from_original_tensor(torch.ones(2), "a"))
    b = nn.Parameter(torch.zeros(3), requires_grad=False)
    torch.utils.swap_tensors(a, b)

    assert ([0.0] * 3, [1.0] * 2) == (a.tolist(), b.tolist())
    assert (False, True) == (offload.is_offloaded(a), offload.is_offloaded(b))
    assert (False, True) == (a.requires_grad, b.requires_grad)
    assert all(isinstance(one, nn.Parameter) for one in (a, b))


@pytest.mark.parametrize("fused", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_writes_through(fused: Any, plain: Model, on_disk: Model) -> None:
    for model in (plain, on_disk):
        F.cross_entropy(model(TOKENS), TOKENS).backward()
        fused(model.parameters(), lr=0.1, fused=True).step()

    assert_equal(plain, on_disk)


# Ways to run a module


def _checkpointed(model: Model, x: torch.Tensor, *, use_reentrant: bool) -> torch.Tensor:
    return checkpoint(lambda t: model.norm(model.layer(t)), x, use_reentrant=use_reentrant)


def _cast(model: Model, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights are cast for the op; what is stored stays as it is."""
    with torch.autocast("cpu", dtype=dtype):
        return model.layer(x)


WAYS: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "checkpointed": partial(_checkpointed, use_reentrant=False),
    "checkpointed, reentrant": partial(_checkpointed, use_reentrant=True),
    "bfloat16": partial(_cast, dtype=torch.bfloat16),
    "float16": partial(_cast, dtype=torch.float16),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_run_a_module_gives_the_results_and_gradients_of_memory(
    way: str, plain: Model, on_disk: Model
) -> None:
    found = []
    for model in (plain, on_disk):
        x = torch.ones(4, 8, requires_grad=True)
        result = WAYS[way](model.eval(), x)
        result.float().square().sum().backward()
        found.append((result.detach(), x.grad, model.layer.weight.grad))

    for expected, actual in zip(*found, strict=True):
        assert_equal(expected, actual)
    assert torch.float32 == on_disk.layer.weight.dtype


def _unparametrized(layer: nn.Module, **options: Any) -> None:
    parametrize.register_parametrization(layer, "weight", _Doubled())
    parametrize.remove_parametrizations(layer, "weight", **options)


def _pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.5)
    prune.remove(layer, "weight")


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: parametrize.register_parametrization(layer, "weight", _Doubled()),
        _unparametrized,
        partial(_unparametrized, leave_parametrized=False),
        _pruned,
        lambda layer: nn.utils.parametrizations.spectral_norm(layer),
        lambda layer: nn.utils.spectral_norm(layer),
    ],
    ids=["parametrized", "unparametrized", "restored", "pruned", "spectral norm", "old spectral norm"],
)
def test_a_parametrized_weight_stays_on_disk(change: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[1].load_state_dict(layers[0].state_dict())
    offload.disk_offload(layers[1])

    for layer in layers:
        torch.manual_seed(1)
        change(layer)

    assert parameters_on_disk(layers[1])
    assert_equal(layers[0](torch.ones(4)), layers[1](torch.ones(4)))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: nn.utils.parametrizations.weight_norm(m[0]) and m,
        lambda m: nn.utils.weight_norm(m[0]) and m,
        lambda m: fuse_conv_bn_eval(m[0], m[1]),
    ],
    ids=["weight norm", "old weight norm", "fused"],
)
def test_new_values_of_a_changed_module_go_to_disk_on_request(change: Any) -> None:
    """It is in memory at first; calling `disk_offload` again adds it to the rest."""
    plain = nn.Sequential(nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3)).eval()
    changed = change(offload.disk_offload(copy.deepcopy(plain)))
    assert not parameters_on_disk(changed)

    offload.disk_offload(changed)

    assert parameters_on_disk(changed)
    assert_equal(change(plain)(torch.ones(2, 3, 4)), changed(torch.ones(2, 3, 4)))


class _Doubled(nn.Module):
    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Named(torch.Tensor):
    """A class of another library."""


def test_a_tensor_on_disk_can_not_be_of_a_second_class() -> None:
    w = OffloadedTensor.from_original_tensor(torch.ones(2), "w")

    assert offload.is_offloaded(w.as_subclass(torch.Tensor))
    with pytest.raises(offload.errors.UnsupportedOpError, match=r"'w'.*Named.*materialize"):
        w.as_subclass(Named)
    assert isinstance(w.materialize().as_subclass(Named), Named)


@pytest.mark.parametrize("index", [torch.tensor([1.5]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16)])
def test_an_embedding_takes_no_other_indices_than_in_memory(index: torch.Tensor) -> None:
    """With torch's own words, also without gradients, when only the rows are read."""
    plain = nn.Embedding(5, 3)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Long, Int") as expected:
        plain(index)
    on_disk = offload.disk_offload(plain)

    with torch.no_grad(), pytest.raises(RuntimeError, match="Long, Int") as found:
        on_disk(index)

    assert str(expected.value) == str(found.value)
