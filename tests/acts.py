"""Every public act that touches tensors or files, small, and what must hold after it was cut short.

`tests/test_crashes.py` has each of them meet each crash that it can meet. Rows of a cache are in
`tests/acts_of_rows.py`; commands, and acts of third-party libraries, in `tests/acts_of_neighbours.py`.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload import OffloadedTensor
from offload.checkpoints.conversion import convert_checkpoint, resumable_folder
from offload.storage import folders
from offload.storage.replacing import put_file, replacing_folder
from offload.system.modes import no_grad
from offload.training.optimizer import is_on_disk
from tests.acts_of_neighbours import NEIGHBOURS
from tests.acts_of_rows import ROWS
from tests.crashes import FAULT, INTERRUPT, KILL, POWER_CUT, READS, WRITES, Act, plain
from tests.engines import settled

OLD, NEW = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) * 2 + 1
SMALLER = NEW[:2].half()
LARGE = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)  # larger than what always stays in memory
W = "tensor 'w'"
MAPPED = WRITES - {KILL}  # what is written through a mapping, or by a thread that a fork does not have
TOGETHER = frozenset({INTERRUPT})
_numbers = itertools.count()


def new_folder(root: Path) -> Path:
    """A folder that does not exist yet."""
    return root / str(next(_numbers))


def same(given: Any) -> Any:
    return given


# Values


def stored(folder: Path | None, value: torch.Tensor = OLD, name: str = "w") -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(value, name, folder, exist_ok=True)


def private(folder: Path) -> OffloadedTensor:
    return stored(None)


def others_file(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": OLD, "v": NEW}, folder / "model.safetensors")
    return folder / "model.safetensors"


def referenced(folder: Path) -> OffloadedTensor:
    return OffloadedTensor.from_file(others_file(folder), "w", offload_dir=folder / "own")


def referenced_privately(folder: Path) -> OffloadedTensor:
    return OffloadedTensor.from_file(others_file(folder), "w")


def old_or_new(weight: torch.Tensor) -> None:
    """The tensor and its file have the same one of the values, and further ops see it."""
    value = weight.materialize()  # type: ignore[operator]
    x = torch.ones(2, 4, dtype=value.dtype)
    assert any(torch.equal(value, one) for one in (OLD, NEW, SMALLER)), value
    assert torch.equal(value.sum() + 1, weight.sum() + 1)
    assert torch.equal(F.linear(x, value), F.linear(x, weight))
    if weight.offload_dir is not None and weight.offload_path.parent == weight.offload_dir:
        assert torch.equal(value, offload.load_file(weight.offload_path)["w"].materialize())
        assert torch.equal(value, load_file(weight.offload_path)["w"])


def own_or_in_place(weight: OffloadedTensor) -> None:
    """A write to a checkpoint's value goes to a copy: the checkpoint is unchanged."""
    old_or_new(weight)
    assert weight.offload_dir is not None
    assert torch.equal(OLD, load_file(weight.offload_dir.parent / "model.safetensors")["w"])


def whole_or_not_there(folder: Path) -> None:
    if os.path.lexists(folder / "w.safetensors"):
        assert torch.equal(OLD, offload.load_file(folder)["w"].materialize())


def flushed(weight: OffloadedTensor) -> None:
    weight.copy_(NEW)
    weight.flush()


def in_inference_mode(weight: OffloadedTensor) -> None:
    with torch.inference_mode():
        weight[1:].sum()
        weight.materialize()


def in_a_fake_mode(weight: OffloadedTensor) -> None:
    with torch.device("meta"):
        weight[1:].sum()
        OffloadedTensor.zeros((2,), name="zeros")


def backward(weight: OffloadedTensor) -> torch.Tensor | None:
    x = torch.ones(2, 4, requires_grad=True)
    F.linear(x, weight).sum().backward()
    return x.grad


def with_activations(weight: torch.Tensor) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with offload.training.offload_activations(min_bytes=1):
        y = F.linear(x, weight).exp().exp().sum()
    y.backward()


