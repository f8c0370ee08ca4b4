"""Code that comes with a model runs only if that was asked for, whatever standard input says."""

import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import offload
from offload.checkpoints.companions import tokenizer_in
from offload.cli.main import main
from offload.errors import CheckpointError
from tests.checkpoints.forms import written

CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({mark!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a model with code of its own, which leaves a file when it runs; standard input says yes to everything."""
    folder, mark = tmp_path / "model", tmp_path / "ran"
    written("llama")(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    new = {**config, "model_type": "own", "architectures": ["OwnModel"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(new))
    tokens = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def leave(folder: Path, name: str) -> None:
    """Of the code, only this is named: the configuration, or the model."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {name: config["auto_map"][name]}
    config["model_type"] = "own" if name == "AutoConfig" else "llama"
    (folder / "config.json").write_text(json.dumps(config))


CALLS: dict[str, Callable[[Path], object]] = {
    "from_pretrained": offload.from_pretrained,
    "plan": lambda folder: offload.plan(folder, disk_rate="1GB"),
    "a tokenizer": tokenizer_in,
    "offload plan": lambda folder: main(["plan", str(folder), "--disk-rate", "1GB"]),
    "offload generate": lambda folder: main(["generate", str(folder), "--prompt", "x"]),
    "offload batch": lambda folder: main(["batch", str(folder), str(requests_beside(folder)), str(folder / "out")]),
    "offload serve": lambda folder: main(["serve", str(folder), "--port", "0"]),
    "offload quantize": lambda folder: main(["quantize", str(folder), str(folder.with_name("new")), "--int8"]),
}


def requests_beside(folder: Path) -> Path:
    path = folder.with_name("requests.jsonl")
    path.write_text(json.dumps({"custom_id": "1", "body": {"prompt": "x"}}) + "\n")
    return path


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("named", ["all", "AutoConfig", "AutoModelForCausalLM"])
def test_code_does_not_run_unasked(call, named, folder, capsys):
    if named != "all":
        leave(folder, named)
    with suppress(CheckpointError, SystemExit):
        CALLS[call](folder)

    assert "[y/N]" not in "".join(capsys.readouterr())
    assert not (folder.parent / "ran").exists()


def test_the_error_says_how_code_is_let_in(folder, capsys):
    with pytest.raises(CheckpointError, match="trust_remote_code=True, or --trust-remote-code"):
        offload.from_pretrained(folder)
    assert main(["plan", str(folder), "--disk-rate", "1GB"])
    assert "--trust-remote-code" in capsys.readouterr().err


def test_code_that_is_asked_for_runs(folder, tokens):
    model = offload.from_pretrained(folder, trust_remote_code=True)

    assert "OwnModel" == type(model).__name__
    assert (folder.parent / "ran").exists()
    assert (2, 7, 96) == model(tokens).logits.shape


def test_the_option_of_the_command_lets_code_run(folder, capsys):
    assert not main(["plan", str(folder), "--disk-rate", "1GB", "--trust-remote-code"])

    assert (folder.parent / "ran").exists()
    assert capsys.readouterr().out


class OwnBuffers(PreTrainedModel):
    """Computes what is in no checkpoint, and has no `_init_weights` for it."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0) + 1, persistent=False)
        self.part = nn.Module()
        self.part.register_buffer("counts", torch.arange(3), persistent=False)
        self.part.register_buffer("none", None, persistent=False)
        self.rope = LlamaRotaryEmbedding(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


class Careless(OwnBuffers):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        if self.linear.weight.is_meta and not self.scale.is_meta:
            raise RuntimeError("no values here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_that_are_in_no_checkpoint_are_those_that_the_code_makes(dtype, tmp_path):
    """transformers leaves them as memory was: here, after other numbers have been in it."""
    config = LlamaConfig(hidden_size=4, num_attention_heads=1, vocab_size=8, dtype=dtype)
    made = OwnBuffers._from_config(config, dtype=dtype)
    made.save_pretrained(tmp_path)
    random = torch.get_rng_state()
    others = [torch.full((size,), 7e7) for size in (3, 4, 6) for _ in range(1000)]
    del others
    model = offload.from_pretrained(tmp_path, model_class=OwnBuffers)

    expected, found = dict(made.named_buffers()), dict(model.named_buffers())
    assert {"scale", "part.counts", "rope.inv_freq"} <= expected.keys()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) and value.dtype == found[name].dtype for name, value in expected.items())
    assert torch.equal(random, torch.get_rng_state())
    assert offload.is_offloaded(model.linear.weight)


def test_code_that_cannot_make_its_buffers_alone_is_refused_with_their_names(tmp_path):
    Careless(LlamaConfig(hidden_size=4, num_attention_heads=1, vocab_size=8)).save_pretrained(tmp_path)
    words = r"buffers of Careless .*\(no values here\): scale, part.counts, part.none"

    with pytest.raises(CheckpointError, match=words):
        offload.from_pretrained(tmp_path, model_class=Careless)
