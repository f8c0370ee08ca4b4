"""A file left by an earlier tensor is replaced on request, and by functions that own a whole folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import ArgumentError, ArgumentTypeError, ForeignFileError, NameInUseError


def of(make: str, *values: object) -> Callable[..., OffloadedTensor]:
    return lambda folder, **given: getattr(OffloadedTensor, make)(*values, name="w", offload_dir=folder, **given)


def like(folder: Path, **given: bool) -> Any:
    w = OffloadedTensor.zeros(2, name="w", offload_dir=folder, exist_ok=True)
    return offload.offloaded_like(lambda tensor: tensor + 7, w, "s", **given)


WAYS = {make: of(make, 2) for make in ("empty", "zeros", "ones")} | {"full": of("full", 2, 7.0), "offloaded_like": like}
WAYS["from_original_tensor"] = of("from_original_tensor", torch.full((2,), 7.0))
STORED = {"empty": 0.0, "zeros": 0.0, "ones": 1.0}  # others 7


@pytest.fixture
def folder(tmp_path):
    """With files left by earlier tensors: `w`, and `w.s`."""
    for name in ("w", "w.s"):
        OffloadedTensor.from_original_tensor(torch.full((2,), 3.0), name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
def test_a_single_tensor_leaves_an_earlier_ones_file_alone(way, folder):
    with pytest.raises(NameInUseError, match=r"tensor 'w(\.s)?': .*from_file.*exist_ok=True"):
        WAYS[way](folder)

    name = "w.s" if way == "offloaded_like" else "w"
    assert OffloadedTensor.from_file(folder / f"{name}.safetensors").tolist() == [3.0, 3.0]


@pytest.mark.parametrize("way", WAYS)
def test_a_single_tensor_replaces_an_earlier_file_on_request(way, folder):
    stored = WAYS[way](folder, exist_ok=True)

    for found in (stored, OffloadedTensor.from_file(stored.offload_path)):
        assert found.tolist() == [STORED.get(way, 7.0)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_files_of_others_are_never_replaced(way, tmp_path):
    for name in ("w", "w.s"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"mine")

    with pytest.raises(ForeignFileError):
        WAYS[way](tmp_path, exist_ok=True)

    assert (tmp_path / "w.safetensors").read_bytes() == b"mine"


def test_after_a_refusal_the_name_is_free(folder):
    with pytest.raises(NameInUseError):
        OffloadedTensor.zeros(2, name="w", offload_dir=folder)

    opened = offload.load_file(folder, offload_dir=folder)["w"]

    assert opened.mul_(2).tolist() == [6.0, 6.0]


def disk_offload(folder):
    return offload.disk_offload(nn.Linear(2, 2), folder)


def offload_optimizer(folder):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    offload.training.offload_optimizer(optimizer, offload_dir=folder, model=layer, min_bytes=1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def load(folder):
    model, saved = nn.Linear(2, 2), folder.parent / "saved"
    offload.save_checkpoint(model, saved)
    loaded = offload.load_checkpoint_and_dispatch(model, saved, offload_dir=folder, dtype=torch.float64)
    with torch.no_grad():
        loaded.weight.zero_()
    return loaded


def map_values(folder):
    model = load(folder)
    offload.map_values(lambda _, tensor: tensor + 1, model)
    return model


@pytest.mark.parametrize("work", [disk_offload, offload_optimizer, load, map_values])
def test_work_on_a_whole_folder_replaces_what_an_earlier_run_left(work, tmp_path):
    for _ in range(2):
        work(tmp_path / "work")

    assert list((tmp_path / "work").glob("*.safetensors"))


@pytest.mark.parametrize(
    "sizes", [(5,), ((5,),), (2, 3), ((2, 3),), ([2, 3],), (torch.Size([2, 3]),), ((),), (0, 4), (torch.tensor(3),)]
)
@pytest.mark.parametrize("make", ["empty", "zeros", "ones"])
def test_sizes_are_taken_as_torch_takes_them(make, sizes):
    """A shape has its name, too."""
    expected = torch.zeros(*sizes) if make == "empty" else getattr(torch, make)(*sizes)

    assert torch.equal(expected, getattr(OffloadedTensor, make)(*sizes, name="w").materialize())
    assert (2, 3) == getattr(OffloadedTensor, make)(shape=(2, 3), name="w").shape
    assert [2] * 5 == OffloadedTensor.full(shape=5, fill_value=2, name="f").tolist()
    with pytest.raises(TypeError, match=r"must be torch\.dtype, not str"):
        getattr(OffloadedTensor, make)(2, dtype="float32", name="w")


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int8, torch.bool])
def test_ones_have_the_dtype_that_torchs_have(dtype):
    assert OffloadedTensor.ones(2, 2, dtype=dtype, name="w").dtype == torch.ones(2, 2, dtype=dtype).dtype


WRONG = [
    *((sizes, TypeError) for sizes in (("ab",), (2.0,), ((2, None),), ((2,), 3), ({2: 3},), (torch.tensor([2, 3]),))),
    *((sizes, ArgumentTypeError) for sizes in ((True,), ((2, True),))),
    *((sizes, ArgumentError) for sizes in ((-1,), ((2**62, 8),))),
]


@pytest.mark.parametrize(("sizes", "error"), WRONG)
@pytest.mark.parametrize("make", ["empty", "zeros", "ones", "full"])
def test_sizes_that_are_not_counts_are_refused(make, sizes, error):
    given = sizes if make != "full" else (sizes if len(sizes) > 1 else sizes[0], 1)

    with pytest.raises(error):
        getattr(OffloadedTensor, make)(*given, name="w")
