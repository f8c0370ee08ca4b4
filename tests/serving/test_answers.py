"""Answers of a model whose settings and tokenizer are less simple: special tokens, suppressed ones, an end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.serving.servers import Server, greedy, running, saved, tiny_tokenizer, words

SPECIAL = ["<s>", "<|end|>", "<|sep|>"]  # 96, 97, 98
KEY = "open sesame"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer begins each text with `<s>`; most tokens are suppressed, also the likeliest one after `w3 w4`."""
    place = saved(tmp_path_factory.mktemp("served") / "odd", tiny_tokenizer(SPECIAL, begins=True))
    likeliest = greedy(offload.from_pretrained(place), [96, 3, 4], 1)
    kept = {5, 6, 7, 97, 98} - {*likeliest}
    suppressed = [token for token in range(99) if token not in kept]
    return saved(place, tiny_tokenizer(SPECIAL, begins=True), suppress_tokens=suppressed)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "log"
    with running(folder, log, "--max-new-tokens", "8", "--api-key", KEY) as server:
        server.headers = {"authorization": f"Bearer {KEY}"}
        yield server


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return offload.from_pretrained(folder)


def answered(server: Server, **body: Any) -> Any:
    """The only choice of an answer to a prompt."""
    status, said = server.post("/v1/completions", body)
    assert status == 200, said
    [choice] = said["choices"]
    return choice


def named(token: int) -> str:
    return SPECIAL[token - 96] if token >= 96 else f"w{token}"


def test_one_greedy_token_with_a_scored_prompt_is_the_one_that_generate_gives(server, model):
    """Settings that suppress the likeliest token hold here, too."""
    said = answered(server, prompt="w3 w4", max_tokens=1, temperature=0, logprobs=1, echo=True)

    expected = greedy(model, [96, 3, 4], 1)
    with torch.inference_mode():
        scores = torch.log_softmax(model(torch.tensor([[96, 3, 4]])).logits[0].float(), -1)
    assert expected != [int(scores[-1].argmax())]
    assert [named(expected[0])] == said["logprobs"]["tokens"][3:]
    assert [float(scores[0, 3]), float(scores[1, 4])] == said["logprobs"]["token_logprobs"][1:3]
    alone = answered(server, prompt="w3 w4", max_tokens=1, temperature=0, logprobs=1)
    assert alone["logprobs"]["token_logprobs"] == said["logprobs"]["token_logprobs"][3:]


@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 50.0}, {"stop": ["w"]}, {"temperature": 1, "seed": 3}])
def test_one_token_with_a_scored_prompt_is_that_without_one(server, fields):
    asked = {"prompt": "w5 w6 w7", "max_tokens": 1, "temperature": 0, "logprobs": 2, **fields}

    alone, scored = answered(server, **asked), answered(server, **asked, echo=True)

    assert (f"w5 w6 w7{alone['text']}", alone["finish_reason"]) == (scored["text"], scored["finish_reason"])
    assert alone["logprobs"]["token_logprobs"] == scored["logprobs"]["token_logprobs"][4:]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
def test_a_prompt_is_echoed_without_any_token_after_it(server, fields):
    status, said = server.post("/v1/completions", {"prompt": "w3 w4", "max_tokens": 0, "echo": True, **fields})

    assert 200 == status, said
    assert [("w3 w4", "length")] == [(one["text"], one["finish_reason"]) for one in said["choices"]]
    assert (3, 0) == (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"])


def test_a_stop_string_that_is_a_special_token_stops(server, model):
    tokens = greedy(model, [96, 3, 4], 24)
    [stop] = {97, 98} & {*tokens} or {98}
    tokens = tokens[: tokens.index(stop)]

    said = answered(server, prompt="w3 w4", max_tokens=24, temperature=0, stop=[SPECIAL[stop - 96]])

    assert (words(one for one in tokens if one < 96), "stop") == (said["text"].strip(), said["finish_reason"])


@pytest.mark.parametrize("echo", [True, False])
def test_the_log_probabilities_of_a_stream_are_those_of_the_whole_answer(server, echo):
    asked = {"prompt": "w3  w4", "max_tokens": 8, "temperature": 0, "logprobs": 0, "echo": echo}

    whole = answered(server, **asked)["logprobs"]
    pieces = [event["choices"][0]["logprobs"] for event in server.events("/v1/completions", asked)]

    for name in ("tokens", "token_logprobs"):
        assert whole[name] == [one for piece in pieces for one in (piece or {name: []})[name]]
    assert len(whole["tokens"]) == (3 if echo else 0) + 8


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_of_a_key_has_no_case(server, scheme):
    status, _ = server.post("/v1/completions", {"prompt": "w3", "max_tokens": 1}, authorization=f"{scheme} {KEY}")

    assert 200 == status


@pytest.mark.parametrize("given", ["", KEY, "Bearer", "Basic open sesame", "Bearer Open Sesame", "Bearer open"])
def test_another_key_or_scheme_is_refused(server, given):
    status, _ = server.post("/v1/completions", {"prompt": "w3", "max_tokens": 1}, authorization=given)

    assert 401 == status
