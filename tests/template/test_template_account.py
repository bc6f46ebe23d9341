"""What a record says comes out of the rendering, or the template is named; answers are what is trained."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import ConfigError, SampleError, UnknownNameError
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.template import HFTemplate, load_processor
from packtrain.template.account import missing, pieces_of

PROCESSORS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "qwen2_audio", "llava_onevision", "internvl3"),
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_city",
            "description": "Find a city",
            "parameters": {"type": "object", "properties": {"zipcode": {"type": "string"}}},
        },
    }
]
#: Added tokens of the models whose templates are used below.
ADDED = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<｜User｜>", "<｜Assistant｜>"]
ADDED += ["<｜end▁of▁sentence｜>", "<｜tool▁calls▁end｜>", "<|start|>", "<|channel|>", "<|message|>"]
ADDED += ["<|return|>", "<|call|>", "<|constrain|>"]


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Any:
    """A tokenizer of its own, whose template the tests change."""
    made = load_processor(data / "processors" / "qwen3_vl").tokenizer
    made.add_tokens(ADDED, special_tokens=True)
    return made


def published(name: str) -> str:
    """A chat template as its model publishes it, from TRL's collection."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def made(tokenizer: Any, text: str, **options: Any) -> HFTemplate:
    return HFTemplate(tokenizer, chat_template=text, **options)


def say(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}], **more}


def call(name: str, arguments: Any, text: str = "", **more: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return say("assistant", text, tool_calls=calls, **more)


def stretches(template: HFTemplate, sample: dict[str, Any]) -> list[str]:
    """The trained stretches as text; measuring counts as many tokens, and encoding weighs them."""
    encoded = template.encode(sample)
    found: list[list[int]] = []
    previous = False
    for token, label in zip(encoded["input_ids"].tolist(), encoded["labels"].tolist(), strict=True):
        if label != -100:
            if not previous:
                found.append([])
            found[-1].append(token)
        previous = label != -100
    measured = template.measure(sample)
    assert measured == len(encoded["input_ids"])
    assert measured.costs["supervised"] == sum(map(len, found))
    return [template.tokenizer.decode(part) for part in found]


def text_of(template: HFTemplate, sample: dict[str, Any]) -> str:
    return str(template.tokenizer.decode(template.encode(sample)["input_ids"]))


TURNS = [say("user", "Q one"), say("assistant", "A one"), say("user", "Q two"), say("assistant", "A two")]


# ------------------------------------------------------------------------------------- the account
@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ([call("find_city", {"zipcode": "10115"})], "tool_calls"),
        ([say("assistant", "A", reasoning_content="because of this")], "reasoning"),
    ],
)
def test_what_a_template_drops_is_named(tokenizer: Any, more: list[Any], kind: str) -> None:
    sample = {"messages": [*TURNS, say("user", "Q three"), *more]}
    for text in (CHATML, MARKED):
        with pytest.raises(ConfigError, match=f"drops the {kind.replace('_', ' ')} of assistant") as caught:
            made(tokenizer, text).measure(sample)
        assert f"allow_dropped: [{kind}]" in str(caught.value.hint)
        allowed = made(tokenizer, text, allow_dropped=[kind])
        assert stretches(allowed, sample)[:2] == ["A one<|im_end|>", "A two<|im_end|>"]


def test_tools_and_list_only_contents_are_accounted_for(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="drops the tool schemas of the record: 'find_city"):
        made(tokenizer, MARKED).measure({"messages": TURNS, "tools": TOOLS})
    lists = (
        "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}\n{% endfor %}"
    )
    with pytest.raises(ConfigError, match="drops the text of user messages"):
        made(tokenizer, lists).measure({"messages": TURNS})
    nobody = CHATML.replace("{{ m.content }}", "{{ '' if m.role == 'system' else m.content }}")
    with pytest.raises(ConfigError, match="drops the system of system messages"):
        made(tokenizer, nobody).measure({"messages": [say("system", "Be brief"), *TURNS]})


def test_short_texts_are_told_from_the_words_of_the_template(tokenizer: Any) -> None:
    """`s` stands in every rendering ("user", "assistant"): where the texts are is asked by marks."""
    drops = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}")
    sample = {"messages": [say("user", "Q"), say("assistant", "x"), say("tool", "s"), say("assistant", "A")]}
    with pytest.raises(ConfigError, match="tool results"):
        made(tokenizer, drops).measure(sample)


