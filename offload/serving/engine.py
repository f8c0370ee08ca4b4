"""Answers on their way through the model: each pass reads it once for all of them.

Every answer is a call of `generate` in a thread of its own, in lockstep with the others as batches are
(`offload.batches`): it begins at the next pass, and leaves when it is done. transformers' own server (5.23) is not
used: with continuous batching it takes temperature, top_p and sampling of its first request for all, ignores stop
strings and seeds, can't score a prompt, has no drafts, and stops for good after one failure in a pass; without it, it
answers one request after the other. Its models are loaded by a private method, and any client may unload them.

Always true:
- one thread computes, and no client makes it wait: what is told to one is only handed over
- an error ends the answer that met it, and no other
- answers in progress have room in memory for the keys and values of all their tokens
- a job that was accepted is told an `End`, whatever happens
- names and units of figures stay; counters only grow

The figures' format is that of https://prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from offload.batches.scheduler import Call, Scheduler
from offload.batches.stages import handles_of, models_of, stages_of
from offload.batches.states import Settings, ThreadState
from offload.budget import memory_summary
from offload.generation.answering import AnswerPart, End, Job
from offload.generation.bodies import Refused
from offload.memory import available_bytes
from offload.prefetch.engine import counts
from offload.prefetch.plan import Pool
from offload.system.background import Worker
from offload.transformers_api import kv_bytes_per_token

MOST = 64  # answers in flight by default
_SHARE = 0.25  # of available memory, for keys and values
_A_THREAD = 6 << 20  # memory per answer: its thread's stack, and what kernels allocate per thread
_PATIENCE = 20.0  # seconds that the last pass may take when the engine is closed
_log = logging.getLogger("offload.serving")


@dataclass
class Figures:
    """What was done since the engine was started."""

    answers: dict[str, int]  # that ended, by why: "stop", "length", "cancelled", "error"
    prompt_tokens: int = 0  # of the answers that were begun
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0  # in which there was something to do
    read: int = 0  # bytes from the disk in that time
    running: int = 0  # answers in progress
    waiting: int = 0  # jobs that have not begun


class ServingEngine:
    """Answers jobs, many at a time, in a thread of its own."""

    def __init__(
        self, model: Any, answer: Callable[[Job], str], *, in_flight: int | None = None, most_waiting: int = 256
    ) -> None:
        """`answer` gives an answer's pieces to its job, and returns why it ended; called in lockstep."""
        self.capacity = int(available_bytes() * _SHARE)  # for keys and values
        self.most_waiting = most_waiting
        self._answer = answer
        self._per_token = kv_bytes_per_token(model)
        self._most = in_flight or MOST
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by the number of the call
        self._figures = Figures({})
        self._begun = 0
        self._deadline: float | None = None  # after which answers are cut
        self._is_closed = False
        self._changed = threading.Condition()  # guards everything above
        models = models_of(model)
        self._stages = stages_of(models, None)
        self._handles = handles_of(models, self._stages)
        self._thread = Worker(self._run, "offload-engine")
        self._thread.begin()

    def size_of(self, job: Job) -> int:
        return _A_THREAD + self._per_token * (len(job.prompt.tokens) + job.prompt.most)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have jobs answered, all or none; raises `Refused` if there is no room for them, or the server is ending."""
        largest = max(map(self.size_of, jobs))
        if largest > self.capacity:
            message = f"prompt and answer need up to {largest:,} bytes of memory, and the server has {self.capacity:,}"
            raise Refused(f"{message}: ask for fewer tokens", code="context_length_exceeded")
        with self._changed:
            if self._is_closed or self._deadline is not None:
                raise Refused("the server is ending", 503, "server_error", "shutting_down")
            self._drop_cancelled()
            if len(self._waiting) + len(jobs) > self.most_waiting:
                message = f"{len(self._waiting)} answers are waiting already: try again later"
                raise Refused(message, 429, "rate_limit_error", "rate_limit_exceeded")
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def figures(self) -> Figures:
        with self._changed:
            self._drop_cancelled()
            answers = dict(self._figures.answers)
            return replace(self._figures, answers=answers, running=len(self._running), waiting=len(self._waiting))

    @property
    def is_well(self) -> bool:
        """Whether new jobs are accepted."""
        with self._changed:
            return self._thread.is_running and not self._is_closed and self._deadline is None

    def end(self, seconds: float) -> None:
        """Begin no more answers; those in progress are cut after so many seconds."""
        with self._changed:
            self._deadline = time.monotonic() + seconds
            left, self._waiting = [*self._waiting], deque()
            self._changed.notify_all()
        for job in left:
            self._tell_end(job, End(error=Refused("the server is ending", 503, "server_error", "shutting_down")))

    def close(self) -> None:
        """End every answer, and the thread."""
        self.end(0)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    # In its thread

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_closed)
                    if not self._waiting:
                        return
                try:
                    self._work(Scheduler(self._stages, self._handles))
                except Exception as error:
                    _log.exception("a pass failed")
                    with self._changed:
                        failed, self._running = [*self._running.values()], {}
                        for job in failed:
                            self._finish(job, "error", error)

    def _work(self, scheduler: Scheduler) -> None:
        state, settings = ThreadState(), Settings.now()
        begun, read, sweeps = time.monotonic(), counts().bytes_read, -1  # the first pass begins without a sweep's end
        with scheduler.hooked():
            while True:
                while (job := self._admitted()) is not None:
                    self._look_at(self._begin(scheduler, job, state, settings))
                if not scheduler.count:
                    return
                self._cut_late()
                self._look_at(scheduler.go_on())
                now, read_now = time.monotonic(), counts().bytes_read
                with self._changed:
                    self._figures.passes += scheduler.sweeps - sweeps
                    self._figures.seconds += now - begun
                    self._figures.read += read_now - read
                begun, read, sweeps = now, read_now, scheduler.sweeps

    def _admitted(self) -> Job | None:
        with self._changed:
            self._drop_cancelled()
            if not self._waiting or len(self._running) >= self._most:
                return None
            used = sum(map(self.size_of, self._running.values()))
            if used + self.size_of(self._waiting[0]) > self.capacity:
                return None
            job = self._waiting.popleft()
            self._begun += 1
            self._running[self._begun] = job
            self._figures.prompt_tokens += len(job.prompt.tokens)
            return job

    def _drop_cancelled(self) -> None:
        """Forget jobs that wait, and that nobody waits for. Called with the lock."""
        for job in [job for job in self._waiting if job.is_cancelled]:
            self._waiting.remove(job)
            self._finish(job, "cancelled")

    def _begin(self, scheduler: Scheduler, job: Job, state: ThreadState, settings: Settings) -> Call:
        is_alone = not scheduler.count and not self._waiting
        return scheduler.begin(self._begun, partial(self._answer, job), state, settings, alone=is_alone)

    def _look_at(self, call: Call) -> None:
        if not call.has_ended:
            return
        error, call.error = call.error, None  # its frames refer to the call
        with self._changed:
            job = self._running.pop(call.number)
            if error is None:
                self._finish(job, str(call.result))
            else:
                self._finish(job, "error", error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _finish(self, job: Job, reason: str, error: Exception | None = None) -> None:
        kind = "cancelled" if job.is_cancelled else reason
        self._figures.answers[kind] = self._figures.answers.get(kind, 0) + 1
        self._tell_end(job, End(reason, error))

    def _tell_end(self, job: Job, end: End) -> None:
        try:
            job.tell(end)
        except Exception:
            _log.exception("an answer could not be handed over")

    def _cut_late(self) -> None:
        with self._changed:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                for job in self._running.values():
                    job.is_cut = True

    def count_tokens(self, piece: AnswerPart) -> None:
        if piece.tokens:
            with self._changed:
                self._figures.tokens += piece.tokens


def exposition(engine: ServingEngine) -> str:
    """The figures in the form that Prometheus reads; rates and shares follow from them there."""
    done = engine.figures()
    figures: dict[str, float] = {
        "prompt_tokens_total": done.prompt_tokens,
        "tokens_total": done.tokens,
        "passes_total": done.passes,
        "read_bytes_total": done.read,
        "busy_seconds_total": done.seconds,
        "running": done.running,
        "waiting": done.waiting,
        "budget_bytes": sum(pool.capacity for pool in Pool.all() if pool.values()),
        "resident_bytes": memory_summary().resident,
    }
    lines = ["# TYPE offload_requests_total counter"]
    lines += [f'offload_requests_total{{reason="{reason}"}} {count}' for reason, count in sorted(done.answers.items())]
    for name, value in figures.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE offload_{name} {kind}", f"offload_{name} {value:.17g}"]
    return "\n".join(lines) + "\n"
