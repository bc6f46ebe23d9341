"""What stands in a report, as plain values: headline figures, ledger by reason, configuration text.

Texts are left as they are; the page escapes them. Lists are capped here, with the count of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import counted

Points = Sequence[Sequence[float]]

_ROWS = 40  # ledger rows shown of one reason
_TEXT = 400  # characters shown of one ledger detail
_SECRET = ("hub_token", "access_token", "auth_token", "api_key", "secret", "password", "credentials")


def headline(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """The figures at the top: name, value, and one line that explains it."""
    if "stats" not in figures:
        return _of_training(figures)
    stats, slots, cap = figures["stats"], figures["slots"], figures["pack_length"]
    packs, packed, left = (stats[name] for name in ("packs", "samples", "dropped"))
    verdict = f"proven bound {stats['bound']:,}, gap {percent(stats['gap'], 2)}"
    if stats["optimal"]:
        verdict = f"provably the fewest: bound {stats['bound']:,}, gap 0"
    tiles = _over_long_tile(stats, cap)
    slots_of = f"{stats['tokens']:,} real tokens in {stats['slots']:,} slots"
    if "steps" in stats:  # steps of samples: their packs are as many as the largest step needs
        asked = counted(stats["samples_per_step"], "samples")
        slots_of += f"; every step of {asked} takes {counted(stats['packs_per_step'], 'packs')}, full or not"
    saved = f"of the slots of padded batches; {percent(slots['saved_capped'])} of one padded sample a row; "
    saved, mean = saved + rows_words(slots), stats["tokens"] // max(1, packs)
    tiles += [
        ("Samples", f"{packed:,}", f"{stats['read']:,} read = {packed:,} packed + {left:,} in the ledger"),
        ("Packs", f"{packs:,}", verdict),
        ("Packing efficiency", percent(stats["efficiency"]), slots_of),
        ("Padding saved", percent(slots["saved_batched"]), saved),
        ("Samples per pack", f"{stats['samples_per_pack']:,.2f}", f"{mean:,} tokens in a pack of {cap:,}"),
    ]
    return [{"name": name, "value": value, "note": note} for name, value, note in tiles]


def _of_training(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Those of a run whose packs were not planned."""
    metrics, lines, left = figures["metrics"], figures["curves"], sum(figures["ledger"].values())
    told = figures["consumed"]
    tiles = _of_packs(told) if told else []
    if "steps" in metrics:
        tiles.append(("Optimizer steps", f"{int(metrics['steps']):,}", ""))
    for name in sorted(key for key in lines if key.endswith("loss")):
        title = "Training loss" if name == "loss" else name.replace("_", " ").capitalize()
        tiles.append((title, f"{lines[name][-1][1]:.4f}", loss_words({name: lines[name]})))
    if speeds := [value for _, value in lines.get("tokens_per_s", ())]:
        tiles.append(("Throughput", f"{np.median(speeds):,.0f}", "tokens a second, median of the log"))
    note = "the ledger below names them" if left else "every sample that was read is in a pack"
    tiles.append(("Left out", f"{left:,}", note))
    return [{"name": name, "value": value, "note": note} for name, value, note in tiles]


