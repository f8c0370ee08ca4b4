"""Which tensor goes where."""

import warnings
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from offload.errors import DeviceMapError
from offload.models import device_map as module
from offload.models.device_map import (
    AUTOMATIC,
    Place,
    execution_devices,
    infer_device_map,
    place_of,
    places,
    warn_of_strangers,
)

CPU = torch.device("cpu")
META = torch.device("meta")
GPU_0 = torch.device("cuda", 0)
GPU_1 = torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that claims to have two: for planning only."""

    def existing(device: torch.device | str | int) -> torch.device:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if found.type == "cuda" and (found.index or 0) > 1:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", found.index or 0) if found.type == "cuda" else found

    monkeypatch.setattr(module, "existing", existing)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))


WORDS: dict[Any, Place] = {
    "cpu": Place(False, CPU),
    CPU: Place(False, CPU),
    None: Place(False, CPU),  # no map
    "meta": Place(False, META),
    "disk": Place(True, GPU_0),  # the current accelerator
    "disk:cpu": Place(True, CPU),
    0: Place(False, GPU_0),
    1: Place(False, GPU_1),
    "cuda": Place(False, GPU_0),
    "cuda:1": Place(False, GPU_1),
    GPU_1: Place(False, GPU_1),
    "disk:cuda:1": Place(True, GPU_1),
    "disk:cuda": Place(True, GPU_0),
}


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_a_word_places_all(two_gpus, word):
    assert {"a.w": WORDS[word], "b": WORDS[word]} == places(["a.w", "b"], word)
    assert word != "disk" or Place(True, META) == place_of(word, META)


def test_disk_executes_on_the_cpu_where_a_build_for_cuda_finds_no_device(monkeypatch):
    """Like torch's own wheels, which name the accelerator they are built for."""

    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)

    assert Place(True, CPU) == places(["w"], "disk")["w"]


def test_the_longest_prefix_wins():
    device_map = {"": "cpu", "model": "meta", "model.layers.1": "disk:cpu", "model.layers.1.b": "meta"}
    names = ["head", "model.layers.0.w", "model.layers.1.w", "model.layers.10.w", "model.layers.1.b"]

    assert [Place(False, CPU), Place(False, META), Place(True, CPU), *[Place(False, META)] * 2] == list(
        places(names, device_map).values()
    )


@pytest.mark.parametrize("word", ["dsik", "disk:", "disk:nowhere", "", None, 3.5, "cuda:99", True, [0], -1])
def test_an_unknown_word_is_named_with_its_module(word):
    with pytest.raises(DeviceMapError, match=r"'model\.layers' is not a place"):
        places(["model.layers.w"], {"model.layers": word})  # type: ignore[dict-item]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"layers": "cpu"}, r"no place for 'head\.weight'"),
        ({"layers": 0, "head": 2}, "2 for 'head' is not a place .*invalid device ordinal"),
        *(({"layers": word}, f"'{word}' for 'layers' .* applies to a whole model") for word in AUTOMATIC),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused_by_name(device_map, words):
    with pytest.raises(DeviceMapError, match=words):
        places(["layers.w", "head.weight"], device_map)


@pytest.mark.parametrize(
    ("device_map", "device"),
    [
        ({"a": "disk", "b": "cpu", "c": 1, "d": 0}, GPU_1),  # the map's first
        ({"a": "disk", "b": "disk:cuda:1"}, GPU_1),
        ({"a": "disk:cpu", "b": 1}, CPU),
        ({"": 1, "a": "disk"}, GPU_1),
    ],
)
def test_values_on_disk_execute_on_the_first_accelerator_unless_the_map_names_another(two_gpus, device_map, device):
    assert Place(True, device) == places(["a.w"], device_map)["a.w"]


@pytest.mark.parametrize(
    ("placed", "expected"),
    [
        (
            {
                "layers.0.a.w": Place(False, GPU_0),
                "layers.0.b.w": Place(True, GPU_0),
                "embed.w": Place(True, GPU_0),
                "layers.1.a.w": Place(True, GPU_1),
                "head.w": Place(False, CPU),
            },
            dict.fromkeys(("", "embed", "layers.0", "layers.0.a", "layers.0.b"), GPU_0)
            | {"layers.1": GPU_1, "layers.1.a": GPU_1, "head": CPU},
        ),
        (
            {"block.scale": Place(False, GPU_1), "block.a.w": Place(False, GPU_0), "w": Place(True, GPU_0)},
            {"": GPU_0, "block": GPU_1, "block.a": GPU_0},
        ),
        ({"a.w": Place(False, META), "b.w": Place(False, GPU_1)}, {"": GPU_1, "b": GPU_1}),
        ({"a.w": Place(False, META)}, {}),
    ],
    ids=["all in one place, or nothing", "its own tensors decide", "meta beside another", "meta alone"],
)
def test_a_module_runs_where_its_tensors_are(placed, expected):
    assert expected == execution_devices(placed)


