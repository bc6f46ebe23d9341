"""Keys of records that change what is trained, with every spelling that is read, and the few that do not.

One table: the readers look names up here, the account of every key (`_account.py`) is held against it, and
`docs/keys.md` is written from it. A key is *used*, *harmless*, or unknown; one that changes training and is
not used sends the record to the ledger (`unread_key`), an unknown one is counted and named in the summary.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..media.knobs import ENDS, KNOBS, STARTS

#: Field of a record -> its spellings; the first one found is read.
FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "dialog", "dialogue", "chat", "turns"),
    "conversations": ("conversations", "conversation"),
    "texts": ("texts",),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "instances": ("instances",),
    "prompt": ("prompt", "query", "question"),
    "response": ("response", "completion", "answer"),
    "history": ("history",),
    "system": ("system", "system_prompt", "system_message", "system_instruction"),
    "tools": ("tools", "tool_defs", "functions", "function_definitions"),
    "image": ("image", "image_path", "image_file", "image_url", "img", "img_path", "picture"),
    "images": (
        *("images", "image_paths", "image_files", "image_urls", "image_list"),
        *("imgs", "img_paths", "pictures"),
    ),
    "video": ("video", "video_path", "video_file", "video_url"),
    "videos": ("videos", "video_paths", "video_files", "video_urls", "video_list"),
    "audio": ("audio", "audio_path", "audio_file", "audio_filepath", "audio_url", "wav", "sound"),
    "audios": ("audios", "audio_paths", "audio_files", "audio_urls", "audio_list"),
    "media": ("media", "medias", "media_path", "media_paths"),
}

#: Fields of media; those of a message are read the same way.
MEDIA = ("image", "images", "video", "videos", "audio", "audios", "media")

#: `image_1`, `image_2`, … are items of `images`, in the order of their numbers.
NUMBERED = r"(image|video|audio)_(\d+)"

_SHARED = ("system", "tools", *MEDIA)

#: Shape -> fields it reads.
USES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", *_SHARED),
    "sharegpt": ("conversations", *_SHARED),
    "texts": ("texts", *_SHARED),
    "alpaca": ("instruction", "input", "output", "history", "instances", *_SHARED),
    "columns": ("prompt", "response", "history", *_SHARED),
    "captions": _SHARED,
}

#: What is said of a medium, in a record that holds no other text: one caption, as a text or `[{"content"}]`.
CAPTION = ("caption", "captions")

#: Loss flags of a message -> whether a true value means "trained" (`mask` means the opposite).
LOSS: dict[str, bool] = {
    "loss": True,
    "train": True,
    "train_turn": True,
    "trainable": True,
    "training": True,
    "loss_mask": True,
    "weight": True,
    "loss_weight": True,
    "loss_scale": True,
    "mask": False,
}

#: Words that make a name with numbers a flag or weight that is not read: `is_masked`, `turn_weights`.
FLAG_WORDS = (
    *("loss", "mask", "masks", "masked", "train", "trained", "trainable", "training", "untrained"),
    *("weight", "weights"),
)

#: Field of a message -> its spellings.
MESSAGE: dict[str, tuple[str, ...]] = {
    "role": ("role", "from"),
    "content": ("content", "value"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking"),
    "tool_calls": ("tool_calls",),
    "tool_call_id": ("tool_call_id",),
    "function_call": ("function_call",),
    "name": ("name",),
    "type": ("type",),
    "tools": FIELDS["tools"],
    **{name: FIELDS[name] for name in MEDIA},
}

#: `type` of a part -> what it is.
PART: dict[str, str] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}

#: `type` of a part of a message that is no text and no medium -> what it is (Anthropic's blocks).
BLOCK: dict[str, str] = {
    "thinking": "`reasoning_content` of its message",
    "tool_use": "`tool_calls` of its message",
    "tool_result": "a message of the role `tool`",
}

#: Keys under which a part without a ref numbers its medium.
INDEX = ("index", "idx", "number")

#: Preference data: never trained as answers of supervised fine-tuning.
PREFERENCE = (
    *("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images", "rejected_videos"),
    *("rejected_audios", "rejected_tools", "rejected_objects", "chosen_response", "preference"),
    *("label", "kto_tag", "desirable", "is_desirable", "is_preferred"),
)

#: Of those: true or false, an answer is wanted or not (KTO); a `label` that is neither is a class.
WANTED = ("label", "kto_tag", "desirable", "is_desirable", "is_preferred")

#: Texts that belong to a question and stand beside it: never read, refused where a record is a question and
#: an answer; in a conversation all is said.
BESIDE = (
    *("context", "contexts", "passage", "passages", "choices", "choice_list", "options"),
    *("document", "article", "background", "paragraph", "premise"),
)

#: Further keys of a record that change training and that no shape reads.
TRAINING = (
    *("objects", "bbox", "bboxes", "spans", "masks", "labels", "input_ids", "weights"),
    *("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "reasoning_effort"),
    *("thought", "thoughts", "reasoning_text", "reasoning_details", "chain_of_thought"),
    *("cot", "thinking_content", "reasoning_trace", "reasoning_steps"),
    *("crop", "crop_box", "rotate", "rotation", "use_audio_in_video"),
    *("learnable", "is_target", "no_loss", "ignore_loss", "train_on_turn", "sample_weight", "loss_weights"),
    *("mask_history", "mask_prompt"),
    *("enable_thinking", "chat_template_kwargs", "chat_template", "documents"),
    *("train_detail", "training_detail", "train_on_input", "train_on_inputs", "masked", "supervised"),
    *PREFERENCE,
)

#: Keys of a message that hold more of what it says: never read, refused unless they repeat its content.
SAYS = ("text", "parts", "attachments", "files")

#: Keys that hold a stretch or frames of a medium where their value is a list; never read.
STRETCH = ("clip", "segment", "time_range", "frame_indices", "frame_ids")

#: Columns of rows that are encoded already (`sources.encoded`), and what is done with each.
ENCODED: dict[str, tuple[str, ...]] = {
    "ids": ("input_ids",),
    "labels": ("labels",),
    "mask": ("loss_mask", "assistant_masks", "completion_mask"),
    "positions": ("position_ids",),
    "padding": ("attention_mask",),
    "length": ("input_length", "length", "num_tokens"),
}

#: Columns of encoded rows that the tokenizer leaves behind and training does not need.
ENCODED_HARMLESS = ("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping")

#: Columns of encoded rows that say nothing where all their entries are 0.
ENCODED_TYPES = ("token_type_ids", "mm_token_type_ids")

#: Columns of encoded rows that a model would need and that are not carried.
ENCODED_TRAINING = (
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"),
    *("image_sizes", "image_sizes_videos", "pixel_attention_mask", "image_position_ids"),
    *("input_features", "feature_attention_mask", "input_features_mask", "audio_feature_lengths"),
    *("inputs_embeds", "decoder_input_ids", "cross_attention_mask", "prompt_input_ids"),
    *("seq_lengths", "seq_lens", "cu_seqlens", "cu_seq_lens_q", "segment_ids", "sequence_ids"),
)

#: Plain text of a record: what `task: text` trains.
TEXT = ("text", "content", "document", "raw_content")

#: Where a record comes from: harmless beside the media that are read, a medium where there are none.
ORIGIN = (
    *("url", "source_url", "origin_url", "image_source", "original_url", "file_name", "filename"),
    *("coco_url", "flickr_url", "image_name", "video_name", "audio_name"),
)

#: Sizes and rates: numbers.
NUMBERS = (
    *("width", "height", "duration", "frames", "fps"),
    *("sample_rate", "sampling_rate", "samplerate", "channels"),
)

#: Keys that change nothing, at every level.
HARMLESS = frozenset(
    (
        *("id", "ids", "idx", "index", "uid", "uuid", "guid", "sample_id", "prompt_id", "question_id"),
        *("conversation_id", "conv_id", "image_id", "video_id", "audio_id", "task_id", "item_id", "turn_id"),
        *("__key__", "__url__", "__local_path__", "hash", "sha256", "md5", "names"),
        *("source", "sources", "dataset", "dataset_name", "data_source", "origin", "subset", "split"),
        *("score", "scores", "rating", "ratings", "quality", "similarity", "clip_score", "aesthetic_score"),
        *("category", "categories", "task", "task_type", "topic", "tags", "lang", "language", "license"),
        *("timestamp", "created", "created_at", "updated_at", "date", "author", "user_id"),
        *("model", "model_name"),
        *("token_count", "num_tokens", "num_turns", "length", "cache_control", "annotations"),
        *("mime_type", "media_type", "format", "object", "status"),
        *NUMBERS,
        *ORIGIN,
    )
)


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
    """The table as a page of the documentation, in Markdown."""
    turn = {field: names for field, names in MESSAGE.items() if field not in MEDIA}
    meant = {name: "trained where true" if on else "not trained where true" for name, on in LOSS.items()}
    spelled = {
        name: ({"start": STARTS, "end": ENDS}.get(name, (name,))) for held in KNOBS.values() for name in held
    }
    knobs = [
        (f"`{name}`", _names(names), ", ".join(kind for kind, held in KNOBS.items() if name in held))
        for name, names in spelled.items()
    ]
    return _PAGE.format(
        record=_rows((f"`{field}`", _names(names)) for field, names in FIELDS.items()),
        caption=_names(CAPTION),
        training=_names(dict.fromkeys(TRAINING)),
        beside=_names(BESIDE),
        wanted=_names(WANTED),
        says=_names(SAYS),
        stretch=_names(STRETCH),
        words=_names(FLAG_WORDS),
        index=_names(INDEX),
        message=_rows((f"`{field}`", _names(names)) for field, names in turn.items()),
        loss=_rows((f"`{name}`", told) for name, told in meant.items()),
        part=_rows((f"`{name}`", kind) for name, kind in (PART | BLOCK).items()),
        knobs=_rows(knobs),
        encoded=_rows((f"`{names[0]}`", _names(names)) for names in ENCODED.values()),
        encoded_training=_names(ENCODED_TRAINING),
        encoded_harmless=_names(ENCODED_HARMLESS),
        types=_names(ENCODED_TYPES),
        harmless=_names(sorted(HARMLESS)),
    )


def _rows(cells: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
