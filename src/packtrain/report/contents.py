"""What stands in a report, as plain values: headline figures, ledger by reason, configuration text.

Texts are left as they are; the page escapes them. Lists are capped here, with the count of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..planning.distribution import distribution, phases_of
from ..planning.lengths import STATUS_OK
from .numbers import Slots
from .plots import Points

__all__ = [
    "buckets",
    "comparison_rows",
    "config_text",
    "curves",
    "facts",
    "headline",
    "ledger_groups",
    "loss_words",
    "spread",
]

_ROWS = 40  # ledger rows shown of one reason
_TEXT = 400  # characters shown of one ledger detail
_SECRET = ("hub_token", "access_token", "auth_token", "api_key", "secret", "password", "credentials")


def headline(plan: Any, slots: Slots, read: int) -> list[dict[str, str]]:
    """The figures at the top: name, value, and one line that explains it."""
    packs, packed, left = len(plan.offsets) - 1, len(plan.indices), len(plan.ledger.ids)
    proven = plan.certificate
    verdict = f"proven bound {int(proven.bound):,}, gap {percent(proven.gap, 2)}"
    if proven.optimal:
        verdict = f"provably the fewest: bound {int(proven.bound):,}, gap 0"
    cap = int(plan.spec.pack_length)
    over = int(np.count_nonzero(np.asarray(plan.pack_tokens) > cap))
    cap_saved = percent(slots.saved(slots.capped))
    tiles = [("Over-long packs", f"{over:,} of {packs:,}", _longest(plan, cap))] if over else []
    tiles += [
        ("Samples", f"{packed:,}", f"{read:,} read = {packed:,} packed + {left:,} in the ledger"),
        ("Packs", f"{packs:,}", verdict),
        (
            "Packing efficiency",
            percent(slots.real / slots.packed if slots.packed else 0.0),
            f"{slots.real:,} real tokens in {slots.packed:,} slots",
        ),
        (
            "Padding saved",
            percent(slots.saved(slots.batched)),
            f"of the slots of padded batches; {cap_saved} against rows padded to the cap",
        ),
        (
            "Samples per pack",
            f"{packed / packs if packs else 0:,.2f}",
            f"{slots.real // packs if packs else 0:,} tokens in a pack of {cap:,}",
        ),
    ]
    return [{"name": name, "value": value, "note": note} for name, value, note in tiles]


def _longest(plan: Any, cap: int) -> str:
    return f"exceed {cap:,} tokens, each one long sample; longest {int(np.max(plan.pack_tokens)):,}"


def ledger_groups(plan: Any, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ledger by reason, largest first: count, the first rows, and how many more there are.

    The counts are the plan's own, whatever part of the rows was handed over.
    """
    shown: dict[str, list[dict[str, str]]] = {}
    seen: dict[str, int] = {}
    for row in rows:
        reason = str(row.get("reason", "unknown"))
        seen[reason] = seen.get(reason, 0) + 1
        if seen[reason] <= _ROWS:
            cells = {key: _short(row.get(key)) for key in ("id", "where", "detail")}
            shown.setdefault(reason, []).append(cells)
    counts = {str(reason): int(count) for reason, count in plan.ledger.counts().items()}
    for reason, count in seen.items():
        counts[reason] = max(count, counts.get(reason, 0))
    groups = []
    for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        mine = shown.get(reason, [])
        groups.append({"reason": reason, "count": count, "rows": mine, "rest": count - len(mine)})
    return groups


def curves(loss: Any) -> dict[str, Points]:
    """Loss as lines by name: a mapping `name -> points`, or the points of `train` alone.

    A point is a pair (step, value), or a Trainer log entry with `step` and `loss` or `eval_loss`.
    """
    if loss is None:
        return {}
    if isinstance(loss, Mapping):
        named = {str(name): [(float(x), float(y)) for x, y in points] for name, points in loss.items()}
        return {name: points for name, points in named.items() if points}
    lines: dict[str, list[tuple[float, float]]] = {}
    for entry in loss:
        if isinstance(entry, Mapping):
            for key, name in (("loss", "train"), ("eval_loss", "eval")):
                if key in entry and "step" in entry:
                    lines.setdefault(name, []).append((float(entry["step"]), float(entry[key])))
        else:
            step, value = entry
            lines.setdefault("train", []).append((float(step), float(value)))
    return dict(lines)


