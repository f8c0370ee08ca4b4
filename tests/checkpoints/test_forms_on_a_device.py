"""Every checkpoint format on an accelerator: what is stored crosses the bus, and is decoded there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from offload.storage.handle import Handle
from offload.tensor.guests import value_on
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of, meta_of
from tests.checkpoints.forms import FORMS
from tests.checkpoints.pieces import bits_of
from tests.prefetch import delayed_device as delayed
from tests.prefetch.delayed_device import on_the_device

_USUAL = ("fp8-fp4-experts", "ct-w4a16-asym", "bnb-nf4-double", "gptq-act-order", "gguf-q4_k_m")
# In float32, decoded on the CPU.
_BY_NUMPY = ("gguf-tq", "gguf-mxfp4", "gguf-nvfp4")
_MUCH = 1.02  # of the stored bytes that may cross the bus


@pytest.fixture(autouse=True)
def transformers() -> None:
    """Imported once, and not in each child."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    assert LlamaForCausalLM


@pytest.mark.parametrize(
    "name",
    [
        name if name in _USUAL else pytest.param(name, marks=pytest.mark.campaign("devices", only=True))
        for name in FORMS
    ],
)
@on_the_device
def test_a_form_is_decoded_on_the_device_as_on_the_cpu(device: torch.device, folder: Path, name: str) -> None:
    """Bit for bit, and only what is stored crosses the bus."""
    form = FORMS[name]
    form.write(folder)
    delayed.ops.late(50)
    model = offload.from_pretrained(folder, **form.options)
    offload.budget.set_read_ahead(False)
    values = {key: value for key, value in model.named_parameters() if offload.is_offloaded(value)}
    handles = {key: handle_of(value) for key, value in values.items()}
    for handle in handles.values():  # tables go to the device once
        value_on(handle, meta_of(handle), device)
    torch.accelerator.synchronize()
    before, back = delayed.ops.sent(), delayed.ops.returned()
    sent = {key: value_on(handle, meta_of(handle), device) for key, handle in handles.items()}
    torch.accelerator.synchronize()
    crossed, returned = delayed.ops.sent() - before, delayed.ops.returned() - back

    wrong = [key for key, handle in handles.items() if not _alike(handle.base(), sent[key])]
    assert len(values) > 4
    assert [] == wrong
    if not name.startswith(_BY_NUMPY):
        assert crossed <= _MUCH * sum(map(_stored_bytes, handles.values()))
        assert returned == 0


def _alike(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if type(expected) is not torch.Tensor:  # of torchao's
        expected, found = expected.dequantize(), found.dequantize()
    same = expected.stride() == found.stride() and expected.dtype == found.dtype
    return same and torch.equal(bits_of(expected), bits_of(found.cpu()))


def _stored_bytes(handle: Handle) -> int:
    return sum(one.extent[1] for one in stored_in([handle]))
