"""The ways to load a language model that are compared, each run in a process of its own.

Always true:
- every arm loads the same folder, in the same dtype, and decodes the same tokens
- memory is anonymous memory (RssAnon): what the kernel cannot drop by itself
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

ARMS = ("in memory", "offload", "accelerate")


@dataclass
class Trial:
    """What one arm did. Times in seconds, memory in bytes above the process that has imported everything."""

    arm: str
    load_seconds: float
    first_token_seconds: float
    token_seconds: float
    bytes_written: int
    peak_bytes: int
    loaded_bytes: int
    tokens: list[int]
    trace: list[tuple[float, int]] = field(repr=False, default_factory=list)


def typical(trials: list[Trial]) -> Trial:
    """The medians of several trials of one arm; the trace is that of the first."""
    numbers = [name for name, value in asdict(trials[0]).items() if isinstance(value, (int, float))]
    return replace(trials[0], **{name: median(getattr(trial, name) for trial in trials) for name in numbers})


class MemoryTrace:
    """Anonymous memory over time, sampled by a thread."""

    def __init__(self, period: float = 0.005) -> None:
        self._period = period
        self._start = time.perf_counter()
        self._floor = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> MemoryTrace:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.samples.append((time.perf_counter() - self._start, self.now()))

    def now(self) -> int:
        """Bytes above the start."""
        return max(anonymous_bytes() - self._floor, 0)

    def _sample(self) -> None:
        while not self._done.wait(self._period):
            self.samples.append((time.perf_counter() - self._start, self.now()))


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell anonymous memory")


def written_bytes() -> int:
    """Bytes that this process has caused to be written to disk, also through mappings."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise OSError("this system does not tell written bytes")


def run_apart(arm: str, folder: Path, prompt: list[int], tokens: int) -> Trial:
    """A trial in a process of its own."""
    command = [sys.executable, "-m", "bench.arms", arm, str(folder), json.dumps(prompt), str(tokens)]
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parent.parent)
    if done.returncode:
        raise RuntimeError(f"{arm} failed:\n{done.stderr.decode()}")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def trial(arm: str, folder: Path, prompt: list[int], tokens: int) -> Trial:
    """Load, take the first token, decode the others; everything measured."""
    transformers.utils.logging.disable_progress_bar()
    ids = torch.tensor([prompt])
    rehearse(arm, folder)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode(), MemoryTrace() as memory:
        written = written_bytes()
        start = time.perf_counter()
        model = loader(arm)(folder, Path(scratch))
        loaded = time.perf_counter()
        bytes_written, loaded_bytes = written_bytes() - written, memory.now()
        first = decode(model, ids, 1)
        first_done = time.perf_counter()
        generated = decode(model, ids, tokens)
        end = time.perf_counter()
        del first
    return Trial(
        arm=arm,
        load_seconds=loaded - start,
        first_token_seconds=first_done - loaded,
        token_seconds=(end - first_done) / tokens,
        bytes_written=bytes_written,
        peak_bytes=max(used for _, used in memory.samples),
        loaded_bytes=loaded_bytes,
        tokens=generated,
        trace=memory.samples,
    )


def rehearse(arm: str, folder: Path) -> None:
    """Load and run a model of the same class with few weights: imports and first calls are not to be measured."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.from_pretrained(folder, **small, num_key_value_heads=2, head_dim=8, vocab_size=64)
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as scratch:
        AutoModelForCausalLM.from_config(config).save_pretrained(made)
        decode(loader(arm)(Path(made), Path(scratch)), torch.tensor([[1, 2]]), 2)


def decode(model: Any, ids: Any, tokens: int) -> list[int]:
    """The next tokens, greedily."""
    done = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return [int(token) for token in done[0, ids.shape[1] :]]


def loader(arm: str) -> Callable[[Path, Path], Any]:
    return {"in memory": in_memory, "offload": offloaded, "accelerate": with_accelerate}[arm]


def in_memory(folder: Path, _scratch: Path | None = None) -> Any:
    """transformers' default, which maps safetensors files on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def offloaded(folder: Path, _scratch: Path | None = None) -> Any:
    from offload.integrations.transformers import from_pretrained

    return from_pretrained(folder)


def with_accelerate(folder: Path, scratch: Path) -> Any:
    """accelerate's disk offload, which copies the weights to its own folder; it wants one module elsewhere."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    leaves = {name: module for name, module in model.named_modules() if not [*module.children()]}
    sizes = {name: sum(parameter.numel() for parameter in module.parameters()) for name, module in leaves.items()}
    smallest = min(filter(None, sizes.values()))
    device_map = {name: "disk" if size > smallest else "cpu" for name, size in sizes.items()}
    return load_checkpoint_and_dispatch(model, str(folder), device_map=device_map, offload_folder=str(scratch)).eval()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("arm", choices=ARMS)
    options.add_argument("folder", type=Path)
    options.add_argument("prompt", type=json.loads)
    options.add_argument("tokens", type=int)
    print(json.dumps(asdict(trial(**vars(options.parse_args())))))
