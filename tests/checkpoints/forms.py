"""Tiny checkpoints in the formats in which models are published, and what plain transformers loads from each.

Always true:
- a format is written by plain transformers or by its own package; if neither can write it on a CPU, by a few lines from
  the format's definition, as noted
- `plain` loads in memory, without this package, and returns dequantized weights where the format allows it
- norms and biases are not just ones and zeros, so that a missing transformation of them shows
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

from tests.checkpoints.gguf_files import KINDS, write_gguf

PROMPT = torch.tensor([[3, 17, 42, 8, 64, 5, 91]])

Load = Callable[[Path], nn.Module]
Entry = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Form:
    """A format: how to write a tiny checkpoint, and how plain transformers loads it.

    Attributes:
        write: fills an empty folder.
        plain: loads the folder in memory, dequantized; the reference for every weight.
        options: for `from_pretrained`, in addition to the path: a GGUF file's name, a dtype.
    """

    write: Callable[[Path], None]
    plain: Load
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A model's results: the logits of the prompt, (1, 7, vocabulary), and four tokens, chosen greedily, (1, 11)."""

    logits: torch.Tensor
    tokens: torch.Tensor


def outcome(model: Any) -> Outcome:
    """The model's results for the prompt."""
    with torch.no_grad(), without_compiling():
        logits = model(PROMPT).logits
        tokens = model.generate(PROMPT, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    return Outcome(logits, tokens)


@contextmanager
def without_compiling() -> Iterator[None]:
    """Runs functions decorated with torch.compile uncompiled: bitnet's are, and compiling takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def loaded(*, quantization: Callable[[], Any] | None = None, **options: Any) -> Load:
    """A function that loads a folder with plain transformers."""

    def load(folder: Path) -> nn.Module:
        from transformers import AutoModelForCausalLM

        given = options if quantization is None else {**options, "quantization_config": quantization()}
        with without_compiling():
            return AutoModelForCausalLM.from_pretrained(folder, **given)

    return load


# --- models and their checkpoints ---------------------------------------------------------------------------------

_SIZES = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}

_LATENT = {"q_lora_rank": 128, "kv_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 32}
_SLIDING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32, "sliding_window_size": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
        **_LATENT,
        "head_dim": None,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 1, "embedding_scale": 1.0},
    "olmo_hybrid": {**_LINEAR, "linear_num_value_heads": 2, "linear_value_head_dim": 32},
    "inkling2_text": {
        "unpadded_vocab_size": 96,
        **_SLIDING,
        "d_rel": 8,
        "rel_extent": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_layers_per_attn_res_block": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        **_LINEAR,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
        "rope_parameters": {**_ROPE, "mrope_section": [6, 5, 5]},
    },
}


MODELS["qwen3_5_moe_text"] = {
    **MODELS["qwen3_5_text"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}


# The first release of transformers that loads it, if the oldest supported one does not.
SINCE = {"inkling2_text": "5.23", "GGUF files of qwen3_5_moe_text": "5.18"}


def needs(what: str) -> None:
    """Skips the test if the installed transformers does not load that yet."""
    from transformers import __version__

    since = SINCE.get(what, "0")
    if Version(__version__) < Version(since):
        pytest.skip(f"transformers loads {what} since {since}")


def model_of(model_type: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    """A causal language model of that type with random weights, always the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    needs(model_type)
    sizes = {**_SIZES, **_HEADS, **_ENDS, "initializer_range": 0.08, **MODELS[model_type], **config}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=dtype)
        for value in model.state_dict().values():
            if value.dim() == 1:
                value.add_(torch.randn_like(value), alpha=0.1)
    return model.eval()


