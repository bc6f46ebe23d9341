"""Token counts of texts: batches, special tokens, and which tokens a character range covers."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from packtrain.errors import SampleError
from packtrain.measuring import text as measuring_text
from packtrain.measuring.text import TokenizedText, check_text, supervised_mask, tokenize


@pytest.fixture(scope="module")
def letters():  # type: ignore[no-untyped-def]
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_texts_keep_their_order_across_calls(letters, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    texts = ["a" * n for n in (3, 0, 40, 1, 100, 2, 2)]
    monkeypatch.setattr(measuring_text, "_CALL_CHARACTERS", 10)
    out = tokenize(letters, texts, add_special_tokens=False)
    assert [len(t.ids) for t in out] == [3, 0, 40, 1, 100, 2, 2]
    assert out[1].offsets.shape == (0, 2) and out[0].offsets.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert tokenize(letters, [], add_special_tokens=False) == []


def test_masks_cover_overlapping_tokens() -> None:
    tokens = TokenizedText(
        np.arange(5, dtype=np.int64), np.array([[0, 0], [0, 3], [3, 5], [5, 5], [5, 9]], dtype=np.int64)
    )
    assert supervised_mask(tokens, [(4, 6)]).tolist() == [False, False, True, True, True]
    assert supervised_mask(tokens, [(0, 1), (8, 9)]).tolist() == [False, True, False, False, True]
    assert supervised_mask(tokens, []).tolist() == [False] * 5
    assert (
        supervised_mask(TokenizedText(np.zeros(0, np.int64), np.zeros((0, 2), np.int64)), [(0, 3)]).size == 0
    )


def test_lone_surrogates_are_refused() -> None:
    for good in ("plain", "漢字 🙂", "", "\x00"):
        check_text(good)
    for bad, place in (("\ud83d", 0), ("ab\udc00c", 2)):
        with pytest.raises(SampleError, match=rf"U\+D.* at character {place}") as caught:
            check_text(bad)
        assert caught.value.reason == "malformed_record"
