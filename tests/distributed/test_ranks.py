"""torch.distributed models from disk: each rank has a view of the checkpoint, and the numbers are the same."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import offload
from bench.architectures import align
from bench.page_cache import cached_fraction, make_cold
from offload.budget import evict, keep_resident, memory_summary
from offload.errors import ShapeMismatchError, UnsupportedOpError
from offload.prefetch.pages import Range
from offload.prefetch.value import page_state_of
from offload.storage.file import TensorFile
from offload.tensor.locals import local_of
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of
from tests.checkpoints.forms import FORMS, Form
from tests.distributed.ranks import run_ranks
from tests.engines import be_alone
from tests.page_cache import needs_page_cache
from tests.tiny import tiny_checkpoint

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
    return logits, model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)


def assert_same(plain: Any, found: Any) -> None:
    (logits, tokens), (found_logits, found_tokens) = outcome(plain), outcome(found)
    assert torch.equal(logits, found_logits)
    assert (1, 8) == tuple(tokens.shape)
    assert torch.equal(tokens, found_tokens)


def empty_model(folder: Path) -> Any:
    with offload.init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()


def full_model(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def of_experts() -> Any:
    """The settings with which a rank has some experts completely."""
    size = dist.get_world_size()
    if not hasattr(DistributedConfig, "ep_size"):  # before transformers 5.19
        return DistributedConfig(tp_size=size, enable_expert_parallel=True)
    return DistributedConfig(tp_size=size, ep_size=size)


def by_plan(folder: Path, load: Any = offload.from_pretrained, **options: Any) -> Any:
    return load(folder, tp_plan="auto", **options)


def by_experts(folder: Path, load: Any = offload.from_pretrained, **options: Any) -> Any:
    return load(folder, distributed_config=of_experts(), **options)


def fully_sharded(folder: Path, load: Any = None, **options: Any) -> Any:
    if load is not None:
        model = load(folder, **options)
        by_fsdp(model)
        return model
    model = empty_model(folder)
    by_fsdp(model)
    return offload.load_checkpoint_and_dispatch(model, folder, **options)


# Each loads a rank's share from disk, or with another function in memory.
LOADERS: dict[str, Callable[..., Any]] = {"plan": by_plan, "fully": fully_sharded, "experts": by_experts}


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_of(tensor) for name, tensor in model.named_parameters()}


def own_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


# The same numbers


@pytest.mark.parametrize(
    ("kind", "world", "by"),
    [("llama", 4, "plan"), ("qwen3_moe", 2, "plan"), ("phi3", 2, "plan"), ("qwen3_moe", 2, "experts")],
)
def test_a_tensor_parallel_model_from_disk_gives_the_bits_of_the_plain_one(tmp_path, kind, world, by):
    """With expert parallelism, a rank has some experts completely."""
    tiny_checkpoint(tmp_path, kind, **TINY, **KINDS[kind])

    def act(_: int) -> None:
        model = LOADERS[by](tmp_path)
        for name, parameter in model.named_parameters():
            assert offload.is_offloaded(parameter), name
            handle = handle_of(local_of(parameter))
            if isinstance(parameter, DTensor) and parameter.placements == (Shard(0),) and by == "plan":
                assert handle.composed is not None or handle.source.part is not None, name
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if by == "experts":
            experts = model.model.layers[0].mlp.experts.down_proj
            assert isinstance(experts, DTensor)
            assert (2, 64, 32) == local_of(experts).shape

        assert_same(LOADERS[by](tmp_path, full_model), model)

    run_ranks(world, act)

    assert ["model.safetensors"] == [path.name for path in own_files(tmp_path)]


@pytest.mark.parametrize(
    ("name", "by"),
    [("fp8-llama", "plan"), ("fp8-llama", "fully"), *(("fp8-qwen3_moe", by) for by in LOADERS), ("ct-w4a16", "plan")],
)
def test_packed_weights_are_decoded_by_the_rank_that_has_them(tmp_path, name, by):
    # The plain model loads the decoded weights: transformers 5.23 fails (ZeroDivisionError in Fp8Dequantize, in the
    # second rank) where a block belongs to two ranks, as those of 128 rows here do.
    form = FORMS[name]
    form.write(tmp_path)
    dense = decoded(form, tmp_path)

    def act(_: int) -> None:
        model = LOADERS[by](tmp_path, **form.options)
        assert all(offload.is_offloaded(share) for share in locals_of(model).values())

        assert_same(LOADERS[by](dense, full_model, dtype=model.dtype), model)

    run_ranks(2, act)


def decoded(form: Form, stored: Path) -> Path:
    """Plain transformers does not load packed shares, or not all: a checkpoint with the values that it decodes."""
    model, folder = form.plain(stored), stored / "decoded"
    model.config.save_pretrained(folder)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    align(folder / "model.safetensors")
    return folder


def by_tensor(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {name: style() for name, style in PLAN.items()})


def by_uneven_rows(model: nn.Module) -> None:
    """Heads can't be divided by three; 128 rows or columns are split into 43, 43 and 42."""
    styles = {"gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}
    layouts: dict[Any, Any] = {
        ColwiseParallel: {"output_layouts": Replicate()},
        RowwiseParallel: {"input_layouts": Replicate()},
    }
    plan = {
        f"model.layers.{at}.mlp.{name}": style(**layouts[style]) for at in range(2) for name, style in styles.items()
    }
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


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
    ("kind", "world", "shard"),
    [
        ("llama", 2, by_tensor),
        ("qwen3_moe", 2, by_fsdp),
        ("phi3", 2, by_fsdp),
        ("llama", 3, by_fsdp),  # 64 rows can and 96 can't be divided
        ("llama", 3, by_uneven_rows),
        ("llama", 4, by_both),
        ("llama", 4, by_replicas),
    ],
)
def test_an_empty_model_that_torch_has_sharded_is_filled_with_each_ranks_share(tmp_path, kind, world, shard):
    tiny_checkpoint(tmp_path, kind, **TINY, **KINDS[kind])

    def act(_: int) -> None:
        plain, model = full_model(tmp_path), empty_model(tmp_path)
        shard(plain)
        shard(model)
        offload.load_checkpoint_and_dispatch(model, tmp_path)
        for name, local in locals_of(model).items():
            assert offload.is_offloaded(local) or local.numel() == 0, name
            assert torch.equal(local_of(plain.get_parameter(name)), local.to("cpu")), name
        for _ in range(2):
            assert_same(plain, model)

    run_ranks(world, act)


