"""A failing system call has no other effect: the error names it, and the same line works the next time.

Each act is repeated for each call that it makes and each error possible for that call; see `tests.acts`.
"""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload import OffloadedTensor
from offload.models import journal
from offload.storage import folders
from tests import faults
from tests.acts import Act, dies_at_each_call, meets_each_fault
from tests.campaigns import campaign

pytestmark = pytest.mark.campaign("faults")

ONES, TWOS = torch.ones(5), torch.full((5,), 2.0)


def stored(folder, value=ONES, name="w"):
    return OffloadedTensor.from_original_tensor(value, name, folder, exist_ok=True)


def old_or_new(*values):
    """A check that the file and the tensor have one of `values`, the same one."""

    def check(weight):
        found = weight.materialize()
        assert any(torch.equal(found, value) for value in values), found
        if weight.offload_dir is not None:
            assert torch.equal(offload.load_file(weight.offload_dir)["w"].materialize(), found)

    return check


def created(folder):
    if os.path.lexists(folder / "w.safetensors"):
        assert torch.equal(ONES, offload.load_file(folder)["w"].materialize())


def update(values, **options):
    def act(weight):
        weight.update_values(values, **options)
        return weight.tolist()

    return act


def add_and_flush(weight):
    weight.fill_(2)
    weight.flush()
    return weight.tolist()


def each(check):
    def check_all(weights):
        for weight in weights:
            check(weight)

    return check_all


def two(folder):
    return [stored(folder / name) for name in "ab"]


def checkpoint(folder):
    folder.mkdir()
    save_file({"w": ONES, "v": TWOS}, folder / "model.safetensors")
    return folder / "model.safetensors"


def pickled(folder):
    folder.mkdir()
    torch.save({"w": ONES, "v": TWOS[::2]}, folder / "model.bin")
    return folder / "model.bin"


def referenced(folder):
    return OffloadedTensor.from_file(checkpoint(folder), "w", offload_dir=folder / "own")


def own_or_in_place(weight):
    """A write to a checkpoint's value goes to a copy: the checkpoint is unchanged."""
    assert weight.tolist() in ([1.0] * 5, [2.0] * 5)
    assert torch.equal(ONES, load_file(weight.offload_dir.parent / "model.safetensors")["w"])


W = "tensor 'w'"
ACTS = {
    "create": Act(lambda folder: folder, lambda folder: stored(folder).tolist(), created, W),
    "create privately": Act(lambda folder: folders._PRIVATE_FOLDERS.clear(), lambda _: stored(None).tolist(), name=W),
    "zeros": Act(
        lambda folder: folder,
        lambda folder: OffloadedTensor.zeros((5,), name="w", offload_dir=folder, exist_ok=True).tolist(),
        name=W,
    ),
    "update": Act(stored, update(TWOS), old_or_new(ONES, TWOS), W),
    "update privately": Act(lambda folder: stored(None), update(TWOS), old_or_new(ONES, TWOS), W),
    "update to another shape": Act(
        stored, update(TWOS[:3].half(), strict_shape=False, strict_dtype=False), old_or_new(ONES, TWOS[:3].half()), W
    ),
    "write in place": Act(stored, add_and_flush, old_or_new(ONES, TWOS), W),
    "write to a checkpoint's": Act(referenced, add_and_flush, own_or_in_place, W),
    "read a checkpoint": Act(checkpoint, lambda path: OffloadedTensor.from_file(path, "w").tolist()),
    "load_file": Act(checkpoint, lambda path: offload.load_file(path)["w"].sum().item()),
    "load_file of a pickle": Act(pickled, lambda path: [w.tolist() for w in offload.load_file(path).values()]),
    "materialize": Act(stored, lambda weight: weight.materialize().tolist(), name=W),
    "deepcopy": Act(stored, lambda weight: copy.deepcopy(weight).tolist(), old_or_new(ONES), W),
    "torch.save": Act(stored, lambda weight: torch.save(weight, weight.offload_dir / "w.pt"), old_or_new(ONES), W),
    "pickle": Act(stored, lambda weight: pickle.loads(pickle.dumps(weight)).tolist(), old_or_new(ONES), W),
}


