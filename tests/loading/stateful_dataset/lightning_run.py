"""Trains with Lightning in a separate process; a script for test_lightning.py.

It reads the shards in its working folder. Two ranks train together and write what each of them saw, and then this
process prints the batches that each fit trained on as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, StatefulShards
from wds_datapipes.integrations.lightning import count_last_step

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the import above

EPOCHS = 3


class Model(lightning.LightningModule):  # type: ignore[misc]  # it is not installed where types are checked
    """Records the keys of each batch that it trains on."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = seen

    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        if hasattr(loader, "set_epoch"):  # Lightning calls set_epoch of torch's samplers
            loader.set_epoch(self.current_epoch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        count_last_step(checkpoint)

    def training_step(self, batch: Any, _: int) -> Any:
        self.seen.append(sorted(batch))
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tracked:
    """A DataLoader over StatefulShards, with the state of its dataset."""

    def __init__(self, data: StatefulShards, loader: DataLoader[Any]) -> None:
        self.data, self.loader = data, loader
        self.set_epoch = data.set_epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.data.tracked(self.loader)

    def state_dict(self) -> dict[str, str]:
        return self.data.state_dict()

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.data.load_state_dict(state)


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def pipeline(length: int | None) -> Any:
    pipe = ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = pipe.shuffle_samples(6).map(key_of).batch(5)
    return pipe if length is None else pipe.with_length(length)


def of_dataloader2(length: int | None, **options: Any) -> Any:
    loader: Any = DataLoader2(pipeline(length), reading_service=ShardReadingService(2, **options))
    loader.seed(7)
    return loader


def of_indexed(_: int | None, **options: Any) -> Any:
    """Return a loader whose length is known, because it reads by index."""
    pipe: Any = IndexedSamples("{0..3}.tar").map(key_of).batch(5)
    loader: Any = DataLoader2(pipe, reading_service=ShardReadingService(2, **options))
    loader.seed(7)
    return loader


def of_map_style() -> Any:
    """Return a plain DataLoader of a map-style dataset, which Lightning gives a DistributedSampler."""
    data = IndexedSamples("{0..3}.tar").map_style()
    return DataLoader(data, batch_size=5, shuffle=True, collate_fn=keys_of, num_workers=1)


def keys_of(samples: list[dict[str, Any]]) -> list[str]:
    return [key_of(sample) for sample in samples]


def of_stateful(length: int | None) -> Any:
    data = StatefulShards(pipeline(length), seed=7)
    loader: Any = StatefulDataLoader(data, batch_size=None, num_workers=2)
    loader.set_epoch = data.set_epoch
    return loader


def of_data_loader(length: int | None) -> Any:
    data = StatefulShards(pipeline(length), seed=7)
    return Tracked(data, DataLoader(data, batch_size=None, num_workers=2))


LOADERS: dict[str, Callable[[int | None], Any]] = {
    "DataLoader2": of_dataloader2,
    "StatefulDataLoader": of_stateful,
    "DataLoader": of_data_loader,
    "indexed DataLoader2": of_indexed,
}


def fit(loader: Any, model: Model, *, folder: str = "", path: str | None = None, **options: Any) -> None:
    """Train; if a folder is given, save a checkpoint after each step and each epoch."""
    saving = [
        lightning.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1),
        lightning.callbacks.ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1),
    ]
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(folder),
        **({"callbacks": saving} if folder else options),
    )
    trainer.fit(model, loader, ckpt_path=path)


def resume(name: str, length: int, steps: list[int]) -> dict[str, Any]:
    """Train without interruption, and resume from some of the checkpoints."""
    whole: list[Any] = []
    fit(LOADERS[name](length), Model(whole), folder=name)
    rests = {}
    for cut in [*(f"step={step}" for step in steps), "epoch=0"]:
        rest: list[Any] = []
        fit(LOADERS[name](length), Model(rest), path=f"{name}/{cut}.ckpt")
        rests[cut] = rest
    return {"whole": whole, "rests": rests}


class Recorder(lightning.Callback):  # type: ignore[misc]  # it is not installed where types are checked
    """Write the batches that this rank sees; runs in a separate process."""

    def __init__(self, name: str, caught: list[warnings.WarningMessage]) -> None:
        self.name, self.caught = name, caught

    def on_train_end(self, trainer: Any, model: Any) -> None:
        results = {"seen": model.seen, "warnings": [str(each.message) for each in self.caught]}
        Path(f"{self.name}-{trainer.global_rank}.json").write_text(json.dumps(results))


def of_ranks() -> None:
    """Train on two ranks, and write the batches that each rank sees."""
    loaders: dict[str, Callable[[], Any]] = {
        "by default": lambda: of_dataloader2(None),
        "indexed": lambda: of_indexed(None, distributed=True),
        "map style": of_map_style,
    }
    for name, new in loaders.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(new(), Model([]), callbacks=[Recorder(name, caught)], devices=2, strategy="ddp_fork")


def main() -> None:
    for name in ("pytorch_lightning", "lightning_fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    of_ranks()
    length = int(sys.argv[1])
    found = {name: resume(name, length, [2, length, length + 3]) for name in LOADERS}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for new in LOADERS.values():
            fit(new(None), Model([]), max_steps=1)
    results = [str(each.message) for each in caught]
    print(json.dumps({"loaders": found, "without a length": results}))


if __name__ == "__main__":
    main()
