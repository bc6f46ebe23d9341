"""Write docs/specs.md: each requirement of the five documents, its key, its API, and the test that shows it.

Tests say it themselves: `@pytest.mark.spec("004", "dyn_bsz: rows by tokens", key="data.dyn_bsz", api="…")`.

python scripts/specs_page.py
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from packtrain.moved import NAMES, THEIRS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "specs.md"

TITLES = {
    "000": "Deterministic static pack plans (CoordExp)",
    "001": "Packed datasets in ms-swift",
    "002": "A directory that grows, and its producer (Megatron-SWIFT)",
    "003": "Offline sample-packing for multimodal data (LLaVA-OneVision)",
    "004": "Token budgets: dyn_bsz (VeOmni)",
}

_HEAD = """# The five documents

packtrain brings together what five systems ask of packing. Every requirement of their documents is below,
with the key of the YAML (the name there, where it is another one, is in
[config.md](config.md#names-of-other-layouts)), the API, and the test that asserts its value or its refusal.
Every key is also an option of `packtrain run` and `packtrain train`: `--section.key VALUE`, under any of its
names; those of `training` need no section (`--streaming true`). This page is written from the marks of the
tests by `scripts/specs_page.py`.

Where a worked example prints something else here, a law of [architecture.md](architecture.md) decides:
positions of a padded tail begin at 0, since they are a segment of their own; the third example of 004 prints
1 2 3; ranks take samples in turn, so the two ranks of 004 hold S1 S3 and S2 S4.

Keys of static plans beside a growing directory: `skip_samples` is used (the samples leave their packs, into
`left_out.jsonl`). All others have no effect, which is one warning: made packs are never cut, and a step is of
packs (`samples_per_step`, `samples_per_row`).
"""

#: What the documents write as code and is something else here.
_INSTEAD = {
    "`calculate_matched_group(sequences, packing_length, is_finished)`": "`plan(lengths, packing_length=)`; "
    "with samples to come: `StreamingPackedDataset`",
    "`create_packed_idx`": "`PackedDataset.packed_idx`, `.packed_length`",
    "`packing_row`, `pack_samples(template, row)`, `_data_collator(batch, padding_to)`, "
    "`_merge_multimodal_data`": "`PaddingFreeCollator(padding_to=)([row])`",
    "`template.encode(sample, return_length=True)`": "`HFTemplate.encode`: the length is that of `input_ids`",
    "`raw_plan`, `aligned_plan(world_size, dataloader_drop_last)`": "`plan(…)`, "
    "`.align(world_size, dataloader_drop_last=)`",
    "`DTYPE_SAMPLE_INFO`, hash buckets": "`Lengths`, `packtrain show --distribution`",
    "`convert_to_messages`, `pack_selected_samples`, `CaptioningSample` …": "`open_packs(folder, encode)`, "
    "`data.source: llava_packed`",
    "`pack_frac`, `sample_weight`": "`data.packer_options.min_fill` of `diverse`; weights of `data.mixture`",
    "`--config s1_config.yaml` and its steps": "`packtrain measure`, `plan`, `export`, or `run` of one YAML",
}


def marks() -> list[tuple[str, str, str, str, str]]:
    """(number, requirement, key, API, file::test) of every mark, by number, file and line.

    Raises:
        ValueError: a mark lacks one of its four texts.
    """
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                where = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                found += [(*row, where) for row in _of(node, where)]
    return sorted(found, key=lambda row: row[0])  # stable: the order of files and lines


def _of(node: ast.FunctionDef, where: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for decorator in node.decorator_list:
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.spec"):
            continue
        given = [ast.literal_eval(arg) for arg in decorator.args]
        named = {word.arg: ast.literal_eval(word.value) for word in decorator.keywords}
        texts = [*given, named.get("key", ""), named.get("api", "")]
        if len(texts) != 4 or not all(texts) or texts[0] not in TITLES:
            raise ValueError(f"{where}: a mark says number, requirement, key= and api=")
        rows.append(tuple(texts))
    return rows  # type: ignore[return-value]


def page() -> str:
    """The page, in Markdown."""
    rows = marks()
    parts = [_HEAD]
    for number, title in TITLES.items():
        parts.append(f"## {number} {title}\n\n| requirement | key | API | shown by |\n|---|---|---|---|\n")
        for _, requirement, key, api, where in (row for row in rows if row[0] == number):
            cells = [requirement, key, api, f"`{where.removeprefix('tests/')}`"]
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
        parts.append("\n")
    parts += _names()
    return "\n".join([parts[0], "".join(parts[1:])]).rstrip("\n") + "\n"


def _names() -> list[str]:
    """The names of their code: keywords of `moved.THEIRS`, classes, and what is something else here."""
    lines = [
        "## Names in Python\n\nAny other keyword ends in one line with the nearest name.\n\n",
        "| here | keywords of other systems |\n|---|---|\n",
    ]
    for where, names in THEIRS.items():
        here = {theirs: ours[0] if isinstance(ours, tuple) else ours for theirs, ours in names.items()}
        cells = [f"`{theirs}` ({f'`{ours}`' if ours else 'no effect'})" for theirs, ours in here.items()]
        lines.append(f"| `{where}` | {', '.join(cells)} |\n")
    lines.append("\n| their code | here |\n|---|---|\n")
    for theirs, ours in NAMES.items():
        if theirs.startswith("packtrain.data:"):
            lines.append(f"| `{theirs.partition(':')[2]}` | `{ours.replace(':', '.')}` |\n")
    return lines + [f"| {theirs} | {ours} |\n" for theirs, ours in _INSTEAD.items()]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
