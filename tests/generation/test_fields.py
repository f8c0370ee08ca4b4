"""Each field of a request is followed, or changes no answer, or is refused by its name."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, get_args, get_type_hints

import pytest

from offload.generation.bodies import FOLLOWED, REFUSED, WITHOUT_MEANING, Asked, Refused, chat_body, text_body
from tests.processes import ROOT

openai = pytest.importorskip("openai")
PATHS = {"chat": chat_body, "text": text_body}
LEAST = {"chat": {"messages": [{"role": "user", "content": "w1"}]}, "text": {"prompt": "w1"}}
OF_OTHERS = [
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    *("structured_outputs", "grammar", "json_schema", "bad_words", "num_beams", "use_beam_search", "best_of"),
    *("allowed_token_ids", "prompt_logprobs", "stop_token_ids", "min_tokens", "length_penalty", "typical_p"),
    *("include_stop_str_in_output", "truncate_prompt_tokens", "logits_processors", "mirostat", "dry_multiplier"),
    *("repeat_penalty", "samplers", "n_predict", "documents", "chat_template", "return_token_ids", "lora_request"),
    *("thinking", "enable_thinking", "reasoning", "max_new_tokens", "do_sample", "inputs", "input", "instructions"),
]


def published(path: str) -> set[str]:
    """The fields of openai's own type of a request."""
    from openai.types import completion_create_params as text
    from openai.types.chat import chat_completion_stream_options_param as streams
    from openai.types.chat import completion_create_params as chat

    module: Any = {"chat": chat, "text": text}[path]
    kinds = module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming
    inner = streams.ChatCompletionStreamOptionsParam.__annotations__
    return {*(name for kind in kinds for name in kind.__annotations__), *(f"stream_options.{name}" for name in inner)}


def asked(path: str, **fields: Any) -> Asked:
    return PATHS[path]({**LEAST[path], **fields}, ["tiny"])


def with_field(name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value}} if inner else {outer: value}


def cases(names: Callable[[str], AbstractSet[str]]) -> Iterator[Any]:
    for path in PATHS:
        for name in sorted(names(path)):
            yield pytest.param(path, name, id=f"{path} {name}")


@pytest.mark.parametrize("path", PATHS)
def test_each_field_of_openai_s_types_is_in_a_table(path):
    assert set() == published(path) - FOLLOWED[path] - WITHOUT_MEANING - REFUSED.keys()


@pytest.mark.parametrize("path", PATHS)
def test_no_field_is_in_two_tables(path):
    here = REFUSED.keys() - (FOLLOWED["chat"] ^ FOLLOWED["text"])  # some are followed on one of the paths

    assert set() == FOLLOWED[path] & WITHOUT_MEANING | FOLLOWED[path] & here | WITHOUT_MEANING & here


@pytest.mark.parametrize(("path", "name"), cases(lambda _: WITHOUT_MEANING))
def test_a_field_without_meaning_changes_nothing(path, name):
    assert asked(path) == asked(path, **with_field(name, "x"))


@pytest.mark.parametrize(("path", "name"), cases(lambda path: {*REFUSED, *OF_OTHERS, "no_such_field"} - FOLLOWED[path]))
def test_a_field_that_is_not_followed_is_refused_by_its_name(path, name):
    with pytest.raises(Refused) as refused:
        asked(path, **with_field(name, ["anything"]))

    assert (400, name) == (refused.value.status, refused.value.param)
    assert name in str(refused.value)


@pytest.mark.parametrize(("path", "name"), cases(lambda path: REFUSED.keys() - FOLLOWED[path]))
def test_a_field_that_asks_for_nothing_is_accepted(path, name):
    values = [None, *REFUSED[name]]

    assert [asked(path)] * len(values) == [asked(path, **with_field(name, value)) for value in values]


FOLLOWING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["a"]}
FOLLOWING |= {"repetition_penalty": 1.5, "max_tokens": 3, "max_completion_tokens": 4, "logprobs": True}
FOLLOWING |= {"stream": True, "stream_options.include_usage": True, "top_logprobs": 2, "echo": True}
FOLLOWING |= {"chat_template_kwargs": {"a": 1}, "messages": [{"role": "system", "content": "w2"}], "prompt": "w2"}
CHECKED = {"model", "stream_options"}  # of which only some values are accepted


@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_is_followed_changes_the_request(path):
    more = {"logprobs": True} if path == "chat" else {}
    values = {**FOLLOWING, **({} if path == "chat" else {"logprobs": 1})}
    fields = FOLLOWED[path] - CHECKED
    same = [name for name in fields if asked(path, **more) == asked(path, **{**more, **with_field(name, values[name])})]

    assert (["logprobs"] if path == "chat" else []) == same  # which `more` has asked for
    assert path == "text" or asked(path) != asked(path, **more)


WRONG: dict[str, Any] = {"temperature": -1, "top_p": 2, "top_k": -2, "min_p": 2, "seed": 0.5, "stop": 3}
WRONG |= {"model": "gpt", "repetition_penalty": 0, "max_completion_tokens": -1, "logprobs": "all", "stream": "yes"}
WRONG |= {"stream_options": [], "stream_options.include_usage": 1, "top_logprobs": 21, "echo": 1}
WRONG |= {"chat_template_kwargs": [], "messages": "w1", "prompt": {"a": 1}, "max_tokens": 1.5}


@pytest.mark.parametrize(("path", "name"), cases(lambda path: FOLLOWED[path]))
def test_a_wrong_value_of_a_field_is_refused_by_its_name(path, name):
    with pytest.raises(Refused) as refused:
        asked(path, **with_field(name, WRONG[name]))

    assert name.split(".")[-1] == refused.value.param


def test_the_page_names_each_field():
    page = (ROOT / "tutorials" / "how-to" / "serve.md").read_text(encoding="utf-8")
    fields = FOLLOWED["chat"] | FOLLOWED["text"] | WITHOUT_MEANING

    assert set() == {name for name in fields if f"`{name.split('.')[-1]}`" not in page}


def content_of(*parts: Any) -> Any:
    found = asked("chat", messages=[{"role": "user", "content": [*parts]}]).messages
    assert found is not None
    return found[0]["content"]


def types_of_parts() -> set[str]:
    """The types of a message's parts that openai publishes."""
    from openai.types.chat import chat_completion_assistant_message_param as assistant
    from openai.types.chat import chat_completion_content_part_param as user

    parts = [*get_args(user.ChatCompletionContentPartParam), *get_args(assistant.ContentArrayOfContentPart)]
    return {get_args(get_args(get_type_hints(part, include_extras=True)["type"])[0])[0] for part in parts}


def test_the_parts_of_a_message_are_one_text():
    assert "w1 w2" == content_of({"type": "text", "text": "w1"}, {"type": "text", "text": " w2"})


def test_each_other_type_of_a_part_is_refused_by_its_name():
    kinds = types_of_parts()
    assert {"text", "refusal", "image_url"} <= kinds
    for kind in kinds - {"text"}:
        with pytest.raises(Refused, match=kind) as refused:
            content_of({"type": kind, kind: {"url": "x"}})

        assert "messages" == refused.value.param


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": ["text"], "text": "w1"}, {"text": "w1"}, "w1", 3, None])
def test_a_part_without_text_is_refused(part):
    with pytest.raises(Refused, match="a part of a message"):
        content_of(part)
