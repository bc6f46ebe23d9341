"""The support matrix of docs/hosts.md: each cell is a test that passes, or the reason of a refusal.

`python tests/integrations/matrix.py` writes it anew; `test_matrix.py` checks that every test named here
exists, that every reason is one the code gives, and that the page holds this table.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["MATRIX", "PAGE", "cells", "rendered"]

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "hosts.md"
HOSTS = {
    "transformers Trainer": "integrations/test_hf_trainer.py",
    "TRL SFTTrainer": "integrations/test_trl.py",
    "ms-swift": "hosts/test_swift.py",
}
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"

_EQUAL = "test_losses_equal_those_of_the_unpacked_script"
_SWIFT = "test_losses_equal_the_unpacked_host_and_resume_goes_on"
_RESUME = "test_resume_equals_the_uninterrupted_run"

#: feature -> for each host the test that shows it, "!reason" of its refusal, or "" where it has no test.
MATRIX: dict[str, tuple[str, str, str]] = {
    "text, losses as unpacked": (_EQUAL, _EQUAL, _SWIFT),
    "pictures (Qwen-VL), losses as unpacked": (_EQUAL, _EQUAL, _SWIFT),
    "every sample once": (_EQUAL, _EQUAL, _SWIFT),
    "resume": (_RESUME, _RESUME, _SWIFT),
    "LoRA, gradient checkpointing on and off": (
        "test_lora_and_gradient_checkpointing_change_nothing_in_the_equality",
        "",
        "",
    ),
    "exact eval loss": (
        "test_eval_loss_is_the_token_mean_and_the_training_data_alone_decide",
        "",
        "",
    ),
    "two ranks": (
        "test_two_gloo_ranks_train_and_evaluate_as_one_unpacked",
        "",
        "test_two_ranks_lose_no_pack_and_a_failing_row_is_never_replaced",
    ),
    "lengths without encoding": (_EQUAL, _EQUAL, "test_its_template_measures_what_it_encodes"),
    "tokenised before, lengths taken": (_EQUAL, _EQUAL, "test_a_cached_dataset_packs_by_its_lengths"),
    "the host's own packing": ("", "!the rows are packed already, by TRL", ""),
    "batch of several packs": ("!a row is one pack", "!a row is one pack", "!a row is one pack"),
    "group by length": (
        "!packs have equal lengths",
        "!packs have equal lengths",
        "!packs have equal lengths",
    ),
    "label smoothing": ("!its loss is a mean over rows", "!its loss is a mean over rows", ""),
    "streams": ("!it cannot be planned", "!it cannot be planned", "!a plan needs all rows"),
    "splitting long rows": ("", "", "!packs hold whole rows"),
}


def cells() -> list[tuple[str, str, str]]:
    """(feature, host, cell) of every cell."""
    return [
        (feature, host, cell)
        for feature, row in MATRIX.items()
        for host, cell in zip(HOSTS, row, strict=True)
    ]


def rendered() -> str:
    """The table."""
    lines = [f"| | {' | '.join(HOSTS)} |", "|---|---|---|---|"]
    for feature, row in MATRIX.items():
        shown = [f"refused: {cell[1:]}" if cell.startswith("!") else "works" if cell else "–" for cell in row]
        lines.append(f"| {feature} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{rendered()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
