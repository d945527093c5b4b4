"""Train on sounds of different lengths, in padded batches of similar length.

Run ``python audio.py "sounds-{000..099}.tar"`` with shards whose samples have ``wav``, ``flac`` or ``mp3``, and
``cls``. Without shards, it makes some: a tone that rises, falls or stays. Needs the extra ``media``.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
import wave
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from wds_datapipes import ShardList, ShardReadingService, ShardWriter

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

BATCH_SIZE, CLASSES = 16, 3
#: Samples of sound per second, for the sounds of the demonstration, and in a window and between windows.
RATE, WINDOW, STEP = 8000, 256, 128


def wav_file(sound: torch.Tensor) -> bytes:
    """Return a mono WAV file of a sound with values from -1 to 1."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((sound * 32767).to(torch.int16).numpy().tobytes())
    return file.getvalue()


def write_shards(folder: str) -> str:
    """Write tones that stay, rise or fall; return the pattern of the shards."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(f"{folder}/sounds-%03d.tar", maxcount=48, verbose=False) as writer:
        for number in range(288):
            label = number % CLASSES
            length, start = rng.randint(RATE // 5, RATE), rng.uniform(600, 2000)
            time = torch.linspace(0, 1, length)
            frequency = start * (1 + (0, 0.6, -0.6)[label] * time)
            sound = 0.5 * torch.sin(2 * torch.pi * frequency.cumsum(0) / RATE)
            sound += 0.1 * torch.randn(length, generator=generator)
            writer.write({"__key__": f"{number:05d}", "wav": wav_file(sound.clamp(-1, 1)), "cls": label})
    return f"{folder}/sounds-*.tar"


def spectrogram(sound: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return the logarithm of the power at each frequency in each window, of shape (windows, frequencies)."""
    samples, _ = sound  # (channels, samples), and the rate
    mono = samples.mean(0)
    if len(mono) < WINDOW:
        mono = nn.functional.pad(mono, (0, WINDOW - len(mono)))
    parts = torch.stft(mono, WINDOW, STEP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
    return parts.abs().square().add(1e-4).log().T.contiguous()


def pad(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return spectrograms that are padded to the longest one, their lengths, and their labels."""
    sounds = [sample["sound"] for sample in samples]
    lengths = torch.tensor([len(sound) for sound in sounds])
    return pad_sequence(sounds, batch_first=True), lengths, torch.tensor([sample["cls"] for sample in samples])


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of padded batches."""
    samples = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(500)
    sounds = samples.wds_decode("torch_audio").rename(sound="wav;flac;mp3").map_dict(sound=spectrogram)
    batches = sounds.bucket_samples("sound", batch_size=BATCH_SIZE).map(pad)
    loader: DataLoader2[Any] = DataLoader2(batches, reading_service=ShardReadingService(num_workers=2))
    loader.seed(0)
    return loader


class Classifier(nn.Module):
    """Convolutions over time, and the mean over the windows that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = WINDOW // 2 + 1
        self.convolutions = nn.Sequential(
            *(nn.Conv1d(frequencies, 48, 5, padding=2), nn.ReLU()), *(nn.Conv1d(48, 48, 5, padding=2), nn.ReLU())
        )
        self.classify = nn.Linear(48, CLASSES)

    def forward(self, sounds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        is_sound = torch.arange(sounds.shape[1]) < lengths[:, None]
        features = self.convolutions(sounds.transpose(1, 2)) * is_sound[:, None]
        scores: torch.Tensor = self.classify(features.sum(2) / lengths[:, None])
        return scores


def train(urls: str, epochs: int) -> None:
    """Train, and print the loss and the share of padding of each epoch."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with make_loader(urls) as loader:
        for epoch in range(1, epochs + 1):
            losses, windows, padded = [], 0, 0
            for sounds, lengths, labels in loader:
                loss = nn.functional.cross_entropy(model(sounds, lengths), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                windows, padded = windows + int(lengths.sum()), padded + lengths.numel() * sounds.shape[1]
            mean = sum(losses) / len(losses)
            print(f"Epoch {epoch}: loss {mean:.3f}, {1 - windows / padded:.0%} padding", flush=True)


def main() -> None:
    """Train on the given shards, or on tones."""
    parser = argparse.ArgumentParser(description="Train on sounds of different lengths")
    parser.add_argument("urls", nargs="?", help="shards of wav, flac or mp3, and cls; by default, tones")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    with tempfile.TemporaryDirectory() as folder:
        train(args.urls or write_shards(folder), args.epochs)


if __name__ == "__main__":
    main()
