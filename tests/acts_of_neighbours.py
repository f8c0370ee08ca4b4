"""Commands, and acts of third-party libraries on what is on disk. Part of the table in `tests/acts.py`."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.cli import main
from tests.crashes import FAULT, KILL, POWER_CUT, Act

STATES = torch.linspace(-1, 1, 2 * 4 * 300 * 8).view(2, 4, 300, 8)
FAULTS, POWER, FILES = frozenset({FAULT}), frozenset({POWER_CUT}), frozenset({FAULT, POWER_CUT})
KILLED = FILES | {KILL}


# Commands


@functools.cache
def inputs() -> dict[str, bytes]:
    """The files of a model with a tokenizer, of an adapter for it, of an FP8 model; and requests."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.checkpoints.forms import FORMS

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        torch.manual_seed(0)
        sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=95))
        model.save_pretrained(place / "model")
        model.save_pretrained(place / "shards", max_shard_size="60KB")
        words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        tokenizer.chat_template = "{{ messages[0].content }}"
        tokenizer.save_pretrained(place / "model")
        model = AutoModelForCausalLM.from_pretrained(place / "model")
        get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(place / "adapter")
        (place / "fp8").mkdir()
        FORMS["fp8-llama"].write(place / "fp8")
        asked: list[dict[str, Any]] = [{"prompt": "w1"}, {"messages": [{"role": "user", "content": "w2"}]}]
        for name, some in (("in", asked), ("one is refused", [*asked, {"prompt": ""}])):
            lines = (json.dumps({"custom_id": str(at), "body": body}) for at, body in enumerate(some))
            (place / name).write_text("".join(f"{line}\n" for line in lines))
        return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def inputs_in(folder: Path) -> Path:
    """The folder `given` with all inputs, which is made if it is not there."""
    place = folder / "given"
    for name, content in inputs().items() if not place.exists() else ():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def given(folder: Path) -> Path:
    """The inputs lie beside the folder of an act: an error names one of these files."""
    inputs_in(folder.parent)
    return folder


def command(*words: str, crashes: frozenset[str] = FILES) -> Act:
    """A command that makes a folder; what it had begun and not finished is resumed."""

    def run(folder: Path) -> dict[str, str]:
        target = folder / "new"
        shutil.rmtree(target, ignore_errors=True)  # complete, if the error came afterwards
        paths = [str(folder.parent / word) if word.startswith("given/") else word for word in words]
        assert 0 == main([*paths, str(target), "--traceback"])
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(target.iterdir())}

    return Act(given, run, crashes=crashes, codes=[errno.EIO])


def beside_inputs(folder: Path) -> Path:
    given(folder).mkdir()
    return folder


def answers(folder: Path) -> list[str]:
    place = folder.parent / "given"
    words = ["batch", "--traceback", place / "model", place / "one is refused", folder / "out", "--max-new-tokens", "2"]
    assert 1 == main([*map(str, words)])  # one is refused
    found = [json.loads(line) for line in (folder / "out").open()]
    return sorted(f"{said['custom_id']}: {said['response']['body'].get('choices')}" for said in found)


INT8 = ("--int8", "--group-size", "32")
SHARDS = ("--max-shard-size", "60KB")
COMMANDS = {
    "convert": command("convert", "given/shards", "--dtype", "bfloat16"),
    "convert --dequantize": command("convert", "given/fp8", "--dequantize"),
    "convert --dequantize, shards": command("convert", "given/fp8", "--dequantize", *SHARDS, crashes=POWER),
    "quantize": command("quantize", "given/model", *INT8),
    "quantize, shards": command("quantize", "given/shards", *INT8, crashes=POWER),
    "merge-lora": command("merge-lora", "given/model", "given/adapter"),
    "merge-lora, shards": command("merge-lora", "given/shards", "given/adapter", crashes=POWER),
    "batch": Act(beside_inputs, answers, crashes=KILLED, codes=[errno.EIO]),
}


# Keys and values, quantized layers


def begun(folder: Path) -> Any:
    """A cache of keys and values with ten tokens and a capacity of 256."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 9}
    past = offload.integrations.kv_cache(LlamaConfig(**sizes, num_hidden_layers=1), offload_dir=folder / "cache")
    past.update(STATES[:, :, :10], STATES[:, :, :10] * 2, 0)
    return past


def extended(count: int) -> Callable[[Any], list[bool]]:
    """Adds tokens up to `count`, looks at all, and crops to ten."""

    def act(past: Any) -> list[bool]:
        past.update(STATES[:, :, 10:count], STATES[:, :, 10:count] * 2, 0)
        found = [states.materialize().clone() for states in (past.layers[0].keys, past.layers[0].values)]
        past.crop(10 - count)
        return [torch.equal(found[0], STATES[:, :, :count]), torch.equal(found[1], STATES[:, :, :count] * 2)]

    return act


def has_ten_tokens(past: Any) -> None:
    """And the added ones, if a call failed while they were read."""
    layer = past.layers[0]
    past.crop(min(10 - layer.keys.shape[-2], 0))
    for states, expected in ((layer.keys, STATES), (layer.values, STATES * 2)):
        assert torch.equal(expected[:, :, :10], states.materialize())


def layers(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    return offload.disk_offload(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), folder)


def quantized(model: nn.Module) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    offload.quantize_(model, Int8WeightOnlyConfig())
    return runs(model)


def runs(model: nn.Module) -> Any:
    with torch.no_grad():
        return model(torch.ones(1, 32)).tolist()


# Folders of tensordict


def memmapped(folder: Path) -> Path:
    from tensordict import LazyStackedTensorDict, TensorDict

    parts = [TensorDict(x=STATES[0, 0, :size], batch_size=[]) for size in (2, 3)]
    TensorDict({"a/b": STATES[0, 0], "stack": LazyStackedTensorDict(*parts)}, batch_size=[]).memmap(folder / "data")
    return folder


def entries(folder: Path) -> Any:
    from offload.integrations.tensordict import load_memmap

    found = load_memmap(folder / "data")
    return found["a/b"].tolist(), [layer["x"].tolist() for layer in found["stack"].tensordicts]


def save_numbered(folder: Path, number: int) -> int:
    """Data for which parts of two numbers never match."""
    from tensordict import NonTensorData

    from offload.integrations.tensordict import save_memmap

    values = torch.full((number % 7 + 1,), float(number))
    shutil.rmtree(folder / "data", ignore_errors=True)  # complete, if the error came afterwards
    save_memmap({"a": values, "number": NonTensorData(number), "z": torch.tensor(number)}, folder / "data")
    return numbered(folder)


def numbered(folder: Path) -> int:
    from offload.integrations.tensordict import load_memmap

    found = load_memmap(folder / "data")
    number: int = found["number"]
    assert [float(number)] * (number % 7 + 1) + [number] == [*found["a"].tolist(), found["z"].item()]
    return number


def either_numbered(folder: Path) -> None:
    assert not (folder / "data").exists() or numbered(folder) in (0, 1)


CODES = (errno.EIO, errno.ENOSPC, errno.EACCES)
OTHERS = {
    "kv_cache": Act(begun, extended(11), has_ten_tokens, crashes=FAULTS),
    "kv_cache that grows": Act(begun, extended(300), has_ten_tokens, crashes=FAULTS),
    "quantize_": Act(layers, quantized, runs, crashes=FAULTS),
    "load_memmap": Act(memmapped, entries, crashes=FAULTS),
    "save_memmap": Act(lambda at: at, lambda at: save_numbered(at, 1), either_numbered, crashes=KILLED, codes=CODES),
}
NEIGHBOURS = {**COMMANDS, **OTHERS}
