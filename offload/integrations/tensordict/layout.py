"""The folders of `TensorDict.memmap`.

Always true:
- a key names a file, or folder, right below that of its TensorDict, whatever characters it has

Source of the format: what tensordict 0.15 writes, and what it reads. A TensorDict is a folder: `<key>.memmap` holds the
elements of a leaf in row-major order and nothing else, a folder called by the key a nested one, `meta.json` the rest. A
nested tensor has its sizes in `<key>.shape.memmap`. A leaf without elements has no file.
"""

from __future__ import annotations

from typing import TypeAlias

Way: TypeAlias = tuple[str, ...]  # the keys from the root to an entry

META = "meta.json"
INNER = "_tensordict"  # the folder of a tensorclass's values
FORMAT = 1
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | {chr(code) for code in range(32)}


def escaped(key: str) -> str:
    """A key as the name of a file, or folder."""
    if not key:
        return "%"
    if key in (".", ".."):
        return "%2E" * len(key)
    return "".join(f"%{ord(char):02X}" if char in _UNSAFE else char for char in key)
