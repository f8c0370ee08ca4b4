"""Comparisons with useful messages, and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import offload
from tests.equal import assert_equal, is_equal
from tests.tiny import tiny_checkpoint

NAN, OTHER_NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@dataclass
class Row:
    value: torch.Tensor
    text: str


def two(value: torch.Tensor) -> TwoTensor:
    return TwoTensor(value, value + 1)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (torch.ones(2, 3), torch.ones(2, 3)),
        (torch.tensor([NAN, -0.0]), torch.tensor([NAN, -0.0])),
        (torch.ones(1, 3), torch.ones(3, 1).t()),
        (torch.ones(0, 3), torch.ones(3, 0).t()),
        (torch.ones(1).as_strided((1,), (5,)), torch.ones(1)),
        (torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2, dtype=torch.float8_e4m3fn)),
        (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().resolve_conj()),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse()),
        (two(torch.ones(2)), two(torch.ones(2))),
        ({"a": [torch.ones(2), 1, None], "b": Row(torch.ones(2), "x")},) * 2,
        (float("nan"), float("nan")),
    ],
    ids=str,
)
def test_values_with_the_same_bits_are_equal(expected, found):
    assert_equal(expected, found)


@pytest.mark.parametrize(
    ("expected", "found", "words"),
    [
        (torch.ones(2), torch.ones(2).double(), "dtypes torch.float32 != torch.float64"),
        (torch.ones(2), torch.ones(1, 2), "shapes"),
        (torch.ones(2), [1.0, 1.0], "a tensor != "),
        (torch.ones(2, 3), torch.ones(3, 2).t(), r"strides \(3, 1\) != \(1, 2\)"),
        (torch.arange(3.0), torch.tensor([0.0, 5, 6]), "2 of 3 numbers differ, the first at 1, flat: 1.0 != 5.0"),
        (torch.zeros(2), -torch.zeros(2), "the sign of zeros"),
        (NAN, OTHER_NAN, "the bits of NaNs"),
        (torch.tensor([1 << 40]), torch.tensor([(1 << 40) + 1]), "1 of 1 numbers differ"),
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64) + 1j, "2 of 4 numbers differ"),
        (two(torch.ones(2)), torch.ones(2), "TwoTensor != Tensor"),
        (two(torch.ones(2)), TwoTensor(torch.ones(2), torch.ones(2)), ".b: 2 of 2 numbers differ"),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, r"\['a'\]\['b'\]\[0\]: 1 != 2"),
        ({"a": 1}, {"b": 1}, "keys"),
        ([1], (1,), r"\[1\] != \(1,\)"),
        ([1], [1, 2], "1 entries != 2"),
        (Row(torch.ones(1), "x"), Row(torch.ones(1), "y"), ".text: 'x' != 'y'"),
        (nn.Linear(2, 2), nn.Linear(2, 2), r"\['weight'\]: . of 4 numbers"),
        (True, 1, "True != 1"),
    ],
    ids=str,
)
def test_a_difference_is_reported_with_its_place(expected, found, words):
    with pytest.raises(AssertionError, match=words):
        assert_equal(expected, found)

    assert not is_equal(expected, found)
    assert is_equal(expected, found, strides=False) == words.startswith("strides")


def test_a_tiny_checkpoint_is_the_same_each_time_and_leaves_the_generator_alone(tmp_path):
    before = torch.get_rng_state()
    first, again = (offload.from_pretrained(tiny_checkpoint(tmp_path / name)) for name in ("first", "again"))

    assert torch.equal(before, torch.get_rng_state())
    assert_equal(first, again)
    assert 1 < len(list((tmp_path / "first").glob("*.safetensors")))
