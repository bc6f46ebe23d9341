"""Write the support table of docs/hosts.md from docs/hosts_matrix.json, which the tests of the hosts record.

Usage: python scripts/hosts_matrix.py   (a test fails when the page is not up to date)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "hosts.md"
RECORD = REPOSITORY / "docs" / "hosts_matrix.json"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"
BEGIN_KINDS, END_KINDS = "<!-- kinds: begin -->\n", "<!-- kinds: end -->\n"
OWN = "own trainer"
#: Kinds of packs, as the first column of their table names them.
KINDS = {
    "planned": "`PackedDataset` over a plan",
    "exported": "`open_packs(folder)`",
    "growing": "`LazyShardedDataset(folder)`",
    "stream": "`StreamingPackedDataset`",
    "token_budget": "`TokenBudgetDataset`",
}
HOSTS = (
    *("transformers Trainer", "TRL SFTTrainer", "ms-swift", "LLaMA-Factory", "axolotl", "VeOmni"),
    *("unsloth", "torchtitan", "NeMo Automodel", "accelerate", "Ray Train", "Lightning"),
)
#: Those of them that take packs which are made already.
TAKE_PACKS = HOSTS[:3]
#: The rows of the table, in order.
FEATURES = (
    "text, losses as unpacked",
    "pictures (Qwen-VL), losses as unpacked",
    "every sample once",
    "resume",
    "LoRA, gradient checkpointing on and off",
    "exact eval loss",
    "best model at the end",
    "two ranks",
    "metrics of the user over rows",
    "model of no listed family",
    "lengths without encoding",
    "tokenised before, lengths taken",
    "the host's own packing",
    "batch of several packs",
    "group by length",
    "label smoothing",
    "noise on embeddings (NEFTune)",
    "streams",
    "splitting long rows",
    "attention that reads across samples",
    "attention not shown to isolate",
    "layers that carry a state",
    "padding_free beside packs",
    "batch size found by trying",
    "loss averaged per rank",
    "several GPUs in one process",
    "packing in several processes",
    "sequence parallel",
    "preference training",
    "other tasks than causal language modelling",
)


def record() -> dict[str, dict[str, dict[str, Any]]]:
    """host -> feature -> what its test showed."""
    held: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text(encoding="utf-8"))
    known = {*FEATURES, *(f"packs: {kind}" for kind in KINDS)}
    unknown = {feature for row in held.values() for feature in row} - known
    if unknown or set(held) - {OWN, *HOSTS}:
        raise SystemExit(f"{RECORD.name} holds {sorted(unknown)} of {sorted(held)}: not in the table")
    return held


def rendered() -> str:
    """The table."""
    held = record()
    lines = [f"| | {' | '.join(HOSTS)} |", f"|{'---|' * (len(HOSTS) + 1)}"]
    for feature in FEATURES:
        cells = [held.get(host, {}).get(feature) for host in HOSTS]
        lines.append(f"| {feature} | {' | '.join(map(_shown, cells))} |")
    return "\n".join(lines) + "\n"


def rendered_kinds() -> str:
    """The table of modes and hosts."""
    held, hosts = record(), (OWN, *TAKE_PACKS)
    lines = [f"| packs | {' | '.join(hosts)} |", f"|{'---|' * (len(hosts) + 1)}"]
    for kind, name in KINDS.items():
        cells = [held.get(host, {}).get(f"packs: {kind}") for host in hosts]
        lines.append(f"| {kind}: {name} | {' | '.join(map(_shown, cells))} |")
    return "\n".join(lines) + "\n"


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    return f"refused: {cell['reason']}" if cell["outcome"] == "refused" else "works"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for begin, end, table in ((BEGIN, END, rendered()), (BEGIN_KINDS, END_KINDS, rendered_kinds())):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
