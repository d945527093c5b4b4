"""Train a language model on texts of different lengths, packed into rows with almost no padding.

Run ``python text_packing.py "texts-{000..099}.tar"`` with shards whose samples have ``txt``. Without shards, it makes
some short stories. Tokens are bytes; replace `tokenize` with your tokenizer.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wds_datapipes import ShardList, ShardReadingService, ShardWriter

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

BATCH_SIZE, ROW_LENGTH, WIDTH, HEADS, LAYERS = 8, 128, 64, 4, 2
#: The tokens of a text begin with 1; padding has 0.
BEGIN = 1


def write_shards(folder: str) -> str:
    """Write short stories; return the pattern of the shards."""
    rng = random.Random(0)
    names, verbs = ("Ada", "Grace", "Alan", "Emmy"), ("sees", "likes", "paints", "hears")
    things = ("the sea", "a red house", "the old clock", "two birds")
    with ShardWriter(f"{folder}/texts-%03d.tar", maxcount=64, verbose=False) as writer:
        for number in range(320):
            sentences = [
                f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(things)}." for _ in range(rng.randint(1, 4))
            ]
            writer.write({"__key__": f"{number:05d}", "txt": " ".join(sentences)})
    return f"{folder}/texts-*.tar"


def tokenize(text: str) -> torch.Tensor:
    """Return the tokens of a text."""
    return torch.tensor([BEGIN, *text.encode()])


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of batches of rows."""
    samples = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(1000)
    rows = samples.wds_decode().map_dict(txt=tokenize).pack_samples(ROW_LENGTH, "txt", pad=0, long_samples="split")
    batches = rows.to_tuple("txt", "position_ids", "segment_ids").batch(BATCH_SIZE).collate()
    loader: DataLoader2[Any] = DataLoader2(batches, reading_service=ShardReadingService(num_workers=2))
    loader.seed(0)
    return loader


class LanguageModel(nn.Module):
    """A transformer, whose attention does not cross from one text of a row to another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, WIDTH)
        self.embed_positions = nn.Embedding(ROW_LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.predict = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Return the scores of the token that follows each token."""
        is_same_text = segments[:, :, None] == segments[:, None, :]
        is_seen = is_same_text & torch.ones_like(is_same_text[0]).tril()
        is_hidden = (~is_seen).repeat_interleave(HEADS, 0)
        scores: torch.Tensor = self.predict(
            self.layers(self.embed_tokens(tokens) + self.embed_positions(positions), mask=is_hidden)
        )
        return scores


def train(urls: str, epochs: int) -> None:
    """Train, and print the loss and the share of padding of each epoch."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    with make_loader(urls) as loader:
        for epoch in range(1, epochs + 1):
            losses, padding = [], []
            for tokens, positions, segments in loader:
                scores = model(tokens, positions, segments)[:, :-1]
                # The last token of a text predicts nothing, and neither does padding.
                has_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
                loss = cross_entropy(scores[has_next], tokens[:, 1:][has_next])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                padding.append((segments == 0).float().mean().item())
            loss_, padding_ = (sum(values) / len(values) for values in (losses, padding))
            print(f"Epoch {epoch}: loss {loss_:.3f}, {padding_:.0%} padding", flush=True)


def main() -> None:
    """Train on the given shards, or on short stories."""
    parser = argparse.ArgumentParser(description="Train a language model on packed texts")
    parser.add_argument("urls", nargs="?", help="shards of txt; by default, short stories")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    with tempfile.TemporaryDirectory() as folder:
        train(args.urls or write_shards(folder), args.epochs)


if __name__ == "__main__":
    main()