def offloading(weight: torch.Tensor) -> bool:
    with offload.offloading(min_bytes=1):
        big = torch.ones(8, 8) @ torch.ones(8, 8)
    return offload.is_offloaded(big)


OPS: dict[str, Callable[[Any], object]] = {
    "sum": lambda w: w.sum(),
    "linear": lambda w: F.linear(torch.ones(2, 4), w),
    "view": lambda w: w[1:].t(),
    "cat": lambda w: torch.cat([w, w]),
    "to dtype": lambda w: w.to(torch.float64),
    "materialize": lambda w: w.materialize(),
    "repr": lambda w: type(repr(w)),  # what can't be read is shown as such
    "numpy": lambda w: w.numpy(),
    "tolist": lambda w: w.tolist(),
    "update_values": lambda w: w.update_values(NEW),
    "copy_": lambda w: w.copy_(NEW),
    "out": lambda w: torch.add(NEW, 0, out=w),
    "data": lambda w: setattr(w, "data", NEW),
    "flush": lambda w: w.flush(),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "to another process": lambda w: type(ForkingPickler.dumps(w)),
    "offloaded_like": lambda w: offload.offloaded_like(torch.neg, w, ".neg", exist_ok=True),
    "memory_summary": lambda w: type(offload.memory_summary()),
    "keep_resident": lambda w: offload.budget.keep_resident(w),
    "evict": lambda w: offload.budget.evict(w),
}


def replaces(*, resume: str | None) -> Callable[[Any], object]:
    return lambda w: offload.map_values(lambda name, value: NEW, {"w": w}, resume=resume, progress=False)


CHANGE_FILES = {"update_values", "data", "deepcopy", "offloaded_like"}
FLUSHED = {"copy_", "out", "flush"}
PRIVATELY = ("sum", "linear", "materialize", "update_values", "copy_", "data", "deepcopy", "offloaded_like", "evict")


def on(act: Callable[[Any], object]) -> Callable[[Any], Any]:
    """What an act on a value gives, and the value afterwards."""
    return lambda weight: (act(weight), weight)


def op(name: str) -> Act:
    crashes = WRITES if name in CHANGE_FILES else MAPPED if name in FLUSHED else READS
    named = "tensor 'w" if name == "offloaded_like" else W
    return Act(stored, on(OPS[name]), old_or_new, named, crashes=crashes)


VALUES = {
    "from_original_tensor": Act(same, stored, whole_or_not_there, W),
    "from_original_tensor, private": Act(
        lambda _: folders._PRIVATE_FOLDERS.clear(), lambda _: stored(None), name=W, crashes=WRITES - {POWER_CUT}
    ),
    "zeros": Act(same, lambda folder: OffloadedTensor.zeros((5,), name="w", offload_dir=folder, exist_ok=True), name=W),
    **{f"{name}, named": op(name) for name in OPS},
    **{f"{name}, private": Act(private, on(OPS[name]), old_or_new, crashes=TOGETHER) for name in PRIVATELY},
    "update_values, private": Act(private, on(OPS["update_values"]), old_or_new, W, crashes=WRITES - {POWER_CUT}),
    "update_values, of another shape": Act(
        stored,
        on(lambda w: w.update_values(SMALLER, strict_shape=False, strict_dtype=False)),
        old_or_new,
        W,
        crashes=MAPPED - {INTERRUPT},  # a tensor of another process does not follow, nor one while it is changed
    ),
    "update_values, referenced": Act(referenced_privately, on(OPS["update_values"]), old_or_new, crashes=TOGETHER),
    "copy_, referenced": Act(referenced, on(flushed), own_or_in_place, W),
    "copy_ and flush": Act(stored, on(flushed), old_or_new, W, crashes=MAPPED),
    "map_values, of a tensor": Act(stored, on(replaces(resume="new")), old_or_new, crashes=MAPPED),
    "map_values, private": Act(private, on(replaces(resume=None)), old_or_new, crashes=TOGETHER),
    "inference mode": Act(stored, in_inference_mode, old_or_new, crashes=TOGETHER),
    "meta device": Act(stored, in_a_fake_mode, old_or_new, crashes=TOGETHER),
    "backward": Act(stored, backward, old_or_new, crashes=TOGETHER),
    "offload_activations, of a layer": Act(private, with_activations, old_or_new, crashes=TOGETHER),
    "offloading, private": Act(private, offloading, old_or_new, crashes=TOGETHER),
}


