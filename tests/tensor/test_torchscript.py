"""TorchScript: tracing or scripting over offloaded tensors gives the same as over plain ones, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor
from tests.equal import assert_equal
from tests.processes import run_script

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

INPUT = torch.linspace(-1, 1, 60).view(4, 3, 5)
IMAGES = torch.linspace(-1, 1, 300).view(2, 3, 5, 10)
TOKENS = torch.tensor([[3, 1, 2], [0, 3, 3]])
MODULES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "linear": (lambda: nn.Linear(5, 2), INPUT),
    "frozen": (lambda: nn.Linear(5, 2).requires_grad_(False), INPUT),
    "gated": (lambda: nn.Sequential(nn.Linear(5, 8), nn.GLU(), nn.Dropout(0.5), nn.Linear(4, 3)).eval(), INPUT),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(3, 6, 2, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose1d(6, 3, 2)),
        INPUT,
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding="same", groups=3), nn.BatchNorm2d(6), nn.MaxPool2d(2), nn.Flatten(), nn.Tanh()
        ).eval(),
        IMAGES,
    ),
    "channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), IMAGES),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(5), nn.GroupNorm(3, 3), nn.BatchNorm1d(3)).eval(), INPUT),
    "root mean squares": (lambda: nn.Sequential(nn.RMSNorm(5), nn.PReLU()), INPUT),
    "attention": (lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True), INPUT),
    "embedding": (lambda: nn.Sequential(nn.Embedding(4, 6, padding_idx=1), nn.Linear(6, 2)), TOKENS),
    "bag of rows": (lambda: nn.EmbeddingBag(4, 6, mode="mean"), TOKENS),
    "recurrent": (lambda: nn.GRU(5, 4, batch_first=True), INPUT),
}
NOT_SCRIPTED = {"recurrent"}  # torch scripts `flatten_parameters`, which looks at the storage of each weight


def in_memory_and_on_disk(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    make, example = MODULES[name]
    torch.manual_seed(0)
    plain = make()
    return plain, offload.disk_offload(copy.deepcopy(plain)), example


@pytest.mark.parametrize("name", MODULES)
def test_a_module_on_disk_is_traced_as_one_in_memory(name: str) -> None:
    """With torch's own check of the trace, and the same ops in it: exporters translate them one by one."""
    plain, stored, example = in_memory_and_on_disk(name)
    expected = torch.jit.trace(plain, example)

    module = torch.jit.trace(stored, example)

    kinds = [[node.kind() for node in found.inlined_graph.nodes()] for found in (expected, module)]
    assert kinds[0] == kinds[1]
    for _ in range(3):  # the second time, TorchScript runs what it has learned the first time
        assert_equal(plain(example), module(example))


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NOT_SCRIPTED])
def test_a_module_on_disk_is_scripted_as_one_in_memory(name: str) -> None:
    plain, stored, example = in_memory_and_on_disk(name)

    module = torch.jit.script(stored)

    for _ in range(3):
        assert_equal(plain(example), module(example))


def test_a_trace_takes_arguments_for_what_they_are():
    """Not as constants: another argument gives another result."""
    weight = torch.arange(9.0).view(3, 3)
    stored = OffloadedTensor.from_original_tensor(weight, "w")

    function = torch.jit.trace(lambda x, w: x @ w + w.t(), (torch.eye(3), stored), check_trace=False)

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
