"""A token from a GGUF file, in the page cache or in less memory: beside llama.cpp, and transformers with dense weights.

Always true:
- all compute with the same file and the same number of threads, in turn, each in a process of its own
- a value is the median over some tokens, after the first few; the prompt has four tokens
- in less memory, all that a process has counts: its libraries' data, keys and values, and the pages of the file
- transformers decodes all blocks when it loads: its weights are dense, in memory, in the dtype of the case
- llama.cpp runs from the package node-llama-cpp, whose folder is named by the variable NODE_LLAMA_CPP
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import offload
from bench.apart import stepping_apart
from bench.decode import Decoder
from bench.memory_cap import memory_cap
from bench.models import smollm2
from bench.packed import random_bits
from bench.page_cache import make_cold, warm
from bench.peers import OURS
from bench.rounds import Figure, in_turn
from bench.scale import Scale

LLAMA_CPP = "llama.cpp"
_DENSE = "transformers, dense"
_PROMPT = (1, 504, 314, 253)
_WARM_UP = 3
_SHARES = (1.0, 0.75)  # of a file, as memory for everything
_LEAST = 700 << 20  # bytes that Python, torch and transformers need


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Seconds per token of SmolLM2 in two dtypes, and of a larger model of random blocks."""
    found = []
    larger = scratch / f"llama-{scale.gguf_layers}-layers.Q4_K_M.gguf"
    write_q4_k_m(larger, scale.gguf_layers)
    cases = (
        ("SmolLM2-135M, Q4_1, float32", smollm2(), torch.float32),
        ("SmolLM2-135M, Q4_1, bfloat16", smollm2(), torch.bfloat16),
        (f"{larger.stat().st_size / 1e9:.1f} GB, Q4_K_M, bfloat16", larger, torch.bfloat16),
    )
    for name, path, dtype in cases:
        warm([path])
        found.append(_figure(f"gguf: a token, {name}", path, dtype, scale))
    found += [_capped_figure(larger, share, scale) for share in _SHARES]
    larger.unlink()
    return found


def _figure(case: str, path: Path, dtype: torch.dtype, scale: Scale) -> Figure:
    with ExitStack() as stack:
        arms: dict[str, Callable[[], float]] = {
            arm: stack.enter_context(stepping_apart(_steps, arm, path, dtype, scale.packed_pairs))
            for arm in (_DENSE, OURS)
        }
        arms[LLAMA_CPP] = partial(_llama_cpp, path, scale.packed_pairs)
        done = in_turn(arms, scale.rounds, _absent())
    limit = done.take(_DENSE)
    return Figure(case, "s", done.results, limit, _DENSE, done.missing)


def _capped_figure(path: Path, share: float, scale: Scale) -> Figure:
    """Seconds per token in a process whose memory, with the page cache, is this share of the file."""
    limit = max(int(share * path.stat().st_size), _LEAST)
    case = f"gguf, capped: a token, {path.stat().st_size / 1e9:.1f} GB, Q4_K_M, in {limit / 1e6:,.0f} MB"
    arms = {arm: partial(_capped, arm, path, limit, scale.packed_pairs) for arm in (OURS, LLAMA_CPP)}
    done = in_turn(arms, scale.rounds, _absent())
    return Figure(case, "s", done.results, [], "", done.missing)


