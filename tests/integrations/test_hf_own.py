"""What a user's script brings to the transformers Trainer is kept, or refused; it never changes silently."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_hf_trainer import files, order_of, recording, script, step_losses  # noqa: F401

from packtrain.errors import ConfigError, InputError, IsolationError

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")

SAME: dict[str, Any] = {"pack_length": 1024, "samples_per_step": "same"}


@pytest.fixture
def make(files: Any, saved_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Any]:  # noqa: F811
    """The user's script without packing: 24 rows, 8 a step, on a tiny Qwen3."""
    where = str(saved_model("tiny:qwen3")), files["few_text"]

    def made(**more: Any) -> Any:
        settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, **more}
        return script("hf_trainer_text", packed=False).main(*where, str(tmp_path), **settings)

    return made


def pack(trainer: Any, **options: Any) -> Any:
    from packtrain.hosts.transformers import pack as call

    return call(trainer, **{**SAME, **options})


def own_loss(divides: bool) -> type:
    """A Trainer whose user computes the loss, with or without the tokens of the step."""
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            targets = inputs.pop("labels")[:, 1:].flatten()
            outputs = model(**inputs)
            total = torch.nn.functional.cross_entropy(
                outputs.logits[:, :-1].flatten(0, 1), targets, reduction="sum"
            )
            known = divides and num_items_in_batch is not None
            loss = total / (num_items_in_batch if known else (targets != -100).sum())
            return (loss, outputs) if return_outputs else loss

    return Own


def test_a_loss_of_the_user_that_ignores_the_tokens_of_the_step_is_refused(make: Callable[..., Any]) -> None:
    """Over the packs of a step it would be summed: K times the loss and the gradient."""
    trainer = pack(make(trainer_class=own_loss(False)))
    assert trainer.args.gradient_accumulation_steps > 1
    with pytest.raises(ConfigError, match="compute_loss does not use num_items_in_batch") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    func = make()
    func.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs["logits"].mean()
    with pytest.raises(ConfigError, match="compute_loss_func does not use num_items_in_batch"):
        pack(func).train()
    alone = pack(make(trainer_class=own_loss(False)), pack_length=8192)  # one pack a step: nothing to sum
    alone.train()
    assert alone.args.gradient_accumulation_steps == 1 and alone.state.global_step == 3


