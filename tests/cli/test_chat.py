"""`offload chat`, and how answers are sampled."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM

from offload import cli
from offload.generation.answering import Answering
from tests.cli.test_cli import TEMPLATE
from tests.serving.servers import saved, tiny_tokenizer

Type = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return saved(tmp_path / "model", tokenizer)


@pytest.fixture
def typed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Types lines into a conversation; returns what it prints."""

    def say(text: str, *options: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert 0 == cli.main(["chat", str(folder), "--max-new-tokens", "6", *options])
        return capsys.readouterr().out

    return say


def test_each_line_is_answered_after_all_that_was_said(folder, typed):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages: list[dict[str, str]] = [{"role": "system", "content": "w9"}]
    expected = []
    for line in ("w5 w7", "w8"):
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        new = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": expected[-1]})

    said = typed("w5 w7\n\n \nw8", "--system", "w9", "--temperature", "0")

    assert [line.strip() for line in expected] == [line.strip() for line in said.splitlines()]


def test_an_interrupt_ends_an_answer_and_the_conversation_goes_on(typed, monkeypatch):
    whole, answered = Answering.__call__, []

    def interrupted(self: Answering, job: Any) -> str:
        reason = whole(self, job)
        answered.append(job.prompt.tokens)
        if len(answered) == 1:
            raise KeyboardInterrupt
        return reason

    monkeypatch.setattr(Answering, "__call__", interrupted)

    first, second = typed("w5\nw6", "--temperature", "0").splitlines()

    assert len(first.split()) == len(second.split()) == 6
    assert answered[0] == answered[1][: len(answered[0])]
    assert len(answered[1]) > len(answered[0]) + 6, "what was said before the interrupt is part of the conversation"


def test_a_model_whose_keys_and_values_can_not_be_kept_chats(tmp_path, monkeypatch, capsys):
    """A state-space model; with a folder that is named, it is an error."""
    folder = tmp_path / "mamba"
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, eos_token_id=None)
    MambaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    said = []
    for options in ([], ["--prompt-cache", str(tmp_path / "kept")]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("w5\nw6\n"))
        said.append(cli.main(["chat", str(folder), "--max-new-tokens", "3", "--temperature", "0", *options]))

    printed = capsys.readouterr()
    assert [0, 1] == said
    assert [3, 3] == [len(line.split()) for line in printed.out.splitlines()]
    assert "leave prompt_cache out" in printed.err


def test_a_conversation_that_has_become_too_long_goes_on_with_shorter_lines(folder, typed, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))

    said = typed("w5 " * 40 + "\nw5\n", "--temperature", "0")

    assert [6] == [len(line.split()) for line in said.splitlines()]


def test_a_seed_gives_the_same_answer_again_and_temperatures_give_others(folder, capsys):
    def tokens(*options: str) -> list[int]:
        words = ["generate", str(folder), "--prompt", "w5", "--max-new-tokens", "24", "--json"]
        assert 0 == cli.main([*words, *options])
        found: list[int] = json.loads(capsys.readouterr().out)["tokens"]
        return found

    greedy = tokens()

    assert greedy == tokens("--temperature", "0") == tokens("--top-p", "1e-9", "--seed", "1")
    assert tokens("--temperature", "5", "--seed", "1") == tokens("--temperature", "5", "--seed", "1")
    assert tokens("--temperature", "5", "--seed", "1") != tokens("--temperature", "5", "--seed", "2")
