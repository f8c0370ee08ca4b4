"""Parsing command-line arguments.

Always true:
- an invalid value is reported before anything is done, with the valid ones
"""

from __future__ import annotations

import argparse
import errno
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import MissingFileError
from offload.system.regular import is_there

if TYPE_CHECKING:
    import torch

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_HOTTEST = 100


def path(text: str) -> Path:
    """A path. An empty one, which would mean the current folder, is usually an unset shell variable."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def words(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!a} is not valid UTF-8") from error
    return text


def existing(place: Path) -> Path:
    """A path that must exist; raises `MissingFileError`, or `ReadError` if the system does not tell."""
    if not is_there(place):
        raise MissingFileError(errno.ENOENT, "there is no such file or folder", str(place))
    return place


def _whole(text: str, least: int, most: int, what: str = "a") -> int:
    if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what} number from {least} to {most}")
    return int(text)


def count(text: str) -> int:
    return _whole(text, 1, 2**31 - 1)


def number(text: str) -> float:
    """A temperature."""
    try:
        if 0 <= (value := float(text)) <= _HOTTEST:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 to {_HOTTEST}")


def share(text: str) -> float:
    if (value := number(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 to 1")
    return value


def seed(text: str) -> int:
    return _whole(text, 0, 10**18 - 1, "a seed: a")


def port(text: str) -> int:
    """A port to listen at; 0 for a free one."""
    return _whole(text, 0, 65535, "a port: a")


def dtype(text: str) -> torch.dtype:
    """A floating-point dtype."""
    from offload.storage.layout import dtype_named

    chosen = dtype_named(_SHORT_DTYPES.get(text, text.removeprefix("torch.")))
    if chosen is None or not chosen.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating-point dtype: use bfloat16, float16, float32...")
    return chosen


def size(text: str) -> str:
    """A number of bytes."""
    from offload.memory import as_bytes

    try:
        as_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size: use 500MB, 5GB, 4096...") from error
    return text


def device(text: str) -> torch.device:
    """A device that ops can run on."""
    from offload.errors import DeviceError
    from offload.tensor.arguments import computing_device

    try:
        return computing_device(text)
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
