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


SAME = {
    "memory": (PLAIN, PLAIN.detach()),
    "view": (PLAIN[1:], PLAIN[1:]),
    "parameter": (PLAIN, nn.Parameter(PLAIN)),
    "storages": (PLAIN[1:], torch.from_numpy(PLAIN.numpy()[1:])),
    "file": (STORED, STORED.detach()),
    "view of a file": (STORED[1:], STORED[1:]),
    "subclass": (TwoTensor(PLAIN, PLAIN), TwoTensor(PLAIN, PLAIN)),
    "empty": (EMPTY, EMPTY),
    "meta": (META, META),
    "sparse": (SPARSE, SPARSE),
}
OTHER = {
    "clone": (PLAIN, PLAIN.clone()),
    "part": (PLAIN, PLAIN[1:]),
    "shape": (PLAIN, PLAIN.view(4, 3)),
    "dtype": (PLAIN, PLAIN.view(torch.int32)),
    "part of a file": (STORED, STORED[1:]),
    "file and memory": (STORED, PLAIN),
    "subclass and inside": (TwoTensor(PLAIN, PLAIN), PLAIN),
    "two empty": (EMPTY, torch.empty(0)),
    "two meta": (META, torch.empty(3, device="meta")),
}


@pytest.mark.parametrize("pair", [*SAME, *OTHER])
def test_the_same_view_of_the_same_bytes_is_one(pair):
    one, other = {**SAME, **OTHER}[pair]

    assert (pair in SAME) == (identity_of(one) == identity_of(other))
