"""A call of the system that fails costs nothing but itself: the error says what, and the same line works the next time.

Each act is done once for each call that it makes and each error that this call may end with; see `tests.faults`.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload import OffloadedTensor, write_buffer
from offload.errors import MapError, OffloadError
from offload.storage import folders
from offload.storage.write import TEMPORARY
from tests import faults
from tests.processes import in_fork

ONES, TWOS = torch.ones(5), torch.full((5,), 2.0)


@dataclass(frozen=True)
class Act:
    """What is tried.

    Attributes:
        begin: prepares a folder, and gives what `act` is given.
        act: what is to fail; what it returns is compared by `same` with what it returns without a fault.
        check: raises if what is left after an error is neither as before nor as after.
        name: of the tensor that errors name; empty where they need not.
    """

    begin: Callable[[Path], Any]
    act: Callable[[Any], Any]
    check: Callable[[Any], object] = field(default=lambda given: None)
    name: str = "w"


def stored(folder, value=ONES, name="w"):
    return OffloadedTensor.from_original_tensor(value, name, folder)


def old_or_new(*values):
    """A check that the file and the tensor have one of `values`, the same."""

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


def buffered(weights):
    with write_buffer():
        for weight in weights:
            weight.update_values(TWOS * 3)
            weight.update_values(TWOS)
    return [weight.tolist() for weight in weights]


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


ACTS = {
    "create": Act(lambda folder: folder, lambda folder: stored(folder).tolist(), created),
    "create privately": Act(lambda folder: folders._PRIVATE_FOLDERS.clear(), lambda _: stored(None).tolist()),
    "zeros": Act(
        lambda folder: folder,
        lambda folder: OffloadedTensor.zeros((5,), name="w", offload_dir=folder).tolist(),
    ),
    "update": Act(stored, update(TWOS), old_or_new(ONES, TWOS)),
    "update privately": Act(lambda folder: stored(None), update(TWOS), old_or_new(ONES, TWOS)),
    "update to another shape": Act(
        stored, update(TWOS[:3].half(), strict_shape=False, strict_dtype=False), old_or_new(ONES, TWOS[:3].half())
    ),
    "write in place": Act(stored, add_and_flush, old_or_new(ONES, TWOS)),
    "write to a checkpoint's": Act(referenced, add_and_flush, lambda weight: None),
    "write_buffer": Act(two, buffered, each(old_or_new(ONES, TWOS * 3, TWOS))),
    "read a checkpoint": Act(checkpoint, lambda path: OffloadedTensor.from_file(path, "w").tolist(), name=""),
    "load_file": Act(checkpoint, lambda path: offload.load_file(path)["w"].sum().item(), name=""),
    "load_file of a pickle": Act(pickled, lambda path: [w.tolist() for w in offload.load_file(path).values()], name=""),
    "materialize": Act(stored, lambda weight: weight.materialize().tolist()),
    "deepcopy": Act(stored, lambda weight: copy.deepcopy(weight).tolist(), old_or_new(ONES)),
    "pickle": Act(stored, lambda weight: pickle.loads(pickle.dumps(weight)).tolist(), old_or_new(ONES)),
}


def network():
    """Two layers of known values, and a buffer."""
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
    offload.save_training(folder, model, optimizer, step=1)
    return folder


def train_more(folder):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(X).sum().backward()
    optimizer.step()
    offload.save_training(folder, model, optimizer, step=2)
    return json.loads((folder / "latest.json").read_text()).keys()


def either_training(folder):
    assert offload.load_training(folder, network())["step"] in (1, 2)


def on_disk_or_both(folder):
    model = offload.disk_offload(network(), folder / "live")
    return model, trained(folder / "run")


MODELS = {
    "dispatch": Act(lambda folder: saved_model(folder), dispatched, name=""),
    "dispatch shards": Act(lambda folder: saved_model(folder, max_shard_size=100), dispatched, name=""),
    "dispatch a pickle": Act(saved_bin, dispatched, name=""),
    "dispatch and cast": Act(
        saved_model,
        lambda folder: dispatched(folder, dtype=torch.float64, offload_dir=folder / "cast"),
        name="",
    ),
    "disk_offload": Act(
        lambda folder: (network(), folder),
        lambda given: out(offload.disk_offload(*given)),
        lambda given: runs_as_before(given[0]),
        name="",
    ),
    "save_checkpoint": Act(
        saved_model,
        lambda folder: dispatched((offload.save_checkpoint(network(), folder, 100), folder)[1]),
        lambda folder: dispatched(folder),
        name="",
    ),
    "map_values": Act(numbers, mapped_once, each_is_once_or_twice, name=""),
    "save_tree": Act(old_tree, new_tree, either_tree, name=""),
    "load_tree": Act(old_tree, read_tree, either_tree, name=""),
    "save_training": Act(trained, train_more, either_training, name=""),
    "load_training": Act(
        on_disk_or_both,
        lambda given: (offload.load_training(given[1], given[0]), out(given[0])),
        name="",
    ),
}


READS = {"read a checkpoint", "load_file", "materialize", "pickle", "load_tree"}
READS |= {
    "dispatch",
    "dispatch shards",
    "dispatch a pickle",
    "write in place",
    "load_training",
}  # or writes by mappings
READS |= {"update to another shape"}  # which a tensor of another process does not follow


@pytest.fixture
def place(quick_folder, monkeypatch):
    """Where private folders are made too."""
    monkeypatch.setattr(tempfile, "tempdir", quick_folder)
    monkeypatch.setattr(folders, "_PRIVATE_FOLDERS", {})
    return Path(quick_folder)


@pytest.mark.parametrize("name", [*ACTS, *MODELS])
def test_an_error_of_the_system_is_told_and_costs_nothing_else(name, place):
    tried, numbers, seen = {**ACTS, **MODELS}[name], itertools.count(), 0  # in a folder of its own each time
    expected = tried.act(tried.begin(place / "expected"))

    for failure in faults.each_failure(lambda: tried.begin(place / f"tried{next(numbers)}"), tried.act):
        seen += 1
        try:
            if failure.error is None:
                assert expected == failure.result
            else:
                check_error(failure, tried.name, place)
            assert [] == failure.leaked
            tried.check(failure.given)
            assert expected == tried.act(failure.given)
            assert is_of_removing(failure.call) or [] == list(place.rglob(f"{TEMPORARY}*"))
        except Exception as error:
            raise AssertionError(str(failure)) from error
        del failure
        for folder in place.glob("tried*"):
            shutil.rmtree(folder)

    assert seen > 3


@pytest.mark.parametrize("name", [name for name in {**ACTS, **MODELS} if name not in READS])
def test_a_process_that_is_killed_leaves_the_old_or_the_new_and_what_it_left_goes(name, place):
    """At each call that changes files; the next process does the same act, and sweeps."""
    tried, numbers = {**ACTS, **MODELS}[name], itertools.count()
    expected = tried.act(tried.begin(place / "expected"))

    def check(given, call):
        tried.check(given)
        assert in_fork(lambda: (expected == tried.act(given) and use_again(place)) or os._exit(1))
        assert [] == left_in(place)

    calls = faults.killed_at_each(lambda: tried.begin(place / f"tried{next(numbers)}"), tried.act, check)

    assert len(calls) > 2


def left_in(place):
    """Temporary files, but for those in private folders, which go as a whole."""
    return [path for path in place.rglob(f"{TEMPORARY}*") if not any("offload-" in part for part in path.parent.parts)]


def use_again(place):
    """Have a value of another name in each folder that something was left in."""
    return [stored(folder, name="another") for folder in {path.parent for path in left_in(place)}] or True


def is_of_removing(call):
    """What could not be removed is removed later."""
    return call.name in faults.REMOVES or "_sweep" in call.where


def check_error(failure, name, place):
    error = failure.error
    assert isinstance(error, OffloadError)
    assert str(place) in str(error)
    assert name in str(error)
    if isinstance(error, MapError):  # of the function: what it met is what it comes from
        error = error.__cause__
    assert isinstance(error, OSError)
    assert failure.code == error.errno
