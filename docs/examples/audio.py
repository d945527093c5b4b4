"""Train on sounds of different lengths, in batches of similar length that take about as much memory as each other.

Run ``torchrun --standalone --nproc-per-node 2 audio.py "sounds-{000..099}.tar"`` with shards whose samples have
``wav``, ``flac`` or ``mp3``, and ``cls``, and again after a crash: it resumes with the very next batch. Without shards,
it makes some: a tone that rises, falls or stays. Needs the extra ``media``.
"""

from __future__ import annotations

import argparse
import io
import random
import wave
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from wds_datapipes import ShardList, ShardReadingService, ShardWriter
from wds_datapipes.integrations.ranks import gather_states

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: The most windows in a batch of a rank, with its padding; the steps of a run, and between two checkpoints.
BATCH_WINDOWS, STEPS, SAVE_EVERY, CLASSES = 600, 40, 8, 3
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


def write_shards(folder: Path) -> None:
    """Write tones that stay, rise or fall."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(f"{folder}/sounds-%03d.tar", maxcount=48, verbose=False) as writer:
        for number in range(576):
            label = number % CLASSES
            length, start = rng.randint(RATE // 5, RATE), rng.uniform(600, 2000)
            time = torch.linspace(0, 1, length)
            frequency = start * (1 + (0, 0.6, -0.6)[label] * time)
            sound = 0.5 * torch.sin(2 * torch.pi * frequency.cumsum(0) / RATE)
            sound += 0.1 * torch.randn(length, generator=generator)
            writer.write({"__key__": f"{number:05d}", "wav": wav_file(sound.clamp(-1, 1)), "cls": label})


def spectrogram(sound: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return the logarithm of the power at each frequency in each window, of shape (windows, frequencies)."""
    samples, _ = sound  # (channels, samples), and the rate
    mono = samples.mean(0)
    if len(mono) < WINDOW:
        mono = nn.functional.pad(mono, (0, WINDOW - len(mono)))
    parts = torch.stft(mono, WINDOW, STEP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
    return parts.abs().square().add(1e-4).log().T.contiguous()


def hide_part(sample: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Hide some frequencies; the draw depends on the seed, the epoch and the sample, also after a restart."""
    sound = sample["sound"].clone()
    first = rng.randrange(sound.shape[1] - 8)
    sound[:, first : first + rng.randint(0, 8)] = sound.mean()
    return {"sound": sound, "cls": sample["cls"]}


def pad(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return spectrograms that are padded to the longest one, their lengths, and their labels."""
    sounds = [sample["sound"] for sample in samples]
    lengths = torch.tensor([len(sound) for sound in sounds])
    return pad_sequence(sounds, batch_first=True), lengths, torch.tensor([sample["cls"] for sample in samples])


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of padded batches of this rank: a run is one epoch of STEPS batches, on each rank."""
    samples = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(100)
    sounds = samples.wds_decode("torch_audio").rename(sound="wav;flac;mp3").map_dict(sound=spectrogram)
    hidden = sounds.map_samples_with_rng(hide_part)
    batches = hidden.bucket_samples("sound", boundaries=range(20, 60, 8), max_tokens=BATCH_WINDOWS).map(pad)
    service = ShardReadingService(num_workers=1, distributed=True, timeout_s=600)
    loader: DataLoader2[Any] = DataLoader2(batches.with_epoch(STEPS), reading_service=service)
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
        is_sound = torch.arange(sounds.shape[1], device=sounds.device) < lengths[:, None]
        features = self.convolutions(sounds.transpose(1, 2)) * is_sound[:, None]
        scores: torch.Tensor = self.classify(features.sum(2) / lengths[:, None])
        return scores


def train(urls: str, folder: Path) -> None:
    """Train on this rank to the end of the run, from its last checkpoint, if any, and print the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    first, checkpoint = 0, folder / "checkpoint.pt"
    with make_loader(urls) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=device, weights_only=True)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["data"])
            first = saved["step"]
        for step, batch in zip(count(first + 1), loader):
            sounds, lengths, labels = (each.to(device) for each in batch)
            loss = nn.functional.cross_entropy(model(sounds, lengths), labels, reduction="sum")
            # Of all ranks: the loss, the sounds, and the windows without padding and with it.
            numbers = loss.item(), len(labels), int(lengths.sum()), len(labels) * sounds.shape[1]
            facts = torch.tensor(numbers, device=device)
            dist.all_reduce(facts)
            (loss * dist.get_world_size() / facts[1]).backward()  # each sound weighs as much, in a small batch, too
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                mean, padding = facts[0] / facts[1], 1 - facts[2] / facts[3]
                print(f"Step {step}: loss {mean:.6f}, {facts[1]:.0f} sounds, {padding:.0%} padding", flush=True)
            if step % SAVE_EVERY == 0:
                position = gather_states(loader.state_dict())  # each rank has its own position; rank 0 has all of them
                if dist.get_rank() == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "data": position, "step": step}, checkpoint.with_suffix(".part"))
                    checkpoint.with_suffix(".part").replace(checkpoint)  # a crash leaves the old or the new one


def main() -> None:
    """Train on the given shards, or on tones."""
    parser = argparse.ArgumentParser(description="Train on sounds of different lengths")
    parser.add_argument("urls", nargs="?", help="shards of wav, flac or mp3, and cls; by default, tones")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoint, and of the tones")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    if dist.get_rank() == 0 and not (options.folder / "checkpoint.pt").exists():
        options.folder.mkdir(exist_ok=True)
        if options.urls is None:
            write_shards(options.folder)
    dist.barrier()
    train(options.urls or f"{options.folder}/sounds-*.tar", options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
