"""Every architecture of the installed transformers, as a tiny model, from disk: `python -m bench.architectures`.

Always true:
- each one is a row: a failure, crash or timeout affects only its own row
- a model on disk is compared with transformers' own `from_pretrained` of the same checkpoint, bit for bit
- a failure counts as not ours only if the plain model fails, too
- bytes written while loading are counted by the kernel, including files that are gone again
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

import offload
from bench import equality
from bench.probes import probes
from bench.process import written_bytes
from bench.tiny import config_for, tiny_configs
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
GENERATING = "generating"  # the kind of all other classes that have `generate`
KINDS = (*MAPPINGS, GENERATING)
EQUAL, VALUES, ABSENT, DIFFERS = "yes", "values", "not tried", "NO"
_MOST_PARAMETERS = 48_000_000
_SECONDS = 90  # per architecture
_PROBING = 10  # seconds for finding its inputs, per size
_WORKERS = 2
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Row:
    """The result for an architecture.

    Attributes:
        equal: EQUAL; VALUES, if no inputs for the plain model's forward pass are known, so that only values and written
            files were compared; ABSENT, if there is no plain model; DIFFERS.
        note: the inputs, or what is missing, or what differs.
        recipes: values of the model on disk that are computed from others; None if it was not loaded.
        written: bytes written while loading it.
    """

    kind: str
    name: str
    model_class: str
    equal: str
    note: str
    recipes: int | None = None
    written: int | None = None


@dataclass
class Subject:
    """A tiny plain model in a checkpoint, with inputs for it; None if none are known."""

    model_class: Any
    folder: Path
    probe: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)


class NoPlainModel(Exception):
    """transformers itself can't build, save or load it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a model on disk differs from the plain one, else 0."""
    chosen = _options().parse_args(arguments)
    kinds = list(KINDS) if chosen.kind == "all" else [chosen.kind]
    todo = [(kind, name) for kind in kinds for name in names(kind) if not chosen.only or name in chosen.only]
    rows = examined_apart(todo, chosen.workers)
    text = "\n".join(report(rows))
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n", encoding="utf-8")
    return int(any(row.equal == DIFFERS for row in rows))


@cache
def names(kind: str) -> dict[str, str]:
    """The class names by model type; by themselves where a model type has several."""
    if kind == GENERATING:
        others = {name for mapping in MAPPINGS for name in names(mapping).values()}
        return {name: name for name in generating() if name not in others}
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, MAPPINGS[kind])
    return {name: value if isinstance(value, str) else value[0] for name, value in found.items()}


def generating() -> list[str]:
    """All model classes that have `generate`."""
    import transformers

    public = [name for name in dir(transformers) if name[0].isupper()]
    kinds = {name: getattr(transformers, name, None) for name in public}
    models = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    return [name for name, kind in models.items() if hasattr(kind, "generate") and getattr(kind, "config_class", None)]


# One architecture


