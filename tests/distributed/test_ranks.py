"""Models of torch.distributed from disk: a rank has a view of the checkpoint, and the numbers are the same."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offload
from offload.budget import evict, keep_resident
from offload.errors import CheckpointError, ShapeMismatchError, UnsupportedOpError
from offload.storage.handle import Handle
from offload.storage.pages import Range
from offload.tensor.locals import local_of
from offload.tensor.wrapper import handle_of
from offload.testing.checkpoints import tiny_checkpoint
from tests.distributed.ranks import run_ranks
from tests.models.forms import FORMS
from tests.page_cache import needs_page_cache

IDS = torch.tensor([[1, 2, 3, 4]])
TINY = {"num_key_value_heads": 4, "max_shard_size": "1GB"}
MIXTURE = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
KINDS = {
    "llama": {},
    "qwen3_moe": MIXTURE,
    "phi3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},  # gate and up are one weight
}
PLAN = {
    f"model.layers.{layer}.{name}": style
    for layer in range(2)
    for style, names in (
        (ColwiseParallel, "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"),
        (RowwiseParallel, "self_attn.o_proj mlp.down_proj"),
    )
    for name in names.split()
}


def outcome(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and tokens."""
    with torch.no_grad():
        logits = model(IDS).logits
    return logits, model.generate(IDS, max_new_tokens=4, do_sample=False)


def assert_same(plain: Any, found: Any) -> None:
    for one, other in zip(outcome(plain), outcome(found), strict=True):
        assert torch.equal(one, other)


def plain_parallel(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", **options)


def empty_model(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with offload.init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()


def full_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_of(tensor) for name, tensor in model.named_parameters()}


def own_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


# The same numbers


@pytest.mark.parametrize(
    ("kind", "world"), [("llama", 2), ("llama", 4), ("qwen3_moe", 2), ("qwen3_moe", 4), ("phi3", 2)]
)
def test_a_tensor_parallel_model_from_disk_gives_the_bits_of_the_plain_one(
    tmp_path: Path, kind: str, world: int
) -> None:
    tiny_checkpoint(tmp_path, kind, **TINY, **KINDS[kind])

    def act(_: int) -> None:
        model = offload.from_pretrained(tmp_path, tp_plan="auto")
        for name, parameter in model.named_parameters():
            assert offload.is_offloaded(parameter), name
            handle = handle_of(local_of(parameter))
            if isinstance(parameter, DTensor) and parameter.placements == (Shard(0),):
                assert handle.composed is not None or handle.part is not None, name
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())

        assert_same(plain_parallel(tmp_path), model)

    run_ranks(world, act)

    assert ["model.safetensors"] == [path.name for path in own_files(tmp_path)]


def test_experts_in_fp8_are_decoded_by_the_rank_that_has_them(tmp_path: Path) -> None:
    form = FORMS["fp8-qwen3_moe"]
    form.write(tmp_path / "fp8")
    plain = form.plain(tmp_path / "fp8")
    plain.config.save_pretrained(tmp_path / "dense")
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    save_file(values, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})

    def act(_: int) -> None:
        model = offload.from_pretrained(tmp_path / "fp8", tp_plan="auto", **form.options)

        assert_same(plain_parallel(tmp_path / "dense", dtype=model.dtype), model)

    run_ranks(2, act)


def test_whole_experts_are_views_of_the_checkpoint(tmp_path: Path) -> None:
    """Expert parallelism: a rank has all of some experts."""
    from transformers.distributed import DistributedConfig

    tiny_checkpoint(tmp_path, "qwen3_moe", **TINY, **MIXTURE)

    def act(_: int) -> None:
        def config() -> Any:
            return DistributedConfig(tp_size=2, ep_size=2)

        model = offload.from_pretrained(tmp_path, distributed_config=config())
        experts = model.model.layers[0].mlp.experts.down_proj
        assert isinstance(experts, DTensor)
        assert (2, 64, 32) == local_of(experts).shape
        assert offload.is_offloaded(experts)

        from transformers import AutoModelForCausalLM

        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config()), model)

    run_ranks(2, act)


def by_tensor(model: nn.Module) -> None:
    parallelize_module(model, init_device_mesh("cpu", (2,)), {name: style() for name, style in PLAN.items()})


