"""Which sources may have a static plan: real fetches, in several orders and epochs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from packtrain.errors import InputError, SampleError
from packtrain.measuring.eligibility import epoch_of, probe_static, probed_ids, set_epoch
from packtrain.sources.mixture import Mixture, Part


def encode(sample: Mapping[str, Any]) -> dict[str, Any]:
    if sample["text"] == "BROKEN":
        raise SampleError("template_error", "broken")
    ids = np.asarray([len(word) for word in sample["text"].split()], dtype=np.int64)
    return {"input_ids": ids, "labels": ids}


class Texts:
    """Items `{"text", "id"}`; subclasses do what a static plan cannot follow."""

    def __init__(self, count: int = 100) -> None:
        self.rows = [
            {"id": i, "text": " ".join("w" * (1 + (i * 7 + j) % 9) for j in range(1 + i))}
            for i in range(count)
        ]
        self.epoch = 0
        self.fetched: list[int] = []

    fingerprint = "texts"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        self.fetched.append(index)
        return self.rows[self.row(index)]

    def row(self, index: int) -> int:
        return index

    def where(self, index: int) -> str:
        return f"texts[{index}]"


class Epochs(Texts):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Resampled(Epochs):
    """The reference's own dataset: item i is record perm_epoch[i], lengths were measured on record i."""

    def row(self, index: int) -> int:
        return random.Random(self.epoch).sample(range(len(self.rows)), len(self.rows))[index]


class Anonymous(Resampled):
    """The same, and the records carry no id."""

    def __init__(self, count: int = 100) -> None:
        super().__init__(count)
        self.rows = [{"text": row["text"]} for row in self.rows]


class EqualLengths(Anonymous):
    """The same, and all samples are equally long: only their content tells."""

    def __init__(self, count: int = 16) -> None:
        super().__init__(count)
        self.rows = [{"text": " ".join(["w" * (i + 1)] * 5)} for i in range(count)]


class Growing(Epochs):
    def __len__(self) -> int:
        return len(self.rows) - self.epoch


class Reordered(Epochs):
    """Objects of a sample in another order for each epoch: the length stays."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = super().__getitem__(index)
        words = row["text"].split()
        random.Random(self.epoch * 1000 + index).shuffle(words)
        return {**row, "text": " ".join(words)}


class Unrestored(Epochs):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self.rows[index]
        words = row["text"].split()
        return {**row, "text": " ".join(words[self.epoch % len(words) :] + words[: self.epoch % len(words)])}


class Ordered(Texts):
    """What comes depends on what was read before."""

    def row(self, index: int) -> int:
        return (index + (self.fetched[-2] if len(self.fetched) > 1 else 0)) % len(self.rows)


class Noisy(Texts):
    """Random preprocessing: another content at every read, always equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(1)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        words = self.rows[index]["text"].split()
        return {"text": " ".join("x" * self.random.randint(1, 9) for _ in words)}


class Wrapper:
    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]


def test_static_items_pass_and_are_really_read_forward_and_backward() -> None:
    source = Texts()
    source.rows[99] = {"id": 99, "text": "BROKEN"}
    found = probe_static(source, encode)
    ids = sorted(found)
    assert ids == probed_ids(100, 16) and len(ids) == 16 and (ids[0], ids[-1]) == (0, 99)
    assert source.fetched == [*ids, *reversed(ids)]
    assert found[0] == 1 and found[ids[3]] == ids[3] + 1 and found[99] == "template_error"


def test_few_items_are_all_read() -> None:
    assert probed_ids(5, 16) == [0, 1, 2, 3, 4] and probed_ids(1, 16) == [0]
    assert len(probed_ids(10**9, 16)) == 16


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Resampled, r"anew for each epoch: item \d+.* holds id \d+, in the next epoch \d+"),
        (Anonymous, r"anew for each epoch: item \d+.* has \d+ tokens, in the next epoch \d+"),
        (EqualLengths, r"anew for each epoch: item \d+.* holds in the next epoch what \d+ held before"),
        (Growing, r"anew for each epoch: 100 items in one epoch, 99 in the next"),
        (Unrestored, r"does not come back when the epoch is set back"),
        (Ordered, r"is another item when it is read in another order \(id \d+, then \d+\)"),
        (Noisy, r"is another item when it is read in another order \(its content differs\)"),
    ],
)
def test_moving_sources_are_refused_with_guidance(kind: type[Texts], said: str) -> None:
    for source in (kind(), Wrapper(kind())):
        with pytest.raises(InputError, match=said) as caught:
            probe_static(source, encode)
        assert "mixture with fixed weights" in str(caught.value.hint)


def test_epochs_that_only_change_content_of_equal_length_are_accepted_and_set_back() -> None:
    source = Reordered()
    source.epoch = 3
    probe_static(Wrapper(source), encode)
    assert source.epoch == 3
    assert epoch_of(Wrapper(source)) == 3 and set_epoch(Wrapper(source), 5) and source.epoch == 5
    assert not set_epoch(Texts(), 1) and epoch_of(Texts()) == 0


def test_a_static_mixture_is_accepted() -> None:
    class Chat(Texts):
        normalised = True

    mixture = Mixture([Part("a", Chat(30), 45), Part("b", Chat(10), 10)], seed=3)
    assert len(probe_static(mixture, encode)) == 16
