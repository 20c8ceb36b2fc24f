"""Hugging Face's Trainer under plans: the curve of one process, kill, resume, save_pretrained.

    python benchmarks/trainer.py            # all tasks, about ten minutes on two cores

Each task is one script, which is started three ways: by plain transformers on one process, and by
`shardfold.hf.Trainer` on 2 and on 4 gloo processes, under a plan that is made from its first batch.
The two lines that differ are in `train`. So small a model is fastest without any split: pins make
the plan split the batch on two processes, and the batch and layers on four. Results go to
benchmarks/results/trainer.json and docs/results/trainer.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLES, BATCH, STEPS = 201, 8, 50  # 180 samples to train on: the last batch has 4


def language_model() -> tuple[Any, list[Any], dict[str, Any]]:
    """A causal LM with tied weights; some labels do not count, two batches make a step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    tokens = torch.randint(96, (SAMPLES, 16))
    ends = torch.randint(4, 17, (SAMPLES, 1))
    mask = (torch.arange(16) < ends).long()
    labels = tokens.masked_fill(mask == 0, -100)
    data = [
        {"input_ids": t, "attention_mask": m, "labels": y}
        for t, m, y in zip(tokens, mask, labels, strict=True)
    ]
    return GPT2LMHeadModel(config), data, {"gradient_accumulation_steps": 2}


def text_classifier() -> tuple[Any, list[Any], dict[str, Any]]:
    """A sequence classifier."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )
    tokens = torch.randint(96, (SAMPLES, 12))
    mask = (torch.arange(12) < torch.randint(3, 13, (SAMPLES, 1))).long()
    data = [
        {"input_ids": t, "attention_mask": m, "labels": t[0] % 4}
        for t, m in zip(tokens, mask, strict=True)
    ]
    return BertForSequenceClassification(config), data, {}


def image_classifier() -> tuple[Any, list[Any], dict[str, Any]]:
    """An image classifier with batch norm."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=4,
        problem_type="single_label_classification",
    )
    labels = torch.arange(SAMPLES) % 4
    images = torch.randn(SAMPLES, 3, 16, 16) + labels.view(-1, 1, 1, 1) / 2
    data = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    return ResNetForImageClassification(config), data, {}


TASKS = {
    "causal LM (GPT-2)": language_model,
    "sequence classification (BERT)": text_classifier,
    "image classification (ResNet)": image_classifier,
}
PINNED = {
    "causal LM (GPT-2)": ("h.*.mlp.c_fc", "h.*.attn.c_attn"),
    "sequence classification (BERT)": ("*.intermediate.dense", "*.query"),
    "image classification (ResNet)": ("*.convolution",),
}


def accuracy(predicted: Any) -> dict[str, float]:
    """The share of labels that are predicted."""
    chosen, counted = predicted.predictions.argmax(-1), predicted.label_ids != -100
    return {"accuracy": float((chosen == predicted.label_ids)[counted].mean())}