def test_a_model_that_ignores_the_tokens_of_the_step_is_refused(make: Callable[..., Any]) -> None:
    """Its forward takes any argument, so Trainer takes its mean for one of the step."""

    def ignoring(trainer: Any) -> Any:
        own = type(trainer.model)

        class Ignoring(own):  # type: ignore[valid-type, misc]
            @functools.wraps(own.forward)  # Trainer takes its columns from the names of arguments
            def forward(self, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
                made = super().forward(**kwargs)
                if labels is not None:
                    made.loss = self.loss_function(made.logits, labels, self.config.vocab_size)
                return made

        trainer.model.__class__ = Ignoring
        return trainer

    trainer = pack(ignoring(make()))
    assert trainer.args.gradient_accumulation_steps > 1 and trainer.model_accepts_loss_kwargs
    with pytest.raises(ConfigError, match="the loss of Ignoring does not use num_items_in_batch") as caught:
        trainer.train()
    assert "accepts_loss_kwargs = False" in str(caught.value)
    told, plain = ignoring(make()), make()
    told.model_accepts_loss_kwargs = False
    for one in (told, plain):
        pack(one).train()
    assert step_means(told) == pytest.approx(step_means(plain))


@pytest.mark.parametrize("known", [True, False])
def test_a_model_that_returns_tuples_trains_as_one_that_does_not(
    known: bool, make: Callable[..., Any]
) -> None:
    losses = []
    for own in (False, True):
        trainer = make()
        kind = type(trainer.model)

        class Tuples(kind):  # type: ignore[valid-type, misc]
            @functools.wraps(kind.forward)
            def forward(self, **kwargs: Any) -> Any:
                return super().forward(**kwargs).to_tuple()

        if own:
            trainer.model.__class__ = Tuples
        trainer.model_accepts_loss_kwargs = known
        pack(trainer).train()
        losses.append(step_means(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3
    refused = make()
    refused.model.config.return_dict = False  # transformers' own models stop at the tuple of their inner one
    with pytest.raises(IsolationError, match="does not run with return_dict=False") as caught:
        pack(refused)
    assert "set model.config.return_dict = True" in str(caught.value)


def step_means(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "grad_norm" in row]


def test_a_misspelt_option_is_named_before_settings_of_the_trainer(make: Callable[..., Any]) -> None:
    trainer = make(per_device_train_batch_size=8)
    with pytest.raises(InputError, match="plan option 'samples_per_steps'") as caught:
        pack(trainer, samples_per_step=None, samples_per_steps="same")
    assert "did you mean 'samples_per_step'" in str(caught.value)


def test_a_loss_of_the_user_that_divides_by_them_trains_as_unpacked(make: Callable[..., Any]) -> None:
    packed = pack(make(trainer_class=recording(own_loss(True))))
    order = order_of(packed)
    packed.train()
    plain = make(trainer_class=recording(own_loss(True), order))
    plain.train()
    assert step_losses(packed) == pytest.approx(step_losses(plain), rel=1e-4)
    norms = [
        [row["grad_norm"] for row in one.state.log_history if "grad_norm" in row] for one in (packed, plain)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_the_head_computes_the_loss_where_it_is_transformers_own(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no logits are built; a loss of the user's, or one who looks at them, gets them."""
    from packtrain.train import loss as losses

    rows: list[int] = []
    through_head = losses.chunked_cross_entropy

    def counted(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(hidden.shape[-2])
        return through_head(hidden, *args, **kwargs)

    def doubled(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        return 2 * transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs)

    def own_function(model: Any) -> None:
        model.loss_function = doubled

    def hooked(model: Any) -> None:
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))

    seen: list[int] = []
    steps, order = {}, None
    for changed in (None, own_function, hooked):
        found = []
        for packed in (True, False):
            trainer = make(trainer_class=recording(transformers.Trainer, order if not packed else None))
            if changed is not None:
                changed(trainer.model)
            if packed:
                order = order_of(pack(trainer))
                monkeypatch.setattr(losses, "chunked_cross_entropy", counted)
            rows.clear()
            trainer.train()
            monkeypatch.setattr(losses, "chunked_cross_entropy", through_head)
            logged = [row for row in trainer.state.log_history if "grad_norm" in row]
            found.append(([row["loss"] for row in logged], [row["grad_norm"] for row in logged]))
            if packed:
                assert trainer.packs_fused is (changed is None)
                assert (len(rows) > 3) is (changed is None)  # the proof asks once in each
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
        assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)
        steps[changed] = found[0][0]
    assert steps[own_function] == pytest.approx([2 * loss for loss in steps[None]], rel=1e-2)
    assert set(seen) - {1} == {trainer.model.config.vocab_size}
    assert seen.count(1) == 1  # asked by the proof


def test_logits_are_built_where_code_that_is_not_the_librarys_may_look_at_them(
    make: Callable[..., Any],
) -> None:
    from transformers.loss import loss_utils

    from packtrain.hosts.transformers import loss_is_the_heads

    trainer = pack(make())
    model, head = trainer.model, trainer.model.lm_head

    def around(function: Any) -> Any:
        return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))

    for owner, name in (
        (model, "forward"),
        (head, "forward"),
        (transformers.Trainer, "compute_loss"),
        (loss_utils, "fixed_cross_entropy"),
    ):
        with pytest.MonkeyPatch.context() as changes:
            assert loss_is_the_heads(trainer)
            changes.setattr(owner, name, around(getattr(owner, name)))
            assert not loss_is_the_heads(trainer), name
    for hook in (model.register_forward_hook, head.register_full_backward_hook):
        handle = hook(lambda *given: None)
        assert not loss_is_the_heads(trainer)
        handle.remove()
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(model, "forward", torch.compile(model.forward, backend="eager"))
        assert not loss_is_the_heads(trainer)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs["logits"].mean()
    assert not loss_is_the_heads(trainer)


def test_what_a_callback_changes_in_a_step_and_labels_that_a_trainer_changes_are_trained(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the logits built: the head is asked in every pass whether the loss is its own."""
    from packtrain.hosts import transformers as host

    class Doubles(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            if state.global_step == 1:
                model.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)

    class Masks(transformers.Trainer):  # type: ignore[misc]
        def _prepare_inputs(self, inputs: Any) -> Any:
            given = dict(super()._prepare_inputs(inputs))
            given["labels"] = given["labels"].clone()
            given["labels"][:, ::3] = -100
            return given

    found = []
    for through_head in (True, False):
        trainer = pack(make(trainer_class=recording(Masks)))
        trainer.add_callback(Doubles())
        if not through_head:
            monkeypatch.setattr(host, "loss_is_the_heads", lambda trainer: False)
        trainer.train()
        assert trainer.packs_fused is through_head
        found.append(step_losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_loader_of_the_user_is_refused_and_an_order_told(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

    with pytest.raises(ConfigError, match="get_train_dataloader would not be called"):
        pack(make(trainer_class=Own))
    pack(make(trainer_class=recording(Trainer)))
    assert "_get_train_sampler orders rows and is not asked" in caplog.text


def test_an_evaluation_of_the_user_gets_its_rows(make: Callable[..., Any], files: Any) -> None:  # noqa: F811
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.__dict__.setdefault("rows", []).append(len(inputs["input_ids"]))
            return super().prediction_step(model, inputs, *args, **kwargs)

    trainer = pack(make(trainer_class=Own, eval_path=files["few_text"]))
    trainer.evaluate()
    assert trainer.rows == [8, 8, 8]
    generating = make(eval_path=files["few_text"])
    generating.args.predict_with_generate = True  # Seq2SeqTrainer's
    assert pack(generating).packs_eval is None


def test_evaluation_sets_without_length_stay_as_they_were(make: Callable[..., Any]) -> None:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):  # type: ignore[misc]
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def __iter__(self) -> Any:
            return iter(self.rows)

    trainer = make()
    trainer.eval_dataset = Stream(trainer.train_dataset[:4])
    before = trainer.evaluate()["eval_loss"]
    assert pack(trainer).evaluate()["eval_loss"] == before
    asked = make()
    asked.eval_dataset = Stream(asked.train_dataset[:4])
    with pytest.raises(ConfigError, match="'eval' is a Stream without length or index"):
        pack(asked, eval_packing=True)


def test_a_trainer_that_could_not_pack_is_as_it_was(make: Callable[..., Any]) -> None:
    """A notebook corrects the call and asks again."""
    trainer = make()
    kind, callbacks = type(trainer), len(trainer.callback_handler.callbacks)
    rows, trainer.train_dataset = trainer.train_dataset, [{"text": "no tokens"}]
    with pytest.raises(ConfigError, match="no processor is known"):
        pack(trainer)
    assert type(trainer) is kind and len(trainer.callback_handler.callbacks) == callbacks
    trainer.train_dataset = rows
    pack(trainer).train()
    assert trainer.state.global_step == 3
    with pytest.raises(ConfigError, match="samples_per_step is 0"):
        pack(make(), samples_per_step=0)
    with pytest.raises(ConfigError, match="neftune_noise_alpha=5"):
        pack(make(neftune_noise_alpha=5))
    routed = make()  # as Qwen3-VL's experts: the loss that is replaced has another part
    routed.model_accepts_loss_kwargs, routed.model.config.output_router_logits = False, True
    with pytest.raises(ConfigError, match="adds a router loss"):
        pack(routed)


def test_the_order_of_the_dataset_and_the_seed_of_the_data_are_kept(make: Callable[..., Any]) -> None:
    from transformers import Trainer

    in_order = {"trainer_class": recording(Trainer), "train_sampling_strategy": "sequential"}
    steps = pack(make(**in_order))
    steps.train()
    assert [sorted(steps.seen[at : at + 8]) for at in (0, 8, 16)] == [
        list(range(at, at + 8)) for at in (0, 8, 16)
    ]
    packs = pack(make(**in_order, per_device_train_batch_size=1), samples_per_step=None)
    packs.train()
    assert packs.seen == list(range(24))
    first, other, same = (order_of(pack(make(data_seed=seed))) for seed in (3, 4, 3))
    assert first == same != other


def test_padding_in_rows_is_no_length(make: Callable[..., Any]) -> None:
    """Rows padded to a fixed length, as many scripts tokenise."""
    from datasets import Dataset

    trainer, padded = make(), make()
    rows = [
        {key: row[key] + [fill] * (512 - len(row[key])) for key, fill in KEYS.items()}
        for row in trainer.train_dataset
    ]
    expected = pack(trainer).packs.plan.pack_tokens.tolist()
    padded.train_dataset = rows
    assert pack(padded).packs.plan.pack_tokens.tolist() == expected
    table = make()
    table.train_dataset = Dataset.from_list(rows)
    assert pack(table).packs.plan.pack_tokens.tolist() == expected


KEYS = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def test_rows_that_are_no_chats_are_encoded_to_be_measured(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that only the user's collator knows, and rows tokenised when they are read."""
    from datasets import Dataset

    trainer = make(remove_unused_columns=False)
    rows, collate = trainer.train_dataset, trainer.data_collator
    table = Dataset.from_list([{"number": number} for number in range(len(rows))])
    trainer.train_dataset = table
    trainer.data_collator = lambda chosen: collate([rows[row["number"]] for row in chosen])
    trainer.processing_class = collate.tokenizer
    assert len(pack(trainer).packs.plan.indices) == 24
    assert "24 rows of 24 cannot be read as chats here" in caplog.text

    lazy = make(remove_unused_columns=False)
    lazy.train_dataset = table.with_transform(
        lambda batch: {key: [rows[number][key] for number in batch["number"]] for key in KEYS}
    )
    assert len(pack(lazy).packs.plan.indices) == 24
    broken = make(remove_unused_columns=False)
    broken.train_dataset, broken.processing_class = table, collate.tokenizer
    with pytest.raises(InputError, match="none of the 24 rows can be encoded, the first: "):
        pack(broken)


def test_workers_start_as_the_platform_starts_them(make: Callable[..., Any]) -> None:
    """A collator that cannot be pickled, in a script without a main guard, works as unpacked."""
    trainer = make(dataloader_num_workers=2)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: collate(rows)
    trainer = pack(trainer)
    trainer.get_train_dataloader()
    default = multiprocessing.get_all_start_methods()[0]
    assert trainer.packs_passes.options["multiprocessing_context"] == default
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("length", [{"num_train_epochs": 2}, {"max_steps": 3}])
def test_speeds_are_of_samples(
    make: Callable[..., Any],
    files: Any,  # noqa: F811
    length: dict[str, int],
) -> None:
    trainer = pack(make(eval_path=files["few_text"], **length))
    told = trainer.train().metrics
    assert told["train_samples_per_second"] / told["train_steps_per_second"] == pytest.approx(8, rel=0.01)
    loader = trainer.get_eval_dataloader()
    assert len(loader) < 24 == trainer.evaluation_loop(loader, "x", metric_key_prefix="eval").num_samples


def test_keys_of_rows_that_measuring_does_not_read_are_told(caplog: pytest.LogCaptureFixture) -> None:
    from packtrain.hosts._rows import ChatReader, _by_template

    class Words:
        def measure(self, sample: Any) -> int:
            return sum(len(part["text"]) for message in sample["messages"] for part in message["content"])

    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    found = _by_template([{"messages": turns, "mood": 1}] * 3, Words(), ChatReader(), None)
    assert found == [3, 3, 3] and "not read: mood (3)" in caplog.text


def shown(capsys: Any, *words: str) -> Any:
    """What `packtrain` prints, as JSON with `--json`."""
    import json

    from packtrain.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code in (0, None)
    told = capsys.readouterr().out
    return json.loads(told.splitlines()[-1]) if "--json" in words else told


def test_what_it_leaves_is_shown_as_a_run(
    make: Callable[..., Any],
    files: Any,  # noqa: F811
    tmp_path: Path,
    capsys: Any,
) -> None:
    """Steps, losses, step time, proof, evaluation; `which` names a step's samples; a resume adds up."""
    settings = {"logging_steps": 1, "save_steps": 2, "save_strategy": "steps", "eval_path": files["few_text"]}
    trainer = pack(make(**settings), audited=2)
    order = order_of(trainer)
    trainer.train()
    told = shown(capsys, "show", str(tmp_path), "--json")
    steps = [[float(row["step"]), row["loss"]] for row in trainer.state.log_history if "loss" in row]
    assert told["report"]["curves"]["loss"] == steps and len(steps) == 3
    result = told["run"]["result"]
    assert result["consumed"]["samples"] == 24 and result["consumed"]["packs"] == len(trainer.packs.plan)
    assert result["proof"] == len(trainer.proof.rows) and result["eval"]["samples"] == 24
    text = shown(capsys, "show", str(tmp_path))
    for line in (
        "optimizer steps",
        "training loss",
        "step time",
        "isolation",
        "validation packs",
        "trained on",
    ):
        assert line in text, line
    found = [shown(capsys, "which", str(tmp_path), "--step", str(i), "--json")["ids"] for i in range(3)]
    assert found == [sorted(order[8 * i : 8 * i + 8]) for i in range(3)]
    assert "equal" in shown(capsys, "diff", str(tmp_path), result["plan_folder"])
    checks = shown(capsys, "verify", str(tmp_path), "--json")["checks"]
    assert "validation plan checksum" in checks and "validation lengths digest" in checks
    shown(capsys, "show", str(tmp_path), "--html", str(tmp_path / "page.html"))
    assert "proven before training" in (tmp_path / "page.html").read_text()
    again = pack(make(**settings), audited=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert shown(capsys, "show", str(tmp_path), "--json")["run"]["result"]["consumed"] == result["consumed"]
