"""Hugging Face's Trainer on two processes trains, evaluates, saves and resumes as on one.

`benchmarks/trainer.py` does so for longer, on four, with kills.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from .ranks import Launch

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/trainers.md"
STEPS, BATCH, SEQ, VOCABULARY = 4, 4, 8, 40


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def as_started_by_torchrun() -> Iterator[None]:
    """While it lasts, accelerate finds the processes of this job, and nothing of others."""
    rank, world = dist.get_rank() if dist.is_initialized() else 0, size()
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    if world > 1:
        os.environ.update({name: str(value) for name, value in found.items()})
    _forget()
    try:
        yield
    finally:
        for name in (*found, "MASTER_PORT"):
            os.environ.pop(name, None)
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def language_model() -> tuple[Any, list[dict[str, Any]]]:
    """Tied weights, padding, and labels of which some do not count."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQ,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
        loss_type="ForCausalLM",
    )
    tokens = torch.randint(VOCABULARY, (23, SEQ))
    mask = (torch.arange(SEQ) < torch.randint(3, SEQ + 1, (23, 1))).long()
    rows = zip(tokens, mask, tokens.masked_fill(mask == 0, -100), strict=True)
    data = [{"input_ids": t, "attention_mask": m, "labels": y} for t, m, y in rows]
    return transformers.GPT2LMHeadModel(config), data


def accuracy(predicted: Any) -> dict[str, float]:
    right = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"accuracy": float(right[predicted.label_ids != -100].mean())}


def trainer_of(folder: str, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer of this job's processes; alone, that of transformers."""
    world = size()
    model, data = language_model()
    args = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // world,
        per_device_eval_batch_size=BATCH // world,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        include_num_input_tokens_seen="all",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    kind, more = transformers.Trainer, {}
    if world > 1:
        from shardfold.hf import Trainer as kind

        pins = {"h.*.mlp.c_fc": "batch", "h.*.attn.c_attn": "out", "lm_head": "batch"}
        more = {"cluster": f"{world}xcpu", "planning": {"cost": "roofline", "pins": pins}}
    made = kind(
        model,
        args,
        train_dataset=data[:16],
        eval_dataset=data[16:],
        compute_metrics=accuracy,
        **more,
    )
    return made, data


def trained(rank: int, folder: str, resume: bool) -> dict[str, Any]:
    """The log of a run, what it predicts, and the weights that it saved."""
    with as_started_by_torchrun():
        trainer, data = trainer_of(folder, **({"save_strategy": "no"} if resume else {}))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        found = trainer.predict([{k: v for k, v in row.items() if k != "labels"} for row in data])
        trainer.save_model(f"{folder}/final")
        refused = ""
        try:
            trainer.model.save_pretrained(f"{folder}/stale")
        except Exception as error:
            refused = str(error)
        if size() > 1:
            dist.barrier()
        again = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/final").eval()
        batch = trainer.data_collator(data)
        with torch.no_grad():
            logits = again(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return {
            "log": trainer.state.log_history,
            "tokens": trainer.state.num_input_tokens_seen,
            "metrics": found.metrics,
            "predicted": found.predictions,
            "plain": logits.logits.numpy(),
            "refused": refused,
        }


def ran(rank: int, script: str, folder: str) -> list[float]:
    """The losses of a script."""
    with as_started_by_torchrun(), contextlib.chdir(folder):
        found: dict[str, Any] = {}
        exec(compile(script, "train.py", "exec"), found)
        return column({"log": found["trainer"].state.log_history}, "loss")


def test_the_script_of_the_page_runs(on_ranks: Launch, tmp_path: Path) -> None:
    script, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    first, second = on_ranks(ran, 2, script, str(tmp_path))
    assert len(first) == 4
    assert first == second
    assert (tmp_path / "final" / "config.json").is_file()
    assert (tmp_path / "run" / "shardfold-plan.json").is_file()


def column(told: dict[str, Any], key: str) -> list[float]:
    return [line[key] for line in told["log"] if key in line]


def test_a_script_on_two_processes_is_that_of_one(on_ranks: Launch, tmp_path: Path) -> None:
    (alone,) = on_ranks(trained, 1, str(tmp_path / "one"), False)
    both = on_ranks(trained, 2, str(tmp_path / "two"), False)
    for told in both:
        for key, lines in (("loss", STEPS), ("grad_norm", STEPS), ("eval_loss", 2)):
            assert len(column(told, key)) == lines
            np.testing.assert_allclose(column(told, key), column(alone, key), atol=1e-5)
        assert column(told, "eval_accuracy") == column(alone, "eval_accuracy")
        assert column(told, "learning_rate") == column(alone, "learning_rate")
        assert told["tokens"] == alone["tokens"]
        np.testing.assert_allclose(told["predicted"], alone["predicted"], atol=1e-5)
        np.testing.assert_allclose(told["predicted"], told["plain"], atol=1e-5)
        assert "test_loss" not in told["metrics"]  # the data had no labels
        assert "trainer.save_model(folder)" in told["refused"]
    assert column(alone, "loss")[-1] < column(alone, "loss")[0]
    names = [set(load_file(tmp_path / who / "final/model.safetensors")) for who in ("one", "two")]
    assert names[0] == names[1]
    resumed, _ = on_ranks(trained, 2, str(tmp_path / "two"), True)
    np.testing.assert_allclose(column(resumed, "loss"), column(both[0], "loss"), atol=1e-7)
    np.testing.assert_allclose(resumed["predicted"], both[0]["predicted"], atol=1e-6)
