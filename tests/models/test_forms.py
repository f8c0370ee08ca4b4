"""Every form of checkpoint runs from disk as plain transformers runs it in memory, and nothing is written for that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from tests.conftest import contents
from tests.models.forms import FORMS, outcome

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

_SMALL = 1024  # bytes up to which a value may be in memory

# What does not hold yet, and why. A form that holds fails here: take it out.
NOT_YET = {
    **dict.fromkeys((name for name in FORMS if name.startswith("mxfp4-")), "is decoded in memory"),
    **dict.fromkeys((name for name in FORMS if name.startswith("ct-")), "is decompressed in memory"),
    **dict.fromkeys((name for name in FORMS if name.startswith("bnb-")), "its class keeps numbers beside the tensors"),
    **dict.fromkeys((name for name in FORMS if name.startswith("torchao-")), "is copied to files of its own"),
    **dict.fromkeys((name for name in FORMS if name.startswith("bitnet-")), "is loaded in memory, and copied"),
    **dict.fromkeys(("gptq", "gptq-act-order", "awq"), "transformers wants the package that wrote it"),
    **dict.fromkeys((name for name in FORMS if name.startswith("gguf-")), "GGUF files are not read"),
}


def _marked(name: str) -> object:
    marks = [pytest.mark.xfail(strict=True, reason=NOT_YET[name])] if name in NOT_YET else []
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", map(_marked, FORMS))
def test_a_form_runs_from_disk_as_in_memory_and_writes_nothing(name: str, tmp_path: Path, private_place: Path) -> None:
    """Logits and four tokens are equal to the bit; weights are on disk before and after; no folder has a file."""
    form, source, own = FORMS[name], tmp_path / "source", tmp_path / "own"
    source.mkdir()
    own.mkdir()
    form.write(source)
    before, expected = contents(source), outcome(form.plain(source))

    in_own = offload.from_pretrained(source, offload_dir=own, **form.options)
    model = offload.from_pretrained(source, **form.options)
    at_first = [*_in_memory(model), *_in_memory(in_own)]
    found = outcome(model)

    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.tokens, found.tokens)
    assert [] == at_first
    assert [] == _in_memory(model)
    assert {} == contents(private_place)
    assert {} == contents(own)
    assert before == contents(source)


def test_what_does_not_hold_yet_is_a_form() -> None:
    assert set() == NOT_YET.keys() - FORMS.keys()


def _in_memory(model: nn.Module) -> list[str]:
    """Parameters and buffers that are in memory, and are not small."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, value in named if not offload.is_offloaded(value) and value.nbytes > _SMALL]