def test_names_that_the_model_does_not_have_are_warned_of_and_no_others():
    modules, tensors = ["", "model", "model.drop"], ["model.w"]
    with pytest.warns(UserWarning, match=r"they are ignored: 'model\.layer\.0', 'zzz'$"):
        warn_of_strangers({"": "cpu", "model.layer.0": "disk", "model.drop": 0, "zzz": "cpu"}, modules, tensors)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device_map in ("disk", 0, {"": "disk", "model": "cpu", "model.w": "disk"}):
            warn_of_strangers(device_map, modules, tensors)  # type: ignore[arg-type]


# Automatic maps


def small() -> nn.Module:
    """64, 72 and 100 bytes."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


def inferred(word: str, max_memory: object, **options: object) -> dict[str, object]:
    return infer_device_map(small(), word, max_memory=max_memory, **options)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("word", AUTOMATIC)
def test_automatic_words_place_as_accelerate_does(word):
    shares = {"cpu": 200}

    assert accelerate.infer_auto_device_map(small(), max_memory=shares) == inferred(word, shares)
    assert {"cpu", "disk"} == set(inferred(word, shares).values())
    assert {"": "cpu"} == inferred(word, {"cpu": "1MiB"}) == inferred(word, None)
    assert {"": "cpu"} == inferred(word, shares, dtype=torch.float16)  # as it will be loaded


def test_a_map_over_several_accelerators_is_planned(two_gpus):
    found = inferred("sequential", {0: 200, 1: 150, "cpu": 0})

    assert {"0": 0, "1": 1, "2": "disk"} == found


def test_classes_that_are_not_to_be_split_stay_together():
    model = nn.Sequential(small(), small())

    def placed(amount: int, classes: list[str] | None) -> Any:
        return infer_device_map(model, "sequential", max_memory={"cpu": amount}, no_split_module_classes=classes)

    assert any("." in name for name in placed(300, None))
    assert not any("." in name for name in placed(500, ["Sequential"]))


@pytest.mark.parametrize(
    ("max_memory", "words"),
    [
        ("8GiB", r"device_map='auto' needs max_memory by device, as \{'cpu': '8GiB'\}, not '8GiB'"),
        ({}, "needs max_memory by device"),
        ({"cuda:0": "1GiB"}, "max_memory: 'cuda:0' is not a device of this machine: use 'cpu', or 0, 1"),
        ({True: 5}, "max_memory: True is not a device"),
        ({"cpu": "much"}, "max_memory for 'cpu': 'much' is not an amount of memory"),
        ({0: 0.5}, "max_memory for 0: 0.5 is a fraction"),
    ],
)
def test_a_max_memory_that_makes_no_sense_is_refused(max_memory, words):
    with pytest.raises(DeviceMapError, match=words):
        inferred("auto", max_memory)


@pytest.mark.parametrize(
    ("word", "asked"), [("auto", [False]), ("balanced", [False]), ("balanced_low_0", [True]), ("sequential", [])]
)
def test_accelerate_balances_the_devices(word, asked, monkeypatch):
    low_zeros = []

    def balanced(model: object, shares: object, *, low_zero: bool, **_: object) -> dict[object, int]:
        low_zeros.append(low_zero)
        return {"cpu": 200}

    monkeypatch.setattr(accelerate.utils, "get_balanced_memory", balanced)
    found = inferred(word, {"cpu": 10_000})

    assert asked == low_zeros
    assert ("disk" in found.values()) == bool(asked)


def test_buffers_on_disk_take_no_memory_on_the_device_where_they_execute():
    model = small()
    model[2].register_buffer("large", torch.zeros(100))

    with pytest.warns(UserWarning, match="buffer"):
        infer_device_map(model, "sequential", max_memory={0: 250, "cpu": "1GB"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_device_map(model, "sequential", max_memory={0: 250, "cpu": "1GB"}, offload_buffers=True)
