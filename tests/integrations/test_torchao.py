"""Weights quantized by torchao are stored as they are, compute as in memory, and are restored."""

import copy
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import CheckpointError, StaleViewError, UnsupportedOpError
from offload.storage import subclasses
from tests.processes import run_script
from tests.quantized import WEIGHT_ONLY, identical, outcome

pytest.importorskip("torchao")

BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EVERY_CONFIG = pytest.mark.parametrize("config", WEIGHT_ONLY)


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)


def quantized(config: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from torchao.quantization import quantize_

    layer = nn.Linear(256, 64, bias=False)
    layer.weight = nn.Parameter(weight(dtype))
    torch.manual_seed(0)  # codebooks start at random
    quantize_(layer, WEIGHT_ONLY[config]())
    return layer.weight


def through(store: Callable[[Any], bytes], load: Callable[[bytes], Any]) -> Callable[[Any], Any]:
    return lambda value: load(store(value))


def saved(value: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


ACTS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda w: F.linear(torch.ones(3, 256, dtype=w.dtype), w),
    "linear with a bias": lambda w: F.linear(torch.ones(3, 256, dtype=w.dtype), w, torch.ones(64, dtype=w.dtype)),
    "parameter": lambda w: F.linear(torch.ones(3, 256, dtype=w.dtype), nn.Parameter(w.detach(), requires_grad=False)),
    "dequantize": lambda w: w.dequantize(),
    "slice": lambda w: w[8:16],
    "row": lambda w: w[3],
    "t": lambda w: w.t(),
    "cast": lambda w: w.to(torch.float16),
    "cast and move": lambda w: w.to("cpu", torch.float16),
    "half": lambda w: w.half(),
    "clone": lambda w: w.clone(),
    "shape": lambda w: (w.shape, w.stride(), w.dtype, w.device, w.numel(), w.requires_grad, w.is_leaf),
    "torch.save": through(saved, lambda data: torch.load(io.BytesIO(data), weights_only=False)),
    "pickle": through(pickle.dumps, pickle.loads),
}


@pytest.fixture(autouse=True)
def every_class_is_known_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations by other tests don't help."""
    monkeypatch.setattr(subclasses, "_REGISTERED", {})


@BOTH_DTYPES
@EVERY_CONFIG
def test_a_quantized_weight_on_disk_does_all_that_it_does_in_memory(config, dtype):
    in_memory = quantized(config, dtype)
    on_disk = OffloadedTensor.from_original_tensor(in_memory, "w")

    for name, act in ACTS.items():
        assert identical(outcome(act, in_memory), outcome(act, on_disk)), name


@BOTH_DTYPES
@EVERY_CONFIG
def test_a_quantized_weight_keeps_its_class(tmp_path, config, dtype):
    """Materialized, copied, detached, moved, as the new value of a plain weight, and opened again."""
    value = quantized(config, dtype)
    expected = value.detach()
    stored = OffloadedTensor.from_original_tensor(value, "w", tmp_path)
    plain = OffloadedTensor.from_original_tensor(weight(dtype), "plain")
    plain.update_values(expected)
    copied = copy.deepcopy(stored)
    again = OffloadedTensor.from_file(stored.offload_path)

    assert isinstance(stored, nn.Parameter)
    for one in (stored, plain, copied, again, stored.detach(), stored.to("cpu"), nn.Parameter(stored.detach(), False)):
        assert offload.is_offloaded(one)
        assert identical(expected, one.materialize())
    stored.detach().update_values(weight(dtype))
    assert identical(expected, copied.materialize())
    assert identical(weight(dtype), stored.materialize())


def test_every_quantized_weight_is_opened_by_another_process(tmp_path):
    """One that has not imported torchao; from a folder as a whole, bit for bit."""
    for config in WEIGHT_ONLY:
        OffloadedTensor.from_original_tensor(quantized(config), config, tmp_path)
    script = """
        import sys, offload
        values = {name: value.materialize() for name, value in offload.load_file(sys.argv[1]).items()}
        from tests.integrations.test_torchao import identical, quantized
        for name, value in values.items():
            assert identical(quantized(name).detach(), value), name
        print(len(values))
    """

    assert f"{len(WEIGHT_ONLY)}\n" == run_script(script, tmp_path)


IN_MEMORY_ONLY = {"codebook"}  # compilers make nothing of it in memory either
EXPORTED = {"float8", "float8-e5m2", "float8-tensor", "nvfp4"}


@contextmanager
def untraced() -> Iterator[None]:
    """Compiling without torch's structured trace: it prints weights, and torchao's gguf class has no repr (0.18).

    pytest switches it on, as TORCH_TRACE does: its handlers go to each logger that does not propagate.
    """
    trace = logging.getLogger("torch.__trace")
    handlers, trace.handlers = trace.handlers, []
    try:
        yield
    finally:
        trace.handlers = handlers


def layers(config: str) -> tuple[nn.Linear, nn.Linear]:
    made = []
    in_memory = quantized(config, torch.bfloat16).detach()
    for value in (in_memory, OffloadedTensor.from_original_tensor(in_memory, "w")):
        layer = nn.Linear(256, 64, dtype=torch.bfloat16, bias=False)
        layer.weight = nn.Parameter(value, requires_grad=False)
        made.append(layer)
    return made[0], made[1]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("config", sorted(WEIGHT_ONLY.keys() - IN_MEMORY_ONLY))
def test_a_compiled_layer_gives_what_it_gives_in_memory(config):
    """In one graph, for rows and for batches of them, called again."""
    in_memory, on_disk = layers(config)
    compiled = torch.compile(on_disk, backend="aot_eager", fullgraph=True)

    with torch.no_grad(), untraced():
        for x in (torch.randn(3, 256), torch.randn(3, 256), torch.randn(2, 3, 256)):
            assert torch.equal(in_memory(x.bfloat16()), compiled(x.bfloat16()))
    assert offload.is_offloaded(on_disk.weight)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("config", sorted(WEIGHT_ONLY.keys() - IN_MEMORY_ONLY))
def test_an_exported_layer_gives_what_it_gives_in_memory_or_the_error_says_what_to_do(config):
    in_memory, on_disk = layers(config)
    x = torch.randn(3, 256, dtype=torch.bfloat16)

    if config in EXPORTED:
        assert torch.equal(in_memory(x), torch.export.export(on_disk, (x,)).module()(x))
        return
    with pytest.raises(UnsupportedOpError, match=r"can't be exported.*offload\.materialize\(model\)"):
        torch.export.export(on_disk, (x,))
    offload.materialize(on_disk)
    assert torch.equal(in_memory(x), torch.export.export(on_disk, (x,)).module()(x))


def test_a_view_of_a_plain_weight_is_stale_once_it_is_quantized():
    """It never returns the whole value in place of the part; a view of the whole goes on working."""
    stored = OffloadedTensor.from_original_tensor(weight(), "w")
    row, turned, whole = stored[3], stored.t(), stored.detach()
    value = quantized("int8").detach()
    stored.update_values(value)

    for part in (row, turned):
        with pytest.raises(StaleViewError, match=r"'w' was replaced by a Int8Tensor.*cut the view again"):
            part.materialize()
        with pytest.raises(StaleViewError):
            F.linear(torch.ones(1, part.shape[-1]), part)
    assert identical(value, whole.materialize())


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in subclasses._KNOWN.items() for name in names]
)
def test_the_names_on_the_allow_list_are_those_of_classes(package, name):
    found = subclasses._known(f"{package}:{name}")

    assert name == found.__qualname__
    assert package == found.__module__.split(".")[0]


