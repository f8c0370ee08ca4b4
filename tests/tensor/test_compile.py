"""Compilers: torch.compile, torch.export and make_fx accept offloaded tensors as they accept plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import offload
from offload import OffloadedTensor
from offload.tensor.deferred import deferred
from tests.equal import assert_equal

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BACKENDS = ["eager", "aot_eager"]


class Small(nn.Module):
    """A layer, a norm and a buffer, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 6)
        self.same = nn.Linear(6, 8, bias=False)
        self.same.weight = self.up.weight
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x) + self.same(x)))) + self.shift


@pytest.fixture
def plain() -> Small:
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def on_disk(plain: Small) -> Small:
    return offload.disk_offload(copy.deepcopy(plain), offload_buffers=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_module_gives_what_it_gives_on_plain_tensors(backend: str, plain: Small, on_disk: Small) -> None:
    """With and without a graph, called again, and with another batch size; in one graph, without breaks."""
    compiled = torch.compile(on_disk, backend=backend, fullgraph=True)

    for batch in (2, 2, 5):
        x = torch.randn(batch, 6)
        assert_equal(plain(x), compiled(x))
        with torch.no_grad():
            assert_equal(plain(x), compiled(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_gradients_are_those_of_plain_tensors(backend: str, plain: Small, on_disk: Small) -> None:
    x = torch.randn(2, 6, requires_grad=True)
    grads = []
    for module in (plain, on_disk):
        loss = torch.compile(module, backend=backend)(x).square().sum()
        grads.append(torch.autograd.grad(loss, [x, *module.parameters()]))

    for expected, actual in zip(*grads, strict=True):
        assert type(actual) is torch.Tensor
        assert_equal(expected, actual)


@pytest.mark.slow(20)
def test_inductor_gives_what_it_gives_on_plain_tensors(plain: Small, on_disk: Small) -> None:
    """The same generated code, hence the same bits; even after an update of a weight."""
    x = torch.randn(2, 6)
    with torch.no_grad():
        try:
            expected = torch.compile(plain, backend="inductor")(x)
        except Exception as error:
            if "compiler" in str(error).lower():
                pytest.skip("there is no C++ compiler here")
            raise
        compiled = torch.compile(on_disk, backend="inductor")
        assert_equal(expected, compiled(x))
        on_disk.shift.add_(1)
        plain.shift.add_(1)
        assert_equal(torch.compile(plain, backend="inductor")(x), compiled(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_sees_a_changed_value(backend: str, plain: Small, on_disk: Small) -> None:
    """A write, an atomic replacement, and an assignment to `.data` after compilation."""
    x = torch.randn(2, 6)
    compiled = torch.compile(on_disk, backend=backend)
    changes = [
        lambda module: module.shift.mul_(2),
        lambda module: _replace(module.shift, torch.ones(6)),
        lambda module: setattr(module.down.bias, "data", torch.zeros(6)),
    ]
    for change in changes:
        compiled(x)
        with torch.no_grad():
            change(plain)
            change(on_disk)

        assert_equal(plain(x), compiled(x))


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(tensor, OffloadedTensor):
        tensor.update_values(value)
    else:
        tensor.copy_(value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("change", [lambda w: w.add_(1), lambda w: w.copy_(torch.ones(4)), lambda w: w[1:3].zero_()])
def test_a_compiled_inplace_update_reaches_the_file(backend: str, is_own: bool, change: Any, tmp_path: Path) -> None:
    """A value of a checkpoint is copied to a file of its own; the version counter increases."""
    path, expected = tmp_path / "checkpoint.safetensors", torch.arange(4.0)
    safetensors.torch.save_file({"w": expected}, path)
    before = path.read_bytes()
    w = OffloadedTensor.from_original_tensor(expected.clone(), "w") if is_own else OffloadedTensor.from_file(path, "w")
    compiled = torch.compile(lambda t: (change(t), t + 1)[1], backend=backend)
    for _ in range(2):
        result = compiled(w)
        change(expected)

    assert_equal(expected + 1, result)
    assert_equal(expected, w)
    assert before == path.read_bytes()
    assert_equal(expected, safetensors.torch.load_file(w.offload_path)["w"])
    assert w._version > 0


class Chain(nn.Module):
    """Products with each of its tensors in turn."""

    def __init__(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            held = nn.Parameter(tensor, requires_grad=False) if kind == "parameters" else tensor
            (self.register_parameter if kind == "parameters" else self.register_buffer)(f"t{number}", held)
        self.count = number + 1

    def forward(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        for tensor in tensors or [getattr(self, f"t{number}") for number in range(self.count)]:
            x = x @ tensor
        return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["parameters", "buffers", "arguments"])
@pytest.mark.parametrize("form", ["values", "views", "recipes"])
def test_compiled_code_takes_many_tensors_of_each_form(backend: str, kind: str, form: str, tmp_path: Path) -> None:
    """Compilers tell tensors apart by `id`: those of guests that are gone come back."""
    values = {f"w{number}": torch.randn(2, 4, 4) for number in range(6)}
    safetensors.torch.save_file(values, tmp_path / "values.safetensors")
    stored = offload.load_file(tmp_path / "values.safetensors")
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "values": lambda one: OffloadedTensor.from_original_tensor(one[1].materialize(), "w"),
        "views": lambda one: one[1],
        "recipes": lambda one: deferred(one)[1].double().stored("w"),  # type: ignore[attr-defined]
    }
    ours = [forms[form](one) for one in stored.values()]
    theirs = [one.materialize() for one in ours]
    x = torch.randn(3, 4, dtype=theirs[0].dtype)

    results = []
    for tensors in (ours, theirs):
        held, given = ([x], tensors) if kind == "arguments" else (tensors, [])
        compiled = torch.compile(Chain(held, kind), backend=backend, fullgraph=True)
        results.append((compiled(x, *given), compiled(x, *given)))

    for expected, found in zip(results[1], results[0], strict=True):
        assert_equal(expected, found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_made_in_compiled_code_comes_out_right(backend: str) -> None:
    w = OffloadedTensor.from_original_tensor(torch.arange(6.0).view(2, 3), "w")
    view, total = torch.compile(lambda t: (t.t()[1:], t.sum()), backend=backend)(w)

    assert_equal(torch.arange(6.0).view(2, 3).t()[1:], view)
    assert_equal(torch.tensor(15.0), total)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_module_gives_what_the_module_gives(strict: bool, plain: Small, on_disk: Small) -> None:
    """With its parameters still on disk, and tied."""
    x = torch.randn(2, 6)
    program = torch.export.export(on_disk, (x,), strict=strict)

    assert_equal(plain(x), program.module()(x))
    assert all(offload.is_offloaded(parameter) for parameter in program.state_dict.values())


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_through(mode: str) -> None:
    """The graph has the plain ops, and runs on plain and offloaded tensors."""
    weight, x = torch.randn(4, 6), torch.randn(2, 6)
    w = OffloadedTensor.from_original_tensor(weight, "w")

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).relu()

    expected, traced = make_fx(function, tracing_mode=mode)(x, weight), make_fx(function, tracing_mode=mode)(x, w)

    assert _ops(expected) == _ops(traced)
    assert_equal(function(x, weight), traced(x, w))
    assert_equal(function(x, weight), traced(x, weight))


def _ops(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_a_tensor_that_changes_its_shape_while_it_is_traced_is_still_read() -> None:
    """Nothing is known about a traced tensor's pages, before and after."""
    w = OffloadedTensor.from_original_tensor(torch.arange(6.0).view(2, 3), "w")

    def act(tensor: torch.Tensor) -> torch.Tensor:
        tensor.t_()
        return tensor + 1

    graph = make_fx(act, tracing_mode="fake")(w)

    assert torch.equal(torch.arange(6.0).view(2, 3).t() + 1, graph(torch.arange(6.0).view(2, 3)))
