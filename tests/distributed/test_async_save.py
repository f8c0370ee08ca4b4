"""A state that torch saves while it changes is saved as it was."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import offload
from offload import OffloadedTensor
from tests.distributed.ranks import in_a_rank

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
