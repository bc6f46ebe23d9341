"""Write docs/keys.md from the table in `packtrain.sources.keys`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from packtrain.media.knobs import ENDS, KNOBS, STARTS
from packtrain.sources import keys

_PAGE = """\
# Keys

Written from `sources/keys.py` by `scripts/keys.py`. Every key of a record, message and part is accounted for:
it is *used*, it is *harmless*, or it is named. Null, empty and null-filled values count as absent.

A key of the tables below that a record holds and its shape does not read, and a value that is a reference to
a medium, a list of turns, spans or a mask (whatever its key), sends the record to the ledger with the reason
`unread_key`. On more than 1 % of the records the run stops (exit 2) and says which option settles it:
`ignore_keys: [key]`, an alias (`columns: {{images: key}}`), or a shape. Every other key that is not read is
counted and named once in the summary, as is every spelling that was read as a field.
A key that is not read is looked up in any case and style: `lossWeight`, `loss-weight` are `loss_weight`.
A text under a harmless key that looks like a file (`id: "000000033471.jpg"`) is counted, and refused where no
medium of the record is read while its texts hold what stands for one (`<image>`, `<|image_1|>`, `[IMG]`).

## Record

| field | spellings |
|---|---|
{record}

`image_1`, `image_2`, … are items of `images`. A record that holds media and of texts only {caption} is the
medium and what is said of it.

Refused beside a question and its answer (not beside a conversation), unless the question says all of them:
{beside}. True or false under {wanted}
tells whether an answer is wanted; anything else under `label` is a class, and counted.

Change training and are never read: {training};
lists under {stretch}; numbers under a name that holds one of the words {words}
(`is_masked`, `turn_weights`; of a record not for `train` alone). But `objects` (`ref`,
`bbox`, `bbox_type`, `image_id`) fills `<ref-object>` and `<bbox>` in the texts, where the model family has a
notation of boxes.

## Message

| field | spellings |
|---|---|
{message}

Refused, unless they repeat the content: {says}.

Media stand on a message as in a record. Loss flags (true, false, 0, 1, or a weight):

| flag | meaning |
|---|---|
{loss}

A flag on the record holds for all its answers, times what an answer says itself; there a weight needs
`weight`, `loss_weight` or `loss_scale`, and a list is a mask, which is not read.

## Part

| type | read as |
|---|---|
{part}

## Knobs of a medium

| knob | spellings | of |
|---|---|---|
{knobs}

`start` with `end` or with `duration`, in every spelling (`offset` with `duration`), are seconds, cut at the
end of the clip; `duration` alone tells how long a clip is. Knobs of a record are its one medium's, which the
summary tells (`fps → video`); a start without an end is refused there: it may say where a clip was cut from.
`fps` of a video file that comes without `frames`, `width` or `height` is the rate its frames are taken at;
beside a list of frames it is their rate, as `sample_fps` is. `detail` of an image may be `auto`, `high` (the
processor's own sizes) or `low` (`max_pixels` of 512 x 512).
A part without a ref that numbers its medium ({index}, `image_id` …; from 0 or from 1) must mean the next one.

## Encoded rows

| column | spellings |
|---|---|
{encoded}

Refused (`unread_key`): {encoded_training}, a medium, and every key above that changes training; {types} where
an entry is not 0. Passed over: {encoded_harmless}. Texts and turns beside `input_ids` are counted.

## Harmless

{harmless}.
"""


def page() -> str:
    """The table of `packtrain.sources.keys`, in Markdown."""
    turn = {field: names for field, names in keys.MESSAGE.items() if field not in keys.MEDIA}
    meant = {name: "trained where true" if on else "not trained where true" for name, on in keys.LOSS.items()}
    spelled = {
        name: ({"start": STARTS, "end": ENDS}.get(name, (name,))) for held in KNOBS.values() for name in held
    }
    knobs = [
        (f"`{name}`", _names(names), ", ".join(kind for kind, held in KNOBS.items() if name in held))
        for name, names in spelled.items()
    ]
    return _PAGE.format(
        record=_rows((f"`{field}`", _names(names)) for field, names in keys.FIELDS.items()),
        caption=_names(keys.CAPTION),
        training=_names(dict.fromkeys(keys.TRAINING)),
        beside=_names(keys.BESIDE),
        wanted=_names(keys.WANTED),
        says=_names(keys.SAYS),
        stretch=_names(keys.STRETCH),
        words=_names(keys.FLAG_WORDS),
        index=_names(keys.INDEX),
        message=_rows((f"`{field}`", _names(names)) for field, names in turn.items()),
        loss=_rows((f"`{name}`", told) for name, told in meant.items()),
        part=_rows((f"`{name}`", kind) for name, kind in (keys.PART | keys.BLOCK).items()),
        knobs=_rows(knobs),
        encoded=_rows((f"`{names[0]}`", _names(names)) for names in keys.ENCODED.values()),
        encoded_training=_names(keys.ENCODED_TRAINING),
        encoded_harmless=_names(keys.ENCODED_HARMLESS),
        types=_names(keys.ENCODED_TYPES),
        harmless=_names(sorted(keys.HARMLESS)),
    )


def _rows(cells: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    Path(__file__).parent.parent.joinpath("docs", "keys.md").write_text(page(), encoding="utf-8")