def examined(kind: str, name: str) -> Row:
    """The row of an architecture."""
    model_class = names(kind)[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subject = prepared(name, model_class, Path(folder))
            plain = _loaded(subject)
        except NoPlainModel as error:
            return Row(kind, name, model_class, ABSENT, str(error))
        except Exception as error:  # a transformers module that needs a missing package
            return Row(kind, name, model_class, ABSENT, reason(error))
        notes: dict[str, int] = {}
        try:
            model, notes = _from_disk(subject)
            found = equality.first(equality.differences(plain, model, subject.folder, subject.probe, subject.notes))
        except Exception as error:
            return Row(kind, name, model_class, DIFFERS, reason(error), **notes)
    if found:
        return Row(kind, name, model_class, DIFFERS, found, **notes)
    return Row(kind, name, model_class, EQUAL if subject.probe else VALUES, "; ".join(subject.notes), **notes)


def _from_disk(subject: Subject) -> tuple[Any, dict[str, int]]:
    """The model on disk, and the fields of its row about loading."""
    before = written_bytes()
    model = offload.from_pretrained(subject.folder, model_class=subject.model_class, exact=True)
    written = written_bytes() - before
    values = {id(value): value for value in (*model.parameters(), *model.buffers()) if is_offloaded(value)}
    recipes = sum(handle_of(value).composed is not None for value in values.values())
    return model, {"recipes": recipes, "written": written}


def prepared(name: str, model_class: str, folder: Path) -> Subject:
    """A checkpoint of a tiny model with seeded weights.

    Raises:
        NoPlainModel: with the reason for the smallest one tried.
    """
    wanted = _class_called(name, model_class)
    tried: list[str] = []
    spare: tuple[Any, str, str] | None = None
    own = wanted.config_class if name == model_class else None
    for config, how in _configs(tiny_configs(own.model_type if own else name, own), wanted, tried):
        try:
            model = _seeded(wanted, config)
        except Exception as error:
            tried.append(f"not built: {reason(error)}")
            continue
        probe, why = _probe(model)
        if probe is not None:
            notes = [", ".join(probe)] + ([how] if how != "tiny" else [])
            return Subject(wanted, _saved(model, folder), probe, notes)
        spare = spare or (model, how, why)
    if spare is None:
        raise NoPlainModel(tried[0] if tried else "no configuration")
    return Subject(wanted, _saved(spare[0], folder), None, [f"forward not run: {spare[2]}"])


def _class_called(name: str, model_class: str) -> Any:
    if name == model_class:
        import transformers

        return getattr(transformers, name)
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    return MODEL_MAPPING._load_attr_from_module(name, model_class)  # some are not public names of transformers


def _configs(made: Iterator[tuple[str, Any]], wanted: Any, tried: list[str]) -> Iterator[tuple[Any, str]]:
    """Configurations of models with few enough parameters."""
    while True:
        try:
            how, full = next(made)
        except StopIteration:
            return
        except Exception as error:  # configuration classes can raise anything
            tried.append(f"no configuration: {reason(error)}")
            return
        config = config_for(wanted, full)
        try:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in wanted(config).parameters())
        except Exception as error:  # reported, or raised again, when it is built
            count = 0 if how == "tiny" else _MOST_PARAMETERS + 1
            tried.append(f"not built: {reason(error)}")
        if count <= _MOST_PARAMETERS:
            yield config, how
        else:
            tried.append(f"{how}: {count / 1e6:.0f} million parameters")


@torch.no_grad()
def _seeded(model_class: Any, config: Any) -> Any:
    """As initialized by its class, then perturbed: no weight is all zeros or ones."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def _probe(model: Any) -> tuple[dict[str, Any] | None, str]:
    """The first inputs that it accepts; or None, and why the first ones failed."""
    why: list[str] = []
    until = time.monotonic() + _PROBING
    for probe in probes(model):
        if time.monotonic() > until:
            break
        try:
            list(equality.outputs(model, probe))
        except Exception as error:
            why.append(f"{', '.join(probe)}: {reason(error)}")
        else:
            return probe, ""
    return None, why[0] if why else "no inputs known"


def _saved(model: Any, folder: Path) -> Path:
    try:
        model.save_pretrained(folder)
    except Exception as error:
        raise NoPlainModel(f"not saved: {reason(error)}") from error
    for path in folder.glob("*.safetensors"):
        align(path)
    return folder


def align(path: Path) -> None:
    """Have the values of a file begin at multiples of 64 bytes, but for small ones whose size is none: they come last.

    Experts that are stored apart are multiplied where they lie, and plain transformers joins them in memory that is
    aligned: some processors' kernels have other last bits for float32 that is not.
    """
    stored = path.read_bytes()
    data = 8 + int.from_bytes(stored[:8], "little")
    entries = json.loads(stored[8:data])
    made = {"__metadata__": entries.pop("__metadata__", {})}
    values, end = [], 0
    for name, entry in sorted(entries.items(), key=lambda one: -_step(*one[1]["data_offsets"])):
        first, last = entry["data_offsets"]
        made[name] = {**entry, "data_offsets": [end, end := end + last - first]}
        values.append(stored[data + first : data + last])
    header = json.dumps(made).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    path.write_bytes(b"".join([len(header).to_bytes(8, "little"), header, *values]))


def _step(first: int, last: int) -> int:
    """The alignment that a value leaves to the next one."""
    return min((last - first) & (first - last), _ALIGNMENT) or _ALIGNMENT


def _loaded(subject: Subject) -> Any:
    try:
        return subject.model_class.from_pretrained(subject.folder).eval()
    except Exception as error:
        raise NoPlainModel(f"not loaded: {reason(error)}") from error


def reason(error: BaseException, most: int = 160) -> str:
    """An error in one line, without local package paths."""
    text = re.sub(r"/\S+/site-packages/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:most]}".replace("|", "/")


# Many, in separate processes


def examined_apart(todo: Sequence[tuple[str, str]], workers: int = _WORKERS) -> list[Row]:
    """The rows of all, in order."""
    waiting: SimpleQueue[tuple[int, tuple[str, str]]] = SimpleQueue()
    for at, one in enumerate(todo):
        waiting.put((at, one))
    rows: dict[int, Row] = {}
    with ThreadPoolExecutor(workers) as threads:
        for done in [threads.submit(_overseen, waiting, rows) for _ in range(workers)]:
            done.result()
    return [rows[at] for at in sorted(rows)]


def _overseen(waiting: SimpleQueue[tuple[int, tuple[str, str]]], rows: dict[int, Row]) -> None:
    """Rows from a worker; one that dies or times out is replaced."""
    worker = None
    while True:
        try:
            at, (kind, name) = waiting.get_nowait()
        except Empty:
            break
        worker = worker if worker and worker.asked < 60 else _Worker(worker)
        rows[at] = worker.row(kind, name)
        print(json.dumps(vars(rows[at])), file=sys.stderr, flush=True)
        if worker.is_gone:
            worker = None
    if worker:
        worker.end()


class _Worker:
    """A process that produces rows."""

    def __init__(self, before: _Worker | None = None) -> None:
        if before:
            before.end()
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.asked = 0
        self.is_gone = False

    def row(self, kind: str, name: str) -> Row:
        self.asked += 1
        try:
            self._pipe.send((kind, name))
            if self._pipe.poll(_SECONDS):
                row: Row = self._pipe.recv()
                return row
            why = f"it took more than {_SECONDS} s"
        except (EOFError, OSError):
            self._process.join()
            why = f"the process died ({self._process.exitcode})"
        self.end()
        return Row(kind, name, names(kind)[name], DIFFERS, why)

    def end(self) -> None:
        self.is_gone = True
        self._process.kill()
        self._process.join()


def _work(pipe: Connection) -> None:
    _quiet()
    while True:
        pipe.send(examined(*pipe.recv()))


def _quiet() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


# The table


_LEGEND = f"""Each model is made tiny, with random weights, and saved. It is loaded by transformers alone and by
`offload.from_pretrained(..., exact=True)` with all of it on disk, and the two are compared bit for bit: names, shapes,
dtypes and values of the state dictionary, ties, the outputs of a forward pass with the inputs that the note names, four
greedy tokens where it generates, and the checkpoints that both write. Values begin at multiples of 64 bytes in the
checkpoint, as in memory: where they do not, some processors give other last bits in float32.

