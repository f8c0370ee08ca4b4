"""Folders written by torch.distributed.checkpoint are opened in place, as one checkpoint."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import contents
from safetensors.torch import load_file
from torch import nn

import offload
from offload import cli
from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.conversion import convert_checkpoint
from offload.checkpoints.dcp import Shard, _is_grid
from offload.checkpoints.verify import verify
from offload.errors import CheckpointError, CorruptFileError, MissingFileError
from offload.tensor.views import handle_of
from tests.processes import run_script

STATE = {
    "weight": torch.arange(35.0).reshape(5, 7),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "half": torch.arange(3.0).bfloat16(),
}
WRITERS = 3

# Written by three processes: rows, columns and squares, of uneven sizes, and a replicated value.
WRITE = """
    import sys, os, torch, torch.multiprocessing as mp, torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def write(rank, world, folder, place):
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (world,))
        square = init_device_mesh("cpu", (2, world // 2)) if world == 4 else mesh
        whole = {
            "rows": torch.arange(70.0).reshape(10, 7), "columns": torch.arange(55.0).reshape(5, 11),
            "few": torch.arange(4.0).reshape(2, 2), "same": torch.arange(6.0),
            "square": torch.arange(63.0).reshape(9, 7),
        }
        placed = {"rows": [Shard(0)], "columns": [Shard(1)], "few": [Shard(0)], "same": [Replicate()]}
        state = {name: distribute_tensor(whole[name], mesh, where) for name, where in placed.items()}
        both = [Shard(0), Shard(1)] if world == 4 else [Shard(0)]
        state["square"] = distribute_tensor(whole["square"], square, both)
        dcp.save({"model": state, "step": 3}, checkpoint_id=folder)
        if rank == 0:
            torch.save(whole, sys.argv[3])
        dist.destroy_process_group()

    if __name__ == "__main__":
        torch.set_num_threads(1)
        world = int(sys.argv[4])
        children = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                write(rank, world, sys.argv[1], sys.argv[2])
                os._exit(0)
            children.append(pid)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one writer, with byte entries before the tensors, which are therefore unaligned."""
    dcp.save({**STATE, "step": 3, "rate": 0.5}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


@pytest.fixture(scope="module", params=[3, 4])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with several writers, and the whole values."""
    place = tmp_path_factory.mktemp("sharded")
    run_script(WRITE, place / "saved", place / "store", place / "whole.pt", request.param)
    return place


def same(expected: torch.Tensor, actual: Any) -> bool:
    return expected.dtype == actual.dtype and torch.equal(expected, actual)


def metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Rewrite a folder's metadata with a change."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def test_values_are_referenced_where_they_lie_and_other_entries_are_left_out(folder: Path) -> None:
    before = contents(folder)

    found = offload.load_file(folder)

    assert STATE.keys() == found.keys()
    for name, value in STATE.items():
        assert same(value, found[name])
        assert found[name].stride() == value.stride()
        assert not handle_of(found[name]).owned
    assert before == contents(folder)


def test_complex128_is_named_where_no_kernel_reads_it(tmp_path: Path) -> None:
    """Archives begin at any byte."""
    state = {"step": 3, "complex": torch.arange(4.0).to(torch.complex128)}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)

    with pytest.raises(CorruptFileError, match=r"'complex.*' in .* in the middle of an element"):
        offload.load_file(tmp_path / "saved")["complex"].sum()


def test_shards_are_a_recipe(sharded: Path) -> None:
    expected, before = torch.load(sharded / "whole.pt"), contents(sharded / "saved")

    found = offload.load_file(sharded / "saved")

    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert same(value, found[name])
        assert same(value[1:2], found[name][1:2])
        assert not handle_of(found[name]).owned
        assert (handle_of(found[name]).composed is None) == (name == "same")
    assert before == contents(sharded / "saved")


@pytest.mark.parametrize("nest", [("model",), ("app", "model"), ("state_dict",), ()])
def test_a_model_is_filled_wherever_it_is_nested(nest: tuple[str, ...], tmp_path: Path) -> None:
    """As with torch.save: its names are those in the model's own state dict."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    state: Any = plain.state_dict()
    for step in reversed(nest):
        state = {step: state, "optimizer": {"state": {"0.weight": {"exp_avg": torch.ones(3, 4)}}}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with offload.init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    offload.load_checkpoint_and_dispatch(model, tmp_path, strict=True)

    assert all(offload.is_offloaded(value) and not handle_of(value).owned for value in model.parameters())
    x = torch.ones(1, 4)
    assert torch.equal(plain(x), model(x))


def test_a_model_of_transformers_is_loaded(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).eval()
    plain.config.save_pretrained(tmp_path)
    dcp.save(plain.state_dict(), checkpoint_id=tmp_path, no_dist=True)

    model = offload.from_pretrained(tmp_path)

    ids = torch.tensor([[1, 2]])
    assert torch.equal(plain(ids).logits, model(ids).logits)
    assert all(not handle_of(value).owned for value in model.parameters())


def test_it_is_inspected_verified_and_converted(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["inspect", str(sharded / "saved")])
    told = capsys.readouterr().out
    convert_checkpoint(sharded / "saved", tmp_path / "converted")

    assert "__1_0.distcp" in told.replace("\n", "")
    assert "5 tensors" in told
    assert verify(sharded / "saved").is_whole
    expected, actual = torch.load(sharded / "whole.pt"), load_file(tmp_path / "converted" / "model.safetensors")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


def test_a_missing_file_is_named(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded / "saved", tmp_path / "saved")
    (tmp_path / "saved" / "__1_0.distcp").unlink()

    with pytest.raises(MissingFileError, match=r"__1_0\.distcp, which holds .*, is missing"):
        open_checkpoint(tmp_path / "saved")
    assert ["__1_0.distcp, which holds" in finding for finding in verify(tmp_path / "saved").findings] == [True]


CUTS = {
    "*.distcp": (r"__0_0\.distcp.*cut off", (0, 100, -1)),
    ".metadata": ("metadata is cut off or damaged", (0, 1, 100, 1000, -1)),
}


@pytest.mark.parametrize(("name", "kept"), [(name, kept) for name, (_, places) in CUTS.items() for kept in places])
def test_a_file_that_is_cut_off_is_named(name: str, kept: int, folder: Path) -> None:
    [path] = folder.glob(name)
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(CorruptFileError, match=CUTS[name][0]):
        open_checkpoint(folder)
    assert [path.name in finding for finding in verify(folder).findings] == [True]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_the_metadata_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    metadata(folder, lambda found: setattr(found, "planner_data", Bomb(tmp_path / "ran")))

    with pytest.raises(CheckpointError, match=r"names .*, which does not belong there"):
        open_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


def _outside(name: str) -> Callable[[Any], None]:
    return lambda found: [setattr(place, "relative_path", name) for place in found.storage_data.values()] and None


def _drop(found: Any) -> None:
    del found.state_dict_metadata["model.rows"].chunks[0]


def _twice(found: Any) -> None:
    chunks = found.state_dict_metadata["model.rows"].chunks
    chunks[1].offsets = torch.Size([2, 0])
    index = next(one for one in found.storage_data if one.fqn == "model.rows")
    found.storage_data[type(index)("model.rows", (2, 0))] = found.storage_data[index]


def _beyond(found: Any) -> None:
    found.state_dict_metadata["model.rows"].chunks[-1].sizes = torch.Size([100, 7])


def _nowhere(found: Any) -> None:
    for one in [one for one in found.storage_data if one.fqn == "model.same"]:
        del found.storage_data[one]


def _other(found: Any) -> None:
    found.state_dict_metadata["model.same"].properties.dtype = torch.int32


UNCOVERED = r"'rows' of shape \[10, 7\].* do not cover it"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((_outside(name), "outside its folder") for name in ("../__0_0.distcp", "/etc/passwd", "a/b.distcp", "")),
        *((change, UNCOVERED) for change in (_drop, _twice, _beyond)),
        (_nowhere, "does not say where the shard of 'same'"),
        (_other, r"float32 \[6\] for 'same', and \.metadata says torch\.int32"),
    ],
)
def test_metadata_that_contradicts_itself_or_the_files_is_refused(
    change: Callable[[Any], None], words: str, sharded: Path, tmp_path: Path
) -> None:
    shutil.copytree(sharded / "saved", tmp_path / "saved")
    metadata(tmp_path / "saved", change)

    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "saved")
    assert not verify(tmp_path / "saved").is_whole


@pytest.mark.parametrize("seed", range(10))
def test_shards_are_a_grid_if_each_element_is_in_one_of_them(seed: int) -> None:
    rng = random.Random(seed)
    shape = (6, 5, 4)[: 1 + seed % 3]
    cuts = [sorted({0, side, *rng.sample(range(side), 2)}) for side in shape]
    corners = product(*(pairwise(cut) for cut in cuts))
    shards = [
        Shard("file", "key", 0, 1, tuple(low for low, _ in corner), tuple(end - low for low, end in corner))
        for corner in corners
    ]
    moved = rng.randrange(len(shards))
    start = tuple(rng.randint(0, side - part) for side, part in zip(shape, shards[moved].shape, strict=True))
    changed = [*shards[:moved], replace(shards[moved], start=start), *shards[moved + 1 :]]

    assert _is_grid(shape, tuple(shards))
    assert (start == shards[moved].start) == _is_grid(shape, tuple(changed))
    assert not _is_grid(shape, tuple(shards[:-1]))


def test_several_models_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": {"model": STATE}, "b": {"model": STATE}}, checkpoint_id=tmp_path, no_dist=True)

    with pytest.raises(CheckpointError, match=r"several models \(a\.model, b\.model\)"):
        open_checkpoint(tmp_path)


def test_a_save_that_was_not_finished_is_refused(folder: Path) -> None:
    (folder / ".metadata").unlink()

    with pytest.raises(CheckpointError, match="has no checkpoint"):
        open_checkpoint(folder)


@pytest.mark.parametrize("seed", range(5))
def test_any_metadata_bytes_give_a_checkpoint_or_an_error(seed: int, folder: Path) -> None:
    path = folder / ".metadata"
    good, generator = path.read_bytes(), torch.Generator().manual_seed(seed)
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(3):
            at, to = (int(torch.randint(high, (), generator=generator)) for high in (len(bad), 256))
            bad[at] = to
        path.write_bytes(bad)
        try:
            open_checkpoint(folder)
        except (CheckpointError, CorruptFileError, MissingFileError) as error:
            assert str(folder) in str(error)  # noqa: PT017
