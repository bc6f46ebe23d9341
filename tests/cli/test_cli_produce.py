"""`produce`, and `show` and `verify` on what it makes."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packtrain import plan
from packtrain.cli import main
from packtrain.data import LazyShardedDataset


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(one) for one in args])
        out = capsys.readouterr()
        return int(caught.value.code or 0), out.out, out.err

    return run


Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    rows = [{"question": f"Count to {i}.", "answer": " ".join(map(str, range(i % 40)))} for i in range(60)]
    for number in range(3):
        text = "".join(json.dumps(row) + "\n" for row in rows[20 * number : 20 * number + 20])
        (tmp_path / "in" / f"{number}.jsonl").write_text(text)
    return tmp_path / "in"


def test_produce_show_verify(shell: Shell, raw: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    columns = ("--column", "prompt=question", "--column", "response=answer")
    options = ("-p", tokenizer_folder, "-n", 128, "--packs-per-chunk", 2, "--window", 25, *columns)
    code, text, _ = shell("produce", raw, out, *options, "--once", "--json")
    made = json.loads(text)
    assert code == 0 and made["read"] == 60 and made["packed"] + sum(made["dropped"].values()) == 60
    assert made["lag_samples"] == 0 and made["dropped"]["empty"] == 2 and made["efficiency"] > 0.8
    code, text, _ = shell("show", out, "--json")
    shown = json.loads(text)
    assert code == 0 and shown["ended"] and shown["producer"] == "stopped"
    assert {key: shown[key] for key in ("packs", "chunks", "tokens", "read")} == {
        key: made[key] for key in ("packs", "chunks", "tokens", "read")
    }
    waiting = tmp_path / "later"
    threading.Timer(0.3, lambda: shutil.copytree(out, tmp_path / "part").rename(waiting)).start()
    code, text, _ = shell("show", waiting, "--follow", "--interval", 0.1, "--json")
    assert code == 0 and json.loads(text.splitlines()[-1])["ended"]
    code, text, _ = shell("show", out, "--follow")
    assert code == 0 and "60 read" in text and "empty" in text
    code, text, _ = shell("show", out, "--ledger")
    assert code == 0 and "0\tempty\t0.jsonl:1\tevery assistant message" in text
    code, text, _ = shell("verify", out, "--json")
    assert code == 0 and "are all that was read" in json.loads(text)["checks"]["partition"]
    path = out / "chunk_00000001.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 4]) + whole[-19:])
    code, _, err = shell("verify", out)
    assert code == 1 and "chunk_00000001.arrow" in err


def test_what_produce_refuses(shell: Shell, raw: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    code, _, err = shell("produce", raw, tmp_path / "out", "-n", 128)
    assert code == 2 and "--processor is not set" in err
    code, _, err = shell("produce", raw, tmp_path / "out", "-n", 0, "-p", tokenizer_folder)
    assert code == 2 and "--pack-length is 0" in err
    code, _, err = shell(
        "produce", raw, tmp_path / "out", "-n", 9, "-p", tokenizer_folder, "--limit", "images=x"
    )
    assert code == 2 and "images=x" in err
    code, _, err = shell("show", raw)
    assert code == 2 and "holds no lengths, plan or run, and no stream" in err


@pytest.mark.spec(
    "002",
    "a nightly producer takes what is there and may be called again; `--end` ends",
    key="`produce`, `produce --end`",
    api="`PackingProducer.run(end=)`",
)
def test_a_nightly_job(shell: Shell, raw: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    columns = ("--column", "prompt=question", "--column", "response=answer")
    options = ("-p", tokenizer_folder, "-n", 128, "--packs-per-chunk", 4, "--window", 25, *columns, "--json")
    later = tmp_path / "2.jsonl"
    (raw / "2.jsonl").rename(later)
    code, text, _ = shell("produce", raw, out, *options)
    first = json.loads(text)
    assert code == 0 and first["read"] == 40 and first["lag_samples"] == 0 and not (out / "END").exists()
    code, text, _ = shell("produce", raw, out, *options)  # nothing new came
    assert code == 0 and json.loads(text)["packs"] == first["packs"]
    later.rename(raw / "2.jsonl")
    code, text, _ = shell("produce", raw, out, *options)
    second = json.loads(text)
    assert code == 0 and second["read"] == 60 and second["packs"] > first["packs"]
    code, text, _ = shell("produce", raw, out, *options, "--end")
    last = json.loads(text)
    assert code == 0 and (out / "END").is_file() and last["packed"] + sum(last["dropped"].values()) == 60
    ids = [i for pack in LazyShardedDataset(out, 0, 1, start="beginning") for i in pack["sample_ids"]]
    assert len(ids) == len(set(ids)) == last["packed"]
    assert shell("verify", out)[0] == 0
    code, _, err = shell("produce", raw, out, *options, "--end", "--watch")
    assert code == 2 and "different things" in err


@pytest.mark.spec(
    "002",
    "first fit decreasing with a global view",
    key="`produce --window all --packer ffd`",
    api="`PackingProducer(window='all')`",
)
def test_first_fit_decreasing_over_the_global_view(tmp_path: Path) -> None:
    lengths = [int(n) for n in np.random.default_rng(3).integers(5, 90, 200)]
    (tmp_path / "in").mkdir()
    for number in range(4):
        rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in lengths[50 * number : 50 * number + 50]]
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as done:
        words = [tmp_path / "in", tmp_path / "out", "-n", 100, "--kind", "encoded", "--window", "all"]
        main(["produce", *map(str, words), "--packer", "ffd", "--once", "--json"])
    assert done.value.code == 0
    whole = plan(lengths, pack_length=100, packer="ffd")
    packs = list(LazyShardedDataset(tmp_path / "out", 0, 1, start="beginning"))
    assert [pack["sample_ids"] for pack in packs] == [whole[i].tolist() for i in range(len(whole))]


def test_places_of_a_ledger_count_from_one(shell: Shell, tmp_path: Path) -> None:
    """As the source says them in the detail, else the record; `row` stays as it is stored."""
    rows = [
        {
            "id": 10,
            "shard": "a.jsonl",
            "row": 10,
            "reason": "missing_media",
            "detail": "a.jsonl:12: no x.png",
        },
        {"id": 11, "shard": "sub/a.json", "row": 0, "reason": "empty", "detail": "a.json[0]: no message"},
        {"id": 12, "shard": "a.jsonl", "row": 3, "reason": "over_long", "detail": "99 tokens, the cap is 64"},
    ]
    (tmp_path / "stream.json").write_text("{}", encoding="utf-8")
    (tmp_path / "END").write_text(json.dumps({"ledger": rows}), encoding="utf-8")
    code, text, _ = shell("show", tmp_path, "--ledger")
    assert code == 0 and text.splitlines() == [
        "10\tmissing_media\ta.jsonl:12\tno x.png",
        "11\tempty\tsub/a.json[0]\tno message",
        "12\tover_long\ta.jsonl, record 4\t99 tokens, the cap is 64",
    ]
    told = json.loads(shell("show", tmp_path, "--ledger", "--json")[1])["ledger"]
    assert [row["row"] for row in told] == [10, 0, 3]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-n", 0), "--pack-length is 0"),
        (("-n", 8, "--poll", 0), "--poll is 0"),
        (("-n", 8, "--workers", 0), "--workers is 0"),
    ],
)
def test_numbers_are_refused_before_a_processor_is_loaded(
    shell: Shell, raw: Path, tmp_path: Path, words: tuple[object, ...], told: str
) -> None:
    code, _, err = shell("produce", raw, tmp_path / "out", "-p", tmp_path / "no processor", *words)
    assert code == 2 and told in err and "no processor" not in err
    assert not (tmp_path / "out").exists()
