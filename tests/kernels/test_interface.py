"""The compiled library is used only with the Python code that it was built for."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.kernels import native

SOURCES = Path(native.__file__).parent
PASSED = ("matrix", "part", "team", "product", "expert", "layer")
OF_INTERFACE = {3: "01544c4e0a880ffa"}


def declarations() -> str:
    """Of what Python passes on: structures, kinds, and functions."""
    header = "".join((SOURCES / name).read_text(encoding="utf-8") for name in ("kernels.h", "experts.h"))
    code = "".join((SOURCES / name).read_text(encoding="utf-8") for name in ("kernels.c", "logps.c"))
    passed = [found[0] for name in PASSED for found in [structure(header, name)] if found]
    kinds = re.findall(r"#define \w+_KINDS\(DO\)(?:.*\\\n)*.*\n|^enum \{.*\n", header, re.MULTILINE)
    text = "".join([*passed, *kinds, *re.findall(r"^EXPORT [^{]*", header + code, re.MULTILINE)])
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def structure(header: str, name: str) -> re.Match[str] | None:
    return re.search(rf"typedef struct \{{[^}}]*\}} {name};", header)


def test_another_interface_has_another_number():
    assert all(
        structure((SOURCES / "kernels.h").read_text() + (SOURCES / "experts.h").read_text(), name) for name in PASSED
    )
    digest = hashlib.sha256(declarations().encode()).hexdigest()[:16]

    assert OF_INTERFACE == {native._INTERFACE: digest}, "count INTERFACE up, here, in kernels.h and in native.py"


@pytest.fixture
def anew() -> Iterator[None]:
    """The library is looked for again, and again after the test."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("code", ["int offload_kernels_interface(void) { return 0; }", "int other;"])
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch, caplog, code):
    path = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=code.encode(), check=True)
    monkeypatch.setenv(native.SWITCH, str(path))

    assert native.library() is None
    assert str(path) in caplog.text
    assert native.description().startswith("not built")


@pytest.mark.usefixtures("anew")
def test_the_switch_takes_the_library_out(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "off")

    assert native.library() is None
