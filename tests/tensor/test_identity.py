"""Recognising tied weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from offload import OffloadedTensor
from offload.tensor.saved import identity_of

PLAIN = torch.arange(12.0).view(3, 4)
STORED = OffloadedTensor.from_original_tensor(PLAIN, "identity")
EMPTY, META, SPARSE = torch.empty(0), torch.empty(3, device="meta"), PLAIN.to_sparse()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, PLAIN.detach()),
        (PLAIN[1:], PLAIN[1:]),
        (PLAIN, nn.Parameter(PLAIN)),
        (PLAIN[1:], torch.from_numpy(PLAIN.numpy()[1:])),
        (STORED, STORED.detach()),
        (STORED[1:], STORED[1:]),
        (TwoTensor(PLAIN, PLAIN), TwoTensor(PLAIN, PLAIN)),
        (EMPTY, EMPTY),
        (META, META),
        (SPARSE, SPARSE),
    ],
    ids=["memory", "view", "parameter", "storages", "file", "view-file", "subclass", "empty", "meta", "sparse"],
)
def test_the_same_view_of_the_same_bytes_is_one(one, other):
    assert identity_of(one) == identity_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, PLAIN.clone()),
        (PLAIN, PLAIN[1:]),
        (PLAIN, PLAIN.view(4, 3)),
        (PLAIN, PLAIN.view(torch.int32)),
        (STORED, STORED[1:]),
        (STORED, PLAIN),
        (TwoTensor(PLAIN, PLAIN), PLAIN),
        (EMPTY, torch.empty(0)),
        (META, torch.empty(3, device="meta")),
    ],
    ids=["clone", "part", "shape", "dtype", "part-file", "file-memory", "subclass", "empty", "meta"],
)
def test_different_values_have_different_identities(one, other):
    assert identity_of(one) != identity_of(other)
