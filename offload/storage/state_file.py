"""Small JSON files: ours, which describe a folder, and those of others.

Always true:
- a file of ours states its kind and version; it is replaced as a whole
- no more is read than the kind allows, duplicate keys are refused, and every error is one of ours, with the path
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offload.annotations import Json
from offload.errors import CorruptFileError, MissingFileError, OffloadError
from offload.storage.replacing import put_file
from offload.system.reasons import short
from offload.system.regular import read_regular

MOST_JSON = 64 << 20  # bytes; the index of a checkpoint of 100,000 values takes about 10 MB
MOST_NESTED = 1 << 30  # bytes; for files that may contain lists of numbers beside tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of file of ours.

    Attributes:
        what: its description, for errors: "the manifest of a cache".
        stamp: the fixed fields of every file of this kind; the one number among them is the format version.
        missing: the message if there is none.
        foreign, later: the errors to raise for a file of another kind, and for one of another version.
        most: how many bytes are read at most.
        indent: the indentation when it is written; None for a single line.
    """

    what: str
    stamp: Mapping[str, Json]
    missing: str = ""
    foreign: type[OffloadError] = CorruptFileError
    later: type[OffloadError] = CorruptFileError
    most: int = MOST_JSON
    indent: int | None = None


def write_state(path: Path, kind: Kind, content: Mapping[str, Json]) -> None:
    """Put a file of ours in place as a whole. Raises `WriteError`."""
    put_file(path, (json.dumps({**kind.stamp, **content}, indent=kind.indent) + "\n").encode())


def read_state(path: Path, kind: Kind) -> dict[str, Json]:
    """The contents of a file of ours.

    Raises `MissingFileError`, `ReadError`; `CorruptFileError` if it is not a regular file, or too large; and the kind's
    own errors for a foreign file or another version.
    """
    try:
        state = parse_json(read_regular(path, kind.most))
    except MissingFileError as error:
        raise MissingFileError(error.errno, kind.missing or error.strerror, str(path)) from error
    except CorruptFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise kind.foreign(f"{path} can't be read as {kind.what} ({short(error)})") from error
    _check(path, kind, state, kind.stamp)
    return dict(state)


def state_if_ours(path: Path, kind: Kind) -> dict[str, Json] | None:
    """Like `read_state`; None if there is no such file, or one of another kind or version.

    Raises `ReadError` if it can't be read at the moment.
    """
    try:
        return read_state(path, kind)
    except (MissingFileError, CorruptFileError, kind.foreign, kind.later):
        return None


def _check(path: Path, kind: Kind, state: Json, stamp: Mapping[str, Json]) -> None:
    for key, known in stamp.items():
        value = state.get(key) if isinstance(state, dict) else None
        if isinstance(known, Mapping):
            _check(path, kind, value, known)
        elif value is None or (value != known and not isinstance(known, int)):
            raise kind.foreign(f"{path} is not {kind.what}: it is left as it is. Take another folder.")
        elif value != known:
            raise kind.later(
                f"{path} is of version {short(repr(value))}, and this release of offload reads version {known}: "
                "open it with the release of offload that wrote it"
            )


def read_json(path: Path, what: str, *, most: int = MOST_JSON) -> Json:
    """The contents of a small JSON file; `what` it should be is for errors: "the manifest of a cache".

    Raises `MissingFileError`, `ReadError`; `CorruptFileError` if it is not a regular file, has more than `most` bytes,
    is not JSON, or has duplicate keys.
    """
    data = read_regular(path, most)
    try:
        return parse_json(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} can't be read as {what} ({short(error)})") from error


def parse_json(data: str | bytes) -> Json:
    """Parse JSON; bytes are decoded as UTF-8.

    Raises:
        ValueError: it is not JSON, or has duplicate keys. Also `RecursionError`, if it is nested too deeply.
    """
    text = data if isinstance(data, str) else data.decode()
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it names {short(twice)!r} twice")
    return unique
