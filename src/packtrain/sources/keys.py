"""Keys of records that change what is trained, with every spelling that is read, and the few that do not.

One table: the readers look names up here, the account of every key (`_account.py`) is held against it, and
`docs/keys.md` is written from it. A key is *used*, *harmless*, or unknown; one that changes training and is
not used sends the record to the ledger (`unread_key`), an unknown one is counted and named in the summary.
"""

from __future__ import annotations

#: Field of a record -> its spellings; the first one found is read.
FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "dialog", "dialogue", "chat", "turns"),
    "conversations": ("conversations", "conversation"),
    **{name: (name,) for name in ("texts", "instruction", "input", "output", "instances")},
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
    **dict.fromkeys(("loss", "train", "train_turn", "trainable", "training", "loss_mask"), True),
    **dict.fromkeys(("weight", "loss_weight", "loss_scale"), True),
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
    **{name: (name,) for name in ("tool_calls", "tool_call_id", "function_call", "name", "type")},
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