def _capped(arm: str, path: Path, limit: int, tokens: int) -> float:
    """In a fresh process: all that it imports and reads counts.

    Raises:
        OSError: no memory cgroup can be made.
        RuntimeError: it was killed, for want of memory.
    """
    command = _node(path, tokens) if arm == LLAMA_CPP else [sys.executable, "-m", "bench.gguf_files", path, str(tokens)]
    make_cold([path])
    with memory_cap(limit) as group:
        run = partial(subprocess.run, capture_output=True, encoding="utf-8", timeout=1800)
        done = run(command, preexec_fn=group.join, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    if done.returncode:
        is_killed = done.returncode == -signal.SIGKILL
        raise RuntimeError("it was killed, for want of memory" if is_killed else f"{done.returncode}: {done.stderr}")
    return median(json.loads(done.stdout.splitlines()[-1]))


def _steps(arm: str, path: Path, dtype: torch.dtype, tokens: int) -> Iterator[float]:
    decoder = Decoder(_loaded(arm, path, dtype), _PROMPT)
    for _ in range(_WARM_UP):
        decoder.step()
    while True:
        yield median(decoder.step() for _ in range(tokens))


def _loaded(arm: str, path: Path, dtype: torch.dtype) -> Any:
    if arm == OURS:
        return offload.from_pretrained(path, dtype=dtype)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


def _llama_cpp(path: Path, tokens: int) -> float:
    done = subprocess.run(_node(path, tokens), capture_output=True, encoding="utf-8", timeout=600, check=True)
    return median(json.loads(done.stdout.splitlines()[-1]))


def _node(path: Path, tokens: int) -> list[str | Path]:
    """A command that prints the seconds of each token of llama.cpp."""
    program = Path(__file__).with_name("llama_cpp.mjs")
    numbers = map(str, (torch.get_num_threads(), _WARM_UP, tokens))
    return ["node", program, os.environ["NODE_LLAMA_CPP"], path.resolve(), *numbers]


def _absent() -> dict[str, str]:
    if "NODE_LLAMA_CPP" in os.environ:
        return {}
    return {LLAMA_CPP: "node-llama-cpp is not installed: NODE_LLAMA_CPP names no folder"}


# A larger file


def write_q4_k_m(path: Path, layers: int, hidden: int = 2048, between: int = 8192) -> None:
    """A Llama of random blocks with SmolLM2's tokenizer, in the mixture of kinds that llama.cpp calls Q4_K_M.

    In Q6_K are the table of tokens, which is the head, too, and in half of the layers the values' and last projection.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    reader = gguf.GGUFReader(smollm2())
    sizes = {
        "block_count": layers,
        "embedding_length": hidden,
        "feed_forward_length": between,
        "attention.head_count": hidden // 64,
        "attention.head_count_kv": hidden // 256,
        "rope.dimension_count": 64,
    }
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *of = field.types
        value = sizes.get(name.removeprefix("llama."), field.contents())
        writer.add_key_value(name, value, kind, sub_type=of[0] if of else None)
    [vocabulary] = [int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    _add(writer, "token_embd", "Q6_K", vocabulary, hidden)
    _add(writer, "output_norm", "F32", hidden)
    for number in range(layers):
        better = "Q6_K" if number % 2 else "Q4_K"
        for name, kind, *shape in (
            ("attn_norm", "F32", hidden),
            ("attn_q", "Q4_K", hidden, hidden),
            ("attn_k", "Q4_K", hidden // 4, hidden),
            ("attn_v", better, hidden // 4, hidden),
            ("attn_output", "Q4_K", hidden, hidden),
            ("ffn_norm", "F32", hidden),
            ("ffn_gate", "Q4_K", between, hidden),
            ("ffn_up", "Q4_K", between, hidden),
            ("ffn_down", better, hidden, between),
        ):
            _add(writer, f"blk.{number}.{name}", kind, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, kind: str, rows: int, columns: int = 0) -> None:
    import gguf

    if kind == "F32":
        writer.add_tensor(f"{name}.weight", torch.ones(rows).numpy())
        return
    raw = gguf.GGMLQuantizationType[kind]
    per_block, nbytes = gguf.GGML_QUANT_SIZES[raw]
    blocks = random_bits((rows, columns // per_block, nbytes))
    place, factors = (slice(0, 4), [2e-4, 1.5e-3]) if kind == "Q4_K" else (slice(208, 210), [1e-5])
    blocks[..., place] = torch.tensor(factors, dtype=torch.float16).view(torch.uint8)
    writer.add_tensor(f"{name}.weight", blocks.flatten(1).numpy(), raw_dtype=raw)


def main() -> None:
    """Print the seconds of each token of a file in bfloat16."""
    path, tokens = Path(sys.argv[1]), int(sys.argv[2])
    decoder = Decoder(_loaded(OURS, path, torch.bfloat16), _PROMPT)
    print([decoder.step() for _ in range(_WARM_UP + tokens)][_WARM_UP:])


if __name__ == "__main__":
    main()
