"""Packed checkpoints of random bits, the same values stored dense, and the cost of a token for each.

Always true:
- pieces have the shapes and dtypes of real ones; their bits are cut from one random block, so a gigabyte takes seconds
- the dense model holds the decoded values of the packed one; both are run by `offload`, and generate the same tokens
- files are created in the scratch folder, and removed with their case
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from safetensors.torch import save_file

import offload
from bench.apart import run_apart, stepping_apart
from bench.capped import ALLOWANCE
from bench.cold import next_token
from bench.decode import Decoder
from bench.generate import rehearse
from bench.limits import MIB
from bench.memory_cap import Group, memory_cap
from bench.models import FP8, names_apart
from bench.page_cache import files_in, make_cold, warm
from bench.peers import OURS
from bench.process import read_bytes
from bench.rounds import Figure, Rounds, in_turn
from bench.routed import NOTICED
from bench.scale import Scale
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of

DENSE = "stored dense"
_SHARD = 256 << 20  # bytes
_WARM_UP = 3
Entries = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A checkpoint, with options for `from_pretrained`."""

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        return offload.from_pretrained(self.folder, **self.options)


@dataclass(frozen=True)
class Form:
    """A format for linear weights.

    Attributes:
        model_type: of a model in this format.
        entry: the pieces of a weight, by checkpoint name, given its name and shape.
        quantization: the settings in the configuration.
    """

    model_type: str
    entry: Callable[[str, tuple[int, ...]], Entries]
    quantization: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


# Random pieces