def by_fsdp(model: Any, mesh: Any = None) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_both(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {name: style() for name, style in PLAN.items()})
    by_fsdp(model, mesh["dp"])


def by_replicas(model: Any) -> None:
    by_fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


@pytest.mark.parametrize(
    ("world", "shard", "sizes"),
    [
        (2, by_tensor, {}),
        (2, by_fsdp, {}),
        (3, by_fsdp, {}),  # 64 rows and 96 do and don't divide
        (4, by_both, {}),
        (4, by_replicas, {}),
    ],
)
def test_an_empty_model_that_torch_has_sharded_is_filled_with_each_ranks_share(
    tmp_path: Path, world: int, shard: Callable[[Any], None], sizes: dict[str, int]
) -> None:
    tiny_checkpoint(tmp_path, **TINY, **sizes)

    def act(_: int) -> None:
        plain, model = full_model(tmp_path), empty_model(tmp_path)
        shard(plain)
        shard(model)
        offload.load_checkpoint_and_dispatch(model, tmp_path)
        for name, local in locals_of(model).items():
            assert offload.is_offloaded(local) or local.numel() == 0, name
            assert torch.equal(local_of(plain.get_parameter(name)), local.to("cpu")), name
        with torch.no_grad():
            for _ in range(2):
                expected, found = plain(IDS).logits, model(IDS).logits
                assert torch.equal(expected, found)

    run_ranks(world, act)


def test_adapters_train_over_a_base_that_fsdp_has_sharded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tiny_checkpoint(tmp_path, **TINY)

    def act(_: int) -> None:
        losses = []
        for on_disk in (False, True):
            model = empty_model(tmp_path) if on_disk else full_model(tmp_path)
            by_fsdp(model)
            if on_disk:
                offload.load_checkpoint_and_dispatch(model, tmp_path)
            torch.manual_seed(0)
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
            optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
            for _ in range(3):
                loss = model(IDS, labels=IDS).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            frozen = [one for one in model.parameters() if not one.requires_grad]
            assert not on_disk or all(map(offload.is_offloaded, frozen))

        assert losses[:3] == losses[3:]
        assert losses[0] != losses[2]

    run_ranks(2, act)


# Bytes


@needs_page_cache
def test_loading_reads_headers_only_and_a_second_pass_nothing(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "0", **{**TINY, "hidden_size": 256, "intermediate_size": 2048, "vocab_size": 4096})
    for name in ("1", "warm"):
        shutil.copytree(tmp_path / "0", tmp_path / name)

    def act(rank: int) -> None:
        plain_parallel(tmp_path / "warm")(IDS)  # what is imported on the way is read now
        drop(tmp_path / str(rank) / "model.safetensors")
        before = read_bytes()
        model = offload.from_pretrained(tmp_path / str(rank), tp_plan="auto")
        loaded = read_bytes()
        with torch.no_grad():
            model(IDS)
            first = read_bytes()
            model(IDS)
        second = read_bytes()

        assert loaded - before <= 4 * 65536
        assert first > loaded
        assert second == first

    run_ranks(2, act)


def read_bytes() -> int:
    """What this process has had read from disks."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@needs_page_cache
def test_a_stage_of_a_pipeline_reads_no_layer_of_its_neighbour(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **{**TINY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4})
    stages: list[Any] = []
    for rank in range(2):
        model = empty_model(tmp_path).model
        model.layers = nn.ModuleDict({str(at): model.layers[at] for at in range(2 * rank, 2 * rank + 2)})
        stages.append(model)
        whole = nn.ModuleDict({"model": model})
        offload.load_checkpoint_and_dispatch(whole, tmp_path)
    names = [set(dict(stage.named_parameters())) for stage in stages]
    shared = names[0] & names[1]

    assert {"norm.weight", "embed_tokens.weight"} == shared
    assert all(offload.is_offloaded(one) for stage in stages for one in stage.layers.parameters())
    evict(*stages)
    drop(tmp_path / "model.safetensors")
    with torch.no_grad():
        for _ in range(2):
            for one in stages[0].layers.parameters():
                one.sum()
    in_memory = [
        sum(
            Range(handle.file, *handle.extent, shared=False).cached_bytes()
            for handle in map(handle_of, stage.layers.parameters())
        )
        for stage in stages
    ]
    share = sum(one.nbytes for one in stages[0].layers.parameters())
    assert in_memory[0] > 0.9 * share
    assert in_memory[1] < 0.05 * share


def drop(path: Path) -> None:
    """Have a file read from the disk again."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Shares that are cut once


