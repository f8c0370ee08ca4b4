"""What a model holds, and which bytes of it a pass needs: from its configuration and the headers of its files.

Always true:
- no weight is read, and nothing but the configuration and headers is fetched
- bytes are those of the files; parameters are those of the model that transformers makes of the configuration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.integrations.hub import headers_of
from offload.integrations.transformers import class_of, model_on_meta
from offload.models.checkpoint import open_checkpoint
from offload.models.pretrained import quantization_of
from offload.storage.regular import is_folder, is_there, text_of
from offload.tensor.wrapper import PathLike
from offload.torch_api import parameters_of

_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
_GGUF_TABLE, _GGUF_HEAD = "token_embd.weight", "output.weight"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class Entry(NamedTuple):
    """A tensor in a file, as its header says."""

    dtype: str
    nbytes: int


@dataclass(frozen=True)
class ModelSizes:
    """What a model holds. Sizes in bytes.

    Attributes:
        name: as it was asked for.
        form: of most of its bytes: "bfloat16", "fp8"...
        parameters: numbers in its weights.
        linear: those in linear layers and experts, which a quantization would pack.
        stored: all its files hold.
        rows: what is stored of tables of which a token needs a row.
        experts: what is stored of routed experts.
        share: of the experts that a token is routed to.
        kv_per_token: keys and values of a token of context; None where that could not be told.
        file: the largest of its files, if they are here.
    """

    name: str
    form: str
    parameters: int
    linear: int
    stored: int
    rows: int
    experts: int
    share: float
    kv_per_token: int | None
    file: Path | None

    def needed(self, tokens: int) -> int:
        """Bytes that a pass over so many tokens needs, if each is routed by chance."""
        return int(self.stored - self.rows - self.experts * (1 - self.touched(tokens)))

    def touched(self, tokens: int) -> float:
        """The part of the experts that so many tokens are routed to."""
        return 1 - (1 - self.share) ** tokens


def sizes_of(name_or_path: PathLike, **hub_options: Any) -> ModelSizes:
    """What a model holds.

    Args:
        name_or_path: a folder with a checkpoint, a GGUF file, or a model on the hub.
        hub_options: revision, token.

    Raises:
        CheckpointError: neither a folder nor a model on the hub, or none that transformers knows.
    """
    name = text_of(name_or_path)
    place = Path(name)
    if is_there(place):
        opened = open_checkpoint(place)
        entries = {key: Entry(_dtype_of(value), value.nbytes) for key, value in opened.items()}
        files = {file.path: file.identity.size for value in opened.values() for file in value.files}
        largest = max(files, key=lambda path: files[path], default=None)
        return _sizes(name, place, entries, largest)
    folder, headers = headers_of(name, **hub_options)
    return _sizes(name, folder, {key: Entry(*found) for key, found in headers.items()}, None)


def _dtype_of(value: Any) -> str:
    if value.key in value.file.header.kinds:
        return str(value.file.header.kinds[value.key]).lower()
    return "" if value.layout is None else str(value.layout.dtype).removeprefix("torch.")


def _sizes(name: str, folder: Path, entries: Mapping[str, Entry], largest: Path | None) -> ModelSizes:
    model, config, _ = model_on_meta(folder, class_of(folder) if is_folder(folder) else None)
    text = config.get_text_config(decoder=True)
    tables = _tables(model, entries)
    experts = sum(entry.nbytes for key, entry in entries.items() if _is_expert(key))
    return ModelSizes(
        name=name,
        form=_form(config, entries),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear=sum(_linear_in(model)),
        stored=sum(entry.nbytes for entry in entries.values()),
        rows=sum(entries[key].nbytes for key in tables),
        experts=experts,
        share=_first(text, _ROUTED, 1) / max(_first(text, _EXPERTS, 1), 1) if experts else 1.0,
        kv_per_token=_kv_per_token(model),
        file=largest,
    )


def _is_expert(name: str) -> bool:
    return ".experts." in name or "_exps." in name


def _first(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), otherwise)


def _tables(model: nn.Module, entries: Mapping[str, Entry]) -> list[str]:
    """The stored embeddings, but for one that is the output layer too."""
    head = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    found = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tied = {key for key in found if head is not None and model.get_parameter(key) is head}
    return [key for key in entries if key in found - tied or (key == _GGUF_TABLE and _GGUF_HEAD in entries)]


def _linear_in(model: nn.Module) -> list[int]:
    """Numbers in the weights that a quantization packs: of linear layers but the output layer, and of experts."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        weight.numel()
        for name, module in model.named_modules()
        for key, weight in parameters_of(module).items()
        if weight is not None
        and (
            (isinstance(module, nn.Linear) and module is not head and key == "weight")
            or (weight.ndim == 3 and "experts" in f"{name}.{key}")
        )
    ]


def _form(config: Any, entries: Mapping[str, Entry]) -> str:
    quantization = quantization_of(config)
    if quantization is not None:
        said = quantization.get("format") or quantization.get("quant_method")
        return str(said)
    by_dtype: dict[str, int] = {}
    for entry in entries.values():
        by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.nbytes
    return max(by_dtype, key=lambda dtype: by_dtype[dtype])


def _kv_per_token(model: Any) -> int | None:
    """What a pass over two tokens has more of than one over one, as the model itself lays it out."""
    try:
        model = model.to(model.config.dtype or torch.bfloat16)
        with torch.no_grad(), torch.device("meta"):
            held = [_held(model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=True)) for tokens in (1, 2)]
    except Exception:  # it takes other inputs, or looks at values
        return None
    return held[1] - held[0]


def _held(output: Any) -> int:
    tensors = [tensor for layer in output.past_key_values.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
