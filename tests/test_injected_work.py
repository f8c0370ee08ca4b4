"""Code that works with values on disk, and writes them while working: each of its system calls fails once."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor
from offload.checkpoints.conversion import convert_checkpoint
from offload.training.optimizer import is_on_disk
from tests.acts import Act, dies_at_each_call, meets_each_fault
from tests.engines import settled

pytestmark = pytest.mark.campaign("faults")

ONES = torch.ones(5)


def trained(folder):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return layer, optimizer, folder


def state_of(optimizer):
    return [value.tolist() for state in optimizer.state_dict()["state"].values() for value in state.values()]


def put_on_disk(given):
    layer, optimizer, folder = given
    if not is_on_disk(optimizer):
        offload.training.offload_optimizer(optimizer, offload_dir=folder, model=layer, min_bytes=1)
    return state_of(optimizer)


def optimizer_is_whole(given):
    assert state_of(trained(None)[1]) == state_of(given[1])


def backward(folder):
    """Gradients over activations that were on disk."""
    w = torch.linspace(-1, 1, 64, requires_grad=True)
    try:
        with offload.training.offload_activations(offload_dir=folder, min_bytes=1):
            y = w
            for _ in range(4):
                y = y.exp()
            y = y.sum()
            settled()
        y.backward()
    finally:
        settled()  # an error ends this while the writer, which continues, has a file open
    return w.grad.tolist()


def computed(folder):
    with offload.offloading(folder, min_bytes=1):
        x = torch.ones(4, 4)
        y = x @ x + 1
    return y.tolist()


def checkpoint(folder):
    offload.save_checkpoint({"w": ONES, "v": ONES * 2}, folder / "old")
    (folder / "old" / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


def converted(folder, **options):
    shutil.rmtree(folder / "new", ignore_errors=True)
    convert_checkpoint(folder / "old", folder / "new", **options)
    return values_in(folder / "new")


def values_in(folder):
    return {name: value.tolist() for name, value in offload.load_file(folder).items()}


def nothing_or_whole(folder):
    for place in [path for path in folder.iterdir() if not path.name.startswith(".")]:
        assert {"w": [1.0] * 5, "v": [2.0] * 5} == values_in(place)


ACTS = {
    "offload_optimizer": Act(trained, put_on_disk, optimizer_is_whole),
    "offload_activations": Act(lambda folder: folder, backward, all_threads=True),
    "offloading": Act(lambda folder: folder, computed),
    "offloaded_like": Act(
        lambda folder: OffloadedTensor.from_original_tensor(ONES, "w", folder),
        lambda weight: offload.offloaded_like(lambda w: w * 3, weight, "norms", exist_ok=True).tolist(),
    ),
    "convert_checkpoint": Act(checkpoint, lambda folder: converted(folder, dtype=torch.float64), nothing_or_whole),
    "convert_checkpoint to values": Act(
        checkpoint, lambda folder: converted(folder, to_offload_folder=True), nothing_or_whole
    ),
}


WRITES_IN_PASSING = {"offload_activations", "offload_optimizer"}


@pytest.mark.parametrize("name", ACTS)
def test_an_error_of_the_system_is_reported_and_leaves_the_rest_intact(name, private_place):
    assert meets_each_fault(ACTS[name], private_place) > 3


@pytest.mark.parametrize("name", [name for name in ACTS if name not in WRITES_IN_PASSING])
def test_a_process_that_is_killed_leaves_the_old_or_the_new_and_what_it_left_goes(name, private_place):
    assert dies_at_each_call(ACTS[name], private_place) > 2
