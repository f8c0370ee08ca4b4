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


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and an index."""
    save_file({"a": torch.arange(3.0)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2, 2), "c": torch.zeros(1)}, tmp_path / "two.safetensors")
    _index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def _index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / name


def test_a_file_a_folder_and_an_index_give_the_same_names(sharded: Path) -> None:
    """And sizes: 12 + 16 + 4 bytes."""
    for path in (sharded, sharded / "model.safetensors.index.json"):
        checkpoint = open_checkpoint(path)

        assert ["a", "b", "c"] == list(checkpoint)
        assert checkpoint.nbytes == 32
    assert ["b", "c"] == sorted(open_checkpoint(sharded / "two.safetensors"))


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "anything.safetensors")

    assert ["w"] == list(open_checkpoint(tmp_path))


def test_an_offload_folder_is_a_checkpoint_with_the_values_as_last_updated(tmp_path: Path) -> None:
    kept = [OffloadedTensor.from_original_tensor(torch.ones(2), name, tmp_path) for name in ("a/b", "A/B", "x" * 300)]
    kept[0].update_values(torch.full((2,), 5.0))

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.is_offload_folder
    assert {"a/b", "A/B", "x" * 300} == set(checkpoint)
    assert [5.0, 5.0] == OffloadedTensor.from_file(checkpoint["a/b"].file.path).tolist()


def test_a_missing_shard_is_named_with_a_tensor_that_it_holds(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()

    with pytest.raises(MissingFileError, match=r"two\.safetensors, which holds 'b', is missing"):
        open_checkpoint(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    path = sharded / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-3])

    with pytest.raises(CorruptFileError, match=r"two\.safetensors.*cut off"):
        open_checkpoint(sharded)


def test_a_shard_of_another_checkpoint_is_found_out(sharded: Path) -> None:
    """The index names a tensor that is not in the shard."""
    save_file({"z": torch.ones(1)}, sharded / "one.safetensors")

    with pytest.raises(CheckpointError, match=r"'a' is in one\.safetensors, and it is not"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", [*OUTSIDE, *OUTSIDE_ELSEWHERE])
def test_an_index_may_not_point_outside_its_folder(tmp_path: Path, shard: str) -> None:
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_checkpoint(_index(tmp_path, {"a": shard}))


@pytest.mark.parametrize("text", ["", "[]", '{"a": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\x00"])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)

    with pytest.raises(CheckpointError, match="an index of shards"):
        open_checkpoint(path)


def test_an_index_may_be_the_map_alone_and_have_any_name(sharded: Path) -> None:
    """As with accelerate."""
    path = sharded / "weights.json"
    path.write_text(json.dumps({"a": "one.safetensors", "b": "two.safetensors"}))

    assert {"a", "b"} == set(open_checkpoint(path))
    assert verify(path).is_whole


def test_a_configuration_alone_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')

    with pytest.raises(CheckpointError, match=r"config\.json is not an index of shards.*name an index, a file"):
        open_checkpoint(path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_the_only_index_is_that_of_the_shards_whatever_its_name(suffix: str, tmp_path: Path) -> None:
    for name in "ab":
        save = save_file if suffix == "safetensors" else torch.save
        save({name: torch.ones(2)}, tmp_path / f"{name}.{suffix}")
    _index(tmp_path, {name: f"{name}.{suffix}" for name in "ab"}, "mine.index.json")

    assert {"a", "b"} == open_checkpoint(tmp_path).keys()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_something_other_than_a_file_is_refused_without_waiting(
    tmp_path: Path, name: str, make: Any
) -> None:
    make(tmp_path / name)

    with pytest.raises((CheckpointError, CorruptFileError), match=re.escape(name)):
        open_checkpoint(tmp_path)


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="names no tensors"):
        open_checkpoint(_index(tmp_path, {}))


@pytest.mark.parametrize("names", [["model-00001-of-00003"], ["x-00001-of-00002", "x-00002-of-00002"]])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_without_an_index_are_not_taken_for_a_checkpoint(tmp_path: Path, names: list[str], suffix: str) -> None:
    for name in names:
        path = tmp_path / f"{name}{suffix}"
        save_file({name: torch.ones(1)}, path) if suffix != ".bin" else torch.save({name: torch.ones(1)}, path)

    with pytest.raises(CheckpointError, match=rf"{names[0]}{suffix}, a part of a checkpoint, but no index"):
        open_checkpoint(tmp_path)
    assert [names[0]] == list(open_checkpoint(tmp_path / f"{names[0]}{suffix}"))


def test_the_only_shard_is_a_checkpoint(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")

    assert ["w"] == list(open_checkpoint(tmp_path))


def test_two_files_of_an_offload_folder_may_not_hold_one_name(tmp_path: Path) -> None:
    kept = OffloadedTensor.from_original_tensor(torch.ones(2), "w", tmp_path)
    shutil.copy(kept.offload_path, tmp_path / "copy.safetensors")

    with pytest.raises(CheckpointError, match=r"w\.safetensors holds 'w', as copy\.safetensors does"):
        open_checkpoint(tmp_path)


# Files from torch.save


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """Two shards from torch.save with an index, and other files that training leaves beside them."""
    torch.save({"a": torch.arange(3.0)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.ones(2, 2), "c": torch.zeros(1)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    places = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    _index(tmp_path, {**places, "c": places["b"]}, "pytorch_model.bin.index.json")
    torch.save(Path, tmp_path / "training_args.bin")
    return tmp_path


def test_shards_of_torch_save_are_opened_by_folder_and_by_index(pickled: Path) -> None:
    for path in (pickled, pickled / "pytorch_model.bin.index.json"):
        checkpoint = open_checkpoint(path)

        assert ["a", "b", "c"] == list(checkpoint)
        assert checkpoint.nbytes == 32


@pytest.mark.parametrize("name", ["other.bin.index.json", "x.fp16.bin.index.json"])
def test_an_index_of_any_name_is_found(pickled: Path, name: str) -> None:
    (pickled / "pytorch_model.bin.index.json").rename(pickled / name)

    assert ["a", "b", "c"] == list(open_checkpoint(pickled))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_a_folder_with_one_file_of_torch_save_is_that_file(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / name)
    for beside in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth"):
        torch.save({"x": torch.ones(1)}, tmp_path / beside)

    assert ["w"] == list(open_checkpoint(tmp_path))
    assert ["w"] == list(open_checkpoint(tmp_path / name))


def test_safetensors_wins_where_both_forms_are(pickled: Path) -> None:
    torch.save({"w": torch.zeros(1)}, pickled / "pytorch_model.bin")
    save_file({"w": torch.ones(1)}, pickled / "model.safetensors")

    assert pickled / "model.safetensors" == open_checkpoint(pickled)["w"].file.path


def test_an_index_of_safetensors_wins_over_a_file_of_torch_save(sharded: Path) -> None:
    torch.save({"w": torch.zeros(1)}, sharded / "pytorch_model.bin")

    assert ["a", "b", "c"] == list(open_checkpoint(sharded))


def test_a_missing_shard_of_torch_save_is_named(pickled: Path) -> None:
    (pickled / "pytorch_model-00002-of-00002.bin").unlink()

    with pytest.raises(
        MissingFileError, match=r"00002-of-00002\.bin, which holds 'b', is missing: download or copy that shard again"
    ):
        open_checkpoint(pickled)


def test_a_shard_of_torch_save_from_another_checkpoint_is_found_out(pickled: Path) -> None:
    torch.save({"z": torch.ones(1)}, pickled / "pytorch_model-00001-of-00002.bin")

    with pytest.raises(CheckpointError, match=r"'a' is in pytorch_model-00001-of-00002\.bin, and it is not"):
        open_checkpoint(pickled)


def test_a_tensor_in_a_shard_that_the_index_places_elsewhere_is_taken_from_there(sharded: Path) -> None:
    save_file({"a": torch.arange(3.0), "b": torch.zeros(2, 2)}, sharded / "one.safetensors")

    assert sharded / "two.safetensors" == open_checkpoint(sharded)["b"].file.path


def test_a_name_twice_in_an_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "a": "two.safetensors"}}')

    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json .*names 'a' twice"):
        open_checkpoint(path)


def test_a_name_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    spec = '{"dtype": "F32", "shape": [], "data_offsets": [0, 4]}'
    text = f'{{"a": {spec}, "a": {spec}}}'.encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))

    with pytest.raises(CorruptFileError, match=r"x\.safetensors.*names 'a' twice"):
        open_checkpoint(tmp_path)


def test_an_index_of_files_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'a' in 'one\.json', which is neither \.safetensors nor \.bin"):
        open_checkpoint(_index(tmp_path, {"a": "one.json"}))


def test_a_pickle_with_code_is_refused_and_not_run_wherever_it_stands(pickled: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(pickled / "exploded"),)

    torch.save({"a": torch.ones(3), "bomb": Bomb()}, pickled / "pytorch_model-00001-of-00002.bin")

    for path in (pickled, pickled / "pytorch_model-00001-of-00002.bin"):
        with pytest.raises(CheckpointError, match=r"00001-of-00002\.bin is a pickle with more than tensors"):
            open_checkpoint(path)
    assert not (pickled / "exploded").exists()


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
