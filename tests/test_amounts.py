"""Amounts of memory mean the same everywhere."""

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload.errors import ArgumentError
from offload.memory import as_budget, as_bytes
from offload.prefetch.engine import POOL


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        *((0, 0), (1, 1), (np.int64(4096), 4096), ("4096", 4096), ("12B", 12), (" 1.5 KiB ", 1536), (2**70, 2**70)),
        ("3gb", 3_000_000_000),
    ],
)
def test_an_amount_is_bytes_or_text(amount, expected):
    assert as_bytes(amount) == expected


@pytest.mark.parametrize("parse", [as_bytes, as_budget])
@pytest.mark.parametrize(
    "amount", ["many", "", "0.5", "8G", "-1GiB", -1, 0.0, 0.5, 1.5, float("nan"), True, None, [1], "9" * 400]
)
def test_invalid_amounts_are_refused(parse, amount):
    with pytest.raises(ArgumentError, match="is not an amount of memory"):
        parse(amount)


BUDGETS = {
    "set_max_memory": offload.set_max_memory,
    "set_max_memory by device": lambda amount: offload.set_max_memory({"cpu": amount}),
    "set_read_ahead": offload.budget.set_read_ahead,
    "max_memory": lambda amount: offload.load_checkpoint_and_dispatch(nn.Linear(1, 1), "nowhere", max_memory=amount),
    "read_ahead": lambda amount: offload.load_checkpoint_and_dispatch(nn.Linear(1, 1), "nowhere", read_ahead=amount),
}


@pytest.mark.parametrize("amount", [1, "8", "512KiB", 1_048_575])
@pytest.mark.parametrize("way", BUDGETS)
def test_a_budget_of_a_few_bytes_is_refused(way, amount):
    before = POOL.max_memory, POOL.window

    with pytest.raises(ArgumentError, match=f"{amount!r} is less than 1 MiB"):
        BUDGETS[way](amount)

    assert (POOL.max_memory, POOL.window) == before


@pytest.mark.parametrize("amount", [0, "0", 1 << 20, "1MiB"])
def test_a_budget_of_zero_and_a_small_one_are_accepted(amount):
    with offload.set_max_memory(amount), offload.budget.set_read_ahead(amount):
        assert POOL.max_memory in (0, 1 << 20)


def made(min_bytes):
    with offload.offloading(min_bytes=min_bytes):
        return offload.is_offloaded(torch.ones(1000))


def saved(min_bytes):
    """Whether tensors saved by an op for backward would go to disk."""
    with offload.training.offload_activations(min_bytes=min_bytes):
        result = torch.ones(1000, requires_grad=True).exp()
    return result.grad_fn._raw_saved_result.data.content is not None


def kept(min_bytes):
    layer = nn.Linear(30, 30)
    optimizer = offload.training.offload_optimizer(
        torch.optim.SGD(layer.parameters(), momentum=0.9), min_bytes=min_bytes
    )
    layer(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    return offload.is_offloaded(optimizer.state[layer.weight]["momentum_buffer"])


@pytest.mark.parametrize("way", [made, saved, kept])
@pytest.mark.parametrize(("amount", "is_on_disk"), [(1, True), ("1KiB", True), ("1GiB", False)])
def test_min_bytes_means_the_same_everywhere(way, amount, is_on_disk):
    assert way(amount) is is_on_disk
    with pytest.raises(ArgumentError):
        way(0.5)
