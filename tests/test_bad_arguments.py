"""Bad input never gets a bare error: each argument of the public surface is given what it can't take."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import OffloadError

ANYTHING = {
    "None": None,
    "0": 0,
    "5": 5,
    "-1": -1,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**30,
    "True": True,
    "complex": 1j,
    "empty text": "",
    "text": "nope",
    "NUL": "\0",
    "half a character": "\udcff",
    "bytes": b"x",
    "list": [],
    "list of text": ["a"],
    "list of None": [None],
    "tuple": (1, 2),
    "dict": {},
    "dict of numbers": {1: 2},
    "dict of text": {"a": "b"},
    "dict of tensors": {"a": torch.ones(2)},
    "tensor": torch.ones(2, 3),
    "scalar": torch.tensor(1.5),
    "meta": torch.empty(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "dtype": torch.int8,
    "module": nn.Linear(2, 2),
    "class": nn.Linear,
    "object": object(),
    "function": lambda *_: None,
    "file": Path("file"),
    "folder": Path("folder"),
    "no such": Path("no such"),
    "below a file": Path("file/x"),
    "FIFO": Path("fifo"),
    "device that is not there": "cuda:77",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def weight() -> OffloadedTensor:
    return OffloadedTensor.full((2, 3), 1.0, name="w")


def entered(manager: Any) -> None:
    with manager:
        pass


def stepped(**options: Any) -> None:
    made = model()
    optimizer = offload.offload_optimizer(torch.optim.AdamW(made.parameters()), **options)
    made(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def with_activations(*args: Any, **options: Any) -> None:
    with offload.offload_activations(*args, **options):
        out = model()(torch.ones(2, 3)).sum()
    out.backward()


# What a user calls, by argument.
CALLS: dict[str, Callable[[Any], Any]] = {
    "OffloadedTensor(tensor)": lambda bad: OffloadedTensor(bad),
    "from_original_tensor(tensor)": lambda bad: OffloadedTensor.from_original_tensor(bad, "w"),
    "from_original_tensor(name)": lambda bad: OffloadedTensor.from_original_tensor(torch.ones(2), bad),
    "from_original_tensor(offload_dir)": lambda bad: OffloadedTensor.from_original_tensor(torch.ones(2), "w", bad),
    "from_file(path)": lambda bad: OffloadedTensor.from_file(bad),
    "from_file(key)": lambda bad: OffloadedTensor.from_file("ok.safetensors", bad),
    "from_file(device)": lambda bad: OffloadedTensor.from_file("ok.safetensors", device=bad),
    "from_file(offload_dir)": lambda bad: OffloadedTensor.from_file("ok.safetensors", offload_dir=bad).add_(1),
    "empty(shape)": lambda bad: OffloadedTensor.empty(bad, name="w"),
    "empty(*shape)": lambda bad: OffloadedTensor.empty(2, bad, name="w"),
    "empty(dtype)": lambda bad: OffloadedTensor.empty(2, dtype=bad, name="w"),
    "empty(name)": lambda bad: OffloadedTensor.empty(2, name=bad),
    "empty(offload_dir)": lambda bad: OffloadedTensor.empty(2, name="w", offload_dir=bad),
    "empty(device)": lambda bad: OffloadedTensor.empty(2, name="w", device=bad),
    "full(fill_value)": lambda bad: OffloadedTensor.full((2,), bad, name="w"),
    "full(dtype)": lambda bad: OffloadedTensor.full((2,), 1, dtype=bad, name="w"),
    "update_values(values)": lambda bad: weight().update_values(bad),
    "update_values(values, no strictness)": lambda bad: weight().update_values(bad, False, False),
    "materialize(value)": lambda bad: offload.materialize(bad),
    "is_offloaded(x)": lambda bad: offload.is_offloaded(bad),
    "load_file(path)": lambda bad: offload.load_file(bad),
    "load_file(device)": lambda bad: offload.load_file("ok.safetensors", bad),
    "load_file(offload_dir)": lambda bad: offload.load_file("ok.safetensors", offload_dir=bad),
    "save_checkpoint(model)": lambda bad: offload.save_checkpoint(bad, "out"),
    "save_checkpoint(folder)": lambda bad: offload.save_checkpoint({"w": torch.ones(2)}, bad),
    "save_checkpoint(max_shard_size)": lambda bad: offload.save_checkpoint({"w": torch.ones(2)}, "out", bad),
    "save_checkpoint(dtype)": lambda bad: offload.save_checkpoint({"w": torch.ones(2)}, "out", dtype=bad),
    "save_checkpoint(a value)": lambda bad: offload.save_checkpoint({"w": bad}, "out"),
    "disk_offload(model)": lambda bad: offload.disk_offload(bad),
    "disk_offload(offload_dir)": lambda bad: offload.disk_offload(model(), bad),
    "disk_offload(execution_device)": lambda bad: offload.disk_offload(model(), execution_device=bad),
    "load_checkpoint_in_model(model)": lambda bad: offload.load_checkpoint_in_model(bad, "model.safetensors"),
    "load_checkpoint_in_model(checkpoint)": lambda bad: offload.load_checkpoint_in_model(model(), bad),
    "load_checkpoint_in_model(device_map)": lambda bad: offload.load_checkpoint_in_model(
        model(), "model.safetensors", bad
    ),
    "load_checkpoint_in_model(offload_dir)": lambda bad: offload.load_checkpoint_in_model(
        model(), "model.safetensors", offload_dir=bad
    ),
    "load_checkpoint_in_model(dtype)": lambda bad: offload.load_checkpoint_in_model(
        model(), "model.safetensors", dtype=bad
    ),
    "load_checkpoint_and_dispatch(device_map)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", bad
    ),
    "load_checkpoint_and_dispatch(a device of the map)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", {"": bad}
    ),
    "load_checkpoint_and_dispatch(max_memory)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", max_memory=bad
    ),
    "load_checkpoint_and_dispatch(auto, max_memory)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", "auto", max_memory=bad
    ),
    "load_checkpoint_and_dispatch(an amount of max_memory)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", max_memory={"cpu": bad}
    ),
    "load_checkpoint_and_dispatch(read_ahead)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", read_ahead=bad
    ),
    "load_checkpoint_and_dispatch(no_split_module_classes)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", "auto", max_memory={"cpu": "1GiB"}, no_split_module_classes=bad
    ),
    "load_checkpoint_and_dispatch(skip_keys)": lambda bad: offload.load_checkpoint_and_dispatch(
        model(), "model.safetensors", skip_keys=bad
    ),
    "map_values(fn)": lambda bad: offload.map_values(bad, offload.disk_offload(model()), progress=False),
    "map_values(fn that gives)": lambda bad: offload.map_values(
        lambda *_: bad, offload.disk_offload(model()), progress=False
    ),
    "map_values(model)": lambda bad: offload.map_values(lambda _, t: t, bad, progress=False),
    "map_values(a value)": lambda bad: offload.map_values(lambda _, t: t, {"w": bad}, progress=False),
    "map_values(select)": lambda bad: offload.map_values(lambda _, t: t, model(), select=bad, progress=False),
    "map_values(workers)": lambda bad: offload.map_values(lambda _, t: t, model(), workers=bad, progress=False),
    "map_values(resume)": lambda bad: offload.map_values(
        lambda _, t: t, offload.disk_offload(model(), "values"), resume=bad, progress=False
    ),
    "offloaded_like(fn)": lambda bad: offload.offloaded_like(bad, weight(), "x"),
    "offloaded_like(fn that gives)": lambda bad: offload.offloaded_like(lambda _: bad, weight(), "x"),
    "offloaded_like(tensor)": lambda bad: offload.offloaded_like(lambda t: t, bad, "x"),
    "offloaded_like(suffix)": lambda bad: offload.offloaded_like(lambda t: t, weight(), bad),
    "offloading(offload_dir)": lambda bad: entered(offload.offloading(bad)),
    "offloading(min_bytes)": lambda bad: entered(offload.offloading(min_bytes=bad)),
    "offload_activations(folder)": lambda bad: with_activations(bad, 0),
    "offload_activations(min_bytes)": lambda bad: with_activations(None, bad),
    "offload_optimizer(optimizer)": lambda bad: offload.offload_optimizer(bad),
    "offload_optimizer(folder)": lambda bad: stepped(folder=bad, min_bytes=0),
    "offload_optimizer(model)": lambda bad: stepped(model=bad),
    "offload_optimizer(min_bytes)": lambda bad: stepped(min_bytes=bad),
    "offload_optimizer(step_bytes)": lambda bad: stepped(step_bytes=bad),
    "set_max_memory(max_memory)": lambda bad: entered(offload.set_max_memory(bad)),
    "set_max_memory(an amount)": lambda bad: entered(offload.set_max_memory({"cpu": bad})),
    "set_read_ahead(window)": lambda bad: entered(offload.set_read_ahead(bad)),
    "keep_resident(what)": lambda bad: offload.keep_resident(bad),
    "evict(what)": lambda bad: offload.evict(bad),
    "plot_memory(path)": lambda bad: entered(offload.plot_memory(bad)),
    "plot_memory(model)": lambda bad: entered(offload.plot_memory("page.html", bad)),
    "plot_memory(title)": lambda bad: entered(offload.plot_memory("page.html", title=bad)),
    "quantize_int4(tensor)": lambda bad: offload.quantize_int4(bad),
    "quantize_int4(group_size)": lambda bad: offload.quantize_int4(torch.ones(2, 4), bad),
    "quantize_int4(candidates)": lambda bad: offload.quantize_int4(torch.ones(2, 4), 2, candidates=bad),
    "quantize_int4(importance)": lambda bad: offload.quantize_int4(torch.ones(2, 4), 2, importance=bad),
    "save_tree(tree)": lambda bad: offload.save_tree(bad, "out"),
    "save_tree(a leaf)": lambda bad: offload.save_tree({"x": [bad]}, "out"),
    "save_tree(a key)": lambda bad: offload.save_tree({bad: 1}, "out") if bad.__hash__ else None,
    "save_tree(folder)": lambda bad: offload.save_tree([1], bad),
    "load_tree(folder)": lambda bad: offload.load_tree(bad),
    "load_tree(device)": lambda bad: offload.load_tree("tree", bad),
    "load_tree(types)": lambda bad: offload.load_tree("tree", types=bad),
    "load_tree(offload_dir)": lambda bad: offload.load_tree("tree", offload_dir=bad),
    "save_training(folder)": lambda bad: offload.save_training(bad, model()),
    "save_training(model)": lambda bad: offload.save_training("out", bad),
    "save_training(optimizer)": lambda bad: offload.save_training("out", model(), bad),
    "save_training(extra)": lambda bad: offload.save_training("out", model(), step=bad),
    "load_training(folder)": lambda bad: offload.load_training(bad, model()),
    "load_training(model)": lambda bad: offload.load_training("training", bad),
    "load_training(optimizer)": lambda bad: offload.load_training("training", model(), bad),
    "load_training(stateful)": lambda bad: offload.load_training("training", model(), step=bad),
}


# What is called, or gone through, tells of itself.
ITS_OWN = {
    ("load_checkpoint_and_dispatch(no_split_module_classes)", "scalar"),
    ("load_tree(types)", "scalar"),
    ("map_values(select)", "scalar"),
    ("map_values(select)", "module"),
    ("offloaded_like(fn)", "module"),
    ("offloaded_like(fn)", "class"),
    ("save_training(extra)", "class"),
}


@pytest.fixture
def place(quick_folder: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some of all."""
    monkeypatch.chdir(quick_folder)
    Path("file").write_bytes(b"mine")
    Path("folder").mkdir()
    os.mkfifo("fifo")
    offload.save_checkpoint({"w": torch.ones(2, 3)}, "checkpoint")
    os.rename("checkpoint/model.safetensors", "ok.safetensors")
    offload.save_checkpoint(model(), "checkpoint")
    os.rename("checkpoint/model.safetensors", "model.safetensors")
    os.rmdir("checkpoint")
    offload.save_tree([torch.ones(2)], "tree")
    offload.save_training("training", model(), step=1)
    return Path(quick_folder)


@contextlib.contextmanager
def tidied(place: Path) -> Iterator[None]:
    """What the block makes goes."""
    before = set(os.listdir(place))
    yield
    for name in {*(set(os.listdir(place)) - before), *(f"folder/{name}" for name in os.listdir("folder"))}:
        shutil.rmtree(place / name) if (place / name).is_dir() else (place / name).unlink()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_is_taken_or_told_by_an_error_of_ours(call, place):
    bare = {}
    for what, bad in ANYTHING.items():
        with tidied(place):
            try:
                CALLS[call](bad)
            except OffloadError:
                pass
            except Exception as error:
                if (call, what) not in ITS_OWN:
                    bare[what] = f"{type(error).__name__}: {error}"[:200]

    assert {} == bare
    assert b"mine" == Path("file").read_bytes()
