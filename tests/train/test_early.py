"""What is known before measuring is told then: by a run, by a dry run, in the same words."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packtrain.errors import ConfigError, ForeignArtefactError, MissingExtraError, PacktrainError
from packtrain.pipeline.run import dry_run, run, run_export
from packtrain.template import ensure_torchvision
from packtrain.testing.tiny import TINY_MODELS, tiny_config, tiny_model
from packtrain.train import versions
from packtrain.train.config import load_config
from packtrain.train.early import check_early, check_match, memory_floor

ensure_torchvision()


def model_folder(tmp_path: Path, *, weights: bool = True, **change: Any) -> str:
    config = tiny_config("tiny:qwen3")
    for name, value in {"vocab_size": 1024, **change}.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path / "model")
    if weights:
        (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
    return str(tmp_path / "model")


def no_model(values: dict[str, Any], tmp_path: Path) -> None:
    values["model"]["name_or_path"] = str(tmp_path / "nowhere")


def small_vocabulary(values: dict[str, Any], tmp_path: Path) -> None:
    values["model"]["name_or_path"] = model_folder(tmp_path, vocab_size=64)


def no_weights(values: dict[str, Any], tmp_path: Path) -> None:
    values["model"]["name_or_path"] = model_folder(tmp_path, weights=False)


def refused_backend(values: dict[str, Any], tmp_path: Path) -> None:
    values["model"] = {"name_or_path": "tiny:qwen2_vl", "attn": "flex_attention"}


def absent_kernel(values: dict[str, Any], tmp_path: Path) -> None:
    values["model"]["attn"] = "flash_attention_3"


def another_family(values: dict[str, Any], tmp_path: Path) -> None:
    values["model"]["name_or_path"] = "tiny:llava_1_5"


def no_such_optimizer(values: dict[str, Any], tmp_path: Path) -> None:
    values["training"]["optim"] = "no_such_optimizer"


def folder_is_a_file(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    values["training"]["output_dir"] = str(tmp_path / "taken")


def folder_of_the_kernel(values: dict[str, Any], tmp_path: Path) -> None:
    values["training"]["output_dir"] = "/proc/packtrain"


def training(**keys: Any) -> Callable[[dict[str, Any], Path], None]:
    """Keys of TrainingArguments and ours."""

    def change(values: dict[str, Any], tmp_path: Path) -> None:
        values["training"] |= keys

    change.__name__ = "-".join(keys)
    return change


def cache_that_cannot_be(values: dict[str, Any], tmp_path: Path) -> None:
    values["data"] = {"cache": {"root_dir": "/proc/packtrain"}}


def real_model(tmp_path: Path, **change: Any) -> Path:
    """A whole model folder, and a config that was changed afterwards."""
    import transformers

    config = tiny_config("tiny:qwen3")
    config.vocab_size = 1024
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return tmp_path / "model"


def model_that_is(
    name: str, spoil: Callable[[Path], object] = lambda folder: None, **change: Any
) -> Callable[[dict[str, Any], Path], None]:
    """A real folder with its config changed or a file spoiled."""

    def fault(values: dict[str, Any], tmp_path: Path) -> None:
        folder = real_model(tmp_path, **change)
        spoil(folder)
        values["model"]["name_or_path"] = str(folder)

    fault.__name__ = name
    return fault


def cut(folder: Path) -> None:
    held = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(held[: len(held) // 2])


def without_a_part(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def model_of(name: str, kind: str, **settings: Any) -> Callable[[dict[str, Any], Path], None]:
    """A config of another class, with weights that nobody reads."""

    def fault(values: dict[str, Any], tmp_path: Path) -> None:
        import transformers

        getattr(transformers, kind)(vocab_size=1024, **settings).save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
        values["model"]["name_or_path"] = str(tmp_path / "model")

    fault.__name__ = name
    return fault


def name_taken(name: str, is_folder: bool) -> Callable[[dict[str, Any], Path], None]:
    """A file where the run writes a folder, or the other way round."""

    def fault(values: dict[str, Any], tmp_path: Path) -> None:
        path = Path(values["training"]["output_dir"]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if is_folder else path.write_text("")

    fault.__name__ = f"taken-{name}"
    return fault


def checkpoint(name: str, **files: str) -> Callable[[dict[str, Any], Path], None]:
    """A folder to resume from that holds just this."""

    def fault(values: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "saved").mkdir()
        for file, text in files.items():
            (tmp_path / "saved" / file.replace("_dot_", ".")).write_text(text)
        values["training"]["resume_from_checkpoint"] = str(tmp_path / "saved")

    fault.__name__ = name
    return fault


def cache_of_packs_that_cannot_be(values: dict[str, Any], tmp_path: Path) -> None:
    values["data"] = {"encode_cache": "/proc/packtrain"}


def metric_that_nobody_gives(values: dict[str, Any], tmp_path: Path) -> None:
    values["custom"]["val_jsonl"] = values["custom"]["train_jsonl"]
    values["training"] |= {"save_strategy": "best", "metric_for_best_model": "nope"}


def validation_that_is_gone(values: dict[str, Any], tmp_path: Path) -> None:
    values["custom"]["val_jsonl"] = str(tmp_path / "gone.jsonl")


REFUSALS: list[tuple[Callable[[dict[str, Any], Path], None], str]] = [
    (no_model, "does not exist"),
    (small_vocabulary, "qwen3 has 64 embeddings"),
    (no_weights, "holds no weights"),
    (refused_backend, "cannot run packed on flex_attention"),
    (absent_kernel, "flash_attention_3 is not installed here"),
    (another_family, "tokenizer has no"),
    (no_such_optimizer, "no_such_optimizer"),
    (folder_is_a_file, "training.output_dir"),
    (folder_of_the_kernel, "training.output_dir"),
    (cache_that_cannot_be, "data.cache.root_dir"),
    (validation_that_is_gone, "gone.jsonl does not exist"),
    (training(bf16=True, fp16=True), "At most one of fp16 and bf16"),
    (training(lr_scheduler_type="zigzag"), "zigzag is not a valid"),
    (training(fsdp="full_shardx"), "full_shardx"),
    (training(deepspeed="gone.json"), "deepspeed"),
    (training(report_to="nobody"), "nobody is not supported"),
    (training(torch_compile=True, torch_compile_backend="nope"), "DynamoBackend"),
    (
        training(gradient_checkpointing=True, gradient_checkpointing_kwargs={"nope": 1}),
        "torch knows no nope",
    ),
    (training(optim_args="x"), "not enough values"),
    (training(resume_from_checkpoint="/gone"), "there is no checkpoint folder /gone"),
    (training(dataloader_num_workers=-1), "dataloader_num_workers is -1"),
    (training(ddp_backend="nope"), "torch has no backend nope"),
    (training(load_best_model_at_end=True), "has no effect without validation"),
    (training(label_smoothing_factor=0.1), "label_smoothing_factor cannot be 0.1"),
    (training(push_to_hub=True), "training.push_to_hub: "),
    (training(push_to_hub=True, hub_model_id="no name!"), "training.push_to_hub: Repo id"),
    (training(fsdp="full_shard"), "training.fsdp shards over ranks"),
    (training(fsdp="full_shard", fsdp_config="gone.json"), "gone.json"),
    (training(save_strategy="best"), "needs metric_for_best_model"),
    (metric_that_nobody_gives, "metric_for_best_model is 'nope'"),
    (training(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"nope": 1}), "'nope'"),
    (training(lr_scheduler_type="cosine_with_min_lr"), "min_lr"),
    (training(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1.0}), "lr_end"),
    (training(adam_beta1=1.5), "beta"),
    (training(adam_epsilon=-1), "epsilon"),
    (training(dataloader_num_workers=1, dataloader_prefetch_factor=0), "prefetch_factor is 0"),
    (training(log_level="nope"), "'nope' is not known"),
    (training(parallelism_config={"tp_size": 2}), "parallelism_config cannot be"),
    (training(resume_from_checkpoint=True), "holds no checkpoint"),
    (checkpoint("checkpoint-empty"), "it holds no weights"),
    (checkpoint("checkpoint-cut", model_dot_safetensors="", trainer_state_dot_json="{"), "cannot be read"),
    (training(source_weights={"a": 2.0}), "source_weights names 'a'"),
    (cache_of_packs_that_cannot_be, "data.encode_cache"),
    (model_that_is("cut", cut), "model.safetensors cannot be read"),
    (model_that_is("without-a-part", without_a_part), "lacks model-00001-of-00002.safetensors"),
    (model_that_is("shape", hidden_size=128), "embed_tokens.weight of shape [1024, 64]"),
    (model_that_is("vocabulary", vocab_size=2048), "its config says [2048, 64]"),
    (
        model_that_is("quantised", quantization_config={"quant_method": "gptq", "bits": 4}),
        "weights of qwen3 are quantised",
    ),
    (model_of("bloom", "BloomConfig", hidden_size=32, n_layer=1, n_head=2), "read each other in bloom"),
    (
        model_of("rwkv", "RwkvConfig", hidden_size=32, num_hidden_layers=1, attention_hidden_size=32),
        "rwkv carries a state",
    ),
    (name_taken("model", False), "model is a file, and a run writes a folder there"),
    (name_taken("checkpoint-1", False), "checkpoint-1 is a file"),
    (name_taken("sample_loss", False), "sample_loss is a file"),
    (name_taken("train_log.jsonl", True), "train_log.jsonl is a folder, and a run writes a file there"),
    (name_taken("report.html", True), "report.html is a folder"),
    (name_taken("run.json", True), "run.json is a folder"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[one.__name__ for one, _ in REFUSALS])
def test_a_dry_run_refuses_what_a_run_refuses_and_nothing_is_measured(
    change: Callable[[dict[str, Any], Path], None],
    message: str,
    text_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    if change is absent_kernel and _has_flash_3():
        pytest.skip("flash attention 3 is installed")
    values = text_run(html=True)
    change(values, tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    told = []
    for begin in (run, dry_run):
        with pytest.raises(PacktrainError) as refused:
            begin(load_config(tmp_path / "run.yaml"))
        assert refused.value.exit_code == 2 and refused.value.hint and "\n" not in str(refused.value)
        told.append(str(refused.value))
    assert message in told[0] and told[0] == told[1]
    assert not list(tmp_path.rglob("lengths")) and not list(tmp_path.rglob("plan"))


def test_what_was_refused_leaves_no_deepspeed_behind(text_run: Callable[..., dict[str, Any]]) -> None:
    """transformers finds the half-made config while somebody holds the error, and asks it for its stage."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    with pytest.raises(PacktrainError) as held:
        dry_run(load_config(text_run(deepspeed={"zero_optimization": {"stage": 3}})))
    assert held.value.exit_code == 2 and "deepspeed" in str(held.value)
    assert is_deepspeed_zero3_enabled() is False