def test_adapters_train_over_a_base_that_fsdp_has_sharded(tmp_path):
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


def test_heads_that_fsdp_cuts_are_gathered_again(tmp_path):
    tiny_checkpoint(tmp_path, "llama", **{**TINY, "num_key_value_heads": 1})

    def act(_: int) -> None:
        model = offload.from_pretrained(tmp_path, distributed_config=DistributedConfig(fsdp_size=2))
        weight = model.model.layers[0].self_attn.k_proj.weight
        assert local_of(weight).shape[0] < weight.shape[0]

    run_ranks(2, act)


# Bytes


LARGE = {"hidden_size": 256, "intermediate_size": 2048, "moe_intermediate_size": 512, "vocab_size": 4096}


@needs_page_cache
@pytest.mark.parametrize(
    ("kind", "world", "load"),
    [("llama", 4, by_plan), ("phi3", 2, by_plan), ("qwen3_moe", 2, by_experts), ("llama", 2, fully_sharded)],
)
def test_a_rank_reads_its_share_once_and_for_columns_what_the_report_says(tmp_path, kind, world, load):
    """Loading reads headers; the first pass at most 1.05 times the shard plus 64 KiB per tensor; the second nothing.

    Columns are first cut at each read, from the whole rows given in the report, and then cut once.
    """
    tiny_checkpoint(tmp_path / "0", kind, **{**TINY, **KINDS[kind], **LARGE})
    for name in (*map(str, range(1, world)), "warm"):
        shutil.copytree(tmp_path / "0", tmp_path / name)

    def act(attempt: int, rank: int) -> list[str]:
        folder, cut = tmp_path / str(rank), tmp_path / f"cut-{rank}-{attempt}"
        with torch.no_grad():
            load(tmp_path / "warm")(IDS)  # imports on the way are read now
        wrong = too_much(lambda: load(folder), [folder], needed=stored_bytes)
        load(folder, offload_dir=cut, store=True)
        again = too_much(lambda: load(folder, offload_dir=cut, store=True), [folder, cut], needed=share_bytes)
        return wrong + again

    found = []
    while len(found) < 3 and [[]] * world not in found:  # code that the system dropped and reads again counts, too
        found.append(run_ranks(world, partial(act, len(found))))
    assert [[]] * world in found, found