def train(task: str, folder: str, devices: int, stop: int, resume: bool) -> None:
    """What a user's script does; with one device, it is plain transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data, options = TASKS[task]()
    args = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // devices,
        per_device_eval_batch_size=BATCH // devices,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        weight_decay=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=10,
        save_total_limit=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    more: dict[str, Any] = {}
    kind: Any = transformers.Trainer
    if devices > 1:
        from shardfold import hf

        kind = hf.Trainer  # the first line that changes
        more = {"cluster": f"{devices}xcpu", "planning": planning(task, devices)}  # the second

    class Killed(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == stop:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = kind(
        model,
        args,
        train_dataset=data[:-21],
        eval_dataset=data[-21:],
        compute_metrics=accuracy,
        callbacks=[Killed()] if stop else [],
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    predicted = trainer.predict(data[-21:])
    trainer.save_model(f"{folder}/final")
    if trainer.is_world_process_zero():
        batch = trainer.data_collator(data[:BATCH])
        again = type(model).from_pretrained(f"{folder}/final").eval()
        with torch.no_grad():
            mean = again(**trainer.data_collator(data[-21:])).logits.numpy()
            logits = again(**batch).logits
        told = {
            "log": trainer.state.log_history,
            "predictions": float(abs(predicted.predictions - mean).max()),
            "logits": logits.tolist(),
            "mesh": None if devices == 1 else [f"{a.name}={a.size}" for a in trainer.plan.mesh],
        }
        Path(folder, "told.json").write_text(json.dumps(told))


def planning(task: str, devices: int) -> dict[str, Any]:
    """What is asked of the plan."""
    split = "batch/2" if devices == 2 else "batch/2 out/2"
    mesh = {"mesh": "2x2"} if devices == 4 else {}
    return {"cost": "roofline", "pins": dict.fromkeys(PINNED[task], split), **mesh}


def start(task: str, folder: Path, devices: int, stop: int = 0, resume: bool = False) -> Any:
    """Run the script; what it told, or None if it was killed."""
    own = [__file__, "--task", task, "--folder", str(folder), "--devices", str(devices)]
    own += ["--stop", str(stop)] + (["--resume"] if resume else [])
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    command = [sys.executable, *(launch if devices > 1 else []), *own]
    path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if stop:
        assert done.returncode != 0
        return None
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "told.json").read_text())


def column(told: Any, key: str) -> list[float]:
    """A value of every line of a log that has it."""
    return [line[key] for line in told["log"] if key in line]


def apart(one: Any, other: Any, key: str) -> float:
    """The largest difference of a value in two logs."""
    pairs = zip(column(one, key), column(other, key), strict=True)
    return max(abs(a - b) for a, b in pairs)


def measured(task: str) -> list[dict[str, Any]]:
    """One task on 2 and 4 processes, beside one."""
    import numpy as np

    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        alone = start(task, root / "1", 1)
        for devices in (2, 4):
            began = time.perf_counter()
            whole = start(task, root / str(devices), devices)
            start(task, root / f"{devices}k", devices, stop=33)
            resumed = start(task, root / f"{devices}k", devices, resume=True)
            assert len(column(whole, "loss")) == STEPS == len(column(resumed, "loss"))
            rows.append(
                {
                    "task": task,
                    "processes": devices,
                    "mesh": whole["mesh"],
                    "first loss": column(whole, "loss")[0],
                    "last loss": column(whole, "loss")[-1],
                    "loss": apart(alone, whole, "loss"),
                    "norm": apart(alone, whole, "grad_norm"),
                    "evaluation": apart(alone, whole, "eval_loss"),
                    "accuracy": apart(alone, whole, "eval_accuracy"),
                    "predictions": whole["predictions"],
                    "resumed": apart(whole, resumed, "loss"),
                    "logits": float(np.abs(np.subtract(alone["logits"], whole["logits"])).max()),
                    "seconds": time.perf_counter() - began,
                }
            )
            print(rows[-1], flush=True)
    return rows


def page(figures: dict[str, Any]) -> str:
    """docs/results/trainer.md."""
    lines = [
        "# Hugging Face's Trainer under plans",
        "",
        "One script a task, started by plain transformers on one process, and by",
        "`shardfold.hf.Trainer` on 2 and 4 gloo processes. On two, the plan splits the batch; on",
        "four (2x2), the batch and the outputs of layers. Data is drawn; AdamW in float32, with",
        f"clipping; {STEPS} steps of {BATCH} samples (the language model: of two such batches),",
        "the last batch of an epoch shorter; every 20 steps an evaluation of 21 samples.",
        "",
        "The table has the largest difference from the plain run, of all steps. *Resumed*: all",
        "processes are killed after step 33 and started again, which goes on at step 30; compared",
        "with the run that was left alone. *Predictions*: `trainer.predict` against plain",
        "transformers on what `trainer.save_model` wrote. *Logits*: of plain transformers, on the",
        "weights of this run and of the plain run.",
        "",
        "| task | processes | loss | difference of the loss | gradient norm | evaluation "
        "| accuracy | resumed | predictions | logits |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in figures["rows"]:
        keys = ("loss", "norm", "evaluation", "accuracy", "resumed", "predictions", "logits")
        lines.append(
            f"| {row['task']} | {' x '.join(row['mesh'])} | {row['first loss']:.4f} to "
            f"{row['last loss']:.4f} | "
            + " | ".join(f"{row[key]:.0e}" if row[key] else "0" for key in keys)
            + " |"
        )
    where = figures["environment"]
    lines += ["", f"{where['processor']}, {where['date']}. Made by `benchmarks/trainer.py`.", ""]
    return "\n".join(lines)


def main() -> None:
    """All tasks."""
    from environment import environment

    figures = {"rows": [row for task in TASKS for row in measured(task)]}
    figures["environment"] = environment()
    results = ROOT / "benchmarks" / "results" / "trainer.json"
    results.write_text(json.dumps(figures, indent=1) + "\n")
    (ROOT / "docs" / "results" / "trainer.md").write_text(page(figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task")
    parser.add_argument("--folder")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--stop", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    if given.folder:
        train(given.task, given.folder, given.devices, given.stop, given.resume)
    else:
        main()
