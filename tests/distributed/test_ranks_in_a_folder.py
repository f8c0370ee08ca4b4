"""Two ranks with the same folder: a name in it belongs to one rank, and what is passed is visible to both."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import NameInUseError
from tests.distributed.ranks import run_ranks

VALUE = torch.arange(6.0).reshape(2, 3)


def refused(act: Callable[[], object]) -> str:
    """The text of `NameInUseError`; empty if there is none. By then all ranks have tried."""
    said = ""
    try:
        act()
    except NameInUseError as error:
        said = str(error)
    dist.barrier()
    return said


def test_one_rank_owns_a_name_in_a_folder_while_it_has_the_tensor(tmp_path):
    """At the same moment, and at a first write to a checkpoint; different names don't matter."""
    save_file({"weight": VALUE}, tmp_path / "checkpoint.safetensors")

    def act(rank: int) -> Any:
        made: dict[str, torch.Tensor] = {}

        def make(name: str) -> None:
            made[name] = OffloadedTensor.from_original_tensor(VALUE + rank, name, tmp_path / "named", exist_ok=True)

        layer = nn.Linear(3, 2, bias=False, device="meta")
        offload.load_checkpoint_in_model(layer, tmp_path / "checkpoint.safetensors", offload_dir=tmp_path / "work")
        with torch.no_grad():
            said = [refused(lambda: make("both")), refused(lambda: layer.weight.add_(rank + 1))]
        own = refused(lambda: make(f"of {rank}"))
        expected = VALUE if said[1] else VALUE + rank + 1
        right = torch.equal(expected, layer.weight.detach()) and all(
            torch.equal(VALUE + rank, one) for one in made.values()
        )
        dist.barrier()
        made.clear()
        dist.barrier()
        later = []
        for turn in range(2):
            later.append(refused(lambda turn=turn: make("both") if rank == turn else made.clear()))
            made.clear()
            dist.barrier()
        return [bool(text) for text in said], own, right, later, "another rank" in "".join(said) or not any(said)

    found = run_ranks(2, act)

    refusals = [said for said, *_ in found]
    assert [[True, False]] * 2 == [sorted(pair, reverse=True) for pair in zip(*refusals, strict=True)]
    assert [("", True, ["", ""], True)] * 2 == [tuple(rest) for _, *rest in found]


def test_ranks_see_what_each_writes_to_a_tensor_that_one_has_passed(tmp_path):
    def act(rank: int) -> Any:
        kept = None if rank else OffloadedTensor.zeros(2, name="seen", offload_dir=tmp_path)
        sent = [pickle.dumps(offload.by_reference(kept))]
        dist.broadcast_object_list(sent)
        seen = pickle.loads(sent[0])
        seen[rank] = rank + 1.0
        dist.barrier()
        found = seen.tolist()
        dist.barrier()
        return found

    assert [[1.0, 2.0]] * 2 == run_ranks(2, act)
