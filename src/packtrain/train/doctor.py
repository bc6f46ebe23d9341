"""Diagnosis of a model and an attention backend before any training: safe, unsafe or unknown.

    diagnosis = diagnose("tiny:qwen2_5_vl", "auto");  diagnosis.verdict, diagnosis.reasons, diagnosis.fix

    safe      known to isolate on this backend and these versions, or just proven
    unsafe    refused, or the proof found a leak
    unknown   nobody has shown either; the start-up proof of `train` decides

Without `prove` nothing is loaded but the config. With it the model is loaded and random samples are run
packed, alone and tampered; text only, since random media say nothing about text layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..collate.model_traits import attention_of, family_for, state_layers
from ..errors import IsolationError, counted
from ..template import ensure_torchvision
from .attention import check_causal, choose_backend, is_installed, known
from .culprit import check_mask
from .live import any_row
from .model import load_model, read_config
from .proof import prove_isolation
from .varlen import VARLEN, kernel_available
from .versions import missing_features, standings, told
from .weights import outline

_PROVE = "run packtrain doctor with --prove, or keep the start-up proof on"


@dataclass
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        model: as it was named.
        model_type: of its config.
        backend: what `attn` resolves to here.
        family: its family, or None.
        verdict: "safe", "unsafe" or "unknown".
        reasons: why, most important first.
        fix: what to do; empty when nothing has to be done.
        proof: what the proof showed, or None when none was run.
        versions: installed packages that isolation rests on: tested, newer, older.
    """

    model: str
    model_type: str
    backend: str
    family: str | None
    verdict: str = "safe"
    reasons: list[str] = field(default_factory=list)
    fix: str = ""
    proof: str | None = None
    versions: list[str] = field(default_factory=lambda: list(standings()))

    def settle(self, verdict: str, reason: str, fix: str | None = None) -> Diagnosis:
        """Another verdict with its reason in front."""
        self.verdict, self.fix = verdict, fix or ""
        self.reasons.insert(0, reason)
        return self


def diagnose(model: str, attn: str = "auto", *, dtype: str = "auto", prove: bool = False) -> Diagnosis:
    """Would packed samples stay apart?

    Args:
        model: folder, hub name or `tiny:…`.
        attn: a backend of `model.attn`.
        dtype: the model's, as `model.dtype`.
        prove: load the model and run the isolation proof on random text.

    Raises:
        ConfigError: the model cannot be found or loaded.
    """
    shimmed = ensure_torchvision()
    config = read_config(model)
    family = family_for(config)
    found = Diagnosis(model, str(config.model_type), attn, None if family is None else family.name)
    if shimmed:
        found.versions.append(
            "torchvision is built for another torch: import packtrain before transformers, or install "
            "the torchvision of this torch build"
        )
    found.versions += missing_features()
    try:
        found.backend = choose_backend(config, attn, dtype=dtype)
        _judge(found, config)
    except IsolationError as error:
        return found.settle("unsafe", error.message, error.hint)
    if prove and found.verdict != "unsafe":
        _prove(found, model, attn, dtype)
    return found


def _judge(found: Diagnosis, config: Any) -> None:
    """From the config alone; raises what `train` would refuse."""
    backend, family = found.backend, family_for(config)
    states = state_layers(config)
    check_causal(config)
    if states:
        found.settle(
            "unknown",
            f"layers that carry a state ({', '.join(states)}) run segment by segment; the proof decides",
            _PROVE,
        )
        return
    if family is None:
        check_mask(outline(config), backend, found.model_type)
        found.settle("unknown", f"no family declares {found.model_type}", _PROVE)
        return
    known(config, backend)
    if backend == VARLEN:
        found.reasons.append("segments come from the restarting text positions themselves")
        if not kernel_available():
            found.reasons.append("no kernel here: every segment is computed by itself (exact, slower)")
    else:
        found.reasons.append(
            "its kernel takes segments from cu_seq_lens or restarting positions"
            if backend.startswith("flash_")
            else "transformers makes a block mask from restarting text positions"
        )
    if not is_installed(backend):
        found.settle("unknown", f"{backend} is not installed here", "install it, or use model.attn: sdpa")
    elif told():
        found.settle("unknown", told(), "run packtrain doctor with --prove; the start-up proof decides")


def _prove(found: Diagnosis, name: str, attn: str, dtype: str) -> None:
    model = load_model(name, attn=attn, dtype=dtype)
    if torch.cuda.is_available():
        model = model.to("cuda")
    backend = attention_of(model) or "eager"
    report = prove_isolation(model, any_row(model), (backend,), gradients=False)
    found.backend = backend
    if report.ok:
        found.proof = (
            f"{counted(len(report.rows), 'comparisons')} hold (packed against alone, tampered bitwise)"
        )
        found.settle("safe", f"proven on this machine: {found.proof}")
    else:
        found.proof = report.first_leak
        found.settle("unsafe", f"packed samples read each other: {report.first_leak}", "use model.attn: sdpa")