def cut_model(folder: Path, offload_dir: Path) -> Any:
    model = empty_model(folder)
    by_tensor(model)
    return offload.load_checkpoint_and_dispatch(model, folder, offload_dir=offload_dir, store=True)


def test_columns_are_cut_once_into_a_folder_for_each_rank(tmp_path: Path) -> None:
    source, cut = tmp_path / "source", tmp_path / "cut"
    tiny_checkpoint(source, **TINY)

    def act(rank: int) -> list[tuple[str, int]]:
        model, plain = cut_model(source, cut), full_model(source)
        by_tensor(plain)
        down = local_of(model.model.layers[0].mlp.down_proj.weight)
        assert handle_of(down).was_stored
        assert f"rank-{rank}-of-2" == down.offload_path.parent.name
        assert torch.equal(local_of(plain.model.layers[0].mlp.down_proj.weight), down)
        return [(str(path), path.stat().st_ino) for path in own_files(cut / f"rank-{rank}-of-2")]

    first = run_ranks(2, act)
    again = run_ranks(2, act)

    assert [4, 4] == [len(files) for files in first]  # down_proj and o_proj of two layers
    assert first == again

    def another_mesh(_: int) -> None:
        model = empty_model(source)
        by_fsdp(model)
        with pytest.raises(CheckpointError, match=r"shares for a mesh of 2 .*one of 4"):
            offload.load_checkpoint_and_dispatch(model, source, offload_dir=cut)

    run_ranks(4, another_mesh)
    os.utime(source / "model.safetensors", (1, 1))

    def another_source(_: int) -> None:
        with pytest.raises(CheckpointError, match="cut from another checkpoint"):
            cut_model(source, cut)

    run_ranks(2, another_source)


def test_a_rank_that_is_killed_while_it_cuts_is_resumed(tmp_path: Path) -> None:
    source, cut = tmp_path / "source", tmp_path / "cut"
    tiny_checkpoint(source, **TINY)

    def killed(rank: int) -> None:
        put_down, done = Handle.put_down, []

        def slow(handle: Handle, mark: str) -> None:
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            put_down(handle, mark)
            done.append(handle)

        Handle.put_down = slow  # type: ignore[method-assign]
        cut_model(source, cut)

    run_ranks(2, killed, ends={0: signal.SIGKILL, 1: signal.SIGKILL})
    before = {path: path.stat().st_ino for path in own_files(cut)}
    assert 4 == len(before)

    run_ranks(2, lambda _: cut_model(source, cut) and None)

    after = {path: path.stat().st_ino for path in own_files(cut)}
    assert before.items() <= after.items()
    assert 8 == len(after)


def test_ranks_that_have_the_same_share_share_the_file(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "source", **TINY)

    def act(rank: int) -> tuple[list[int], list[float]]:
        mesh = init_device_mesh("cpu", (2, 2))
        weight = distribute_tensor(
            torch.empty(64, 128, device="meta"), mesh, [Replicate(), Shard(1)], src_data_rank=None
        )
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(weight))
        path = tmp_path / "w.safetensors"
        report = offload.load_checkpoint_in_model(model, path, offload_dir=tmp_path / "cut", store=True)
        assert {"stored"} == set(report.forms)
        local = local_of(model.w)
        shared = local.offload_path.stat().st_ino
        dist.barrier()
        with torch.no_grad():
            local.mul_(rank)  # is the rank's own from here on
        dist.barrier()
        return shared, local.sum().item()

    save_file({"w": torch.ones(64, 128)}, tmp_path / "w.safetensors")
    found = run_ranks(4, act)

    assert found[0][0] == found[2][0] != found[1][0] == found[3][0]
    assert [0, 4096, 8192, 12288] == [total for _, total in found]


# What walks a model


