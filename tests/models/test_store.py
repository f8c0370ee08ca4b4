"""`store=True`: recipes are computed once, into files that later loads use."""

import os
from pathlib import Path

import pytest
import torch
from conftest import contents
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload.errors import ArgumentError, ForeignFileError
from offload.models import loader
from offload.models.loader import HeldForm
from offload.tensor.recipes import Joined

FLOATS = 3 * 4 * 4  # bytes of a weight in float32


@pytest.fixture
def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"{number}.weight": torch.randn(3, 4) for number in range(4)}


@pytest.fixture
def checkpoint(values: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    values = {**values, "0.weight": values["0.weight"].half()}
    save_file(values, tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


def empty() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 3, bias=False, device="meta", dtype=torch.float16) for _ in range(4)))


def load(checkpoint: Path, folder: Path, *, store: bool = True) -> tuple[nn.Sequential, offload.LoadReport]:
    model = empty()
    return model, offload.load_checkpoint_in_model(model, checkpoint, offload_dir=folder, store=store)


def assert_equal(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, value in values.items():
        assert torch.equal(value.half(), model.get_parameter(name).materialize()), name


def test_values_are_stored_once_and_used_by_later_loads(values, checkpoint, tmp_path, monkeypatch):
    """In a folder that opens as an offload folder."""
    before, folder = contents(checkpoint), tmp_path / "stored"
    model, report = load(checkpoint, folder)

    stored = contents(folder)
    assert {"referenced": HeldForm(1, FLOATS // 2), "stored": HeldForm(3, 3 * FLOATS // 2)} == report.forms
    assert [f"{number}.weight.safetensors" for number in (1, 2, 3)] == sorted(stored)
    assert_equal(values, model)
    assert before == contents(checkpoint)
    del model
    for name, tensor in offload.load_file(folder).items():
        assert torch.equal(values[name].half(), tensor.materialize())
        assert values[name].half().equal(load_file(tensor.offload_path)[name])
    monkeypatch.setattr(Joined, "value", None)
    for store in (True, False):
        again, report = load(checkpoint, folder, store=store)
        assert {"referenced", "stored"} == report.forms.keys()
        assert_equal(values, again)
    assert stored == contents(folder)


def test_a_value_that_was_written_to_is_stored_again(values, checkpoint, tmp_path):
    model, _ = load(checkpoint, tmp_path / "stored")
    with torch.no_grad():
        model[1].weight.zero_()
    assert not load_file(tmp_path / "stored" / "1.weight.safetensors")["1.weight"].any()
    del model

    assert_equal(values, load(checkpoint, tmp_path / "stored", store=False)[0])
    assert_equal(values, load(checkpoint, tmp_path / "stored")[0])


def test_a_changed_checkpoint_is_stored_again(values, checkpoint, tmp_path):
    load(checkpoint, tmp_path / "stored")
    changed = {name: value + 1 for name, value in values.items()}
    save_file(changed, checkpoint / "new.safetensors")
    os.replace(checkpoint / "new.safetensors", checkpoint / "model.safetensors")

    assert_equal(changed, load(checkpoint, tmp_path / "stored")[0])


def test_a_damaged_file_is_not_used(values, checkpoint, tmp_path):
    """Nor replaced: it may be somebody else's."""
    load(checkpoint, tmp_path / "stored")
    os.truncate(tmp_path / "stored" / "2.weight.safetensors", 4100)

    assert_equal(values, load(checkpoint, tmp_path / "stored", store=False)[0])
    with pytest.raises(ForeignFileError, match=r"2\.weight.*was not written by offload"):
        load(checkpoint, tmp_path / "stored")


def test_after_an_interruption_the_rest_is_stored(values, checkpoint, tmp_path, monkeypatch):
    """`test_crashes` kills at each call."""
    store, done = loader.store_recipe, []

    def interrupted(*given):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(store(*given))

    monkeypatch.setattr(loader, "store_recipe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, tmp_path / "stored")
    monkeypatch.undo()
    before = contents(tmp_path / "stored")

    model, _ = load(checkpoint, tmp_path / "stored")

    after = contents(tmp_path / "stored")
    assert (2, 3) == (len(before), len(after))
    assert before == {name: after[name] for name in before}
    assert_equal(values, model)


def test_store_needs_a_folder(checkpoint):
    for call in (offload.load_checkpoint_in_model, offload.load_checkpoint_and_dispatch):
        with pytest.raises(ArgumentError, match="offload_dir"):
            call(empty(), checkpoint, store=True)
    with pytest.raises(ArgumentError, match="offload_dir"):
        offload.from_pretrained(checkpoint, store=True)


def test_a_pretrained_model_is_stored(llama_folder, tmp_path, tokens):
    expected = offload.from_pretrained(llama_folder, dtype=torch.float64)
    model, info = offload.from_pretrained(
        llama_folder, dtype=torch.float64, offload_dir=tmp_path, store=True, output_loading_info=True
    )

    assert ["stored"] == [form for form in info["forms"] if form != "in memory"]
    assert info["forms"]["stored"].values == len(list(tmp_path.iterdir()))
    with torch.no_grad():
        assert torch.equal(expected(tokens).logits, model(tokens).logits)


def test_the_report_says_what_is_a_recipe_and_what_is_read(checkpoint, tmp_path):
    _, report = load(checkpoint, tmp_path / "values", store=False)

    assert {"cast": HeldForm(3, 3 * FLOATS), "referenced": HeldForm(1, FLOATS // 2)} == report.forms
    assert "all match; cast: 3 (144 bytes); referenced: 1 (24 bytes)" == str(report)
    assert not (tmp_path / "values").exists()
