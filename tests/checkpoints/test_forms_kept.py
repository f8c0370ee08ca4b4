"""Values that are decoded when they are read are copied, sent, shared and compiled as others: nothing is written."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.tensor.views import handle_of
from tests.checkpoints.forms import FORMS, PROMPT
from tests.conftest import contents
from tests.processes import in_fork, run_script

NAMES = ["fp8-llama", "fp8-qwen3_moe", "ct-w4a16", "ct-nvfp4a16", "bnb-nf4", "bnb-int8", "mxfp4-gpt_oss", "gptq", "awq"]
NAMES += ["gguf-q4_k_m", "llama-float32-as-bfloat16", "qwen3_moe"]
EVERY_FORM = pytest.mark.parametrize("name", NAMES)


def loaded(name: str, folder: Path) -> Any:
    FORMS[name].write(folder)
    return offload.from_pretrained(folder, **FORMS[name].options)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(PROMPT).logits
    return found


def recipes(model: nn.Module) -> list[Any]:
    found = [value for value in model.parameters() if offload.is_offloaded(value)]
    return [value for value in found if handle_of(value).composed is not None]


@EVERY_FORM
def test_copies_threads_and_a_forked_child_say_the_same(name: str, tmp_path: Path, private_place: Path) -> None:
    """Of what is decoded nothing is written: a copy is of the same pieces. What is referenced a copy has for itself."""
    model = loaded(name, tmp_path)
    expected, count = logits(model), len(recipes(model))
    decoded = {f"{handle_of(value).name}.safetensors" for value in recipes(model)}

    copied = copy.deepcopy(model)
    # Before there are threads: MKL's memory is locked in a child that is forked as one of them ends.
    assert in_fork(lambda: torch.equal(expected, logits(model)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(logits, [model, copied] * 4))

    assert all(torch.equal(expected, one) for one in found)
    assert count > 0
    assert count == len(recipes(copied)) == len(recipes(model))
    assert decoded.isdisjoint(path.name for path in private_place.rglob("*.safetensors"))


@EVERY_FORM
def test_another_process_gets_the_reference(name: str, tmp_path: Path, private_place: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    value = max(recipes(loaded(name, source)), key=lambda one: one.numel())
    sent = bytes(ForkingPickler.dumps(value.detach()))
    (tmp_path / "sent").write_bytes(sent)
    torch.save(value.materialize(), tmp_path / "plain.pt")

    said = run_script(
        """
            import pickle, sys, torch, offload
            value = pickle.loads(open(sys.argv[1], "rb").read())
            equal = torch.equal(torch.load(sys.argv[2]), value.materialize())
            print(offload.is_offloaded(value), equal)
        """,
        tmp_path / "sent",
        tmp_path / "plain.pt",
    )

    assert "True True" == said.strip()
    assert len(sent) < min(16_384, value.nbytes)
    assert torch.equal(value.materialize(), pickle.loads(sent).materialize())
    assert {} == contents(private_place)


@EVERY_FORM
def test_a_layer_is_compiled_and_exported(name: str, tmp_path: Path, private_place: Path) -> None:
    """One whose weight is decoded gives what it gives with the dense weight, in one graph."""
    torch._dynamo.reset()
    weight = next(value.detach() for value in recipes(loaded(name, tmp_path)) if value.dim() > 1)
    weight = weight if weight.dim() == 2 else weight[1]
    ours, theirs = (nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype) for _ in range(2))
    ours.weight = nn.Parameter(weight, requires_grad=False)
    theirs.weight = nn.Parameter(weight.materialize(), requires_grad=False)
    x = torch.randn(3, weight.shape[1], dtype=weight.dtype)

    with torch.no_grad():
        expected = theirs(x)
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
        exported = torch.export.export(ours, (x,)).module()(x)

    assert torch.equal(expected, compiled)
    assert torch.equal(expected, exported)
    assert handle_of(weight).composed is not None
    assert {} == contents(private_place)
