"""What a record may name, at every entrance: URLs need `allow_remote`, ways out of a root `allow_outside`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packtrain as pt
from packtrain.cli import measure as measure_verb
from packtrain.cli import produce as produce_verb
from packtrain.cli._options import inputs_of
from packtrain.errors import PlanError, SampleError
from packtrain.export._intake import Opener
from packtrain.hosts import _rows
from packtrain.media.location import media_refs
from packtrain.pipeline.inputs import Inputs
from packtrain.pipeline.plan import check_drops
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource, open_chats
from packtrain.train import load_config

URL = "https://host.example/a.jpg"
KINDS = ("planned", "stream", "token_budget")


def _config(kind: str) -> Callable[..., Any]:
    def opened(path: Path, **options: Any) -> Any:
        data = {"kind": kind, "path": str(path), **options}
        made = {"model": {"name_or_path": "tiny:qwen3"}, "data": data, "training": {"max_steps": 1}}
        return Inputs.of_config(load_config({**made, "global_max_length": 64})).open_source()

    return opened


def _old_names(path: Path, **options: Any) -> Any:
    made = {"model": {"name_or_path": "tiny:qwen3"}, "custom": {"train_jsonl": str(path), **options}}
    return Inputs.of_config(load_config({**made, "global_max_length": 64})).open_source()


def _verb(verb: Any, *more: str) -> Callable[..., Any]:
    def opened(path: Path, **options: Any) -> Any:
        words = []
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
        context = verb.command.make_context("verb", [str(path), *more, *words])
        return inputs_of(str(path), dict(context.params)).open_source()

    return opened


def _mixture(path: Path, **options: Any) -> Any:
    mixed = path.parent / "mixture.yaml"
    mixed.write_text(json.dumps({"shuffle": False, "sources": [{"path": path.name, "chat": options}]}))
    return ChatSource(open_source(mixed, kind="mixture"))


ENTRANCES: dict[str, Callable[..., Any]] = {
    "ChatSource": lambda path, **options: ChatSource(open_source(path), **options),
    "open_chats": open_chats,
    "Opener": lambda path, **options: Opener(options, None, {})(str(path)),
    "measure": _verb(measure_verb, "-p", "p", "-o", "o"),
    "produce": _verb(produce_verb, "out", "-n", "64"),
    "mixture": _mixture,
    "custom": _old_names,
    **{f"data.kind {kind}": _config(kind) for kind in KINDS},
}


def _of(source: Any, index: int) -> str:
    """The first ref of a sample, or why there is none."""
    try:
        return str(media_refs(source[index])[0])
    except SampleError as error:
        assert error.hint
        return error.reason


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_one_rule_at_every_entrance(entrance: str, tmp_path: Path) -> None:
    """(URL, absolute path, link out of the folder, relative path), by what was allowed."""
    folder, other = tmp_path / "data", tmp_path / "other.jpg"
    folder.mkdir()
    other.write_bytes(b"x")
    (folder / "link.jpg").symlink_to(other)
    (folder / "own.jpg").write_bytes(b"x")
    named = [URL, str(other), "link.jpg", "own.jpg"]
    path = folder / "train.jsonl"
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "image": ref}]},
                                     {"role": "assistant", "content": "b"}]}) + "\n"
            for ref in named
        )
    )  # fmt: skip
    full = [str(folder / ref) for ref in named[2:]]
    opened = ENTRANCES[entrance]

    def found(**options: Any) -> list[str]:
        return [_of(opened(path, **options), index) for index in range(len(named))]

    assert found() == ["remote_media", str(other), *full]
    assert found(allow_remote=True) == [URL, str(other), *full]
    root = {"media_root": str(folder)}
    out = "outside_media_root"
    assert found(**root) == ["remote_media", out, out, full[1]]
    assert found(**root, allow_remote=True) == [URL, out, out, full[1]]
    assert found(**root, allow_outside=True) == ["remote_media", str(other), *full]
    assert found(**root, allow_outside=True, allow_remote=True) == [URL, str(other), *full]


def test_rows_of_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Paths are the host's own to read; a URL is fetched to be measured only where `pack` was told so."""
    monkeypatch.setattr(_rows, "measure_many", lambda _, chats: list(map(media_refs, chats)))
    talk = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": talk, "images": [ref]} for ref in (URL, "/any/where.jpg")]
    for allowed, wanted in ((False, "remote_media"), (True, [URL])):
        reader = _rows.ChatReader(source={"ignore_keys": [], "allow_remote": allowed})
        first, second = _rows._by_template(rows, None, reader, None)
        assert getattr(first, "reason", first) == wanted and second == ["/any/where.jpg"]


def test_permissions_are_kept_with_the_lengths() -> None:
    """`origin.json` opens the same samples again; without a permission the key is as before."""
    given = Inputs(source="x.jsonl", processor="p", allow_remote=True, allow_outside=True)
    assert Inputs.told(given.to_dict(), "origin.json") == given
    plain, remote = (ChatSource([{}], allow_remote=value) for value in (False, True))
    assert "allow_remote" not in plain.config() and remote.config()["allow_remote"] is True
    assert plain.fingerprint != remote.fingerprint


@pytest.mark.parametrize("reason", ["missing_media", "remote_media"])
@pytest.mark.parametrize("count", [10, 11])
def test_a_tenth_of_media_that_are_not_there_or_not_allowed_stops_a_plan(reason: str, count: int) -> None:
    """A set that was read by its URLs before does not lose its samples to the ledger."""
    tokens = [4] * 100
    lengths = pt.Lengths(
        tokens, status=[2] * count + [0] * (100 - count), reasons=dict.fromkeys(range(count), reason)
    )
    made = pt.plan(lengths, 8)
    if count == 10:
        check_drops(made, None, None)
    else:
        with pytest.raises(PlanError, match=reason):
            check_drops(made, None, None)
