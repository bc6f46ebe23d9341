"""ms-swift's template as a packtrain template (its twin on metadata measures), and keys of its rows.

`encode` is the host's `encode`, untouched. `measure` runs the same `encode` on a twin of the template whose
pictures are sizes read from headers: rendering, tags, system turn, agent templates, pixel limits and
truncation are the host's own code, only pixels are never opened. Templates of the Qwen-VL line have a twin;
for other multimodal templates, and for samples with video or sound, measuring is encoding.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import SampleError
from ..extend import Measured
from ..media.image import read_header
from ..sources._account import UNREAD, Account
from ..template.account import stretches
from ._rows import Reads, unread_keys

# --------------------------------------------------------------------------------------------
# Keys of the rows of `swift sft`, accounted for before ms-swift drops them.
# --------------------------------------------------------------------------------------------
# ms-swift turns every row, of a set or of a stream, into its own keys in one place: the `batched_preprocess`
# of its preprocessors. There the keys that it does not read are noted in a column beside the row. Who reads
# the rows for packs takes the column off (`unmarked`): a row with a key that changes training is left out.
# Preprocessors that are written for one data set read what they know, and are not asked.
MARK = "unread_key"

_MEDIA = ("images", "videos", "audios")
_COLUMNS = {"messages", *_MEDIA, "tools", "objects", "channel", "chat_template_kwargs"}
_SAYS = {"role", "content", "tool_calls", "tool_call_id", "name", "loss", "loss_scale"}
_PARTS = {"text", "source", "id", "name", "input", "content", "tool_use_id"}

#: Of rows that ms-swift has prepared before.
_CHATS: dict[str, Any] = {"chats": ("messages",), "parts": _PARTS, "media": _MEDIA}
READS = Reads(columns=_COLUMNS | {"lengths", "dataset", MARK}, says=_SAYS, **_CHATS)


class Watch:
    """The account of the rows of one run.

    Args:
        ignore: keys that the user leaves out.

    Attributes:
        seen: counts of the rows so far.
    """

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        self.account, self.seen = Account(ignore), Account()

    def __reduce__(self) -> tuple[Any, ...]:
        """What a cache of prepared rows depends on."""
        return Watch, (tuple(sorted(self.account.ignore)),)

    def mark(self, row: Mapping[str, Any], reads: Reads) -> str:
        """What a row holds that is not read: JSON text, or ""."""
        fault: list[str] = []
        try:
            unread_keys(row, reads, self.account)
        except SampleError as error:
            fault = [error.message, error.hint or ""]
        counts = self.account.drain()
        self.seen.counts.update(counts)
        return json.dumps({"keys": sorted(counts), "fault": fault}) if counts or fault else ""


def watch_rows(watch: Watch) -> None:
    """Let `watch` note what ms-swift does not read of the rows that it prepares."""
    from swift.dataset.preprocessor import core

    row = core.RowPreprocessor
    plain = {one.preprocess for one in (core.MessagesPreprocessor, core.AlpacaPreprocessor)}
    plain.add(core.ResponsePreprocessor.preprocess)
    real = row.batched_preprocess

    def batched_preprocess(self: Any, batched_row: Mapping[str, Any], **options: Any) -> Any:
        if type(self).preprocess in plain and batched_row:
            names = {name.removeprefix("__@"): name for name in batched_row if not name.startswith("__#")}
            rows = [
                dict(zip(names, values, strict=True))
                for values in zip(*(batched_row[name] for name in names.values()), strict=True)
            ]
            reads = _reads(self)
            batched_row = {**batched_row, MARK: [watch.mark(one, reads) for one in rows]}
        return real(self, batched_row, **options)

    row.batched_preprocess = batched_preprocess
    row.standard_keys = [*row.standard_keys, MARK]
    row.cache_format_version = f"{row.cache_format_version}-keys-{'-'.join(watch.__reduce__()[1][0])}"


def _reads(preprocessor: Any) -> Reads:
    """What a preprocessor reads of a row, its columns renamed."""
    if not hasattr(preprocessor, "role_keys"):
        asked = {"query", "response", "history", "system", "instruction", "input", "output"}
        return Reads(columns=_COLUMNS | asked, media=_MEDIA)
    roles = {*preprocessor.role_keys, *preprocessor.content_keys, *preprocessor.user_roles}
    says = _SAYS | roles | {*preprocessor.assistant_roles}
    return Reads(columns=_COLUMNS | {"system"}, says=says, **_CHATS)


def unmarked(row: Mapping[str, Any], account: Account | None = None) -> Mapping[str, Any]:
    """A row without its note.

    Args:
        row: as ms-swift has prepared it.
        account: counts the keys.

    Raises:
        SampleError: `unread_key`.
    """
    if MARK not in row:
        return row
    held = json.loads(row[MARK]) if row[MARK] else {"keys": [], "fault": []}
    if account is not None:
        account.counts.update(held["keys"])
    if held["fault"]:
        raise SampleError(UNREAD, held["fault"][0], hint=held["fault"][1])
    return {name: value for name, value in row.items() if name != MARK}


class RowReader:
    """`convert` of a `ChatReader`: counts the keys of the rows that it reads."""

    def __init__(self) -> None:
        self.account = Account()

    def __call__(self, row: Any) -> Any:
        return unmarked(row, self.account)


# --------------------------------------------------------------------------------------------
# ms-swift's own template as a packtrain template: it encodes, and its twin on metadata measures.
# --------------------------------------------------------------------------------------------
#: Settings of the host's template that affect a length.
_SETTINGS = (
    *("max_length", "max_pixels", "truncation_strategy", "use_chat_template", "template_backend"),
    *("norm_bbox", "add_non_thinking_prefix", "enable_thinking"),
)


class SwiftTemplate:
    """Fills `extend.Template`.

    Args:
        template: a template of ms-swift, with its processor, in training mode.
    """

    def __init__(self, template: Any) -> None:
        self.template = template
        self.twin = _twin(template)

    def __getstate__(self) -> dict[str, Any]:
        """Loader workers encode only; the host's template leaves its model behind by itself."""
        return {"template": self.template, "twin": None}

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """What the host's collator takes: `input_ids`, `labels`, `length`, media tensors, …

        Raises:
            SampleError: `unread_key`, `over_max_length`, or what the host's template says (`template_error`).
        """
        return _run(self.template, unmarked(sample))

    def measure(self, sample: Mapping[str, Any]) -> Measured:
        """Length in tokens, with the number of images; its `note` names answers that truncation takes.

        Raises:
            SampleError: as `encode`; `unsupervised`, where truncation leaves no answer.
        """
        images = sample.get("images") or []
        known = self.twin is not None and not (sample.get("videos") or sample.get("audios"))
        template = self.twin if known and images else self.template
        with _watched(template) as cuts:
            found = _run(template, sample)
        measured = Measured(len(found["input_ids"]), **({"images": len(images)} if images else {}))
        if cuts:
            measured.note = _note(*cuts[-1])
        return measured

    def config(self) -> dict[str, Any]:
        """The host's settings that affect a length."""
        meta = self.template.template_meta
        settings = {name: getattr(self.template, name, None) for name in _SETTINGS}
        return {
            "host": "ms-swift",
            "template": meta.template_type,
            "system": getattr(self.template, "system", None) or meta.default_system,
            **{name: value if isinstance(value, (int, str)) else None for name, value in settings.items()},
        }


