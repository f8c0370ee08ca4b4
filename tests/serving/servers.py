"""Servers for tests: a forked child that serves a tiny model, whose words mean nothing.

Always true:
- a server runs in a child, whose log is a file
- tokenizers are made of 96 words, of which `w0` is unknown, and of special tokens after them
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.cli import main
from tests.processes import ended, forked

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass
class Server:
    """A server in a forked child."""

    url: str
    pid: int
    log: Path
    folder: Path
    headers: Mapping[str, str] = field(default_factory=dict)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The status and the body of what it answers."""
        status, reply = self.post_raw(path, body, **headers)
        return status, json.loads(reply)

    def post_raw(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"{self.url}{path}", data, {"content-type": "application/json", **self.headers, **headers}
        )
        try:
            with urllib.request.urlopen(asked, timeout=100) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a streamed answer."""
        status, said = self.post_raw(path, {**body, "stream": True})
        lines = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
        assert (200, "[DONE]") == (status, lines.pop())
        return [json.loads(line) for line in lines]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=100) as reply:
            lines = reply.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def started(folder: Path, log: Path, *options: str) -> Server:
    """A server over the model in a folder, which listens."""
    reader, writer = os.pipe()

    def serve() -> None:
        os.close(reader)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.dup2(writer, 3)
        sys.stderr = _Echo(open(2, "w", buffering=1, closefd=False), writer)  # noqa: SIM115
        assert 0 == main(["serve", str(folder), "--port", "0", *options])

    pid = forked(serve)
    os.close(writer)
    with open(reader) as said:
        line = said.readline()
    assert " at http://" in line, log.read_text()
    return Server(line.split(" at ")[1].strip().removesuffix("/v1"), pid, log, folder)


class _Echo:
    """Standard error, whose first line goes to a pipe, too."""

    def __init__(self, file: Any, pipe: int) -> None:
        self._file, self._pipe = file, pipe

    def write(self, text: str) -> int:
        if self._pipe is not None and " at http://" in text:
            os.write(self._pipe, text.encode() + b"\n")
            os.close(self._pipe)
            self._pipe = None
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def tiny_tokenizer(special: Sequence[str] = (), *, begins: bool = False, **options: Any) -> Any:
    """Of 96 words; special tokens have the numbers from 96 on. With `begins`, the first of them begins each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([*special])
    if begins:
        words.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 96)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w0", extra_special_tokens=[*special], **options
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def saved(place: Path, tokenizer: Any, **settings: Any) -> Path:
    """A tiny Llama of three layers with a tokenizer. No token ends an answer, unless the generation settings say so."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": len(tokenizer)}
    config = LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=4096, eos_token_id=None)
    model = LlamaForCausalLM(config)
    model.generation_config.update(**settings)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


def words(tokens: Iterable[int]) -> str:
    return " ".join(f"w{token}" for token in tokens if token)  # w0 is special


@contextmanager
def running(folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """A server for the block, which ends well: there is no traceback in its log."""
    server = started(folder, log, *options)
    yield server
    os.kill(server.pid, signal.SIGTERM)
    assert 0 == ended(server.pid), log.read_text()
    assert "Traceback" not in log.read_text()
