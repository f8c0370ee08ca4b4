"""Packed checkpoints of random bits, the same values stored dense, and what a token of each takes.

Always true:
- pieces have the shapes and dtypes of real ones; their bits are cut from one random block, so a gigabyte takes seconds
- the dense twin holds the values that the packed one is decoded to; both are run by `offload`, and say the same tokens
- what is made lies in the scratch folder, and goes with its case
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from safetensors.torch import save_file

import offload
from bench.apart import run_apart
from bench.capped import ALLOWANCE
from bench.cold import next_token
from bench.decode import Decoder
from bench.generate import rehearse
from bench.limits import MIB
from bench.memory_cap import memory_cap
from bench.page_cache import files_in, make_cold, warm
from bench.peers import OURS
from bench.process import read_bytes
from bench.rounds import Figure, Rounds, in_turn
from bench.routed import NOTICED
from bench.scale import Scale
from offload.tensor.recipes import stored_in
from offload.tensor.wrapper import handle_of

DENSE = "stored dense"
_SHARD = 256 << 20  # bytes
_WARM_UP = 3
Entries = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A checkpoint, and what `from_pretrained` is told of it beside the folder."""

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        return offload.from_pretrained(self.folder, **self.options)


@dataclass(frozen=True)
class Form:
    """How linear weights are packed.

    Attributes:
        model_type: of the model that is packed so.
        bits: that a weight takes, about.
        entry: the pieces of a weight, by their names in the checkpoint, from its name and shape.
        quantization: what the configuration says.
    """

    model_type: str
    bits: float
    entry: Callable[[str, tuple[int, ...]], Entries]
    quantization: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


# Random pieces


