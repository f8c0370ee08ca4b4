"""Memory and disk use when loading and saving fused experts."""

import json
from itertools import product
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.models.test_loader_memory import hollow_checkpoint
from tests.processes import run_script

EXPERTS, WIDTH = 8, 2048  # 8 MiB per matrix in bfloat16; 128 and 64 MiB per fused layer
LAYERS = 2

SCRIPT = """
import json, sys, torch, offload
from pathlib import Path
from tests.peak import Peak

def written():
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

large, small, out = sys.argv[1:]
offload.from_pretrained(small)(torch.tensor([[1]]))
offload.from_pretrained(small).save_pretrained(out + "/rehearsal")  # imports, first calls
before = written()
with Peak() as load:
    model = offload.from_pretrained(large)
loaded = written() - before
saved = {}
for size in ("10MB", "10GB"):
    with Peak() as save:
        model.save_pretrained(f"{out}/{size}", max_shard_size=size)
    saved[size] = save.nbytes
shards = {size: len(list(Path(out, size).glob("*.safetensors"))) for size in saved}
weight = model.model.layers[1].mlp.experts.gate_up_proj
fused = torch.count_nonzero(weight[-1]).item()
print(json.dumps(dict(load=load.nbytes, written=loaded, saved=saved, shards=shards, fused=fused)))
"""


def experts(folder: Path, layers: int, width: int) -> Path:
    folder.mkdir()
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=width, num_hidden_layers=layers, num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=width, intermediate_size=width, dtype="bfloat16", **heads,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        values = Qwen3MoeForCausalLM(config).state_dict()
    shapes = {name: tuple(value.shape) for name, value in values.items() if ".experts." not in name}
    for layer, expert, part in product(range(layers), range(EXPERTS), ("gate", "up", "down")):
        shapes[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"] = (width, width)
    hollow_checkpoint(folder / "model.safetensors", shapes, "BF16", 2)
    return folder


def test_experts_are_joined_and_taken_apart_in_the_memory_of_some_blocks(tmp_path: Path) -> None:
    """400 MB of experts: 8 MiB per matrix, 64 or 128 per fused tensor."""
    large = experts(tmp_path / "large", LAYERS, WIDTH)
    small = experts(tmp_path / "small", 1, 16)
    measured = json.loads(run_script(SCRIPT, large, small, tmp_path / "out").splitlines()[-1])

    assert measured["load"] < 24e6
    assert max(measured["saved"].values()) < 24e6
    assert 1 == measured["shards"]["10GB"]
    assert measured["shards"]["10MB"] > 40
    assert 0 == measured["fused"]
    fused = LAYERS * 3 * EXPERTS * WIDTH * WIDTH * 2
    assert measured["written"] < 1.05 * fused
