"""`offload batch`: every request is answered once, however the process ends."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.cli.requests import lines_of, parsed
from offload.generation import chat as chats
from tests.campaigns import amount
from tests.processes import run_module, run_script
from tests.serving.servers import TEMPLATE, saved, tiny_tokenizer

KILLS = amount("kills", 4, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a 96-word tokenizer and a chat template."""
    place = saved(tmp_path_factory.mktemp("model"), tiny_tokenizer(eos_token="w95"), eos_token_id=95)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    return place


def request(at: int, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"w{at % 90 + 1} w{at % 7}"}], "max_tokens": 2 + at % 5, **body}
    return {"custom_id": f"request {at}", "method": "POST", "url": "/v1/chat/completions", "body": asked}


def written(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(path: Path) -> dict[str, str]:
    return {said["custom_id"]: said["response"]["body"]["choices"][0]["message"]["content"] for said in read(path)}


def run(folder: Path, source: Path, target: Path, *options: str) -> int:
    return main(["batch", str(folder), str(source), str(target), *options])


def plain_answer(folder: Path, prompt: str, most: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=most, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_each_request_gets_the_answer_of_the_model_in_memory(folder, tmp_path, capsys):
    source = written(tmp_path / "in.jsonl", [request(at) for at in range(7)])

    assert 0 == run(folder, source, tmp_path / "out.jsonl", "--in-flight", "3", "--json")

    said = json.loads(capsys.readouterr().out)
    assert (7, 0, 0) == (said["answered"], said["answered_before"], said["refused"])
    found = texts(tmp_path / "out.jsonl")
    assert {f"request {at}" for at in range(7)} == found.keys()
    for at in (0, 6):
        asked = f"{request(at)['body']['messages'][0]['content']} "
        assert plain_answer(folder, asked, 2 + at % 5) == found[f"request {at}"]
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def test_answers_have_the_form_of_inference_servers(folder, tmp_path):
    source = written(tmp_path / "in.jsonl", [request(1, max_tokens=3), {"prompt": "w1 w2", "custom_id": "p"}])

    run(folder, source, tmp_path / "out.jsonl", "--max-new-tokens", "2")

    chat, text = sorted(read(tmp_path / "out.jsonl"), key=lambda said: said["custom_id"] == "p")
    assert {"custom_id", "response", "error"} == chat.keys()
    assert (200, None) == (chat["response"]["status_code"], chat["error"])
    body = chat["response"]["body"]
    assert {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5} == body["usage"]
    assert ("chat.completion", "assistant") == (body["object"], body["choices"][0]["message"]["role"])
    assert "length" == body["choices"][0]["finish_reason"]
    assert "text_completion" == text["response"]["body"]["object"]
    assert 2 == len(text["response"]["body"]["choices"][0]["text"].split())


def test_bad_lines_are_reported_and_do_not_stop_the_others(folder, tmp_path):
    bad: dict[str, Any] = {
        "not valid JSON": "{",
        "not a JSON object": "[1]",
        "neither messages nor a prompt": {"custom_id": "a"},
        "both messages and a prompt": {"custom_id": "b", "messages": [{"role": "user"}], "prompt": "w1"},
        "not a non-empty string": {"custom_id": 3, "prompt": "w1"},
        "an earlier line": request(1),
        "max_tokens is 0": request(2, max_tokens=0),
        "temperature is": request(3, temperature="hot"),
        "top_p is 2": request(4, top_p=2),
        "stop is 3": request(6, stop=3),
        "64 of the prompt and 1 more are too many": {"custom_id": "c", "prompt": "w1 " * 64},
        "a message has no role": request(7, messages=[1]),
        "rejects it": request(8, messages=[{"role": "user", "content": {"a": 1}, "x": 1}, {"role": "user"}]),
    }
    lines = [request(1), *bad.values(), request(9)]
    source = written(tmp_path / "in.jsonl", lines)
    errors = tmp_path / "bad.jsonl"

    assert 1 == run(folder, source, tmp_path / "out.jsonl", "--errors", str(errors))

    assert {"request 1", "request 9"} <= texts(tmp_path / "out.jsonl").keys()
    told = {said["error"]["line"]: said["error"]["message"] for said in read(errors)}
    for at, words in enumerate(bad, start=2):
        if words != "rejects it":  # depends on the template
            assert words in told[at]
    assert all(said["response"] is None for said in read(errors))


def test_answers_are_greedy_where_the_model_s_settings_ask_for_beams(folder, tmp_path):
    asked = {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True}
    beams = with_settings(folder, tmp_path / "beams", **asked)
    source = written(tmp_path / "in.jsonl", [request(at) for at in range(3)])

    assert [0, 0] == [run(model, source, tmp_path / f"{model.name}.jsonl") for model in (folder, beams)]

    assert texts(tmp_path / "beams.jsonl") == texts(tmp_path / f"{folder.name}.jsonl")


def test_an_unknown_option_is_one_warning(folder, tmp_path, capsys):
    lines = [request(1), request(2, n=2, tools=None), {"custom_id": "p", "prompt": "w1", "n": 1, "echo": True}]

    assert 0 == run(folder, written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")

    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("offload: ")]
    assert [
        f"offload: the option {name} is ignored, first on line {at}" for name, at in (("n", 2), ("echo", 3))
    ] == warned
    assert 3 == len(read(tmp_path / "out.jsonl"))


def test_figures_are_written_in_full(folder, tmp_path, capsys, monkeypatch):
    """Not in scientific notation, however large they are."""
    figures = {"tokens": 1234567, "tokens_per_second": 1234.5, "read_bytes_per_line": 98821.3}
    monkeypatch.setattr("offload.cli.batch._Progress.figures", lambda _: figures)

    assert 0 == run(folder, written(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl")

    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"answered 0", "tokens 1,234,567", "tokens per second 1,234", "read per line 98.8 kB"} <= set(said)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** (8 + messages|length)) }}",
    "memory": "{{ ('w' * 10 ** 11)[:1] }}",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_chat_template_that_does_not_end_costs_one_request(folder, tmp_path, monkeypatch, what):
    monkeypatch.setattr(chats, "_MOST_SECONDS", 1)
    other = shutil.copytree(folder, tmp_path / "model")
    endless = "{% if messages[0].content == 'w3' %}" + ENDLESS[what] + "{% endif %}"
    (other / "chat_template.jinja").write_text(endless + TEMPLATE)
    asked = [request(at, messages=[{"role": "user", "content": f"w{at}"}]) for at in (2, 3, 4)]

    assert 1 == run(other, written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl")

    assert {"request 2", "request 4"} == texts(tmp_path / "out.jsonl").keys()
    [refused] = read(tmp_path / "out.jsonl.errors.jsonl")
    assert "request 3" == refused["custom_id"]
    assert refused["error"]["message"].endswith(
        "MemoryError" if what == "memory" else "the chat template takes more than 1 s, or too much memory"
    )


def test_without_a_chat_template_messages_are_refused_in_a_sentence(folder, tmp_path, capsys):
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    source = written(
        tmp_path / "in.jsonl", [{"custom_id": "a", "prompt": "w1", "max_tokens": 1}, request(1), request(2)]
    )

    assert 1 == run(plain, source, tmp_path / "out.jsonl")

    [first, second] = read(tmp_path / "out.jsonl.errors.jsonl")
    why = "the model has no chat template: give a prompt (of /v1/completions) instead of messages"
    assert [why, why] == [first["error"]["message"], second["error"]["message"]]
    assert ["a"] == [said["custom_id"] for said in read(tmp_path / "out.jsonl")]
    errors = tmp_path / "out.jsonl.errors.jsonl"
    assert f"offload: 2 lines refused: see {errors}; the first is line 2: {why}\n" == capsys.readouterr().err


def test_a_request_that_the_model_rejects_does_not_stop_the_others(folder, tmp_path):
    bad = ({"temperature": 1e-45, "max_tokens": 2}, {"temperature": 1, "top_p": 0, "max_tokens": 2}, {"seed": 2**70})
    asked = [request(at, **body) for at, body in enumerate(bad, 1)]
    source = written(tmp_path / "in.jsonl", [*asked, request(4)])

    run(folder, source, tmp_path / "out.jsonl")

    assert "request 4" in texts(tmp_path / "out.jsonl")
    done = [read(tmp_path / name) for name in ("out.jsonl", "out.jsonl.errors.jsonl")]
    assert 4 == sum(map(len, done))
    assert 0 < len(done[1])


def test_null_and_empty_options_are_ignored():
    asked = {"max_completion_tokens": None, "max_tokens": 5, "logit_bias": None, "stop": ["", "w1"], "prompt": "w2"}

    found = parsed(json.dumps(asked).encode(), 1)

    assert (5, {"stop": ["w1"]}) == (found.asked.max_tokens, found.asked.options)


def test_a_line_that_is_too_long_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.cli.requests._LONGEST", 10)
    (tmp_path / "in").write_bytes(b"1" * 35 + b"\n\n2\n" + b"3" * 10 + b"\n" + b"4" * 11 + b"\n5")

    assert [1, 3, 4, 5, 6] == [number for number, _ in lines_of(tmp_path / "in")]


def test_requests_may_be_piped_in(folder, tmp_path):
    source = written(tmp_path / "in.jsonl", [request(1)])
    done = run_module("offload", "batch", folder, "-", tmp_path / "out.jsonl", given=source.read_bytes())

    assert not done.returncode, done.stderr
    assert {"request 1"} == texts(tmp_path / "out.jsonl").keys()


def test_answered_requests_are_not_repeated(folder, tmp_path, capsys):
    source = written(tmp_path / "in.jsonl", [request(at) for at in range(3)])
    run(folder, source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    written(source, [request(at) for at in range(5)])
    capsys.readouterr()

    run(folder, source, tmp_path / "out.jsonl", "--json")

    said = json.loads(capsys.readouterr().out)
    assert (2, 3) == (said["answered"], said["answered_before"])
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)


def test_a_line_cut_by_a_kill_is_written_again(folder, tmp_path):
    source = written(tmp_path / "in.jsonl", [request(at) for at in range(3)])
    run(folder, source, tmp_path / "out.jsonl", "--in-flight", "1")
    whole = (tmp_path / "out.jsonl").read_bytes()
    expected = texts(tmp_path / "out.jsonl")
    for cut in (1, 5, 20, len(whole.splitlines()[-1])):
        (tmp_path / "out.jsonl").write_bytes(whole[:-cut])

        run(folder, source, tmp_path / "out.jsonl", "--in-flight", "1")

        assert expected == texts(tmp_path / "out.jsonl")


OTHERS = ("something else than answers", "something else than refused lines", "a regular file", "three different files")
# Where answers and errors go, what is in "there" before, and which of the above is said.
FILES: dict[str, tuple[str, str, str, str]] = {
    "no JSON": ("there", "new", "not JSON\n", OTHERS[0]),
    "other JSON": ("there", "new", '{"a": 1}\n', OTHERS[0]),
    "no end": ("there", "new", "text without an end", OTHERS[0]),
    "another number": ("there", "new", '{"custom_id": 1}\n', OTHERS[0]),
    "answers, for errors": ("new", "there", '{"custom_id": "a", "response": {}, "error": null}\n', OTHERS[1]),
    "a pipe": ("pipe", "new", "", OTHERS[2]),
    "a device": (os.devnull, "new", "", OTHERS[2]),
    "the requests": ("in.jsonl", "new", "", OTHERS[3]),
    "errors": ("new", "new", "", OTHERS[3]),
}


@pytest.mark.parametrize("kind", FILES)
def test_foreign_files_are_not_written_to(folder, tmp_path, kind, capsys):
    answers, errors, content, words = FILES[kind]
    source = written(tmp_path / "in.jsonl", [request(1)])
    (tmp_path / "there").write_text(content, encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    before = source.read_bytes()

    assert 1 == run(folder, source, tmp_path / answers, "--errors", str(tmp_path / errors))

    assert (content, before) == ((tmp_path / "there").read_text(encoding="utf-8"), source.read_bytes())
    assert words in capsys.readouterr().err


def test_missing_requests_are_an_error(folder, tmp_path):
    assert 1 == run(folder, tmp_path / "missing.jsonl", tmp_path / "out.jsonl")


def test_samples_follow_their_seed_and_end_at_a_stop_string(folder, tmp_path):
    asked = [request(at, temperature=1.5, top_p=0.9, seed=5, max_tokens=8) for at in range(2)]
    source = written(tmp_path / "in.jsonl", asked)
    for name, in_flight in (("a", "1"), ("b", "2")):
        run(folder, source, tmp_path / name, "--in-flight", in_flight)
    assert texts(tmp_path / "a") == texts(tmp_path / "b")

    first = texts(tmp_path / "a")["request 0"].split()
    written(source, [request(0, temperature=1.5, top_p=0.9, seed=5, max_tokens=8, stop=first[3])])
    run(folder, source, tmp_path / "c")

    [said] = read(tmp_path / "c")
    assert first[: first.index(first[3])] == said["response"]["body"]["choices"][0]["message"]["content"].split()
    assert "stop" == said["response"]["body"]["choices"][0]["finish_reason"]


@pytest.mark.campaign("kills")
def test_a_killed_process_loses_and_repeats_nothing(folder, tmp_path):
    """Killed at random times, then run to the end."""
    count = 8 + 3 * KILLS  # leaves work for each one
    source = written(tmp_path / "in.jsonl", [request(at, max_tokens=3) for at in range(count)])
    run(folder, source, tmp_path / "expected.jsonl")
    script = """
        import os, random, signal, sys, time
        import torch, transformers, offload.cli, offload.batches.mapping
        from transformers import AutoTokenizer, LlamaForCausalLM
        folder, source, target, kills = sys.argv[1:]
        rng, done = random.Random(1), 0
        for at in range(int(kills) + 1):
            pid = os.fork()
            if not pid:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os._exit(offload.cli.main(["batch", folder, source, target, "--in-flight", "4"]))
            if at < int(kills):
                before = os.path.getsize(target) if os.path.exists(target) else 0
                wanted = before + rng.randrange(1, 900)
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)
                    if os.path.exists(target) and os.path.getsize(target) >= wanted:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                        break
            else:
                assert os.waitpid(pid, 0)[1] == 0
    """

    run_script(script, str(folder), str(source), str(tmp_path / "out.jsonl"), str(KILLS), limit=280 + 20 * KILLS)

    found = [said["custom_id"] for said in read(tmp_path / "out.jsonl")]
    assert sorted(f"request {at}" for at in range(count)) == sorted(found)
    assert texts(tmp_path / "expected.jsonl") == texts(tmp_path / "out.jsonl")


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
def test_valid_generation_settings_are_followed_and_the_text_is_given(settings, folder, tmp_path, capsys):
    model = with_settings(folder, tmp_path / "model", **settings)
    source = written(tmp_path / "in.jsonl", [request(1), {"prompt": "w1 w2", "custom_id": "p"}])

    assert 0 == run(model, source, tmp_path / "out.jsonl", "--max-new-tokens", "3")
    assert 0 == main(["generate", str(model), "--prompt", "w1", "--max-new-tokens", "3", "--json"])

    assert 3 == len(json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"])
    assert (
        plain_answer(folder, "w1 w2", 3) == read(tmp_path / "out.jsonl")[-1]["response"]["body"]["choices"][0]["text"]
    )


@pytest.mark.parametrize("ends", ["95", 1.5, [[95]], {"a": 1}, ["w95"], True], ids=str)
def test_an_end_that_is_not_a_token_is_refused_before_any_answer(ends, folder, tmp_path, capsys):
    model = with_settings(folder, tmp_path / "model", eos_token_id=ends)
    source = written(tmp_path / "in.jsonl", [request(1)])

    assert 1 == run(model, source, tmp_path / "out.jsonl")
    assert 1 == main(["generate", str(model), "--prompt", "w1"])

    for line in capsys.readouterr().err.splitlines()[-2:]:
        assert f"{model} says in its generation_config.json" in line or "can't make a model from" in line


@pytest.mark.parametrize("settings", [{"pad_token_id": "x"}, {"suppress_tokens": 5}, {"top_k": "a", "do_sample": True}])
def test_generation_settings_that_are_malformed_refuse_each_request(settings, folder, tmp_path, capsys):
    model = with_settings(folder, tmp_path / "model", **settings)
    source = written(tmp_path / "in.jsonl", [request(1, temperature=1.0), request(2, temperature=1.0)])

    assert 1 == run(model, source, tmp_path / "out.jsonl")

    said = capsys.readouterr().err
    assert "2 lines refused" in said or "can't make a model from" in said


def test_prompts_are_kept_for_later_requests(folder: Path, tmp_path: Path) -> None:
    """A model of at most 64 tokens keeps none of these, but answers."""
    source = written(tmp_path / "in.jsonl", [request(at) for at in range(2)])
    run(folder, source, tmp_path / "a")

    assert 0 == run(folder, source, tmp_path / "b", "--prompt-cache", str(tmp_path / "kept"))
    assert texts(tmp_path / "a") == texts(tmp_path / "b")
    assert (tmp_path / "kept" / "prompts.json").exists()