def _run(template: Any, sample: Mapping[str, Any]) -> dict[str, Any]:
    from swift.template import MaxLengthError

    try:
        found = template.encode(dict(sample), return_length=True)
    except SampleError:
        raise
    except MaxLengthError as error:
        raise SampleError(
            "over_max_length", str(error), hint="raise --max_length, or choose a --truncation_strategy"
        ) from error
    except Exception as error:
        raise SampleError("template_error", f"{type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or not found.get("input_ids"):
        raise SampleError("empty", "the template makes no tokens of the row")
    return found


@contextmanager
def _watched(template: Any) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Of each cut the numbers of the answers of all tokens (-100: not trained), before and after."""
    cuts: list[tuple[list[int], list[int]]] = []
    real = template._truncate

    def truncate(ids: Any, labels: Any, encoded: Any, truncation_strategy: str) -> Any:
        if labels is not None:
            numbers = np.full(len(labels), -100)
            for number, (first, last) in enumerate(stretches(np.asarray(labels)), start=1):
                numbers[first:last] = number
            _, kept = real(ids, numbers.tolist(), {}, truncation_strategy=truncation_strategy)
            cuts.append((numbers.tolist(), kept))
        return real(ids, labels, encoded, truncation_strategy=truncation_strategy)

    template._truncate = truncate
    try:
        yield cuts
    finally:
        del template._truncate


def _note(before: list[int], behind: list[int]) -> str:
    whole, left = (Counter(number for number in held if number > 0) for held in (before, behind))
    if whole and not left:
        raise SampleError("unsupervised", "truncation leaves no token that is trained")
    told = (
        ("removed", [number for number in sorted(whole) if not left[number]]),
        ("cut short", [number for number in sorted(left) if left[number] < whole[number]]),
    )
    return "; ".join(
        f"{what}: answer {', '.join(map(str, numbers))} of {len(whole)}" for what, numbers in told if numbers
    )


class _Sized(Image.Image):  # type: ignore[misc]
    """A picture of which only the size is known; whatever resizes it changes that."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self._size, self._mode = (width, height), "RGB"

    def convert(self, *args: Any, **kwargs: Any) -> _Sized:
        return self

    def copy(self) -> _Sized:
        return self

    def __deepcopy__(self, memo: Any) -> _Sized:
        return self

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> _Sized:
        return _Sized(int(size[0]), int(size[1]))

    def load(self) -> Any:
        raise SampleError("template_error", "measuring asked for pixels", hint="set --lazy_tokenize false")


class _Grids:
    """Stands for the image processor: grids of sizes that are already multiples of its patches."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, images: Any, **kwargs: Any) -> dict[str, Any]:
        patch = int(self.real.patch_size)
        grids = [[1, image.size[1] // patch, image.size[0] // patch] for image in images]
        return {"image_grid_thw": torch.from_numpy(np.array(grids, np.int64).reshape(-1, 3))}


class _Processor:
    """The host's processor with `_Grids` for its image processor."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.image_processor = _Grids(real.image_processor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _load_size(image: Any, load_images: bool) -> _Sized:
    """In the place of the template's `_load_image`. The host does not turn pictures as their EXIF says."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, Image.Image):
        return _Sized(*image.size)
    header = read_header(image)
    turned = header.orientation >= 5
    return _Sized(*((header.height, header.width) if turned else (header.width, header.height)))


def _twin(template: Any) -> Any | None:
    from swift.template.templates.qwen import Qwen2VLTemplate

    if not isinstance(template, Qwen2VLTemplate):
        return None
    twin = copy.copy(template)
    twin.processor = _Processor(template.processor)
    twin._load_image = _load_size
    twin._save_pil_image = lambda image: image
    return twin
