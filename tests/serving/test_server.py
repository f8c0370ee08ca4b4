"""`offload serve`, asked by openai's client, and by others that are no good."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offload
from offload.cli import main
from offload.serving import server as serving
from tests.processes import ended
from tests.serving.servers import Server, greedy, running, saved, started, tiny_tokenizer, words

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a 96-word tokenizer and a chat template. No word ends an answer."""
    return saved(tmp_path_factory.mktemp("served") / "tiny", tiny_tokenizer())


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of this module; its log has no traceback at the end."""
    log = tmp_path_factory.mktemp("log") / "log"
    with running(folder, log, "--max-new-tokens", "8", "--queue", "40") as server:
        yield server


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return offload.from_pretrained(folder)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "w3 w4"}], "temperature": 0}


# Clients


def test_openai_gets_the_text_that_the_model_generates(server, model):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    said = client.chat.completions.create(**CHAT, max_tokens=6)
    continued = client.completions.create(model="tiny", prompt="w3 w4", max_tokens=6, temperature=0)

    expected = words(greedy(model, [3, 4], 6))
    assert (expected, "length", 6) == (
        said.choices[0].message.content,
        said.choices[0].finish_reason,
        said.usage.completion_tokens,
    )
    assert expected == continued.choices[0].text
    assert ["tiny"] == [one.id for one in client.models.list().data]


def test_openai_gets_the_same_text_in_pieces(server, model):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    chunks = [*client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})]

    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert words(greedy(model, [3, 4], 8)) == "".join(texts)
    assert len([text for text in texts if text]) > 3
    assert ("length", 8) == (chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens)


def test_requests_at_once_share_the_passes_and_each_gets_its_own_answer(server, model):
    prompts = [[n + 1, n + 2] for n in range(16)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = (
                client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
                for prompt in prompts
            )
            return [one.choices[0].text for one in await asyncio.gather(*asked)]

    before = server.metrics()
    said = asyncio.run(ask())
    after = server.metrics()

    assert [words(greedy(model, prompt, 24)) for prompt in prompts] == said
    tokens, passes = (after[name] - before[name] for name in ("offload_tokens_total", "offload_passes_total"))
    assert 16 * 24 == tokens
    assert 0 < passes < tokens / 2


# What is asked for


def test_log_probabilities_are_those_of_the_model(server, model):
    """As lm-eval asks for them: the prompt's, and one token more."""
    prompt = [5, 6, 7, 8]

    status, said = server.post(
        "/v1/completions", {"prompt": [prompt], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    )

    with torch.inference_mode():
        scores = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    logprobs = said["choices"][0]["logprobs"]
    following = [*prompt[1:], int(scores[-1].argmax())]
    assert (200, None) == (status, logprobs["token_logprobs"][0])
    assert [float(scores[at, token]) for at, token in enumerate(following)] == logprobs["token_logprobs"][1:]
    assert scores.max(-1).values.tolist() == [max(top.values()) for top in logprobs["top_logprobs"][1:]]


def test_an_answer_ends_before_a_stop_string(server, model):
    tokens = greedy(model, [3, 4], 8)
    stop = words(tokens[3:5])[:-1]  # in the middle of a word

    _, said = server.post("/v1/chat/completions", {**CHAT, "stop": [stop]})

    text = words(tokens)
    assert (text[: text.index(stop)], "stop") == (
        said["choices"][0]["message"]["content"],
        said["choices"][0]["finish_reason"],
    )


def test_a_seed_gives_the_same_sample_and_without_one_answers_differ(server):
    asked = {"prompt": "w3", "max_tokens": 8, "temperature": 1.0}
    one, other = (server.post("/v1/completions", asked)[1]["choices"][0]["text"] for _ in range(2))

    _, first = server.post("/v1/completions", {**asked, "seed": 7})
    _, many = server.post("/v1/completions", {**asked, "prompt": ["w4", "w3"], "seed": 7})

    assert first["choices"][0]["text"] == many["choices"][1]["text"]
    assert one != other


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}, {"repetition_penalty": 0.1}], ids=str
)
def test_a_sample_is_the_one_that_generate_draws(server, model, fields):
    drawn = {"temperature": 2.0, **fields}
    asked = {"prompt": [[3, 4]], "max_tokens": 12, "seed": 7, **drawn}

    _, said = server.post("/v1/completions", asked)

    torch.manual_seed(7)
    tokens = model.generate(torch.tensor([[3, 4]]), do_sample=True, max_new_tokens=12, pad_token_id=0, **drawn)
    assert words(tokens[0, 2:].tolist()) == said["choices"][0]["text"].strip()


