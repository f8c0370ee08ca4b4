"""Runs: which stored rows make a cut of a value."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import offload
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor.backends import steps
from offload.tensor.decoded import Decoded
from offload.tensor.recipes import Joined, Piece
from offload.tensor.runs import Decoder
from offload.tensor.views import handle_of, meta_of


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[Handle]:
    path = tmp_path_factory.mktemp("runs") / "pieces.safetensors"
    save_file({"factors": torch.rand(3, 12, 1), "numbers": torch.randn(3, 12, 4)}, path)
    return [handle_of(one) for _, one in sorted(offload.load_file(path).items())]


@given(st.data())
def test_the_runs_of_any_rows_are_these_rows(stored: list[Handle], data: st.DataObject) -> None:
    """Of stacks and matrices, decoded in granules, joined with rows that are stored, and cast."""

    def range_of(end: int) -> slice:
        begin = data.draw(st.integers(0, end - 1))
        return slice(begin, data.draw(st.integers(begin + 1, end)))

    granule, rows, stacked = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12)), data.draw(st.booleans())
    specs = [meta_of(one)[:, :count] for one, count in zip(stored, (-(-rows // granule), rows), strict=True)]
    pieces = [Piece(one, spec if stacked else spec[1]) for one, spec in zip(stored, specs, strict=True)]
    layout = contiguous(torch.float32, (3, rows, 4) if stacked else (rows, 4))
    scaled = lambda factors, numbers: factors.repeat_interleave(granule, 0)[: len(numbers)] * numbers  # noqa: E731
    decoder = Decoder(scaled, (1, granule), granule)
    decoded = Piece(Handle.compose(Decoded(layout, decoder, pieces, stacked=stacked), "decoded"))
    some = decoded.view_spec.view(-1, 4)[range_of(decoded.view_spec.numel() // 4)]
    dtype, parts = data.draw(st.sampled_from([torch.float32, torch.bfloat16])), [Piece(decoded.handle, some)]
    parts += [Piece(stored[1], meta_of(stored[1])[0])] * data.draw(st.booleans())
    high = sum(len(part.view_spec) for part in parts)
    joined = Joined(contiguous(dtype, (high, 4)), parts, [(0, 0), (len(some), 0)][: len(parts)])
    whole = Piece(Handle.compose(joined, "joined"))
    cut = whole.view_spec[range_of(high)]

    runs = Piece(whole.handle, cut).runs()

    found = [run.decoder.decode(*run.values()) if run.decoder else run.values()[0] for run in runs]
    found = [run.rounded(one[run.first : run.first + run.count]) for run, one in zip(runs, found, strict=True)]
    assert torch.equal(joined.value(cut), torch.cat(found))
    assert [] == Piece(whole.handle, whole.view_spec[:, 1:]).runs()


@pytest.mark.parametrize("granule", [1, 3, 4])
@pytest.mark.parametrize("most", [1, 2, 4, 5, 9, 100])
def test_torch_decodes_no_more_rows_at_a_time_than_asked_for_unless_a_granule_has(granule: int, most: int) -> None:
    for is_divisible, start, count in product((True, False), range(9), range(1, 14)):
        found = list(steps(start, count, most, Decoder(torch.cat, (granule,), granule, is_divisible)))

        assert max(step.high - step.low for step in found) <= (most if is_divisible else max(most, granule))
