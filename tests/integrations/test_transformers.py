"""Every method trains under the ``Trainer`` of Hugging Face exactly as in a handwritten loop, on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import SchedulerType, Trainer, TrainerCallback, TrainingArguments, get_scheduler

from secondorder import KFAC
from secondorder.integrations.transformers import SecondOrderCallback, decay_groups, optimizer_factory
from secondorder.optimizer import SecondOrderOptimizer
from tests.integrations import sentences
from tests.integrations.sentences import BY_FALLBACK, METHODS, Sentences, classifier
from tests.integrations.small import assert_same_bits, give_a_scaler

SIZE, STEPS, CLIP = 8, 6, 0.5

every_method = pytest.mark.parametrize("name", METHODS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nothing was captured for .*position_embeddings"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning"),  # also the name in 5.20
]


def make(name: str, model: nn.Module) -> SecondOrderOptimizer:
    method, options = METHODS[name]
    return method(model, **options)


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": SIZE, "max_steps": STEPS, "max_grad_norm": CLIP, "save_strategy": "no",
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return sentences.arguments(folder, **settings | changed)


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def trained(model: nn.Module, args: TrainingArguments, optimizer: Any = None, **more: Any) -> Trainer:
    given = {} if optimizer is None else {"optimizers": (optimizer, None)}
    trainer = Trainer(model, args, train_dataset=more.pop("train_dataset", Sentences(32)), **given, **more)
    trainer.train()
    return trainer


def by_hand(model: nn.Module, optimizer: SecondOrderOptimizer, accumulate: int = 1, warmup: int = 0) -> list[float]:
    """Train in plain PyTorch with sequential batches, summed losses, clipping and a linear schedule."""
    data, found = Sentences(32), []
    scheduler = get_scheduler("linear", optimizer, warmup, STEPS)
    model.train()
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulate):
            loss = model(**data.batch((step * accumulate + micro) * SIZE, SIZE)).loss
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        found.append(total)
    return found


def assert_covered(optimizer: SecondOrderOptimizer, name: str = "kfac") -> None:
    """Check that no other parameters than usual follow the fallback, and that curvature was used."""
    rows = [line.split()[0] for line in optimizer.describe().splitlines() if "fallback" in line]
    assert set(rows) == BY_FALLBACK.get(name, set())
    assert max(s.get("refreshes", s.get("count", 0)) for s in optimizer.state.values()) > 0


def assert_near(model: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------- how a trainer gets its optimizer
@every_method
def test_a_given_optimizer_trains_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    model, ours = classifier(), classifier()
    args = arguments(tmp_path, gradient_accumulation_steps=2, warmup_steps=2)
    optimizer = make(name, model)
    trainer = trained(model, args, optimizer)
    expected = by_hand(ours, make(name, ours), accumulate=2, warmup=2)
    assert_same_bits(model, ours)
    assert losses(trainer) == pytest.approx(expected, rel=1e-6)
    assert_covered(optimizer, name)


@pytest.mark.parametrize(("name", "key"), [*((name, "module") for name in METHODS), ("kfac", "model")])
def test_class_and_options_train_in_groups_with_and_without_decay(name: str, key: str, tmp_path: Path) -> None:
    """With ``module=`` the groups are those of the trainer; ``model=`` among the options takes precedence."""
    method, options = METHODS[name]
    model, ours = classifier(), classifier()
    decay = 0.1 if key == "module" else 0.0
    args = arguments(tmp_path, weight_decay=decay)
    trainer = trained(model, args, optimizer_cls_and_kwargs=(method, {key: model, **options}))
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is method
    assert [group["weight_decay"] for group in optimizer.param_groups] == ([0.1, 0.0] if decay else [0.0])
    if decay:  # the trainer made the groups
        theirs, mine = optimizer.param_groups, decay_groups(model, 0.1)
        assert [list(map(id, g["params"])) for g in mine] == [list(map(id, g["params"])) for g in theirs]
    by_hand(ours, method(decay_groups(ours, 0.1), module=ours, **options) if decay else make(name, ours))
    assert_same_bits(model, ours)
    assert_covered(optimizer, name)


@pytest.mark.parametrize("name", ["kfac", "sparse_mfac"])
def test_a_factory_waits_for_the_model(name: str, tmp_path: Path) -> None:
    method, options = METHODS[name]
    ours = classifier()
    factory = (optimizer_factory(method), {**options, "weight_decay": 0.1})
    trainer = trained(None, arguments(tmp_path), model_init=classifier, optimizer_cls_and_kwargs=factory)
    by_hand(ours, method(decay_groups(ours, 0.1), module=ours, **options))
    assert_same_bits(trainer.model, ours)
    assert_covered(trainer.optimizer.optimizer)


# ---------------------------------------------------------------------- options of a trainer
def test_accumulated_tokens_are_weighted_as_one_batch(tmp_path: Path) -> None:
    """Language models divide the loss by the number of tokens in all micro-batches, which differs between them."""
    data = Sentences(32, padded=False)
    args = arguments(tmp_path, gradient_accumulation_steps=2, lr_scheduler_type="constant")
    model, ours = sentences.language_model(), sentences.language_model()
    optimizer = make("kfac", model)
    trainer = trained(model, args, optimizer, train_dataset=data, data_collator=to_predict)
    reference, expected = make("kfac", ours), []
    for step in range(STEPS):
        batches = [to_predict([data[(2 * step + m) * SIZE % 32 + i] for i in range(SIZE)]) for m in range(2)]
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        expected.append(0.0)
        for batch in batches:
            logits = ours(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            (loss / tokens).backward()
            expected[-1] += loss.item() / tokens
        clip_grad_norm_(ours.parameters(), CLIP)
        reference.step()
        ours.zero_grad()
    assert losses(trainer) == pytest.approx(expected, rel=1e-4)
    assert_near(model, ours)
    assert optimizer.diagnostics()["step"] == STEPS


def to_predict(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows and use their own tokens as labels."""
    padded = sentences.tokenizer().pad([{k: r[k] for k in ("input_ids", "attention_mask")} for r in rows])
    batch = {key: torch.tensor(value) for key, value in padded.items() if key != "token_type_ids"}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 0] = -100  # it has no prediction, and whether a trainer counts it depends on the model
    return {**batch, "labels": labels}


