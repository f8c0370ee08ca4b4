"""Folders of every kind as written by a release: their contents, how to create them, and how to check them.

`python -m tests.old_folders FOLDER` creates them with the current code, one archive per kind. A release's stay in
`tests/data/<release>` for good.
"""

from __future__ import annotations

import itertools
import os
import sys
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload import OffloadedTensor, TensorCache
from offload.errors import MissingRowsError
from offload.integrations.tensordict import load_memmap, save_memmap
from offload.training.checkpoints import load_training, save_training

DATA = Path(__file__).parent / "data"
BITS = torch.arange(24, dtype=torch.uint8)


def _numbers(*shape: int, start: float = 0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) / 4 + start


# Values

VALUES: dict[str, torch.Tensor] = {
    "model.layers.0.weight": _numbers(3, 4),
    "a/../b": _numbers(2),
    "Name": _numbers(1, start=1),
    "name": _numbers(1, start=2),
    "long" * 80: _numbers(3, start=3),
    "ünï": _numbers(2, start=4),
    "scalar": torch.tensor(0.5),
    "none": torch.empty(0, 3),
    "bool": BITS[:5] % 2 == 0,
    "bfloat16": _numbers(4).to(torch.bfloat16),
    "float8": _numbers(4).to(torch.float8_e4m3fn),
    "complex128": torch.complex(_numbers(3), _numbers(3, start=1)).to(torch.complex128),
    "uint16": BITS.to(torch.uint16),
    "transposed": _numbers(3, 4).t(),
    "channels_last": _numbers(2, 3, 2, 2).to(memory_format=torch.channels_last),
}


def _make_values(folder: Path) -> None:
    for name, value in VALUES.items():
        OffloadedTensor.from_original_tensor(value, name, folder)
    OffloadedTensor.zeros((2, 3), name="zeros", offload_dir=folder)
    changed = OffloadedTensor.from_original_tensor(_numbers(4), "changed", folder)
    changed.update_values(_numbers(2, 4), strict_shape=False)
    changed[0].mul_(2)
    changed.flush()


def _check_values(folder: Path) -> None:
    changed = _numbers(2, 4)
    changed[0] *= 2
    expected = {**VALUES, "zeros": torch.zeros(2, 3), "changed": changed}
    found = {tensor.name: tensor for path in folder.iterdir() for tensor in [OffloadedTensor.from_file(path)]}
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert_same(value, found[name])


