"""Weights of torchao's classes are rebuilt over their inner tensors in the checkpoint, the only copy on disk."""

from __future__ import annotations

import copy
import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import CheckpointError
from offload.tensor.views import handle_of
from tests.checkpoints.forms import FORMS, outcome
from tests.conftest import contents
from tests.processes import run_script

pytest.importorskip("torchao")

NAMES = [name for name in FORMS if name.startswith("torchao-")]
EVERY_FORM = pytest.mark.parametrize("name", NAMES)


def written(name: str, folder: Path) -> Path:
    FORMS[name].write(folder)
    return folder


def first_weight(model: Any) -> Any:
    return model.model.layers[0].self_attn.q_proj.weight


def rewritten(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Changes or removes some tensors in the file."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    values = {**load_file(file), **change}
    save_file({key: value for key, value in values.items() if value is not None}, file, metadata)


@EVERY_FORM
def test_a_weight_is_of_torchaos_class_over_the_bytes_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    source = written(name, tmp_path / "source")

    model, info = offload.from_pretrained(source, output_loading_info=True)

    weight, expected = first_weight(model), first_weight(FORMS[name].plain(source))
    assert type(expected.data) is type(weight.materialize())
    assert source / "model.safetensors" == weight.offload_path
    assert not handle_of(weight).owned
    assert {"referenced", "in memory"} == info["forms"].keys()
    assert sum(value.nbytes for value in load_file(source / "model.safetensors").values()) == sum(
        form.nbytes for form in info["forms"].values()
    )


@EVERY_FORM
def test_a_first_write_gives_a_weight_a_file_of_its_own(name: str, tmp_path: Path) -> None:
    source, own = written(name, tmp_path / "source"), tmp_path / "own"
    before = contents(source)
    model = offload.from_pretrained(source, offload_dir=own)
    expected, weight = outcome(model), first_weight(model)
    untouched = copy.deepcopy(model)
    zeros = FORMS[name].plain(source)
    nn.init.zeros_(first_weight(zeros).qdata)

    weight.update_values(first_weight(zeros).detach())

    assert handle_of(weight).owned
    assert own == weight.offload_path.parent
    assert torch.equal(outcome(zeros).logits, outcome(model).logits)
    assert torch.equal(expected.logits, outcome(untouched).logits)
    assert before == contents(source)


@EVERY_FORM
def test_a_weight_may_be_in_memory_by_the_map(name: str, tmp_path: Path) -> None:
    source = written(name, tmp_path / "source")

    model = offload.from_pretrained(source, device_map={"model.layers.0": "cpu", "": "disk"})

    assert type(first_weight(FORMS[name].plain(source)).data) is type(first_weight(model).data)
    assert torch.equal(outcome(FORMS[name].plain(source)).logits, outcome(model).logits)


@EVERY_FORM
def test_referenced_values_are_not_stored(name: str, tmp_path: Path) -> None:
    source, own = written(name, tmp_path / "source"), tmp_path / "own"

    model = offload.from_pretrained(source, offload_dir=own, store=True)

    assert {} == (contents(own) if own.exists() else {})
    assert torch.equal(outcome(FORMS[name].plain(source)).logits, outcome(model).logits)


@EVERY_FORM
def test_another_process_gets_the_reference(name: str, tmp_path: Path) -> None:
    """The reference is small, and gives the same value there; the checkpoint is not copied."""
    source = written(name, tmp_path / "source")
    weight = first_weight(offload.from_pretrained(source)).detach()
    travels = bytes(ForkingPickler.dumps(weight))
    script = """
        import pickle, sys, torch, offload

        weight = pickle.loads(bytes.fromhex(sys.argv[1]))
        print(torch.nn.functional.linear(torch.ones(1, weight.shape[1], dtype=weight.dtype), weight).tolist())
    """

    printed = run_script(script, travels.hex())

    assert len(travels) < 8192
    assert str(F.linear(torch.ones(1, weight.shape[1], dtype=weight.dtype), weight).tolist()) == printed.strip()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_weight_scale": torch.ones(7, 1)}, "q_proj.weight"),
        ({"_weight_scale": None}, "_weight_scale.* is missing"),
        ({"_weight_qdata": None}, "_weight_qdata.* is missing"),
    ],
    ids=["of another shape", "no scale", "no data"],
)
@EVERY_FORM
def test_inner_tensors_that_do_not_fit_are_an_error_at_load(
    name: str, change: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    source = written(name, tmp_path / "source")
    rewritten(source, {f"model.layers.0.self_attn.q_proj.{key}": value for key, value in change.items()})

    with pytest.raises(CheckpointError, match=words) as error:
        offload.from_pretrained(source)

    assert "model.safetensors" in str(error.value)


NOTES: tuple[dict[str, str], ...] = (
    {"tensor_names": "["},
    {"tensor_names": "5"},
    {"tensor_names": '["a.w"]', "a.w": "3"},
    {"tensor_names": '["a.w"]'},  # without a note of its own
)


@pytest.mark.parametrize("notes", NOTES, ids=json.dumps)
def test_metadata_that_does_not_list_tensors_is_refused(notes: dict[str, str], tmp_path: Path) -> None:
    file = written("torchao-int8", tmp_path / "source") / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt", **notes})

    with pytest.raises(CheckpointError, match="should list tensors under tensor_names, but does not"):
        offload.from_pretrained(tmp_path / "source")


def test_a_cast_of_quantized_weights_is_refused(tmp_path: Path) -> None:
    """Scales belong to their numbers; with a configuration that says so, or without."""
    file = written("torchao-int8", tmp_path / "source") / "model.safetensors"

    for source in (tmp_path / "source", file):
        with pytest.raises(CheckpointError, match=r"scales can't be converted to torch\.float16"):
            convert_checkpoint(source, tmp_path / "cast", dtype=torch.float16)
    assert not (tmp_path / "cast").exists()
