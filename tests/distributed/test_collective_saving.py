"""Ranks save shared values into the same files, completely or not at all."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import offload
from offload import OffloadedTensor, save_checkpoint
from offload.distributed import FileStager
from offload.errors import RankError
from offload.models import collective
from offload.models.pretrained import let_save
from offload.tensor.locals import local_of
from offload.testing.checkpoints import tiny_checkpoint
from tests.distributed.ranks import run_ranks
from tests.distributed.test_ranks import TINY, by_both, by_fsdp, by_replicas, by_tensor, empty_model, locals_of

WHOLE = {
    "rows": torch.arange(60.0).reshape(10, 6),
    "columns": torch.arange(60.0).reshape(6, 10) * 2,
    "uneven": torch.arange(21.0).reshape(3, 7),
    "planes": torch.arange(120).reshape(4, 5, 6),
    "both": torch.arange(64.0).reshape(8, 8).bfloat16(),
    "all": torch.arange(5.0),
    "plain": torch.tensor(7),
}
PLACED = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "uneven": [Shard(0)],
    "planes": [Shard(1)],
    "both": [Shard(0)],
    "all": [Replicate()],
}


def shared(mesh: Any, *, on_disk: bool = True, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """The values as the ranks of a mesh hold them, on disk or in memory."""

    def placed(name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in PLACED:
            return OffloadedTensor.from_original_tensor(value, name) if on_disk else value.clone()
        placements = PLACED[name] * mesh.ndim
        local = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
        if on_disk:
            local = OffloadedTensor.from_original_tensor(local.contiguous(), name)
        options = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(local, mesh, placements, **options)

    return {name: placed(name, value) for name, value in WHOLE.items()}


def all_equal(found: dict[str, torch.Tensor]) -> list[str]:
    """The names of those that have changed."""
    return [name for name, value in WHOLE.items() if not torch.equal(value, found[name])]


def saved_and_loaded(folder: Path) -> Callable[[int], Any]:
    def act(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = shared(mesh)
        paths = [save_checkpoint(state, folder / "one"), save_checkpoint(state, folder / "many", 200)]
        dcp.save(state, checkpoint_id=folder / "dcp")
        again = shared(mesh)
        for value in again.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
        dcp.load(again, checkpoint_id=folder / "dcp")
        wrong = [name for name, value in again.items() if not _is_right(name, value)]
        return [[path.name for path in each] for each in paths], wrong

    return act


def _is_right(name: str, value: torch.Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        return torch.equal(WHOLE[name], local)
    expected = distribute_tensor(WHOLE[name], value.device_mesh, value.placements, src_data_rank=None).to_local()
    return torch.equal(expected, local.materialize() if offload.is_offloaded(local) else local)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_save_the_bytes_that_one_process_saves(world, tmp_path):
    """Bit-identical files; and what DCP saved is loaded by another number of ranks."""
    save_checkpoint(WHOLE, tmp_path / "alone")

    [(names, wrong), *others] = run_ranks(world, saved_and_loaded(tmp_path))

    assert [(names, [])] * (world - 1) == others
    assert [] == wrong
    assert ["model.safetensors"] == names[0]
    assert len(names[1]) > 2
    for folder in ("one", "many", "dcp"):
        assert [] == all_equal(dict(offload.load_file(tmp_path / folder)))
    assert (tmp_path / "alone/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    assert sorted(names[0] + names[1]) == sorted(
        path.name for folder in ("one", "many") for path in (tmp_path / folder).iterdir()
    )
    if world > 1:
        others = 8 // world
        assert run_ranks(others, lambda rank: loaded_by_dcp(tmp_path / "dcp")) == [[]] * others
        assert loaded_by_dcp(tmp_path / "dcp", alone=True) == []


def loaded_by_dcp(folder: Path, *, alone: bool = False) -> list[str]:
    state = {name: OffloadedTensor.zeros(value.shape, dtype=value.dtype, name=name) for name, value in WHOLE.items()}
    if not alone:
        state = shared(init_device_mesh("cpu", (dist.get_world_size(),)))
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
    dcp.load(state, checkpoint_id=folder, no_dist=alone)
    return [name for name, value in state.items() if not _is_right(name, value)]


def test_errors_of_one_rank_are_errors_of_all_and_nothing_is_left(tmp_path):
    """Even if a rank exits; the old checkpoint is kept, and the same ranks can save afterwards."""
    save_checkpoint({"old": torch.ones(3)}, tmp_path / "kept")
    (tmp_path / "foreign").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "foreign/model.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}

    def act(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        state = shared(mesh)
        said = []

        def tried(folder: str = "kept", **changes: torch.Tensor) -> None:
            try:
                save_checkpoint({**state, **changes}, tmp_path / folder)
            except Exception as error:
                said.append((type(error).__name__, str(error)))

        tried(plain=torch.ones(2).to_sparse() if rank else WHOLE["plain"])
        tried(plain=torch.ones(3) if rank else WHOLE["plain"])
        partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
        tried(both=partial)
        if rank:
            state["rows"].to_local().offload_path.unlink()
        tried()
        state["rows"] = shared(mesh)["rows"]
        tried(folder="foreign")
        left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
        dist.barrier()
        save_checkpoint(state, tmp_path / "kept")
        return said, left

    first, second = run_ranks(2, act)

    assert ["RankError", "CheckpointError", "UnsupportedOpError", "RankError", "ForeignFileError"] == [
        kind for kind, _ in first[0]
    ]
    assert ["UnsupportedOpError", "CheckpointError", "UnsupportedOpError", "MissingFileError", "ForeignFileError"] == [
        kind for kind, _ in second[0]
    ]
    assert "rank 1 failed" in first[0][0][1]
    assert "redistribute" in first[0][2][1]
    assert ["foreign", "foreign/model.safetensors", "kept", "kept/model.safetensors"] == first[1] == second[1]
    assert before[tmp_path / "foreign/model.safetensors"] == (tmp_path / "foreign/model.safetensors").read_bytes()
    assert [] == all_equal(load_file(tmp_path / "kept/model.safetensors"))


def test_a_rank_that_is_killed_is_an_error_of_the_others_and_nothing_is_left(tmp_path, monkeypatch):
    save_checkpoint({"old": torch.ones(3)}, tmp_path / "model")

    def act(rank: int) -> None:
        state = shared(init_device_mesh("cpu", (2,)))
        if rank:
            monkeypatch.setattr(collective, "_fill_all", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            save_checkpoint(state, tmp_path / "model")
        except RankError as error:
            (tmp_path / "said").write_text(str(error))
        os._exit(0)  # the other one can't be waited for

    run_ranks(2, act, ends={1: signal.SIGKILL})

    assert "has exited" in (tmp_path / "said").read_text()
    assert ["model.safetensors"] == [path.name for path in (tmp_path / "model").iterdir()]
    assert ["old"] == list(load_file(tmp_path / "model/model.safetensors"))


def test_stages_of_a_model_are_saved_as_one_and_ranks_share_the_work(tmp_path):
    """With a group given, without any DTensor; values that all have are written by one rank each, evenly."""

    def act(rank: int) -> Any:
        stage = {f"layer{rank}.weight": torch.full((256, 256), float(rank))}
        both = {f"both{n}": torch.full((256, 256), 9.0) for n in range(2)}
        written = Written()
        with written:
            save_checkpoint({**stage, **both}, tmp_path / "model", process_group=dist.group.WORLD)
        return written.nbytes

    found = run_ranks(2, act)

    saved = load_file(tmp_path / "model/model.safetensors")
    assert ["both0", "both1", "layer0.weight", "layer1.weight"] == sorted(saved)
    assert all((saved[f"layer{rank}.weight"] == rank).all() for rank in range(2))
    assert all(2 << 18 <= nbytes < 2.1 * (1 << 18) for nbytes in found)


class Written:
    """`with Written() as written: ...`, then the bytes that this process has passed to the system for writing."""

    def __enter__(self) -> Written:
        self.before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = self._now() - self.before

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def test_save_pretrained_of_ranks_gives_what_one_process_saves(llama_folder, tmp_path):
    """A model that transformers sharded for two, with tied weights, in one file and in shards; nothing else is left."""
    from transformers import LlamaForCausalLM

    def act(rank: int) -> Any:
        model = LlamaForCausalLM.from_pretrained(llama_folder, tp_plan="auto", dtype="bfloat16")
        let_save(model)
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.save_pretrained(tmp_path / "one")
        model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
        return sorted(vars(model).keys() & {"gather_sharded_state_dict_for_save"})

    expected = LlamaForCausalLM.from_pretrained(llama_folder, dtype="bfloat16")
    expected.save_pretrained(tmp_path / "alone")
    assert [[], []] == run_ranks(2, act)

    for folder in ("one", "many"):
        saved = dict(offload.load_file(tmp_path / folder))
        alone = load_file(tmp_path / "alone/model.safetensors")
        assert alone.keys() == saved.keys()
        assert [] == [name for name, value in alone.items() if not torch.equal(value, saved[name])]
        assert not [path for path in (tmp_path / folder).iterdir() if path.name.startswith(".")]


def test_ranks_save_what_they_loaded_from_disk_and_what_they_changed_of_it(llama_folder, tmp_path):
    """Rows are parts of the checkpoint, columns are cut from it, and written values are in the ranks' own files."""

    def act(_: int) -> Any:
        model = offload.from_pretrained(llama_folder, tp_plan="auto")
        assert all(map(offload.is_offloaded, model.parameters()))
        save_checkpoint(model, tmp_path / "same")
        model.save_pretrained(tmp_path / "pretrained")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
        staged = FileStager().stage(model.state_dict())
        passed = pickle.loads(pickle.dumps(offload.by_reference(local_of(model.model.layers[0].mlp.up_proj.weight))))
        before = passed.clone()
        with torch.no_grad():
            for parameter in model.model.layers[0].parameters():
                local_of(parameter).mul_(2)
        save_checkpoint(model, tmp_path / "changed")
        save_checkpoint(staged, tmp_path / "staged")
        return torch.equal(before * 2, local_of(model.model.layers[0].mlp.up_proj.weight))

    assert [True, True] == run_ranks(2, act)

    source = dict(offload.load_file(llama_folder))
    source["lm_head.weight"] = source["model.embed_tokens.weight"]  # of one value, either one name or both are saved
    for folder, times in (("same", 1), ("pretrained", 1), ("dcp", 1), ("staged", 1), ("changed", 2)):
        saved = dict(offload.load_file(tmp_path / folder))
        assert len(source) - len(saved) in (0, 1)
        for name, value in saved.items():
            expected = source[name] * times if name.startswith("model.layers.0.") else source[name]
            assert torch.equal(expected, value), (folder, name)


