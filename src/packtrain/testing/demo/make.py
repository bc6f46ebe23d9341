"""Make the demo set: a few hundred samples of real work for a vision-language model, with faults planted.

    folder/
      train.jsonl  val.jsonl  images/…  processor/…  faults.json
      README.md    written first: says that the folder is ours to rewrite
      demo.json    the marker, written last: parameters, and the size of every file

The set is a pure function of (version, samples, seed): the same JSONL and picture sizes anywhere,
the same picture bytes on one machine. A second call with the same parameters reads the marker and
returns; other parameters rebuild the folder. A folder that holds anything else is refused. Processes
that make the same set at the same time write the same bytes and do not disturb each other.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import files
from ...errors import ForeignArtefactError, FormatError, InputError
from .formulas import formula_chat, formula_talk
from .maths import problem, problem_talk
from .processor import save_processor, train_tokenizer
from .scenes import compare_talk, scene_chat, scene_talk
from .talks import Draws, Look, Record, Talk, Turn, record_of, shape_of

if TYPE_CHECKING:
    from PIL.Image import Image


# --------------------------------------------------------------------------------------------
# Planted faults: samples that must end in the ledger, each with the reason it must carry there
# --------------------------------------------------------------------------------------------
# A run that drops one of them silently, or keeps it, is caught by comparing the ledger with
# `faults.json`.
_REASONS = ("missing_media", "empty", "over_long", "truncated_media", "placeholder_mismatch")
#: Faults of each reason; each copy is another way to be at fault.
_COPIES = 3


def _empty_record(d: Draws, copy: int) -> dict[str, Any]:
    """A sample with nothing to learn from: blank answers, a blank question, no turns at all."""
    talk = problem_talk(d)
    if copy == 0:
        talk.turns = [t if t.role == "user" else Turn("assistant", ("",)) for t in talk.turns]
        return record_of(talk, "messages", [])
    if copy == 1:
        talk.turns = [Turn("user", (" \n",)), talk.turns[1]]
        return record_of(talk, "parts", [])
    return {"conversations": []}


def _mismatch_record(talk: Talk, paths: list[str], copy: int) -> dict[str, Any]:
    """One picture, but two `<image>` marks; or one mark, but two pictures listed."""
    if copy == 1:
        return record_of(talk, "messages", [*paths, paths[0]])
    first = talk.turns[0]
    doubled = Turn(first.role, (Look(0), *first.parts))
    broken = Talk(talk.kind, [doubled, *talk.turns[1:]])
    return record_of(broken, "sharegpt" if copy else "messages", paths)


def cut(data: bytes) -> bytes:
    """The first two thirds of a picture file: its header still tells the right size."""
    return data[: len(data) * 2 // 3]


# --------------------------------------------------------------------------------------------
# Which kind of sample each id is, and how long samples are built up to a length
# --------------------------------------------------------------------------------------------
# Kinds have fixed shares; planted faults and the long tail have fixed counts. Their order is a
# seeded shuffle, so neighbours in the file are of different kinds, as in a mixed data set.
#: The pack length the set is made for: its tail ends just below, its over-long samples above.
PACK_LENGTH = 1024
#: Fewest samples of a set: the faults, the tail, and some of every kind.
_FEWEST = 60

_MAKERS: dict[str, tuple[Callable[[Draws], Talk], int]] = {
    "formula": (formula_talk, 16),
    "scene": (scene_talk, 9),
    "scene_chat": (scene_chat, 4),
    "compare": (compare_talk, 3),
    "formula_chat": (formula_chat, 2),
    "maths": (problem_talk, 6),
}
_KINDS = tuple(name for name, (_, share) in _MAKERS.items() for _ in range(share))
_TURN = 5  # tokens of a turn beside its text: marks, role, newlines
_PICTURE = (6, 66)  # least and most tokens of a picture, with its two marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one id becomes.

    Attributes:
        kind: a kind of talk, or `lesson`.
        tokens: of a lesson: the length it is built up to.
        reason: of a planted fault: the reason the ledger must give; else "".
        copy: which of the ways to be at fault.
    """

    kind: str
    tokens: int = 0
    reason: str = ""
    copy: int = 0