def test_the_callback_passes_the_loss_scaler_to_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_a_scaler(monkeypatch)
    model = classifier()
    optimizer = make("kfac", model)
    settings = {"fp16": True, "per_device_train_batch_size": 16, "max_steps": 16, "gradient_accumulation_steps": 1}
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.grad_scaler))
    trainer = trained(model, arguments(tmp_path, **settings), optimizer, callbacks=[SecondOrderCallback()])
    assert seen[0] is trainer.accelerator.scaler  # before the optimizer looks for it
    assert sum(losses(trainer)[-4:]) < sum(losses(trainer)[:4])
    assert optimizer.diagnostics()["skipped_statistics"] == 0


@every_method
def test_bfloat16(name: str, tmp_path: Path) -> None:
    model = classifier()
    optimizer = make(name, model)
    trainer = trained(model, arguments(tmp_path, bf16=True, max_steps=16, per_device_train_batch_size=16), optimizer)
    assert sum(losses(trainer)[-4:]) < sum(losses(trainer)[:4])
    assert_covered(optimizer, name)
    floats = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert {v.dtype for v in floats if v.is_floating_point()} <= {torch.float32, torch.float64}


def test_evaluation_and_checkpointed_activations_change_nothing(tmp_path: Path) -> None:
    plain, other = classifier(), classifier()
    trained(plain, arguments(tmp_path), make("kfac", plain))
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, gradient_checkpointing=True)
    trainer = trained(other, args, make("kfac", other), eval_dataset=Sentences(8, seed=1))
    assert sum("eval_loss" in line for line in trainer.state.log_history) == STEPS
    assert_same_bits(other, plain)


