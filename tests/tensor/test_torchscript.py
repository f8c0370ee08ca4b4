"""TorchScript: tracing or scripting over offloaded tensors gives the same as over plain ones, or is refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import offload
from offload import OffloadedTensor
from offload.testing import assert_equal, ops
from offload.testing.ops import Sample
from tests.op_census import OFFLOADED, close
from tests.processes import run_script
from tests.tensor.test_op_census import OPS, dtypes_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

# Refused by the check of the trace: the indices are read from memory, of a copy, which plain clones don't need.
REFUSED = {"tensor_split"}
# A composite op that takes another branch, with other last bits, for subclasses.
CLOSE = {"linalg.cond", "linalg.lstsq", "norm.nuc"}

INPUT = torch.linspace(-1, 1, 60).view(4, 3, 5)
MODULES = {
    "linear": lambda: nn.Linear(5, 2),
    "frozen": lambda: nn.Linear(5, 2).requires_grad_(False),
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(3, 6, 2, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose1d(6, 3, 2)
    ),
    "norms": lambda: nn.Sequential(nn.LayerNorm(5), nn.GroupNorm(3, 3), nn.BatchNorm1d(3)).eval(),
    "attention": lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True),
}


def function_of(op: Any, sample: Sample) -> tuple[Any, list[torch.Tensor]]:
    """An op as a function of these tensors, which occur in a sample."""
    leaves, spec = tree_flatten(sample)
    places = [place for place, leaf in enumerate(leaves) if ops.is_plain(leaf)]

    def call(*tensors: torch.Tensor) -> Any:
        given = {**dict(enumerate(leaves)), **dict(zip(places, tensors, strict=True))}
        return tree_unflatten([given[place] for place in range(len(leaves))], spec).passed_to(op)

    return call, [leaves[place] for place in places]


def traced(function: Any, tensors: list[torch.Tensor]) -> Any:
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(function, tuple(tensors))


@pytest.mark.parametrize("name", OPS)
def test_a_trace_over_offloaded_tensors_is_that_over_plain_ones(name: str) -> None:
    """With torch's own check of the trace; it then runs on plain and offloaded tensors."""
    op = OPS[name]
    samples = ops.samples_of(op, dtypes_of(op)[0], requires_grad=False)
    for expected_of, actual_of in OFFLOADED.pairs(ops.spread(samples, name, most=1)):
        call, tensors = function_of(op, expected_of)
        over_plain, error = ops.attempt(traced, call, tensors)
        if error is not None or not tensors:
            pytest.skip("torch can't trace it")
        stored = [leaf for leaf in tree_leaves(actual_of) if isinstance(leaf, OffloadedTensor)]
        if name in REFUSED:
            with pytest.raises(torch.jit.TracingCheckError):
                traced(call, stored)
            return
        over_stored = traced(call, stored)
        expected = ops.succeed(over_plain, *tensors)
        for arguments in (tensors, stored):
            actual = ops.succeed(over_stored, *arguments)
            if name in CLOSE:
                close(OFFLOADED, tree_leaves(expected), tree_leaves(actual))
            else:
                OFFLOADED.assert_same(expected, actual, values=name not in ops.ARBITRARY, strides=False)


def _traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, INPUT)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, how) for name in MODULES for how in (torch.jit.script, _traced)), ("recurrent", _traced)],
)
def test_a_module_on_disk_is_compiled_as_one_in_memory(name, compiled):
    torch.manual_seed(0)
    plain = {**MODULES, "recurrent": lambda: nn.GRU(5, 4, batch_first=True)}[name]()
    stored = offload.disk_offload(copy.deepcopy(plain))

    module = compiled(stored)

    for _ in range(3):  # the second time, TorchScript runs what it has learned the first time
        assert_equal(plain(INPUT), module(INPUT))


def test_a_trace_takes_arguments_for_what_they_are():
    """Not as constants: another argument gives another result."""
    weight = torch.arange(9.0).view(3, 3)
    stored = OffloadedTensor.from_original_tensor(weight, "w")

    function = torch.jit.trace(lambda x, w: x @ w + w.t(), (torch.eye(3), stored))

    assert torch.equal(torch.eye(3) @ (weight * 2) + weight.t() * 2, function(torch.eye(3), weight * 2))


SAVE = """
    import io, os, sys, torch, offload
    os.chdir(sys.argv[1])
    module = offload.disk_offload(torch.nn.Linear(3, 4)).eval()
    scripted = torch.jit.script(module)
    for compiled in (scripted, torch.jit.trace(module, torch.ones(3)), torch.jit.freeze(scripted)):
        for save in (
            lambda: torch.jit.save(compiled, io.BytesIO()),
            lambda: compiled.save("saved.pt"),
            lambda: compiled.save_to_buffer(),
            lambda: compiled._save_for_lite_interpreter("saved.ptl"),
        ):
            try:
                save()
            except RuntimeError as error:
                print("refused")
"""


def test_saving_torchscript_over_offloaded_tensors_is_refused(tmp_path):
    """It reads the memory behind a tensor, where there is none; in a separate process, since it might crash."""
    assert ["refused"] * 12 == run_script(SAVE, tmp_path).split()


def test_torchscript_of_a_materialized_module_is_saved(tmp_path):
    """The workaround."""
    module = offload.disk_offload(nn.Linear(3, 4))
    expected = module(torch.ones(3))

    torch.jit.script(offload.materialize(module)).save(tmp_path / "saved.pt")

    assert torch.equal(expected, torch.jit.load(tmp_path / "saved.pt")(torch.ones(3)))
