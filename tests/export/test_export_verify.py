"""`packtrain verify OUT`: what was cut, edited or exchanged is named; and the verbs around an export."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import NAMES, Set, records
from verbs import call

from packtrain.cli import main
from packtrain.errors import ChecksumError, InputError, LawError, MissingExtraError
from packtrain.pipeline.export import export
from packtrain.pipeline.verify_export import _check_members, verify_export
from packtrain.planning.distribution import distribution


@pytest.fixture
def whole(made: Callable[..., Set]) -> tuple[Set, Path]:
    held = made(count=30)
    export(held.plan_folder, held.folder / "out", source=held.source, maxcount=4)
    return held, held.folder / "out"


def verify(held: Set, out: Path) -> dict[str, str]:
    return verify_export(out, source=held.source, template=held.template)


@pytest.mark.parametrize("fmt", ["raw", "webdataset", "energon", "chunks"])
def test_a_good_export_holds(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=30)
    options = {"media": "tensor"} if fmt == "chunks" else None
    out = held.folder / "out"
    export(
        held.plan_folder,
        out,
        format=fmt,
        source=held.source,
        template=held.template,
        maxcount=4,
        options=options,
    )
    done = verify(held, out)
    assert "30 planned, each there once" in done["samples"]
    if fmt != "chunks":
        assert "equal to the source" in done["samples"] and done["tokens"].startswith("30 samples")


def test_each_byte_counts(whole: tuple[Set, Path]) -> None:
    held, out = whole
    path = out / "pack-000001-000.tar"
    data = path.read_bytes()
    for place in (*range(0, len(data) - 10240, 997), 700, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ChecksumError, match=r"pack-000001-000\.tar"):
            verify(held, out)
    path.write_bytes(data)
    verify(held, out)


@pytest.mark.parametrize("keep", [0, 512, 9000, 12_000])
def test_a_cut_shard_names_shard_and_last_whole_key(whole: tuple[Set, Path], keep: int) -> None:
    held, out = whole
    os.truncate(out / "pack-000001-000.tar", keep)
    with pytest.raises(ChecksumError, match=r"pack-000001-000\.tar: ps_0000000\d was cut"):
        verify(held, out)


def test_missing_files_and_edited_manifests(whole: tuple[Set, Path]) -> None:
    held, out = whole
    manifest = out / ".packtrain" / "part-000001.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"count": 4', '"count": 3'))
    with pytest.raises(ChecksumError, match="edited"):
        verify(held, out)
    manifest.write_text(text)
    (out / "pack-000000-000.tar").unlink()
    with pytest.raises(
        ChecksumError, match=r"pack-000000-000\.tar is missing \(ps_00000000 to ps_00000003\)"
    ):
        verify(held, out)


def test_another_source_text_or_medium_is_found(whole: tuple[Set, Path]) -> None:
    held, out = whole

    class Other:
        fingerprint = held.source.fingerprint
        media_root = held.source.media_root

        def __init__(self, change: Callable[[Any], None]) -> None:
            self.change = change

        def __getitem__(self, index: int) -> Any:
            sample = held.source[index]
            if index == 9:
                self.change(sample)
            return sample

    def word(sample: Any) -> None:
        sample["messages"][-1]["content"][0]["text"] += " "

    for change in (word, lambda sample: sample.update(tools=[{"name": "x"}])):
        with pytest.raises(LawError, match="sample 9 is not the source's"):
            verify_export(out, source=Other(change))

    def picture(sample: Any) -> None:
        sample["messages"].insert(0, {"role": "user", "content": [{"type": "image", "image": b"other"}]})

    with pytest.raises(LawError, match="medium of sample 9"):
        verify_export(out, source=Other(picture))


def test_members_apart_and_keys_twice_are_broken_laws(tmp_path: Path) -> None:
    def tar(names: list[str]) -> None:
        with tarfile.open(tmp_path / "s.tar", "w") as out:
            for name in names:
                info = tarfile.TarInfo(name)
                out.addfile(info, io.BytesIO())

    row = {"name": "s.tar", "packs": [[0, 0, 0], [1, 0, 0]]}
    a, b = "ps_00000000", "ps_00000001"
    tar([f"{a}.img000.jpg", f"{a}.json", f"{b}.json"])
    assert _check_members(tmp_path, [row]).startswith("3 members")
    for names in (
        [f"{a}.img000.jpg", f"{b}.json", f"{a}.json"],
        [f"{a}.json", f"{b}.json", f"{a}.img000.jpg"],
        [f"{a}.json"],
        [f"{b}.json", f"{a}.json"],
        [f"{a}.json", f"{b}.json", "ps_00000002.json"],
    ):
        tar(names)
        with pytest.raises(LawError):
            _check_members(tmp_path, [row])


# ------------------------------------------------------------------------------------------ verbs
def test_the_verbs(text_run: Callable[..., dict[str, Any]], tokenizer_folder: Path, tmp_path: Path) -> None:
    source = text_run(samples=60)["custom"]["train_jsonl"]
    lengths, plan, out = (str(tmp_path / name) for name in ("lengths", "plan", "out"))
    columns = ("--column", "prompt=question", "--column", "response=answer")
    call("measure", source, "-p", str(tokenizer_folder), "-o", lengths, *columns, "--json")
    call("plan", lengths, "-n", "128", "-o", plan, "--json")
    told = json.loads(call("export", plan, out, "--maxcount", "3", "--json").stdout)
    assert told["format"] == "webdataset" and told["samples"] == 60
    for number in (0, 1):
        call("export", plan, out + "2", "--maxcount", "3", "--shard", f"{number}/2", "--json")
    call("show", out + "2", code=2)
    merged = json.loads(call("merge", out + "2", "--json").stdout)
    assert {**merged, "out": out} == told
    checks = json.loads(call("verify", out, "--json").stdout)["checks"]
    assert "equal to the source" in checks["samples"] and "planned lengths" in checks["tokens"]
    assert json.loads(call("show", out, "--json").stdout)["packs"] == told["packs"]
    call("export", plan, str(tmp_path / "chunks"), "-f", "chunks", "--json")
    call("verify", str(tmp_path / "chunks"), "--json")
    shard = next(Path(out).glob("*.tar"))
    os.truncate(shard, 700)
    assert shard.name in call("verify", out, code=1).output
    shutil.rmtree(Path(out) / ".packtrain")
    call("export", plan, out, code=2)


def test_energon_is_said_to_be_missing(
    made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the library is, `tests/hosts` reads through it."""
    from packtrain.hosts.energon import has_energon, read_through_energon

    if has_energon():
        pytest.skip("megatron-energon is installed here")
    held = made(rows=[row for row in records(NAMES, 16) if row["messages"][0]["role"] != "system"])
    for fmt, layout in (("energon", "packtrain"), ("energon", "llava"), ("webdataset", None)):
        out = held.folder / f"{fmt}{layout}"
        options = {"layout": layout} if layout else {}
        export(held.plan_folder, out, format=fmt, source=held.source, options=options)
        checks = json.loads(call("verify", str(out), "--encode", "0", "--json").stdout)["checks"]
        said = {"packtrain": "is not installed here", "llava": "LLaVA-OneVision"}.get(layout or "")
        assert ("energon" in checks) == (fmt == "energon")
        assert said is None or said in checks["energon"]
        with pytest.raises(SystemExit), monkeypatch.context() as patch:  # at once: nothing is read
            patch.setattr("packtrain.pipeline.verify_export.verify_export", None)
            main(["verify", str(out), "--energon"])
        said = capsys.readouterr().err
        assert ("is not installed" if fmt == "energon" else "holds webdataset") in said, said
        with pytest.raises(InputError, match="not installed" if fmt == "energon" else "holds webdataset"):
            read_through_energon(out)
    call("verify", str(held.plan_folder), "--energon", code=2)