def test_marks_of_the_wrong_turn_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="marks the text of a user message"):
        made(tokenizer, MARKED.replace("== 'assistant'", "!= 'assistant'")).measure({"messages": TURNS})
    only_last = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ConfigError, match="outside of its marks"):
        made(tokenizer, only_last).measure({"messages": TURNS})
    assert stretches(made(tokenizer, only_last, train_on="last"), {"messages": TURNS}) == ["A two<|im_end|>"]


@pytest.mark.parametrize("chat_template", [CHATML, MARKED])
def test_the_line_break_behind_an_answer_is_trained_where_asked(tokenizer: Any, chat_template: str) -> None:
    """Every answer that is trained, the last included, gains one token, and nothing else does."""
    plain, line = (made(tokenizer, chat_template, answer_end=end) for end in ("mark", "line"))
    sample = {"messages": [say("system", "Be brief"), *TURNS]}
    ended = [f"{answer}\n" for answer in stretches(plain, sample)]
    assert stretches(line, sample) == ended and len(ended) == 2
    assert line.measure(sample) == plain.measure(sample) == len(line.encode(sample)["labels"])
    assert line.measure(sample).costs["supervised"] == plain.measure(sample).costs["supervised"] + 2
    quiet = {"messages": [*TURNS[:1], {**TURNS[1], "loss": False}, *TURNS[2:]]}
    assert stretches(line, quiet) == ended[1:]
    bare = chat_template.replace("<|im_end|>\n", "<|im_end|>").replace("{{ '\n' }}", "")
    assert stretches(made(tokenizer, bare, answer_end="line"), sample) == stretches(plain, sample)


def test_real_calls_are_in_the_rendering_or_the_template_is_named(
    data: Path, tmp_path: Path, template
) -> None:
    file = data / "text_sft" / "glaive_toolcall_en_demo.json"
    source = ChatSource(open_source(file, cache_dir=tmp_path))
    samples = [source[i] for i in range(len(source))]
    calls = [s for s in samples if any(m.get("tool_calls") for m in s["messages"])]
    assert sum(len(m.get("tool_calls") or ()) for s in samples for m in s["messages"]) == 211
    for name in PROCESSORS:  # their templates know nothing of tools
        with pytest.raises(ConfigError, match=name):
            template(name).measure_batch(calls[:1])
    tokenizer = load_processor(data / "processors" / "qwen3_vl").tokenizer
    able = made(tokenizer, published("qwen2_5"), allow_dropped=[])
    able_counts = able.measure_batch(samples)
    assert not [outcome for outcome in able_counts if isinstance(outcome, SampleError)]
    found = 0
    for sample in calls:
        text = able.rendered(sample).text
        assert not missing(text, pieces_of(sample["messages"], sample.get("tools")))
        found += text.count("<tool_call>\n{") - 1  # once in the instructions
    assert found == 211


@settings(max_examples=40, deadline=None)
@given(draw=st.data())
def test_everything_appears_or_is_refused(tokenizer: Any, draw: st.DataObject) -> None:
    words = st.text("abcde \n\"'<>{}漢é", min_size=0, max_size=12).filter(
        lambda text: "<" not in text or True
    )
    turns: list[dict[str, Any]] = []
    for _ in range(draw.draw(st.integers(1, 3))):
        turns.append(say("user", draw.draw(words) + "q"))
        kind = draw.draw(st.sampled_from(["plain", "call", "reasoning", "think"]))
        if kind == "call":
            scalars = st.booleans() | st.integers(-5, 10**6) | st.floats(-9, 9) | words
            held = scalars | st.lists(scalars | st.none(), max_size=3) | st.just({"in": True})
            arguments: Any = {draw.draw(st.sampled_from(["k", "place"])): draw.draw(held)}
            turns.append(call("look", arguments))
            turns.append(say("tool", draw.draw(words) + "r"))
        more = {"reasoning_content": draw.draw(words) + "h"} if kind == "reasoning" else {}
        thought = f"<think>{draw.draw(words)}t</think>" if kind == "think" else ""
        turns.append(say("assistant", thought + draw.draw(words) + "a", **more))
    sample: dict[str, Any] = {"messages": json.loads(json.dumps(turns))}
    if draw.draw(st.booleans()):  # as OpenAI writes them
        for function in (c["function"] for turn in sample["messages"] for c in turn.get("tool_calls", ())):
            function["arguments"] = json.dumps(function["arguments"])
    if draw.draw(st.booleans()):
        sample["tools"] = TOOLS
    text = draw.draw(
        st.sampled_from([CHATML, MARKED, *map(published, ("qwen3", "qwen2_5", "nemotron_3_nano"))])
    )
    template = made(tokenizer, text)
    try:
        rendered = template.rendered(sample)
    except ConfigError as error:
        assert "drops" in error.message
        return
    assert not missing(rendered.text, pieces_of(turns, sample.get("tools")))
    answers = [
        turn["content"][0]["text"].rpartition("</think>")[2] for turn in turns if turn["role"] == "assistant"
    ]
    spans = [rendered.text[a:b] for a, b in rendered.spans]
    assert len(spans) == sum(bool(a.strip()) for a in answers) + sum("tool_calls" in turn for turn in turns)
    assert all(any(answer.strip() in span for span in spans) for answer in answers)
    encoded = template.encode(sample)
    assert template.measure(sample) == len(encoded["input_ids"])
    template.check_decoded(sample, encoded)