@pytest.mark.slow
def test_a_compiled_model_is_covered(tmp_path: Path) -> None:
    model = classifier()
    optimizer = make("kfac", model)
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    trained(model, args, optimizer)
    ours = classifier()
    by_hand(ours, make("kfac", ours))
    assert_covered(optimizer)
    assert_near(model, ours)


SCHEDULE_OPTIONS = dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), {"min_lr_rate": 0.1})
SCHEDULE_OPTIONS["warmup_stable_decay"] = {"num_decay_steps": 4}


@pytest.mark.parametrize("kind", [kind.value for kind in SchedulerType])
def test_every_schedule_changes_the_rates_as_for_sgd(kind: str) -> None:
    model, rates = nn.Linear(2, 1), []
    groups = decay_groups(model, 0.1)
    for optimizer in (KFAC(groups, module=model, lr=0.1), torch.optim.SGD(groups, lr=0.1)):
        scheduler = get_scheduler(kind, optimizer, 2, 10, SCHEDULE_OPTIONS.get(kind))
        rates.append([])
        for step in range(10):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            scheduler.step(*([float(step)] if kind in {"reduce_lr_on_plateau", "greedy"} else []))
            rates[-1].append([group["lr"] for group in optimizer.param_groups])
    assert rates[0] == rates[1]


