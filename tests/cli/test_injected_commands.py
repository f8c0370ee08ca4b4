"""A command whose system call fails names the error, and the same command succeeds afterwards.

Each is repeated for each call that it makes, and each error possible for that call; see `tests.acts`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import TensorCache
from offload.cli import main
from tests import faults
from tests.acts import Act, meets_each_fault
from tests.campaigns import campaign

pytestmark = [pytest.mark.campaign("faults"), pytest.mark.timeout(10_000)]

_CODES = faults.CODES if campaign("faults") else [errno.EIO]
_LASTING = faults.CODES if campaign("faults") else [errno.ENOSPC]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, an adapter for it, an FP8 model, and two requests."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.checkpoints.forms import FORMS

    place = tmp_path_factory.mktemp("given")
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=95)).save_pretrained(place / "model")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(place / "adapter")
    (place / "fp8").mkdir()
    FORMS["fp8-llama"].write(place / "fp8")
    asked: list[dict[str, Any]] = [{"prompt": "w1"}, {"messages": [{"role": "user", "content": "w2"}]}]
    (place / "in").write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    return place


@pytest.fixture
def given(inputs: Path, private_place: Path) -> Path:
    """A copy where all files of a test are: an error names one of these."""
    return shutil.copytree(inputs, private_place / "given")


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def run(folder: Path, *words: object) -> dict[str, str]:
    """The files that a command makes in `folder / "new"`; what it had begun and not finished is resumed."""
    target = folder / "new"
    shutil.rmtree(target, ignore_errors=True)  # complete, if the error came afterwards
    is_begun = (folder / "new.partial").is_dir() and any((folder / "new.partial").iterdir())
    assert 0 == main(["--traceback", *map(str, words), str(target), *(["--resume"] if is_begun else [])])
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(target.iterdir())}


def answers(folder: Path, given: Path) -> dict[str, str]:
    words = ["--traceback", "batch", given / "model", given / "in", folder / "out", "--max-new-tokens", "2"]
    assert 0 == main([*map(str, words)])
    return {
        said["custom_id"]: str(said["response"]["body"]["choices"]) for said in map(json.loads, (folder / "out").open())
    }


def filled(folder: Path) -> list[list[float]]:
    columns = {"x": (torch.float32, (2,))}
    with TensorCache.create(folder / "cache", columns, num_rows=3, exist_ok=True) as cache:
        cache.fill(lambda part: {"x": part + 1}, torch.zeros(3, 2), batch_size=2, progress=False)
        return cache[:]["x"].tolist()


ACTS = {
    "convert": lambda given: Act(made, lambda at: run(at, "convert", given / "model", "--dtype", "bfloat16")),
    "convert --dequantize": lambda given: Act(made, lambda at: run(at, "convert", given / "fp8", "--dequantize")),
    "quantize": lambda given: Act(
        made, lambda at: run(at, "quantize", given / "model", "--int8", "--group-size", "32")
    ),
    "merge-lora": lambda given: Act(made, lambda at: run(at, "merge-lora", given / "model", given / "adapter")),
    "batch": lambda given: Act(made, lambda at: answers(at, given)),
    "fill": lambda given: Act(made, filled),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_error_of_the_system_is_reported_and_the_same_command_succeeds_again(name, given, private_place):
    assert meets_each_fault(ACTS[name](given), private_place, _CODES) > 3


@pytest.mark.parametrize("name", ACTS)
def test_a_lasting_error_is_reported_and_once_it_is_gone_the_same_command_succeeds(name, given, private_place):
    assert meets_each_fault(ACTS[name](given), private_place, _LASTING, lasting=True) > 3
