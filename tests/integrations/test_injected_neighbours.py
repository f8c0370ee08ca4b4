"""A system call that fails inside a third-party library leaves its work as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offload
from tests.acts import Act, meets_each_fault

pytestmark = pytest.mark.campaign("faults")

pytest.importorskip("transformers")
torchao = pytest.importorskip("torchao.quantization")
pytest.importorskip("tensordict")

STATES = torch.linspace(-1, 1, 2 * 4 * 300 * 8).view(2, 4, 300, 8)


def begun(folder):
    """A cache with ten tokens and a capacity of 256."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 9}
    past = offload.integrations.kv_cache(LlamaConfig(**sizes, num_hidden_layers=1), offload_dir=folder / "cache")
    past.update(STATES[:, :, :10], STATES[:, :, :10] * 2, 0)
    return past


def one_more(past):
    past.update(STATES[:, :, 10:11], STATES[:, :, 10:11] * 2, 0)
    return taken_back(past, 11)


def many_more(past):
    past.update(STATES[:, :, 10:], STATES[:, :, 10:] * 2, 0)
    return taken_back(past, 300)


def taken_back(past, count):
    """Its contents, before it is cropped to ten tokens."""
    found = [states.materialize().clone() for states in (past.layers[0].keys, past.layers[0].values)]
    past.crop(10 - count)
    return [torch.equal(found[0], STATES[:, :, :count]), torch.equal(found[1], STATES[:, :, :count] * 2)]


def has_ten_tokens(past):
    """And the added ones, if a call failed while they were read."""
    layer = past.layers[0]
    past.crop(min(10 - layer.keys.shape[-2], 0))
    for states, expected in ((layer.keys, STATES), (layer.values, STATES * 2)):
        assert torch.equal(expected[:, :, :10], states.materialize())


def layers(folder):
    torch.manual_seed(0)
    return offload.disk_offload(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), folder)


def quantized(model):
    offload.quantize_(model, torchao.Int8WeightOnlyConfig())
    return runs(model)


def runs(model):
    with torch.no_grad():
        return model(torch.ones(1, 32)).tolist()


def memmapped(folder):
    from tensordict import LazyStackedTensorDict, TensorDict

    layers = [TensorDict(x=STATES[0, 0, :size], batch_size=[]) for size in (2, 3)]
    TensorDict({"a/b": STATES[0, 0], "stack": LazyStackedTensorDict(*layers)}, batch_size=[]).memmap(folder)
    return folder


def entries(folder):
    from offload.integrations.tensordict import load_memmap

    found = load_memmap(folder)
    return found["a/b"].tolist(), [layer["x"].tolist() for layer in found["stack"].tensordicts]


ACTS = {
    "kv_cache": Act(begun, one_more, has_ten_tokens),
    "kv_cache that grows": Act(begun, many_more, has_ten_tokens),
    "load_memmap": Act(memmapped, entries),
    "quantize_": Act(layers, quantized, runs),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_error_of_the_system_is_reported_and_leaves_the_rest_intact(name, private_place):
    assert meets_each_fault(ACTS[name], private_place) > 3