def written(model_type: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Callable[[Path], None]:
    """A function that writes a model the way transformers saves it, with experts stored separately if it does that."""
    return lambda folder: model_of(model_type, dtype, **config).save_pretrained(folder)


def is_linear(name: str, value: torch.Tensor) -> bool:
    """Whether an entry is the weight of a linear layer that publishers quantize."""
    kept = ("embed_tokens", "lm_head", ".gate.weight", ".router.")
    return value.dim() == 2 and name.endswith(".weight") and not any(part in name for part in kept)


def rewrite(folder: Path, entry: Entry, quantization: Mapping[str, Any] | None) -> None:
    """Replaces each linear weight in a folder by the result of `entry`; the configuration names the format."""
    file = folder / "model.safetensors"
    entries: dict[str, torch.Tensor] = {}
    for name, value in load_file(file).items():
        entries |= entry(name, value) if is_linear(name, value) else {name: value}
    save_file({name: value.contiguous() for name, value in entries.items()}, file, metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def empty_model(folder: Path) -> Any:
    """A model on the meta device, as the folder's configuration says."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype)


def split(folder: Path) -> None:
    """Splits the folder's file in two, with alternating entries, so that the pieces of a value are in both."""
    file = folder / "model.safetensors"
    entries = load_file(file)
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {name: names[number % 2] for number, name in enumerate(sorted(entries))}
    for shard in names:
        save_file({k: v for k, v in entries.items() if places[k] == shard}, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(v.nbytes for v in entries.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()


# --- FP8 in blocks ------------------------------------------------------------------------------------------------


def fp8(
    model_type: str, *, apart: bool = False, rename: str = "weight_scale_inv", as_bytes: bool = False, **config: Any
) -> Callable[[Path], None]:
    """A function that writes linear weights in float8 with a scale per block, with transformers' `Fp8Quantize`."""
    sizes = {name: config.pop(name) for name in list(config) if name in _SIZES}
    static = config.get("activation_scheme") == "static"

    def write(folder: Path) -> None:
        from types import SimpleNamespace

        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        model_of(model_type, **sizes).save_pretrained(folder)
        asked = FineGrainedFP8Config(**config)
        quantize = Fp8Quantize(SimpleNamespace(quantization_config=asked))

        def entry(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
            pieces = _padded(quantize, name, value, asked.weight_block_size)
            scale = pieces.pop(f"{name}_scale_inv", None)
            if scale is None:
                return pieces
            if asked.weight_block_size is None:
                scale = scale.reshape(())
            if as_bytes:
                scale = scale.view(torch.uint8)
            more = {name.replace("weight", "activation_scale"): torch.tensor(0.5)} if static else {}
            return {**pieces, **more, name.replace("weight", rename): scale}

        rewrite(folder, entry, {"quant_method": "fp8", **asked.to_dict(), "fmt": "e4m3"})
        if apart:
            split(folder)

    return write


def _padded(quantize: Any, name: str, value: torch.Tensor, block: Any) -> dict[str, torch.Tensor]:
    """The result of `Fp8Quantize` for a weight whose last blocks may be incomplete: it is padded with zeros."""
    rows, columns = value.shape
    over = (0, 0, 0, 0) if block is None else (0, -columns % block[1], 0, -rows % block[0])
    pieces = dict(quantize.convert({name: nn.functional.pad(value, over)}))
    return {**pieces, name: pieces[name][:rows, :columns]}


def _fp8_reference(pieces: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """A weight from its float8 values and a factor per block; the last blocks may be incomplete."""
    weight, scale = pieces["weight"].float(), pieces["weight_scale_inv"].float()
    for dim, size in enumerate(config["weight_block_size"]):
        scale = scale.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return weight * scale


def decoded(decode: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], torch.Tensor], marker: str) -> Load:
    """A function that loads what plain transformers can't load on a CPU: decoded by definition, then loaded.

    Args:
        decode: computes a weight from a layer's pieces, by the last part of their names, and the quantization settings.
        marker: the last part of the name of a piece that every quantized layer has.
    """

    def load(folder: Path) -> nn.Module:
        from tempfile import TemporaryDirectory

        config = json.loads((folder / "config.json").read_text())
        quantization = config.pop("quantization_config")
        entries = load_file(folder / "model.safetensors")
        for layer in [name.removesuffix(f".{marker}") for name in entries if name.endswith(f".{marker}")]:
            names = [name for name in entries if name.rpartition(".")[0] == layer and not name.endswith(".bias")]
            pieces = {name.rpartition(".")[2]: entries.pop(name) for name in names}
            entries[f"{layer}.weight"] = decode(pieces, quantization).to(getattr(torch, config["dtype"])).contiguous()
        with TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(config))
            save_file(entries, Path(place) / "model.safetensors", metadata={"format": "pt"})
            return loaded()(Path(place))

    return load


def _fp4_experts(folder: Path) -> None:
    """Experts in e2m1, two per byte, with an exponent per 32 columns, like the published DeepSeek-V4; random bits."""
    fp8("qwen3_moe", scale_fmt="ue8m0", expert_dtype="fp4")(folder)
    generator = torch.Generator().manual_seed(0)

    def entry(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if ".experts." not in name or not name.endswith(".weight"):
            return {name: value}
        rows, columns = value.shape
        packed = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=generator)
        scale = torch.randint(119, 124, (rows, columns // 32), dtype=torch.uint8, generator=generator)
        return {name: packed, f"{name}_scale_inv": scale.view(torch.float8_e8m0fnu)}

    rewrite(folder, entry, None)


def _mxfp4(folder: Path) -> None:
    """The experts of gpt-oss, packed as published: (experts, rows, blocks, 16) bytes, and an exponent per block."""
    model = model_of("gpt_oss")
    entries = {name: value.detach().clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in entries if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = entries.pop(name).shape  # the model's, which is transposed
        shape = (experts, rows, columns // 32)
        entries[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        entries[f"{name}_scales"] = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    model.config.save_pretrained(folder)
    save_file(entries, folder / "model.safetensors", metadata={"format": "pt"})


# --- compressed-tensors -------------------------------------------------------------------------------------------


def _compressed(
    scheme: str, form: str, model_type: str = "llama", config: Mapping[str, Any] | None = None, **weights: Any
) -> Callable[[Path], None]:
    """A function that writes linear weights with a compressor of compressed-tensors.

    Args:
        scheme: the name of one of the package's schemes.
        form: the name of the format.
        config: overrides for the model.
        weights: overrides for the scheme's weights.
    """

    def write(folder: Path) -> None:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

        asked = preset_name_to_scheme(scheme, ["Linear"])
        asked.weights = asked.weights.model_copy(update=weights)
        asked.format = form
        compressor = BaseCompressor.get_value_from_registry(form)
        model_of(model_type, **(config or {})).save_pretrained(folder)

        def entry(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
            layer = {"weight": value, **_qparams(value, asked.weights)}
            if asked.input_activations is not None and not asked.input_activations.dynamic:
                layer["input_scale"] = torch.tensor([0.5], dtype=value.dtype)
            prefix = name.removesuffix("weight")
            return {f"{prefix}{key}": part for key, part in compressor.compress(layer, asked).items()}

        said = QuantizationConfig(
            config_groups={"group_0": asked}, format=form, quantization_status="compressed", ignore=["lm_head"]
        )
        rewrite(folder, entry, said.model_dump(mode="json"))

    return write


def _qparams(value: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """The scales and zero points of a weight, from the minimum and maximum of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    rows, columns = value.shape
    shapes = {"tensor": (1, -1), "channel": (rows, 1, -1), "block": (rows // 128, 128, columns // 128, 128)}
    parts = value.reshape(shapes.get(args.strategy) or (rows, columns // args.group_size, args.group_size))
    over = (1, 3) if args.strategy == "block" else -1
    least, most = parts.amin(over), parts.amax(over)
    whole = generate_gparam(least.amin(), most.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(least, most, args, whole)
    return {"weight_scale": scale, "weight_zero_point": zero} | (
        {} if whole is None else {"weight_global_scale": whole}
    )


def _compressed_reference(pieces: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """The result of the package's own compressor for a layer's pieces."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    return BaseCompressor.get_value_from_registry(config["format"]).decompress(dict(pieces), scheme)["weight"]


# --- bitsandbytes, torchao, bitnet --------------------------------------------------------------------------------


def _quantized(quantization: Callable[[], Any], model_type: str = "llama", **config: Any) -> Callable[[Path], None]:
    """A function that writes what transformers saves from a model quantized during loading."""

    def write(folder: Path) -> None:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as place:
            written(model_type, **config)(Path(place))
            loaded(quantization=quantization)(Path(place)).save_pretrained(folder)

    return write


def _config(name: str, **options: Any) -> Callable[[], Any]:
    """A function that makes a quantization configuration of transformers."""

    def config() -> Any:
        import transformers

        return getattr(transformers, name)(**options)

    return config


def _dequantized(folder: Path) -> nn.Module:
    """The model after its own `dequantize`."""
    return loaded()(folder).dequantize()  # type: ignore[operator]


def _torchao(name: str, **options: Any) -> Callable[[], Any]:
    def config() -> Any:
        import torchao.quantization
        from transformers import TorchAoConfig

        return TorchAoConfig(getattr(torchao.quantization, name)(**options))

    return config


def _bitnet(linear_class: str, mode: str) -> Callable[[Path], None]:
    """A function that writes ternary weights, four rows per byte; "online" ones are computed at each forward."""

    def write(folder: Path) -> None:
        from transformers.integrations.bitnet import pack_weights

        model_of("llama").save_pretrained(folder)

        def entry(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
            if mode == "online":
                return {name: value}
            scale = 1 / value.float().abs().mean()
            ternary = (value.float() * scale).round().clamp(-1, 1)
            factor = scale if linear_class == "bitlinear" else 1 / scale
            return {name: pack_weights(ternary), f"{name}_scale": factor.reshape(1).to(value.dtype)}

        rewrite(folder, entry, {"quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": mode})

    return write


# --- GPTQ and AWQ: 4-bit integers ---------------------------------------------------------------------------------

_GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns is at each position of a word, from the lowest bits


def _packed(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """4-bit integers, eight to an int32 along a dimension."""
    parts = values.unflatten(dim, (-1, 8)).to(torch.int64)
    words = sum(parts.select(dim + 1, source) << (4 * place) for place, source in enumerate(order))
    return torch.where(words > 2**31 - 1, words - 2**32, words).to(torch.int32)  # type: ignore[arg-type]


def _four_bits(value: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers (inputs, outputs), zero points and float16 scales (groups, outputs) for a weight (outputs, inputs)."""
    columns = value.float().T  # (inputs, outputs)
    parts = torch.stack([columns[groups == group] for group in range(int(groups.max()) + 1)])
    least, most = parts.amin(1).clamp(max=0), parts.amax(1).clamp(min=0)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round().clamp(1, 15)
    integers = (columns / scales.float()[groups] + zeros[groups]).round().clamp(0, 15)
    return integers, zeros, scales


def _gptq(*, act_order: bool) -> Callable[[Path], None]:
    """A function that writes qweight, qzeros (minus one), scales and g_idx: version 1 of the format.

    Frantar et al. 2022, https://arxiv.org/abs/2210.17323; in AutoGPTQ's layout.
    """

    def entry(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        groups = torch.arange(value.shape[1]) // _GROUP
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
        integers, zeros, scales = _four_bits(value, groups)
        layer = name.removesuffix("weight")
        packed = {"qweight": _packed(integers, 0), "qzeros": _packed(zeros - 1, 1)}
        return {f"{layer}{key}": v for key, v in {**packed, "scales": scales, "g_idx": groups.to(torch.int32)}.items()}

    def write(folder: Path) -> None:
        model_of("llama", torch.float16).save_pretrained(folder)
        said = {"bits": 4, "group_size": _GROUP, "desc_act": act_order, "sym": False, "checkpoint_format": "gptq"}
        rewrite(folder, entry, {"quant_method": "gptq", **said})

    return write


def integers_in(words: torch.Tensor, dim: int, bits: int = 4, order: tuple[int, ...] = ()) -> torch.Tensor:
    """The integers in words, from the lowest bits, along a dimension; `order` is the place of each in a word."""
    places = [(words.to(torch.int64) >> bits * place) & 2**bits - 1 for place in order or range(32 // bits)]
    return torch.stack(places, dim + 1).flatten(dim, dim + 1)


def times_scales(integers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> Any:
    """In the dtype of the scales."""
    return (scales[groups] * (integers - zeros[groups]).to(scales.dtype)).T


def gptq_weight(pieces: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    bits, more = config["bits"], int(config["checkpoint_format"] == "gptq")
    zeros = (integers_in(pieces["qzeros"], 1, bits) + more) % 2**bits
    return times_scales(integers_in(pieces["qweight"], 0, bits), zeros, pieces["scales"], pieces["g_idx"].long())


def _awq(folder: Path) -> None:
    """qweight and qzeros packed along the outputs, in groups of eight in AWQ's order; float16 scales.

    Lin et al. 2023, https://arxiv.org/abs/2306.00978; in its "gemm" layout.
    """

    def entry(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        integers, zeros, scales = _four_bits(value, torch.arange(value.shape[1]) // _GROUP)
        layer = name.removesuffix("weight")
        packed = {"qweight": _packed(integers, 1, _AWQ_ORDER), "qzeros": _packed(zeros, 1, _AWQ_ORDER)}
        return {f"{layer}{key}": v for key, v in {**packed, "scales": scales}.items()}

    model_of("llama", torch.float16).save_pretrained(folder)
    rewrite(
        folder, entry, {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}
    )


def awq_weight(pieces: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    order = tuple(map(_AWQ_ORDER.index, range(8)))
    integers, zeros = (integers_in(pieces[name], 1, order=order) for name in ("qweight", "qzeros"))
    groups = torch.arange(len(integers)) // (len(integers) // len(zeros))
    return times_scales(integers, zeros, pieces["scales"], groups)


# --- GGUF ---------------------------------------------------------------------------------------------------------


def _gguf(kind: str | Callable[[str], str], model_type: str = "llama", **config: Any) -> Callable[[Path], None]:
    """A function that writes only `model.gguf`."""
    wide = {"hidden_size": 256, "head_dim": 64}  # blocks have up to 256 columns
    sizes = {**wide, **config}

    def write(folder: Path) -> None:
        needs(f"GGUF files of {model_type}")
        write_gguf(model_of(model_type, torch.float32, **sizes), folder / "model.gguf", kind)

    return write


def _mostly_q4_k(name: str) -> str:
    """The kinds mixed in a file named Q4_K_M."""
    return "Q6_K" if any(part in name for part in ("down_proj", "v_proj", "lm_head")) else "Q4_K"


# --- the table ----------------------------------------------------------------------------------------------------


def _table() -> Iterator[tuple[str, Form]]:
    yield from _of_floats()
    yield from _of_fp8()
    yield from _of_compressed_tensors()
    yield from _of_packages()
    yield from _of_gguf()


def _of_floats() -> Iterator[tuple[str, Form]]:
    """Unquantized: values are joined (experts, convolutions), split, transposed, interleaved or cast."""
    for name in (
        *("llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "hrm_text", "olmo_hybrid", "inkling2_text"),
    ):
        yield name, Form(written(name), loaded(), {})
    for name, stored, asked in (
        ("llama", "float32", "bfloat16"),
        ("qwen3_moe", "float32", "bfloat16"),
        ("qwen3_moe", "bfloat16", "float32"),
        ("qwen3_moe", "float16", "bfloat16"),
    ):
        options = {"dtype": getattr(torch, asked)}
        yield f"{name}-{stored}-as-{asked}", Form(written(name, getattr(torch, stored)), loaded(**options), options)


def _of_fp8() -> Iterator[tuple[str, Form]]:
    """Formats of DeepSeek and Qwen, and variants; gpt-oss."""

    def form(write: Callable[[Path], None]) -> Form:
        return Form(write, loaded(quantization=_config("FineGrainedFP8Config", dequantize=True)), {})

    yield "fp8-llama", form(fp8("llama"))
    yield "fp8-llama-shards", form(fp8("llama", apart=True))
    for name in ("mixtral", "qwen3_moe", "deepseek_v3"):
        yield f"fp8-{name}", form(fp8(name))
    yield "fp8-small-blocks", form(fp8("llama", weight_block_size=(64, 32)))
    yield "fp8-ue8m0", form(fp8("qwen3_moe", scale_fmt="ue8m0"))
    yield "fp8-ue8m0-bytes", form(fp8("llama", scale_fmt="ue8m0", as_bytes=True))
    yield "fp8-tensor-static", form(fp8("llama", weight_block_size=None, activation_scheme="static"))
    yield "fp8-scale-name", form(fp8("llama", rename="scale"))
    yield "fp8-fp4-experts", form(_fp4_experts)
    # transformers 5.23 derives the block size from the shapes, so it refuses 320 rows in 3 blocks, and DeepSeek-V3's
    # 576 in 5; 192 rows in 2 it decodes with blocks of 96.
    part = fp8("llama", intermediate_size=320)
    yield "fp8-part-block", Form(part, decoded(_fp8_reference, "weight_scale_inv"), {})
    yield "mxfp4-gpt_oss", Form(_mxfp4, loaded(quantization=_config("Mxfp4Config", dequantize=True)), {})


def _of_compressed_tensors() -> Iterator[tuple[str, Form]]:
    """Formats of llm-compressor."""
    by_package = decoded(_compressed_reference, "weight_scale")

    def plain(folder: Path) -> nn.Module:
        from transformers import __version__

        if Version(__version__) < Version("5.23"):  # before, transformers rounds activations all the same
            return by_package(folder)
        return loaded(quantization=_config("CompressedTensorsConfig", run_compressed=False))(folder)

    def form(scheme: str, form: str, model_type: str = "llama", **options: Any) -> Form:
        return Form(_compressed(scheme, form, model_type, **options), plain, {})

    group = {"group_size": 32}
    yield "ct-w4a16", form("W4A16", "pack-quantized", **group)
    asym = _compressed("W4A16_ASYM", "pack-quantized", **group)  # its own modules don't support packed zero points
    yield "ct-w4a16-asym", Form(asym, loaded(quantization=_config("CompressedTensorsConfig", run_compressed=False)), {})
    yield "ct-w4a16-channel", form("W4A16", "pack-quantized", group_size=None, strategy="channel")
    yield "ct-w4a16-qwen3_moe", form("W4A16", "pack-quantized", "qwen3_moe", **group)
    yield "ct-w8a16", form("W8A16", "pack-quantized", **group)
    yield "ct-fp8-channel", form("FP8_DYNAMIC", "float-quantized")
    yield "ct-fp8-channel-qwen3_moe", form("FP8_DYNAMIC", "float-quantized", "qwen3_moe")
    yield "ct-fp8-tensor", form("FP8", "float-quantized")
    yield "ct-fp8-block", form("FP8_BLOCK", "float-quantized", "llama", config={"num_key_value_heads": 4})
    yield "ct-w8a8", form("INT8", "int-quantized")
    yield "ct-nvfp4a16", form("NVFP4A16", "nvfp4-pack-quantized")
    # transformers 5.23 refuses experts in W8A8, and ignores the global scale of those in NVFP4.
    yield "ct-w8a8-qwen3_moe", Form(_compressed("INT8", "int-quantized", "qwen3_moe"), by_package, {})
    nvfp4 = _compressed("NVFP4A16", "nvfp4-pack-quantized", "qwen3_moe")
    yield "ct-nvfp4a16-qwen3_moe", Form(nvfp4, by_package, {})


def _of_packages() -> Iterator[tuple[str, Form]]:
    """Formats of other packages, and bitnet's, which is transformers'."""
    for name, options in {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "int8": {"load_in_8bit": True},
    }.items():
        asked = _config("BitsAndBytesConfig", bnb_4bit_compute_dtype=torch.bfloat16, **options)
        yield f"bnb-{name}", Form(_quantized(asked), _dequantized, {})
    for name, config in {
        "int8": _torchao("Int8WeightOnlyConfig", set_inductor_config=False),
        "int4": _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
        "float8": _torchao("Float8WeightOnlyConfig", set_inductor_config=False),
    }.items():
        yield f"torchao-{name}", Form(_quantized(config, hidden_size=256), loaded(), {})
    for linear, mode in (("bitlinear", "offline"), ("autobitlinear", "offline"), ("autobitlinear", "online")):
        yield f"bitnet-{linear}-{mode}", Form(_bitnet(linear, mode), loaded(), {})
    # by definition: the packages do not install on a CPU
    yield "gptq", Form(_gptq(act_order=False), decoded(gptq_weight, "qweight"), {})
    yield "gptq-act-order", Form(_gptq(act_order=True), decoded(gptq_weight, "qweight"), {})
    yield "awq", Form(_awq, decoded(awq_weight, "qweight"), {})


def _of_gguf() -> Iterator[tuple[str, Form]]:
    """Every kind that the gguf package decodes, in a one-layer Llama; and shapes that need special treatment.

    The last ones are loaded by conversions, as `lfm2`; the others by `gguf.dequantize` in numpy and tensor processors.
    """

    def form(write: Callable[[Path], None], **options: Any) -> Form:
        given = {"gguf_file": "model.gguf", **options}
        return Form(write, loaded(**given), given)

    for kind in KINDS:
        yield f"gguf-{kind.lower()}", form(_gguf(kind, num_hidden_layers=1))
    yield "gguf-q4_k_m", form(_gguf(_mostly_q4_k))
    yield "gguf-q4_k_m-bfloat16", form(_gguf(_mostly_q4_k), dtype=torch.bfloat16)
    yield "gguf-tied", form(_gguf("Q8_0", tie_word_embeddings=True))
    yield "gguf-qwen2", form(_gguf("Q8_0", "qwen2"))
    yield "gguf-qwen3", form(_gguf("Q8_0", "qwen3", head_dim=128))  # the head size is not read from the file
    yield "gguf-qwen3_moe", form(_gguf("Q8_0", "qwen3_moe", moe_intermediate_size=768))  # nor is the experts' size
    for kind in ("F16", "Q4_K"):
        yield f"gguf-lfm2-{kind.lower()}", form(_gguf(kind, "lfm2"))
    yield "gguf-qwen3_5", form(_gguf("Q8_0", "qwen3_5_text"))
    yield "gguf-qwen3_5_moe", form(_gguf("Q8_0", "qwen3_5_moe_text"))
    sizes = {"moe_intermediate_size": 256}
    yield "gguf-qwen3_5_moe-bfloat16", form(_gguf("Q4_K", "qwen3_5_moe_text", **sizes), dtype=torch.bfloat16)
    yield "gguf-qwen3_5-bfloat16", form(_gguf("Q4_K", "qwen3_5_text"), dtype=torch.bfloat16)


FORMS: dict[str, Form] = dict(_table())
