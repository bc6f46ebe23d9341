"""Folders of clips with transcripts."""

from __future__ import annotations

import io
import json
import pickle
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from packtrain.errors import SampleError, SourceError
from packtrain.media import hints
from packtrain.media.location import media_refs
from packtrain.sources import open_source
from packtrain.sources.audio_dir import PROMPT
from packtrain.sources.chat import ChatSource

sf = pytest.importorskip("soundfile")


def wav(frames: int = 800) -> bytes:
    out = io.BytesIO()
    sf.write(out, np.zeros(frames, np.float32), 16000, format="WAV")
    return out.getvalue()


def put(root: Path, **content: object) -> Path:
    for name, held in content.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(held if isinstance(held, bytes) else str(held).encode())
    return root


def said(source: object) -> list[tuple[str, str | None]]:
    chat = ChatSource(source)  # type: ignore[arg-type]
    out: list[tuple[str, str | None]] = []
    for index in range(len(chat)):
        try:
            sample = chat[index]
        except SampleError as error:
            out.append((error.reason, None))
            continue
        (ref,) = media_refs(sample)
        out.append((Path(str(ref)).name, sample["messages"][1]["content"][0]["text"]))
    return out


def test_the_real_folder(data: Path) -> None:
    source = open_source(data / "audio")
    rows = [json.loads(x) for x in (data / "audio/manifest.jsonl").read_text("utf-8").splitlines()]
    assert len(source) == len(rows)
    chat = ChatSource(source)
    told = checked = 0
    for index, row in enumerate(rows):
        if not row.get("text"):
            with pytest.raises(SampleError) as error:
                chat[index]
            assert error.value.reason == "no_assistant_turn"
            continue
        told += 1
        part, prompt = chat[index]["messages"][0]["content"]
        assert prompt["text"] == PROMPT
        assert (part["frames"], part["sample_rate"], part["channels"]) == (
            row["frames"],
            row["samplerate"],
            row["channels"],
        )
        if Path(part["audio"]).exists():
            checked += 1
            assert hints.differences(part) == []
    assert told == checked == 13
    assert source.where(0) == "manifest.jsonl:1"
    assert len(open_source(data / "audio/manifest.jsonl", kind="audio_dir")) == len(rows)


def test_sidecars_and_folders(tmp_path: Path) -> None:
    put(
        tmp_path,
        clip10_DOT_wav=wav(),
        clip10_DOT_txt="ten\n",
        clip9_DOT_wav=wav(),
        clip9_DOT_lab="nine",
        mute_DOT_flac=b"",
        deep__84__1_DOT_wav=wav(),
        deep__84__84_DOT_trans_DOT_txt="1 HELLO WORLD\n2 OTHER\n",
    )
    source = open_source(tmp_path)
    assert said(source) == [
        ("clip9.wav", "nine"),
        ("clip10.wav", "ten"),
        ("1.wav", "HELLO WORLD"),
        ("no_assistant_turn", None),
    ]
    assert pickle.loads(pickle.dumps(source)).fingerprint == source.fingerprint
    assert open_source(tmp_path, prompt="").fingerprint != source.fingerprint
    bare = ChatSource(open_source(tmp_path, prompt=""))
    index = next(i for i in range(4) if source.where(i) == "clip9.wav")
    assert [part["type"] for part in bare[index]["messages"][0]["content"]] == ["audio"]


def test_ljspeech(tmp_path: Path) -> None:
    put(
        tmp_path,
        wavs__LJ001_DOT_wav=wav(),
        wavs__LJ002_DOT_flac=wav(),
        metadata_DOT_csv='LJ001|Dr. X, 5|Doctor X, five\nLJ002|"quoted|\nLJ003|gone|gone\n',
    )
    source = open_source(tmp_path)
    assert said(source)[:2] == [("LJ001.wav", "Doctor X, five"), ("LJ002.flac", '"quoted')]
    assert len(source) == 3 and source.where(2) == "metadata.csv:3"
    assert media_refs(ChatSource(source)[2]) == [str(tmp_path / "LJ003")]  # named when it is opened


def test_an_id_of_two_clips_is_refused(tmp_path: Path) -> None:
    put(tmp_path, x__a_DOT_wav=wav(), a_DOT_flac=wav(), b_DOT_wav=wav(), metadata_DOT_csv="a|one\nb|two\n")
    source = open_source(tmp_path)
    assert said(source) == [("malformed_record", None), ("b.wav", "two")]
    with pytest.raises(SampleError, match=r"names 'a', which is a\.flac and x/a\.wav"):
        source[0]


def test_hugging_face_tables(tmp_path: Path) -> None:
    put(
        tmp_path,
        a_DOT_wav=wav(),
        metadata_DOT_csv='file_name,transcription\na.wav,"one, ""two"""\nb.wav,\n,x\n',
    )
    assert said(open_source(tmp_path)) == [
        ("a.wav", 'one, "two"'),
        ("no_assistant_turn", None),
        ("malformed_record", None),
    ]
    put(
        tmp_path / "j",
        a_DOT_wav=wav(),
        metadata_DOT_jsonl='{"file_name": "a.wav", "text": "é"}\n\n{"audio": 3}\n[]\n{\n'
        '{"audio_filepath": "../up.wav", "text": "x"}\n',
    )
    assert said(open_source(tmp_path / "j")) == [
        ("a.wav", "é"),
        ("malformed_record", None),
        ("malformed_record", None),
        ("malformed_record", None),
        ("outside_media_root", None),
    ]


def test_names_in_two_forms(tmp_path: Path) -> None:
    put(
        tmp_path,
        **{
            unicodedata.normalize("NFD", "é1") + "_DOT_wav": wav(),
            "metadata_DOT_csv": unicodedata.normalize("NFC", "é1") + "|text|\n",
        },
    )
    assert said(open_source(tmp_path))[0][1] == "text"


def test_no_clips(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no sound clips"):
        open_source(tmp_path, kind="audio_dir")
    with pytest.raises(SourceError, match="not a folder"):
        open_source(tmp_path / "none", kind="audio_dir")
    put(tmp_path, a_DOT_wav=wav(), manifest_DOT_jsonl=b"\xff\xfe")
    with pytest.raises(SourceError, match="not UTF-8"):
        open_source(tmp_path, kind="audio_dir")
    put(tmp_path / "m", a_DOT_wav=wav(), manifest_DOT_jsonl='{"file": "gone.wav", "text": "x"}\n')
    assert len(open_source(tmp_path / "m")) == 1
    with pytest.raises(SampleError, match=r"gone\.wav"):
        open_source(tmp_path / "m", verify_content=True)