# ------------------------------------------------------------------------- templates that rewrite turns
THINKING = [
    say("user", "Q one"),
    say("assistant", "A one", reasoning_content="why one"),
    say("user", "Q two"),
    say("assistant", "A two", reasoning_content="why two"),
]


def test_qwen3_trains_every_turn_of_the_final_rendering(tokenizer: Any) -> None:
    text = published("qwen3")
    plain = made(tokenizer, text)
    assert stretches(plain, {"messages": TURNS}) == ["A one<|im_end|>", "A two<|im_end|>"]
    assert "<think>\n\n</think>" in text_of(plain, {"messages": TURNS})  # put there by the template
    with pytest.raises(ConfigError, match="drops the reasoning of assistant messages"):
        plain.measure({"messages": THINKING})
    kept = "<think>\nwhy two\n</think>\n\nA two<|im_end|>"
    for options in ({"reasoning": "drop_history"}, {"allow_dropped": ["reasoning"]}):
        assert stretches(made(tokenizer, text, **options), {"messages": THINKING}) == [
            "A one<|im_end|>",
            kept,
        ]
    masked = made(tokenizer, text, allow_dropped=["reasoning"], reasoning="mask")
    assert stretches(masked, {"messages": THINKING}) == ["A one<|im_end|>", "A two<|im_end|>"]
    last = made(tokenizer, text, reasoning="drop_history", train_on="last")
    assert stretches(last, {"messages": THINKING}) == [kept]
    inline = [say("user", "Q"), say("assistant", "<think>\nwhy\n</think>\n\nA")]
    assert stretches(plain, {"messages": inline}) == ["<think>\nwhy\n</think>\n\nA<|im_end|>"]
    own = [say("user", "Q"), say("assistant", "<think>\n\n</think>\n\nA")]  # the record says it: trained
    assert stretches(plain, {"messages": own}) == ["<think>\n\n</think>\n\nA<|im_end|>"]
    loop = [
        *(say("user", "Where?"), call("find_city", '{"zipcode": "10115"}'), say("tool", "Berlin")),
        *(say("assistant", "Berlin."), say("user", "Thanks"), say("assistant", "Bye")),
    ]
    spans = stretches(plain, {"messages": loop, "tools": TOOLS})
    shown = '<tool_call>\n{"name": "find_city", "arguments": {"zipcode": "10115"}}\n</tool_call><|im_end|>'
    assert spans == [shown, "Berlin.<|im_end|>", "Bye<|im_end|>"]


def test_phi3_deepseek_gptoss_and_nemotron(tokenizer: Any) -> None:
    sample = {"messages": TURNS}
    phi = stretches(made(tokenizer, published("phi3")), sample)
    assert phi[0] == "A one<|end|>" and phi[1].startswith("A two<|end|>")
    deep = stretches(made(tokenizer, published("deepseek_r1_distill")), sample)
    assert deep == ["A one<｜end▁of▁sentence｜>", "A two<｜end▁of▁sentence｜>"]
    assert stretches(made(tokenizer, published("nemotron_3_nano")), sample) == [
        "A one<|im_end|>",
        "A two<|im_end|>",
    ]
    final = "<|channel|>final<|message|>"
    oss = stretches(made(tokenizer, published("gptoss")), sample)
    assert oss == [f"{final}A one<|end|>", f"{final}A two<|return|>"]


