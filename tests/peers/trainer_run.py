"""Trains with the Trainer of Hugging Face in a separate process; a script for test_hugging_face.py.

``torchrun`` starts it in the folder of the shards. Each rank writes the keys of its batches. With an argument, the
trainer resumes from that checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from wds_datapipes import IndexedSamples


class Model(torch.nn.Module):
    """Records the keys of each batch that it trains on."""

    def __init__(self, seen: list[list[str]]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = seen

    def forward(self, keys: list[str], inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(keys)
        return {"loss": self.layer(inputs).square().mean()}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    inputs = torch.tensor([[float(sample["cls"])] for sample in samples])
    return {"keys": [sample["__key__"] for sample in samples], "inputs": inputs}


class Stop(TrainerCallback):  # type: ignore[misc]  # it is not installed where types are checked
    """Stops training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def main() -> None:
    name, stop, checkpoint = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None
    seen: list[list[str]] = []
    arguments = TrainingArguments(
        output_dir=name,
        per_device_train_batch_size=5,
        num_train_epochs=2,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        use_cpu=True,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
    )
    data = IndexedSamples("{0..3}.tar").map_style()
    callbacks = [Stop(stop)] if stop else []
    trainer = Trainer(Model(seen), arguments, train_dataset=data, data_collator=collate, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=checkpoint)
    Path(f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
