"""Names of types that signatures of several wings share.

Always true:
- nothing is imported from the package, nor torch, and nothing but types is defined
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn import Module
else:
    Module = object

Args: TypeAlias = tuple[Any, ...]  # positional, as `__torch_function__` and `__torch_dispatch__` receive them
Kwargs: TypeAlias = dict[str, Any]  # keyword arguments
Op: TypeAlias = Callable[..., Any]  # what torch is asked to run: an op, or a function of its Python interface
Json: TypeAlias = Any  # what `json.loads` returns
Settings: TypeAlias = Mapping[str, Any]  # by name, from a JSON file: how a model is quantized, for example


class Digest(Protocol):
    """A hash object from `hashlib`."""

    def update(self, data: bytes, /) -> None: ...


class Config(Protocol):
    """What is used of transformers' `PreTrainedConfig`; a quantized model's has a `quantization_config`, too."""

    _auto_class: str | None
    architectures: list[str] | None
    dtype: torch.dtype | str | None
    name_or_path: str
    tie_word_embeddings: bool

    def get_text_config(self, *, decoder: bool) -> Config: ...

    def to_dict(self) -> dict[str, Any]: ...

    def to_json_string(self, use_diff: bool = True) -> str: ...


class Pretrained(Module):
    """What is used of transformers' `PreTrainedModel`, and noted on one that is on disk; for annotations alone."""

    config: Config
    generation_config: Any
    dtype: torch.dtype
    name_or_path: str
    all_tied_weights_keys: dict[str, str]
    is_quantized: bool
    quantization_method: Any
    hf_quantizer: Any
    _weight_conversions: Any
    packed_as: Any  # offload's: how its checkpoint was packed
    from_pretrained: ClassVar[Callable[..., Any]]
    can_generate: Callable[[], bool]
    get_output_embeddings: Callable[[], nn.Module | None]
    is_remote_code: Callable[[], bool]
