"""The text of an answer, token by token, is that of all its tokens."""

import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload.generation.text import Text
from tests.serving.servers import tiny_tokenizer

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


@pytest.mark.parametrize("cleans", [True, False], ids=["spaces taken out afterwards", "as it is"])
@pytest.mark.parametrize("kind", PIECES)
def test_pieces_are_the_text_of_all_tokens(kind, cleans):
    """With the spaces that a tokenizer may take out of a whole text, which pieces that were given can't follow."""
    tokenizer = tokenizer_of(kind, cleans=cleans)
    for tokens in [[1, 2, 3] * 5, *map(list, itertools.product(range(1, 7), repeat=4))]:
        text, pieces = Text(tokenizer), []
        for token in tokens:
            pieces.append(text.add(token))
        whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

        assert whole == "".join(pieces) + text.rest()


@pytest.mark.parametrize("stop", ["<|end|>", "<|end|> w2", "|end", "d|> w", "w1<|e"])
def test_a_special_token_in_a_stop_string_stops(stop):
    tokenizer = tiny_tokenizer(["<|end|>", "<|sep|>"])
    text = Text(tokenizer, [stop, "w50"])
    pieces = [text.add(token) for token in (3, 97, 1, 96, 2, 4)]

    assert text.has_stopped
    assert ("w3" if stop[0] == "w" else "w3 w1") == "".join(pieces).strip() + text.rest()


def test_a_special_token_outside_stop_strings_is_hidden():
    tokenizer = tiny_tokenizer(["<|end|>", "<|sep|>"])
    tokens = [96, 3, 97, 4, 97, 96]  # ends as a stop string begins
    text = Text(tokenizer, ["<|end|> w4"])

    pieces = [text.add(token) for token in tokens]

    assert tokenizer.decode(tokens, skip_special_tokens=True) == "".join(pieces) + text.rest()
