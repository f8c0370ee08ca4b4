"""GGUF files of tiny models, written by the `gguf` package.

Always true:
- names, the row order of queries and keys, and the offsets of norms are llama.cpp's, so that loading has to undo
  them
- kinds that the package can quantize contain the model's weights; for the others it only has a decoder, and their
  blocks are random bits with small, finite factors
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

QUANTIZABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
# Offsets of float16 factors in a block, and their relative sizes: values are then around zero. NVFP4 has one-byte
# factors, IQ1_M has one in four pieces.
_FACTORS: dict[str, dict[int, float]] = {
    "Q2_K": {80: 1, 82: 1.5},
    "Q3_K": {108: 1},
    "Q4_K": {0: 1, 2: 7.5},
    "Q5_K": {0: 1, 2: 15.5},
    "Q6_K": {208: 1},
    **{kind: {0: 1} for kind in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS")},
    "IQ1_M": {},
    "NVFP4": {},
}
KINDS = (*QUANTIZABLE, *_FACTORS)

_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def write_gguf(
    model: Any, path: Path, kind: str | Callable[[str], str], *, chat_template: str | None = None, **options: Any
) -> Path:
    """A GGUF file of a model.

    Args:
        model: a causal language model from transformers.
        path: the file.
        kind: of matrices, or a function of the name; other tensors are F32.
        chat_template: of the tokenizer.
        options: for `gguf.GGUFWriter`, such as `split_max_tensors`.
    """
    import gguf

    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture, **options)
    _describe(writer, architecture, config)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    generator = np.random.default_rng(0)
    for name, value in _as_llama_cpp(architecture, model):
        stem, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        stored = names.get_name(stem)
        if stored is None:
            raise KeyError(f"{name}: the gguf package has no name for it in {architecture}")
        matrix = value.dim() > 1 and not any(part in name for part in ("norm", "conv1d", "conv.conv", ".gate."))
        wanted = (kind if isinstance(kind, str) else kind(name)) if matrix else "F32"
        array = value.detach().float().contiguous().numpy()
        quantization = gguf.GGMLQuantizationType[wanted]
        writer.add_tensor(
            f"{stored}.{suffix or 'weight'}" if suffix or value.dim() > 1 else stored,
            _blocks(array, wanted, generator),
            raw_dtype=quantization,
        )
    finish(writer)
    return path


def finish(writer: Any) -> None:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stretch(writer: Any, rope: dict[str, Any], head: int) -> None:
    """How rotary embeddings are stretched, as llama.cpp's converter writes it."""
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(factor)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
        lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head, 2, dtype=np.float32) / head)
        smooth = (low * rope["low_freq_factor"] / lengths - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / factor + smooth)
        factors = np.where(lengths < high, 1, np.where(lengths > low, factor, between))
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def _blocks(array: np.ndarray, kind: str, generator: np.random.Generator) -> np.ndarray:
    """The bytes of an array in a kind: quantized, or random if the package can't quantize."""
    import gguf

    quantization = gguf.GGMLQuantizationType[kind]
    if kind in QUANTIZABLE:
        return gguf.quants.quantize(array, quantization)
    elements, size = gguf.GGML_QUANT_SIZES[quantization]
    blocks = generator.integers(0, 256, (array.size // elements, size), dtype=np.uint8)
    _set_factors(blocks, kind, 1.0)
    spread = float(np.sqrt(np.mean(np.square(gguf.quants.dequantize(blocks[:4096], quantization)))))
    _set_factors(blocks, kind, 0.08 / spread)
    return blocks.reshape(*array.shape[:-1], -1)


def _set_factors(blocks: np.ndarray, kind: str, factor: float) -> None:
    """Scales every value in the blocks by the factor."""
    if kind == "NVFP4":
        blocks[:, :4] = 0x38 if factor == 1 else 0x08 * round(7 + np.log2(factor))  # e4m3 without a sign: 2^n
    elif kind == "IQ1_M":  # the factor's four hex digits are the highest ones of four words of scales
        words, bits = blocks[:, -8:].view(np.uint16), int(np.float16(factor).view(np.uint16))
        for place in range(4):
            words[:, place] = words[:, place] & 0x0FFF | (bits >> 4 * place & 15) << 12
    for start, multiple in _FACTORS[kind].items():
        blocks[:, start : start + 2] = np.frombuffer(np.float16(factor * multiple).tobytes(), np.uint8)


def _describe(writer: Any, architecture: str, config: Any) -> None:
    """The metadata from which transformers builds a configuration and a tokenizer."""
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture != "qwen35moe":  # all experts
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    attends = [layer == "full_attention" for layer in config.layer_types or []] if architecture == "lfm2" else []
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads * is_one for is_one in attends] if attends else heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    rope = config.rope_parameters
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    _stretch(writer, rope, head)
    writer.add_key_length(head)
    writer.add_vocab_size(config.vocab_size)
    if architecture in ("qwen3moe", "qwen35moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture in ("qwen35", "qwen35moe"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_uint32(f"{architecture}.full_attention_interval", config.num_hidden_layers)
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = [chr(33 + number) for number in range(93)]
    tokens += [f"!{token}" for token in tokens[: config.vocab_size - len(tokens)]]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"! {token[1:]}" for token in tokens[93:]])


def _as_llama_cpp(architecture: str, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's names and values as llama.cpp's converter passes them to the writer."""
    config = model.config
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
        if architecture == "llama" and (found := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if name.endswith("conv.conv.weight"):
            value = value.squeeze(1)
        if name.endswith("shared_expert_gate.weight"):
            value = value.squeeze(0)
        if architecture in ("qwen35", "qwen35moe"):
            value = _as_qwen35(name, value, config)
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), value.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        else:
            yield name + (".weight" if name.endswith("experts.down_proj") else ""), value


def _as_qwen35(name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """Norms plus one, two-dimensional convolutions, -exp of A_log, and the value heads of a key head far apart."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return value.float() + 1
    if name.endswith("conv1d.weight"):
        value = value.squeeze(1)
    if name.endswith("A_log"):
        value = -value.float().exp()
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def tiled(part: torch.Tensor) -> torch.Tensor:
        return part.unflatten(0, (keys, ratio, -1)).transpose(0, 1).flatten(0, 2)

    if name.endswith(("A_log", "dt_proj.bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight")):
        return tiled(value)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        kept = 2 * config.linear_key_head_dim * keys
        return torch.cat([value[:kept], tiled(value[kept:])])
    return tiled(value.T).T if name.endswith("linear_attn.out_proj.weight") else value