def test_arguments_are_objects_unless_the_template_joins_text(tokenizer: Any) -> None:
    turns = [
        say("user", "Where?"),
        call("find_city", '{"zipcode": "10115"}'),
        say("tool", "B"),
        say("assistant", "B."),
    ]
    quoted = text_of(made(tokenizer, published("qwen2_5")), {"messages": turns, "tools": TOOLS})
    assert '"arguments": {"zipcode": "10115"}' in quoted
    deep = published("deepseekv3")
    assert '```json\n{"zipcode": "10115"}\n```' in text_of(made(tokenizer, deep), {"messages": turns})


def test_trl_by_name(tokenizer: Any) -> None:
    tokenizer.chat_template = published("qwen3")
    try:
        template = HFTemplate(tokenizer, chat_template="trl")
        spans = stretches(template, {"messages": THINKING})
    finally:
        tokenizer.chat_template = None
    assert "why one" in spans[0] and "why two" in spans[1]
    assert template.config() != made(tokenizer, published("qwen3")).config()
    with pytest.raises(ConfigError, match="TRL has no training template"):
        tokenizer.chat_template = CHATML
        HFTemplate(tokenizer, chat_template="trl")


# ------------------------------------------------------------------------------------------ the loss
def test_loss_of_messages(tokenizer: Any, data: Path, template) -> None:
    def weighed(*losses: Any) -> dict[str, Any]:
        return {"messages": [{**turn, "loss": loss} for turn, loss in zip(TURNS, losses, strict=True)]}

    for one in (made(tokenizer, MARKED), made(tokenizer, CHATML), template("qwen2_5_vl")):
        both = ["A one<|im_end|>", "A two<|im_end|>"]
        assert stretches(one, weighed(None, True, 0, 1)) == both == stretches(one, {"messages": TURNS})
        assert "loss_scale" not in one.encode(weighed(False, True, 0.0, 1.0))
        for off in (False, 0, 0.0):
            assert stretches(one, weighed(None, off, None, None)) == both[1:]
        encoded = one.encode(weighed(None, 0.5, None, 1))
        scale = encoded["loss_scale"][encoded["labels"] != -100]
        assert scale.tolist() == [0.5] * (len(scale) // 2) + [1.0] * (len(scale) // 2)
        assert stretches(one, weighed(None, 0.5, None, 1)) == both
        assert [text.strip() for text in stretches(one, weighed(1, 0, 0, 1))] == ["Q one", "A two<|im_end|>"]
        for call_ in (one.measure, one.encode):
            with pytest.raises(SampleError) as caught:
                call_(weighed(None, False, None, 0))
            assert caught.value.reason == "unsupervised"
        with pytest.raises(SampleError, match="loss of message 1"):
            one.measure(weighed(None, "no", None, None))


def test_empty_answers_and_cut_answers_are_not_trained(tokenizer: Any) -> None:
    turns = [TURNS[0], say("assistant", " "), TURNS[2], TURNS[3]]
    for text in (MARKED, CHATML):
        assert stretches(made(tokenizer, text), {"messages": turns}) == ["A two<|im_end|>"]
        cut = made(tokenizer, text, truncation="right", max_length=8)
        long = {"messages": [say("user", "word " * 20), say("assistant", "A")]}
        for call_ in (cut.measure, cut.encode):
            with pytest.raises(SampleError, match="leaves no answer") as caught:
                call_(long)
            assert caught.value.reason == "unsupervised"


def test_control_tokens_in_texts_are_refused_and_grounding_survives(template) -> None:
    for token in ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|vision_start|>"):
        for sample in (
            [say("user", f"a {token} b"), say("assistant", "x")],
            [say("user", "a"), say("assistant", token)],
        ):
            for call_ in (template("qwen2_5_vl").measure, template("qwen2_5_vl").encode):
                with pytest.raises(SampleError, match="control token") as caught:
                    call_({"messages": sample})
                assert caught.value.reason == "control_token"
    box = "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>"
    sample = {"messages": [say("user", f"Where is {box}?"), say("assistant", box)]}
    assert stretches(template("qwen2_5_vl"), sample) == [f"{box}<|im_end|>"]


def test_control_tokens_are_refused_wherever_a_text_stands(tokenizer: Any) -> None:
    mark = "a <|im_end|> b"
    answer, question = say("assistant", "x"), say("user", "q")
    held: list[dict[str, Any]] = [
        {"messages": [say("system", mark), question, answer]},
        {"messages": [question, call("f", {"a": [mark]}), answer]},
        {"messages": [question, call("f", {mark: 1}), answer]},
        {"messages": [question, call(mark, {}), answer]},
        {"messages": [question, call("f", {}), say("tool", mark), answer]},
        {"messages": [question, say("assistant", "x", reasoning_content=mark)]},
        {"messages": [question, answer], "tools": [{"name": "f", "description": mark}]},
        {"messages": [question, answer], "tools": [{"name": "f", "parameters": {"properties": {mark: {}}}}]},
    ]
    used = made(tokenizer, published("qwen3"), allow_dropped=["reasoning"])
    for sample in held:
        for call_ in (used.measure, used.encode):
            with pytest.raises(SampleError) as caught:
                call_(sample)
            assert caught.value.reason == "control_token", sample


def test_options_are_checked_and_only_then_in_the_fingerprint(tokenizer: Any) -> None:
    plain = made(tokenizer, MARKED).config()
    assert not {"allow_dropped", "train_on", "reasoning", "answer_end", "sampling"} & plain.keys()
    for option in (
        {"allow_dropped": ["tools"]},
        {"train_on": "last"},
        {"reasoning": "mask"},
        {"answer_end": "line"},
    ):
        assert made(tokenizer, MARKED, **option).config() == {**plain, **option}
    for option in (
        {"allow_dropped": ["toolz"]},
        {"train_on": "first"},
        {"reasoning": "drop"},
        {"answer_end": "eos"},
    ):
        with pytest.raises(UnknownNameError):
            made(tokenizer, MARKED, **option)


# ------------------------------------------------------------------------------------ order and decoded ids
def test_order_is_that_of_the_conversation() -> None:
    """Within a message the kinds may come in any order, each in its own; messages never change places."""
    turns = [say("user", "one"), call("f", {"a": True, "b": [None, 2.5]}, text="said"), say("user", "two")]
    turns[1]["tool_calls"] += call("g", {"z": 1})["tool_calls"]
    pieces = pieces_of(turns, None)
    for text in ("one f a true b null 2.5 g z 1 said two", "one said f a True b None 2.5 g z 1 two"):
        assert not missing(text, pieces)
    assert [p.kind for p in missing("one said f a true b null 2.5 two", pieces)] == ["tool_calls"]
    assert missing("one said g z 1 f a true b null 2.5 two", pieces)  # calls have changed places
    assert missing("two said f a true b null 2.5 g z 1 one", pieces)  # turns have changed places
    for lost in ("one f a false b null 2.5 g z 1 said two", "one f a true b 2.5 g z 1 said two"):
        assert [p.kind for p in missing(lost, pieces)] == ["tool_calls"]
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("first", "second")]}
    assert missing("second first", pieces_of([parts], None))


