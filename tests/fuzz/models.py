"""What is damaged and read: checkpoints of models, in every packed form, and what comes beside them.

Always true:
- a sample is a whole folder, as bytes by relative path: each trial damages its own copy
- a sample notes in the file `form` which of `tests.checkpoints.forms` it is; that note is never damaged
- a checkpoint that does not fit itself is refused when it is loaded: an error at a later op is a failure
- a weight read as a whole, by rows, and through a product is the same weight; and it is that of plain transformers
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.errors import OffloadError
from offload.kernels.native import DTYPES
from tests.checkpoints.forms import FORMS, PROMPT
from tests.fuzz.mutations import (
    bytes_damaged,
    gguf_damaged,
    json_file_damaged,
    pickle_damaged,
    pieces_damaged,
    safetensors_damaged,
)

Files = dict[str, bytes]  # by relative path


class Wrong(Exception):
    """What was read is not what the file contains."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        samples: complete sample folders.
        damage: returns randomly damaged files for some.
        read: reads a folder; returns what was read, for comparison.
        theirs: what another library reads from it; None if there is none.
        weight: its share of the time.
    """

    name: str
    samples: Sequence[Files]
    damage: Callable[[Files, random.Random], Files]
    read: Callable[[Path], Mapping[str, torch.Tensor]]
    theirs: Callable[[Path], Mapping[str, torch.Tensor]] | None = None
    weight: float = 1.0


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


_NOTE = "form"
_FAMILIES = ("gptq", "awq", "fp8", "mxfp4", "bnb", "ct", "bitnet", "torchao", "gguf")
_OF_MODULES = ("bitnet", "torchao")  # transformers' and torchao's own modules compute with these
_ERROR = 0.02  # of a product, relative to that of the absolute values: of numbers with 8 bits


def kinds(folder: Path, only: Sequence[str] = ()) -> Iterator[Kind]:
    """A kind for each family of forms, or those of these names; samples are created below `folder`."""
    for family in (name for name in _FAMILIES if name in (only or name)):
        names = [name for name in FORMS if name.startswith(family)]
        samples = [_sample(name, folder / name) for name in names]
        yield Kind(family, samples, _damaged, _read_model, _their_model, 2)
    for name, (sample, damage, read) in _BESIDE.items():
        if name in (only or name):
            yield Kind(name, [sample(folder / name)], damage, read)


def _sample(name: str, folder: Path) -> Files:
    folder.mkdir()
    FORMS[name].write(folder)
    _read_model(folder, name)
    return {**files_of(folder), _NOTE: name.encode()}


def _damaged(files: Files, chance: random.Random) -> Files:
    """A piece, or the configuration, is damaged such that most readers will not notice; or any file in any way."""
    [name] = chance.choices(sorted(files.keys() - {_NOTE, "generation_config.json"}))
    data = files[name]
    if name.endswith(".gguf"):
        files[name] = gguf_damaged(data, chance)
    elif name.endswith(".json"):
        files[name] = json_file_damaged(data, chance, "quantization_config")
    elif name.endswith(".safetensors"):
        damage = pieces_damaged if chance.random() < 0.85 else safetensors_damaged
        files[name] = damage(data, chance)
    else:
        files[name] = bytes_damaged(data, chance)
    return files


def _read_model(folder: Path, form: str | None = None) -> Mapping[str, torch.Tensor]:
    form = form or (folder / _NOTE).read_text(encoding="utf-8")
    model = offload.from_pretrained(folder, **FORMS[form].options)
    try:
        found = {name: same_in_every_way(name, value) for name, value in model.state_dict().items()}
        dtypes = {value.dtype for value in found.values()}  # others than the model's are kept, and can't be multiplied
        if not form.startswith(_OF_MODULES) and len(dtypes) == 1:
            with torch.no_grad():
                model(PROMPT)
    except OffloadError as error:
        raise Wrong(f"only noticed after loading: {type(error).__name__}: {error}") from error
    return {name: _one_nan(value) for name, value in found.items()}


def _one_nan(value: torch.Tensor) -> torch.Tensor:
    """All NaNs are alike: their bits depend on the instruction that makes them."""
    return torch.where(value.isnan(), torch.nan, value) if value.dtype in DTYPES else value


def same_in_every_way(name: str, value: Any) -> torch.Tensor:
    """The value, read as a whole, by rows, or through a product; dequantized if torchao computes with it."""
    whole: Any = offload.materialize(value).detach()
    if type(whole) is not torch.Tensor:
        return whole.dequantize()  # type: ignore[no-any-return]
    if not whole.numel() or type(value) is not offload.OffloadedTensor:
        return whole
    for cut in (slice(0, 1), slice(-1, None), slice(len(whole) // 3, len(whole) // 2 + 1)) if whole.dim() else ():
        if not _same(whole[cut], offload.materialize(value[cut])):
            raise Wrong(f"{name!r} has other rows {cut} alone than in the whole")
    for weight, dense in ((value, whole), (value[0], whole[0])) if whole.dim() > 1 else ():
        if dense.dim() == 2 and dense.dtype in DTYPES:
            _require_product(name, weight, dense)
    return whole


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype.is_floating_point:
        one, other = one.to(torch.float64), other.to(torch.float64)
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def _require_product(name: str, weight: torch.Tensor, dense: torch.Tensor) -> None:
    for rows in (1, 3):
        x = torch.linspace(-1, 1, rows * dense.shape[1]).view(rows, -1).to(dense.dtype)
        with torch.no_grad():
            found = F.linear(x, weight).double()
        expected, most = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
        is_finite = most < 0.9 * torch.finfo(dense.dtype).max
        if bool(((found - expected).abs() > _ERROR * most + 1e-5)[is_finite].any()):
            raise Wrong(f"the product with {name!r} is another")


def _their_model(folder: Path) -> Mapping[str, torch.Tensor]:
    form = (folder / _NOTE).read_text(encoding="utf-8")
    state = FORMS[form].plain(folder).state_dict()
    if not all(value.dtype.is_floating_point for value in state.values()):
        raise ValueError("integers in place of a dense weight: it would not run")
    dense = {name: value if type(value) is torch.Tensor else value.dequantize() for name, value in state.items()}
    return {name: _one_nan(value) for name, value in dense.items()}


# What comes beside the weights of a model


def _distributed(folder: Path) -> Files:
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3).bfloat16(), "none": torch.zeros(0, 2)}
    dcp.save({"model": state, "step": 3}, checkpoint_id=folder, no_dist=True)
    return files_of(folder)


def _damage_distributed(files: Files, chance: random.Random) -> Files:
    name = chance.choice([".metadata", ".metadata", *files])
    damage = pickle_damaged if name == ".metadata" else bytes_damaged
    return {**files, name: damage(files[name], chance)}


def _read_distributed(folder: Path) -> Mapping[str, torch.Tensor]:
    return offload.materialize(dict(offload.load_file(folder)))  # type: ignore[no-any-return]


def _base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def _adapter(folder: Path) -> Files:
    from peft import LoraConfig, get_peft_model

    get_peft_model(_base(), LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)).save_pretrained(folder)
    return {name: data for name, data in files_of(folder).items() if name != "README.md"}


def _damage_adapter(files: Files, chance: random.Random) -> Files:
    name = chance.choice(sorted(files))
    damage = json_file_damaged if name.endswith(".json") else pieces_damaged
    return {**files, name: bytes_damaged(files[name], chance) if chance.random() < 0.2 else damage(files[name], chance)}


def _read_adapter(folder: Path) -> Mapping[str, torch.Tensor]:
    model = _base()
    before = {name: type(module) for name, module in model.named_modules()}
    try:
        offload.merge_lora(model, folder, progress=False)
    finally:
        if before != {name: type(module) for name, module in model.named_modules()}:
            raise Wrong("modules of the adapter are left in the model")
    return {}


_BESIDE = {
    "dcp": (_distributed, _damage_distributed, _read_distributed),
    "adapter": (_adapter, _damage_adapter, _read_adapter),
}
