"""The sizes of a model, and which bytes a pass needs: from its configuration and its files' headers.

Always true:
- no weight is read, and only configuration and headers are fetched
- bytes are those of the files; parameters are those of the model that transformers creates from the configuration
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.checkpoints.checkpoint import Value, open_checkpoint
from offload.checkpoints.companions import base_of, quantization_of
from offload.checkpoints.forms.decoding import method_of
from offload.integrations.hub import finding_base, headers_of
from offload.integrations.transformers import model_on_meta
from offload.system.regular import is_there, text_of
from offload.tensor.wrapper import PathLike
from offload.torch_api import TorchDispatchMode
from offload.transformers_api import cache_of

_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
_GGUF_TABLE, _GGUF_HEAD = "token_embd.weight", "output.weight"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

DENSE = ("bfloat16", "float16", "float32", "bf16", "f16", "f32")  # as in safetensors, and in GGUF files


class StoredTensor(NamedTuple):
    """A tensor in a file, according to the header."""

    dtype: str
    nbytes: int


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, in bytes where not noted otherwise."""

    name: str  # as requested
    form: str  # of most bytes: "bfloat16", "fp8"...
    parameters: int  # number of weights
    looked_up: int  # those in tables from which a token needs one row
    routed: int  # those in routed experts
    stored: int  # total size of its files
    rows: int  # of that, tables from which a token needs one row
    experts: int  # routed experts
    packed: int  # other values that are packed
    packed_experts: int  # routed experts that are packed
    share: float  # fraction of the experts that a token is routed to
    kv_per_token: int | None  # keys and values per token of context; None if unknown
    ops: int  # called in a pass, without views, in each of which some time is Python's; 0 if unknown
    file: Path | None  # the largest, if local

    def needed(self, tokens: int) -> int:
        """Bytes needed for a pass over this many tokens, if they are routed at random."""
        return int(self.stored - self.rows - self.experts * (1 - self.touched(tokens)))

    def missing(self, tokens: int, stays: int) -> int:
        """Bytes of these that are not in memory if that many stay there: first what every pass needs, then experts."""
        always = self.stored - self.rows - self.experts
        of_experts = 1 - min(1.0, max(0, stays - always) / max(self.experts, 1))
        return max(0, always - stays) + int((self.needed(tokens) - always) * of_experts)

    def multiplied(self, tokens: int) -> float:
        """How many weights such a pass multiplies."""
        return self.parameters - self.looked_up - self.routed * (1 - self.touched(tokens))

    def needed_packed(self, tokens: int) -> float:
        """How many of the needed bytes are packed."""
        return self.packed + self.packed_experts * self.touched(tokens)

    def touched(self, tokens: int) -> float:
        """The fraction of the experts that this many tokens are routed to."""
        return 1 - (1 - self.share) ** tokens


def sizes_of(name_or_path: PathLike, *, trust_remote_code: bool = False, **hub_options: object) -> ModelSizes:
    """The sizes of a model.

    Args:
        name_or_path: a folder with a checkpoint, a GGUF file, or a model on the hub. A folder with an adapter alone
            stands for its base; adapters, which stay in memory, do not count.
        trust_remote_code: whether code that comes with the model may run.
        hub_options: revision, token.

    Raises:
        CheckpointError: neither a folder nor a model on the hub, or not supported by transformers.
    """
    name = text_of(name_or_path)
    place = Path(name)
    base = base_of(place)
    if base is not None:
        with finding_base(place, base):
            return replace(sizes_of(base, trust_remote_code=trust_remote_code), name=name)
    if is_there(place):
        opened = open_checkpoint(place)
        entries = {key: StoredTensor(_dtype_of(value), value.nbytes) for key, value in opened.items()}
        files = {file.path: file.identity.size for value in opened.values() for file in value.files}
        largest = max(files, key=files.__getitem__, default=None)
        return sizes_from(name, place, entries, largest, trust_remote_code=trust_remote_code)
    folder, headers = headers_of(name, **hub_options)
    stored = {key: StoredTensor(*place) for key, place in headers.items()}
    return sizes_from(name, folder, stored, trust_remote_code=trust_remote_code)


def _dtype_of(value: Value) -> str:
    if value.key in value.file.header.kinds:
        return str(value.file.header.kinds[value.key]).lower()
    return "" if value.layout is None else str(value.layout.dtype).removeprefix("torch.")


def sizes_from(
    name: str,
    folder: Path,
    entries: Mapping[str, StoredTensor],
    largest: Path | None = None,
    *,
    form: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSizes:
    """The sizes of a model, from the configuration in a folder and the entries of its files, by name.

    `form` is None to derive it from these.
    """
    model, config, _ = model_on_meta(folder, stored=len(entries), trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    tables = _tables(model)
    picked = {*tables, *({_GGUF_TABLE} if _GGUF_HEAD in entries else ())}
    kv_per_token, ops = _empty_passes(model)
    experts = {key: entry for key, entry in entries.items() if _is_expert(key)}
    rows = {key: entry for key, entry in entries.items() if key in picked}
    return ModelSizes(
        name=name,
        form=form or _form(config, entries),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        looked_up=sum(model.get_parameter(name).numel() for name in tables),
        routed=sum(value.numel() for name, value in model.named_parameters() if _is_expert(name)),
        stored=sum(entry.nbytes for entry in entries.values()),
        rows=sum(entry.nbytes for entry in rows.values()),
        experts=sum(entry.nbytes for entry in experts.values()),
        packed=_packed({key: entries[key] for key in entries.keys() - experts.keys() - rows.keys()}),
        packed_experts=_packed(experts),
        share=_first(text, _ROUTED, 1) / max(_first(text, _EXPERTS, 1), 1) if experts else 1.0,
        kv_per_token=kv_per_token,
        ops=ops,
        file=largest,
    )


def _packed(entries: Mapping[str, StoredTensor]) -> int:
    """Bytes of packed values, with their scales."""
    return sum(entry.nbytes for key, entry in entries.items() if entry.dtype not in DENSE or "scale" in key)


def _is_expert(name: str) -> bool:
    return ".experts." in name or "_exps." in name


def _first(config: object, names: tuple[str, ...], otherwise: int) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), otherwise)


def _tables(model: nn.Module) -> set[str]:
    """The embeddings, except one that is also the output layer."""
    head = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    keys = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return {key for key in keys if head is None or model.get_parameter(key) is not head}


def _form(config: Any, entries: Mapping[str, StoredTensor]) -> str:
    quantization = quantization_of(config)
    if quantization is not None:
        return str(quantization.get("format") or method_of(quantization))
    by_dtype: Counter[str] = Counter()
    for entry in entries.values():
        by_dtype[entry.dtype] += entry.nbytes
    return by_dtype.most_common(1)[0][0]


class _Ops(TorchDispatchMode):
    """Counts ops, except views, which take next to no time; a product counts as two, as its result is shaped."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _empty_passes(model: Any) -> tuple[int | None, int]:
    """The bytes of keys and values that one more token adds, as laid out by the model; and the ops of a pass."""
    try:
        model = model.to(model.config.dtype or torch.bfloat16)
        with torch.no_grad(), torch.device("meta"):
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            two = _held(model(tokens, use_cache=True))
            with _Ops() as ops:
                one = _held(model(tokens[:, :1], use_cache=True))
            return two - one, ops.count
    except Exception:  # it takes other inputs, or depends on values
        return None, 0


def _held(output: Any) -> int:
    tensors = [tensor for layer in cache_of(output).layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