# ---------------------------------------------------------------------- checkpoints
@every_method
def test_a_resumed_run_ends_bitwise_the_same(name: str, tmp_path: Path) -> None:
    """Batches are shuffled, and there are a schedule and groups. The trainer loads with ``weights_only``."""

    def run(**resume: Any) -> Trainer:
        model = classifier()
        method, options = METHODS[name]
        optimizer = method(decay_groups(model, 0.1), module=model, **options)
        args = arguments(
            tmp_path, max_steps=8, save_strategy="steps", save_steps=3, train_sampling_strategy="random", warmup_steps=2
        )
        trainer = Trainer(model, args, train_dataset=Sentences(32), optimizers=(optimizer, None))
        trainer.train(**resume)
        return trainer

    whole, resumed = run(), run(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    saved = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert "partial" not in saved
    assert saved["state"][0]["step"] == 3
    assert_same_bits(resumed.model, whole.model)
    assert losses(resumed)[-5:] == losses(whole)[-5:]
    assert resumed.optimizer.optimizer.diagnostics()["step"] == 8


class Events(TrainerCallback):
    """Records gathers and saves in order, with their steps."""

    def __init__(self, optimizer: SecondOrderOptimizer) -> None:
        self.seen: list[tuple[str, int]] = []
        self._step = 0
        optimizer.consolidate_state_dict = lambda to=0, pieces=True: self.seen.append((f"gather to {to}", self._step))
        optimizer.register_state_dict_pre_hook(lambda _: self.seen.append(("state", self._step)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step


BEST = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 3}
#: Settings, and the steps whose state they save.
SAVES: dict[str, tuple[dict[str, Any], set[int]]] = {
    "steps": ({"save_strategy": "steps", "save_steps": 2}, {2, 4, 6}),
    "epoch": ({"save_strategy": "epoch", "per_device_train_batch_size": 16}, {2, 4, 6}),
    "best": ({"save_strategy": "best", **BEST}, {3}),
    "best kept": ({"save_steps": 3, "save_strategy": "steps", "load_best_model_at_end": True, **BEST}, {3, 6}),
    "every node": ({"save_strategy": "steps", "save_steps": 3, "save_on_each_node": True}, {3, 6}),
    "the model only": ({"save_strategy": "steps", "save_steps": 2, "save_only_model": True}, set()),
}


@pytest.mark.parametrize("kind", SAVES)
def test_the_state_is_gathered_before_every_save(kind: str, tmp_path: Path) -> None:
    settings, expected = SAVES[kind]
    model = classifier()
    optimizer = make("kfac", model)
    events = Events(optimizer)
    callbacks = [events, SecondOrderCallback(log=False)]
    trained(model, arguments(tmp_path, **settings), optimizer, eval_dataset=Sentences(8, seed=1), callbacks=callbacks)
    saves = [(i, step) for i, (what, step) in enumerate(events.seen) if what == "state" and step]
    assert {step for _, step in saves} >= expected
    assert bool(saves) == bool(expected)
    for i, step in saves:
        assert events.seen[i - 1] == (f"gather to {None if kind == 'every node' else 0}", step)
    gathers = [event for event in events.seen if event[0] != "state"]
    assert len(gathers) == len(set(gathers))  # only one per step


def test_an_evaluation_outside_of_training_gathers_nothing(tmp_path: Path) -> None:
    model = classifier()
    args = arguments(tmp_path, **SAVES["best"][0], max_steps=3)
    method, options = METHODS["kfac"]
    trainer = Trainer(
        model, args, train_dataset=Sentences(32), eval_dataset=Sentences(8, seed=1), callbacks=[SecondOrderCallback()],
        optimizer_cls_and_kwargs=(method, {"module": model, **options}),
    )  # fmt: skip
    trainer.evaluate()  # there is no optimizer yet
    trainer.train()
    events = Events(trainer.optimizer.optimizer)
    trainer.evaluate()
    assert events.seen == []


# ---------------------------------------------------------------------- logging
def test_diagnostics_are_logged_with_every_training_loss(tmp_path: Path) -> None:
    model = classifier()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=3)
    more = {"eval_dataset": Sentences(8, seed=1), "callbacks": [SecondOrderCallback()]}
    lines = trained(model, args, make("kfac", model), **more).state.log_history
    assert [line["secondorder/step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert not any("secondorder/step" in line for line in lines if "loss" not in line)
    assert all(isinstance(value, float) for line in lines for key, value in line.items() if key.startswith("second"))


def test_reporters_get_the_diagnostics_of_a_given_trainer(tmp_path: Path) -> None:
    """The reporter runs before the callbacks of the user, as the built-in reporters do."""
    lines: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            lines.append(dict(logs))

    model = classifier()
    args, optimizers = arguments(tmp_path, logging_steps=2), (make("kfac", model), None)
    trainer = Trainer(model, args, train_dataset=Sentences(32), optimizers=optimizers, callbacks=[Reporter()])
    trainer.add_callback(SecondOrderCallback(trainer=trainer, by_layer=True))
    trainer.train()
    assert [line["secondorder/step"] for line in lines if "secondorder/step" in line] == [2, 4, 6]
    assert sum("loss" in line for line in lines) == 3
    assert [line["step"] for line in trainer.state.log_history if "secondorder/step" in line] == [2, 4, 6]


@pytest.mark.parametrize(
    ("options", "keys"), [({}, {"step"}), ({"by_layer": True}, {"step", "by_layer/a"}), ({"log": False}, set())]
)
def test_diagnostics_of_layers_are_optional(tmp_path: Path, options: dict[str, Any], keys: set[str]) -> None:
    model = classifier()
    optimizer = make("kfac", model)
    optimizer.diagnostics = lambda: {"step": 1, "by_layer": {"a": 2.0}}
    args = arguments(tmp_path, max_steps=1)
    trainer = trained(model, args, optimizer, callbacks=[SecondOrderCallback(**options)])
    found = {key for line in trainer.state.log_history for key in line if key.startswith("secondorder/")}
    assert found == {f"secondorder/{key}" for key in keys}


def test_the_callback_refuses_other_optimizers(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optimizer of secondorder is needed, got SGD"):
        trained(model, arguments(tmp_path), optimizer, callbacks=[SecondOrderCallback()])
