"""transformers, beyond its public names: what is used of its inside, and what is called otherwise in some releases.

Always true:
- no other module imports from a module inside transformers, or uses a private attribute that is not listed here
- transformers is imported when the first of these names is asked for
- a name that is gone is an `UnsupportedTransformersError`: never a bare error, and never a different result

What a release calls or does otherwise is asked of its classes and signatures; of its version where they don't tell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from typing import Any

from offload.errors import UnsupportedTransformersError

TESTED = ("5.17", "5.24")  # the oldest and the newest release with which all tests were run

_MODULES = {
    "activations": "SiLUActivation",
    "cache_utils": "DynamicLayer DynamicSlidingWindowLayer",
    "conversion_mapping": "get_model_conversion_mapping",
    "core_model_loading": (
        "PrefixChange WeightConverter WeightRenaming dot_natural_key rename_source_key revert_weight_conversion"
    ),
    "integrations.gguf": (
        "GGUF_CONFIG_ARCHS get_gguf_config get_gguf_conversion_mapping is_gguf_arch_supported read_gguf_metadata"
    ),
    "integrations.gguf.dequant": "GGML_NAME dequantize",
    "integrations.finegrained_fp8": "Fp8Dequantize",
    "integrations.moe": "ALL_EXPERTS_FUNCTIONS _default_apply_gate grouped_mm_experts_forward",
    "integrations.sdpa_attention": "sdpa_attention_forward",
    "masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS",
    "modeling_gguf_pytorch_utils": "TENSOR_PROCESSORS TensorProcessor get_gguf_hf_weights_map load_gguf_checkpoint",
    "modeling_rope_utils": "ROPE_INIT_FUNCTIONS",
    "modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "quantizers": "AutoHfQuantizer HfQuantizer",
    "utils.logging": "disable_progress_bar",
}
MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
# Private attributes that are read or set where they are needed, by the class that must have them.
ATTRIBUTES = {
    "PreTrainedConfig": (
        "_attn_implementation _attn_implementation_internal _auto_class _experts_implementation _name_or_path"
    ),
    "PreTrainedModel": (
        "_from_config _hf_peft_config_loaded _is_stateful _no_split_modules _skip_keys_device_placement "
        "_tied_weights_keys"
    ),
    "GenerationMixin": "_assisted_decoding _get_candidate_generator",
}
# Those that may be missing: set while loading, on parts of some models, or not in every release.
OPTIONAL_ATTRIBUTES = "_apply_gate _eos_token_tensor _is_expert_parallel _layer_type _weight_conversions"
CACHES = ("cache", "past_key_values")  # since 5.24; before, and in code that comes with a model


def _unsupported(name: str, why: object) -> UnsupportedTransformersError:
    from transformers import __version__

    return UnsupportedTransformersError(
        f"transformers {__version__} has no {name} ({why}): install a release that is tested, "
        f"transformers {TESTED[0]} to {TESTED[-1]}"
    )


def __getattr__(name: str) -> Any:
    """A name from inside transformers; `UnsupportedTransformersError` if it is gone."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"transformers.{MODULE_OF[name]}"), name)
    except (ImportError, AttributeError) as error:
        raise _unsupported(name, error) from error


@cache
def check_attributes() -> None:
    """Raises `UnsupportedTransformersError` if a class lacks a private attribute that is used."""
    import transformers

    for kind, names in ATTRIBUTES.items():
        owner = getattr(transformers, kind)
        some = owner() if kind == "PreTrainedConfig" else owner  # which sets them when it is made
        for name in names.split():
            if not hasattr(some, name):
                raise _unsupported(f"{kind}.{name}", "it was taken out, or renamed")


def cache_name(takes: Callable[..., object]) -> str | None:
    """What a `forward`, or a method of `generate`'s, calls the keys and values of earlier tokens, if anything."""
    return given_cache(inspect.signature(takes).parameters)


def given_cache(names: Collection[str]) -> str | None:
    """The name of the keys and values among those of options, or of a model's outputs; None if there are none."""
    return next((name for name in CACHES if name in names), None)


def cache_option() -> str:
    """What `generate` calls the keys and values of earlier tokens."""
    from transformers import GenerationMixin

    return cache_name(GenerationMixin.prepare_inputs_for_generation) or CACHES[0]


def cache_of(output: Any) -> Any:
    """The keys and values in a model's output; `KeyError` if there are none."""
    return output[given_cache(output.keys())]


def kv_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values that a token of context takes, by the configuration; 0 if that tells nothing of it."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers, heads = (getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not isinstance(layers, int) or not isinstance(heads, int):
        return 0
    width = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) or 0) // max(heads, 1)
    held = getattr(text, "num_key_value_heads", None) or heads
    return 2 * layers * held * width * getattr(getattr(model, "dtype", None), "itemsize", 2)


def fills_after_cache() -> bool:
    """Whether `generate` computes a prompt in chunks from the first token that its cache lacks: since 5.21."""
    from transformers import __version__

    return tuple(map(int, __version__.split(".")[:2])) >= (5, 21)