def test_what_walks_a_model_looks_inside_a_dtensor(tmp_path: Path) -> None:
    value = torch.arange(64 * 1024, dtype=torch.float32).view(64, 1024)
    save_file({"weight": value}, tmp_path / "w.safetensors")

    def loaded(**options: Any) -> nn.Module:
        model = nn.Module()
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.empty(64, 1024, device="meta"), mesh, [Shard(0)], src_data_rank=None)
        model.register_parameter("weight", nn.Parameter(weight))
        assert not offload.load_checkpoint_in_model(model, tmp_path / "w.safetensors", **options).differs
        return model

    def act(rank: int) -> None:
        mine = value[32 * rank : 32 * rank + 32]
        model = loaded()
        parameter = model.weight
        assert isinstance(parameter, DTensor)
        assert (64, 1024) == tuple(parameter.shape)
        assert offload.is_offloaded(parameter)
        assert torch.equal(value, parameter.full_tensor())

        local_of(parameter).sum()
        keep_resident(model)
        assert [True] == [one.pinned for one in handle_of(local_of(parameter)).books.ranges.values()]
        assert mine.nbytes == sum(one.nbytes for one in handle_of(local_of(parameter)).books.ranges.values())
        evict(model)

        def double(name: str, tensor: torch.Tensor) -> torch.Tensor:
            assert ("weight", (Shard(0),), 2) == (name, tensor.placements, tensor.device_mesh.size())
            return tensor * 2

        assert ("weight",) == offload.map_values(double, model, progress=False).replaced
        assert model.weight is parameter
        assert offload.is_offloaded(parameter)
        assert torch.equal(mine * 2, local_of(parameter))
        assert torch.equal(value * 2, parameter.full_tensor())
        with pytest.raises(ShapeMismatchError):
            offload.map_values(lambda _, one: one[1:] + 1, model, strict_shape=False, progress=False)
        offload.map_values(lambda _, one: one.bfloat16(), model, strict_dtype=False, progress=False)
        assert torch.bfloat16 == model.weight.dtype == local_of(model.weight).dtype

        offload.materialize(model)
        assert isinstance(model.weight, DTensor)
        assert isinstance(model.weight, nn.Parameter)
        assert torch.Tensor is type(local_of(model.weight))
        assert torch.equal((mine * 2).bfloat16(), local_of(model.weight))

        offload.disk_offload(model)
        assert offload.is_offloaded(model.weight)
        assert torch.equal((mine * 2).bfloat16(), local_of(model.weight))

        kept = loaded(offload_dir=tmp_path / "own")
        with torch.no_grad():
            local_of(kept.weight).add_(1)
        assert mine.nbytes <= local_of(kept.weight).offload_path.stat().st_size < value.nbytes
        assert f"rank-{rank}-of-2" == local_of(kept.weight).offload_dir.name

    run_ranks(2, act)

    assert torch.equal(value, offload.load_file(tmp_path / "w.safetensors")["weight"])


def test_what_can_not_be_sharded_says_why_and_in_which_order_it_can(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    tiny_checkpoint(tmp_path, **TINY)

    def act(_: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = offload.from_pretrained(tmp_path)
        weight = model.lm_head.weight
        for source in (0, None):
            with pytest.raises(UnsupportedOpError, match=r"'lm_head.weight' is on disk.*Shard the empty model first"):
                distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=source)
        with pytest.raises(UnsupportedOpError, match="Shard the empty model first"):
            by_tensor(model)
        with pytest.raises(UnsupportedOpError, match="Shard the empty model first"):
            fully_shard(model)
        assert [weight.shape[0] // 2] * 2 == [len(part) for part in weight.chunk(2)]
        assert offload.is_offloaded(weight.narrow(0, 0, 2))

        empty = nn.Linear(64, 96, bias=False, device="meta")
        partial = DTensor.from_local(empty.weight.detach(), mesh, [Partial()], run_check=False)
        empty.weight = nn.Parameter(partial)
        with pytest.raises(UnsupportedOpError, match=r"'weight' can't be filled.*Partial"):
            offload.load_checkpoint_and_dispatch(empty, head(tmp_path))

        sharded = empty_model(tmp_path)
        by_tensor(sharded)
        offload.load_checkpoint_and_dispatch(sharded, tmp_path)
        with pytest.raises(UnsupportedOpError, match="quantize the model in one process"):
            offload.quantize_(sharded, Int8WeightOnlyConfig())

    run_ranks(2, act)


def head(folder: Path) -> Path:
    from safetensors.torch import load_file

    path = folder / f"head-{os.getpid()}.safetensors"
    save_file({"weight": load_file(folder / "model.safetensors")["lm_head.weight"]}, path)
    return path