@lru_cache
def _bits() -> torch.Tensor:
    return torch.randint(0, 256, (16 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bits in a tensor of this shape."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    bits = _bits()
    found = bits[:nbytes].clone() if nbytes <= len(bits) else bits.repeat(-(-nbytes // len(bits)))[:nbytes]
    return found.view(dtype).view(shape)


def _dense(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Entries:
    """Numbers of a few hundredths with either sign; ones for a norm."""
    if len(shape) == 1:
        return {name: torch.ones(shape, dtype=dtype)}
    return {name: (random_bits(shape).to(dtype) - 127.5) / 4096}


def _fp8(name: str, shape: tuple[int, ...]) -> Entries:
    rows, columns = shape
    numbers = random_bits(shape).bitwise_and(0xBF).view(torch.float8_e4m3fn)  # up to 1.9
    return {name: numbers, f"{name}_scale_inv": torch.full((-(-rows // 128), -(-columns // 128)), 0.02)}


def _w4a16(name: str, shape: tuple[int, ...]) -> Entries:
    rows, columns = shape
    return {
        f"{name}_packed": random_bits((rows, columns // 8), torch.int32),
        f"{name}_scale": torch.full((rows, columns // 128), 0.004, dtype=torch.bfloat16),
        f"{name}_shape": torch.tensor(shape),
    }


def _nf4(name: str, shape: tuple[int, ...]) -> Entries:
    numbers = torch.Size(shape).numel()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    table = torch.linspace(-1, 1, 16)  # evenly spaced, unlike nf4's: a table like any other
    return {
        name: random_bits((numbers // 2, 1)),
        f"{name}.absmax": torch.full((numbers // 64,), 0.04),
        f"{name}.quant_map": table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _mxfp4(name: str, shape: tuple[int, ...]) -> Entries:
    if len(shape) != 3:
        return _dense(name, shape)
    experts, inputs, outputs = shape
    scales = torch.full((experts, outputs, inputs // 32), 121, dtype=torch.uint8)
    return {f"{name}_blocks": random_bits((*scales.shape, 16)), f"{name}_scales": scales}


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
    "FP8": Form("llama", _fp8, FP8),
    "W4A16": Form("llama", _w4a16, _W4A16),
    "NF4": Form("llama", _nf4, _NF4),
    "Q4_K": Form("llama", _dense, options={"gguf_file": _GGUF, "dtype": torch.bfloat16}),
    "cast": Form("llama", partial(_dense, dtype=torch.float32), options={"dtype": torch.bfloat16}),
    "FP8 experts": Form("qwen3_moe", _fp8, FP8),
    "W4A16 experts": Form("qwen3_moe", _w4a16, _W4A16),
    "MXFP4 experts": Form("gpt_oss", _mxfp4, {"quant_method": "mxfp4"}),
    "joined experts": Form("qwen3_moe", _dense),
}


def made(form: Form, folder: Path, gigabytes: float) -> Stored:
    """A checkpoint in a format, of about this size when dense; with two layers if the size is 0."""
    config, model = _empty(form.model_type, 2)
    layer = sum(value.numel() for name, value in model.state_dict().items() if ".0." in name and value.dim() > 1)
    config, model = _empty(form.model_type, max(2, round(1e9 * gigabytes / 2 / layer)), small=not gigabytes)
    if "gguf_file" in form.options:
        return Stored(_written_gguf(config, model, folder), form.options)
    return Stored(_checkpoint(form, config, model, folder), form.options)


def _checkpoint(form: Form, config: Any, model: Any, folder: Path) -> Path:
    """A folder with a checkpoint in a format, of a model without values."""
    if form.quantization is not None:
        config.quantization_config = dict(form.quantization)
    config.save_pretrained(folder)
    values = model.state_dict()
    stored = _shapes(values) if form.model_type == "gpt_oss" else names_apart(values)
    return _written((pieces for name, shape in stored for pieces in _pieces(form, name, shape).items()), folder)


def gpt_oss(folder: Path) -> Path:
    """gpt-oss 20B as it is published, of random bits."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return _checkpoint(FORMS["MXFP4 experts"], config, model, folder)


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


def _shapes(values: Entries) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, tuple(value.shape)) for name, value in values.items())


def _pieces(form: Form, name: str, shape: tuple[int, ...]) -> Entries:
    is_packed = name.endswith(("_proj.weight", "_proj"))
    return form.entry(name, shape) if is_packed else _dense(name, shape)


def stored_dense(packed: Stored, folder: Path) -> Stored:
    """The values of a packed checkpoint as a dense one."""
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
    """A folder with a GGUF file: matrices in Q4_K blocks, the rest as in the other formats."""
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
            blocks = random_bits((value.shape[0], value.shape[1] // 256, 144))
            blocks[..., :4] = torch.tensor([2e-4, 1.5e-3], dtype=torch.float16).view(torch.uint8)  # factor, offsets'
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
    """For a format: warm, cold and capped token times, the bytes that one reads, and the decoding rate."""
    place = scratch / name.replace(" ", "-")
    try:
        packed = made(FORMS[name], place / "packed", scale.packed_gigabytes)
        dense = stored_dense(packed, place / "dense")
        return [
            *_warm(name, packed, dense, scale),
            *_cold(name, packed, dense, scale),
            _capped(name, packed, dense, scale, scratch),
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _figure(case: str, done: Rounds[float]) -> Figure:
    limit = done.results.pop(DENSE, [])
    return Figure(case, "s", done.results, limit, DENSE, done.missing)


def _warm(name: str, packed: Stored, dense: Stored, scale: Scale) -> list[Figure]:
    done, rates = run_apart(warm_tokens, packed, dense, scale.packed_pairs, scale.rounds)
    ours, copied = ([one[which] for one in rates] for which in (0, 1))
    return [
        _figure(f"forms, {name}: a token, warm", done),
        Figure(f"forms, {name}: decoding a gigabyte", "s", {OURS: ours}, copied, "copying it", {}),
    ]


def warm_tokens(
    packed: Stored, dense: Stored, pairs: int, rounds: int
) -> tuple[Rounds[float], list[tuple[float, float]]]:
    """Seconds per token after the first few, both models in one process; and `decoding_rates`, `rounds` times.

    Raises:
        RuntimeError: they generate different tokens, with products that are exact.
    """
    warm(files_in(packed.folder, dense.folder))
    models = {DENSE: dense.load(), OURS: packed.load()}
    model = models[OURS]
    with offload.exact():  # otherwise, where two tokens are about as likely, another one may win
        exact = [Decoder(one) for one in models.values()]
        for _ in range(_WARM_UP):
            for decoder in exact:
                decoder.step()
    if exact[0].tokens != exact[1].tokens:
        raise RuntimeError("packed, and stored dense, the model says other tokens")
    decoders = {arm: Decoder(one) for arm, one in models.items()}
    done = in_turn({arm: decoder.step for arm, decoder in decoders.items()}, _WARM_UP + pairs, {})
    done.results = {arm: seconds[_WARM_UP:] for arm, seconds in done.results.items()}
    return done, [decoding_rates(model) for _ in range(rounds)]


def decoding_rates(model: Any) -> tuple[float, float]:
    """Seconds per gigabyte of dense values, warm: for computing recipes, and for copying the results."""
    recipes = [value for value in model.parameters() if handle_of(value).composed is not None][-6:]
    total, seconds, copying = 0, 0.0, 0.0
    for number, value in enumerate(recipes):
        start = perf_counter()
        made = value.materialize()
        done = perf_counter()
        made.clone()
        if number:  # the first is a warm-up
            total += made.nbytes
            seconds += done - start
            copying += perf_counter() - done
    return seconds / total * 1e9, copying / total * 1e9


@dataclass(frozen=True)
class ColdToken:
    """Seconds; bytes read from the disk; and stored bytes of the weights that the token needs."""

    seconds: float
    bytes_read: int
    needed: int


def _cold(name: str, packed: Stored, dense: Stored, scale: Scale) -> list[Figure]:
    with stepping_apart(cold_tokens, dense) as dense_step, stepping_apart(cold_tokens, packed) as packed_step:
        done = in_turn({DENSE: dense_step, OURS: packed_step}, scale.rounds, {})
    seconds = Rounds(done.values(lambda one: one.seconds), done.missing)
    read = [float(one.bytes_read) for one in done.results.get(OURS, [])]
    needed = [float(one.needed) for one in done.results.get(OURS, [])]
    missing = {arm: why for arm, why in done.missing.items() if arm == OURS}
    return [
        _figure(f"forms, {name}: a token, cold", seconds),
        Figure(f"forms, {name}: bytes, cold", "B", {OURS: read} if read else {}, needed, "what it needs", missing),
    ]


def cold_tokens(stored: Stored) -> Iterator[ColdToken]:
    """Tokens of a model that has run before, each with nothing in memory, after the model had time to notice."""
    model = stored.load()
    needed = needed_by_a_token(model)
    next_token(model, torch.tensor([[1]]))
    for number in count(2):
        make_cold(files_in(stored.folder))
        sleep(NOTICED)
        before, start = read_bytes(), perf_counter()
        next_token(model, torch.tensor([[number]]))
        yield ColdToken(perf_counter() - start, read_bytes() - before, needed)


def needed_by_a_token(model: Any) -> int:
    """Stored bytes of all weights except the table of tokens, with as many experts as a token uses."""
    config = model.config
    is_mixture = hasattr(config, "num_experts_per_tok")
    share = config.num_experts_per_tok / config.num_local_experts if is_mixture else 1.0
    needed = 0.0
    for name, value in model.named_parameters():
        if "embed_tokens" not in name:
            stored = {id(handle): handle.extent[1] for handle in stored_in([handle_of(value)])}
            needed += sum(stored.values()) * (share if ".experts." in name else 1)
    return round(needed)


def _capped(name: str, packed: Stored, dense: Stored, scale: Scale, scratch: Path) -> Figure:
    """Both models have the same budget: a fraction of the packed one's size."""
    size = sum(path.stat().st_size for path in files_in(packed.folder))
    budget = max(MIB, int(size / scale.factors[-1]))
    make_cold(files_in(packed.folder, dense.folder))
    with ExitStack() as held:
        arms = {}
        for arm, stored in ((DENSE, dense), (OURS, packed)):
            group = held.enter_context(memory_cap(budget + ALLOWANCE))
            given = stored, dense.folder, scratch, budget, scale.capped_tokens, group
            arms[arm] = held.enter_context(stepping_apart(capped_tokens, *given))
        return _figure(f"forms, {name}: a token, capped", in_turn(arms, scale.rounds, {}))


def capped_tokens(
    stored: Stored, dense: Path, scratch: Path, budget: int, tokens: int, group: Group
) -> Iterator[float]:
    """Seconds per token after the first."""
    rehearse(OURS, dense, scratch)
    group.join()
    offload.set_max_memory({"cpu": budget})
    decoder = Decoder(stored.load())
    decoder.step()
    while True:
        yield sum(decoder.step() for _ in range(tokens)) / tokens
