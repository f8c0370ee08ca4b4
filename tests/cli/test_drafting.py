"""`offload generate` with drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from offload import budget, cli
from tests.cli.test_batch import with_settings
from tests.serving.servers import saved, tiny_tokenizer

ASKED = ["--prompt", "w5 w6 w7 w5 w6", "--max-new-tokens", "12", "--json"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(saved(tmp_path / "model", tiny_tokenizer()))


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert 0 == cli.main(["generate", *words, *ASKED])
    return json.loads(capsys.readouterr().out)


def test_the_last_line_says_how_many_tokens_a_pass_gave(folder, capsys):
    plain, drafted = answer(capsys, folder), answer(capsys, folder, "--assistant", folder)

    assert 0 == cli.main(["generate", folder, "--assistant", folder, *ASKED[:-1]])
    assert " tokens per pass with drafts, " in capsys.readouterr().err.splitlines()[-1]
    assert plain["tokens"] == drafted["tokens"]
    assert plain["tokens_per_pass"] is None
    assert drafted["tokens_per_pass"] > 1


def test_an_assistant_may_have_another_vocabulary(folder, tmp_path, capsys):
    other = saved(tmp_path / "other", tiny_tokenizer(["<more>"]))

    assert answer(capsys, folder)["tokens"] == answer(capsys, folder, "--assistant", str(other))["tokens"]


@pytest.mark.parametrize("options", [[], ["--temperature", "0.7"]])
def test_the_text_is_looked_up_where_a_pass_reads_from_the_disk(folder, options, monkeypatch, capsys):
    plain = answer(capsys, folder)
    monkeypatch.setattr(budget, "is_read_by_each_pass", lambda _: True)
    found = answer(capsys, folder, *options)

    assert found["tokens_per_pass"] >= 1
    assert options or plain["tokens"] == found["tokens"]


@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "drafted"])
def test_one_answer_is_generated_where_the_model_s_settings_ask_for_beams(drafts, folder, tmp_path, capsys):
    asked = {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True, "length_penalty": 2.0}
    beams = with_settings(Path(folder), tmp_path / "beams", **asked)
    options = ["--assistant", folder] if drafts else []

    assert answer(capsys, folder)["tokens"] == answer(capsys, str(beams), *options)["tokens"]


def test_stop_strings_of_the_model_s_settings_end_an_answer(folder, tmp_path, capsys):
    whole = answer(capsys, folder)["text"].split()
    end = next(at for at, word in enumerate(whole) if at and word not in whole[:at])

    stopping = with_settings(Path(folder), tmp_path / "stopping", stop_strings=[whole[end]])
    assert whole[:end] == answer(capsys, str(stopping))["text"].split()


@pytest.mark.parametrize("kind", ["quantized", "offloaded"])
def test_a_cache_that_can_not_be_had_here_is_an_error_in_a_sentence(kind, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optimum", None)
    if kind == "offloaded" and torch.cuda.is_available():
        pytest.skip("a cache can be offloaded from an accelerator here")
    asked = ["generate", str(with_settings(Path(folder), tmp_path / kind, cache_implementation=kind)), *ASKED]

    assert 1 == cli.main(asked)
    assert "perhaps because of its generation_config.json" in capsys.readouterr().err


def test_a_model_whose_states_can_t_be_taken_back_refuses_an_assistant(tmp_path, capsys):
    model = str(tmp_path / "mamba")
    MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1)).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)

    assert 1 == cli.main(["generate", model, "--assistant", model, *ASKED[:-1]])
    assert "leave out --assistant" in capsys.readouterr().err
