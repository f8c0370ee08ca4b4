"""Ranks save with DCP what they share, also while it changes."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import offload
from offload import OffloadedTensor, save_checkpoint
from offload.errors import UnsupportedOpError
from offload.models.pretrained import let_save
from offload.tensor.locals import local_of
from tests.distributed.ranks import in_a_rank, run_ranks
from tests.distributed.test_ranks import TINY, by_both, by_fsdp, by_replicas, by_tensor, empty_model, locals_of
from tests.tiny import tiny_checkpoint

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


def _is_right(name: str, value: torch.Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        return torch.equal(WHOLE[name], local)
    expected = distribute_tensor(WHOLE[name], value.device_mesh, value.placements, src_data_rank=None).to_local()
    return torch.equal(expected, local.materialize() if offload.is_offloaded(local) else local)


@pytest.mark.parametrize("world", [1, 4])
def test_another_number_of_ranks_loads_what_dcp_saved_of_values_on_disk(world, tmp_path):
    """And one process opens the folder in place."""

    def act(_: int) -> list[str]:
        dcp.save(shared(init_device_mesh("cpu", (world,))), checkpoint_id=tmp_path / "dcp")
        return loaded_by_dcp(tmp_path / "dcp")

    assert [[]] * world == run_ranks(world, act)
    assert [[]] * (8 // world) == run_ranks(8 // world, lambda _: loaded_by_dcp(tmp_path / "dcp"))
    assert [] == loaded_by_dcp(tmp_path / "dcp", alone=True)
    opened = offload.load_file(tmp_path / "dcp")
    assert [] == [name for name, value in WHOLE.items() if not torch.equal(value, opened[name])]


def loaded_by_dcp(folder: Path, *, alone: bool = False) -> list[str]:
    state = {name: OffloadedTensor.zeros(value.shape, dtype=value.dtype, name=name) for name, value in WHOLE.items()}
    if not alone:
        state = shared(init_device_mesh("cpu", (dist.get_world_size(),)))
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
    dcp.load(state, checkpoint_id=folder, no_dist=alone)
    return [name for name, value in state.items() if not _is_right(name, value)]


def test_a_share_is_not_saved_as_a_value_and_the_error_names_dcp(llama_folder, tmp_path):
    """Neither with `save_checkpoint` nor with `save_pretrained`; nothing is written."""
    from transformers import LlamaForCausalLM

    def act(_: int) -> None:
        state = shared(init_device_mesh("cpu", (2,)))
        term = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
        for values in (state, {"term": term}, offload.from_pretrained(llama_folder, tp_plan="auto")):
            with pytest.raises(UnsupportedOpError, match=r"'(rows|term|model\..*)' is shared by ranks .*dcp\.save"):
                save_checkpoint(values, tmp_path / "saved")
        plain = LlamaForCausalLM.from_pretrained(llama_folder, tp_plan="auto")
        let_save(plain)
        for model in (plain, offload.from_pretrained(llama_folder, tp_plan="auto")):
            with pytest.raises(UnsupportedOpError, match=r"'model\..*' is shared by ranks .*dcp\.save"):
                model.save_pretrained(tmp_path / "saved")

    run_ranks(2, act)

    assert not (tmp_path / "saved").exists()


def test_ranks_save_what_they_loaded_from_disk_and_what_they_changed_of_it(llama_folder, tmp_path):
    """Rows are parts of the checkpoint, columns are cut from it, and written values are in the ranks' own files."""

    def act(_: int) -> Any:
        model = offload.from_pretrained(llama_folder, tp_plan="auto")
        assert all(map(offload.is_offloaded, model.parameters()))
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "same")
        passed = pickle.loads(pickle.dumps(offload.by_reference(local_of(model.model.layers[0].mlp.up_proj.weight))))
        before = passed.clone()
        with torch.no_grad():
            for parameter in model.model.layers[0].parameters():
                local_of(parameter).mul_(2)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "changed")
        return torch.equal(before * 2, local_of(model.model.layers[0].mlp.up_proj.weight))

    assert [True, True] == run_ranks(2, act)

    source = dict(offload.load_file(llama_folder))
    source["lm_head.weight"] = source["model.embed_tokens.weight"]  # of one value, either one name or both are saved
    for folder, times in (("same", 1), ("changed", 2)):
        saved = dict(offload.load_file(tmp_path / folder))
        assert len(source) - len(saved) in (0, 1)
        for name, value in saved.items():
            expected = source[name] * times if name.startswith("model.layers.0.") else source[name]
            assert torch.equal(expected, value), (folder, name)


