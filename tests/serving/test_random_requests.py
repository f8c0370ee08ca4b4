"""Random requests get what plain `generate` gives: alone, and sixteen at a time."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.campaigns import amount
from tests.serving.servers import Server, running, saved

SPECIAL = ["<s>", "<|end|>", "<|sep|>"]  # the first one begins each text, the second one ends an answer
PIECES = [*string.ascii_lowercase, " ", " the", "ing", " a", "end", "xyz", ". ", "<|"]
TEXTS = [*PIECES, *SPECIAL]  # of each token
BEGIN, END, SEPARATOR = range(len(PIECES), len(TEXTS))
TEMPLATE = "<s>{% for one in messages %}{{ one.role }}<|sep|>{{ one.content }}. {% endfor %}"
REQUESTS = amount("requests", 16, 200)


@dataclass(frozen=True)
class Choice:
    """What one choice of an answer says."""

    text: str
    reason: str
    tokens: Sequence[str] = ()
    offsets: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()

    def agrees_with(self, other: Choice) -> bool:
        """Log-probabilities are those of weights that lie elsewhere in memory."""
        mine, theirs = ([0.0 if one is None else one for one in choice.logprobs] for choice in (self, other))
        texts = [(one.text, one.reason, [*one.tokens], [*one.offsets]) for one in (self, other)]
        return texts[0] == texts[1] and mine == pytest.approx(theirs, abs=1e-4)


def tokenizer() -> Any:
    """Of bytes: the text of tokens is that of each, joined."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({piece.replace(" ", "Ġ"): at for at, piece in enumerate(PIECES)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=SPECIAL, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of its own penalise what is repeated, and say how to sample."""
    settings = {"eos_token_id": END, "repetition_penalty": 1.05, "do_sample": True, "top_k": 30, "top_p": 0.95}
    return saved(tmp_path_factory.mktemp("served") / "tiny", tokenizer(), **settings)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "log"
    with running(folder, log) as server:
        yield server


def requested(draw: random.Random) -> dict[str, Any]:
    """A random request."""
    letters = "".join(draw.choices([*string.ascii_lowercase, " ", SPECIAL[2]], k=draw.randint(1, 12)))
    tokens = draw.choices(range(len(TEXTS)), k=draw.randint(1, 12))
    body: dict[str, Any] = {"prompt": draw.choice([letters, tokens]), "max_tokens": draw.choice([1, 2, 8, 30])}
    if (temperature := draw.choice([0, 0, 0.7, 1.5, None])) is not None:
        body["temperature"] = temperature
    body["seed"] = draw.randrange(2**40)
    some = {
        "top_p": draw.choice([0.5, 1]),
        "top_k": draw.choice([0, 3]),
        "min_p": 0.02,
        "n": draw.randint(2, 3),
        "stop": draw.sample(["t", "in", " a", "<|sep|>", "d<", "x<|s", "yz", ". "], k=draw.randint(1, 3)),
        "repetition_penalty": draw.choice([1, 1.3]),
        "frequency_penalty": draw.choice([-0.5, 0.4]),
        "presence_penalty": draw.choice([-0.5, 0.4]),
        "ignore_eos": True,
        "skip_special_tokens": draw.choice([True, False]),
    }
    body |= {name: value for name, value in some.items() if draw.random() < 0.3}
    both = {"logprobs": draw.randint(0, 3), "echo": True, "stream": True}
    body |= {name: value for name, value in both.items() if draw.random() < 0.5}
    return body if draw.random() < 0.6 else as_chat(body, letters, draw)


def as_chat(body: dict[str, Any], letters: str, draw: random.Random) -> dict[str, Any]:
    """The same wishes for the answer in a conversation, which has no echo."""
    roles = ["system", "user", "assistant", "user"][draw.randrange(2) : draw.choice([2, 4])]
    chat = {"messages": [{"role": role, "content": letters} for role in roles]}
    if "logprobs" in body:
        chat |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return {name: value for name, value in body.items() if name not in ("prompt", "echo")} | chat