- {EQUAL}: all this is equal
- {VALUES}: what is said about values, ties and files is equal; the inputs of a forward pass are not known here
- {ABSENT}: transformers alone makes no such model here, for the reason in the note
- {DIFFERS}: the model on disk is not equal

"{GENERATING}" has the classes that have `generate`, and are in no other table.

Recipes are values that the checkpoint holds in another form: joined, cut, cast or laid out anew at each read.
Written are the bytes that loading the model wrote: values that are in no checkpoint, which its class makes.
"""


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: one table per kind, with counts."""
    import transformers

    yield "# Architectures of transformers, from disk"
    yield ""
    yield (
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__.split('+')[0]}, transformers "
        f"{transformers.__version__}, CPU, float32; `python -m bench.architectures`."
    )
    yield ""
    yield _LEGEND.strip()
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    for kind, some in kinds.items():
        if some:
            yield from ("", f"## {kind}", "", "| architecture | equal | recipes | written | note |")
            yield "| --- | --- | --- | --- | --- |"
            yield from map(_line, some)
    yield from ("", "## How many", "")
    for kind, some in kinds.items():
        if some:
            yield _counts(kind, some)


def _line(row: Row) -> str:
    recipes, written = ("" if number is None else number for number in (row.recipes, row.written))
    return f"| {row.name} ({row.model_class}) | {row.equal} | {recipes} | {written} | {row.note} |"


def _counts(kind: str, rows: Sequence[Row]) -> str:
    count = {equal: sum(row.equal == equal for row in rows) for equal in (EQUAL, VALUES, ABSENT, DIFFERS)}
    recipes, written = [row.recipes for row in rows], sum(bool(row.written) for row in rows)
    return (
        f"- {kind}: {count[EQUAL]} of {len(rows)} equal; {count[VALUES]} equal in values and files, without a forward "
        f"pass; {count[ABSENT]} without a plain model; {count[DIFFERS]} not equal; {sum(map(bool, recipes))} with "
        f"recipes; {written} written by loading"
    )


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench.architectures", description=__doc__.splitlines()[0])
    options.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    options.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some model types")
    options.add_argument("--out", type=Path, metavar="FILE.md", help="where the table goes too")
    options.add_argument("--workers", type=int, default=_WORKERS, help="processes at a time")
    return options


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
