"""What users and libraries note on a tensor, as attributes of Python, and how that goes along with its value.

Always true:
- what an offloaded tensor needs for itself, and what a subclass keeps of its value, goes nowhere
- what the other tensor says already stays
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from offload.storage.subclasses import extras_of, is_subclass_value
from offload.tensor.outside import SeenFromOutside

_OWN = {"_handle", "_twin", "_target", "_generation", "_range", "_is_param"}


def carry_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Have `target`, which stands for the value of `source`, say what `source` says: `ds_id`, `_is_hf_initialized`."""
    vars(target).update(_more(source, target))


def copy_attributes(source: torch.Tensor, target: torch.Tensor, memo: dict[int, Any]) -> None:
    """As `carry_attributes`, but copies of its own, as `copy.deepcopy` makes them."""
    vars(target).update(copy.deepcopy(_more(source, target), memo))


def _more(source: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """What `source` says and `target` does not."""
    is_offloaded = isinstance(source, SeenFromOutside)
    noted = vars(source) if is_offloaded else extras_of(source)
    keeps_tensors = is_offloaded or not is_subclass_value(source)  # a subclass may keep its values a second time
    return {
        name: value
        for name, value in noted.items()
        if name not in _OWN and name not in vars(target) and (keeps_tensors or not isinstance(value, torch.Tensor))
    }
