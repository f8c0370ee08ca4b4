"""What the kernel reports about this process: bytes read and written, and memory over time.

Always true:
- memory means anonymous memory (RssAnon), which the kernel can't drop
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from offload.memory import anonymous_bytes


def read_bytes() -> int:
    """Bytes read from disk on behalf of this process, including through mappings and read-ahead."""
    return _counted("read_bytes")


def written_bytes() -> int:
    """Bytes written to disk on behalf of this process, including through mappings."""
    return _counted("write_bytes")


def _counted(name: str) -> int:
    for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines():
        key, count = line.split(":")
        if key == name:
            return int(count)
    raise OSError(f"this system does not tell {name}")


class MemoryTrace:
    """Anonymous memory over time, sampled in a thread."""

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

    @property
    def peak(self) -> int:
        return max(used for _, used in self.samples)

    def now(self) -> int:
        """Bytes above the start."""
        return max(anonymous_bytes() - self._floor, 0)

    def _sample(self) -> None:
        while not self._done.wait(self._period):
            self.samples.append((time.perf_counter() - self._start, self.now()))