# Files and models


def pickled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    torch.save({"w": OLD, "v": NEW[1:]}, folder / "model.bin")
    return folder / "model.bin"


def network(shift: float = 0) -> nn.Module:
    """Two layers with known values, and a buffer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) + number / 8 + shift)
    return model.eval()


X = torch.linspace(-1, 1, 8).view(2, 4)


def out(model: Any) -> Any:
    with no_grad():  # torch's own can be interrupted while it is left
        return model(X.to(model[0].weight.dtype)).tolist()


RIGHT, SHIFTED = out(network()), out(network(1))


def saved_model(folder: Path, **options: Any) -> Path:
    offload.save_checkpoint(network(), folder, **options)
    return folder


saved_in_shards = partial(saved_model, max_shard_size=100)


def saved_bin(folder: Path) -> Path:
    folder.mkdir(parents=True)
    torch.save(network().state_dict(), folder / "pytorch_model.bin")
    return folder


def dispatched(folder: Path, **options: Any) -> Any:
    with offload.init_empty_weights():
        model = network()
    return out(offload.load_checkpoint_and_dispatch(model, folder, **options))


def one_or_the_other(folder: Path) -> None:
    assert dispatched(folder) in (RIGHT, SHIFTED)


def runs_as_before(given: Any) -> None:
    assert RIGHT == out(given[0])


RANDOM = frozenset({"random", "numpy", "torch"})


def saves(size: int | None) -> Callable[[Path], Any]:
    """Saves a model of other values, in shards of this size, and loads it."""
    return lambda folder: dispatched((offload.save_checkpoint(network(1), folder, size or "5GB"), folder)[1])


def mapped_batches(model: nn.Module) -> list[torch.Tensor]:
    with no_grad():
        return list(offload.map_batches(model, [X, X * 2], model, progress=False))


def numbers(folder: Path) -> dict[str, OffloadedTensor]:
    return {name: stored(folder, OLD + number, name) for number, name in enumerate("abc")}


def mapped_once(tensors: dict[str, OffloadedTensor]) -> list[OffloadedTensor]:
    offload.map_values(lambda name, value: value * 2, tensors, resume="twice", progress=False)
    return [*tensors.values()]


def each_is_once_or_twice(tensors: dict[str, OffloadedTensor]) -> None:
    for number, tensor in enumerate(tensors.values()):
        assert any(torch.equal((OLD + number) * times, tensor.materialize()) for times in (1, 2))


def checkpoint(folder: Path) -> Path:
    offload.save_checkpoint({"w": OLD, "v": NEW}, folder / "old")
    (folder / "old" / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


def converted(folder: Path, **options: Any) -> Any:
    shutil.rmtree(folder / "made", ignore_errors=True)
    convert_checkpoint(folder / "old", folder / "made" / "new", **options)
    return values_in(folder / "made" / "new")


def values_in(folder: Path) -> Any:
    return {name: value.tolist() for name, value in offload.load_file(folder).items()}


def nothing_or_whole(folder: Path) -> None:
    for place in (folder / "old", folder / "made" / "new"):
        assert not place.exists() or values_in(place) == {"w": OLD.tolist(), "v": NEW.tolist()}


def resumed(folder: Path) -> list[str]:
    """What is in the new folder, which is written after a value in that of the run."""
    if not (folder / "new").exists():
        with resumable_folder(folder / "new", {"source": "a", "size": 3}) as work:
            if not (work / "value").exists():
                put_file(work / "value", b"1")
            with replacing_folder(folder / "new") as made:
                put_file(made / "value", (work / "value").read_bytes())
    return os.listdir(folder / "new")


def run_is_whole_or_not_there(folder: Path) -> None:
    assert not (folder / "new").exists() or (folder / "new" / "value").read_bytes() == b"1"


def large(folder: Path) -> list[OffloadedTensor]:
    weights = [stored(folder, LARGE + k, f"w{k}") for k in range(4)]
    for _ in range(2):
        read_cold(weights)
    return weights


def read_cold(weights: list[OffloadedTensor]) -> list[float]:
    offload.budget.evict(*weights)
    return [weight.sum().item() for weight in weights]


MODELS = {
    "from_file": Act(others_file, lambda path: OffloadedTensor.from_file(path, "w"), crashes=READS),
    "load_file": Act(others_file, lambda path: offload.load_file(path)["w"].sum(), crashes=READS),
    "load_file, pickled": Act(pickled, offload.load_file, crashes=READS),
    "load_checkpoint_and_dispatch": Act(saved_model, dispatched, crashes=READS),
    "load_checkpoint_and_dispatch, shards": Act(saved_in_shards, dispatched, crashes=READS),
    "load_checkpoint_and_dispatch, pickled": Act(saved_bin, dispatched, crashes=READS),
    "load_checkpoint_and_dispatch, stored": Act(
        saved_model,
        lambda at: dispatched(at, dtype=torch.float64, offload_dir=at / "deep" / "er", store=True),
        crashes=WRITES - {INTERRUPT},  # the lines of other acts, each after a cast
    ),
    "disk_offload": Act(
        lambda folder: (network(), folder), lambda given: out(offload.disk_offload(*given)), runs_as_before
    ),
    "disk_offload, private": Act(
        lambda _: (network(),), lambda given: out(offload.disk_offload(*given)), runs_as_before, crashes=TOGETHER
    ),
    "map_batches": Act(lambda folder: offload.disk_offload(network(), folder), mapped_batches, crashes=TOGETHER),
    "save_checkpoint": Act(same, saves(None), changes=RANDOM),
    "save_checkpoint, shards over one": Act(saved_model, saves(100), one_or_the_other, changes=RANDOM),
    "save_checkpoint, one over shards": Act(saved_in_shards, saves(None), one_or_the_other, changes=RANDOM),
    "save_checkpoint, shards over shards": Act(saved_in_shards, saves(100), one_or_the_other, changes=RANDOM),
    "map_values": Act(numbers, mapped_once, each_is_once_or_twice),
    "convert_checkpoint": Act(checkpoint, lambda at: converted(at, dtype=torch.float64), nothing_or_whole),
    "resumable_folder": Act(same, resumed, run_is_whole_or_not_there),
    "reads from the disk": Act(large, read_cold, crashes=TOGETHER),
}


# Trees and training


def old_tree(folder: Path) -> Path:
    offload.save_tree({"w": OLD, "same": 1}, folder)
    return folder


def new_tree(folder: Path) -> Any:
    offload.save_tree({"w": NEW, "deep": [OLD, 2]}, folder)
    return read_tree(folder)


def read_tree(folder: Path) -> Any:
    tree = offload.load_tree(folder)
    return tree["w"].tolist(), [value for name, value in tree.items() if name == "same"]


def either_tree(folder: Path) -> None:
    assert read_tree(folder) in ((OLD.tolist(), [1]), (NEW.tolist(), []))


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():  # autograd of a CUDA build does not run in a forked child
        parameter.grad = torch.ones_like(parameter)
    return model


SGD: Any = partial(torch.optim.SGD, lr=1.0, momentum=0.5)


def stepped(steps: int, kind: Any = SGD) -> tuple[nn.Module, Any]:
    """A model in memory, and its optimizer, after so many steps."""
    model = with_gradients(network())
    optimizer = kind(model.parameters())
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


def save(folder: Path, step: int, model: nn.Module, optimizer: Any) -> list[str]:
    offload.training.save_training(model, folder / "run", optimizer, step=step)
    return [*json.loads((folder / "run" / "tree.json").read_text())]


def trained(folder: Path) -> Path:
    save(folder, 1, *stepped(1))
    return folder


def on_disk(folder: Path) -> Any:
    """A model on disk, with the state of its optimizer, which was saved a step ago."""
    model = offload.disk_offload(network(), folder / "live")
    optimizer = torch.optim.AdamW(model.parameters())
    offload.training.offload_optimizer(optimizer, offload_dir=folder / "state", min_bytes=1)
    with_gradients(model)
    optimizer.step()
    save(folder, 1, model, optimizer)
    optimizer.step()
    return model, optimizer, folder


def is_after_its_steps(folder: Path, kind: Any = SGD) -> None:
    """What was saved is the state of the first step, or of the second."""
    model, optimizer = stepped(0, kind)
    step = offload.training.load_training(model, folder / "run", optimizer)["step"]
    expected, state = stepped(step, kind)
    assert plain([*expected.parameters()]) == plain([*model.parameters()])
    assert plain(state.state_dict()["state"]) == plain(optimizer.state_dict()["state"])
    assert step in (1, 2)


def save_again(given: Any) -> Any:
    model, optimizer, folder = given
    return save(folder, 2, model, optimizer)


def load_again(given: Any) -> Any:
    model, optimizer, folder = given
    offload.training.load_training(model, folder / "run", optimizer)
    return out(model)


def step(given: Any) -> None:
    model, optimizer, _ = given
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()


def trains(given: Any) -> None:
    step(given)
    load_again(given)
    step(given)
    save_again(given)


def in_memory(folder: Path | None) -> Any:
    torch.manual_seed(0)
    layer = with_gradients(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.step()
    return layer, optimizer, folder


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return [value.tolist() for state in optimizer.state_dict()["state"].values() for value in state.values()]


def put_on_disk(given: Any) -> Any:
    layer, optimizer, folder = given
    if not is_on_disk(optimizer):
        offload.training.offload_optimizer(optimizer, offload_dir=folder, model=layer, min_bytes=1)
    return state_of(optimizer)


def optimizer_is_whole(given: Any) -> None:
    assert state_of(in_memory(None)[1]) == state_of(given[1])


def activations(folder: Path) -> torch.Tensor | None:
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
    return w.grad


def computed(folder: Path) -> torch.Tensor:
    with offload.offloading(folder, min_bytes=1):
        x = torch.ones(4, 4)
        return x @ x + 1


TREES = {
    "save_tree": Act(same, new_tree),
    "save_tree, over another": Act(old_tree, new_tree, either_tree),
    "load_tree": Act(old_tree, read_tree, either_tree, crashes=READS),
    "save_training": Act(
        trained, lambda at: save(at, 2, *stepped(2)), is_after_its_steps, changes=RANDOM, crashes=MAPPED
    ),
    "save_training, of what is on disk": Act(
        on_disk, save_again, lambda given: is_after_its_steps(given[2], torch.optim.AdamW), crashes=WRITES - {FAULT}
    ),
    "load_training": Act(
        lambda folder: (offload.disk_offload(network(), folder / "live"), None, trained(folder)),
        load_again,
        changes=RANDOM,
        crashes=READS,
    ),
    "load_training, on disk": Act(on_disk, load_again, changes=RANDOM, crashes=TOGETHER),
    "a step on disk": Act(on_disk, step, trains, crashes=TOGETHER),
    "offload_optimizer": Act(in_memory, put_on_disk, optimizer_is_whole, crashes=MAPPED),
    "offload_activations": Act(same, activations, all_threads=True, crashes=frozenset({FAULT})),
    "offloading": Act(same, computed),
}

ACTS: dict[str, Act] = {**VALUES, **MODELS, **TREES, **ROWS, **NEIGHBOURS}


def meeting(crash: str) -> list[str]:
    """The acts that meet a crash."""
    return [name for name, act in ACTS.items() if crash in act.crashes]
