"""Every way in which the package writes files that stay, one after the other: `python -m tests.writers FOLDER`.

Each has a folder in `given` for its input, and one in `made`, in which it makes the folder `deep/er` to write to.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import offload
from offload import OffloadedTensor, TensorCache, cli
from offload.storage.replacing import create_folder, sync_folder

ONES, TWOS = torch.ones(5), torch.full((5,), 2.0)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _llama(given: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=95))
    model.save_pretrained(given / "model", max_shard_size="60KB")
    return given / "model"


def _run(*words: object) -> None:
    assert 0 == cli.main([*map(str, words)])


def _value(given: Path, place: Path) -> None:
    weight = OffloadedTensor.from_original_tensor(ONES, "w", place)
    weight.update_values(TWOS)
    weight.add_(1)
    weight.flush()


def _zeros(given: Path, place: Path) -> None:
    OffloadedTensor.zeros((5,), name="w", offload_dir=place)


def _disk_offload(given: Path, place: Path) -> None:
    offload.disk_offload(_model(), place)


def _store(given: Path, place: Path) -> None:
    offload.save_checkpoint(_model(), given)
    with offload.init_empty_weights():
        model = _model()
    offload.load_checkpoint_and_dispatch(model, given, offload_dir=place, dtype=torch.bfloat16, store=True)


def _map_values(given: Path, place: Path) -> None:
    model = offload.disk_offload(_model(), place)
    offload.map_values(lambda name, value: value * 2, model, resume="double", progress=False)


def _save(given: Path, place: Path) -> None:
    offload.save_checkpoint(_model(), place)
    offload.save_checkpoint(_model(), place, 80)
    offload.save_checkpoint(_model(), place)


def _convert(given: Path, place: Path, *options: str) -> None:
    _run("convert", _llama(given), place / "made", "--dtype", "bfloat16", *options)


def _dequantize(given: Path, place: Path, *options: str) -> None:
    from tests.checkpoints.forms import FORMS

    FORMS["fp8-llama"].write(given)
    _run("convert", given, place / "made", "--dequantize", "--max-shard-size", "60KB", *options)


def _quantize(given: Path, place: Path) -> None:
    _run("quantize", _llama(given), place / "made", "--int8", "--group-size", "32")


def _merge(given: Path, place: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_llama(given))
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(given / "adapter")
    _run("merge-lora", given / "model", given / "adapter", place / "made")


def _batch(given: Path, place: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(_llama(given))
    asked = [{"prompt": "w1", "custom_id": "a"}, {"prompt": "", "custom_id": "b"}]
    (given / "in.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    create_folder(place)
    command = ["batch", given / "model", given / "in.jsonl", place / "out.jsonl", "--max-new-tokens", "2"]
    assert 1 == cli.main([*map(str, command)])  # one line is refused


def _cache(place: Path) -> TensorCache:
    return TensorCache.create(place, {"x": (torch.float32, (4,)), "text": "json"}, num_rows=3)


def _rows(given: Path, place: Path) -> None:
    with _cache(place) as cache:
        cache[:2] = {"x": torch.ones(2, 4), "text": ["a", "b"]}
        cache.flush()
        cache.fill(lambda part: {"x": part, "text": ["c"] * len(part)}, torch.zeros(3, 4))
        cache.append({"x": torch.ones(9, 4), "text": ["d"] * 9})
        cache[0] = {"x": torch.zeros(4), "text": "e"}


def _to_disk(given: Path, place: Path) -> None:
    cache = TensorCache.create(given, {"x": (torch.float32, (4,))}, num_rows=3)
    cache[:] = {"x": torch.ones(3, 4)}
    cache.to_disk(place / "rows.safetensors")
    cache.to_disk(place / "rows.pt")
    cache.close()


def _tree(given: Path, place: Path) -> None:
    offload.save_tree({"w": ONES, "same": 1}, place)
    offload.save_tree({"w": TWOS, "deep": [ONES, 2]}, place)


def _training(given: Path, place: Path) -> None:
    model = offload.disk_offload(_model(), place / "values")
    optimizer = torch.optim.AdamW(model.parameters())
    offload.training.offload_optimizer(optimizer, offload_dir=place / "state", min_bytes=1)
    for step in (1, 2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        offload.training.save_training(model, place / "run", optimizer, step=step)


def _tensordict(given: Path, place: Path) -> None:
    from offload.integrations.tensordict import memmap_like, save_memmap

    for value in (ONES, TWOS):
        save_memmap({"x": value, "deep": {"y": value}}, place / "saved")
    memmap_like({"x": ONES}, place / "like")


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "a value": _value,
    "zeros": _zeros,
    "disk_offload": _disk_offload,
    "load with store": _store,
    "map_values": _map_values,
    "save_checkpoint": _save,
    "convert": _convert,
    "convert to values": lambda given, place: _convert(given, place, "--to", "offload"),
    "dequantize": _dequantize,
    "dequantize to values": lambda given, place: _dequantize(given, place, "--to", "offload"),
    "quantize": _quantize,
    "merge-lora": _merge,
    "batch": _batch,
    "cache": _rows,
    "to_disk": _to_disk,
    "save_tree": _tree,
    "training": _training,
    "tensordict": _tensordict,
}


# What must not pass


def _file_before_its_data(given: Path, place: Path) -> None:
    place.mkdir(parents=True)
    (place / "new").write_text("data")
    os.rename(place / "new", place / "made")


def _folder_before_its_files(given: Path, place: Path) -> None:
    (place / "new").mkdir(parents=True)
    with open(place / "new" / "file", "w") as file:
        file.write("data")
        file.flush()
        os.fsync(file.fileno())
    os.rename(place / "new", place / "made")


def _without_the_folder_around_it(given: Path, place: Path) -> None:
    place.mkdir(parents=True)
    sync_folder(place)


BAD: dict[str, Callable[[Path, Path], None]] = {
    "a file before its data": _file_before_its_data,
    "a folder before its files": _folder_before_its_files,
    "a new parent folder": _without_the_folder_around_it,
}


def main(root: Path) -> None:
    """Call all of them."""
    for name, write in {**WRITERS, **BAD}.items():
        for place in ("given", "made"):
            (root / place / name).mkdir(parents=True)
        print(f"-- {name}", flush=True)
        write(root / "given" / name, root / "made" / name / "deep" / "er")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
