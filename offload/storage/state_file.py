"""Small files of JSON: ours, which say what a folder holds, and those of others.

Always true:
- a file of ours says of which kind it is, and in which version; it is replaced whole
- no more is read than the kind allows, nothing is named twice in what is read, and each error is one of ours, with
  the path
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import CorruptFileError, MissingFileError, OffloadError
from offload.storage.reasons import short
from offload.storage.regular import read_regular
from offload.storage.replacing import put_file

MOST_JSON = 64 << 20  # bytes; the index of a checkpoint of 100,000 values takes some 10
MOST_NESTED = 1 << 30  # bytes, where beside tensors there may be lists of numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of file of ours.

    Attributes:
        what: it is, for errors: "the manifest of a cache".
        stamp: what each one says, beside what it is about; the version of the format is the one number in it.
        missing: what to say where there is none.
        foreign, later: the errors to raise for what is no such file, and for one of another version.
        most: bytes that are read.
        indent: of what is written; None for one line.
    """

    what: str
    stamp: Mapping[str, Any]
    missing: str = ""
    foreign: type[OffloadError] = CorruptFileError
    later: type[OffloadError] = CorruptFileError
    most: int = MOST_JSON
    indent: int | None = None


def write_state(path: Path, kind: Kind, content: Mapping[str, Any]) -> None:
    """Put a file of ours in place, whole.

    Raises:
        WriteError
    """
    put_file(path, (json.dumps({**kind.stamp, **content}, indent=kind.indent) + "\n").encode())


def read_state(path: Path, kind: Kind) -> dict[str, Any]:
    """What a file of ours says.

    Raises:
        MissingFileError: there is none.
        CorruptFileError: it is no regular file, or too large.
        ReadError: it can't be read now.
        OffloadError: as `kind` has it, for what is no such file, and for one of another version.
    """
    try:
        found = parse_json(read_regular(path, kind.most))
    except MissingFileError as error:
        raise MissingFileError(error.errno, kind.missing or error.strerror, str(path)) from error
    except CorruptFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise kind.foreign(f"{path} can't be read as {kind.what} ({short(error)})") from error
    _check(path, kind, found, kind.stamp)
    return dict(found)


def state_if_ours(path: Path, kind: Kind) -> dict[str, Any] | None:
    """As `read_state`; None if there is no such file, or one of another kind or version.

    Raises:
        ReadError: it can't be read now.
    """
    try:
        return read_state(path, kind)
    except (MissingFileError, CorruptFileError, kind.foreign, kind.later):
        return None


def _check(path: Path, kind: Kind, found: Any, stamp: Mapping[str, Any]) -> None:
    for key, known in stamp.items():
        there = found.get(key) if isinstance(found, dict) else None
        if isinstance(known, Mapping):
            _check(path, kind, there, known)
        elif there is None or (there != known and not isinstance(known, int)):
            raise kind.foreign(f"{path} is not {kind.what}: it is left as it is. Take another folder.")
        elif there != known:
            raise kind.later(
                f"{path} is of version {short(repr(there))}, and this release of offload reads version {known}: "
                "open it with the release of offload that wrote it"
            )


def read_json(path: Path, what: str, *, most: int = MOST_JSON) -> Any:
    """What is in a small file of JSON.

    Args:
        what: what the file is to be, for errors: "the manifest of a cache".
        most: bytes that are read of it.

    Raises:
        MissingFileError: there is no file at `path`.
        CorruptFileError: it is no regular file, larger than `most`, no JSON, or names something twice.
        ReadError: it can't be read now.
    """
    data = read_regular(path, most)
    try:
        return parse_json(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} can't be read as {what} ({short(error)})") from error


def parse_json(data: str | bytes) -> Any:
    """What is in JSON; UTF-8 if it is bytes.

    Raises:
        ValueError: it is no JSON, or names something twice. Also `RecursionError`, if it is nested too deeply.
    """
    text = data if isinstance(data, str) else data.decode()
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it names {short(twice)!r} twice")
    return unique
