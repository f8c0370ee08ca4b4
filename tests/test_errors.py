"""Every error raised by `offload` is an `OffloadError`, and its text has no quotes around it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from offload import errors
from offload.errors import OffloadError
from tests.test_house import MODULES, dotted

# Other raised errors, by module and beginning, and why they are right.
OTHERS = {
    ("offload", "raise ImportError"): "on another system, or without the lock, nothing of ours is there to be caught",
    ("offload.batches.delegated_call", "raise error"): "what a block met; handed over as it was",
    ("offload.batches.scheduler", "raise Stopped"): "ends a call whose result is not needed; `_run` catches it",
    ("offload.batches.mapping", "raise error"): "what the user's function met; handed over as it was",
    ("offload.batches.mapping", "raise failure[1]"): "what the user's function met; handed over as it was",
    ("offload.generation", "raise AttributeError"): "the interface of `__getattr__`",
    ("offload.transformers_api", "raise AttributeError"): "the interface of `__getattr__`",
    ("offload.torch_api", "raise cls.error"): "an `UnsupportedTorchError` that was made at import",
    ("offload.torch_api", "raise found.error"): "an `UnsupportedTorchError` that was made at import",
    ("offload.torch_api", "raise _CHANGED"): "an `UnsupportedTorchError` that was made at import",
    ("offload.training.activations", "raise error"): "what the writing thread met; handed over as it was",
    ("offload.cache.columns", "raise TypeError"): "`_encoded` tells of it, with the column",
    ("offload.cache.rowfile", "raise OSError"): "an answer of `look`: who reads then goes another way",
    ("offload.cli.arguments", "raise argparse.ArgumentTypeError"): "argparse wants this one",
    ("offload.checkpoints.forms.gguf", "raise ValueError"): "`as_saved` tells of it, as a CheckpointError",
    ("offload.checkpoints.dcp", "raise type(error)"): "an error of ours, with the path before its words",
    ("offload.checkpoints.forms.compressed_tensors", "raise ValueError"): "`unpacked` tells of it, as ours",
    ("offload.checkpoints.forms.formats", "raise ValueError"): "`unpacked` tells of it",
    ("offload.checkpoints.forms.integers", "raise ValueError"): "`unpacked` tells of it",
    ("offload.kernels.native", "raise MemoryError"): "what Python raises when there is no memory for its own objects",
    ("offload.checkpoints.writing", "raise AssertionError"): "the loop before it ends in no other way",
    ("offload.storage.gguf_header", "raise ValueError"): "`read_header` tells of it, as a damaged file",
    ("offload.system.regular", "raise OSError"): "what a file object says to a place before its beginning",
    ("offload.prefetch.reader", "raise error"): "what a load met: of `Load.read`, whose errors are ours",
    ("offload.prefetch.parallel", "raise errors[0]"): "what a part met; `Range` tells of it, with the path",
    ("offload.prefetch.pages", "raise OSError"): "readers ahead leave it to the op, which meets it again",
    ("offload.storage.pickled", "raise each"): "what the system refused; `reading` tells of it, with the path",
    ("offload.storage.state_file", "raise ValueError"): "who parses tells of it, with the path",
    ("offload.storage.state_file", "raise kind."): "an error of ours, which the kind of file has",
    ("offload.storage.handle", "raise AssertionError"): "the call before it raises",
    ("offload.system.background", "raise RuntimeError"): "what Python raises for a thread at that time",
    ("offload.tensor.replacing", "raise AttributeError"): "what `hasattr` asks for",
    ("offload", "raise AttributeError"): "what `hasattr` asks for",
    ("offload.models.values", "raise KeyboardInterrupt"): "still an interrupt, with what was done before it",
}


@dataclass(frozen=True)
class Raised:
    """A `raise` in the package: where, as text, and the handlers of enclosing `try` blocks in its function."""

    module: str
    line: int
    node: ast.Raise
    handlers: tuple[ast.ExceptHandler, ...]
    caught: frozenset[str]  # the names in enclosing `except ... as name`

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {ast.unparse(self.node)[:100]}"


def raised_in(path: Path, module: str = "") -> Iterator[Raised]:
    def visit(node: ast.AST, handlers: tuple[ast.ExceptHandler, ...], caught: frozenset[str]) -> Iterator[Raised]:
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield Raised(module or dotted(path), node.lineno, node, handlers, caught)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            handlers, caught = (), frozenset()
        for name, part in ast.iter_fields(node):
            inner = (*handlers, *node.handlers) if isinstance(node, ast.Try) and name == "body" else handlers
            known = caught | {node.name} if isinstance(node, ast.ExceptHandler) and node.name else caught
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inner, known)

    return visit(ast.parse(path.read_text(encoding="utf-8")), (), frozenset())


def class_of(name: str, module: str) -> type | None:
    """The class that a name in a module refers to: its own, one of ours, or a builtin."""
    value = getattr(errors, name, None) or getattr(builtins, name, None)
    if value is None:
        value = import_module(module)
        for part in name.split("."):
            value = getattr(value, part, None)
    return value if isinstance(value, type) else None


def kind_of(raised: Raised) -> type | None:
    """The class of the raised error; None if unknown. For a function call, its return annotation."""
    said = raised.node.exc
    name = ast.unparse(said.func if isinstance(said, ast.Call) else said)
    kind = class_of(name, raised.module)
    if kind is not None:
        return kind
    tree = ast.parse(Path(str(import_module(raised.module).__file__)).read_text(encoding="utf-8"))
    made = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name.split(".")[-1]]
    if not made:
        function = getattr(import_module(raised.module), name, None)
        returned = getattr(function, "__annotations__", {}).get("return")
        return class_of(str(returned), raised.module) if returned else None
    return class_of(ast.unparse(made[0].returns), raised.module) if made[0].returns else None


def is_caught(raised: Raised, kind: type) -> bool:
    """Whether the same function catches it, to add information."""
    caught: list[ast.expr] = []
    for handler in raised.handlers:
        caught += handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type] if handler.type else []
    classes = [class_of(ast.unparse(one), raised.module) for one in caught]
    return any(one is not None and issubclass(kind, one) for one in classes)


def is_ours(raised: Raised) -> bool:
    if isinstance(raised.node.exc, ast.Name) and raised.node.exc.id in raised.caught:
        return True  # another library's error, passed on
    kind = kind_of(raised)
    return kind is not None and (issubclass(kind, OffloadError) or is_caught(raised, kind))


def excuses(raised: Raised) -> set[tuple[str, str]]:
    """The entries of the table that it meets."""
    return {one for one in OTHERS if raised.module == one[0] and ast.unparse(raised.node).startswith(one[1])}


def test_errors_raised_on_purpose_are_offload_errors_and_every_exception_in_the_table_is_needed():
    found = [raised for path in MODULES for raised in raised_in(path)]
    others = [(raised, excuses(raised)) for raised in found if not is_ours(raised)]

    assert len(found) > 300
    assert [] == [str(raised) for raised, excused in others if not excused]
    assert set(OTHERS) == set().union(*(excused for _, excused in others))


@pytest.mark.parametrize("text", ["raise ValueError('x')", "raise KeyError", "raise found", "raise self._made()"])
def test_the_finder_finds_bare_errors(tmp_path, text, monkeypatch):
    path = tmp_path / "with_bare_errors.py"
    code = f"class A:\n    def _made(self) -> ValueError: ...\n\n    def f(self):\n        {text}\n"
    path.write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    assert [False] == [is_ours(raised) for raised in raised_in(path, path.stem)]


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__], ids=lambda kind: kind.__name__)
def test_the_text_of_an_error_has_no_quotes_around_it(kind):
    assert "the words" == str(kind("the words"))


def test_errors_about_files_are_file_errors():
    """`except FileError` skips a file, whatever is wrong with it."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FileError)]
    names = {"MissingFileError", "CorruptFileError", "ReadError", "ChangedFileError", "ForeignFileError", "WriteError"}

    assert {"FileError", *names} == {kind.__name__ for kind in kinds}
