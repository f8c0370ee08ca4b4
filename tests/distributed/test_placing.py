"""The shard of each of up to 64 ranks, computed in one process: the same as torch's."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import offload
from offload.models.slots import alone, share_of
from offload.tensor.locals import local_of
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of
from tests.processes import forked
from tests.tensor.test_recipes import GRANULE, decoded

PLACEMENTS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]


def in_a_fake_group(act, rank: int, world: int) -> None:
    """Run as one of many ranks without the others, in a separate process."""

    def alone() -> None:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        act()

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(forked(alone), 0)[1])


@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 16), (2, 4, 8)])
def test_every_rank_has_of_a_value_what_torch_gives_it(shape):
    world = torch.Size(shape).numel()

    def act() -> None:
        mesh = init_device_mesh("cpu", shape)
        for placements in itertools.product(PLACEMENTS, repeat=len(shape)):
            for size in ((10, 12), (64, 6), (3, 5)):
                whole = torch.arange(size[0] * size[1]).view(size)
                outer = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                assert torch.equal(local_of(outer), share_of(whole, outer, "w")), (placements, size)

    for rank in (0, 1, world // 2 + 1, world - 1):
        in_a_fake_group(act, rank, world)


def test_shares_of_64_ranks_are_views_that_know_their_own_bytes(tmp_path):
    whole = torch.randn(256, 128)
    save_file({name: whole.clone() for name in ("rows", "columns", "both")}, tmp_path / "w.safetensors")
    placed = {"rows": [Shard(0), Shard(0)], "columns": [Replicate(), Shard(1)], "both": [Shard(0), Shard(1)]}

    def act() -> None:
        mesh = init_device_mesh("cpu", (8, 8))
        model = nn.Module()
        for name, placements in placed.items():
            outer = distribute_tensor(torch.empty(256, 128, device="meta"), mesh, placements, src_data_rank=None)
            model.register_parameter(name, nn.Parameter(outer))
        report = offload.load_checkpoint_in_model(model, tmp_path / "w.safetensors")
        for name, placements in placed.items():
            plain = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(local_of(plain), local_of(model.get_parameter(name))), name
        rows = local_of(model.rows)
        assert handle_of(rows).composed is None
        assert (4, 128) == rows.shape
        assert handle_of(rows).extent[1] == rows.nbytes
        form = report.forms["laid out anew"]
        assert (2, whole.nbytes + whole.nbytes // 8) == (form.values, form.nbytes)

    for rank in (0, 27, 63):
        in_a_fake_group(act, rank, 64)


@pytest.mark.parametrize("is_decoded", [False, True])
def test_the_share_of_a_view_has_its_shape_and_its_numbers_and_reads_no_other_rows(tmp_path, is_decoded):
    numbers, scales = torch.randint(0, 256, (4 * GRANULE, 16), dtype=torch.uint8), torch.rand(4, 16)
    save_file({"numbers": numbers, "scales": scales}, tmp_path / "w.safetensors")
    stored = offload.load_file(tmp_path / "w.safetensors")
    whole = decoded(stored["numbers"], stored["scales"]) if is_decoded else stored["numbers"]
    expected = whole.materialize()
    shares = {
        "elements of a stack": lambda value: value.view(4, GRANULE, 16)[2:],
        "one of them": lambda value: value.view(4, GRANULE, 16)[1],
        "rows with a dimension more": lambda value: value[GRANULE : 2 * GRANULE, None],
        "all in another shape": lambda value: value.view(2, 320),
        "turned": lambda value: value.t(),
        "parts of rows": lambda value: value.view(80, 8)[3:5],
        "nothing": lambda value: value.view(4, GRANULE, 16)[:0],
    }
    for what, cut in shares.items():
        share = alone(cut(whole), "w", None)

        assert handle_of(share).layout.shape == share.shape == cut(expected).shape, what
        assert torch.equal(cut(expected), share), what
        if what in ("elements of a stack", "one of them", "rows with a dimension more"):
            needed = sum(handle.extent[1] for handle in stored_in([handle_of(share)]))
            of_scales = 4 / GRANULE if is_decoded else 0
            assert cut(expected).numel() * (1 + of_scales) == needed, what


def test_other_rows_of_the_same_place_in_the_mesh_are_not_taken_for_those_that_were_stored(tmp_path):
    save_file({"w": torch.arange(64.0).view(8, 8)}, tmp_path / "w.safetensors")

    def act() -> None:
        def load(placements: list) -> torch.Tensor:
            mesh = init_device_mesh("cpu", (2, 2))
            empty = distribute_tensor(torch.empty(8, 8, device="meta"), mesh, placements, src_data_rank=None)
            model = nn.Module()
            model.register_parameter("w", nn.Parameter(empty))
            options = {"dtype": torch.float64, "offload_dir": tmp_path / "cut", "store": True}
            offload.load_checkpoint_in_model(model, tmp_path / "w.safetensors", **options)
            return local_of(model.w)

        rows = torch.arange(64.0).double().view(8, 8)
        for _ in range(2):
            assert torch.equal(rows[2:4], load([Shard(0), Shard(0)]))
        assert torch.equal(rows[4:6], load([_StridedShard(0, split_factor=2), Shard(0)]))

    in_a_fake_group(act, rank=1, world=4)