def schedule(seed: str, samples: int) -> list[Job]:
    """One job per sample id."""
    jobs = []
    for reason in _REASONS:
        for copy in range(_COPIES):
            long = reason == "over_long"
            tokens = PACK_LENGTH * (5 + copy) // 4 if long else 0  # 1280, 1536, 1792
            jobs.append(Job(kind="lesson" if long else "formula", tokens=tokens, reason=reason, copy=copy))
    tail = max(4, samples // 32)
    for k in range(tail):
        jobs.append(Job(kind="lesson", tokens=PACK_LENGTH * (45 + k * 50 // (tail - 1)) // 100))
    plain = samples - len(jobs)
    jobs += [Job(kind=_KINDS[k * len(_KINDS) // plain]) for k in range(plain)]
    return Draws(f"{seed}/schedule").shuffled(jobs)


def _make_talk(d: Draws, kind: str = "") -> Talk:
    """A talk of a kind, or of a drawn one."""
    return _MAKERS[kind or d.choice(_KINDS)][0](d)


def lesson(d: Draws, tokens: int, count: Callable[[str], int], over: bool = False) -> Talk:
    """A long chat of word problems, with a picture now and then.

    Args:
        tokens: the length it is built up to; it stays at or below it, or with `over` passes it.
        count: tokens of a text.
    """
    talk = Talk("lesson")
    talk.system("You are a patient teacher. Work every problem out step by step.")
    while True:
        step = _make_talk(d, d.choice(("formula", "scene"))) if d.chance(0.15) else Talk("step")
        if not step.turns:
            question, worked = problem(d)
            step.ask(question)
            step.answer(worked)
        fits = tokens_of(talk, count, most=not over) + tokens_of(step, count, most=not over) <= tokens
        if fits or over:
            talk.extend(step)
        if not fits:
            return talk


def tokens_of(talk: Talk, count: Callable[[str], int], *, most: bool) -> int:
    """A talk's length with every picture at its most tokens, or at its least."""
    return sum(count(turn.text) + _TURN for turn in talk.turns) + _PICTURE[most] * len(talk.pictures)


# --------------------------------------------------------------------------------------------
# The ways pictures lie on disk in real data sets: rotated by EXIF, transparent, palette, mislabelled
# --------------------------------------------------------------------------------------------
# Whatever the variant, a reader that honours the file's bytes and its EXIF orientation sees the
# picture that was drawn (JPEG up to compression).
_TURNS = """
    png jpeg jpeg_exif png rgba png png_named_jpg jpeg palette png_exif png jpeg_exif webp grey png
    jpeg_named_png
"""
#: Variants in the order in which pictures get them; `variant_of` walks it.
SCHEDULE = tuple(_TURNS.split())
_SUFFIX = {**dict.fromkeys(("jpeg", "jpeg_exif", "png_named_jpg"), ".jpg"), "webp": ".webp"}  # others: .png
_ORIENTATION = 0x0112
#: EXIF orientation -> the transposition whose undoing a reader performs for it.
_UNDONE = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"}
_UNDONE |= {6: "ROTATE_90", 7: "TRANSVERSE", 8: "ROTATE_270"}


def variant_of(sample: int, picture: int, colour_matters: bool) -> str:
    """The variant of a sample's picture; a picture whose colours are asked for is never grey."""
    variant = SCHEDULE[(sample * 5 + picture) % len(SCHEDULE)]
    return "palette" if variant == "grey" and colour_matters else variant


def encode_picture(picture: Image, variant: str, sample: int) -> tuple[str, bytes]:
    """Suffix and bytes of an RGB picture in one variant. Bytes repeat on one Pillow version."""
    from PIL import Image
    from PIL.Image import Transpose

    options: dict[str, object] = {}
    form = "JPEG" if variant.startswith("jpeg") else "WEBP" if variant == "webp" else "PNG"
    if form == "JPEG":
        options["quality"] = 92
    elif form == "WEBP":
        options["lossless"] = True
    if variant in ("jpeg_exif", "png_exif"):
        orientation = (6, 3, 8, 5, 2, 7, 4)[sample % 7]
        picture = picture.transpose(Transpose[_UNDONE[orientation]])
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        options["exif"] = exif.tobytes()
    elif variant == "rgba":
        picture = _with_round_corners(picture)
    elif variant == "palette":
        picture = picture.quantize(32)
    elif variant == "grey":
        picture = picture.convert("L")
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return _SUFFIX.get(variant, ".png"), buffer.getvalue()


def _with_round_corners(picture: Image) -> Image:
    from PIL import Image, ImageDraw

    alpha = Image.new("L", picture.size, 0)
    ImageDraw.Draw(alpha).rounded_rectangle((0, 0, picture.width - 1, picture.height - 1), 10, fill=255)
    out = picture.convert("RGBA")
    out.putalpha(alpha)
    return out


# --------------------------------------------------------------------------------------------
# Writes the files of a demo set: pictures, records, processor and the list of planted faults
# --------------------------------------------------------------------------------------------
_MORE_PROBLEMS = 1000  # word problems the tokenizer sees beside the samples' text


@dataclass
class Writer:
    """One pass over a set. Pictures are written as they are drawn, so memory stays small.

    Attributes:
        sizes: bytes of every file written, by its path in the folder.
    """

    folder: Path
    seed: str
    total: int
    progress: Callable[[int, int], None] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    _corpus: list[str] = field(default_factory=list)
    _done: int = 0

    def train(self, samples: int) -> None:
        """train.jsonl, faults.json, processor. Lessons come last: their length needs the tokenizer."""
        jobs = schedule(self.seed, samples)
        records: list[Record] = [{}] * samples
        for i, job in enumerate(jobs):
            if job.kind != "lesson":
                records[i] = self._sample(i, job)
                self._tick()
        count = self._processor()
        for i, job in enumerate(jobs):
            if job.kind == "lesson":
                talk = lesson(self._draws("train", i), job.tokens, count, over=bool(job.reason))
                records[i] = self._record("train", i, talk)
                self._tick()
        self._jsonl("train.jsonl", records)
        faults = {reason: [i for i, job in enumerate(jobs) if job.reason == reason] for reason in _REASONS}
        files.publish_json(self.folder / "faults.json", faults)
        self._remember("faults.json")

    def val(self, samples: int) -> None:
        """val.jsonl: the same kinds of samples, without faults."""
        records = []
        for i in range(samples):
            records.append(self._record("val", i, _make_talk(self._draws("val", i))))
            self._tick()
        self._jsonl("val.jsonl", records)

    def _draws(self, split: str, i: int) -> Draws:
        return Draws(f"{self.seed}/{split}/{i}")

    def _processor(self) -> Callable[[str], int]:
        """Train and write the processor; returns the token count of a text."""
        pool = Draws(f"{self.seed}/corpus")
        more = [text for _ in range(_MORE_PROBLEMS) for text in problem(pool)]
        more += [f" {number} [{number}," for number in range(1000) for _ in range(3)]  # box coordinates
        more += [f"{role}\n" for role in ("user", "assistant", "system") for _ in range(100)]
        tokenizer = train_tokenizer(self._corpus + more)
        for name in save_processor(self.folder / "processor", tokenizer):
            self._remember(f"processor/{name}")
        return lambda text: len(tokenizer.encode(text).ids)

    def _sample(self, i: int, job: Job) -> Record:
        """A plain sample, or one with its fault."""
        d = self._draws("train", i)
        if job.reason == "empty":
            return _empty_record(d, job.copy)
        talk = _make_talk(d, job.kind)
        self._corpus += [turn.text for turn in talk.turns]
        if job.reason == "placeholder_mismatch":
            return _mismatch_record(talk, self._pictures("train", i, talk), job.copy)
        return self._record("train", i, talk, fault=job.reason)

    def _record(self, split: str, i: int, talk: Talk, fault: str = "") -> Record:
        return record_of(talk, shape_of(i, talk), self._pictures(split, i, talk, fault))

    def _pictures(self, split: str, i: int, talk: Talk, fault: str = "") -> list[str]:
        """Write a talk's pictures, cut short or left out where the fault says so; returns their paths."""
        paths = []
        for k, picture in enumerate(talk.pictures):
            variant = variant_of(i, k, colour_matters=not talk.kind.startswith("formula"))
            suffix, data = encode_picture(picture, variant, i)
            paths.append(f"images/{split}_{i:05d}_{k}{suffix}")
            if fault != "missing_media":
                self._bytes(paths[-1], cut(data) if fault == "truncated_media" else data)
        return paths

    def _bytes(self, name: str, data: bytes) -> None:
        with files.publish(self.folder / name) as handle:
            handle.write(data)
        self._remember(name)

    def _jsonl(self, name: str, records: list[Record]) -> None:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        files.publish_text(self.folder / name, "".join(lines))
        self._remember(name)

    def _remember(self, name: str) -> None:
        self.sizes[name] = (self.folder / name).stat().st_size

    def _tick(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self.total)


# --------------------------------------------------------------------------------------------
# Make the demo set: a few hundred samples of real work for a vision-language model, with faults planted
# --------------------------------------------------------------------------------------------
VERSION = 1
_OURS = "This folder was made by packtrain's demo, which may rewrite it.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSet:
    """Where a demo set lies. `faults`: ledger reason -> ids of train.jsonl that must carry it."""

    train_jsonl: Path
    val_jsonl: Path
    processor_dir: Path
    faults: dict[str, list[int]]


def make_demo(
    folder: str | Path,
    *,
    samples: int = 320,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> DemoSet:
    """Make the set in `folder`, or return at once when it is there already.

    Args:
        samples: records of train.jsonl, planted faults included; val.jsonl gets a tenth as many.
        seed: of every draw.
        progress: called as progress(done, total), in samples.

    Raises:
        InputError: fewer than 60 samples.
        ForeignArtefactError: the folder holds files that are not a demo set.
        MissingExtraError: matplotlib (extra `report`) or tokenizers (extra `train`) is not installed.
    """
    if samples < _FEWEST:
        raise InputError(f"a demo set of {samples} samples is too small", hint=f"samples >= {_FEWEST}")
    folder = Path(folder)
    wanted = {"version": VERSION, "samples": samples, "seed": seed, "pack_length": PACK_LENGTH}
    before = _marker(folder)
    if before is not None and before["parameters"] == wanted and _whole(folder, before["files"]):
        return _opened(folder)
    leftovers = _claim(folder)
    writer = Writer(folder, f"{VERSION}/{seed}", samples + samples // 10, progress)
    writer.train(samples)
    writer.val(samples // 10)
    old = set(before["files"] if before else ()) - set(writer.sizes)
    for path in [folder / name for name in sorted(old)] + leftovers:
        files.remove(path)
    files.publish_json(folder / "demo.json", {"parameters": wanted, "files": writer.sizes})
    return _opened(folder)


def _opened(folder: Path) -> DemoSet:
    return DemoSet(
        train_jsonl=folder / "train.jsonl",
        val_jsonl=folder / "val.jsonl",
        processor_dir=folder / "processor",
        faults=files.read_json(folder / "faults.json"),
    )


def _marker(folder: Path) -> dict[str, Any] | None:
    try:
        found = files.read_json(folder / "demo.json")
    except FormatError:
        return None
    return found if isinstance(found, dict) and found.keys() >= {"parameters", "files"} else None


def _whole(folder: Path, sizes: dict[str, int]) -> bool:
    """Every file of the marker is there with its size: pictures may have been tidied away since."""
    paths = [(folder / name, size) for name, size in sizes.items()]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _claim(folder: Path) -> list[Path]:
    """Make the folder ours, or refuse it; an old marker goes first.

    Returns temporary files that are there now. Those still there when all is written belong to a
    stopped process; one that works on the same set at the same time has long renamed its own.
    """
    note = folder / "README.md"
    if not note.is_file() or note.read_bytes() != _OURS.encode():
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ForeignArtefactError(
                f"{folder} holds files that are not a demo set", hint="choose an empty or a new folder"
            )
        files.publish_text(note, _OURS)
    files.remove(folder / "demo.json")
    return sorted(path for path in folder.rglob(".*.tmp.*") if path.is_file())
