"""What a state of a stream weighs, and states of earlier versions."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.data import StreamingPackedDataset
from packtrain.errors import ForeignArtefactError
from packtrain.packs._stream_state import upgraded, written

#: Of version 2, behind 60 packs of `Lines`.
VERSION_2 = (
    '{"version":2,"settings":"0dc71f27d8c2667d05c92e5391637aed76d48e7c078d192c09bfcb571fc78a67","seed":3,'
    '"splits":1,"window":160,"buffer":150,"reader":[1,0,1,0],"epoch":0,"held":[{"split":0,"epoch":0,"turn'
    '":60,"run":{"next_place":470,"read":470,"count":320,"draws":320,"shuffle":[294,361,2,418,386,349,421'
    ",416,368,340,463,422,392,414,459,15,211,342,382,156,318,246,403,398,24,437,263,258,314,362,465,31,35"
    "3,183,399,397,336,328,441,375,287,41,420,229,432,456,409,265,48,355,446,279,379,376,448,453,452,360,"
    "454,59,467,426,275,180,457,309,347,445,365,417,70,227,352,391,311,400,193,407,460,152,250,334,450,29"
    "0,283,85,317,412,373,261,438,251,439,425,222,196,210,462,276,296,430,221,455,410,319,427,466,469,468"
    ",434,461,316,387,253,344,367,408,390,209,354,447,121,179,393,384,161,126,377,271,389,357,370,371,174"
    ',458,402,136,162,238,254,464,383,187,433,363,231,388,381,424,444],"flight":[],"window":[],"places":['
    "[87,217],[97,93],[144,0],[149,18],[199,186],[207,248],[224,235],[225,341],[234,297],[266,372],[271,3"
    '59],[280,266],[305,102],[308,310],[319,443]],"packer":{"windows":2,"ids":[87,97,144,149,199,207,224,'
    '225,234,266,271,280,305,308,319],"age":[2,2,2,2,1,1,1,1,1,1,1,1,1,1,1],"tokens":[1,1,1,3,1,1,3,1,3,1'
    ',3,3,2,1,2],"costs":{}},"ready":[[303,123,216],[37,225,132],[321,114,331],[1,212,305],[327,234,329],'
    "[202,3,406],[245,308,29,423],[301,208,288],[252,293,345],[9,304,25,326],[322,277,167],[218,88,150],["
    "115,270,226],[358,112,451],[378,380,256],[4,159,324],[350,332,394],[249,243,429],[396,278,30],[411,4"
    '42,440]],"left_out":{},"total":null}}]}'
)


class Lines:
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"input_ids": [1] * (1 + i * 7 % 31)} for i in range(self.samples))


def new() -> StreamingPackedDataset:
    return StreamingPackedDataset(
        Lines(600), pack_length=64, window=160, shuffle_buffer=150, splits=1, seed=3
    )


def ids(packs: Any) -> list[list[int]]:
    return [[sample["sample_id"] for sample in pack] for pack in packs]


def test_a_state_of_version_2_goes_on_with_the_same_packs() -> None:
    stream = new()
    stream.load_state_dict(json.loads(VERSION_2))
    rest = ids(stream)
    assert rest[0] == [303, 123, 216] and rest == ids(new())[60:]
    stream.load_state_dict(json.loads(VERSION_2))
    told = stream.state_dict()
    assert told["version"] == 3 and len(json.dumps(told)) < len(VERSION_2)
    other = new()
    other.load_state_dict(told)
    assert ids(other) == rest


def test_a_split_with_ten_thousand_places_in_its_buffer_takes_less_than_64_kb() -> None:
    """Far on in a long stream, where every place has 13 digits, and with sample lengths of a chat."""
    stream = StreamingPackedDataset(Lines(30_000), pack_length=256, window=1000, shuffle_buffer=10_000)
    packs = iter(stream)
    for _ in range(1000):
        next(packs)
    run = stream.state_dict()["held"][0]["run"]
    assert len(json.dumps(run)) < 48 << 10
    (plain,) = upgraded(stream.state_dict(), 1, 1)["held"]
    assert len(plain["run"]["shuffle"]) == 10_000
    far = copy.deepcopy(plain)
    far["run"]["shuffle"] = [place * 1344 + 10**12 for place in plain["run"]["shuffle"]]
    far["run"]["places"] = [
        [number + 10**9, place * 1344 + 10**12] for number, place in plain["run"]["places"]
    ]
    assert len(json.dumps(far)) > 150_000 and len(json.dumps(written({"held": [far]}))) < 48 << 10


NUMBERS = st.integers(0, (1 << 63) - 1) | st.integers(0, 300)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(0, 400))
def test_numbers_come_back_as_they_were(data: Any, count: int) -> None:
    numbers = data.draw(st.lists(NUMBERS, min_size=count, max_size=count))
    run = {
        "shuffle": numbers,
        "places": [[number, 7] for number in numbers],
        "packer": {"ids": numbers, "after": {"costs": {"a": numbers}}},
        "ready": [numbers],
        "left_out": {"empty": 3},
    }
    state = {"version": 3, "held": [{"split": 0, "run": run}, {"split": 1, "run": None}]}
    told = json.loads(json.dumps(written(state)))
    assert upgraded(told, 1, 1) == state and written(told) == told
    assert upgraded({**state, "version": 2}, 1, 1) == state


def test_a_damaged_text_is_refused_and_never_unpacks_to_more_than_it_says() -> None:
    stream = new()
    packs = iter(stream)
    for _ in range(60):
        next(packs)
    told = json.loads(json.dumps(stream.state_dict()))
    numbers = told["held"][0]["run"]["shuffle"]
    assert numbers["numbers"] == 150
    for name, value in (
        *(("numbers", value) for value in (0, 149, 151, 1 << 40, -1, "x", True, None)),
        *(("bytes", value) for value in (0, 1, 3, 9, 2.0)),
        *(("least", value) for value in (-1, 1 << 70, 300)),
        *(("step", value) for value in (-1, 1 << 70, 7)),
        *(("text", value) for value in ("", "!", "AAAA", numbers["text"][:-8], numbers["text"] * 2, 7, None)),
    ):
        bad = copy.deepcopy(told)
        bad["held"][0]["run"]["shuffle"][name] = value
        with pytest.raises(ForeignArtefactError, match="damaged"):
            new().load_state_dict(bad)
    for pairs in ([], [[1], [2, 3]], [[1, 2]], [7, 7], "xy", None):
        bad = copy.deepcopy(told)
        bad["held"][0]["run"]["places"] = {"pairs": pairs}
        with pytest.raises(ForeignArtefactError, match="damaged"):
            new().load_state_dict(bad)