def test_run_exports_instead_of_training(text_run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    from packtrain.pipeline.run import run_export
    from packtrain.train.config import load_config

    values = {**text_run(samples=40), "export": {"format": "webdataset", "maxcount": 3}}
    told = run_export(load_config(values))
    assert told["samples"] == 40 and Path(told["out"]).name == "export"
    assert run_export(load_config(values)) == told
    assert "planned lengths" in verify_export(told["out"])["tokens"]


@pytest.mark.spec(
    "003",
    "distribution of the hash buckets, to choose strategies by",
    key="`packtrain show --distribution`",
    api="`planning.distribution`",
)
def test_the_view_of_lengths(tmp_path: Path) -> None:
    from packtrain.planning.build import plan as make_plan
    from packtrain.planning.lengths import Lengths

    tokens = [64] * 8 + [33] * 5 + [32] * 4 + [20] * 6 + [1] * 16
    view = distribution(tokens, 64)
    assert sum(row["samples"] for row in view["classes"]) == len(tokens)
    assert sum(row["tokens"] for row in view["classes"]) == sum(tokens)
    assert view["over_half"]["samples"] == 13 and view["powers_of_two"]["samples"] == 28
    lengths = Lengths(tokens)
    lengths.save(tmp_path / "lengths")
    plan = make_plan(lengths, pack_length=64, packer="diverse")
    plan.save(tmp_path / "plan", origin={"lengths": str(tmp_path / "lengths")})
    told = json.loads(call("show", str(tmp_path / "plan"), "--distribution", "--json").stdout)
    assert told["classes"] == view["classes"] and "powers" in told["phases"]
    same = json.loads(call("show", str(tmp_path / "lengths"), "--distribution", "-n", "64", "--json").stdout)
    assert same["classes"] == view["classes"] and same["phases"] == {}
    call("show", str(tmp_path / "lengths"), "--distribution", code=2)
    assert "over half" in call("show", str(tmp_path / "plan"), "--distribution").output


def test_any_torn_file_of_ours_is_a_broken_law_by_name(whole: tuple[Set, Path]) -> None:
    """Exit 1 whatever file, wherever it is cut, gone or changed; nothing ends in a fault nobody expected."""
    held, out = whole
    ours = [path for path in sorted((out / ".packtrain").rglob("*")) if path.is_file()]
    for path in ours:
        if path.name == "origin.json":
            continue
        data = path.read_bytes()
        places = {0, len(data) // 2, len(data) - 1, *range(60, min(len(data), 100), 3)}
        changed = [bytes([*data[:i], data[i] ^ (1 << i % 7), *data[i + 1 :]]) for i in sorted(places)]
        for torn in [b"", b"3", data[: len(data) // 2], *changed]:
            path.write_bytes(torn)
            if path.name.endswith(".json") and _same(torn, data):
                continue  # white space
            with pytest.raises(LawError, match=path.stem):
                verify_export(out, source=held.source, encode=0)
        if path.name != "export.json":
            path.unlink()
            with pytest.raises(LawError, match=path.stem):
                verify_export(out, source=held.source, encode=0)
        path.write_bytes(data)
    verify(held, out)


def _same(torn: bytes, data: bytes) -> bool:
    try:
        return bool(json.loads(torn) == json.loads(data))
    except ValueError:
        return False


def test_the_source_is_compared_where_only_the_processor_is_gone(
    text_run: Callable[..., dict[str, Any]], tokenizer_folder: Path, tmp_path: Path
) -> None:
    processor = tmp_path / "processor"
    shutil.copytree(tokenizer_folder, processor)
    rows = [
        {"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a"}]}
        for i in range(9)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths, plan, out = (str(tmp_path / name) for name in ("lengths", "plan", "out"))
    call("measure", str(data), "-p", str(processor), "-o", lengths, "--workers", "1", "--audit", "0")
    call("plan", lengths, "-n", "64", "-o", plan)
    call("export", plan, out)
    call("export", plan, f"{out}-chunks", "-f", "chunks")
    processor.rename(tmp_path / "elsewhere")
    told = call("verify", out, "--json").output
    assert "text and media equal to the source" in told and "the processor is not at hand" in told
    assert "the processor is not at hand" in call("verify", f"{out}-chunks", "--json").output
    for option in ("--distribution", "--ledger", "--pack=0", f"--html={tmp_path / 'x.html'}"):
        assert "plan" in call("show", out, option, code=2).output


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.zst", "train.parquet"])
def test_a_missing_package_is_the_environments_fault(
    name: str,
    text_run: Callable[..., dict[str, Any]],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever reader needs it: exit 2 with the package's name and no word against the export."""
    rows = [
        {"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a"}]}
        for i in range(9)
    ]
    _written(tmp_path / name, rows)
    lengths, plan = (str(tmp_path / part) for part in ("lengths", "plan"))
    call("measure", str(tmp_path / name), "-p", str(tokenizer_folder), "-o", lengths, "--workers", "1")
    call("plan", lengths, "-n", "64", "-o", plan)
    needed = {"train.jsonl": "none", "train.jsonl.zst": "zstandard", "train.parquet": "pyarrow"}[name]
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    for fmt in ("webdataset", "chunks"):
        out = str(tmp_path / fmt)
        call("export", plan, out, "-f", fmt)
        for package in ("webdataset", "zstandard", "pyarrow", "transformers"):
            used = package in (needed, "transformers") or (fmt, package) == ("chunks", "pyarrow")
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # unpacked text
            with monkeypatch.context() as own:
                for held in [one for one in sys.modules if one.startswith(package + ".")] + [package]:
                    own.setitem(sys.modules, held, None)
                told = call("verify", out, code=2 if used else 0).output
            assert "again" not in told
            assert not used or package in told, told


def _written(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(text))
    else:
        path.write_bytes(text)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ModuleNotFoundError("No module named 's3fs'", name="s3fs"), "s3fs"),
        (ImportError("DSO libarrow.so.26 not found", name="pyarrow.lib"), "libarrow.so.26"),
        (ImportError("cannot import name 'x' from 'google.protobuf'", name="google.protobuf"), "protobuf"),
    ],
)
def test_what_energon_lacks_is_named_with_its_cause(
    made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch, error: ImportError, named: str
) -> None:
    """However deep in the library it comes from, and whatever the library makes of it."""
    from packtrain.hosts import energon

    held = made(count=12)
    out = held.folder / "out"
    export(held.plan_folder, out, format="energon", source=held.source)

    def broken(out: Path) -> Any:
        try:
            raise error
        except ImportError as cause:
            raise RuntimeError("the dataset is broken") from cause

    monkeypatch.setattr(energon, "has_energon", lambda: True)
    monkeypatch.setattr(energon, "_rows", broken)
    told = call("verify", str(out), "--encode", "0", code=2).output
    assert named in told and "again" not in told


def test_a_package_that_is_there_but_broken_is_not_called_absent() -> None:
    for error, said in [
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"), "pyarrow is not installed"),
        (
            ImportError("libarrow.so.26: no such file", name="pyarrow.lib"),
            "pyarrow cannot be imported (libarrow",
        ),
        (
            ModuleNotFoundError("No module named 'numpy.x'", name="numpy.x"),
            "pyarrow cannot be imported (No mod",
        ),
    ]:
        try:
            raise error
        except ImportError:
            assert MissingExtraError("pyarrow", "arrow").message.startswith(said)