def too_much(load: Callable[[], Any], folders: list[Path], *, needed: Callable[[Any], int]) -> list[str]:
    """What a model reads without needing it, from folders that are cold at first."""
    files = [path for folder in folders for path in own_files(folder)]
    make_cold(files)
    resident = resident_bytes(files)
    counted = [read_bytes()]
    model = load()
    counted.append(read_bytes())
    tables = [] if isinstance(model, FSDPModule) else [model.get_input_embeddings().weight]  # read by rows
    values = [local_of(one) for one in model.parameters() if all(one is not table for table in tables)]
    most = 1.05 * needed(values) + 65536 * len(list(model.parameters()))
    with torch.no_grad():
        for _ in range(2):
            model(IDS)
            counted.append(read_bytes())
    first_read, first, second = (after - before for before, after in pairwise(counted))
    found = {
        "headers": (first_read, 65536 * len(files)),
        "the first pass": (first, most),
        "in memory": (resident_bytes(files) - resident, most + 65536 * len(files)),
        "the second pass": (second, 0),
    }
    assert first > 0.5 * share_bytes(values) - resident
    return [f"{what}: {read} of {allowed}" for what, (read, allowed) in found.items() if read > allowed]


def share_bytes(values: list[torch.Tensor]) -> int:
    return sum(value.nbytes for value in values)


def stored_bytes(values: list[torch.Tensor]) -> int:
    return sum(handle.extent[1] for handle in stored_in(handle_of(value) for value in values))


def resident_bytes(files: list[Path]) -> int:
    return round(sum(cached_fraction([path]) * path.stat().st_size for path in files))


def read_bytes() -> int:
    """The bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def test_shares_are_read_ahead_in_the_order_of_the_layers(tmp_path):
    tiny_checkpoint(tmp_path, **TINY)

    def act(_: int) -> list[str]:
        model = by_plan(tmp_path)
        share = local_of(model.model.layers[0].mlp.gate_proj.weight)
        [value], order = values_of(share), []
        assert value.is_part
        assert not value.is_picked  # otherwise it would not be in the order
        of_values = {id(value): name for name, one in locals_of(model).items() for value in values_of(one)}
        while value is not None:
            order.append(of_values[id(value)])
            value = value.follower(None)
        return order

    first, second = run_ranks(2, act)

    assert first == second
    assert ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"] == first[:2]
    assert "lm_head.weight" == first[-1]


def values_of(tensor: torch.Tensor) -> list[Any]:
    return [value for handle in stored_in([handle_of(tensor)]) for value in page_state_of(handle).ranges.values()]


class Stage(nn.Module):
    """Consecutive layers of a Llama, with their names there, including what is before or after them."""

    def __init__(self, whole: Any, rank: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(at): whole.model.layers[at] for at in range(2 * rank, 2 * rank + 2)})
        self.model.rotary_emb = whole.model.rotary_emb
        if rank:
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head
        else:
            self.model.embed_tokens = whole.model.embed_tokens

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if hasattr(self, "lm_head") else self.model.embed_tokens(hidden)
        positions = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.model.layers.values():
            hidden = layer(hidden, position_embeddings=positions)
        return self.lm_head(self.model.norm(hidden)) if hasattr(self, "lm_head") else hidden


@needs_page_cache
def test_stages_of_a_pipeline_load_and_read_their_own_layers(tmp_path):
    """With torch's schedule and two microbatches."""
    for name in ("0", "1", "warm"):
        tiny_checkpoint(tmp_path / name, **{**TINY, **LARGE, "num_hidden_layers": 4})
    ids = torch.arange(8).view(2, 4)

    def act(rank: int) -> list[str]:
        def outcome(folder: Path) -> tuple[Stage, torch.Tensor | None]:
            stage = Stage(empty_model(folder), rank)
            assert not offload.load_checkpoint_in_model(stage, folder).missing_keys
            schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, torch.device("cpu")), n_microbatches=2)
            with torch.no_grad():
                return stage, schedule.step(*(() if rank else (ids,)))

        outcome(tmp_path / "warm")
        path = tmp_path / str(rank) / "model.safetensors"
        file = TensorFile.open(path)
        file.mapped(shared=False)
        make_cold([path])
        ranges = {key: Range(file, one.start, one.layout.nbytes, shared=False) for key, one in file.entries.items()}
        there = {key: one.cached_bytes() for key, one in ranges.items()}
        before = read_bytes()
        stage, logits = outcome(tmp_path / str(rank))
        first, own = read_bytes() - before, dict(stage.named_parameters())
        assert all(map(offload.is_offloaded, own.values()))
        values = [one for name, one in own.items() if "embed_tokens" not in name]
        most = 1.05 * share_bytes(values) + 65536 * len(values)
        assert 0.9 * share_bytes(values) < first
        assert len(ranges) - len(own) > 18
        along = sum(one.cached_bytes() - there[key] for key, one in ranges.items() if key not in own)
        if logits is not None:
            with torch.no_grad():
                expected = [full_model(tmp_path / "warm")(one[None]).logits for one in ids]
            assert torch.equal(torch.cat(expected), logits)
        wrong = [f"read {first} of {most}"] if first > most else []
        wrong += [f"{along} bytes of other stages"] if along >= 65536 else []
        return [*wrong, *(["logits"] if logits is not None else [])]

    found: list[list[list[str]]] = []
    while len(found) < 3 and [[], ["logits"]] not in found:  # code that the system dropped and reads again counts, too
        found.append(run_ranks(2, act))
    assert [[], ["logits"]] in found, found