def test_a_token_that_ends_answers_does_so(model, tmp_path):
    tokens = greedy(model, [3, 4], 8)
    place = saved(tmp_path / "ending", tiny_tokenizer(), eos_token_id=tokens[2])
    with running(place, tmp_path / "log") as ending:
        _, said = ending.post("/v1/completions", {"prompt": "w3 w4", "max_tokens": 8, "temperature": 0})

    [ended] = said["choices"]
    assert (words(tokens[: tokens.index(tokens[2])]), "stop") == (ended["text"].strip(), ended["finish_reason"])


WRONG = {
    "no JSON": (b'{"prompt":', 400, None),
    "deep JSON": (b"[" * 100_000, 400, None),
    "a list": (b"[]", 400, None),
    "nothing": ({}, 400, None),
    "another model": ({"model": "gpt", "prompt": "w3"}, 404, "model_not_found"),
    "sampling of other servers": ({"prompt": "w3", "typical_p": 0.5}, 400, None),
    "a token that is none": ({"prompt": [96]}, 400, None),
    "half of a character": ({"prompt": "\ud800"}, 400, None),
    "hardly a temperature": ({"prompt": "w3", "temperature": 1e-9}, 400, None),
    "tools": ({"prompt": "w3", "tools": [{}]}, 400, None),
    "a temperature that is none": (b'{"prompt": "w3", "temperature": NaN}', 400, None),
    "no number of tokens": ({"prompt": "w3", "max_tokens": -1}, 400, None),
    "too many tokens": ({"prompt": "w3", "max_tokens": 4096}, 400, "context_length_exceeded"),
    "a long prompt": ({"prompt": "w3 " * 5000}, 400, "context_length_exceeded"),
    "10 MB": ({"prompt": "w" * 10_000_000}, 413, "request_too_large"),
    "too many prompts": ({"prompt": ["w3", "\ud800"] * 30}, 400, None),
    "several answers": ({"prompt": "w3", "n": 2}, 400, None),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_refused_in_the_words_that_clients_know(server, what):
    body, status, code = WRONG[what]

    said = server.post("/v1/completions", body)

    assert (status, code) == (said[0], said[1]["error"]["code"])
    assert ("at most 40 prompts" in said[1]["error"]["message"]) == (what == "too many prompts")
    assert "invalid_request_error" == said[1]["error"]["type"]


def test_a_page_in_a_browser_gets_nothing(server):
    """It may send text without asking first, and give a name of its own to this machine."""
    assert 415 == server.post("/v1/completions", {"prompt": "w3"}, **{"content-type": "text/plain"})[0]
    assert 421 == server.post("/v1/completions", {"prompt": "w3"}, host="page.example")[0]


# Clients that are no good


def connection(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked for something."""
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return made


def test_a_client_that_goes_away_cancels_its_answer(server):
    """4,000 tokens would take minutes."""
    for streams in (True, False):
        before = server.metrics().get('offload_requests_total{reason="cancelled"}', 0)
        with connection(server, {"prompt": "w3", "max_tokens": 4000, "stream": streams}) as gone:
            while not server.metrics()["offload_running"]:
                pass
            if streams:
                assert gone.recv(10)
        while server.metrics().get('offload_requests_total{reason="cancelled"}', 0) == before:
            pass

        assert 0 == server.metrics()["offload_running"]


HALVES = [b"", b"GET /", b"\x00\xff garbage\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]


def test_clients_that_send_garbage_or_nothing_hold_up_no_other(server):
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(8)]
    for number, one in enumerate(idle):
        one.sendall(HALVES[number % 4])

    status, _ = server.post("/v1/completions", {"prompt": "w3", "max_tokens": 2})

    for one in idle:
        one.close()
    assert 200 == status


@pytest.mark.parametrize(("patience", "most", "first"), [(0.1, 1000, 0), (1000, 4, 4)])
def test_connections_that_ask_for_nothing_or_are_too_many_are_closed(
    patience, most, first, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(serving, "_PATIENCE", patience)
    monkeypatch.setattr(serving, "resource", SimpleNamespace(getrlimit=lambda _: (2 * most,), RLIMIT_NOFILE=0))
    with running(folder, tmp_path / "log") as small:
        host, port = small.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(6)]

        assert {b""} == {one.recv(1) for one in idle[first:]}
        for one in idle:
            one.close()


def test_a_full_queue_is_a_429(folder, tmp_path):
    """And a key is needed, and a signal cuts what is in progress."""
    limits = ["--in-flight", "1", "--queue", "1", "--grace", "1", "--api-key", "open sesame"]
    small = started(folder, tmp_path / "log", *limits)
    key = {"authorization": "Bearer open sesame"}
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="open sesame", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="open says me").models.list()

    long = client.completions.create(model="tiny", prompt="w3", max_tokens=4000, stream=True)
    next(long)
    statuses = {small.post("/v1/completions", {"prompt": ["w3", "w4"]}, **key)[0]}  # more than may wait at all
    waiting = client.with_options(timeout=100)
    refused: list[int] = []

    def wait() -> None:
        try:
            waiting.completions.create(model="tiny", prompt="w3")
        except openai.APIStatusError as error:
            refused.append(error.status_code)

    thread = threading.Thread(target=wait)
    thread.start()
    while True:
        asked = urllib.request.Request(f"{small.url}/metrics", headers=key)
        if b"\noffload_waiting 1\n" in urllib.request.urlopen(asked).read():
            break
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="w3")
    os.kill(small.pid, signal.SIGTERM)
    last = [chunk.choices[0].finish_reason for chunk in long][-1]
    thread.join()

    assert {400} == statuses
    assert "length" == last
    assert [503] == refused
    assert 0 == ended(small.pid)
    assert "Traceback" not in small.log.read_text()


def test_kept_prompts_give_the_same_answers_again(folder, model, tmp_path):
    place = tmp_path / "prompts"
    prompt = [number % 90 + 1 for number in range(150)]
    asked = {"prompt": [prompt], "max_tokens": 4, "temperature": 0}

    with running(folder, tmp_path / "log", "--prompt-cache", str(place)) as served:
        said = [served.post("/v1/completions", asked)[1]["choices"][0]["text"] for _ in range(2)]

    assert [words(greedy(model, prompt, 4))] * 2 == said
    assert any(path.is_file() for path in place.rglob("*"))


def test_an_assistant_drafts_for_answers_that_share_the_passes(folder, model, tmp_path):
    """The assistant is the model itself, so that all it drafts is accepted."""
    prompts = [[number + 1, 5, 7] for number in range(4)]
    drafting = ["--assistant", str(folder), "--max-memory", "1MiB"]
    with running(folder, tmp_path / "log", *drafting) as server, ThreadPoolExecutor(4) as clients:

        def choice(prompt: list[int], **options: Any) -> Any:
            asked = {"prompt": prompt, "temperature": 0, "max_tokens": 24, **options}
            return server.post("/v1/completions", asked)[1]["choices"][0]

        alone = choice(prompts[0])["text"]
        figures = server.metrics()
        found = [one["text"] for one in clients.map(choice, prompts)]
        seeded = [choice([3], temperature=1, seed=5)["text"] for _ in range(2)]
        scored = choice([3], logprobs=1)["logprobs"]

    assert [words(greedy(model, prompt, 24)) for prompt in prompts] == [text.strip() for text in found]
    assert alone == found[0]
    assert 24 == figures["offload_tokens_total"]
    assert figures["offload_passes_total"] < 24
    assert seeded[0] == seeded[1]
    assert 24 == len(scored["token_logprobs"])


def test_a_port_in_use_is_an_error_before_the_model_is_opened(server, capsys):
    port = server.url.rsplit(":", 1)[1]

    assert 1 == main(["serve", "no such model", "--port", port])

    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
