"""The reference: the docstring of each public name says what it returns, and has an example."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import offload
from tutorials.public import MODULES


def public_names() -> Iterator[tuple[str, Any]]:
    """The public names and their objects; a module is replaced by its own names."""
    for module in (offload, *MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            inner = [*value.__all__] if inspect.ismodule(value) else []
            yield from ((f"{module.__name__}.{name}.{own}", getattr(value, own)) for own in inner)
            if not inner:
                yield f"{module.__name__}.{name}", value


NAMES = {name: value for name, value in public_names() if not isinstance(value, str)}
ERRORS = [name for name, value in NAMES.items() if inspect.isclass(value) and issubclass(value, Exception)]
FUNCTIONS = [name for name, value in NAMES.items() if inspect.isfunction(value)]
METHODS = {
    f"{name}.{method.__name__}": method
    for name in ("offload.OffloadedTensor", "offload.TensorCache")
    for method in (getattr(value, "__func__", value) for value in vars(NAMES[name]).values())
    if inspect.isfunction(method) and not method.__name__.startswith("_") and not hasattr(torch.Tensor, method.__name__)
}


@pytest.mark.parametrize("name", sorted(NAMES.keys() - ERRORS))
def test_a_public_name_shows_an_example(name):
    assert ">>> " in (inspect.getdoc(NAMES[name]) or "")


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_functions_that_return_something_describe_it(name):
    """Under `Returns`, or `Yields`."""
    value = NAMES.get(name) or METHODS[name]
    gives = inspect.signature(value).return_annotation not in (None, "None", inspect.Signature.empty)
    said = inspect.getdoc(value) or ""

    assert not gives or "Returns:\n" in said or "Yields:\n" in said
