"""Arguments that name files, amounts, devices or values get anything: no file is harmed, and errors are clear."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor, TensorCache
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import OffloadError
from offload.generation import PromptCache
from offload.integrations import tensordict
from tests.engines import settled

ANYTHING: dict[str, Any] = {"None": None, "0": 0, "5": 5, "-1": -1, "1.5": 1.5, "nan": float("nan"), "huge": 10**30}
ANYTHING |= {"inf": float("inf"), "True": True, "complex": 1j, "empty text": "", "text": "nope", "NUL": "\0"}
ANYTHING |= {"long text": "a" * 5000, "half a character": "\udcff", "bytes": b"x", "list": [], "list of text": ["a"]}
ANYTHING |= {"list of None": [None], "tuple": (1, 2), "dict": {}, "dict of numbers": {1: 2}, "dict of text": {"a": "b"}}
ANYTHING |= {"dict of tensors": {"a": torch.ones(2)}, "tensor": torch.ones(2, 3), "scalar": torch.tensor(1.5)}
ANYTHING |= {"meta": torch.empty(2, device="meta"), "sparse": torch.eye(2).to_sparse(), "dtype": torch.int8}
ANYTHING |= {"module": nn.Linear(2, 2), "class": nn.Linear, "object": object(), "function": lambda *_: None}
ANYTHING |= {"file": Path("file"), "folder": Path("folder"), "no such": Path("no such"), "FIFO": Path("fifo")}
ANYTHING |= {"below a file": Path("file/x"), "device that is not there": "cuda:77"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def weight() -> OffloadedTensor:
    return OffloadedTensor.full((2, 3), 1.0, name="w")


def entered(manager: Any) -> None:
    with manager:
        pass


def stepped(**options: Any) -> None:
    made = model()
    optimizer = offload.training.offload_optimizer(torch.optim.AdamW(made.parameters()), **options)
    made(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def with_activations(**options: Any) -> None:
    try:
        with offload.training.offload_activations(**options):
            out = model()(torch.ones(2, 3)).sum()
        out.backward()
    finally:
        settled()  # the writer may be in a folder that is removed next


COLUMN = {"x": torch.arange(2.0)}
X = {"x": (torch.float32, ())}


def with_cache(act: Callable[[TensorCache], Any]) -> None:
    """`act` on an existing cache with three kinds of columns."""
    for mode in ("r", "r+"):
        with TensorCache.open("cache", mode) as cache, contextlib.suppress(OffloadError):
            act(cache)


def llama_config() -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaConfig(**sizes, vocab_size=5, head_dim=8)


def filled(**options: Any) -> Any:
    return offload.load_checkpoint_in_model(model(), "model.safetensors", **options)


def dispatched(**options: Any) -> Any:
    return offload.load_checkpoint_and_dispatch(model(), "model.safetensors", **options)


def appended(**columns: Any) -> None:
    row = {"x": torch.ones(1), "r": [torch.ones(1)], "j": [1], **columns}
    with_cache(lambda cache: cache.append(row))


def pretrained(name: Any, **options: Any) -> Any:
    return offload.from_pretrained(name, **{"local_files_only": True, **options})


def int8_weights() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def a_tensordict() -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": torch.ones(2)}, [2])


def make_llama() -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(llama_config()).save_pretrained("llama")


MAKES = {"load_memmap": lambda: a_tensordict().memmap("memmap"), "from_pretrained": make_llama, "plan": make_llama}

# Public calls, by argument.
CALLS: dict[str, Callable[[Any], Any]] = {
    "from_original_tensor(tensor)": lambda bad: OffloadedTensor.from_original_tensor(bad, "w"),
    "from_original_tensor(name)": lambda bad: OffloadedTensor.from_original_tensor(torch.ones(2), bad),
    "from_original_tensor(offload_dir)": lambda bad: OffloadedTensor.from_original_tensor(torch.ones(2), "w", bad),
    "from_file(path)": lambda bad: OffloadedTensor.from_file(bad),
    "from_file(device)": lambda bad: OffloadedTensor.from_file("ok.safetensors", device=bad),
    "from_file(offload_dir)": lambda bad: OffloadedTensor.from_file("ok.safetensors", offload_dir=bad).add_(1),
    "empty(shape)": lambda bad: OffloadedTensor.empty(bad, name="w"),
    "empty(*shape)": lambda bad: OffloadedTensor.empty(2, bad, name="w"),
    "empty(name)": lambda bad: OffloadedTensor.empty(2, name=bad),
    "empty(offload_dir)": lambda bad: OffloadedTensor.empty(2, name="w", offload_dir=bad),
    "empty(device)": lambda bad: OffloadedTensor.empty(2, name="w", device=bad),
    "update_values(values)": lambda bad: weight().update_values(bad),
    "update_values(values, no strictness)": lambda bad: weight().update_values(bad, False, False),
    "load_file(path)": lambda bad: offload.load_file(bad),
    "load_file(device)": lambda bad: offload.load_file("ok.safetensors", bad),
    "load_file(offload_dir)": lambda bad: offload.load_file("ok.safetensors", offload_dir=bad),
    "save_checkpoint(folder)": lambda bad: offload.save_checkpoint({"w": torch.ones(2)}, bad),
    "save_checkpoint(max_shard_size)": lambda bad: offload.save_checkpoint({"w": torch.ones(2)}, "out", bad),
    "save_checkpoint(a value)": lambda bad: offload.save_checkpoint({"w": bad}, "out"),
    "disk_offload(offload_dir)": lambda bad: offload.disk_offload(model(), bad),
    "disk_offload(execution_device)": lambda bad: offload.disk_offload(model(), execution_device=bad),
    "load_checkpoint_in_model(checkpoint)": lambda bad: offload.load_checkpoint_in_model(model(), bad),
    "load_checkpoint_in_model(device_map)": lambda bad: filled(device_map=bad),
    "load_checkpoint_in_model(offload_dir)": lambda bad: filled(offload_dir=bad),
    "load_checkpoint_and_dispatch(device_map)": lambda bad: dispatched(device_map=bad),
    "load_checkpoint_and_dispatch(a device of the map)": lambda bad: dispatched(device_map={"": bad}),
    "load_checkpoint_and_dispatch(max_memory)": lambda bad: dispatched(max_memory=bad),
    "load_checkpoint_and_dispatch(auto, max_memory)": lambda bad: dispatched(device_map="auto", max_memory=bad),
    "load_checkpoint_and_dispatch(an amount of max_memory)": lambda bad: dispatched(max_memory={"cpu": bad}),
    "load_checkpoint_and_dispatch(read_ahead)": lambda bad: dispatched(read_ahead=bad),
    "map_values(a value)": lambda bad: offload.map_values(lambda _, t: t, {"w": bad}, progress=False),
    "offloading(offload_dir)": lambda bad: entered(offload.offloading(bad)),
    "offloading(min_bytes)": lambda bad: entered(offload.offloading(min_bytes=bad)),
    "offload_activations(offload_dir)": lambda bad: with_activations(offload_dir=bad, min_bytes=0),
    "offload_activations(min_bytes)": lambda bad: with_activations(min_bytes=bad),
    "offload_optimizer(offload_dir)": lambda bad: stepped(offload_dir=bad, min_bytes=0),
    "offload_optimizer(min_bytes)": lambda bad: stepped(min_bytes=bad),
    "offload_optimizer(step_bytes)": lambda bad: stepped(step_bytes=bad),
    "set_max_memory(max_memory)": lambda bad: entered(offload.set_max_memory(bad)),
    "set_max_memory(an amount)": lambda bad: entered(offload.set_max_memory({"cpu": bad})),
    "set_read_ahead(window)": lambda bad: entered(offload.budget.set_read_ahead(bad)),
    "save_tree(a leaf)": lambda bad: offload.save_tree({"x": [bad]}, "out"),
    "save_tree(a key)": lambda bad: offload.save_tree({bad: 1}, "out") if bad.__hash__ else None,
    "save_tree(folder)": lambda bad: offload.save_tree([1], bad),
    "load_tree(folder)": lambda bad: offload.load_tree(bad),
    "load_tree(device)": lambda bad: offload.load_tree("tree", bad),
    "load_tree(offload_dir)": lambda bad: offload.load_tree("tree", offload_dir=bad),
    "save_training(folder)": lambda bad: offload.training.save_training(model(), bad),
    "save_training(extra)": lambda bad: offload.training.save_training(model(), "out", step=bad),
    "load_training(folder)": lambda bad: offload.training.load_training(model(), bad),
    "TensorCache(metadata)": lambda bad: TensorCache(COLUMN, metadata=bad),
    "TensorCache.create(folder)": lambda bad: TensorCache.create(bad, X).close(),
    "TensorCache.create(a column)": lambda bad: TensorCache.create("out", {"x": bad}).close(),
    "TensorCache.create(a name)": lambda bad: (
        TensorCache.create("out", {bad: "json"}).close() if bad.__hash__ else None
    ),
    "TensorCache.create(a dtype)": lambda bad: TensorCache.create("out", {"x": (bad, ())}).close(),
    "TensorCache.create(a shape)": lambda bad: TensorCache.create("out", {"x": (torch.int8, bad)}).close(),
    "TensorCache.create(num_rows)": lambda bad: TensorCache.create("out", X, bad).close(),
    "TensorCache.create(metadata)": lambda bad: TensorCache.create("out", X, metadata=bad).close(),
    "TensorCache.create(device)": lambda bad: TensorCache.create("out", X, device=bad).close(),
    "TensorCache.open(folder)": lambda bad: TensorCache.open(bad).close(),
    "TensorCache.open(device)": lambda bad: TensorCache.open("cache", device=bad).close(),
    "TensorCache.from_disk(path)": lambda bad: TensorCache.from_disk(bad).close(),
    "TensorCache.from_disk(device)": lambda bad: TensorCache.from_disk("ok.safetensors", bad)[0],
    "TensorCache.from_records(a record)": lambda bad: TensorCache.from_records([bad]).close(),
    "TensorCache.from_records(a field)": lambda bad: TensorCache.from_records([{"x": bad}]).close(),
    "TensorCache.from_records(folder)": lambda bad: TensorCache.from_records([{"x": 1}], bad).close(),
    "TensorCache[rows]": lambda bad: with_cache(lambda cache: cache[bad]),
    "TensorCache[rows] in memory": lambda bad: TensorCache(COLUMN)[bad],
    "TensorCache.get(device)": lambda bad: with_cache(lambda cache: cache.get(0, device=bad)),
    "TensorCache.column(name)": lambda bad: with_cache(lambda cache: cache.column(bad)),
    "TensorCache.column(name) in memory": lambda bad: TensorCache(COLUMN).column(bad),
    "TensorCache[rows] = values": lambda bad: with_cache(lambda cache: cache.__setitem__([0], bad)),
    "TensorCache[...] = a column": lambda bad: with_cache(lambda cache: cache.__setitem__([0], {"x": bad})),
    "TensorCache[...] = a ragged column": lambda bad: with_cache(lambda cache: cache.__setitem__([0], {"r": bad})),
    "TensorCache[...] = a ragged row": lambda bad: with_cache(lambda cache: cache.__setitem__(0, {"r": bad})),
    "TensorCache[...] = JSON": lambda bad: with_cache(lambda cache: cache.__setitem__(0, {"j": bad})),
    "TensorCache[bad] = values": lambda bad: with_cache(lambda cache: cache.__setitem__(bad, COLUMN)),
    "TensorCache.append(values)": lambda bad: with_cache(lambda cache: cache.append(bad)),
    "TensorCache.append(a column)": lambda bad: appended(x=bad),
    "TensorCache.append(a ragged column)": lambda bad: appended(r=bad),
    "TensorCache.append(JSON)": lambda bad: appended(j=bad),
    "TensorCache.to_disk(path)": lambda bad: TensorCache(COLUMN).to_disk(bad),
    "cache_from(source)": lambda bad: offload.integrations.cache_from(bad).close(),
    "cache_from(folder)": lambda bad: offload.integrations.cache_from(COLUMN, bad).close(),
    "cache_from(metadata)": lambda bad: offload.integrations.cache_from(COLUMN, metadata=bad).close(),
    "cache_from(device)": lambda bad: offload.integrations.cache_from(COLUMN, device=bad).close(),
    "convert(source)": lambda bad: convert_checkpoint(bad, "out"),
    "convert(target)": lambda bad: convert_checkpoint("ok.safetensors", bad),
    "convert(max_shard_size)": lambda bad: convert_checkpoint("ok.safetensors", "out", max_shard_size=bad),
    "from_pretrained(name)": lambda bad: pretrained(bad),
    "from_pretrained(device_map)": lambda bad: pretrained("llama", device_map=bad),
    "from_pretrained(offload_dir)": lambda bad: pretrained("llama", offload_dir=bad),
    "from_pretrained(max_memory)": lambda bad: pretrained("llama", max_memory=bad),
    "plan(max_memory)": lambda bad: offload.plan("llama", disk_rate="1GB", max_memory=bad),
    "plan(device)": lambda bad: offload.plan("llama", disk_rate="1GB", device=bad),
    "plan(disk_rate)": lambda bad: offload.plan("llama", disk_rate=bad),
    "kv_cache(offload_dir)": lambda bad: offload.integrations.kv_cache(llama_config(), bad),
    "PromptCache(folder)": lambda bad: PromptCache(bad),
    "PromptCache(max_disk)": lambda bad: PromptCache("prompts", max_disk=bad),
    "quantize_(device)": lambda bad: offload.quantize_(model(), int8_weights(), device=bad, progress=False),
    "load_memmap(folder)": lambda bad: tensordict.load_memmap(bad),
    "load_memmap(device)": lambda bad: tensordict.load_memmap("memmap", device=bad),
    "save_memmap(folder)": lambda bad: tensordict.save_memmap(a_tensordict(), bad),
    "memmap_like(folder)": lambda bad: tensordict.memmap_like(a_tensordict(), bad),
}
NEEDS = {"quantize_": "torchao"}
NEEDS |= dict.fromkeys(("from_pretrained", "plan", "kv_cache"), "transformers")
NEEDS |= dict.fromkeys(("load_memmap", "save_memmap", "memmap_like"), "tensordict")


@pytest.fixture
def place(quick_folder: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some of everything."""
    monkeypatch.chdir(quick_folder)
    Path("file").write_bytes(b"mine")
    Path("folder").mkdir()
    os.mkfifo("fifo")
    offload.save_checkpoint({"w": torch.ones(2, 3)}, "checkpoint")
    os.rename("checkpoint/model.safetensors", "ok.safetensors")
    offload.save_checkpoint(model(), "checkpoint")
    os.rename("checkpoint/model.safetensors", "model.safetensors")
    os.rmdir("checkpoint")
    offload.save_tree([torch.ones(2)], "tree")
    offload.training.save_training(model(), "training", step=1)
    with TensorCache.create("cache", {**X, "r": (torch.float32, (None,)), "j": "json"}) as cache:
        cache.append({"x": torch.ones(2), "r": [torch.ones(1), torch.ones(2)], "j": [1, {}]})
    return Path(quick_folder)


@contextlib.contextmanager
def tidied(place: Path) -> Iterator[None]:
    """Removes what the block creates."""
    before = set(os.listdir(place))
    yield
    for name in {*(set(os.listdir(place)) - before), *(f"folder/{name}" for name in os.listdir("folder"))}:
        shutil.rmtree(place / name) if (place / name).is_dir() else (place / name).unlink()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_harms_no_file_and_its_error_is_clear(call, place):
    """An error of ours, or Python's own for a wrong type."""
    name = call.partition("(")[0]
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    MAKES.get(name, bool)()
    unclear = {}
    for what, bad in ANYTHING.items():
        with tidied(place):
            try:
                CALLS[call](bad)
            except (OffloadError, TypeError, AttributeError):
                pass
            except Exception as error:
                unclear[what] = f"{type(error).__name__}: {error}"[:200]

    assert {} == unclear
    assert b"mine" == Path("file").read_bytes()
