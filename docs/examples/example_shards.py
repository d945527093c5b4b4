"""Write four shards of eight small images each, data/train-{000..003}.tar, which pages of the documentation read."""

import io
from pathlib import Path

from PIL import Image

from wds_datapipes.testing import build_shard

Path("data").mkdir(exist_ok=True)
for shard in range(4):
    samples: list[dict[str, bytes | str]] = []
    for label in range(8):
        file = io.BytesIO()
        Image.new("L", (8, 8), 8 * label).save(file, "png")
        samples.append({"__key__": f"{shard}-{label}", "png": file.getvalue(), "cls": str(label)})
    build_shard(f"data/train-{shard:03d}.tar", samples)
