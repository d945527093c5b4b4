"""``wds_decode`` as a stage: options, and functions of a script in a spawned worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.errors import DecodeError, UnsafeInputError


def source(*samples: dict[str, Any]) -> IterDataPipe[Any]:
    return IterableWrapper(list(samples) or [{"__key__": "a", "pts": b"1,2", "cls": b"3"}])


def parse(data: bytes) -> list[int]:
    return [int(number) for number in data.split(b",")]


def test_errors_cross_a_worker_with_type_and_text() -> None:
    stage = source({"__key__": "a", "__url__": "s.tar", "pts": b"one"}).wds_decode(pts=parse)
    loader = DataLoader(stage, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(DecodeError, match=r"'pts' of sample 'a' in shard 's\.tar'.*parse \(for pts\)"):
        list(loader)


SCRIPT = """
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from wds_datapipes.codecs.images import ImageDecoder

def doubled(data):
    return 2 * int(data)

class Raised:
    def __init__(self, power):
        self.power = power
    def __call__(self, data):
        return int(data) ** self.power

if __name__ == "__main__":
    source = IterableWrapper([{"num": b"3", "base": b"4", "left.num": b"5", "cls": b"6"}])
    stage = source.wds_decode(ImageDecoder("rgb"), num=doubled, base=Raised(3))
    print(*DataLoader(stage, batch_size=None, num_workers=1, multiprocessing_context="spawn"))
"""


def test_a_spawned_worker_decodes_by_functions_and_classes_of_the_main_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert found.stdout == "{'num': 6, 'base': 64, 'left.num': 10, 'cls': 6}\n", found.stderr


@pytest.mark.parametrize("extension", ["cls", "source", "source_dp", "self", "enable_df_api_tracing"])
def test_an_extension_may_have_the_name_of_a_parameter(extension: str) -> None:
    decoders = {extension: lambda data: "decoded"}
    assert list(source({extension: b"1"}).wds_decode(**decoders)) == [{extension: "decoded"}]


def test_the_stage_checks_its_arguments_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="there is no decoder 'rgb9'"):
        source().wds_decode("rgb9")
    with pytest.raises(ValueError, match="on_error must be"):
        source().wds_decode(on_error="ignore")


def test_the_stage_passes_every_option_on() -> None:
    samples = [{"cls": b"1", "pkl": b"I1\n.", "txt": 3}, {"cls": b"x", "pkl": b"I1\n.", "txt": 3}]
    stage = source(*samples).wds_decode(only="cls pkl txt", partial=True, allow_pickle=True, on_error="skip")
    assert list(stage) == [{"cls": 1, "pkl": 1, "txt": 3}]
    with pytest.raises(UnsafeInputError, match="allow_pickle=True"):
        list(source({"pkl": b"I1\n."}).wds_decode(on_error="skip"))