@pytest.mark.parametrize(
    ("world", "shard", "others"),
    [
        (1, by_fsdp, 2),
        (3, by_fsdp, 4),
        (4, by_replicas, 2),
        (4, by_both, 2),
        (4, by_tensor, 2),
        (2, by_tensor, 4),
    ],
)
def test_another_number_of_ranks_loads_a_saved_checkpoint(tmp_path, world, shard, others):
    """Rows that the ranks do not divide, replicated shards, and two ways of sharding combined; also loaded by one."""
    tiny_checkpoint(tmp_path / "source", **TINY)
    ways = ("own", "pretrained", "dcp")

    def saved(_: int) -> None:
        model = sharded(tmp_path / "source", shard)
        save_checkpoint(model, tmp_path / "own", 40_000)
        model.save_pretrained(tmp_path / "pretrained")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")

    def loaded(_: int) -> list[str]:
        expected = dict(locals_of(sharded(tmp_path / "source", by_tensor)))
        return [
            f"{way}: {name}"
            for way in ways
            for name, local in locals_of(sharded(tmp_path / way, by_tensor, of=tmp_path / "source")).items()
            if not torch.equal(expected[name].to("cpu"), local.to("cpu")) or not offload.is_offloaded(local)
        ]

    run_ranks(world, saved)

    assert [[]] * others == run_ranks(others, loaded)
    source = load_file(tmp_path / "source/model.safetensors")
    for way in ways:
        alone = dict(offload.load_file(tmp_path / way))
        assert source.keys() == alone.keys()
        assert [] == [name for name, value in source.items() if not torch.equal(value, alone[name])]


def sharded(folder: Path, shard: Callable[[Any], None], *, of: Path | None = None) -> Any:
    """A model sharded by torch, from disk; its configuration may be elsewhere."""
    model = empty_model(of or folder)
    shard(model)
    return offload.load_checkpoint_and_dispatch(model, folder)
