"""Tokens of `offload`, or of llama.cpp, in a fresh process that has so much memory for all that it needs.

Always true:
- all that the process has counts: its libraries' data, keys and values, and the cached pages of the file
- after a prompt of four tokens each token is another one, the same ones for all: a mixture meets new experts
- what takes longer than its time ends early, after one token at the least: first some tokens that are not measured,
  then those that are
- llama.cpp runs from the package node-llama-cpp, whose folder is named by the variable NODE_LLAMA_CPP; with its
  weights repacked in memory, as it does by itself, or as stored

`python -m bench.tokens_apart FILE WARM_UP TOKENS SECONDS` prints the seconds and the bytes read of each token.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import psutil
import torch

import offload
from bench.decode import Decoder
from bench.memory_cap import Group, memory_cap
from bench.page_cache import make_cold
from bench.peers import OURS
from bench.process import read_bytes
from bench.scale import Timed

LLAMA_CPP, AS_STORED = "llama.cpp", "llama.cpp, not repacked"
PROMPT = (1, 504, 314, 253)
_OTHERS = 2 << 30  # bytes that stay for the rest of the machine, without a limit
_LONGEST = 300.0  # seconds, after which a process is ended


@dataclass(frozen=True)
class TokensTrial:
    """Medians per token, and the highest anonymous memory; seconds and bytes."""

    seconds: float
    bytes_read: float
    peak_bytes: int
    tokens: int


def trial(arm: str, path: Path, limit: int | None, timed: Timed) -> TokensTrial:
    """Decode in a process with so many bytes of memory, and a cold file; without a limit the file stays as it is.

    Raises:
        OSError: no memory cgroup can be made.
        RuntimeError: the process was killed, failed, or took too long.
    """
    if limit is not None:
        make_cold([path] if path.is_file() else [*path.glob("*.safetensors")])
    with memory_cap(limit or psutil.virtual_memory().total - _OTHERS) as group, subprocess.Popen(
        command(arm, path, timed),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", preexec_fn=group.join,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **(_as_stored() if arm == AS_STORED else {})},
    ) as process:  # fmt: skip
        with _Peak(group) as peak:
            try:
                printed, said = process.communicate(timeout=_LONGEST)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise RuntimeError(f"it made no token in {_LONGEST:.0f} s") from None
        _require_end(process.returncode, said, group)
    found = json.loads(printed.splitlines()[-1])
    return TokensTrial(median(one for one, _ in found), median(one for _, one in found), peak.bytes, len(found))


def command(arm: str, path: Path, timed: Timed) -> list[str | Path]:
    """A command that prints what each token took."""
    numbers = map(str, (timed.warm_up, timed.tokens, timed.seconds))
    if arm == OURS:
        return [sys.executable, "-X", "faulthandler", "-m", "bench.tokens_apart", path, *numbers]
    program = Path(__file__).with_name("llama_cpp.mjs")
    return ["node", program, os.environ["NODE_LLAMA_CPP"], path.resolve(), *numbers, str(torch.get_num_threads())]


@cache
def _as_stored() -> dict[str, str]:
    library = Path(tempfile.mkdtemp(), "as_stored.so")
    source = Path(__file__).with_name("llama_cpp_as_stored.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    atexit.register(shutil.rmtree, library.parent)
    return {"LD_PRELOAD": str(library)}


def absent() -> dict[str, str]:
    """Why llama.cpp can't run."""
    if "NODE_LLAMA_CPP" in os.environ:
        return {}
    return dict.fromkeys((LLAMA_CPP, AS_STORED), "node-llama-cpp is not installed: NODE_LLAMA_CPP names no folder")


def _require_end(code: int, said: str, group: Group) -> None:
    if code < 0:
        by = signal.Signals(-code).name
        raise RuntimeError(
            "it was killed, for want of memory" if group.kills() else f"it ended by {by}: {_last_line(said)}"
        )
    if code:
        raise RuntimeError(f"it ended with {code}: {_last_line(said)}")


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or [""])[-1]


class _Peak:
    """The highest anonymous memory of a group, looked at by a thread."""

    def __init__(self, group: Group) -> None:
        self.bytes = 0
        self._group = group
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self.bytes = max(self.bytes, self._group.facts()["total_rss"])


def main() -> None:
    """Decode a model in bfloat16."""
    path, warm_up, tokens, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    decoder = Decoder(offload.from_pretrained(path, dtype=torch.bfloat16), PROMPT)
    last = 0

    def decode(count: int) -> list[tuple[float, int]]:
        nonlocal last
        done: list[tuple[float, int]] = []
        end = perf_counter() + limit
        while len(done) < count and (not done or perf_counter() < end):
            last += 1
            decoder.tokens.append(last * 7919 % 40_000)
            before = read_bytes()
            done.append((decoder.step(), read_bytes() - before))
        return done

    decode(warm_up)
    print(json.dumps(decode(tokens)))


if __name__ == "__main__":
    main()
