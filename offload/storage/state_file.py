"""Small files of JSON: ours, which say what a folder holds, and those of others.

Always true:
- no more is read than the reader allows, and each error is one of ours, with the path
- nothing is named twice in what is read
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from offload.errors import CorruptFileError
from offload.storage.reasons import short
from offload.storage.regular import read_regular

MOST_JSON = 64 << 20  # bytes; the index of a checkpoint of 100,000 values takes some 10


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