class Plain:
    """Plain transformers, in memory; an answer is cut once it is whole."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def choices(self, body: dict[str, Any]) -> list[Choice]:
        """What an answer should say."""
        return [self._choice(body, body["seed"] + number) for number in range(body.get("n", 1))]

    def _choice(self, body: dict[str, Any], seed: int) -> Choice:
        given = body.get("prompt")
        if given is None:
            given = self._tokenizer.apply_chat_template(body["messages"])["input_ids"]
        prompt = self._tokenizer(given)["input_ids"] if isinstance(given, str) else given
        tokens, scores = self._generated(prompt, body, seed)
        ends = () if body.get("ignore_eos") else (END,)
        shown = [0 if token in ends else len(self._shown(token, body)) for token in tokens]
        count, text = self._cut(tokens, body, ends)
        reason = "length" if text is None and (tokens[-1] not in ends) else "stop"
        text = "".join(self._shown(token, body) for token in tokens if token not in ends) if text is None else text
        logprobs: list[float | None] = [float(one[token]) for one, token in zip(scores, tokens, strict=True)][:count]
        tokens, begin, offsets = tokens[:count], "", [sum(shown[:at]) for at in range(count)]
        if body.get("echo"):
            names = [self._shown(token, body) for token in prompt]
            if isinstance(given, str):  # as it was sent, but for what the tokenizer put before it
                names = ["", *(TEXTS[token] for token in prompt[1:])]
            begin = "".join(names)
            offsets = [len("".join(names[:at])) for at in range(len(prompt))] + [len(begin) + at for at in offsets]
            with torch.inference_mode():
                of_prompt = torch.log_softmax(self._model(torch.tensor([prompt])).logits[0].float(), -1)
            logprobs = [None, *(float(of_prompt[at, token]) for at, token in enumerate(prompt[1:])), *logprobs]
            tokens = [*prompt, *tokens]
        if "logprobs" not in body:
            return Choice(begin + text, reason)
        if "messages" in body:  # whose tokens have no offsets
            return Choice(text, reason, [TEXTS[token] for token in tokens], (), logprobs)
        return Choice(begin + text, reason, [TEXTS[token] for token in tokens], offsets, logprobs)

    def _shown(self, token: int, body: dict[str, Any]) -> str:
        return "" if token >= BEGIN and body.get("skip_special_tokens", True) else TEXTS[token]

    def _cut(self, tokens: list[int], body: dict[str, Any], ends: Sequence[int]) -> tuple[int, str | None]:
        """How many tokens there are up to a stop string, and the text before it; None if there is none."""
        letters: list[str] = []
        for count, token in enumerate(tokens, 1):
            if token not in ends:
                letters += TEXTS[token]
            searched = "".join(letters)
            places = [searched.index(stop) for stop in body.get("stop", ()) if stop in searched]
            if places:
                shown = [bool(self._shown(one, body)) for one in tokens[:count] if one not in ends for _ in TEXTS[one]]
                return count, "".join(letter for at, letter in enumerate(letters) if shown[at] and at < min(places))
        return len(tokens), None

    def _generated(self, prompt: list[int], body: dict[str, Any], seed: int) -> tuple[list[int], list[torch.Tensor]]:
        from transformers import LogitsProcessorList

        seen: list[torch.Tensor] = []

        def penalise(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            answer = tokens[0, len(prompt) :].tolist()
            for token in {*answer}:
                scores[0, token] -= answer.count(token) * body.get("frequency_penalty", 0)
                scores[0, token] -= body.get("presence_penalty", 0)
            return scores

        def see(_tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(torch.log_softmax(scores[0], -1))
            return scores

        options: dict[str, Any] = {"do_sample": body.get("temperature", 1) > 0, "max_new_tokens": body["max_tokens"]}
        sampling = ("temperature", "top_p", "top_k", "min_p") if options["do_sample"] else ()
        options |= {name: float(body[name]) for name in (*sampling, "repetition_penalty") if name in body}
        options |= {"top_k": int(options["top_k"])} if "top_k" in options else {}
        options |= {"eos_token_id": None} if body.get("ignore_eos") else {}
        given, processors = torch.tensor([prompt]), LogitsProcessorList([penalise, see])
        options |= {"attention_mask": torch.ones_like(given), "pad_token_id": 0}
        torch.manual_seed(seed)
        with torch.inference_mode():
            tokens = self._model.generate(given, logits_processor=processors, **options)
        return tokens[0, len(prompt) :].tolist(), seen


def answered(server: Server, body: dict[str, Any]) -> list[Choice]:
    """The choices of an answer; the pieces of a stream are put together."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if body.get("stream"):
        parts = [event["choices"][0] for event in server.events(path, body)]
    else:
        status, said = server.post(path, body)
        assert status == 200, said
        parts = said["choices"]
    found = []
    for number in range(body.get("n", 1)):
        mine = [part for part in parts if part["index"] == number]
        [reason] = [part["finish_reason"] for part in mine if part["finish_reason"]]
        if "messages" in body:
            found.append(said_in_chat(mine, reason))
            continue
        names = ("tokens", "text_offset", "token_logprobs") if "logprobs" in body else ()
        lists = [[one for part in mine for one in (part["logprobs"] or {}).get(name, ())] for name in names]
        found.append(Choice("".join(part["text"] for part in mine), reason, *lists))
    return found


def said_in_chat(parts: list[Any], reason: str) -> Choice:
    """The choice that the parts of a chat's answer make; `message` of a whole answer, `delta` of a stream."""
    text = "".join((part.get("message") or part["delta"]).get("content") or "" for part in parts)
    tokens = [one for part in parts for one in (part.get("logprobs") or {}).get("content") or ()]
    return Choice(text, reason, [one["token"] for one in tokens], (), [one["logprob"] for one in tokens])


@pytest.mark.campaign("requests")
def test_random_requests_get_what_generate_gives_alone_and_sixteen_at_a_time(server: Server, folder: Path) -> None:
    draw, plain = random.Random(50), Plain(folder)
    bodies = [requested(draw) for _ in range(REQUESTS)]
    expected = [plain.choices(body) for body in bodies]

    alone = [answered(server, body) for body in bodies]
    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(lambda body: answered(server, body), bodies))

    for body, one, two, three in zip(bodies, expected, alone, together, strict=True):
        assert len(one) == len(two), body
        for wanted, found in zip(one, two, strict=True):
            assert wanted.agrees_with(found), (body, wanted, found)
        assert two == three, body
    reasons = {choice.reason for choices in expected for choice in choices}
    assert {"stop", "length"} == reasons