@pytest.mark.parametrize("name", PROCESSORS)
def test_decoded_ids_hold_what_the_sample_says(template, name: str) -> None:
    """Over scripts, marks, added tokens and white space, on all seven; and losing one id is seen."""
    used = template(name)
    texts = [
        "I can't  wait,\tok?\n\n 12.5%",
        "e\u0301 漢字 한 \u0915\u093f 👩\u200d👧",
        "<think>a</think> <|box_start|>(1,2)<|box_end|>",
    ]
    turns = [say(("user", "assistant")[n % 2], f"{text} {n}") for n, text in enumerate(texts + texts)]
    sample = {"messages": turns}
    encoded = used.encode(sample)
    used.check_decoded(sample, encoded)
    for field, where in (("labels", "trained ids"), ("input_ids", "decoded ids")):
        spoiled = {key: value.clone() for key, value in encoded.items()}
        first = int((spoiled["labels"] != -100).nonzero()[0]) + 1
        if field == "labels":
            spoiled["labels"][first] = -100
        else:
            spoiled["input_ids"][first] = spoiled["input_ids"][0]
        with pytest.raises(ConfigError, match=where):
            used.check_decoded(sample, spoiled)


def test_a_character_without_a_token_is_named(tmp_path: Path) -> None:
    """A tokenizer that writes <unk> for a character trains another text; the audit says so."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[EOS]", "user", "assistant", ":", "hello", "there"]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    small = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[EOS]")
    text = "{% for m in messages %}{{ m.role }} : {{ m.content }} [EOS]{% endfor %}"
    used = made(small, text)
    good = {"messages": [say("user", "hello"), say("assistant", "there")]}
    used.check_decoded(good, used.encode(good))
    bad = {"messages": [say("user", "hello"), say("assistant", "there 漢")]}
    with pytest.raises(ConfigError, match="decoded ids"):
        used.check_decoded(bad, used.encode(bad))