def stored_layers(folder: Path) -> nn.Module:
    """Two layers that torchao has quantized on disk, and saved as a checkpoint."""
    from torchao.quantization import Int8WeightOnlyConfig

    torch.manual_seed(0)
    model = offload.disk_offload(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)))
    offload.quantize_(model.requires_grad_(False), Int8WeightOnlyConfig(), progress=False)
    offload.save_checkpoint(model, folder)
    return model


def test_a_checkpoint_of_a_quantized_model_of_any_class_is_loaded_again(tmp_path):
    model, x = stored_layers(tmp_path), torch.ones(2, 64)
    empty = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)).to("meta").requires_grad_(False)
    kind = type(offload.materialize(model[0].weight))
    again = offload.load_checkpoint_and_dispatch(empty, tmp_path, strict=True)

    assert torch.Tensor is not kind
    assert [kind, kind] == [type(offload.materialize(again[at].weight)) for at in (0, 2)]
    assert torch.equal(model(x), again(x))


def test_a_checkpoint_of_another_quantized_model_is_reported(tmp_path):
    stored_layers(tmp_path)
    other = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(16, 8)).to("meta")

    with pytest.raises(
        CheckpointError, match=r"missing: 2\.bias; .*2\.weight \(checkpoint \(8, 32\), model \(8, 16\)\)"
    ):
        offload.load_checkpoint_in_model(other, tmp_path)