def _of_packs(told: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Tiles of the packs that a run consumed."""
    cap, packs = told["pack_length"], told["packs"]
    slots = f"{told['tokens']:,} real tokens in {told['slots']:,} slots"
    return [
        *_over_long_tile(told, cap),
        ("Samples trained", f"{told['samples']:,}", "handed to the model, each time that they were"),
        ("Packs trained", f"{packs:,}", f"{told['tokens'] // max(1, packs):,} tokens in a pack of {cap:,}"),
        ("Packing efficiency", percent(told["efficiency"]), slots),
        ("Samples per pack", f"{told['samples_per_pack']:,.2f}", "mean of the packs trained"),
    ]


def _over_long_tile(told: Mapping[str, Any], cap: int) -> list[tuple[str, str, str]]:
    if not told["over_long_packs"]:
        return []
    longest = f"exceed {cap:,} tokens, each one long sample; longest {told['longest_pack']:,}"
    return [("Over-long packs", f"{told['over_long_packs']:,} of {told['packs']:,}", longest)]


def over_long_words(told: Mapping[str, Any], cap: int) -> str:
    """How many packs are one sample longer than a pack; empty where none is."""
    if not told["over_long_packs"]:
        return ""
    over, packs = f"{told['over_long_packs']:,}", counted(told["packs"], "packs")
    return f"{over} of {packs} exceed {cap:,} tokens, longest {told['longest_pack']:,}"


def consumed_words(told: Mapping[str, Any] | None, planned: bool) -> list[tuple[str, str]]:
    """The lines of what a run consumed, as a plan has them: over-long first.

    Args:
        planned: a plan tells the rest.
    """
    if not told:
        return []
    cap, packs = told["pack_length"], counted(told["packs"], "packs")
    words = f"{counted(told['samples'], 'samples')} in {packs}, {counted(told['tokens'], 'tokens')}"
    lines = [("trained on", words)]
    if planned:
        return lines
    if long := over_long_words(told, cap):
        lines.insert(0, ("over-long", long))
    return [
        *lines,
        ("efficiency", f"{told['efficiency']:.2%} of slots are real tokens, packs of {cap:,}"),
        ("samples per pack", f"{told['samples_per_pack']:.2f}"),
    ]


def trained_words(figures: Mapping[str, Any]) -> list[str]:
    """What was trained on, where a plan tells no more than its own packs, and the isolation proof."""
    told = consumed_words(figures["consumed"], "stats" in figures) if "stats" in figures else []
    lines = [f"Trained on {words}." for _, words in told]
    if figures["proof"] is not None:
        lines.append(f"Isolation: proven before training ({counted(figures['proof'], 'comparisons')}).")
    return lines


def rows_words(told: Mapping[str, Any]) -> str:
    """Whether rows of packs are padded, and to what."""
    if told["padded_to"] is None:
        return "rows are not padded"
    return f"rows are padded to {told['padded_to']:,} tokens"


def slot_rows(slots: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The three layouts of the same samples: name, note, and widths in percent of the largest."""
    batch = f"one sample a row in file order, batches of {slots['batch']:,} padded to their longest"
    named = (
        ("one sample a row, padded to the pack length", "capped"),
        (batch, "batched"),
        (f"packed, {rows_words(slots)}", "packed"),
    )
    filled = f"; padded to the pack length: {slots['filled']:,} slots"
    most = max(1, *(slots[key] for _, key in named))
    return [
        {
            "name": name,
            "note": f"{slots[key]:,} slots, {percent(1 - slots['real'] / max(1, slots[key]))} padding"
            + (filled if key == "packed" and slots["padded_to"] is None else ""),
            "width": f"{100 * slots[key] / most:.2f}%",
            "real": f"{100 * slots['real'] / most:.2f}%",
        }
        for name, key in named
    ]


def ledger_groups(
    counts_by_reason: Mapping[str, int], rows: Iterable[Mapping[str, Any]], record: Callable[[Any], str]
) -> list[dict[str, Any]]:
    """Ledger by reason, largest first: count, the first rows, and how many more there are.

    Args:
        counts_by_reason: the plan's own counts, whatever part of the rows was handed over.
        record: the text of a sample's record; "" where it is not at hand.
    """
    shown: dict[str, list[dict[str, str]]] = {}
    seen: dict[str, int] = {}
    for row in rows:
        reason = str(row.get("reason", "unknown"))
        seen[reason] = seen.get(reason, 0) + 1
        if seen[reason] <= _ROWS:
            cells = {key: short(row.get(key)) for key in ("id", "where", "detail")}
            cells["record"] = record(row["id"])
            shown.setdefault(reason, []).append(cells)
    counts = dict(counts_by_reason)
    for reason, count in seen.items():
        counts[reason] = max(count, counts.get(reason, 0))
    groups = []
    for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        mine = shown.get(reason, [])
        groups.append({"reason": reason, "count": count, "rows": mine, "rest": count - len(mine)})
    return groups


def loss_words(lines: Mapping[str, Points]) -> str:
    """`loss 7.62 to 3.41 (-55.2 %) over 180 steps`, of the first line with points."""
    for name, points in lines.items():
        if name.endswith("loss") and points and points[0][1]:
            (_, first), (step, last) = points[0], points[-1]
            change = 100 * (last - first) / first
            word = "train loss" if name == "loss" else name.replace("_", " ")
            if len(points) == 1:
                return f"{word} {first:.3f} at step {step:,.0f}"
            return f"{word} {first:.3f} to {last:.3f} ({change:+.1f} %) over {step:,.0f} steps"
    return ""


def speed_words(lines: Mapping[str, Points]) -> str:
    """Seconds of a step and real tokens a second: medians of a log; empty where it has none."""
    seconds, tokens = ([value for _, value in lines.get(name, ())] for name in ("step_s", "tokens_per_s"))
    if not seconds or not tokens:
        return ""
    return f"{np.median(seconds):.3g} s, {np.median(tokens):,.0f} tokens a second (medians)"


def plan_words(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of a validation plan, as a training plan has them: over-long first, what is left out last.

    Args:
        told: as in `Runtime.eval`: of one plan, or of several by name; of an older version: no lines.
    """
    if not isinstance(told.get("packs"), int):
        sets = {name: one for name, one in told.items() if isinstance(one, Mapping) and "packs" in one}
        return [(f"{line} ({name})", words) for name, one in sets.items() for line, words in plan_words(one)]
    packs, cap = counted(told["packs"], "packs"), told["packing_length"]
    left = ", ".join(f"{reason} {count:,}" for reason, count in told["dropped_by_reason"].items())
    lines = [
        ("over-long", over_long_words(told, cap)),
        ("samples", f"{told['samples']:,} of {told['read']:,} read"),
        ("packs", f"{packs} of {cap:,} tokens, {told['fill']:.2%} of slots are real tokens"),
        ("left out", f"{counted(told['dropped'], 'samples')}: {left}" if told["dropped"] else ""),
    ]
    return [(name, words) for name, words in lines if words]


def step_rows(steps: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Forecast against measured, and balance before against after: name, and two figures."""
    rows: list[tuple[str, ...]] = []
    if told := steps.get("forecast"):
        guess = f"{told['step_s']:.3g} forecast ({told['profile'] or 'scaled to this run'})"
        tokens = (f"{told[key]:,.0f}" for key in ("tokens_per_step", "measured_tokens_per_step"))
        rows += [
            ("seconds a step (medians)", guess, f"{told['measured_step_s']:.3g} measured"),
            ("median deviation of a step", percent(told["deviation"]), ""),
            ("tokens a step", f"{next(tokens)} forecast", f"{next(tokens)} measured"),
        ]
    if told := steps.get("balance"):
        mode = f"balance {told['mode']}" if told["mode"] else "no balance"
        of = f"{counted(told['world_size'], 'ranks')} x {counted(told['grad_accum'], 'packs')}"
        before, after = told["max_over_mean_before"], told["max_over_mean"]
        figures = (f"{before:.3f} in plan order", f"{after:.3f} with {mode}")
        rows.append((f"slowest rank / mean, {of}", *figures))
    return rows


def comparison_rows(comparison: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Packed against unpacked loss: rows, packed minus unpacked, and whether it is within `tolerance`."""
    if not comparison:
        return None
    values = dict(comparison)
    tolerance, difference = values.get("tolerance"), values.get("difference")
    if difference is None and {"packed", "unpacked"} <= values.keys():
        difference = values["difference"] = float(values["packed"]) - float(values["unpacked"])
    holds = None
    if difference is not None and tolerance is not None:
        holds = abs(float(difference)) <= float(tolerance)
    rows = [(str(name).replace("_", " "), _figure(value)) for name, value in values.items()]
    return {"rows": rows, "holds": holds}


def buckets(figures: Mapping[str, Any]) -> dict[str, Sequence[tuple[str, ...]]]:
    """Rows of the length classes against the pack length, and of the phases of a `diverse` plan."""
    classes = [
        (row["class"], f"{row['samples']:,}", f"{row['tokens']:,}", percent(row["share"]))
        for row in figures["classes"]
    ]
    phases = [
        (name, f"{row['packs']:,}", f"{row['samples']:,}", percent(row["fill"]))
        for name, row in figures["phases"].items()
    ]
    return {"classes": classes, "phases": phases}


def facts(plan: Any, stats: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of small print: what makes the plan, and what vouches for it."""
    if plan is None:
        return []
    spec = plan.spec.to_dict()
    bound = plan.certificate
    made = [(key, _figure(value)) for key, value in sorted(spec.items())]
    proof = [
        ("plan checksum", str(plan.checksum)),
        ("lengths digest", str(plan.lengths_digest)),
        ("packer", str(plan.packer)),
        ("lower bound", f"{counted(int(bound.bound), 'packs')} ({bound.name})"),
        ("gap to the bound", percent(bound.gap, 4)),
        ("proven optimal", "yes" if bound.optimal else "no"),
    ]
    figures = [(str(key), _figure(value)) for key, value in sorted(stats.items())]
    return [("Checksums and certificate", proof), ("Plan spec", made), ("Statistics", figures)]


def config_text(config: Any) -> str:
    """The run's configuration as YAML; values of keys that name a secret are masked."""
    if config is None:
        return ""
    import yaml

    return str(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=100))


def spread(told: Mapping[str, float], unit: str) -> str:
    """Least, median, 95th percentile and largest."""
    if not told:
        return "none"
    return (
        f"least {told['least']:,}, median {told['median']:,}, 95 % at most {told['p95']:,}, "
        f"largest {told['largest']:,} {unit}"
    )


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


def short(value: Any, most: int = _TEXT) -> str:
    """The beginning of a long text, and how much of it is left."""
    text = "" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
