"""What is damaged and read in `bench.fuzz`: checkpoints of models, in every packed form, and what comes beside them.

Always true:
- a sample notes in the file `form` which of `tests.checkpoints.forms` it is; that note is never damaged
- a checkpoint that does not fit itself is refused when it is loaded: an error at a later op is a failure
- a weight read as a whole, by rows, and through a product is the same weight; and it is that of plain transformers
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import offload
from bench.fuzz import Files, Kind, Wrong, files_of
from bench.mutations import bytes_damaged, gguf_damaged, json_file_damaged, pieces_damaged, safetensors_damaged
from offload.errors import OffloadError
from offload.kernels.native import DTYPES
from tests.checkpoints.forms import FORMS, PROMPT

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
        if not form.startswith(_OF_MODULES):
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
    dense = {name: value if type(value) is torch.Tensor else value.dequantize() for name, value in state.items()}
    return {name: _one_nan(value) for name, value in dense.items()}
