"""`convert --dequantize`: plain transformers loads the result as it loads the quantized checkpoint dequantized."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload import cli
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import CheckpointError
from tests.checkpoints.forms import FORMS, loaded, outcome, written
from tests.checkpoints.gguf_files import write_gguf
from tests.processes import run_script

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_dequantized_gguf_file_is_all_of_a_model(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Its class, the dtype of its weights, its settings for generation, and its tokenizer with the chat template."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    file = chat_gguf(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    chat = [{"role": "user", "content": "!! #"}]

    convert_checkpoint(file, tmp_path / "target", dtype=dtype, dequantize=True)

    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (["LlamaForCausalLM"], str(dtype or torch.float32)) == (config["architectures"], f"torch.{config['dtype']}")
    assert {dtype or torch.float32} == {
        value.dtype for value in LlamaForCausalLM.from_pretrained(tmp_path / "target").parameters()
    }
    assert (tmp_path / "target" / "generation_config.json").is_file()
    again = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert CHAT == again.chat_template
    assert tokenizer.apply_chat_template(chat) == again.apply_chat_template(chat)


def test_a_model_of_a_gguf_file_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    offload.save_checkpoint(offload.from_pretrained(chat_gguf(tmp_path)), tmp_path / "saved")

    assert CHAT == AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template


CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"


def chat_gguf(folder: Path) -> Path:
    """The GGUF file of a tiny Llama with a tokenizer and a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96))
    return write_gguf(model, folder / "model.gguf", "Q8_0", chat_template=CHAT)


def test_decoded_values_have_the_requested_dtype(tmp_path: Path) -> None:
    FORMS["fp8-llama"].write(tmp_path / "source")

    words = ["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--dequantize", "--dtype", "fp16"]
    assert 0 == cli.main(words)

    values = load_file(tmp_path / "target" / "model.safetensors")
    assert {torch.float16} == {value.dtype for value in values.values()}
    assert "float16" == json.loads((tmp_path / "target" / "config.json").read_text())["dtype"]


def test_one_file_a_value_holds_the_dense_value(tmp_path: Path) -> None:
    FORMS["bnb-nf4"].write(tmp_path / "source")
    plain = FORMS["bnb-nf4"].plain(tmp_path / "source").state_dict()

    convert_checkpoint(tmp_path / "source", tmp_path / "target", to_offload_folder=True, dequantize=True)

    found = offload.load_file(tmp_path / "target")
    assert plain.keys() == found.keys()
    assert all(torch.equal(value, offload.materialize(found[key])) for key, value in plain.items())


# Arguments: those of the command line, and how many files are put in place before the process is killed.
KILLED = """
    import os, signal, sys
    from offload import cli

    left = int(sys.argv[-1])

    def killing(put):
        def counted(source, target, **options):
            global left
            put(source, target, **options)
            left -= str(target).endswith(".safetensors")
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return counted

    os.replace, os.link = killing(os.replace), killing(os.link)
    cli.main(sys.argv[1:-1])
"""


@pytest.mark.parametrize(
    ("name", "to"), [("fp8-llama", "safetensors"), ("gguf-q4_k_m", "safetensors"), ("bnb-nf4", "offload")]
)
def test_after_a_kill_the_rest_is_dequantized(
    name: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is whole is not made again; no other run goes on with it, and nothing else is left in the end."""
    form, source, target = FORMS[name], tmp_path / "source", tmp_path / "target"
    source.mkdir()
    form.write(source)
    taken = str(source / form.options.get("gguf_file", ""))
    words = ["convert", taken, str(target), "--dequantize", "--max-shard-size", "60KB", "--to", to]
    words += ["--dtype", "float32"] if form.options else []  # the command makes bfloat16 of a GGUF file

    run_script(KILLED, *words, 3, expected=-signal.SIGKILL)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "target.partial" / "new").glob("*.safetensors")}
    others = [cli.main(words), cli.main([*words, "--resume", "--dtype", "float16"])]
    said = capsys.readouterr().err
    assert 0 == cli.main([*words, "--resume"])

    assert 3 == len(done)
    assert [1, 1] == others
    assert "has an unfinished run: continue it" in said
    assert "has an unfinished run with another dtype" in said
    assert list(done.values()) == [(target / path.name).stat().st_mtime_ns for path in done]
    assert {"source", "target"} == {path.name for path in tmp_path.iterdir()}
    assert [] == [path.name for path in target.iterdir() if path.name.startswith(".")]
    assert len(list(target.glob("*.safetensors"))) > 4
    convert_checkpoint(taken, tmp_path / "at once", max_shard_size="60KB", dequantize=True)
    expected, found = (offload.load_file(folder) for folder in (tmp_path / "at once", target))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key].materialize(), value.materialize()) for key, value in found.items())
    if to == "safetensors":
        assert torch.equal(outcome(form.plain(source)).logits, outcome(loaded()(target)).logits)


def test_a_run_does_not_resume_with_another_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    FORMS["fp8-llama"].write(source)
    words = ["convert", str(source), str(target), "--dequantize", "--max-shard-size", "60KB"]
    run_script(KILLED, *words, 3, expected=-signal.SIGKILL)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "float16", "torch_dtype": "float16"}))

    assert 1 == cli.main([*words, "--resume"])
    assert "has an unfinished run with another source" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "words"), [(None, "is not quantized"), ("torchao-int8", "packed for special kernels .*torchao")]
)
def test_checkpoints_that_are_dense_or_cannot_be_decoded_are_refused(
    name: str | None, words: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (written("llama") if name is None else FORMS[name].write)(source)

    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(source, target, dequantize=True)

    assert not target.exists()