def loss_words(lines: Mapping[str, Points]) -> str:
    """`7.62 to 3.41 (-55.2 %) over 180 steps`, of the first line that has two finite points."""
    for name, points in lines.items():
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        if len(finite) >= 2 and finite[0][1]:
            (_, first), (step, last) = finite[0], finite[-1]
            change = 100 * (last - first) / first
            return f"{name} loss {first:.3f} to {last:.3f} ({change:+.1f} %) over {step:,.0f} steps"
    return ""


def comparison_rows(comparison: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Packed against unpacked loss: rows, the difference, and whether it is within `tolerance`."""
    if not comparison:
        return None
    values = dict(comparison)
    tolerance = values.get("tolerance")
    difference = values.get("difference")
    if difference is None and {"packed", "unpacked"} <= values.keys():
        difference = values["difference"] = abs(float(values["packed"]) - float(values["unpacked"]))
    holds = None
    if difference is not None and tolerance is not None:
        holds = abs(float(difference)) <= float(tolerance)
    rows = [(str(name).replace("_", " "), _figure(value)) for name, value in values.items()]
    return {"rows": rows, "holds": holds}


def buckets(plan: Any, lengths: Any) -> dict[str, Sequence[tuple[str, ...]]]:
    """Rows of the length classes against the pack length, and of the phases of a `diverse` plan."""
    usable = np.asarray(lengths.tokens)[np.asarray(lengths.status) == STATUS_OK]
    classes = [
        (row["class"], f"{row['samples']:,}", f"{row['tokens']:,}", percent(row["share"]))
        for row in distribution(usable, int(plan.spec.pack_length))["classes"]
    ]
    phases = [
        (name, f"{row['packs']:,}", f"{row['samples']:,}", percent(row["fill"]))
        for name, row in phases_of(plan).items()
    ]
    return {"classes": classes, "phases": phases}


def facts(plan: Any, stats: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of small print: what makes the plan, and what vouches for it."""
    spec = plan.spec.to_dict()
    bound = plan.certificate
    made = [(key, _figure(value)) for key, value in sorted(spec.items())]
    proof = [
        ("plan checksum", str(plan.checksum)),
        ("lengths digest", str(plan.lengths_digest)),
        ("packer", str(plan.packer)),
        ("lower bound", f"{int(bound.bound):,} packs ({bound.name})"),
        ("gap to the bound", percent(bound.gap, 4)),
        ("proven optimal", "yes" if bound.optimal else "no"),
    ]
    counted = [(str(key), _figure(value)) for key, value in sorted(stats.items())]
    return [("Checksums and certificate", proof), ("Plan spec", made), ("Statistics", counted)]


def config_text(config: Any) -> str:
    """The run's configuration as YAML; values of keys that name a secret are masked."""
    if config is None:
        return ""
    import yaml

    return str(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=100))


def spread(values: NDArray[Any], unit: str) -> str:
    """Least, median, 95th percentile and largest of whole numbers."""
    if not len(values):
        return "none"
    order = np.sort(np.asarray(values), kind="stable")
    last = len(order) - 1
    least, middle, high, most = (int(order[k]) for k in (0, last // 2, last * 95 // 100, last))
    return f"least {least:,}, median {middle:,}, 95 % at most {high:,}, largest {most:,} {unit}"


def percent(share: float, digits: int = 1) -> str:
    """`97.4 %`; a share below 1 is never rounded up to 100."""
    shown = f"{100 * share:.{digits}f}"
    if float(shown) == 100 and share < 1:
        shown = f"{100 - 10.0**-digits:.{digits}f}"
    return f"{shown} %"


def _plain(value: Any, key: str = "") -> Any:
    """Plain YAML values; keys such as `hub_token` are masked, `pad_token` is not."""
    if isinstance(value, str) and (key.lower() == "token" or key.lower().endswith(_SECRET)):
        return "***"
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {str(name): _plain(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _figure(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3e}" if value and abs(value) < 1e-3 else f"{value:,.8g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_figure(v)}" for k, v in value.items()) or "none"
    return str(value)


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} … ({len(text) - _TEXT:,} more characters)"
