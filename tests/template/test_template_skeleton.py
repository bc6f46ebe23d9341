"""Templates run once per shape give what they give when run on every sample."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from packtrain.template.skeleton import copies_texts, cut, slot

COPIES = [
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}",
    "{% for m in messages %}{{ '<' + m.role ~ m.content ~ '\n' }}{% if loop.last %};{% endif %}{% endfor %}",
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}"
    "{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages|length }}",
    "{% set last = messages[-1].content %}{{ last }}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p }}{% endfor %}{% endif %}{% endfor %}",
]
DOES_MORE = [
    "{{ messages[0].content | trim }}",
    "{{ messages[0].content.strip() }}",
    "{{ messages[0].get('content') | length }}",
    "{{ messages[0]['con' + 'tent'][:5] }}",
    "{% if messages[0].content %}x{% endif %}",
    "{% if '</think>' in messages[0].content %}x{% endif %}",
    "{% set c = messages[0].content %}{% if c == 'a' %}x{% endif %}",
    "{% for c in messages[0].content %}x{% endfor %}",
    "{{ messages }}",
    "{{ messages | tojson }}",
    "{{ messages | map(attribute='content') | first | upper }}",
    "{{ messages[0].content * 2 }}",
    "{% for k, v in messages[0].items() %}{{ v }}{% endfor %}",
    "{% for k in messages[0] %}{{ messages[0][k] | length }}{% endfor %}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(messages[0].content) }}",
    "{% set ns = namespace(x='') %}{% set ns.x = messages[0].content %}{{ ns.x|length }}",
    "{{ 'a' if messages[0].content else 'b' }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{{ messages[0].content[0] }}",
]


@pytest.mark.parametrize("template", COPIES)
def test_templates_that_copy(template: str) -> None:
    assert copies_texts(template, parts=False)


@pytest.mark.parametrize("template", DOES_MORE)
def test_templates_that_do_more(template: str) -> None:
    assert not copies_texts(template, parts=False)


def test_lists_of_parts_are_boxes() -> None:
    walk = "{% for p in messages[0].content %}{% if 'image' in p %}I{% else %}{{ p.text }}{% endif %}"
    walk += "{% endfor %}"
    assert copies_texts(walk, parts=True) and not copies_texts(walk, parts=False)
    assert not copies_texts("{{ messages[0].content }}", parts=True)


def test_edges_and_repeats() -> None:
    a, b = slot(0), slot(1)
    skeleton = cut(f"<{a}|{b}>{a}", [(1, 8), (9, 12)])
    assert skeleton is not None
    assert skeleton.fill(["", "xyz"]) == ("<|xyz>", ((1, 5),))
    assert skeleton.fill(["ab", ""]) == ("<ab|>ab", ((1, 4), (5, 7)))
    assert cut(f"<{a}>", [(2, 3)]) is None


TEXTS = ["", " x", "x \n", "<|im_end|>", "assistant\n", "\ue0000\ue001", "{{ messages }}", "漢字 🙂"]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl3", "qwen2_audio"])
def test_equal_to_the_whole_run(name: str, template: Any) -> None:
    renderer = template(name).renderer
    assert renderer._copies
    kind = renderer.takes[0]
    for a, b, c in itertools.product(TEXTS, repeat=3):
        for roles in (("user", "assistant"), ("system", "user", "assistant"), ("user", "assistant", "user")):
            parts = [[{"type": "text", "text": a}, {"type": kind, kind: "m"}], [{"type": "text", "text": b}]]
            parts.append([{"type": "text", "text": c}])
            sample = {"messages": [{"role": r, "content": p} for r, p in zip(roles, parts, strict=False)]}
            quick, whole = renderer._quick(sample), renderer._whole(sample)
            assert quick == whole
    odd = {"messages": [{"role": "assistant", "content": parts[1], "tool_calls": []}]}
    assert renderer._quick(odd) is None
