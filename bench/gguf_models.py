"""GGUF files with the shapes of models that people run, of random blocks in the kinds that llama.cpp would choose.

Always true:
- a value repeats a random block of its kind, so that a file is written at the disk's speed
- Q4_K_M mixes as llama.cpp does: in Q6_K are the head, and in half of the layers the values' and the last projection
- the tokenizer is SmolLM2's, and tokens without a meaning fill it up to the size of the model's own

Source of the mixture: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from bench.models import GEMMA, on_meta, smollm2

Value: TypeAlias = "tuple[str, str, tuple[int, ...]]"  # name, kind, shape
_REPEATED = 16 << 20  # bytes
_F32 = "F32"
_SCALES = ("norm.weight", "scale.weight", "freqs.weight")
_FACTORS = {  # where a block has its factors, and how large they are
    "Q4_K": (slice(0, 4), [2e-4, 1.5e-3]),
    "Q6_K": (slice(208, 210), [1e-5]),
    "Q8_0": (slice(0, 2), [2e-4]),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        between: width of a feed-forward layer, or of an expert.
        head: width of a head.
        kv_heads: heads of keys and values.
        is_tied: whether the table of tokens is the head, too.
        used: experts per token.
        more: further entries of the header.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    between: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int = 128
    is_tied: bool = False
    experts: int = 0
    used: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def mixture(self) -> str:
        """How it is packed, as its publisher says."""
        return {"gpt-oss": "MXFP4", "gemma4": "bfloat16"}.get(self.architecture, "Q4_K_M")


_QWEN, _MIXTURE = {"rope.freq_base": 1e6}, {"rope.freq_base": 150e3, "attention.sliding_window": 128}
GPT_OSS = Shape("gpt-oss 20B", "gpt-oss", 24, 2880, 2880, 64, 8, 201_088, 64, experts=32, used=4, more=_MIXTURE)
# As llama.cpp's converter writes it: `head` is that of the layers with full attention.
_GEMMA = {
    "embedding_length_per_layer_input": 256, "attention.shared_kv_layers": 20, "attention.sliding_window": 512,
    "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0,
    "feed_forward_length": [6144] * 15 + [12288] * 20,
    "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in GEMMA["layer_types"]],
}  # fmt: skip
GEMMA_E2B = Shape("Gemma 4 E2B", "gemma4", 35, 1536, 6144, 8, 1, 262_144, 512, is_tied=True, more=_GEMMA)
NAMED = (
    Shape("Qwen2.5 1.5B", "qwen2", 28, 1536, 8960, 12, 2, 151_936, is_tied=True, more=_QWEN),
    Shape("Qwen2.5 7B", "qwen2", 28, 3584, 18944, 28, 4, 152_064, more=_QWEN),
    Shape("Llama 3.1 8B", "llama", 32, 4096, 14336, 32, 8, 128_256, more={"rope.freq_base": 5e5}),
    GEMMA_E2B,
    GPT_OSS,
    Shape("Qwen3 30B-A3B", "qwen3moe", 48, 2048, 768, 32, 4, 151_936, experts=128, used=8, more=_QWEN),
)
TOY_NAMED = (
    Shape("toy Llama", "llama", 1, 256, 256, 4, 2, 49_152, 64, is_tied=True),
    Shape("toy mixture", "qwen3moe", 1, 256, 768, 4, 2, 49_152, 64, experts=4, used=2),
)


def llama_of(layers: int) -> Shape:
    """A Llama with some 50 MB per layer."""
    return Shape(f"Llama, {layers} layers", "llama", layers, 2048, 8192, 32, 8, 49_152, 64, is_tied=True)


def write_gguf(path: Path, shape: Shape) -> Path:
    """A GGUF file of a shape.

    Raises:
        OSError: the disk is full.
    """
    import gguf

    writer = gguf.GGUFWriter(path, shape.architecture)
    _write_header(writer, shape)
    values = list(_values(shape))
    for name, kind, sizes in values:
        nbytes = prod(_bytes_of(kind, sizes))
        dtype, raw = (np.float32, None) if kind == _F32 else (np.uint8, gguf.GGMLQuantizationType[kind])
        writer.add_tensor_info(name, sizes if kind == _F32 else _bytes_of(kind, sizes), dtype, nbytes, raw)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind, sizes in values:
        is_scale = kind == _F32 and len(sizes) == 1 and name.endswith(_SCALES)
        block = _ones() if is_scale else _block(kind)
        writer.write_tensor_data(np.resize(block, prod(_bytes_of(kind, sizes))))
    writer.close()
    return path


def nbytes_of(shape: Shape) -> int:
    """Bytes of all values."""
    return sum(prod(_bytes_of(kind, sizes)) for _, kind, sizes in _values(shape))


def _values(shape: Shape) -> Iterator[Value]:
    """All values, in the order of the file."""
    if shape.architecture == "gemma4":
        yield from _of_gemma(shape)
        return
    is_oss = shape.mixture == "MXFP4"
    plain, better = ("Q8_0", "Q8_0") if is_oss else ("Q4_K", "Q6_K")
    table = (shape.vocabulary, shape.hidden)
    yield "token_embd.weight", better if shape.is_tied else plain, table
    yield "output_norm.weight", _F32, (shape.hidden,)
    if not shape.is_tied:
        yield "output.weight", better, table
    for number in range(shape.layers):
        kind = better if _is_better(number, shape.layers) else plain
        for name, of, sizes in (*_attention(shape, plain, kind), *_feed_forward(shape, plain, kind)):
            yield f"blk.{number}.{name}", of, sizes


def _of_gemma(shape: Shape) -> Iterator[Value]:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, shape.layers)
    yield "rope_freqs.weight", _F32, (shape.head // 2,)
    for name, value in on_meta("Gemma4TextConfig", "bfloat16", GEMMA)[1].items():
        named = names.get_name(name.removesuffix(".weight"))
        yield f"{named}.weight", "BF16" if value.dim() > 1 else _F32, tuple(value.shape)


def _is_better(layer: int, layers: int) -> bool:
    """Whether a layer's sensitive values are in 6 bits: the first and last eighth, and every third between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _attention(shape: Shape, plain: str, better: str) -> Iterator[Value]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
    yield "attn_norm.weight", _F32, (hidden,)
    for name, kind, rows, columns in (
        ("q", plain, queries, hidden),
        ("k", plain, keys, hidden),
        ("v", better, keys, hidden),
        ("output", plain, hidden, queries),
    ):
        yield f"attn_{name}.weight", kind, (rows, columns)
        if shape.architecture == "gpt-oss" or (shape.architecture == "qwen2" and name != "output"):
            yield f"attn_{name}.bias", _F32, (rows,)
    if shape.architecture == "qwen3moe":
        yield from ((f"attn_{name}_norm.weight", _F32, (shape.head,)) for name in "qk")
    if shape.architecture == "gpt-oss":
        yield "attn_sinks.weight", _F32, (shape.heads,)


