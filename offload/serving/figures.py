"""What a server does, in Prometheus' text form.

Always true:
- names and units stay; counters only grow

The format is that of https://prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

from collections.abc import Iterator

from offload.budget import memory_summary
from offload.memory import anonymous_bytes
from offload.prefetch.plan import Pool
from offload.serving.engine import Engine


def exposition(engine: Engine) -> str:
    return "\n".join(_lines(engine)) + "\n"


def _lines(engine: Engine) -> Iterator[str]:
    done, memory = engine.figures(), memory_summary()
    rate = done.read / done.seconds if done.seconds else 0
    budget = sum(pool.capacity for pool in Pool.all() if pool.values())
    yield "# HELP offload_requests_total answers that ended, by why"
    yield "# TYPE offload_requests_total counter"
    for reason, count in sorted(done.answers.items()):
        yield f'offload_requests_total{{reason="{reason}"}} {count}'
    figures: list[tuple[str, str, float]] = [
        ("prompt_tokens_total", "tokens of prompts", done.prompt_tokens),
        ("tokens_total", "tokens that were generated", done.tokens),
        ("passes_total", "passes through the model", done.passes),
        ("read_bytes_total", "bytes of the model that were read from the disk", done.read),
        ("busy_seconds_total", "seconds in which there was something to do", done.seconds),
        ("tokens_per_pass", "tokens that were generated per pass", done.tokens / max(done.passes, 1)),
        ("read_bytes_per_token", "bytes that were read per generated token", done.read / max(done.tokens, 1)),
        ("read_bytes_per_second", "bytes that were read per busy second", rate),
        ("running", "answers in progress", done.running),
        ("waiting", "answers that wait for room", done.waiting),
        ("waiting_most", "answers that may wait", engine.most_waiting),
        ("budget_bytes", "of the model that may stay in memory", budget),
        ("resident_bytes", "of the model that are in memory", memory.resident),
        ("anonymous_bytes", "of memory that are not of files", anonymous_bytes()),
        ("cache_capacity_bytes", "for keys and values", engine.capacity),
    ]
    for name, about, value in figures:
        yield f"# HELP offload_{name} {about}"
        yield f"# TYPE offload_{name} {'counter' if name.endswith('_total') else 'gauge'}"
        yield f"offload_{name} {value:.17g}"
