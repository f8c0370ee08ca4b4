"""A checkpoint as a mapping from names to stored values."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offload import OffloadedTensor
from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.verify import verify
from offload.errors import ArgumentError, CheckpointError, CorruptFileError, MissingFileError

OUTSIDE = ["\ud800.safetensors", "../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..", ""]
OUTSIDE_ELSEWHERE = ["..\\one.safetensors", "C:one.safetensors", "one\0.safetensors"]  # on other systems
NO_INDEXES = ["", "[]", '{"a": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\x00"]
OF_A_MODEL = '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}'


def _save(values: dict[str, torch.Tensor], path: Path) -> None:
    save_file(values, path) if path.suffix == ".safetensors" else torch.save(values, path)


@pytest.fixture(params=["safetensors", "bin"])
def suffix(request: pytest.FixtureRequest) -> str:
    """Of files from safetensors, or from torch.save."""
    return str(request.param)


@pytest.fixture
def sharded(tmp_path: Path, suffix: str) -> Path:
    """Two shards and an index, and what training leaves beside them."""
    _save({"a": torch.arange(3.0)}, tmp_path / f"one.{suffix}")
    _save({"b": torch.ones(2, 2), "c": torch.zeros(1)}, tmp_path / f"two.{suffix}")
    _index(tmp_path, {"a": f"one.{suffix}", "b": f"two.{suffix}", "c": f"two.{suffix}"}, f"model.{suffix}.index.json")
    torch.save(Path, tmp_path / "training_args.bin")
    return tmp_path


def _index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / name


def test_a_file_a_folder_and_an_index_give_the_same_names(sharded: Path, suffix: str) -> None:
    """And sizes: 12 + 16 + 4 bytes."""
    for path in (sharded, sharded / f"model.{suffix}.index.json"):
        checkpoint = open_checkpoint(path)

        assert ["a", "b", "c"] == list(checkpoint)
        assert checkpoint.nbytes == 32
    assert ["b", "c"] == sorted(open_checkpoint(sharded / f"two.{suffix}"))


@pytest.mark.parametrize("name", ["mine", "pytorch_model", "x.fp16"])
def test_the_only_index_is_that_of_the_shards_whatever_its_name(sharded: Path, suffix: str, name: str) -> None:
    (sharded / f"model.{suffix}.index.json").rename(sharded / f"{name}.{suffix}.index.json")

    assert ["a", "b", "c"] == list(open_checkpoint(sharded))


def test_an_offload_folder_is_a_checkpoint_with_the_values_as_last_updated(tmp_path: Path) -> None:
    kept = [OffloadedTensor.from_original_tensor(torch.ones(2), name, tmp_path) for name in ("a/b", "A/B", "x" * 300)]
    kept[0].update_values(torch.full((2,), 5.0))

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.is_offload_folder
    assert {"a/b", "A/B", "x" * 300} == set(checkpoint)
    assert [5.0, 5.0] == OffloadedTensor.from_file(checkpoint["a/b"].file.path).tolist()


def _foreign(path: Path) -> None:
    _save({"z": torch.ones(1)}, path)


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (os.unlink, MissingFileError, "SHARD, which holds 'b', is missing: download or copy that file again"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), CorruptFileError, "SHARD.*cut off"),
        (_foreign, CheckpointError, "'b' is in SHARD, and it is not"),
    ],
    ids=["missing", "truncated", "of another checkpoint"],
)
def test_a_harmed_shard_is_named(sharded: Path, suffix: str, harm: Any, error: type[Exception], words: str) -> None:
    harm(sharded / f"two.{suffix}")

    with pytest.raises(error, match=words.replace("SHARD", rf"two\.{suffix}")):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "an index of shards") for text in NO_INDEXES),
        *((json.dumps({"weight_map": {"a": shard}}), "outside its folder") for shard in OUTSIDE + OUTSIDE_ELSEWHERE),
        (OF_A_MODEL, r"index\.json is not an index of shards.*name an index, a file"),
        ('{"weight_map": {}}', "names no tensors"),
        ('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', r"index\.json .*names 'a' twice"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)

    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_an_index_may_be_the_map_alone_and_have_any_name(sharded: Path, suffix: str) -> None:
    """As with accelerate."""
    path = sharded / "weights.json"
    path.write_text(json.dumps({"a": f"one.{suffix}", "b": f"two.{suffix}"}))

    assert {"a", "b"} == set(open_checkpoint(path))
    assert verify(path).is_whole


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_something_other_than_a_file_is_refused_without_waiting(
    tmp_path: Path, name: str, make: Any
) -> None:
    make(tmp_path / name)

    with pytest.raises((CheckpointError, CorruptFileError), match=re.escape(name)):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("names", [["model-00001-of-00003"], ["x-00001-of-00002", "x-00002-of-00002"]])
def test_shards_without_an_index_are_not_taken_for_a_checkpoint(tmp_path: Path, names: list[str], suffix: str) -> None:
    for name in names:
        _save({name: torch.ones(1)}, tmp_path / f"{name}.{suffix}")

    with pytest.raises(CheckpointError, match=rf"{names[0]}\.{suffix}, a part of a checkpoint, but no index"):
        open_checkpoint(tmp_path)
    assert [names[0]] == list(open_checkpoint(tmp_path / f"{names[0]}.{suffix}"))


def test_two_files_of_an_offload_folder_may_not_hold_one_name(tmp_path: Path) -> None:
    kept = OffloadedTensor.from_original_tensor(torch.ones(2), "w", tmp_path)
    shutil.copy(kept.offload_path, tmp_path / "copy.safetensors")

    with pytest.raises(CheckpointError, match=r"w\.safetensors holds 'w', as copy\.safetensors does"):
        open_checkpoint(tmp_path)


ALONE = ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt", "x.safetensors"]


@pytest.mark.parametrize("name", [*ALONE, "model-00001-of-00001.safetensors"])
def test_a_folder_with_one_file_is_that_file(tmp_path: Path, name: str) -> None:
    _save({"w": torch.ones(1)}, tmp_path / name)
    for beside in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth"):
        torch.save({"x": torch.ones(1)}, tmp_path / beside)

    assert ["w"] == list(open_checkpoint(tmp_path))
    assert ["w"] == list(open_checkpoint(tmp_path / name))


def test_safetensors_wins_where_both_forms_are(sharded: Path) -> None:
    """Whether a file or an index, over a file or an index from torch.save."""
    torch.save({"w": torch.zeros(1)}, sharded / "pytorch_model.bin")
    if not (sharded / "model.safetensors.index.json").exists():
        save_file({"a": torch.ones(1)}, sharded / "model.safetensors")

    assert ".safetensors" == open_checkpoint(sharded)["a"].file.path.suffix


def test_a_tensor_in_a_shard_that_the_index_places_elsewhere_is_taken_from_there(sharded: Path, suffix: str) -> None:
    _save({"a": torch.arange(3.0), "b": torch.zeros(2, 2)}, sharded / f"one.{suffix}")

    assert sharded / f"two.{suffix}" == open_checkpoint(sharded)["b"].file.path


def test_two_checkpoints_in_a_folder_need_a_path(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(1)}, tmp_path / "b.safetensors")

    with pytest.raises(CheckpointError, match="name the file"):
        open_checkpoint(tmp_path)


def test_an_empty_folder_and_no_folder_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint, neither \.safetensors nor \.bin"):
        open_checkpoint(tmp_path)
    with pytest.raises(MissingFileError, match="nowhere does not exist: give a file, an index or a folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match="is not a path: it holds a NUL"):
        open_checkpoint(tmp_path / "no\0where")