def rows_that_grow(values: dict[str, Any], tmp_path: Path) -> None:
    values["global_max_length"] = 16
    values["data"] = {"pad_to_length": 16}


def positions_that_end(values: dict[str, Any], tmp_path: Path) -> None:
    model_of("", "GPT2Config", n_embd=32, n_layer=1, n_head=2, n_positions=32)(values, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rows_that_grow, "data.pad_to_length is 16, and the longest pack has"),
        (positions_that_end, "learned positions of gpt2 end at 32"),
    ],
)
def test_what_only_the_lengths_tell_is_told_by_the_plan_and_no_model_is_loaded(
    change: Callable[[dict[str, Any], Path], None],
    message: str,
    text_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("packtrain.train.sft.load_model", lambda *args, **options: pytest.fail("loaded"))
    values = text_run()
    change(values, tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    told = []
    for begin in (run, dry_run):
        with pytest.raises(ConfigError) as refused:
            begin(load_config(tmp_path / "run.yaml"))
        told.append(str(refused.value))
    assert message in told[0] and told[0] == told[1] and "\n" not in told[0]


def test_a_checkpoint_of_other_packs_is_refused_by_a_dry_run_too(text_run: Any, tmp_path: Path) -> None:
    saved = text_run(output_dir=tmp_path / "saved", max_steps=1, save_strategy="steps", save_steps=1)
    (tmp_path / "run.yaml").write_text(json.dumps(saved))
    run(load_config(tmp_path / "run.yaml"), compare=False, html=False)
    checkpoint, told = str(tmp_path / "saved" / "checkpoint-1"), []
    for begin in (dry_run, run):
        again = text_run(output_dir=tmp_path / begin.__name__, cap=96, resume_from_checkpoint=checkpoint)
        (tmp_path / "run.yaml").write_text(json.dumps(again))
        with pytest.raises(ForeignArtefactError) as refused:
            begin(load_config(tmp_path / "run.yaml"))
        told.append(str(refused.value))
    assert told[0] == told[1] and not list((tmp_path / "run").rglob("train_log.jsonl"))
    same = text_run(output_dir=tmp_path / "same", resume_from_checkpoint=checkpoint)
    (tmp_path / "run.yaml").write_text(json.dumps(same))
    dry_run(load_config(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("change", "message"),
    [(no_such_optimizer, "no_such_optimizer"), (training(report_to="nobody"), "nobody is not supported")],
    ids=["optim", "report_to"],
)
def test_ranks_are_told_too_and_no_process_group_begins(
    change: Callable[[dict[str, Any], Path], None],
    message: str,
    text_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    values = text_run()
    (tmp_path / "sound.yaml").write_text(json.dumps(values))
    check_early(load_config(tmp_path / "sound.yaml"))
    change(values, tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        check_early(load_config(tmp_path / "run.yaml"))
    assert not torch.distributed.is_initialized()


def taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")


@pytest.mark.parametrize(
    ("export", "before", "message"),
    [
        ({"format": "raw", "layout": "llava", "media": "uint8"}, None, "raw takes no layout"),
        ({"format": "chunks", "prompts": "prompt"}, None, "chunks takes no prompts"),
        ({"format": "webdataset", "out": "/proc/packtrain"}, None, "export.out"),
        ({"format": "webdataset", "out": "out"}, taken, "holds files that are no export: mine.txt"),
    ],
    ids=["raw", "chunks", "folder", "taken"],
)
def test_an_export_is_refused_before_anything_is_measured(
    export: dict[str, Any],
    before: Callable[[Path], None] | None,
    message: str,
    text_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if before is not None:
        before(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps({**text_run(), "export": export}))
    with pytest.raises(PacktrainError, match=message) as refused:
        run_export(load_config(tmp_path / "run.yaml"))
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("lengths")) and not list(tmp_path.rglob("plan"))


def _has_flash_3() -> bool:
    from packtrain.train.attention import is_installed

    return is_installed("flash_attention_3")


def settings(text_run: Callable[..., dict[str, Any]], tmp_path: Path, **model: Any) -> Any:
    values = text_run()
    values["model"] |= model
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    return load_config(tmp_path / "run.yaml")


def test_a_sound_run_is_told_nothing_and_leaves_no_probe(text_run: Any, tmp_path: Path) -> None:
    config = settings(text_run, tmp_path)
    assert check_early(config, page=True) == versions.missing_features()
    assert not (tmp_path / "run").exists()
    assert "no model is named" in check_early(
        config.model_copy(update={"model": config.model.model_copy(update={"name_or_path": None})}),
        needs_model=False,
    )[-1]  # fmt: skip


@pytest.mark.parametrize(
    ("package", "extra"), [("accelerate", "train"), ("jinja2", "report"), ("matplotlib", "report")]
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, extra: str, text_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(text_run, tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*packtrain\[{extra}\]"):
        check_early(config, page=True)
    assert not (tmp_path / "run").exists()


def test_a_model_that_no_family_declares_is_told_early(text_run: Any, tmp_path: Path) -> None:
    from packtrain.families import family_of

    assert "ctrl" not in family_of(name="text").model_types
    values = text_run()
    model_of("", "CTRLConfig", n_embd=32, n_layer=1, n_head=2, dff=32)(values, tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    (told,) = set(check_early(load_config(tmp_path / "run.yaml"))) - set(versions.missing_features())
    assert "no family declares ctrl" in told and "--prove" in told


def test_layers_without_weights_are_told(text_run: Any, tmp_path: Path) -> None:
    values = text_run()
    model_that_is("layers", num_hidden_layers=6, layer_types=None)(values, tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    told = check_early(load_config(tmp_path / "run.yaml"))
    assert [
        line for line in told if "lacks 44 weights of layers that its config has, model.layers.2." in line
    ]
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    assert check_early(load_config(tmp_path / "run.yaml")) == versions.missing_features()


def test_hub_keys_without_a_hub_have_no_effect(
    text_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(text_run(hub_model_id="a/b", hub_strategy="end")))
    check_early(load_config(tmp_path / "run.yaml"))
    assert "training.hub_model_id, training.hub_strategy has no effect without push_to_hub" in caplog.text


def test_a_pack_that_cannot_fit_is_a_warning(
    text_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("packtrain.train.early._main_memory", lambda: 2**20)
    config = settings(text_run, tmp_path, name_or_path=model_folder(tmp_path))
    assert "one pack of 128 tokens takes at least" in check_early(config)[-1]
    assert "one pack of 128 tokens" in caplog.text
    monkeypatch.setattr("packtrain.train.early._main_memory", lambda: 2**40)
    assert check_early(config) == versions.missing_features()


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_the_floor_of_memory_is_below_what_the_weights_take(name: str) -> None:
    model = tiny_model(f"tiny:{name}")
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    floor = memory_floor(model.config, 0, size=4, states=1)
    assert 0.95 * held < floor <= held
    assert memory_floor(model.config, 10, size=4, states=1) - floor == 4 * 10 * 2 * 64


# --------------------------------------------------------------------------------------- the match
@pytest.mark.realdata
@pytest.mark.parametrize("family", ["internvl3", "llava_onevision", "qwen2_5_vl", "qwen2_audio", "qwen3_vl"])
def test_processors_fit_their_model_and_no_text_model(family: str, processor: Any) -> None:
    made = processor(family)
    check_match(tiny_config(f"tiny:{family}", made), made)
    assert family in TINY_MODELS
    with pytest.raises(ConfigError, match="takes no media"):
        check_match(tiny_config("tiny:qwen3", made), made)


@pytest.mark.realdata
def test_every_difference_is_named_with_both_values(processor: Any) -> None:
    made = processor("qwen2_5_vl")
    config = tiny_config("tiny:qwen2_5_vl", made)
    check_match(config, made.tokenizer)  # text only, on a model with towers
    others: list[tuple[Callable[[Any], None], str]] = [
        (lambda c: setattr(c, "image_token_id", 7), r"image token of the processor is \d+ .*looks for 7"),
        (lambda c: setattr(c, "video_token_id", 7), r"video token of the processor is"),
        (lambda c: setattr(c.vision_config, "patch_size", 16), "patch_size of the processor is 14.* is 16"),
        (lambda c: setattr(c.vision_config, "spatial_merge_size", 4), "merge_size of the processor is 2"),
        (lambda c: setattr(c.get_text_config(), "vocab_size", 1000), "has 1000 embeddings"),
    ]
    for change, message in others:
        changed = copy.deepcopy(config)
        change(changed)
        with pytest.raises(ConfigError, match=message):
            check_match(changed, made)
    with pytest.raises(ConfigError, match=r"1 row of positions\), qwen2_5_vl takes 3"):
        check_match(config, processor("llava_onevision"))


def test_a_pad_token_beyond_the_embedding_is_no_fault() -> None:
    config = tiny_config("tiny:qwen3")
    vocabulary = {"a": 0, "<pad>": 512}
    check_match(config, SimpleNamespace(get_vocab=lambda: vocabulary, pad_token="<pad>"))
    with pytest.raises(ConfigError, match=r"ids up to 512 \(<pad>\), qwen3 has 512 embeddings"):
        check_match(config, SimpleNamespace(get_vocab=lambda: vocabulary, pad_token=None))


def test_what_an_api_change_costs_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from packtrain.cli import main

    gone = versions.Feature("transformers.masking_utils", "renamed", "no masks")
    nowhere = versions.Feature("transformers.nowhere", "gone", "nothing")
    monkeypatch.setattr(versions, "FEATURES", (gone, nowhere))
    lines = versions.missing_features()
    assert lines == [
        "transformers.masking_utils.renamed is missing here: no masks",
        "transformers.nowhere.gone is missing here: nothing",
    ]
    with pytest.raises(SystemExit):
        main(["doctor", "--model", "tiny:qwen3", "--json"])
    assert set(lines) <= set(json.loads(capsys.readouterr().out)["versions"])


def test_the_page_holds_every_feature_that_is_told_when_missing() -> None:
    page = (Path(__file__).parents[2] / "docs" / "attention.md").read_text(encoding="utf-8")
    for one in versions.FEATURES:
        assert f"| `{one.module}.{one.name}` | {one.cost} |" in page
