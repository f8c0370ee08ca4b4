"""Which tensor goes where."""

from __future__ import annotations

import pytest
import torch

from offload.device_map import ON_DISK, Place, place_of, places
from offload.errors import DeviceMapError

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("cpu", Place(False, CPU)),
        (CPU, Place(False, CPU)),
        ("meta", Place(False, META)),
        ("disk", Place(True, CPU)),
        ("disk:cpu", Place(True, CPU)),
    ],
)
def test_a_word_names_a_place(word: str, place: Place) -> None:
    assert place == place_of(word, CPU)


def test_disk_executes_on_the_default_device() -> None:
    assert Place(True, META) == place_of(ON_DISK, META)


def test_one_word_is_for_every_tensor() -> None:
    assert {"a.weight": Place(True, CPU), "b": Place(True, CPU)} == places(["a.weight", "b"], "disk:cpu")


def test_the_longest_prefix_wins() -> None:
    device_map = {"": "cpu", "model": "meta", "model.layers.1": "disk:cpu"}

    placed = places(["head", "model.layers.0.w", "model.layers.1.w", "model.layers.10.w"], device_map)

    assert [Place(False, CPU), Place(False, META), Place(True, CPU), Place(False, META)] == list(placed.values())


def test_a_tensor_itself_can_be_named() -> None:
    assert Place(True, CPU) == places(["model.bias"], {"model": "cpu", "model.bias": "disk:cpu"})["model.bias"]


def test_a_tensor_that_the_map_leaves_out_is_named() -> None:
    with pytest.raises(DeviceMapError, match=r"no place for 'head\.weight'"):
        places(["model.w", "head.weight"], {"model": "cpu"})


@pytest.mark.parametrize("word", ["dsik", "disk:", "disk:nowhere", "", None, 3.5, "cuda:99"])
def test_an_unknown_word_is_named_with_its_module(word: object) -> None:
    with pytest.raises(DeviceMapError, match=r"'model\.layers'"):
        places(["model.layers.w"], {"model.layers": word})  # type: ignore[dict-item]
