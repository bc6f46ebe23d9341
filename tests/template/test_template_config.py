"""The cache key: anything that can change a length changes it, nothing else does (case PB-06)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from packtrain.files import digest_json
from packtrain.template import HFTemplate, load_processor

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = ["one two", "three four five six", "a much longer row with nine words in all"]


def words(**options: Any) -> Any:
    """A tokenizer that counts words."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: i for i, word in enumerate(["<unk>", "<s>", *sorted({w for r in ROWS for w in r.split()})])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", chat_template=CHATML, **options
    )


def letters() -> Any:
    """A tokenizer that counts bytes."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML)


def key(tokenizer: Any, **options: Any) -> str:
    return digest_json(HFTemplate(tokenizer, **options).config())


def test_another_tokenizer_is_another_key(chat) -> None:
    by_words, by_letters = HFTemplate(words()), HFTemplate(letters())
    assert key(words()) != key(letters())
    for row in ROWS:
        sample = chat("x", row)
        assert by_letters.measure(sample) > by_words.measure(sample)


def test_one_added_token_is_another_key() -> None:
    plain, more, special = words(), words(), words()
    more.add_tokens([AddedToken("<new>")])
    special.add_tokens([AddedToken("<new>", special=True)], special_tokens=True)
    assert len({key(plain), key(more), key(special)}) == 3


def test_a_flipped_bos_flag_is_another_key() -> None:
    plain, with_bos = words(), words()
    with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    flag = words()
    flag.add_bos_token = True
    assert len({key(plain), key(with_bos), key(flag)}) == 3


def test_one_newline_in_the_template_is_another_key() -> None:
    changed = words()
    changed.chat_template = CHATML + "\n"
    assert key(words()) != key(changed)


def test_every_option_that_changes_a_length_is_in_the_key() -> None:
    keys = [
        key(words()),
        key(words(), system="Be brief."),
        key(words(), truncation="left", max_length=10),
        key(words(), truncation="right", max_length=10),
        key(words(), truncation="right", max_length=11),
        key(words(), variables={"a": 1}),
        key(words(), model_limit=100),
    ]
    assert len(set(keys)) == len(keys)
    # a cap that never cuts does not change a length, so it does not void the cache
    assert key(words(), max_length=10) == key(words(), max_length=11) == keys[0]


def test_pixel_limits_are_in_the_key(data: Path) -> None:
    folder = data / "processors" / "qwen2_vl"
    keys = {key(load_processor(folder, max_pixels=high)) for high in (None, 200_000)}
    assert len(keys) == 2


def test_equal_processors_have_equal_keys(data: Path, tmp_path: Path, template) -> None:
    """From another folder, after use, after pickling and in another process."""
    ours = template("qwen2_5_vl")
    expected = digest_json(ours.config())
    assert json.loads(json.dumps(ours.config())) == ours.config()
    copied = tmp_path / "elsewhere"
    shutil.copytree(data / "processors" / "qwen2_5_vl", copied)
    copied.chmod(0o755)
    other = load_processor(copied)
    other.tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=4)  # leaves traces behind
    traced = other.tokenizer.backend_tokenizer
    assert traced.padding is not None
    assert digest_json(HFTemplate(other).config()) == expected
    assert traced.padding is not None  # the caller's object stays as it was
    assert digest_json(pickle.loads(pickle.dumps(ours)).config()) == expected
    code = (
        "import sys; from packtrain.template import HFTemplate; from packtrain.files import digest_json;"
        "print(digest_json(HFTemplate(sys.argv[1]).config()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(copied)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    assert run.stdout.strip() == expected


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_pickled_template_is_the_same_template(name: str, template, chat, data: Path) -> None:
    ours = template(name)
    theirs = pickle.loads(pickle.dumps(ours))
    sample = chat([data / "mllm_demo" / "mllm_demo_data" / "2.jpg", "Who?"], "Him.")
    assert theirs.measure(sample) == ours.measure(sample)
    assert theirs.encode(sample)["input_ids"].tolist() == ours.encode(sample)["input_ids"].tolist()
    assert theirs.family == ours.family
