"""The peak anonymous memory of a block, sampled in a thread.

Always true:
- one sample every two milliseconds: shorter peaks are missed
"""

from __future__ import annotations

import threading

from offload.memory import anonymous_bytes


class Peak:
    """`with Peak() as peak: ...`, then `peak.nbytes` above the level before."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.nbytes = max(self.most, anonymous_bytes()) - self.before
