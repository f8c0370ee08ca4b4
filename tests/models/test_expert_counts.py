"""The uses of experts are kept in a file, and the next run begins with them."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.budget import handles_in
from offload.errors import CorruptFileError, ForeignFileError, OffloadError
from offload.integrations.compressed_tensors import quantize_checkpoint
from offload.prefetch.value import page_state_of
from offload.tensor.recipes import stored_in
from offload.testing.checkpoints import tiny_checkpoint
from tests.processes import ended, forked

WORDS = torch.arange(3)[None]

Uses = dict[tuple[str, int, int], float]


@pytest.fixture(params=["dense", "fp8"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, which lie apart in its checkpoint."""
    tmp_path = tmp_path_factory.mktemp("mixture")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 384, "num_experts": 8}
    made = tiny_checkpoint(tmp_path / "dense", "qwen3_moe", **sizes, max_shard_size="1MB")
    if request.param == "fp8":
        made = tmp_path / "fp8"
        quantize_checkpoint(tmp_path / "dense", made, "fp8", progress=False)
    return made


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    return tmp_path / "counts.json"


def loaded(folder: Path, counts: Path) -> Any:
    return offload.from_pretrained(folder, max_memory="1GiB", expert_counts=counts)


def uses_of(model: Any) -> Uses:
    """The uses of the experts that a model has read; one use just now is 1."""
    found = {}
    for handle in stored_in(handles_in([model])):
        for key, value in page_state_of(handle).ranges.items():
            if value.is_picked:
                found[handle.path.name, *key] = value.uses / value.pool.picked.worth
    return found


def uses_in(counts: Path) -> Uses:
    files = json.loads(counts.read_text())["files"]
    return {(name, start, size): uses for name, found in files.items() for start, size, uses in found}


@torch.no_grad()
def test_the_next_run_begins_with_the_uses_of_the_one_before(folder: Path, counts: Path) -> None:
    model = loaded(folder, counts)
    model(WORDS)
    first = uses_of(model)
    del model
    gc.collect()
    noted = uses_in(counts)
    model = loaded(folder, counts)
    model(WORDS)

    assert first
    assert pytest.approx(first, abs=1e-3) == noted
    second = uses_of(model)
    assert first.keys() == second.keys()
    assert all(second[key] > 1.3 * first[key] for key in first)


@torch.no_grad()
def test_a_run_that_uses_no_expert_keeps_what_was_noted(folder: Path, counts: Path) -> None:
    model = loaded(folder, counts)
    model(WORDS)
    del model
    gc.collect()
    before = counts.read_bytes()

    loaded(folder, counts)
    gc.collect()

    assert before == counts.read_bytes()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"mine": 1}', ForeignFileError),
        ("mine", ForeignFileError),
        ('{"offload": {"expert uses": 1}, "files": {"model.safetensors": [[1, 2]]}}', CorruptFileError),
        ('{"offload": {"expert uses": 1}, "files": [1]}', CorruptFileError),
        ('{"offload": {"expert uses": 1}, "files": {"a": [[0, 1, NaN]]}}', OffloadError),
        ('{"offload": {"expert uses": 1}, "files": {"a": [[0, 1, 1e999]]}}', CorruptFileError),
        ('{"offload": {"expert uses": 1}, "files": {"a": [[0, 1, -1]]}}', CorruptFileError),
    ],
)
def test_a_file_of_another_kind_is_refused_and_left(folder: Path, counts: Path, text: str, error: type) -> None:
    counts.write_text(text)

    with pytest.raises(error):
        loaded(folder, counts)
    gc.collect()

    assert text == counts.read_text()


def test_uses_that_can_not_be_written_are_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "below").write_text("a file")
    model = loaded(folder, tmp_path / "below" / "counts.json")

    with caplog.at_level(logging.WARNING):
        del model
        gc.collect()

    assert "the uses of experts are not noted" in caplog.text


@torch.no_grad()
def test_a_forked_child_does_not_write_the_file(folder: Path, counts: Path) -> None:
    model = [loaded(folder, counts)]
    model[0](WORDS)

    def child() -> None:
        model.clear()
        gc.collect()

    assert 0 == ended(forked(child))

    assert not counts.exists()


def test_a_file_that_has_come_there_meanwhile_is_left(folder: Path, counts: Path) -> None:
    model = loaded(folder, counts)
    counts.write_text("mine")

    del model
    gc.collect()

    assert "mine" == counts.read_text()


@torch.no_grad()
def test_uses_of_a_long_run_are_scaled_down(folder: Path, counts: Path) -> None:
    model = loaded(folder, counts)
    model(WORDS)
    del model
    gc.collect()
    content = json.loads(counts.read_text())
    content["files"] = {name: [[*one[:2], 1e9] for one in found] for name, found in content["files"].items()}
    counts.write_text(json.dumps(content))

    model = loaded(folder, counts)
    model(WORDS)

    assert 12 < max(uses_of(model).values()) < 20
