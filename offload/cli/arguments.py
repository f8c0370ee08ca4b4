"""What is typed on a command line, as what it means.

Always true:
- what can't be meant is told before anything is done, with the words that could be
"""

from __future__ import annotations

import argparse
import errno
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import MissingFileError
from offload.storage.regular import is_there

if TYPE_CHECKING:
    import torch

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_MOST = 2**31 - 1


def path(text: str) -> Path:
    """A path. An empty one would be the folder that one is in: a variable of a shell that is not set."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def existing(place: Path) -> Path:
    """The path of something that is there.

    Raises:
        MissingFileError: nothing is there.
        ReadError: the system does not tell.
    """
    if not is_there(place):
        raise MissingFileError(errno.ENOENT, "there is no such file or folder", str(place))
    return place


def prompt(text: str) -> str:
    """Text for a model."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("the prompt is not valid UTF-8") from error
    return text


def count(text: str) -> int:
    """A number of things, 1 or more."""
    if not text.isdecimal() or len(text) > len(str(_MOST)) or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 1 to {_MOST}")
    return int(text)


def dtype(text: str) -> torch.dtype:
    """A floating-point dtype."""
    from offload.storage.layout import dtype_named

    found = dtype_named(_SHORT_DTYPES.get(text, text.removeprefix("torch.")))
    if found is None or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating-point dtype: use bfloat16, float16, float32...")
    return found


def size(text: str) -> str:
    """A number of bytes."""
    from offload.memory import as_bytes

    try:
        as_bytes(text, 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size: use 500MB, 5GB, 4096...") from error
    return text


def device(text: str) -> torch.device:
    """A device that computes."""
    from offload.errors import DeviceError
    from offload.tensor.arguments import computing_device

    try:
        return computing_device(text)
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
