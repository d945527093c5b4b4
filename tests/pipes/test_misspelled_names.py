"""Names that nearly exist: the errors say which one was meant."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from wds_datapipes import ImageDecoder, MockSamples

SAMPLES = MockSamples({"__key__": "a", "jpg": b""}, 1)


@pytest.mark.parametrize(
    ("code", "meant"),
    [
        ('ShardList("a.tar").load_wds_shard()', "load_wds_shards"),
        ('ShardList("a.tar").load_wds_shards().group_sample()', "group_samples"),
        ('ShardList("a.tar").shufle()', "shuffle"),
    ],
)
def test_a_traceback_names_the_stage_that_was_meant(code: str, meant: str) -> None:
    program = ["-W", "ignore", "-c", f"from wds_datapipes import ShardList\n{code}"]
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(rf"AttributeError: .* has no attribute .*Did you mean: '{meant}'\?", done.stderr)


@pytest.mark.parametrize(
    ("spec", "meant"), [("torchrbg8", "torchrgb8"), ("torch_vidoe", "torch_video"), ("pli", "pil")]
)
def test_an_unknown_decoder_is_compared_with_those_that_exist(spec: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"no decoder '{spec}'\. Did you mean '{meant}'\?"):
        SAMPLES.wds_decode(spec)


def test_an_unknown_image_spec_is_compared_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'rbg8' is not an image spec; did you mean 'rgb8'\?"):
        ImageDecoder("rbg8")
    with pytest.raises(ValueError, match="'xyz' is not an image spec; choose one of"):
        ImageDecoder("xyz")
