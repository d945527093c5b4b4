"""Cut long videos into clips at keyframes, without encoding them again.

Run ``wds-datapipes create images videos --no-classes --ending mp4 -f cut_clips:cut_clips -o "clips-%06d.tar"`` with a
folder of videos. Needs the extra ``media``.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av

#: A clip ends at the first keyframe after this many seconds.
SECONDS = 10.0
#: FFmpeg's containers, by the extension of a video; a clip has the container of its video.
CONTAINERS = {"mkv": "matroska", "mov": "mov", "mp4": "mp4", "webm": "webm"}


def cut_clips(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a sample for each clip of a video: the clip, its place in the video, and the other fields of the video.

    Each clip begins with a keyframe, so it can be decoded by itself. The first audio track is cut at the same times.
    """
    fields = [name for name in sample if name.lower() in CONTAINERS]
    if len(fields) != 1:
        raise ValueError(f"the sample {sample['__key__']!r} has {len(fields)} videos, not one: {list(sample)}")
    field = fields[0]
    others = {name: value for name, value in sample.items() if name != field}
    with av.open(io.BytesIO(sample[field])) as video:
        if not video.streams.video:
            raise ValueError(f"the file {sample['__key__']!r} has no video track")
        tracks = [video.streams.video[0], *video.streams.audio[:1]]
        packets = [packet for packet in video.demux(tracks) if packet.size]
        if any(packet.is_corrupt for packet in packets):
            raise ValueError(f"the video {sample['__key__']!r} is cut or damaged")
        groups = group_by_keyframes([packet for packet in packets if packet.stream.type == "video"])
        if not groups:
            raise ValueError(f"the video {sample['__key__']!r} has no keyframe")
        sound = [packet for packet in packets if packet.stream.type == "audio"]
        starts = [time_of(group[0]) for group in groups]
        end = max(time_of(packet) + packet.duration * packet.time_base for packet in groups[-1])
        for number, (group, start, stop) in enumerate(zip(groups, starts, [*starts[1:], end], strict=True)):
            # Sound before the first clip and after the last one belongs to them.
            first = start if number else -math.inf
            last = stop if number < len(groups) - 1 else math.inf
            heard = [packet for packet in sound if first <= time_of(packet) < last]
            facts = {
                "video": sample["__key__"],
                "start": round(float(start - starts[0]), 3),
                "seconds": round(float(stop - start), 3),
                "frames": len(group),
            }
            clip = write_clip([*group, *heard], tracks, CONTAINERS[field.lower()], start)
            yield {**others, "__key__": f"{sample['__key__']}-{number:04d}", field: clip, "clip.json": facts}


def group_by_keyframes(packets: list[Any]) -> list[list[Any]]:
    """Return the packets of each clip, in the order in which they are decoded."""
    groups: list[list[Any]] = []
    for packet in packets:
        if packet.is_keyframe and (not groups or time_of(packet) - time_of(groups[-1][0]) >= SECONDS):
            groups.append([packet])
        # A frame that is shown before the first keyframe of its clip needs frames of the clip before.
        elif groups and time_of(packet) > time_of(groups[-1][0]):
            groups[-1].append(packet)
    for group in groups:
        # Times of decoding, which some containers lack: in order, and none after that of presentation.
        times = sorted(packet.pts for packet in group)
        delay = max(time - packet.pts for time, packet in zip(times, group, strict=True))
        for time, packet in zip(times, group, strict=True):
            packet.dts = time - delay
    return groups


def time_of(packet: Any) -> Fraction:
    """Return the time at which a packet is presented, in seconds."""
    time: Fraction = packet.pts * packet.time_base
    return time


def write_clip(packets: list[Any], tracks: list[Any], form: str, start: Fraction) -> bytes:
    """Return a file of packets, whose times begin at 0."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as clip:
        copies = {track.index: clip.add_stream_from_template(track) for track in tracks}
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            shift = round(start / packet.time_base)
            packet.stream = copies[packet.stream.index]
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            clip.mux(packet)
    return file.getvalue()
