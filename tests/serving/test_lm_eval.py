"""lm-eval gets the same numbers from a server as from the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.serving.servers import Server, running, saved

pytest.importorskip("lm_eval")

PAIRS = [
    ("the cat sat", " on the mat"),
    ("a naïve", " café – ok"),
    ("日本", "語です"),
    ("x", " y"),
    ("one two three.", " four<|sep|> five"),
    ("é", "é"),
]
CONTINUED = ["the cat", "naïve", "日", "x y z"]


def tokenizer(*, begins: bool) -> Any:
    """Of bytes, so that most of the characters that are no letters of English are several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "o"), ("a", "t"), ("Ã", "©")]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<|sep|>", "<|end|>"])
    if begins:
        first = [("<s>", len(pieces))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    special = {"bos_token": "<s>", "eos_token": "<|end|>", "extra_special_tokens": ["<|sep|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def of_english(folder: Path) -> Path:
    """The model, whose likeliest token always has letters of English: others have logits of 0."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
    others = [
        at for at in range(len(tokens)) if not (text := tokens.decode([at])).isascii() or not text.strip().isalpha()
    ]
    with torch.no_grad():
        model.lm_head.weight[others] = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with a first token"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("served")
    with running(of_english(saved(place / "tiny", tokenizer(begins=request.param))), place / "log") as server:
        yield server


def asked(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, number) for number, pair in enumerate(arguments)]


def model_itself(folder: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)
    return HFLM(pretrained=offload.from_pretrained(folder), tokenizer=tokens, device="cpu", **options)


def agree(expected: Any, found: Any) -> bool:
    return [greedy for _, greedy in expected] == [greedy for _, greedy in found] and [
        number for number, _ in expected
    ] == pytest.approx([number for number, _ in found], abs=1e-4)


def pairs(lm: Any) -> list[tuple[str, str]]:
    """Texts, and after some of them what the model says."""
    options = {"until": ["<|sep|>"], "max_gen_toks": 4, "do_sample": False}
    texts = lm.generate_until(asked("generate_until", *((text, options) for text in CONTINUED)))
    assert all(text.isascii() for text in texts)
    return [*PAIRS, *zip(CONTINUED, texts, strict=True)]


def test_local_completions_gives_the_numbers_of_the_model(server: Server) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    here = model_itself(server.folder)
    there = LocalCompletionsAPI(
        model="tiny",
        base_url=f"{server.url}/v1/completions",
        tokenizer=str(server.folder),
        max_length=4000,
        add_bos_token=True,
    )
    scored = asked("loglikelihood", *pairs(here))
    options = {"until": ["e", "<|sep|>"], "max_gen_toks": 9, "do_sample": False}
    continued = asked("generate_until", *((text, options) for text in CONTINUED))

    assert agree(here.loglikelihood(scored), there.loglikelihood(scored))
    assert here.generate_until(continued) == there.generate_until(continued)