def _make_quantized(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    layers = _layers()
    offload.disk_offload(layers, folder)
    offload.quantize_(layers, Int8WeightOnlyConfig())


def _check_quantized(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    expected = _layers()
    quantize_(expected, Int8WeightOnlyConfig())
    for name, value in expected.state_dict().items():
        [found] = (
            tensor for path in folder.glob("*.safetensors") if (tensor := OffloadedTensor.from_file(path)).name == name
        )
        plain = found.materialize()
        assert type(value) is type(plain)
        if name.endswith("weight"):
            assert_same(value.qdata, plain.qdata)
            assert_same(value.scale, plain.scale)
        else:
            assert_same(value, plain)


# Models


def _layers() -> nn.Module:
    layers = nn.Sequential(OrderedDict(first=nn.Linear(4, 3), second=nn.Linear(3, 4)))
    for k, value in enumerate(layers.parameters()):
        value.data = _numbers(*value.shape, start=k)
    return layers


def _loaded(folder: Path) -> nn.Module:
    with offload.init_empty_weights():
        model = nn.Sequential(OrderedDict(first=nn.Linear(4, 3), second=nn.Linear(3, 4)))
    return offload.load_checkpoint_and_dispatch(model, folder / "model", device_map="disk", offload_dir=folder / "work")


def _make_mapped(folder: Path) -> None:
    """A run over values, interrupted after two of them."""
    (folder / "model").mkdir()
    save_file(_layers().state_dict(), folder / "model" / "model.safetensors")
    os.utime(folder / "model" / "model.safetensors", (1_700_000_000, 1_700_000_000))
    count = itertools.count()

    def twice(name: str, value: torch.Tensor) -> torch.Tensor:
        if next(count) == 2:
            raise KeyboardInterrupt
        return value * 2

    with suppress(KeyboardInterrupt):
        offload.map_values(twice, _loaded(folder), resume="twice", progress=False)


def _check_mapped(folder: Path) -> None:
    model = _loaded(folder)
    report = offload.map_values(lambda name, value: value * 2, model, resume="twice", progress=False)
    assert len(report.before) == len(report.replaced) == 2
    for name, value in _layers().state_dict().items():
        assert_same(value * 2, model.get_parameter(name))


def _make_checkpoint(folder: Path) -> None:
    offload.save_checkpoint(_layers(), folder, max_shard_size=64)


def _check_checkpoint(folder: Path) -> None:
    found = offload.load_file(folder)
    assert found.keys() == _layers().state_dict().keys()
    for name, value in _layers().state_dict().items():
        assert_same(value, found[name])
    del found
    offload.save_checkpoint(_layers(), folder)  # replaces one written by offload
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors"]


# Rows


ROWS: dict[str, list[Any]] = {
    "fixed": list(_numbers(5, 3)),
    "half": list(_numbers(5, 2).to(torch.bfloat16)),
    "tokens": [torch.arange(length) for length in (3, 0, 2, 5, 1)],
    "text": ["a", "ü", "", "d", "e"],
    "chat": [{"role": "user", "turns": [1, None, 2.5]}, [], None, "x", {}],
}


def _make_cache(folder: Path) -> None:
    columns = {
        "fixed": (torch.float32, (3,)),
        "half": (torch.bfloat16, (2,)),
        "tokens": (torch.int64, (None,)),
        "text": "json",
        "chat": "json",
    }
    with TensorCache.create(folder, columns, num_rows=6, metadata={"of": "a model"}) as cache:
        cache[:3] = {name: _column(name, rows[:3]) for name, rows in ROWS.items()}
        cache[4] = {name: rows[4] for name, rows in ROWS.items()}


def _column(name: str, rows: list[Any]) -> Any:
    return torch.stack(rows) if name in ("fixed", "half") else rows


def _check_cache(folder: Path) -> None:
    with TensorCache.open(folder, mode="r+") as cache:
        assert cache.metadata == {"of": "a model"}
        assert cache.missing_rows().tolist() == [3, 5]
        with pytest.raises(MissingRowsError):
            cache[3]
        cache[3] = {name: rows[3] for name, rows in ROWS.items()}
        for at in range(5):
            found = cache[at]
            for name, rows in ROWS.items():
                assert_same_row(rows[at], found[name])


def _make_growing(folder: Path) -> None:
    with TensorCache.create(folder, {"x": (torch.float32, (2,)), "note": "json"}) as cache:
        cache.append({"x": _numbers(4, 2), "note": [0, "one", None, {"three": 3}]})


def _check_growing(folder: Path) -> None:
    with TensorCache.open(folder, mode="r+") as cache:
        cache.append({"x": _numbers(4, 2), "note": [0, "one", None, {"three": 3}]})
        assert len(cache) == 8
        assert_same(torch.cat([_numbers(4, 2)] * 2), cache[:]["x"])
        assert cache[7]["note"] == {"three": 3}


# Nested data


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Sample:
    tokens: torch.Tensor
    tags: list[str]


def _nest() -> dict[str, Any]:
    shared = _numbers(2, 2)
    return {
        "sample": Sample(BITS, ["a", "b"]),
        "pair": Pair(shared, (1, 2.5, float("inf"), None, True)),
        "shared": shared,
        7: ["text", b"bytes", {"deep": _numbers(1).to(torch.float16)}],
    }


def _make_tree(folder: Path) -> None:
    offload.save_tree(_nest(), folder)


def _check_tree(folder: Path) -> None:
    expected, found = _nest(), offload.load_tree(folder, types=[Sample, Pair])
    assert found.keys() == expected.keys()
    assert found["sample"].tags == ["a", "b"]
    assert_same(BITS, found["sample"].tokens)
    assert found["pair"].right == expected["pair"].right
    assert_same(_numbers(2, 2), found["pair"].left)
    assert_same(_numbers(2, 2), found["shared"])
    assert found[7][:2] == ["text", b"bytes"]
    assert_same(_numbers(1).to(torch.float16), found[7][2]["deep"])
    offload.save_tree({"other": 1}, folder)  # replaces one written by offload
    assert offload.load_tree(folder) == {"other": 1}


# Training


def _training() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    layers = _layers()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.25)
    return layers, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def _train(
    layers: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> None:
    optimizer.zero_grad()
    layers(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()


def _make_training(folder: Path) -> None:
    torch.manual_seed(3)
    layers, optimizer, scheduler = _training()
    for _ in range(3):
        _train(layers, optimizer, scheduler)
    save_training(layers, folder, optimizer, scheduler=scheduler, step=3, history=[_numbers(2), {"loss": 0.5}])


def _check_training(folder: Path) -> None:
    torch.manual_seed(3)
    expected = _training()
    for _ in range(3):
        _train(*expected)
    state = torch.get_rng_state()
    found = _training()
    extra = load_training(found[0], folder, found[1], scheduler=found[2])
    assert extra["step"] == 3
    assert_same(_numbers(2), extra["history"][0])
    assert extra["history"][1] == {"loss": 0.5}
    _train(*found)
    torch.set_rng_state(state)
    _train(*expected)
    for name, value in expected[0].state_dict().items():
        assert_same(value, found[0].state_dict()[name])
    save_training(found[0], folder, found[1], scheduler=found[2], step=4)
    assert load_training(found[0], folder, found[1], scheduler=found[2]) == {"step": 4}


# Folders of tensordict's


def _tensordict() -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": _numbers(3, 2), "deep": {"y": BITS.reshape(3, 8)}, "text": "note"}, [3])


def _make_memmap(folder: Path) -> None:
    save_memmap(_tensordict(), folder)


def _check_memmap(folder: Path) -> None:
    found = load_memmap(folder)
    assert_same(_numbers(3, 2), found["x"])
    assert_same(BITS.reshape(3, 8), found["deep", "y"])
    assert found["text"] == "note"
    save_memmap(_tensordict(), folder)  # replaces one written by offload


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "values": (_make_values, _check_values),
    "quantized": (_make_quantized, _check_quantized),
    "mapped": (_make_mapped, _check_mapped),
    "checkpoint": (_make_checkpoint, _check_checkpoint),
    "cache": (_make_cache, _check_cache),
    "growing": (_make_growing, _check_growing),
    "tree": (_make_tree, _check_tree),
    "training": (_make_training, _check_training),
    "memmap": (_make_memmap, _check_memmap),
}


def assert_same(expected: torch.Tensor, found: torch.Tensor) -> None:
    """Equal in shape, dtype, strides and bits; `found` may be on disk."""
    assert (expected.shape, expected.dtype, expected.stride()) == (found.shape, found.dtype, found.stride())
    plain = found.materialize() if isinstance(found, OffloadedTensor) else found.detach()
    as_bytes = [one.detach().contiguous().flatten().view(torch.uint8) for one in (expected, plain)]
    assert torch.equal(*as_bytes)


def assert_same_row(expected: Any, found: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert_same(expected, found)
    else:
        assert type(expected) is type(found)
        assert expected == found


def make(kind: str, archive: Path) -> None:
    """Write a folder of a kind, packed."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, kind)
        folder.mkdir()
        KINDS[kind][0](folder)
        with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT) as packed:
            packed.add(folder, kind, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for each in KINDS:
        make(each, place / f"{each}.tar.xz")
