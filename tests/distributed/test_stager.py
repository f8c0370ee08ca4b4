"""A state saved while it changes is saved as it was, without a copy in memory."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import offload
from offload import OffloadedTensor
from offload.distributed.staging import FileStager
from tests.distributed.ranks import in_a_rank
from tests.page_cache import needs_memory_cap
from tests.processes import run_script

VALUE = torch.arange(24.0).reshape(4, 6)


def referenced(folder) -> OffloadedTensor:
    save_file({"w": VALUE}, folder / "checkpoint.safetensors")
    return OffloadedTensor.from_file(folder / "checkpoint.safetensors", "w")


def of_each_kind(folder) -> dict[str, torch.Tensor]:
    own = OffloadedTensor.from_original_tensor(VALUE, "own")
    layer = offload.disk_offload(nn.Linear(6, 4, bias=False))
    return {
        "own": own,
        "part": own[1:3],
        "turned": own.t(),
        "referenced": referenced(folder),
        "named": OffloadedTensor.from_original_tensor(VALUE * 2, "named", folder / "values"),
        "parameter": layer.weight,
        "dtensor": DTensor.from_local(own, init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False),
        "plain": VALUE.clone(),
        "large": torch.ones(256, 256),
    }


def plain(value: torch.Tensor) -> torch.Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


@pytest.mark.parametrize("stager", [FileStager, lambda: None], ids=["files", "torch's own"])
@in_a_rank
def test_async_save_saves_each_kind_of_tensor_as_it_was_when_it_was_called(tmp_path, stager):
    state = {**of_each_kind(tmp_path), "step": 3}
    expected = {name: plain(value) for name, value in state.items() if name != "step"}

    saving = dcp.async_save(state, checkpoint_id=tmp_path / "saved", async_stager=stager())
    for value in (state["own"], state["referenced"], state["plain"], state["large"], state["parameter"]):
        with torch.no_grad():
            value.mul_(-1)
    state["named"].update_values(VALUE * 7)
    saving.result()

    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "saved")
    assert [] == [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not torch.equal(expected["own"], state["own"])


def test_staged_values_stay_and_unwritten_ones_are_not_copied(tmp_path):
    """Even if a stored value from a checkpoint has its file replaced by a write."""
    save_file({"weight": torch.ones(3, 2), "bias": torch.zeros(3, dtype=torch.float16)}, tmp_path / "layer.safetensors")
    layer = nn.Linear(2, 3, device="meta", dtype=torch.float16)
    offload.load_checkpoint_in_model(layer, tmp_path / "layer.safetensors", offload_dir=tmp_path / "kept", store=True)
    w = referenced(tmp_path)
    own = OffloadedTensor.from_original_tensor(VALUE, "w")
    state = {"stored": layer.weight, "view": w[1:], "own": {"deep": [own, own]}}

    staged = FileStager(tmp_path / "here").stage(state)
    with torch.no_grad():
        layer.weight.zero_()
    own.zero_()

    assert torch.equal(torch.ones(3, 2).half(), staged["stored"])
    assert torch.equal(VALUE[1:], staged["view"])
    assert w.offload_path == staged["view"].offload_path
    assert torch.equal(VALUE, staged["own"]["deep"][0])
    assert staged["own"]["deep"][0] is staged["own"]["deep"][1]
    assert (tmp_path / "here") in staged["own"]["deep"][0].offload_path.parents


def test_the_files_of_what_was_staged_go_with_it(private_place):
    own = OffloadedTensor.from_original_tensor(VALUE, "w")

    def files():
        return len(list(private_place.rglob("*.safetensors")))

    staged = FileStager().stage({"w": own})
    assert 2 == files()
    del staged
    assert 1 == files()


def test_an_attribute_that_was_noted_on_a_tensor_is_seen_and_set_as_before():
    w = OffloadedTensor.from_original_tensor(VALUE, "w")
    w.note = "kept"

    assert {"note", "_handle"} <= set(vars(w))
    assert "kept" == vars(w)["note"]
    other = torch.ones(2)
    torch.utils.swap_tensors(w, other)
    assert torch.equal(VALUE, other.materialize())


MEMORY = """
    import json, sys, warnings, torch
    import torch.distributed.checkpoint as dcp
    from bench.memory_cap import memory_cap
    from offload import OffloadedTensor, save_checkpoint
    from offload.distributed import FileStager
    from tests.peak import Peak

    warnings.simplefilter("ignore")
    folder, limit = sys.argv[1], int(sys.argv[2])

    def staged(state, place):
        dcp.async_save(state, checkpoint_id=place, async_stager=FileStager(), no_dist=True).result()

    acts = {
        "async_save": lambda state: staged(state, f"{folder}/a"),
        "save": lambda state: dcp.save(state, checkpoint_id=f"{folder}/b", no_dist=True),
        "save_checkpoint": lambda state: save_checkpoint(state, f"{folder}/c"),
        "load": lambda state: dcp.load(state, checkpoint_id=f"{folder}/a", no_dist=True),
    }

    def done(count, rows):
        found, state = {}, {f"w{n}": OffloadedTensor.full((rows, 1024), n + 1.0, name=f"w{n}") for n in range(count)}
        for name, act in acts.items():
            if name == "load":
                for value in state.values():
                    value.zero_()
            with Peak() as peak:
                act(state)
            found[name] = peak.nbytes
        return found, all((value == n + 1).all().item() for n, value in enumerate(state.values()))

    done(2, 1)  # what is loaded once
    with memory_cap(limit, kills=False) as group:
        group.join()
        found, right = done(4 * limit >> 23, 2048)  # 8 MiB each
        said = {"found": found, "right": right, **group.facts()}
        (group.folder.parent / "cgroup.procs").write_text("0")
    print(json.dumps(said))
"""


@needs_memory_cap
def test_a_state_of_four_times_the_memory_is_saved_staged_and_loaded_in_that_of_two_values_and_a_little(tmp_path):
    limit = 48 << 20

    # otherwise glibc keeps memory freed by torch's reader, sometimes more and sometimes less
    said = json.loads(run_script(MEMORY, tmp_path, limit, env={"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}))

    assert said["right"]
    assert {} == {name: most for name, most in said["found"].items() if most > 2 * (8 << 20) + (1 << 20)}
    assert said["max_usage_in_bytes"] <= limit + (1 << 20)  # see `memory_cap`
    assert said["failcnt"] > 0  # otherwise all of it fitted
