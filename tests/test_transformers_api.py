"""What is inside of transformers is reached through one module, and what a release takes away is reported properly."""

import ast
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from offload import transformers_api
from offload.errors import UnsupportedTransformersError
from offload.transformers_api import ATTRIBUTES, MODULE_OF, OPTIONAL_ATTRIBUTES, cache_name, cache_of, given_cache
from tests.processes import ROOT
from tests.test_house import MODULES, dotted
from tests.test_torch_api import imported_from, is_private, of_objects, own_names

IMPORTED_EARLY = "transformers.models.auto"  # a public module, for what it imports
DOOR = ROOT / "offload" / "transformers_api.py"
ELSEWHERE = [path for path in MODULES if path != DOOR]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}


@functools.cache
def of_their_objects() -> set[str]:
    """The private attributes of transformers' objects: models, configurations, caches, quantizers, experts."""
    model: Any = MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2))
    cache = DynamicCache(config=model.config)
    things = (model, model.config, model.generation_config, cache, cache.layers[0], model.model.layers[0].mlp.experts)
    kinds = (transformers.AutoModelForCausalLM, transformers_api.HfQuantizer)
    return {name for thing in (*things, *kinds) for name in dir(thing) if is_private(name)} - of_objects()


def inside(tree: ast.AST, own: set[str], private: set[str]) -> Iterator[str]:
    """What a module uses of the inside of transformers: modules in it, and private attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("transformers."):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            names = (one.name for one in node.names)
            yield from (name for name in names if name.startswith("transformers.") and name != IMPORTED_EARLY)
        elif isinstance(node, ast.Attribute) and node.attr in private - own:
            yield node.attr


def test_nothing_inside_of_transformers_is_used_past_the_door():
    trees = {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in ELSEWHERE}
    listed = {*" ".join([*ATTRIBUTES.values(), OPTIONAL_ATTRIBUTES]).split()}
    own = own_names(list(trees.values())) - listed
    used = {name: set(inside(tree, own, of_their_objects() | listed)) - listed for name, tree in trees.items()}

    assert {} == {name: some for name, some in used.items() if some}


@pytest.mark.parametrize(
    "line",
    [
        "from transformers.cache_utils import DynamicLayer",
        "import transformers.cache_utils",
        "model.config._attn_implementation",
        "model._prepare_cache_for_generation",
    ],
)
def test_the_finder_finds_what_is_inside(line):
    assert list(inside(ast.parse(line), set(), of_their_objects()))


def test_every_name_in_the_door_is_used():
    text = "\n".join(path.read_text(encoding="utf-8") for path in ELSEWHERE)
    attributes = " ".join([*ATTRIBUTES.values(), OPTIONAL_ATTRIBUTES]).split()

    assert set(MODULE_OF) <= imported_from("offload.transformers_api")
    assert [] == [name for name in attributes if name not in text]


@pytest.mark.parametrize("name", MODULE_OF)
def test_every_name_in_the_door_is_there(name):
    assert getattr(transformers_api, name) is not None


def test_attributes_are_there():
    transformers_api.check_attributes.cache_clear()

    transformers_api.check_attributes()


def test_a_name_that_is_gone_is_a_clear_error(monkeypatch):
    monkeypatch.delattr("transformers.cache_utils.DynamicLayer")

    with pytest.raises(UnsupportedTransformersError, match=r"transformers \S+ has no DynamicLayer .*: install"):
        from offload.transformers_api import DynamicLayer  # noqa: F401


def test_an_attribute_that_is_gone_is_a_clear_error(monkeypatch):
    transformers_api.check_attributes.cache_clear()
    monkeypatch.setitem(transformers_api.ATTRIBUTES, "GenerationMixin", "_no_such_method")

    with pytest.raises(UnsupportedTransformersError, match=r"has no GenerationMixin\._no_such_method"):
        transformers_api.check_attributes()


def earlier(input_ids: object, past_key_values: object = None) -> None: ...


def later(input_ids: object, cache: object = None) -> None: ...


@pytest.mark.parametrize(("takes", "name"), [(earlier, "past_key_values"), (later, "cache"), (print, None)])
def test_keys_and_values_have_the_name_that_a_signature_says(takes, name):
    assert name == cache_name(takes)


def test_options_hold_keys_and_values_by_either_name():
    assert "cache" == given_cache({"cache": 1, "use_cache": True})
    assert "past_key_values" == given_cache({"past_key_values": 1})
    assert given_cache({"use_cache": True}) is None


@torch.no_grad()
def test_keys_and_values_are_found_in_an_output_by_either_name():
    output = LlamaForCausalLM(LlamaConfig(**SIZES))(torch.tensor([[1, 2]]))

    assert isinstance(cache_of(output), DynamicCache)
    assert 1 == cache_of({"logits": 0, "past_key_values": 1})
    assert 2 == cache_of({"logits": 0, "cache": 2})
