"""A token of models that people run, with all memory and with less, beside llama.cpp on the same values.

Always true:
- a file has the true shapes and kinds, and random blocks; SmolLM2 is real
- one model at a time is on the disk, and none for which there is no room
- a limit that a file fits in twice is not tried: nothing would differ from all memory
- both read the same file; gpt-oss and Gemma are read as they are published here, and from a GGUF file of the same size
  there
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.gguf_models import GEMMA_E2B, GPT_OSS, Shape, nbytes_of, write_gguf
from bench.models import gemma, smollm2
from bench.packed import gpt_oss
from bench.page_cache import files_in, warm
from bench.peers import OURS
from bench.rounds import Figure, in_turn
from bench.scale import Scale
from bench.tokens_apart import AS_STORED, LLAMA_CPP, TokensTrial, absent, trial

_MARGIN = 2 << 30  # bytes that stay free on the disk
_PUBLISHED = {GPT_OSS.name: gpt_oss, GEMMA_E2B.name: gemma}


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Seconds and bytes per token, and the highest anonymous memory."""
    found = _of_model("SmolLM2 135M, Q4_1", dict.fromkeys((OURS, LLAMA_CPP), smollm2()), (None,), scale)
    for shape in scale.named:
        name = f"{shape.name}, {shape.mixture}"
        try:
            with _made(shape, scratch) as files:
                found += _of_model(name, files, scale.memory, scale)
        except OSError as error:
            found.append(Figure(f"named, {name}", "", {}, [], "", {OURS: str(error)}))
    return found


@contextmanager
def _made(shape: Shape, scratch: Path) -> Iterator[dict[str, Path]]:
    """The file that each arm reads."""
    published = _PUBLISHED.get(shape.name)
    needed = nbytes_of(shape) * (2 if published else 1) + _MARGIN
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise OSError(f"{needed / 1e9:.0f} GB are needed on the disk, and {free / 1e9:.0f} are free")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        file = write_gguf(Path(folder) / f"{shape.mixture}.gguf", shape)
        yield {OURS: published(Path(folder) / "published") if published else file, LLAMA_CPP: file}


def _of_model(name: str, files: dict[str, Path], memory: tuple[int | None, ...], scale: Scale) -> list[Figure]:
    size = files[LLAMA_CPP].stat().st_size
    limits = [limit for limit in memory if limit is None or limit < 2 * size]
    return [figure for limit in limits for figure in _figures(name, files, limit, scale)]


def _figures(name: str, files: dict[str, Path], limit: int | None, scale: Scale) -> list[Figure]:
    if limit is not None and limit < files[LLAMA_CPP].stat().st_size:
        files = {**files, AS_STORED: files[LLAMA_CPP]}
    arms = {arm: partial(_warmed, arm, path, limit, scale) for arm, path in files.items()}
    done = in_turn(arms, scale.rounds, absent())
    case = f"named, {name}, {'all memory' if limit is None else f'{limit >> 30} GiB'}"
    facts = {arm: {"tokens": min(one.tokens for one in results)} for arm, results in done.results.items()}
    return [
        Figure(f"{case}: a token", "s", done.values(lambda one: one.seconds), [], "", done.missing, facts),
        Figure(f"{case}: bytes read, a token", "B", done.values(lambda one: one.bytes_read), [], "", done.missing),
        Figure(f"{case}: peak anonymous memory", "B", done.values(lambda one: one.peak_bytes), [], "", done.missing),
    ]


def _warmed(arm: str, path: Path, limit: int | None, scale: Scale) -> TokensTrial:
    if limit is None:
        warm([path] if path.is_file() else files_in(path))
    return trial(arm, path, limit, scale.named_tokens)