# Shards that are cut once


def cut_model(folder: Path, offload_dir: Path) -> Any:
    model = empty_model(folder)
    by_tensor(model)
    return offload.load_checkpoint_and_dispatch(model, folder, offload_dir=offload_dir, store=True)


def test_columns_are_cut_once_into_a_folder_for_each_rank(tmp_path):
    source, cut = tmp_path / "source", tmp_path / "cut"
    tiny_checkpoint(source, **TINY)

    def act(rank: int) -> list[tuple[str, int]]:
        model, plain = cut_model(source, cut), full_model(source)
        by_tensor(plain)
        down = local_of(model.model.layers[0].mlp.down_proj.weight)
        assert handle_of(down).composed is None
        assert f"rank-{rank}-of-2" == down.offload_path.parent.name
        assert torch.equal(local_of(plain.model.layers[0].mlp.down_proj.weight), down)
        return [(str(path), path.stat().st_ino) for path in own_files(cut / f"rank-{rank}-of-2")]

    first = run_ranks(2, act)
    again = run_ranks(2, act)

    assert [4, 4] == [len(files) for files in first]  # down_proj and o_proj in two layers
    assert first == again

    run_ranks(4, lambda _: cut_model(source, cut) and None)  # another mesh has folders of its own
    assert first == run_ranks(2, act)
    assert 4 == len(own_files(cut / "rank-3-of-4"))

    tiny_checkpoint(source, seed=1, **TINY)
    run_ranks(2, act)  # another checkpoint is cut anew


# Walking a model


def test_walks_over_a_model_look_inside_dtensors(tmp_path):
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
        be_alone(pytest.MonkeyPatch())  # this process ends with the test
        before = memory_summary()
        model = loaded()
        parameter = model.weight
        assert isinstance(parameter, DTensor)
        assert (64, 1024) == tuple(parameter.shape)
        assert offload.is_offloaded(parameter)
        assert torch.equal(value, parameter.full_tensor())

        local_of(parameter).sum()
        keep_resident(model)
        assert [True] == [one.pinned for one in handle_of(local_of(parameter)).page_state.ranges.values()]
        assert mine.nbytes == sum(one.nbytes for one in handle_of(local_of(parameter)).page_state.ranges.values())
        summary = memory_summary()
        assert mine.nbytes == summary.values - before.values
        assert mine.nbytes == summary.kept - before.kept
        assert mine.nbytes <= summary.resident - before.resident + 2 * 4096
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


def test_a_dictionary_of_dtensors_is_walked_as_a_model_is(tmp_path):
    save_file({"w": torch.arange(16.0).view(4, 4)}, tmp_path / "w.safetensors")

    def act(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,))
        whole = offload.load_file(tmp_path / "w.safetensors")["w"]
        rows = whole[2 * rank : 2 * rank + 2]
        tensors: dict[str, torch.Tensor] = {
            "on disk": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
            "in memory": DTensor.from_local(rows.materialize(), mesh, [Shard(0)], run_check=False),
        }
        shapes: list[tuple[int, ...]] = []

        def double(_: str, tensor: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor * 2

        assert ("on disk", "in memory") == offload.map_values(double, tensors, progress=False).replaced
        assert [(2, 4), (2, 4)] == shapes
        assert [True, False] == [offload.is_offloaded(local_of(one)) for one in tensors.values()]
        return [torch.equal(whole.materialize() * 2, one.full_tensor()) for one in tensors.values()]  # type: ignore[attr-defined]

    assert [[True, True]] * 2 == run_ranks(2, act)


def test_a_model_that_cannot_be_sharded_is_refused_with_the_right_order(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    tiny_checkpoint(tmp_path, **TINY)

    FORMS["torchao-int8"].write(tmp_path / "torchao")

    def act(_: int) -> None:
        for load in (by_plan, fully_sharded):
            with pytest.raises(UnsupportedOpError, match=r"'model.layers.0.*weight' is stored as a torchao tensor"):
                load(tmp_path / "torchao")
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
        with pytest.raises(UnsupportedOpError, match="quantize the model in one process, or load the ranks from"):
            offload.quantize_(sharded, Int8WeightOnlyConfig())

    run_ranks(2, act)


def head(folder: Path) -> Path:
    from safetensors.torch import load_file

    path = folder / f"head-{os.getpid()}.safetensors"
    save_file({"weight": load_file(folder / "model.safetensors")["lm_head.weight"]}, path)
    return path