@lru_cache
def _bits() -> torch.Tensor:
    return torch.randint(0, 256, (16 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bits in a tensor of that shape."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    bits = _bits()
    found = bits[:nbytes].clone() if nbytes <= len(bits) else bits.repeat(-(-nbytes // len(bits)))[:nbytes]
    return found.view(dtype).view(shape)


def _dense(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Entries:
    """Numbers of some hundredths, of either sign; ones for a norm."""
    if len(shape) == 1:
        return {name: torch.ones(shape, dtype=dtype)}
    return {name: (_random(shape).to(dtype) - 127.5) / 4096}


def _fp8(name: str, shape: tuple[int, ...]) -> Entries:
    rows, columns = shape
    numbers = _random(shape).bitwise_and(0xBF).view(torch.float8_e4m3fn)  # of 1.9 at most
    return {name: numbers, f"{name}_scale_inv": torch.full((-(-rows // 128), -(-columns // 128)), 0.02)}


def _w4a16(name: str, shape: tuple[int, ...]) -> Entries:
    rows, columns = shape
    return {
        f"{name}_packed": _random((rows, columns // 8), torch.int32),
        f"{name}_scale": torch.full((rows, columns // 128), 0.004, dtype=torch.bfloat16),
        f"{name}_shape": torch.tensor(shape),
    }


def _nf4(name: str, shape: tuple[int, ...]) -> Entries:
    count = torch.Size(shape).numel()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    table = torch.linspace(-1, 1, 16)  # as even as that of nf4 is not: a table like any other
    return {
        name: _random((count // 2, 1)),
        f"{name}.absmax": torch.full((count // 64,), 0.04),
        f"{name}.quant_map": table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _mxfp4(name: str, shape: tuple[int, ...]) -> Entries:
    if len(shape) != 3:
        return _dense(name, shape)
    experts, inputs, outputs = shape
    scales = torch.full((experts, outputs, inputs // 32), 121, dtype=torch.uint8)
    return {f"{name}_blocks": _random((*scales.shape, 16)), f"{name}_scales": scales}


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_GGUF = "model.gguf"
FORMS = {
    "FP8": Form("llama", 8, _fp8, _FP8),
    "W4A16": Form("llama", 4.1, _w4a16, _W4A16),
    "NF4": Form("llama", 4.5, _nf4, _NF4),
    "Q4_K": Form("llama", 4.5, _dense, options={"gguf_file": _GGUF, "dtype": torch.bfloat16}),
    "cast": Form("llama", 32, partial(_dense, dtype=torch.float32), options={"dtype": torch.bfloat16}),
    "FP8 experts": Form("qwen3_moe", 8, _fp8, _FP8),
    "W4A16 experts": Form("qwen3_moe", 4.1, _w4a16, _W4A16),
    "MXFP4 experts": Form("gpt_oss", 4.25, _mxfp4, {"quant_method": "mxfp4"}),
    "joined experts": Form("qwen3_moe", 16, _dense),
}


def made(form: Form, folder: Path, gigabytes: float) -> Stored:
    """A checkpoint of about so many bytes in a form; of two layers if that is 0."""
    config, model = _empty(form.model_type, 2)
    layer = sum(value.numel() for name, value in model.state_dict().items() if ".0." in name and value.dim() > 1)
    config, model = _empty(form.model_type, max(2, round(8e9 * gigabytes / form.bits / layer)), small=not gigabytes)
    if "gguf_file" in form.options:
        return Stored(_written_gguf(config, model, folder), form.options)
    if form.quantization is not None:
        config.quantization_config = dict(form.quantization)
    config.save_pretrained(folder)
    stored = _stored(model, are_apart=form.model_type != "gpt_oss")
    entries = (pieces for name, shape in stored for pieces in _pieces(form, name, shape).items())
    return Stored(_written(entries, folder), form.options)


def _empty(model_type: str, layers: int, *, small: bool = False) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, int] = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 16_000}
    if model_type != "llama":
        sizes |= {"hidden_size": 1024, "intermediate_size": 768, "moe_intermediate_size": 768, "num_experts": 32}
        sizes |= {"num_local_experts": 32, "num_experts_per_tok": 4}
    if small:
        sizes |= {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": 512}
    heads = {"num_attention_heads": 4 if small else 16, "num_key_value_heads": 4, "head_dim": 64}
    ends: dict[str, Any] = {"tie_word_embeddings": False, "eos_token_id": None, "dtype": torch.bfloat16}
    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, **sizes, **heads, **ends)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


def _stored(model: Any, *, are_apart: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes that a checkpoint of the model has, where experts stand apart or not."""
    for name, value in model.state_dict().items():
        shape = tuple(value.shape)
        if value.dim() != 3 or not are_apart:
            yield name, shape
            continue
        stem, _, which = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
        for expert in range(shape[0]):
            yield from ((f"{stem}.{expert}.{part}.weight", (shape[1] // len(parts), shape[2])) for part in parts)


def _pieces(form: Form, name: str, shape: tuple[int, ...]) -> Entries:
    is_packed = name.endswith(("_proj.weight", "_proj"))
    return form.entry(name, shape) if is_packed else _dense(name, shape)


def stored_dense(packed: Stored, folder: Path) -> Stored:
    """The values of a packed checkpoint in a dense one."""
    model = packed.load()
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
    named = ((name, offload.materialize(value)) for name, value in model.state_dict().items())
    return Stored(_written(named, folder))


def _written(entries: Any, folder: Path) -> Path:
    """A folder with entries in shards."""
    places: dict[str, str] = {}
    waiting: Entries = {}

    def write() -> None:
        shard = f"model-{len(set(places.values())) + 1:05}.safetensors"
        places.update(dict.fromkeys(waiting, shard))
        save_file(waiting, folder / shard, metadata={"format": "pt"})
        waiting.clear()

    for name, value in entries:
        waiting[name] = value.contiguous()
        if sum(one.nbytes for one in waiting.values()) > _SHARD:
            write()
    if waiting:
        write()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _written_gguf(config: Any, model: Any, folder: Path) -> Path:
    """A folder with a GGUF file: matrices of blocks in Q4_K, and the others as in the other forms."""
    import gguf

    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / _GGUF, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        stored = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if name.endswith("_proj.weight"):
            blocks = _random((value.shape[0], value.shape[1] // 256, 144))
            blocks[..., :4] = torch.tensor([2e-4, 1.5e-3], dtype=torch.float16).view(torch.uint8)  # factor, of offsets
            writer.add_tensor(stored, blocks.flatten(1).numpy(), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
        elif value.dim() == 1:
            writer.add_tensor(stored, torch.ones(value.shape).numpy())
        else:
            [dense] = _dense(name, tuple(value.shape)).values()
            writer.add_tensor(stored, dense.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


# What is measured


def figures_of(name: str, scale: Scale, scratch: Path) -> list[Figure]:
    """Of a form: a warm token, a cold one, one under a cap, the bytes that one reads, and how fast it is decoded."""
    place = scratch / name.replace(" ", "-")
    try:
        packed = made(FORMS[name], place / "packed", scale.packed_gigabytes)
        dense = stored_dense(packed, place / "dense")
        return [
            _figure(f"forms, {name}: a token, warm", run_apart(warm_tokens, packed, dense, scale.pairs)),
            _cold(name, packed, dense, scale),
            _capped(name, packed, dense, scale, scratch),
            _read(name, packed, scale),
            _decoded(name, packed, scale),
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _figure(case: str, done: Rounds[float]) -> Figure:
    limit = done.results.pop(DENSE, [])
    return Figure(case, "s", done.results, limit, DENSE, done.missing)


def warm_tokens(packed: Stored, dense: Stored, pairs: int) -> Rounds[float]:
    """Seconds of every token after the first few, both models in one process.

    Raises:
        RuntimeError: they say other tokens.
    """
    warm(files_in(packed.folder, dense.folder))
    decoders = {arm: Decoder(one.load()) for arm, one in ((DENSE, dense), (OURS, packed))}
    done = in_turn({arm: decoder.step for arm, decoder in decoders.items()}, _WARM_UP + pairs, {})
    if decoders[DENSE].tokens != decoders[OURS].tokens:
        raise RuntimeError("packed, and stored dense, the model says other tokens")
    done.results = {arm: seconds[_WARM_UP:] for arm, seconds in done.results.items()}
    return done


def _cold(name: str, packed: Stored, dense: Stored, scale: Scale) -> Figure:
    arms = {DENSE: partial(run_apart, cold_token, dense), OURS: partial(run_apart, cold_token, packed)}
    return _figure(f"forms, {name}: a token, cold", in_turn(arms, scale.rounds, {}))


def cold_token(stored: Stored) -> float:
    """Seconds of a token of a model that has run, when nothing of it is in memory."""
    model = stored.load()
    with torch.inference_mode():
        next_token(model, torch.tensor([[1]]))
        make_cold(files_in(stored.folder))
        start = perf_counter()
        next_token(model, torch.tensor([[2]]))
        return perf_counter() - start


def _capped(name: str, packed: Stored, dense: Stored, scale: Scale, scratch: Path) -> Figure:
    size = sum(path.stat().st_size for path in files_in(packed.folder))
    budget = max(MIB, int(size / scale.factors[-1]))

    def arm(stored: Stored) -> float:
        make_cold(files_in(stored.folder))
        with memory_cap(budget + ALLOWANCE) as group:
            return run_apart(capped_token, stored, dense.folder, scratch, budget, scale.capped_tokens, group)

    done = in_turn({DENSE: partial(arm, dense), OURS: partial(arm, packed)}, scale.rounds, {})
    return _figure(f"forms, {name}: a token, capped", done)


def capped_token(stored: Stored, dense: Path, scratch: Path, budget: int, tokens: int, group: Any) -> float:
    """Seconds of a token once the first is there."""
    rehearse(OURS, dense, scratch)
    group.join()
    offload.set_max_memory({"cpu": budget})
    decoder = Decoder(stored.load())
    decoder.step()
    return sum(decoder.step() for _ in range(tokens)) / tokens


def _read(name: str, packed: Stored, scale: Scale) -> Figure:
    done = [run_apart(read_by_a_token, packed) for _ in range(scale.rounds)]
    read, needed = ([float(one[which]) for one in done] for which in (0, 1))
    return Figure(f"forms, {name}: bytes, cold", "B", {OURS: read}, needed, "what it needs", {})


def read_by_a_token(packed: Stored) -> tuple[int, int]:
    """Bytes that are read from the disk, and the packed ones that the token needs.

    These are all weights but the table of tokens, and of experts as many as a token goes to.
    """
    model = packed.load()
    config = model.config
    is_mixture = hasattr(config, "num_experts_per_tok")
    share = config.num_experts_per_tok / config.num_local_experts if is_mixture else 1.0
    needed = 0.0
    for name, value in model.named_parameters():
        if "embed_tokens" not in name:
            stored = {id(handle): handle.extent[1] for handle in stored_in([handle_of(value)])}
            needed += sum(stored.values()) * (share if ".experts." in name else 1)
    with torch.inference_mode():
        next_token(model, torch.tensor([[1]]))
        make_cold(files_in(packed.folder))
        sleep(NOTICED)
        before = read_bytes()
        next_token(model, torch.tensor([[2]]))
        return read_bytes() - before, round(needed)


def _decoded(name: str, packed: Stored, scale: Scale) -> Figure:
    done = [run_apart(decoding_rates, packed) for _ in range(scale.rounds)]
    ours, copied = ([one[which] for one in done] for which in (0, 1))
    return Figure(f"forms, {name}: decoding a gigabyte", "s", {OURS: ours}, copied, "copying it", {})


def decoding_rates(packed: Stored) -> tuple[float, float]:
    """Seconds for a gigabyte of dense values, warm: to carry recipes out, and to copy what came of it."""
    warm(files_in(packed.folder))
    recipes = [value for value in packed.load().parameters() if handle_of(value).composed is not None][-6:]
    total, seconds, copying = 0, 0.0, 0.0
    for number, value in enumerate(recipes):
        start = perf_counter()
        made = value.materialize()
        done = perf_counter()
        made.clone()
        if number:  # the first is to warm up
            total += made.nbytes
            seconds += done - start
            copying += perf_counter() - done
    return seconds / total * 1e9, copying / total * 1e9