@pytest.mark.parametrize(
    ("world", "shard", "others"), [(3, by_fsdp, 4), (4, by_replicas, 2), (4, by_both, 2), (2, by_tensor, 4)]
)
def test_another_number_of_ranks_loads_a_saved_checkpoint(tmp_path, world, shard, others):
    """Rows that the ranks do not divide, replicated shards, and two ways of sharding combined; also loaded by one."""
    tiny_checkpoint(tmp_path / "source", **TINY)

    def saved(_: int) -> None:
        model = sharded(tmp_path / "source", shard)
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")

    def loaded(_: int) -> list[str]:
        expected = dict(locals_of(sharded(tmp_path / "source", by_tensor)))
        return [
            name
            for name, local in locals_of(sharded(tmp_path / "dcp", by_tensor, of=tmp_path / "source")).items()
            if not torch.equal(expected[name].to("cpu"), local.to("cpu")) or not offload.is_offloaded(local)
        ]

    run_ranks(world, saved)

    assert [[]] * others == run_ranks(others, loaded)
    source = load_file(tmp_path / "source/model.safetensors")
    save_checkpoint(offload.load_file(tmp_path / "dcp"), tmp_path / "one")
    alone = load_file(tmp_path / "one/model.safetensors")
    assert source.keys() == alone.keys()
    assert [] == [name for name, value in source.items() if not torch.equal(value, alone[name])]


def sharded(folder: Path, shard: Callable[[Any], None], *, of: Path | None = None) -> Any:
    """A model sharded by torch, from disk; its configuration may be elsewhere."""
    model = empty_model(of or folder)
    shard(model)
    return offload.load_checkpoint_and_dispatch(model, folder)


VALUE = torch.arange(24.0).reshape(4, 6)


def of_each_kind(folder) -> dict[str, torch.Tensor]:
    save_file({"w": VALUE}, folder / "checkpoint.safetensors")
    own = OffloadedTensor.from_original_tensor(VALUE, "own")
    return {
        "own": own,
        "part": own[1:3],
        "turned": own.t(),
        "referenced": OffloadedTensor.from_file(folder / "checkpoint.safetensors", "w"),
        "named": OffloadedTensor.from_original_tensor(VALUE * 2, "named", folder / "values"),
        "parameter": offload.disk_offload(nn.Linear(6, 4, bias=False)).weight,
        "dtensor": DTensor.from_local(own, init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False),
        "plain": VALUE.clone(),
        "large": torch.ones(256, 256),
    }


def plain(value: torch.Tensor) -> torch.Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


@in_a_rank
def test_async_save_saves_each_kind_of_tensor_as_it_was_when_it_was_called(tmp_path):
    state = {**of_each_kind(tmp_path), "step": 3}
    expected = {name: plain(value) for name, value in state.items() if name != "step"}
    saving = dcp.async_save(state, checkpoint_id=tmp_path / "saved")
    for value in (state["own"], state["referenced"], state["plain"], state["large"], state["parameter"]):
        with torch.no_grad():
            value.mul_(-1)
    state["named"].update_values(VALUE * 7)
    saving.result()

    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "saved")
    assert [] == [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not torch.equal(expected["own"], state["own"])


def test_an_attribute_that_was_noted_on_a_tensor_is_seen_and_set_as_before():
    w = OffloadedTensor.from_original_tensor(VALUE, "w")
    w.note = "kept"

    assert {"note", "_handle"} <= set(vars(w))
    assert "kept" == vars(w)["note"]
    other = torch.ones(2)
    torch.utils.swap_tensors(w, other)
    assert torch.equal(VALUE, other.materialize())