def network():
    """Two layers with known values, and a buffer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) + number / 8)
    return model.eval()


X = torch.linspace(-1, 1, 8).view(2, 4)


def out(model):
    with torch.no_grad():
        return model(X.to(model[0].weight.dtype)).tolist()


RIGHT = out(network())


def runs_as_before(model):
    assert out(model) == RIGHT


def saved_model(folder, **options):
    offload.save_checkpoint(network(), folder, **options)
    return folder


def saved_bin(folder):
    folder.mkdir()
    torch.save(network().state_dict(), folder / "pytorch_model.bin")
    return folder


def dispatched(folder, **options):
    with offload.init_empty_weights():
        model = network()
    return out(offload.load_checkpoint_and_dispatch(model, folder, **options))


def doubled(name, tensor):
    return tensor * 2


def numbers(folder):
    return {name: stored(folder, ONES + number, name) for number, name in enumerate("abc")}


def mapped_once(tensors):
    journal._PATIENCE = math.inf  # it writes after a second, too: how often depends on the machine
    offload.map_values(doubled, tensors, resume="twice", progress=False)
    return [tensor.tolist() for tensor in tensors.values()]


def each_is_once_or_twice(tensors):
    for number, tensor in enumerate(tensors.values()):
        assert tensor.tolist() in ([number + 1.0] * 5, [2 * number + 2.0] * 5)


def old_tree(folder):
    offload.save_tree({"w": ONES, "same": 1}, folder)
    return folder


def new_tree(folder):
    offload.save_tree({"w": TWOS, "deep": [ONES, 2]}, folder)
    return read_tree(folder)


def read_tree(folder):
    tree = offload.load_tree(folder)
    return tree["w"].tolist(), [value for name, value in tree.items() if name == "same"]


def either_tree(folder):
    assert read_tree(folder) in (([1.0] * 5, [1]), ([2.0] * 5, []))


def trained(folder):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    offload.training.save_training(model, folder, optimizer, step=1)
    return folder


def train_more(folder):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for parameter in model.parameters():  # autograd of a CUDA build does not run in a forked child
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    offload.training.save_training(model, folder, optimizer, step=2)
    return json.loads((folder / "tree.json").read_text()).keys()


def either_training(folder):
    assert offload.training.load_training(network(), folder)["step"] in (1, 2)


def on_disk_or_both(folder):
    model = offload.disk_offload(network(), folder / "live")
    return model, trained(folder / "run")


MODELS = {
    "dispatch": Act(lambda folder: saved_model(folder), dispatched),
    "dispatch shards": Act(lambda folder: saved_model(folder, max_shard_size=100), dispatched),
    "dispatch a pickle": Act(saved_bin, dispatched),
    "dispatch and cast": Act(
        saved_model,
        lambda folder: dispatched(folder, dtype=torch.float64, offload_dir=folder / "cast", store=True),
    ),
    "disk_offload": Act(
        lambda folder: (network(), folder),
        lambda given: out(offload.disk_offload(*given)),
        lambda given: runs_as_before(given[0]),
    ),
    "save_checkpoint": Act(
        saved_model,
        lambda folder: dispatched((offload.save_checkpoint(network(), folder, 100), folder)[1]),
        lambda folder: dispatched(folder),
    ),
    "map_values": Act(numbers, mapped_once, each_is_once_or_twice),
    "save_tree": Act(old_tree, new_tree, either_tree),
    "load_tree": Act(old_tree, read_tree, either_tree),
    "save_training": Act(trained, train_more, either_training),
    "load_training": Act(
        on_disk_or_both,
        lambda given: (offload.training.load_training(given[0], given[1]), out(given[0])),
    ),
}


READS = {"read a checkpoint", "load_file", "materialize", "torch.save", "pickle", "load_tree"}
READS |= {
    "dispatch",
    "dispatch shards",
    "dispatch a pickle",
    "write in place",
    "load_training",
}  # or write through mappings
READS |= {"update to another shape"}  # which a tensor of another process does not follow


@pytest.mark.parametrize("name", [*ACTS, *MODELS])
def test_an_error_of_the_system_is_reported_and_leaves_the_rest_intact(name, private_place):
    assert meets_each_fault({**ACTS, **MODELS}[name], private_place) > 3


@pytest.mark.parametrize("name", [*ACTS, *MODELS])
def test_a_lasting_error_is_reported_and_once_it_is_gone_everything_works(name, private_place):
    """A full disk, or too many open files, can persist while the act is undone."""
    codes = faults.CODES if campaign("faults") else [errno.ENOSPC, errno.EMFILE]

    meets_each_fault({**ACTS, **MODELS}[name], private_place, codes, lasting=True)


@pytest.mark.parametrize("name", [name for name in {**ACTS, **MODELS} if name not in READS])
def test_a_process_that_is_killed_leaves_the_old_or_the_new_and_what_it_left_goes(name, private_place):
    assert dies_at_each_call({**ACTS, **MODELS}[name], private_place) > 2
