"""The text of an answer, token by token, is that of all its tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload.serving.text import Text

PIECES = {
    "words": (
        models.WordPiece(
            {word: at for at, word in enumerate(["?", "it", "'", "s", "##ing", ".", "n't"])}, unk_token="?"
        ),
        decoders.WordPiece(),
    ),
    "unigrams": (
        models.Unigram([("?", 0.0), *((piece, -1.0) for piece in ("▁", "▁'", "▁a", "s", "▁.", "▁n't"))], 0),
        decoders.Metaspace(),
    ),
    "bytes": (
        models.BPE({token: at for at, token in enumerate(["?", "a", "Ġ", "'", "Ã", "©", "s"])}, []),
        decoders.ByteLevel(),
    ),
}


def tokenizer_of(kind: str, *, cleans: bool) -> Any:
    model, decoder = PIECES[kind]
    made = Tokenizer(model)
    made.decoder = decoder
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", clean_up_tokenization_spaces=cleans)


@pytest.mark.parametrize("cleans", [True, False], ids=["spaces taken out", "as it is"])
@pytest.mark.parametrize("kind", PIECES)
def test_pieces_are_the_text_of_all_tokens(kind: str, cleans: bool) -> None:
    tokenizer = tokenizer_of(kind, cleans=cleans)
    for tokens in [[1, 2, 3] * 5, *map(list, itertools.product(range(1, 7), repeat=4))]:
        text = Text(tokenizer)
        pieces = [text.add(token) for token in tokens]

        assert tokenizer.decode(tokens, skip_special_tokens=True) == "".join(pieces) + text.rest()


@pytest.mark.parametrize("kind", ["words", "unigrams"])
def test_stop_strings_are_found_where_spaces_are_taken_out(kind: str) -> None:
    tokenizer = tokenizer_of(kind, cleans=True)
    tokens = [1, 2, 3, 1, 5, *[1] * 9]
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    stop = whole[1:4]

    text = Text(tokenizer, [stop])
    pieces = [text.add(token) for token in tokens]

    assert whole[:1] == "".join(pieces) + text.rest()
    assert text.has_stopped
