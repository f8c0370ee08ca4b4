"""Which tensor goes where."""

import warnings

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


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("cpu", Place(False, CPU)),
        (CPU, Place(False, CPU)),
        ("meta", Place(False, META)),
        ("disk", Place(True, META)),  # where it executes by default
        ("disk:cpu", Place(True, CPU)),
    ],
)
def test_a_word_names_a_place(word, place):
    assert place == place_of(word, META)


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        ("disk:cpu", {"a.weight": Place(True, CPU), "b": Place(True, CPU)}),
        (None, {"a.weight": Place(False, CPU), "b": Place(False, CPU)}),
        ({"": "cpu", "a": "cpu", "a.weight": "disk:cpu"}, {"a.weight": Place(True, CPU), "b": Place(False, CPU)}),
    ],
    ids=["a word for all", "no map", "a tensor itself"],
)
def test_a_map_places_every_tensor(device_map, expected):
    assert expected == places(list(expected), device_map)


def test_disk_executes_on_the_cpu_where_a_build_for_cuda_finds_no_device(monkeypatch):
    """Like torch's own wheels, which name the accelerator they are built for."""

    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)

    assert Place(True, CPU) == module.places(["w"], "disk")["w"]


def test_the_longest_prefix_wins():
    device_map = {"": "cpu", "model": "meta", "model.layers.1": "disk:cpu"}
    placed = places(["head", "model.layers.0.w", "model.layers.1.w", "model.layers.10.w"], device_map)

    assert [Place(False, CPU), Place(False, META), Place(True, CPU), Place(False, META)] == list(placed.values())


@pytest.mark.parametrize("word", ["dsik", "disk:", "disk:nowhere", "", None, 3.5, "cuda:99", True, "auto", [0], -1])
def test_an_unknown_word_is_named_with_its_module(word):
    with pytest.raises(DeviceMapError, match=r"'model\.layers'"):
        places(["model.layers.w"], {"model.layers": word})


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"layers": "cpu"}, r"no place for 'head\.weight'"),
        ({"layers": 0, "head": 2}, "2 for 'head' is not a place .*invalid device ordinal"),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused_by_name(device_map, words):
    with pytest.raises(DeviceMapError, match=words):
        places(["layers.w", "head.weight"], device_map)


@pytest.mark.parametrize(
    ("word", "place"),
    [
        (0, Place(False, GPU_0)),
        (1, Place(False, GPU_1)),
        ("cuda", Place(False, GPU_0)),
        ("cuda:1", Place(False, GPU_1)),
        (GPU_1, Place(False, GPU_1)),
        ("disk:cuda:1", Place(True, GPU_1)),
        ("disk:cuda", Place(True, GPU_0)),
    ],
)
def test_accelerators_have_numbers_and_names(two_gpus, word, place):
    assert place == places(["a.w"], {"a": word})["a.w"]


@pytest.mark.parametrize(
    ("device_map", "device"),
    [
        ({"a": "disk"}, GPU_0),  # the current one
        ({"a": "disk", "b": "cpu", "c": 1, "d": 0}, GPU_1),  # the map's first
        ({"a": "disk", "b": "disk:cuda:1"}, GPU_1),
        ({"a": "disk:cpu", "b": 1}, CPU),
        ({"": 1, "a": "disk"}, GPU_1),
    ],
)
def test_values_on_disk_execute_on_the_first_accelerator_unless_the_map_names_another(two_gpus, device_map, device):
    assert Place(True, device) == places(["a.w"], device_map)["a.w"]


# What runs where


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


# Unknown names


def test_unknown_names_are_reported():
    device_map = {"": "cpu", "model.layer.0": "disk", "model.drop": "cpu", "model.w": "disk", "zzz": "cpu"}

    with pytest.warns(UserWarning, match=r"they are ignored: model\.layer\.0, zzz$"):
        warn_of_strangers(device_map, ["", "model", "model.layers", "model.layers.0", "model.drop"], ["model.w"])


@pytest.mark.parametrize("device_map", ["disk", 0, {"": "disk"}, {"a": "cpu", "a.w": "disk"}])
def test_a_map_whose_names_are_all_the_model_s_warns_of_nothing(device_map):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_strangers(device_map, ["", "a"], ["a.w"])  # type: ignore[arg-type]


# Automatic maps


def small() -> nn.Module:
    """64, 72 and 100 bytes."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


def inferred(word: str, max_memory: object, **options: object) -> dict[str, object]:
    settings = {"no_split_module_classes": None, "dtype": None, **options}
    return infer_device_map(small(), word, max_memory=max_memory, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", AUTOMATIC)
def test_automatic_words_place_as_accelerate_does(word):
    shares = {"cpu": 200}

    assert accelerate.infer_auto_device_map(small(), max_memory=shares) == inferred(word, shares)
    assert {"cpu", "disk"} == set(inferred(word, shares).values())
    assert {"": "cpu"} == inferred(word, {"cpu": "1MiB"}) == inferred(word, None)


def test_a_map_over_several_accelerators_is_planned(two_gpus):
    found = inferred("sequential", {0: 200, 1: 150, "cpu": 0})

    assert {"0": 0, "1": 1, "2": "disk"} == found
    assert [Place(False, GPU_0), Place(False, GPU_1), Place(True, GPU_0)] == [
        *places(["0.weight", "1.weight", "2.weight"], found).values()
    ]


def test_the_dtype_once_loaded_decides_what_fits():
    assert {"disk"} < set(inferred("auto", {"cpu": 200}).values())
    assert {"": "cpu"} == inferred("auto", {"cpu": 200}, dtype=torch.float16)


@pytest.mark.parametrize(
    ("max_memory", "words"),
    [
        ("8GiB", r"device_map='auto' needs max_memory by device, as \{'cpu': '8GiB'\}, not '8GiB'"),
        (0.5, "needs max_memory by device"),
        ({"gpu": "1GiB"}, "gpu is not recognized"),
        ({"cpu": "much"}, "'much' is not an amount of memory"),
        ({"cpu": None}, "None is not an amount of memory"),
        ({"cpu": -1}, "-1 is not an amount of memory"),
    ],
)
def test_a_max_memory_that_makes_no_sense_is_refused(max_memory, words):
    with pytest.raises(DeviceMapError, match=words):
        inferred("auto", max_memory)


def test_the_max_memory_of_the_caller_stays_as_it_is():
    shares = {"cpu": "200"}

    assert {"disk"} < set(inferred("auto", shares).values())
    assert {"cpu": "200"} == shares


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
    options = {"max_memory": {0: 250, "cpu": "1GB"}, "no_split_module_classes": None, "dtype": None}

    with pytest.warns(UserWarning, match="buffer"):
        infer_device_map(model, "sequential", **options)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_device_map(model, "sequential", offload_buffers=True, **options)  # type: ignore[arg-type]