def _feed_forward(shape: Shape, plain: str, better: str) -> Iterator[Value]:
    is_oss, hidden, between, experts = shape.mixture == "MXFP4", shape.hidden, shape.between, shape.experts
    yield f"{'post_attention' if is_oss else 'ffn'}_norm.weight", _F32, (hidden,)
    stacked, ending = ((experts,), "_exps") if experts else ((), "")
    if experts:
        yield "ffn_gate_inp.weight", _F32, (experts, hidden)
    if is_oss:
        yield "ffn_gate_inp.bias", _F32, (experts,)
        plain = better = "MXFP4"
    for name, kind, sizes in (
        ("gate", plain, (between, hidden)),
        ("up", plain, (between, hidden)),
        ("down", better, (hidden, between)),
    ):
        yield f"ffn_{name}{ending}.weight", kind, (*stacked, *sizes)
        if is_oss:
            yield f"ffn_{name}{ending}.bias", _F32, (experts, sizes[0])


def _write_header(writer: Any, shape: Shape) -> None:
    import gguf

    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_K_M))
    counts = {
        "context_length": 8192,
        "block_count": shape.layers,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.between,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "rope.dimension_count": shape.head,
    }
    if shape.experts:
        experts = {"expert_count": shape.experts, "expert_used_count": shape.used}
        counts |= {**experts, "expert_feed_forward_length": shape.between}
    for name, count in {**counts, "attention.layer_norm_rms_epsilon": 1e-5, **shape.more}.items():
        add = {float: writer.add_float32, list: writer.add_array}.get(type(count), writer.add_uint32)
        add(f"{shape.architecture}.{name}", count)
    for name, kind, of, value in _tokenizer(shape.vocabulary):
        writer.add_key_value(name, value, kind, sub_type=of)


def _tokenizer(tokens: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """The entries of SmolLM2's tokenizer: name, type, type of the items, and value."""
    for name, (kind, of, value) in _smollm2_tokenizer().items():
        unused = tokens - len(value) if isinstance(value, list) else 0
        if name == "tokenizer.ggml.tokens":
            value = value + [f"<unused{number}>" for number in range(unused)]
        if name == "tokenizer.ggml.token_type":
            value = value + [5] * unused  # of no use
        yield name, kind, of, value


@lru_cache
def _smollm2_tokenizer() -> dict[str, tuple[Any, Any, Any]]:
    import gguf

    fields = gguf.GGUFReader(smollm2()).fields
    return {
        name: (one.types[0], one.types[1] if one.types[1:] else None, one.contents())
        for name, one in fields.items()
        if name.startswith("tokenizer.")
    }


def _bytes_of(kind: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a value's bytes."""
    import gguf

    per_block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return (*sizes[:-1], sizes[-1] // per_block * nbytes)


@lru_cache
def _block(kind: str) -> Any:
    """Bytes of some random blocks; of numbers of some hundredths."""
    if kind == _F32:
        numbers = torch.randn(_REPEATED // 4, generator=torch.Generator().manual_seed(0)).mul_(0.02)
        return numbers.numpy().view(np.uint8)
    if kind == "BF16":
        return torch.from_numpy(_block(_F32)).view(torch.float32).bfloat16().view(torch.uint8).numpy()
    [nbytes] = _bytes_of(kind, (256,))
    nbytes = nbytes // 8 if kind in ("Q8_0", "MXFP4") else nbytes
    shape, seeded = (_REPEATED // nbytes, nbytes), torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded)
    if kind == "MXFP4":
        blocks[:, 0] = 121  # 2 to the power of -6
    else:
        place, factors = _FACTORS[kind]
        blocks[:, place] = torch.tensor(factors, dtype=torch.float16).view(torch.uint8)
    return blocks.flatten().numpy()


@lru_cache
def _ones() -> Any:
    return np.ones(8192, np.float32).view(np.uint8)
