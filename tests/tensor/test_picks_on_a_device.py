"""Rows that are picked from packed values for an accelerator: what is stored of them crosses the bus, and no more."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import offload
from offload import OffloadedTensor
from offload.checkpoints.forms.formats import unpacked
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor.blocks import decode
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU
from offload.tensor.recipes import Piece, joined
from offload.tensor.runs import Decoder
from offload.tensor.views import handle_of
from offload.tensor.wrapper import guest_of, wrap_handle
from tests.campaigns import amount
from tests.checkpoints import test_forms_parts as forms
from tests.checkpoints.pieces import bits_of, random_bytes, random_scales, stored
from tests.prefetch import delayed_device as delayed
from tests.prefetch.delayed_device import MIB, on_the_device
from tests.tensor.test_on_a_device import crossing
from tests.tensor.test_products import packed_table

ROWS, COLUMNS = 512, 4096
PICKS = [300, 3, 131, 130, 3]  # four rows, in three blocks of 128
_MUCH = 1.02  # of what is stored of the picked rows

Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WAYS: list[Pick] = [
    lambda table, rows: F.embedding(rows, table) if table.dim() == 2 else table[rows],
    lambda table, rows: table[1:].index_select(0, rows.clamp(max=len(table) - 2)),
]


def _weight(folder: Path, made: forms.Made) -> OffloadedTensor:
    pieces, settings = made
    dense = unpacked(stored(folder, {f"layer.{name}": piece for name, piece in pieces.items()}), settings)
    assert dense is not None
    return dense["layer.weight"]


def _fp8(folder: Path) -> tuple[OffloadedTensor, int]:
    numbers = forms.finite(random_bytes(ROWS, COLUMNS, dtype=torch.float8_e4m3fn))
    pieces = {"weight": numbers, "weight_scale_inv": random_scales(ROWS // 128, COLUMNS // 128)}
    table = _weight(folder, (pieces, {"quant_method": "fp8", "weight_block_size": [128, 128]}))
    return table, 4 * COLUMNS + 3 * COLUMNS // 128 * 4


def _nf4(folder: Path) -> tuple[OffloadedTensor, int]:
    """With packed scales: two rows share a scale of theirs."""
    import json

    state = {"shape": [ROWS, COLUMNS], "dtype": "bfloat16", "blocksize": 64, "nested_blocksize": 128}
    written = torch.tensor(list(json.dumps({**state, "nested_offset": 0.25}).encode()), dtype=torch.uint8)
    pieces = {
        "weight": random_bytes(ROWS * COLUMNS // 2, 1),
        "weight.absmax": random_bytes(ROWS * COLUMNS // 64, seed=3),
        "weight.nested_absmax": random_scales(ROWS * COLUMNS // 64 // 128),
        "weight.nested_quant_map": random_scales(256),
        "weight.quant_state.bitsandbytes__nf4": written,
    }
    pair = 2 * (COLUMNS // 2 + COLUMNS // 64) + 4
    return _weight(folder, (pieces, {"quant_method": "bitsandbytes"})), 3 * pair + 256 * 4


def _joined(*tables: OffloadedTensor) -> OffloadedTensor:
    """One below the other, in bfloat16."""
    layout = contiguous(torch.bfloat16, (len(tables) * ROWS, COLUMNS))
    places = [(number * ROWS, 0) for number in range(len(tables))]
    return wrap_handle(joined(layout, [Piece(handle_of(table)) for table in tables], places, "joined").handle, CPU)


def _gguf(folder: Path, times: int) -> tuple[OffloadedTensor, int]:
    """In blocks of 32, which have 34 bytes each."""
    table = packed_table(folder, ROWS, COLUMNS)
    return _joined(*[table] * times) if times else table, 4 * COLUMNS // 32 * 34


TABLES: dict[str, Callable[[Path], tuple[OffloadedTensor, int]]] = {
    "fp8": _fp8,
    "nf4": _nf4,
    "gguf": partial(_gguf, times=0),
    "gguf, cast": partial(_gguf, times=1),
    "gguf, joined": partial(_gguf, times=2),
    "cast": lambda folder: (_joined(stored(folder, {"table": torch.randn(ROWS, COLUMNS)})["table"]), 4 * COLUMNS * 4),
}


@pytest.mark.parametrize("form", TABLES)
@on_the_device
def test_picked_rows_are_sent_as_they_are_stored(device: torch.device, folder: Path, form: str) -> None:
    delayed.ops.late(50)
    table, needed = TABLES[form](folder)
    rows, there, found = torch.tensor(PICKS), table.to(device), list[torch.Tensor]()
    numbers = rows.to(device)
    there[numbers]  # tables of decoders go to the device once

    sent = crossing(lambda: found.append(there[numbers]))

    assert torch.equal(bits_of(table[rows]), bits_of(found[0].cpu()))
    assert needed <= sent <= _MUCH * needed


@on_the_device
def test_rows_that_numpy_decodes_are_not_sent_there_and_back(device: torch.device, folder: Path) -> None:
    delayed.ops.late(50)
    blocks = stored(folder, {"table": random_bytes(ROWS, COLUMNS // 256 * 66)})["table"]
    decoder = Decoder(partial(decode, kind="TQ2_0"), (1,))
    recipe = Decoded(contiguous(torch.float32, (ROWS, COLUMNS)), decoder, [Piece(handle_of(blocks))])
    table, rows, found = wrap_handle(Handle.compose(recipe, "table"), CPU), torch.tensor(PICKS), list[torch.Tensor]()
    back = delayed.ops.returned()

    sent = crossing(lambda: found.append(table.to(device)[rows]))

    assert 0 == delayed.ops.returned() - back
    assert sent <= _MUCH * 4 * COLUMNS * 4
    assert torch.equal(bits_of(table[rows]), bits_of(found[0].cpu()))


@on_the_device
def test_picked_experts_are_sent_as_they_are_stored(device: torch.device, folder: Path) -> None:
    """Of a stack that is joined from them."""
    delayed.ops.late(50)
    pieces: dict[str, torch.Tensor] = {}
    for number in range(8):
        pieces[f"{number}.weight"] = forms.finite(random_bytes(256, 1024, dtype=torch.float8_e4m3fn, seed=number))
        pieces[f"{number}.weight_scale_inv"] = random_scales(2, 8, seed=number)
    dense = unpacked(stored(folder, pieces), {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert dense is not None
    experts = [Piece(handle_of(dense[f"{number}.weight"])) for number in range(8)]
    stacked = [Piece(one.handle, one.view_spec.unsqueeze(0)) for one in experts]
    layout = contiguous(torch.bfloat16, (8, 256, 1024))
    table = joined(layout, stacked, [(number, 0, 0) for number in range(8)], "experts")
    rows, there = torch.tensor([6, 1, 6]), wrap_handle(table.handle, CPU).to(device)
    numbers, found = rows.to(device), list[torch.Tensor]()

    sent = crossing(lambda: found.append(there[numbers]))

    needed = 2 * (256 * 1024 + 2 * 8 * 4)
    assert torch.equal(bits_of(wrap_handle(table.handle, CPU)[rows]), bits_of(found[0].cpu()))
    assert needed <= sent <= _MUCH * needed


@pytest.mark.parametrize("is_packed", [False, True])
@on_the_device
def test_a_device_without_room_for_picked_rows_keeps_less(device: torch.device, folder: Path, is_packed: bool) -> None:
    delayed.ops.late(50)
    values = {f"w{number}": torch.full((1 << 18,), float(number)) for number in range(6)}
    weights = stored(folder, {**values, "table": torch.randn(ROWS, COLUMNS)})
    (folder / "packed").mkdir()
    table = _fp8(folder / "packed")[0] if is_packed else weights["table"]
    rows = torch.arange(200)
    torch.accelerator.synchronize()
    delayed.ops.limit(delayed.ops.allocated() + 8 * MIB)

    with offload.set_max_memory({"delayed:0": 6 * MIB}):
        for name in values:
            guest_of(weights[name].to(device))
        found = table.to(device)[rows].cpu()

    assert torch.equal(bits_of(table[rows]), bits_of(found))


@pytest.mark.campaign("devices")
@pytest.mark.parametrize("form", forms.FORMS)
@on_the_device
def test_picked_rows_have_the_bits_that_they_have_on_the_cpu(device: torch.device, folder: Path, form: str) -> None:
    """Any rows of any sizes, in blocks or parts of these."""
    delayed.ops.late(0)
    chance, wrong = random.Random(1), list[object]()
    for number in range(amount("devices", usual=2, whole=20)):
        (folder / str(number)).mkdir()
        made = forms.FORMS[form](chance.randint)
        table = _weight(folder / str(number), made)
        whole, there = table.materialize(), table.to(device)
        for count in (1, len(whole) // 2):
            rows = torch.tensor([chance.randrange(len(whole)) for _ in range(max(count, 1))])
            for way, pick in enumerate(WAYS if len(whole) > 1 else WAYS[:1]):
                found = pick(there, rows.to(device)).cpu()
                if not torch.equal(bits_of(pick(whole, rows)), bits_of(found)):
                    wrong.append((number, rows.tolist(), way))

    assert [] == wrong
