"""Which tokens are trained: generation marks, else prefix rendering, else a refusal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clips import video
from packtrain.errors import ConfigError, SampleError
from packtrain.template import HFTemplate, load_processor

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Drops what stands before </think> in all turns but the last, as reasoning models' templates do.
STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Any:
    """A tokenizer of its own, whose template the tests change."""
    return load_processor(data / "processors" / "qwen3_vl").tokenizer


def with_template(tokenizer: Any, text: str, **options: Any) -> HFTemplate:
    tokenizer.chat_template = text
    return HFTemplate(tokenizer, **options)


def trained(template: HFTemplate, sample: dict[str, Any]) -> list[str]:
    """The trained stretches as text."""
    encoded = template.encode(sample)
    stretches: list[list[int]] = []
    previous = False
    for token, label in zip(encoded["input_ids"].tolist(), encoded["labels"].tolist(), strict=True):
        if label != -100:
            if not previous:
                stretches.append([])
            stretches[-1].append(token)
        previous = label != -100
    assert template.measure(sample).costs["supervised"] == sum(map(len, stretches))
    return [template.tokenizer.decode(part) for part in stretches]


def test_marks_and_prefixes_agree(tokenizer: Any, data: Path, chat) -> None:
    marked = (data / "processors" / "qwen3_vl" / "chat_template.jinja").read_text()
    plain = re.sub(r"\{%-\s*(end)?generation\s*-%\}", "", marked)
    assert plain != marked
    samples = [
        chat("Hi", "Hello there."),
        chat("Hi", " Hello \n", "Go on", "Fine.\n\n", "End?", "Yes"),
        {"messages": [{"role": "system", "content": "Be brief."}, *chat("a", "b", "c", "d")["messages"]]},
    ]
    for sample in samples:
        by_marks = trained(with_template(tokenizer, marked), sample)
        by_prefix = trained(with_template(tokenizer, plain), sample)
        assert by_marks == by_prefix
    assert by_marks == ["b<|im_end|>", "d<|im_end|>"]


def test_the_end_of_turn_is_trained_its_separator_is_not(tokenizer: Any, chat) -> None:
    template = with_template(tokenizer, CHATML)
    assert trained(template, chat("Hi", "Hello.", "More", "No.")) == ["Hello.<|im_end|>", "No.<|im_end|>"]


def test_a_template_without_end_token_trains_to_its_separator(tokenizer: Any, chat) -> None:
    plain = (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    )
    assert trained(with_template(tokenizer, plain), chat("Hi", "Hello.")) == ["Hello.\n\n"]


def test_a_template_that_drops_reasoning_is_refused_or_trained_as_it_renders(tokenizer: Any, chat) -> None:
    template = with_template(tokenizer, STRIPS)
    thinking = chat("Hi", "<think>hm</think>Hello.", "More", "<think>no</think>No.")
    for call in (template.measure, template.encode):
        with pytest.raises(ConfigError, match="reasoning of assistant messages") as caught:
            call(thinking)
        assert "allow_dropped: [reasoning]" in str(caught.value.hint)
    assert trained(template, chat("Hi", "<think>hm</think>Hello.")) == ["<think>hm</think>Hello.<|im_end|>"]
    assert len(trained(template, chat("Hi", "Hello.", "More", "No."))) == 2
    for options in ({"allow_dropped": ["reasoning"]}, {"reasoning": "drop_history"}):
        template = with_template(tokenizer, STRIPS, **options)
        assert trained(template, thinking) == ["Hello.<|im_end|>", "<think>no</think>No.<|im_end|>"]


def test_a_template_that_refuses_the_conversation(tokenizer: Any, chat) -> None:
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = with_template(tokenizer, strict)
    twice = {"messages": [*chat("a", "b")["messages"], {"role": "assistant", "content": "c"}]}
    with pytest.raises(SampleError, match="roles must alternate") as caught:
        template.measure(twice)
    assert caught.value.reason == "template_error"


def test_first_token_is_never_trained(tokenizer: Any, chat) -> None:
    bare = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    template = with_template(tokenizer, bare, allow_dropped=["text"])
    encoded = template.encode(chat("x", "one two three"))
    assert encoded["labels"].tolist() == [-100, *encoded["input_ids"].tolist()[1:]]
    assert template.measure(chat("x", "one two three")).costs["supervised"] == 2
    alone = template.encode(chat("x", "one"))  # a single token trains nothing
    assert alone["labels"].tolist() == [-100]
    assert template.measure(chat("x", "one")).costs["supervised"] == 0


def test_system_turn(tokenizer: Any, chat) -> None:
    template = with_template(tokenizer, CHATML, system="Be kind.")
    text = tokenizer.decode(template.encode(chat("Hi", "Yo"))["input_ids"])
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi")
    own = {"messages": [{"role": "system", "content": "Mine."}, *chat("Hi", "Yo")["messages"]]}
    assert "Be kind." not in tokenizer.decode(template.encode(own)["input_ids"])
    assert len(own["messages"]) == 3


def test_tools_and_calls_reach_the_template(tokenizer: Any, chat) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    text = (
        "{% if tools %}TOOLS {{ tools | tojson }}{{ '\n' }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }}{% endfor %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = with_template(tokenizer, text)
    sample = {
        "messages": [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
            {"role": "tool", "content": [{"type": "text", "text": "2"}]},
            {"role": "assistant", "content": "Two."},
        ],
        "tools": [tool],
    }
    whole = tokenizer.decode(template.encode(sample)["input_ids"])
    assert whole.startswith('TOOLS [{"type": "function"') and "assistant: CALL add\n" in whole
    assert trained(template, sample) == [" CALL add\n", " Two.\n"]  # the prompt ends inside these tokens
    assert template.measure(sample) > template.measure({"messages": sample["messages"]})
    for bad in ('[{"type": "function"}]', ["add"]):  # tools as unparsed text
        with pytest.raises(SampleError, match="tools") as caught:
            template.measure({**sample, "tools": bad})
        assert caught.value.reason == "malformed_record"


def test_variables_reach_the_template(tokenizer: Any, chat) -> None:
    text = CHATML.replace("{% endfor %}", "{% if loud %}!!{% endif %}{% endfor %}")
    quiet = with_template(tokenizer, text)
    loud = with_template(tokenizer, text, variables={"loud": True})
    assert loud.measure(chat("a", "b")) > quiet.measure(chat("a", "b"))
    assert loud.config() != quiet.config()
    with pytest.raises(ConfigError, match="plain values"):
        with_template(tokenizer, text, variables={"f": print})


def test_templates_do_not_read_the_clock(tokenizer: Any, chat, caplog) -> None:
    dated = "Today {{ strftime_now('%d %B %Y') }}. " + CHATML
    template = with_template(tokenizer, dated)
    assert "today's date" in caplog.text
    assert tokenizer.decode(template.encode(chat("a", "b"))["input_ids"]).startswith("Today 26 July 2024. ")
    with pytest.raises(ConfigError, match="clock"):
        with_template(tokenizer, "{% set f = '%d' %}{{ strftime_now(f) }}" + CHATML)


def test_broken_or_missing_templates(tokenizer: Any, chat) -> None:
    with pytest.raises(ConfigError, match="no chat template") as caught:
        with_template(tokenizer, None)
    assert "chat_template.jinja" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="cannot be compiled: line 1"):
        with_template(tokenizer, "{% for m in %}{{ m }}{% endfor %}").measure(chat("a", "b"))


def test_named_templates(tokenizer: Any, chat) -> None:
    named = with_template(tokenizer, {"default": CHATML, "tool_use": "WITH {{ tools | tojson }} " + CHATML})
    plain = chat("a", "b")
    assert not tokenizer.decode(named.encode(plain)["input_ids"]).startswith("WITH")
    tools = {**plain, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert tokenizer.decode(named.encode(tools)["input_ids"]).startswith("WITH [")


def test_text_family_refuses_images(tokenizer: Any, chat) -> None:
    template = with_template(tokenizer, CHATML)
    assert template.family.name == "text"
    with pytest.raises(SampleError) as caught:
        template.measure(chat([Path("a.png"), "?"], "x"))
    assert caught.value.reason == "unsupported_media"


PROCESSORS = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl3"), ("image", "video")
    ),
    "qwen2_5_omni": ("image", "video", "audio"),
    "qwen2_audio": ("audio",),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in PROCESSORS.items() for kind in kinds]
)
def test_media_in_an_answer_are_not_trained_with_their_marks(
    name: str, kind: str, data: Path, processor, tmp_path: Path
) -> None:
    """Neither placeholders nor what stands around them; the texts and the end mark are."""
    (tmp_path / "short.mp4").write_bytes(video("mp4", "mpeg4", frames=8))
    files = {
        "image": data / "mllm_demo" / "mllm_demo_data" / "1.jpg",
        "video": tmp_path / "short.mp4",
        "audio": data / "audio" / "espeak" / "cmn_003.wav",
    }
    medium = {"type": kind, kind: str(files[kind])}
    options = {"max_frames": 4} if kind == "video" and name.startswith("qwen") else {}
    template = HFTemplate(processor(name), **options)

    def talk(*parts: Any) -> dict[str, Any]:
        answer = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        user = {"role": "user", "content": [{"type": "text", "text": "Draw."}]}
        return {"messages": [user, {"role": "assistant", "content": answer}]}

    (whole,) = trained(template, talk("Here:done"))
    end = whole.removeprefix("Here:done")
    assert "".join(trained(template, talk("Here:", medium, "done"))) == whole
    assert "".join(trained(template, talk("Here:", medium, medium, "done"))) == whole
    assert "".join(trained(template, talk(medium, "done"))) == "done" + end
    assert "".join(trained(template, talk("Here:", medium))) == "Here:" + end
    for call in (template.measure, template.encode):  # nothing that is said: not trained as a bare end mark
        with pytest.raises(SampleError) as caught:
            call(talk(medium))
        assert caught.value.reason == "unsupervised"
    both = talk("Here:done")["messages"] + talk(medium)["messages"] + talk("Bye")["messages"]
    assert "".join(trained(template, {"messages": both})) == whole + "Bye" + end


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_counted_and_spares_media(side: str, data: Path, processor, template, chat) -> None:
    image = data / "mllm_demo" / "mllm_demo_data" / "1.jpg"
    whole = template("qwen2_5_vl")
    cutting = HFTemplate(processor("qwen2_5_vl"), truncation=side, max_length=60)
    short, long = chat("Hi", "Yo"), chat("word " * 20, "answer " * 50)
    assert cutting.measure(short) == whole.measure(short) and cutting.measure(short).costs["truncated"] == 0
    measured = cutting.measure(long)
    assert measured == 60 and measured.costs["truncated"] == 1 and whole.measure(long) > 60
    encoded, full = cutting.encode(long), whole.encode(long)
    kept = slice(0, 60) if side == "right" else slice(-60, None)
    assert encoded["input_ids"].tolist() == full["input_ids"][kept].tolist()
    assert encoded["labels"].tolist()[1:] == full["labels"][kept].tolist()[1:]
    assert encoded["labels"][0] == -100
    assert measured.costs["supervised"] == int((encoded["labels"] != -100).sum())
    assert encoded["position_ids"].tolist() == [list(range(60))] * 3
    for call in (cutting.measure, cutting.encode):
        with pytest.raises(SampleError) as caught:
            call(chat([image, "What?"], "x"))
        assert caught.value.reason == "truncation_cuts_media"
    wide = HFTemplate(processor("qwen2_5_vl"), truncation=side, max_length=1200)
    ends = (
        chat(["a", image, "b"], "word " * 3000)
        if side == "right"
        else chat("word " * 3000, "x", [image], "y")
    )
    encoded = wide.encode(ends)
    assert len(encoded["input_ids"]) == wide.measure(ends) == 1200
    assert encoded["position_ids"].shape == (3, 1200) and len(encoded["image_grid_thw"]) == 1


def test_options_are_checked(processor) -> None:
    with pytest.raises(ConfigError, match="no max_length"):
        HFTemplate(processor("qwen2_vl"), truncation="left")
    with pytest.raises(ValueError, match="unknown truncation 'rigth'") as caught:
        HFTemplate(processor("qwen2_vl"), truncation="rigth", max_length=5)
    assert "right" in str(caught.value)
    for value in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="max_length"):
            HFTemplate(processor("qwen2_vl"), max_length=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="image processor"):
        HFTemplate(processor("qwen2_vl").tokenizer, family="qwen2_vl")
    with pytest.raises(ValueError, match="unknown processor class"):
        HFTemplate(object())
