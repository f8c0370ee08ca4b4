"""What a request says, in tokens: all of its text, in the form that the chat template reads."""

from typing import Any

import pytest

from offload.errors import ArgumentError
from offload.generation.bodies import Asked, Refused
from offload.generation.chat import Prompts, in_chat
from tests.serving.servers import TEMPLATE, tiny_tokenizer

READS_PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}. {% endfor %}"
)
READS_BOTH = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}. {% endfor %}"
)
READS_TEXT = {
    "printed": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}. {% endfor %}",
    "joined": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '. ' }}{% endfor %}",
    "trimmed": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}. {% endfor %}",
}
DEMANDING = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}" + READS_TEXT["printed"]
TEMPLATES = {"demanding": DEMANDING, "parts": READS_PARTS, "both": READS_BOTH, **READS_TEXT}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(["<s>", "<|end|>"], begins=True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_gets_all_text_in_the_form_that_it_reads(tokenizer, template):
    tokenizer.chat_template = TEMPLATES[template]
    messages = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w1 w2"}]

    assert "system: w3. user: w1 w2. " == in_chat(tokenizer, messages, {})


def test_a_template_that_refuses_everything_is_an_error_of_its_own_words(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('only on Sundays') }}"

    with pytest.raises(ArgumentError, match="only on Sundays"):
        in_chat(tokenizer, [{"role": "user", "content": "w1"}], {})


def prompts(tokenizer: Any, template: str = TEMPLATE, longest: int | None = 4096) -> Prompts:
    tokenizer.chat_template = template
    return Prompts(tokenizer, longest, 8)


def chat(*messages: tuple[str, str], **template: Any) -> Asked:
    said = [{"role": role, "content": content} for role, content in messages]
    return Asked(said, template=template)


def test_the_template_gets_the_variables_of_a_request(tokenizer):
    thinks = TEMPLATE + "{% if enable_thinking is false %}w7{% endif %}{% if add_generation_prompt %} w9{% endif %}"
    made = prompts(tokenizer, thinks)
    said = "user", "w1"
    found = [made.of(asked)[0].tokens for asked in (chat(said), chat(said, enable_thinking=False))]

    assert [[1, 9], [1, 7, 9]] == found


def test_too_many_tokens_are_refused_before_they_are_made_text():
    made = prompts(tiny_tokenizer(), longest=512)
    made.tokenizer = None

    with pytest.raises(Refused, match="4000 of the prompt"):
        made.of(Asked(None, [[1] * 4000], echo=True))


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "tools", "return_dict", "add_generation_prompt"])
def test_arguments_of_transformers_are_refused_as_variables_of_a_template(tokenizer, name):
    with pytest.raises(Refused, match=name):
        prompts(tokenizer).of(chat(("user", "w1"), **{name: "{{ 1 }}"}))


@pytest.mark.parametrize(
    "asked", [chat(("user", "w1 \ud83d")), Asked(None, ["w1 \udcff"]), Asked(None, ["w1 \udcff"], top=1, echo=True)]
)
def test_half_of_a_character_is_refused(tokenizer, asked):
    with pytest.raises(Refused, match="half of a character") as refused:
        prompts(tokenizer).of(asked)

    assert ("messages" if asked.messages else "prompt") == refused.value.param


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.characters = tokenizer, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer(text, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


LONG = "w1 " * 1_000_000


@pytest.mark.parametrize("asked", [chat(("user", LONG)), Asked(None, [LONG]), Asked(None, ["w1", LONG], echo=True)])
def test_a_text_that_can_not_fit_is_refused_before_it_is_made_tokens(tokenizer, asked):
    counting = Counting(tokenizer)
    with pytest.raises(Refused, match=r"3,000,00[01] characters are too many") as refused:
        prompts(counting, longest=512).of(asked)

    assert "context_length_exceeded" == refused.value.code
    assert counting.characters < 512 * 64


def test_a_text_as_long_as_the_context_is_accepted(tokenizer):
    """Nor is one with a longer token than others have."""
    long = tiny_tokenizer(["<s>", f"<{'-' * 998}>"], begins=True)
    [plain] = prompts(tokenizer, longest=512).of(Asked(None, ["w95 " * 503]))
    [odd] = prompts(long, longest=512).of(Asked(None, [f"<{'-' * 998}>" * 503]))

    assert [96, *[95] * 503] == plain.tokens
    assert [96, *[97] * 503] == odd.tokens


@pytest.mark.parametrize("longest", [None, 4096])
def test_an_echoed_prompt_is_the_text_of_the_request(tokenizer, longest):
    """Its spaces and special tokens, too; of tokens, it is their text without special ones."""
    text = " w1   w2 <|end|>w95"
    made = prompts(tokenizer, longest=longest)
    [prompt, tokens] = made.of(Asked(None, [text, [96, 1, 97, 2]], echo=True))

    assert ([96, 1, 2, 97, 95], text) == (prompt.tokens, prompt.text)
    assert ([96, 1, 97, 2], "w1 w2") == (tokens.tokens, tokens.text)
