"""The peak anonymous memory of a block.

Always true:
- there is a sample before each call of this thread to the operating system, and one every two milliseconds from another
  thread: shorter peaks are missed
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from offload.memory import anonymous_bytes


class Peak:
    """`with Peak() as peak: ...`, then `peak.nbytes` above the level before; `peak.calls` to the operating system."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous_bytes()
        self.calls = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        sys.setprofile(self.look)
        return self

    def watch(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def look(self, _frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__module__", None) == "posix":
            self.calls += 1
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.done.set()
        self.thread.join()
        self.nbytes = max(self.most, anonymous_bytes()) - self.before
