"""`packtrain doctor`: verdict, reason, fix and exit code, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli._app import main
from packtrain.errors import ConfigError
from packtrain.train import versions
from packtrain.train.attention import is_installed
from packtrain.train.doctor import diagnose
from packtrain.train.model import load_model


def _run(capsys: Any, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *arguments])
    return int(stop.value.code or 0), capsys.readouterr().out


def _folder(tmp_path: Path, **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("model", ["tiny:qwen3", "tiny:qwen2_5_vl"])
@pytest.mark.parametrize("attn", ["auto", "varlen", "eager"])
def test_known_setups_are_safe(model: str, attn: str, capsys: Any) -> None:
    code, out = _run(capsys, "--model", model, "--attn", attn, "--json")
    found = json.loads(out)
    assert code == 0 and found["verdict"] == "safe" and found["fix"] == "" and found["reasons"]
    assert found["backend"] == ("sdpa" if attn == "auto" else attn)


def test_unsafe_setups_name_reason_and_fix(tmp_path: Path, capsys: Any) -> None:
    code, out = _run(capsys, "--model", "tiny:qwen2_vl", "--attn", "flex_attention", "--json")
    assert code == 1 and json.loads(out)["verdict"] == "unsafe" and "sdpa" in json.loads(out)["fix"]
    gemma = _folder(tmp_path, model_type="gemma2", attn_logit_softcapping=50.0)
    code, out = _run(capsys, "--model", gemma, "--attn", "varlen", "--json")
    assert code == 1 and "caps scores" in json.loads(out)["reasons"][0]
    assert diagnose(gemma, "eager").verdict == "safe"
    assert diagnose(_folder(tmp_path, model_type="bloom")).verdict == "unsafe"


@pytest.mark.parametrize("attn", ["flash_attention_2", "flash_attention_3"])
def test_a_kernel_that_is_not_installed_is_not_safe(attn: str, capsys: Any) -> None:
    if is_installed(attn):
        pytest.skip(f"{attn} is installed")
    code, out = _run(capsys, "--model", "tiny:qwen3", "--attn", attn, "--json")
    found = json.loads(out)
    assert code == 2 and found["verdict"] == "unknown" and "sdpa" in found["fix"]
    assert "not installed" in found["reasons"][0] and "block mask" not in found["reasons"][1]
    with pytest.raises(ConfigError, match="not available here"):
        load_model("tiny:qwen3", attn=attn)


def test_a_number_type_nobody_knows_is_bad_input(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--model", "tiny:qwen3", "--dtype", "float17"])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "float17" in told and "bfloat16" in told and "hint" in told


def test_unknown_until_proven(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert diagnose(_folder(tmp_path, model_type="mamba", num_hidden_layers=1)).verdict == "unknown"
    monkeypatch.setattr(versions, "TESTED", {"torch": ("1.0",)})
    assert "(newer: tested are 1.0 to 1.0): the start-up proof decides" in diagnose("tiny:qwen3").reasons[0]
    code, _ = _run(capsys, "--model", "tiny:qwen3", "--json")
    assert code == 2
    code, out = _run(capsys, "--model", "tiny:qwen3", "--attn", "varlen", "--prove", "--json")
    found = json.loads(out)
    assert code == 0 and found["verdict"] == "safe" and "comparisons hold" in found["proof"]


def test_a_leak_found_by_the_proof_is_unsafe(monkeypatch: Any, capsys: Any) -> None:
    from packtrain.train import varlen
    from packtrain.train.segments import of_lengths

    real, attend = varlen._alone, varlen.attend

    def everything(query: Any, key: Any, value: Any, segments: Any, **kwargs: Any) -> Any:
        return attend(query, key, value, of_lengths((segments.tokens,), query.device), **kwargs)

    monkeypatch.setattr(varlen, "_alone", lambda q, k, v, **kw: real(q, k, v, **{**kw, "causal": False}))
    assert diagnose("tiny:qwen3", "varlen", prove=True).verdict == "safe"  # wrong, yet inside each sample
    monkeypatch.setattr(varlen, "attend", everything)
    found = diagnose("tiny:qwen3", "varlen", prove=True)
    assert found.verdict == "unsafe" and "layers.0" in found.reasons[0]


def test_bad_input(capsys: Any) -> None:
    assert _run(capsys, "--model", "tiny:qwen3", "--attn", "magic")[0] == 2
    assert _run(capsys, "--model", "./nowhere")[0] == 2
    code, out = _run(capsys, "--model", "tiny:qwen3")
    assert code == 0 and "safe" in out
