"""`offload batch`: every request is answered once. (Killed at any write: `tests/test_crashes.py`.)"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from offload.cli import main
from offload.generation import chat as chats
from tests.cli.test_cli import tokens_in_memory
from tests.serving.servers import TEMPLATE, saved, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a 96-word tokenizer and a chat template."""
    place = saved(tmp_path_factory.mktemp("model"), tiny_tokenizer(eos_token="w95"), eos_token_id=95)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    return place


class Done(NamedTuple):
    """The exit code, the lines of answers, and what was printed."""

    code: int
    answers: list[dict[str, Any]]
    out: str
    err: str

    @property
    def texts(self) -> dict[str, str]:
        """Of chats."""
        return {said["custom_id"]: choice(said)["message"]["content"] for said in self.answers}

    @property
    def refused(self) -> dict[int, str]:
        """Why, by the number of the line."""
        said = (line.removeprefix("offload: line ").partition(": ") for line in self.err.splitlines())
        return {int(number): why for number, _, why in said if number.isdecimal()}


def choice(said: dict[str, Any]) -> dict[str, Any]:
    return said["response"]["body"]["choices"][0]  # type: ignore[no-any-return]


@pytest.fixture
def batch(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command for some lines; answers go to the file `name`."""

    def run(lines: list[Any], *options: str, model: Path = folder, name: str = "out") -> Done:
        written(tmp_path / "in", lines)
        target = tmp_path / name
        code = main(["batch", str(model), str(tmp_path / "in"), str(target), *options])
        return Done(code, read(target), *capsys.readouterr())

    return run


def request(at: int, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"w{at % 90 + 1} w{at % 7}"}], "max_tokens": 2 + at % 5, **body}
    return {"custom_id": f"request {at}", "method": "POST", "url": "/v1/chat/completions", "body": asked}


def continued(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "body": {"prompt": prompt, **body}}


def written(path: Path, lines: list[Any]) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_answer(folder: Path, prompt: str, most: int) -> str:
    new = tokens_in_memory(folder, prompt, most)
    return AutoTokenizer.from_pretrained(folder).decode(new, skip_special_tokens=True)


def test_each_request_gets_the_answer_of_the_model_in_memory(folder, batch):
    done = batch([request(at) for at in range(7)], "--in-flight", "3", "--json")

    said = json.loads(done.out)
    assert (0, 7, 0, 0) == (done.code, said["answered"], said["answered_before"], said["refused"])
    assert {f"request {at}" for at in range(7)} == done.texts.keys()
    for at in (0, 6):
        asked = f"{request(at)['body']['messages'][0]['content']} "
        assert plain_answer(folder, asked, 2 + at % 5) == done.texts[f"request {at}"]
    assert {} == done.refused


def test_answers_have_the_form_of_inference_servers(batch):
    done = batch([request(1, max_tokens=3), continued("p", "w1 w2")], "--max-new-tokens", "2")

    chat, text = sorted(done.answers, key=lambda said: said["custom_id"] == "p")
    assert {"custom_id", "response", "error"} == chat.keys()
    assert (200, None) == (chat["response"]["status_code"], chat["error"])
    body = chat["response"]["body"]
    assert {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5} == body["usage"]
    assert ("chat.completion", "assistant") == (body["object"], choice(chat)["message"]["role"])
    assert "length" == choice(chat)["finish_reason"]
    assert "text_completion" == text["response"]["body"]["object"]
    assert 2 == len(choice(text)["text"].split())


def test_bad_lines_are_reported_and_do_not_stop_the_others(batch, monkeypatch):
    monkeypatch.setattr("offload.cli.batch._LONGEST", 2048)
    bad: dict[str, Any] = {
        "not valid JSON": "{",
        "not a JSON object": "[1]",
        "messages are not a list": {"custom_id": "a", "body": {}},
        "messages is not supported": {"custom_id": "b", "body": {"messages": [{"role": "user"}], "prompt": "w1"}},
        "not a non-empty string": continued(3, "w1"),  # type: ignore[arg-type]
        "body is not": {"custom_id": "d", "prompt": "w1"},
        "an earlier line": request(1),
        "max_tokens is 0": request(2, max_tokens=0),
        "temperature is": request(3, temperature="hot"),
        "n is not supported": request(4, n=2),
        "a line of its own": continued("e", ["w1", "w2"]),
        "it has 2048 bytes or more": continued("f", "w1 " * 2000),
        "64 of the prompt and 1 more are too many": continued("c", "w1 " * 64, max_tokens=1),
    }
    done = batch([request(1), *bad.values(), "", request(9)])

    assert 1 == done.code
    assert {"request 1", "request 9"} == done.texts.keys()
    assert [] == [words for at, words in enumerate(bad, start=2) if words not in done.refused.get(at, "")]


def test_answers_are_greedy_where_the_model_s_settings_ask_for_beams(folder, batch, tmp_path):
    asked = {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True}
    models = folder, with_settings(folder, tmp_path / "beams", **asked)
    plain, beams = (batch([request(at) for at in range(3)], model=model, name=f"of {model.name}") for model in models)

    assert 0 == plain.code == beams.code
    assert plain.texts == beams.texts


def test_log_probabilities_of_a_prompt_and_its_answer_are_in_the_line(batch):
    [said] = batch([continued("p", "w1 w2", max_tokens=1, logprobs=1, echo=True)]).answers

    assert 3 == len(choice(said)["logprobs"]["token_logprobs"])
    assert choice(said)["text"].startswith("w1 w2")


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** (8 + messages|length)) }}",
    "memory": "{{ ('w' * 10 ** 11)[:1] }}",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_chat_template_that_does_not_end_costs_one_request(folder, batch, tmp_path, monkeypatch, what):
    monkeypatch.setattr(chats, "_MOST_SECONDS", 1)
    other = shutil.copytree(folder, tmp_path / "model")
    endless = "{% if messages[0].content == 'w3' %}" + ENDLESS[what] + "{% endif %}"
    (other / "chat_template.jinja").write_text(endless + TEMPLATE)
    asked = [request(at, messages=[{"role": "user", "content": f"w{at}"}]) for at in (2, 3, 4)]
    done = batch(asked, model=other)

    assert 1 == done.code
    assert {"request 2", "request 4"} == done.texts.keys()
    too_much = "the chat template takes more than 1 s, or too much memory"
    assert [2] == [*done.refused]
    assert done.refused[2].endswith("MemoryError" if what == "memory" else too_much)


def test_without_a_chat_template_messages_are_refused_in_a_sentence(folder, batch, tmp_path):
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    done = batch([continued("a", "w1", max_tokens=1), request(1), request(2)], model=plain)

    why = "the model has no chat template: give a prompt (of /v1/completions) instead of messages"
    assert (1, {2: why, 3: why}) == (done.code, done.refused)
    assert ["a"] == [said["custom_id"] for said in done.answers]


def test_answered_requests_are_not_repeated(batch):
    first = batch([request(at) for at in range(3)])
    done = batch([request(at) for at in range(5)], "--json")

    said = json.loads(done.out)
    assert (2, 3) == (said["answered"], said["answered_before"])
    assert (first.answers, 5) == (done.answers[:3], len(done.answers))


CONTENTS = {"no JSON": "not JSON\n", "other JSON": '{"a": 1}\n', "no end": "no end", "a number": '{"custom_id": 1}\n'}
CONTENTS["requests"] = '{"custom_id": "1", "body": {"prompt": "w3"}}'


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_file_of_something_else_is_not_written_to(folder, tmp_path, kind, capsys):
    written(tmp_path / "in", [request(1)])
    (tmp_path / "there").write_text(CONTENTS[kind], encoding="utf-8")

    assert 1 == main(["batch", str(folder), str(tmp_path / "in"), str(tmp_path / "there")])

    assert CONTENTS[kind] == (tmp_path / "there").read_text(encoding="utf-8")
    assert "something else than answers" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "told"), [("pipe", "not a regular file"), ("in", "two different files")])
def test_answers_go_to_a_file_of_their_own(folder, tmp_path, name, told, capsys):
    written(tmp_path / "in", [request(1)])
    os.mkfifo(tmp_path / "pipe")
    before = (tmp_path / "in").read_bytes()

    assert 1 == main(["batch", str(folder), str(tmp_path / "in"), str(tmp_path / name)])

    assert before == (tmp_path / "in").read_bytes()
    assert told in capsys.readouterr().err


def test_samples_follow_their_seed_and_end_at_a_stop_string(batch):
    how = {"temperature": 1.5, "top_p": 0.9, "seed": 5, "max_tokens": 8}
    a, b = (batch([request(at, **how) for at in range(2)], "--in-flight", n, name=f"to {n}") for n in "12")
    first = a.texts["request 0"].split()
    [said] = batch([request(0, **how, stop=first[3])]).answers

    assert a.texts == b.texts
    assert first[: first.index(first[3])] == choice(said)["message"]["content"].split()
    assert "stop" == choice(said)["finish_reason"]


def with_settings(folder: Path, place: Path, **settings: Any) -> Path:
    """The model with these generation settings beside its own."""
    shutil.copytree(folder, place)
    path = place / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return place


VALID: tuple[dict[str, Any], ...] = (
    {"return_dict_in_generate": True},
    {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    {"eos_token_id": [95, 94]},
    {"eos_token_id": None},
)


@pytest.mark.parametrize("settings", VALID, ids=str)
def test_valid_generation_settings_are_followed_and_the_text_is_given(settings, folder, batch, tmp_path, capsys):
    model = with_settings(folder, tmp_path / "model", **settings)
    done = batch([continued("a", "w1 w2")], "--max-new-tokens", "3", model=model)

    assert 0 == main(["generate", str(model), "--prompt", "w1", "--max-new-tokens", "3", "--json"])

    assert 3 == len(json.loads(capsys.readouterr().out)["tokens"])
    assert [plain_answer(folder, "w1 w2", 3)] == [choice(said)["text"] for said in done.answers]


@pytest.mark.parametrize(
    "settings",
    [{"pad_token_id": "x"}, {"eos_token_id": "95"}, {"suppress_tokens": 5}, {"top_k": "a", "do_sample": True}],
)
def test_generation_settings_that_are_malformed_refuse_each_request(settings, folder, batch, tmp_path):
    model = with_settings(folder, tmp_path / "model", **settings)
    done = batch([request(1, temperature=1.0), request(2, temperature=1.0)], model=model)

    assert 1 == done.code
    assert 2 == len(done.refused) or "can't make a model from" in done.err


def test_prompts_are_kept_for_later_requests(batch, tmp_path):
    """A model of at most 64 tokens keeps none of these, but answers."""
    asked = [request(at) for at in range(2)]
    plain, done = batch(asked, name="a"), batch(asked, "--prompt-cache", str(tmp_path / "kept"), name="b")

    assert plain.texts == done.texts
    assert (tmp_path / "kept" / "prompts.lock").exists()
