"""A program that runs without torchdata, or with one that has no DataLoader2.

`test_without_dataloader2` starts it. Arguments: the missing modules, separated by commas, and a file with a state that
another program has saved. It prints all results as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

#: States are saved after these numbers of items.
CUT = 20


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def epoch_of(loader: Any, count: int = sys.maxsize) -> list[str]:
    """Return the items of an epoch, or the first ``count`` of them."""
    return [item for _, item in zip(range(count), loader.dataset.tracked(loader), strict=False)]


def refusal(use: Callable[[], object]) -> str:
    try:
        use()
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(missing: str, saved: str) -> None:
    hidden = {*missing.split(",")}
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None: these cannot be imported
    import wds_datapipes
    from wds_datapipes import ShardList, StatefulShards, merge_states
    from wds_datapipes.pipes.state.description import descriptions
    from wds_datapipes.testing import check_resume

    def pipe() -> Any:
        shards = ShardList("{a..f}.tar").shuffle().sharding_filter()
        return shards.load_wds_shards().group_samples().shuffle_samples(5).map(key_of)

    def loader_of(state: Any = None, kind: Any = DataLoader, workers: int = 2) -> Any:
        data = StatefulShards(pipe(), seed=3)
        if state is not None:
            data.load_state_dict(state)
        return kind(data, batch_size=None, num_workers=workers)

    other = json.loads(Path(saved).read_text())
    resumed = loader_of(other)
    found = {"resumed": [epoch_of(resumed), epoch_of(resumed)]}
    found["elastic"] = [epoch_of(loader_of(merge_states([other]), workers=1))]

    begun = loader_of()
    found["begun"] = [epoch_of(begun, CUT)]
    state = begun.dataset.state_dict()

    everything: dict[str, Any] = {}
    exec("from wds_datapipes import *", everything)
    if "torchdata.datapipes" in hidden:  # the others have no StatefulDataLoader either
        stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
        loader = loader_of(kind=stateful)
        items = iter(loader)
        found["begun"].append([next(items) for _ in range(CUT)])
        own = loader.state_dict()
        del items
        loader = loader_of(kind=stateful)
        loader.load_state_dict(own)
        found["resumed"] += [[*loader], [*loader]]
        found["resumed"] += [epoch_of(loader_of(own))]
    facts = {
        "stages": descriptions(pipe().filter(bool).batch(3).collate()),
        "missing from *": sorted({*wds_datapipes._LATER, "ShardList"} - {*everything}),
        "service": refusal(lambda: wds_datapipes.ShardReadingService),
        "check_resume": refusal(lambda: check_resume(pipe)),
        "imported": sorted(
            {name for name in sys.modules if name.startswith(("torchdata.data", "torchdata._"))} - hidden
        ),
    }
    print(json.dumps({**found, **facts, "state": state}))


if __name__ == "__main__":
    main(*sys.argv[1:])
