"""The command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload import OffloadedTensor, cli


def test_inspect_lists_names_dtypes_shapes_sizes_and_the_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a.weight": torch.zeros(20, 100), "b": torch.zeros(5, dtype=torch.int8)}, tmp_path / "x.safetensors")

    assert 0 == cli.main(["inspect", str(tmp_path)])

    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["a.weight", "float32", "[20,", "100]", "8.0", "kB", "x.safetensors"] for line in lines)
    assert any(line.split() == ["b", "int8", "[5]", "5", "bytes", "x.safetensors"] for line in lines)
    assert any(line.split() == ["2", "tensors", "8.0", "kB"] for line in lines)


def test_inspect_reads_an_offload_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = OffloadedTensor.from_original_tensor(torch.ones(3), "Some/Name", tmp_path)

    assert 0 == cli.main(["inspect", str(tmp_path)])

    assert kept.name in capsys.readouterr().out


def test_inspect_lists_what_torch_save_wrote_and_why_something_can_t_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.zeros(4), "part": torch.zeros(8)[::2], "s": torch.eye(2).to_sparse()}, tmp_path / "x.bin")

    assert 0 == cli.main(["inspect", str(tmp_path / "x.bin")])

    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["w", "float32", "[4]", "16", "bytes", "x.bin"] for line in lines)
    assert any(line.split() == ["part", "float32", "[4]", "16", "bytes", "x.bin"] for line in lines)
    assert any(line.split()[:4] == ["s", "is", "a", "sparse_coo"] for line in lines if line.strip())


def test_an_error_is_one_line_and_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == cli.main(["inspect", str(tmp_path / "nowhere")])

    captured = capsys.readouterr()
    assert "" == captured.out
    assert 1 == len(captured.err.splitlines())
    assert "nowhere" in captured.err


def test_a_wrong_command_line_is_exit_code_two() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "model", "--prompt", "x", "--max-new-tokens", "0"])


def test_generate_prints_the_tokens_of_the_model_in_memory(llama_folder: Path, tmp_path: Path) -> None:
    """In a process of its own, and quiet but for the text."""
    import shutil

    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    tokenizer = _tokenizer(folder)
    inputs = tokenizer("w3 w5 w7", return_tensors="pt")
    plain = AutoModelForCausalLM.from_pretrained(folder).generate(**inputs, max_new_tokens=5, do_sample=False)
    expected = tokenizer.decode(plain[0, 3:], skip_special_tokens=False)

    command = [
        sys.executable,
        "-m",
        "offload.cli",
        "generate",
        str(folder),
        "--prompt",
        "w3 w5 w7",
        "--max-new-tokens",
        "5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert expected == done.stdout.strip()
    assert "Loading" not in done.stderr


def test_generate_without_a_tokenizer_says_so(llama_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == cli.main(["generate", str(llama_folder), "--prompt", "x"])

    assert "has no tokenizer" in capsys.readouterr().err


def _tokenizer(folder: Path) -> object:
    """A tokenizer of 96 words, saved beside the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    tokenizer.save_pretrained(folder)
    return tokenizer
