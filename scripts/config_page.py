"""Write docs/config.md from the models of `packtrain.train.config` and the table of names of other layouts.

python scripts/config_page.py
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from packtrain.train.config import aliases, data, run_config, sections

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"

_HEAD = """# The YAML of a run

```yaml
global_max_length: 8192
model:    {name_or_path: Qwen/Qwen2.5-VL-3B-Instruct}
data:     {kind: planned, path: train.jsonl, val: val.jsonl}
training: {output_dir: runs/demo, num_train_epochs: 2}
```

| `data.kind` | what it is | verbs |
|---|---|---|
| `planned` | every sample is measured, then all are planned ([planning.md](planning.md)) | `run`, `train` |
| `exported` | packs that `packtrain export` wrote ([exporting.md](exporting.md)) | `train` |
| `growing` | chunks that `packtrain produce` may still write ([growing.md](growing.md)) | `train` |
| `stream` | samples packed as they come ([streaming.md](streaming.md)) | `train` |
| `token_budget` | rows by tokens, or of a number of samples ([streaming.md](streaming.md)) | `train` |

Without `kind` the keys say which is meant (`training.sharded_lazy`, `training.packing_mode: streaming`,
`dyn_bsz`), else `planned`.

Unknown keys are refused with the nearest name. A key without effect on the kind of data is one warning; where
something else would be trained without it, it is refused, before anything is measured. Two names for one key
have to agree. Every key, under any of its names, is also an option of `run` and `train`:
`--section.key VALUE`; options of the command line win. VeOmni's section `train` is `training`. Under
`training`, true fields of transformers' `TrainingArguments` pass through, also under the names that
they have in other releases (`warmup_ratio` is a share of steps in all); `logging_steps`, where it is not
set, is 10, and less in short runs, which log about ten rows. Relative paths mean the current
directory first, else the folder of the YAML file. This page is written by `scripts/config_page.py`.
"""

_MORE = {
    "ModelConfig": "Backends: [attention.md](attention.md).",
    "Records": "Sources, shapes and mixtures: [sources.md](sources.md). Waiting ranks: [ranks.md](ranks.md).",
    "Planned": "Packers and plans: [planning.md](planning.md). Steps: [steps.md](steps.md). "
    "Encoding ahead: [resume.md](resume.md#encoding-ahead).",
    "TrainingConfig": "The loss and rows without media: [training.md](training.md).",
}


def texts(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the text under it, of the class itself and of those it inherits from."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not (
            isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__module__.startswith("packtrain")
        ):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
        for node, after in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[node.target.id] = after.value.value  # type: ignore[union-attr,attr-defined]
    return found


def own(model: type[BaseModel]) -> list[str]:
    """Fields that the shared keys of `data` do not have, `kind` and pass-through apart."""
    shared = set(data.Records.model_fields) if model is not data.Records else set()
    return [name for name in model.model_fields if name not in shared | {"kind", "trainer"}]


def shown(value: Any) -> str:
    if isinstance(value, BaseModel) or value in (None, {}, []):
        return "-"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"`{value}`"
        if isinstance(value, str)
        else f"{value:g}"
    )


def table(section: str, model: type[BaseModel]) -> list[str]:
    said = texts(model)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name in own(model):
        held = model.model_fields[name]
        default = "needed" if held.is_required() else shown(held.get_default(call_default_factory=True))
        lines.append(f"| `{section}.{name}` | {default} | {said[name]} |")
    more = _MORE.get(model.__name__)
    return [*lines, "", *([more, ""] if more else [])]


def names() -> list[str]:
    lines = ["| name there | of | here | on |", "|---|---|---|---|"]
    for row in aliases.ALIASES:
        if row.old == row.new:
            continue
        kinds = [kind for kind in data.KINDS if row.holds(kind)]
        on = "all" if row.new == "data.kind" or len(kinds) == len(data.KINDS) else ", ".join(kinds)
        values = ", ".join(f"{shown(a)} = {shown(b)}" for a, b in row.values.items())
        lines.append(
            f"| `{row.old}` | {row.of or 'packtrain'} | `{row.new}`{': ' + values if values else ''} | {on} |"
        )
    return lines


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    parts: list[tuple[str, str, type[BaseModel]]] = [
        ("model", "`model`", sections.ModelConfig),
        ("template", "`template`", sections.TemplateConfig),
        ("data", "`data`: keys of every kind", data.Records),
        *(("data", f"`data.kind: {kind}`", model) for kind, model in data.KINDS.items()),
        ("training", "`training`", sections.TrainingConfig),
        ("report", "`report`", sections.ReportConfig),
        ("export", "`export`", sections.ExportConfig),
    ]
    top = texts(run_config.RunConfig)["global_max_length"]
    lines += [f"`global_max_length` {top}.", ""]
    for section, title, model in parts:
        doc = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines += [f"## {title}", "", doc, "", *table(section, model)]
    lines += ["## Names of other layouts", ""]
    lines += ["Where a name has no effect on the kind of data, it is told in one warning.", "", *names(), ""]
    lines += ["Told to have no effect on any kind:", ""]
    lines += [f"* `{name}`: {why}" for name, why in aliases.IGNORED.items()]
    lines += ["", "Refused, with what to do instead:", ""]
    lines += [f"* `{name}`: {what}" for name, what in aliases.MOVED.items()]
    lines += [
        "* `training.packing_mode: dynamic`: packs are planned before training; set `static` or `streaming`",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
