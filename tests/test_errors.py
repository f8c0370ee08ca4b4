"""Every error raised by `offload` is an `OffloadError`, and its text has no quotes around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

import pytest

from offload import errors
from offload.errors import OffloadError
from tests.test_house import MODULES, dotted

# Other raised errors, by module and beginning, and why they are right.
OTHERS = {
    ("offload", "raise ImportError"): "on another system, or without the lock, nothing of ours is there to be caught",
    ("offload.batches.delegated_call", "raise error"): "what a block met; handed over as it was",
    (
        "offload.batches.scheduler",
        "raise Stopped",
    ): "ends a call whose result is not needed; `_run` catches it",
    ("offload.batches.mapping", "raise error"): "what the user's function met; handed over as it was",
    ("offload.batches.mapping", "raise failure[1]"): "what the user's function met; handed over as it was",
    ("offload.generation", "raise AttributeError"): "the interface of `__getattr__`",
    ("offload.transformers_api", "raise AttributeError"): "the interface of `__getattr__`",
    ("offload.training.activations", "raise error"): "what the writing thread met; handed over as it was",
    ("offload.cache.columns", "raise TypeError"): "`_encoded` tells of it, with the column",
    ("offload.cache.states", "raise unread"): "an error of ours, by another name",
    ("offload.cache.held", "raise OSError"): "the temporary file's `with` reports it, as a WriteError",
    (
        "offload.cache.held",
        "raise error.__context__",
    ): "what the system refused, in place of what torch.save says of it",
    ("offload.cache.rowfile", "raise OSError"): "an answer of `look`: who reads then goes another way",
    ("offload.cli.arguments", "raise argparse.ArgumentTypeError"): "argparse wants this one",
    ("offload.checkpoints.forms.gguf", "raise ValueError"): "`as_saved` tells of it, as a CheckpointError",
    ("offload.integrations.peft", "raise KeyboardInterrupt"): "still an interrupt, with what was done before it",
    ("offload.checkpoints.dcp", "raise type(error)"): "an error of ours, with the path before its words",
    (
        "offload.checkpoints.forms.compressed_tensors",
        "raise ValueError",
    ): "`unpacked` tells of it, as a CheckpointError",
    ("offload.checkpoints.forms.integers", "raise ValueError"): "`unpacked` tells of it",
    ("offload.kernels.native", "raise MemoryError"): "what Python raises when there is no memory for its own objects",
    ("offload.models.journal", "raise ValueError"): "`Journal.open` tells of it, with the path",
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
    ("offload.training.checkpoints", "raise ValueError"): "`_checked` tells of it, with the path",
    ("offload.models.values", "raise KeyboardInterrupt"): "still an interrupt, with what was done before it",
}


def ours_in(trees: Collection[ast.AST]) -> set[str]:
    """Our errors: their classes, and the functions that return one, by their annotations."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, OffloadError)}
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in classes for base in node.bases):
            classes.add(node.name)
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.returns is not None]
    return classes | {node.name for node in functions if ast.unparse(node.returns) in classes}


def others_in(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """What is raised, as text, except for our errors, and for what an `except` in the function has caught, or will."""

    def visit(node: ast.AST, fine: frozenset[str]) -> Iterator[str]:
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc).removeprefix("self.")
            if not fine & {raised, "Exception"}:
                yield ast.unparse(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            fine = frozenset(ours)
        if isinstance(node, ast.ExceptHandler) and node.name:
            fine |= {node.name}
        tried = node.body if isinstance(node, ast.Try) else []
        caught = {name for handler in getattr(node, "handlers", []) for name in re.findall(r"\w+", _types_of(handler))}
        for child in ast.iter_child_nodes(node):
            yield from visit(child, fine | caught if child in tried else fine)

    return visit(tree, frozenset(ours))


def _types_of(handler: ast.ExceptHandler) -> str:
    return ast.unparse(handler.type) if handler.type else ""


def others() -> list[tuple[str, str]]:
    """By module."""
    trees = {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
    ours = ours_in(trees.values())
    return [(module, text) for module, tree in trees.items() for text in others_in(tree, ours)]


def is_excused(module: str, text: str, by: tuple[str, str]) -> bool:
    return module == by[0] and text.startswith(by[1])


def test_errors_raised_on_purpose_are_offload_errors():
    assert [] == [one for one in others() if not any(is_excused(*one, by) for by in OTHERS)]


def test_every_exception_in_the_table_is_needed():
    assert set(OTHERS) == {by for one in others() for by in OTHERS if is_excused(*one, by)}


@pytest.mark.parametrize("text", ["raise ValueError('x')", "raise KeyError", "raise found", "raise self._made()"])
def test_the_finder_finds_bare_errors(text):
    tree = ast.parse(f"class A:\n    def _made(self) -> ValueError: ...\n\n    def f(self):\n        {text}\n")

    assert 1 == len([*others_in(tree, ours_in([tree]))])


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__], ids=lambda kind: kind.__name__)
def test_the_text_of_an_error_has_no_quotes_around_it(kind):
    assert "the words" == str(kind("the words"))


def test_errors_about_files_are_file_errors():
    """`except FileError` skips a file, whatever is wrong with it."""
    about_files = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FileError)
    }

    assert about_files - {errors.FileError} == {
        errors.MissingFileError,
        errors.CorruptFileError,
        errors.ReadError,
        errors.ChangedFileError,
        errors.ForeignFileError,
        errors.WriteError,
    }
