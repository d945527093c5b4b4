"""Containers of media: find where a file is cut or damaged, by the sizes and checksums that its container declares.

FFmpeg plays what is there, and drops the rest without an error.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

#: Sizes from here on stand for "unknown": programs that write WAV and AVI to a pipe do not know the size.
UNKNOWN_SIZE = 0x7FFF0000
#: The parts of an MP4 file that hold media, or say where they are; and all others that are common.
MP4_MEDIA = (b"ftyp", b"moov", b"moof", b"mdat")
MP4_BOXES = (*MP4_MEDIA, b"styp", b"sidx", b"free", b"skip", b"wide", b"uuid")
#: Matroska: the ids of a segment and a cluster, the elements with others inside; and the first bytes of a file.
SEGMENT, CLUSTER, EBML = 0x18538067, 0x1F43B675, b"\x1a\x45\xdf\xa3"
#: Ids of the parts of a segment have four bytes, and those of the parts of a cluster fewer.
LONG_ID = 0x10000000
ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
ASF_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")
#: The size of the header of the data, and the first byte of packets: two bytes for error correction follow, all zero.
ASF_DATA_HEADER, ASF_PACKET = 50, b"\x82"
#: Exchanges the highest bit of a byte with the lowest and so on: Ogg's CRC takes them in the other order.
REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
#: MPEG-TS: the size of a packet, its first byte, and within how many bytes packets begin again after damage.
TS_PACKET, TS_SYNC, TS_SEARCH = 188, b"\x47", 1 << 16
#: The most zeros between two pictures of Motion JPEG; more are pictures that were never written.
MOST_PADDING = 64
#: MP3: the bitrates of MPEG-1 and MPEG-2 in kbit/s and the sample rates of MPEG-1; and, by the version in the header
#: (MPEG-1, 2 and 2.5), an eighth of the samples of a frame, the divisor of the sample rates, and the bitrates.
MP3_BITRATES = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
MP3_LOW_BITRATES = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
MP3_RATES = (44100, 48000, 32000)
MP3_VERSIONS = {3: (144, 1, MP3_BITRATES), 2: (72, 2, MP3_LOW_BITRATES), 0: (72, 4, MP3_LOW_BITRATES)}


def find_end(data: bytes) -> int:
    """Return where the container of a media file ends, if it declares that, or the size of the file.

    Raises:
        ValueError: the container declares more than the file holds, or is damaged.
    """
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] in (b"WAVE", b"AVI "):
        _check_riff(data)
    elif data[:4] == b"OggS":
        return _check_ogg(data)
    elif data[:4] == EBML:
        return _check_elements(data, 0, len(data))
    elif data[4:8] in MP4_BOXES:
        return _check_boxes(data)
    elif data[:16] == ASF_HEADER:
        _check_asf(data)
    elif data[:1] == TS_SYNC and data[TS_PACKET : TS_PACKET + 1] == TS_SYNC:
        return _check_transport_stream(data)
    elif data[:4] in (b".SoX", b"XoS."):
        return _check_sox(data)
    elif data[:4] == b".snd":
        return _check_au(data)
    elif data[:4] == b"caff":
        _check_caf(data)
    elif data[:3] == b"\xff\xd8\xff":
        _check_pictures(data)
    elif (header := read_mp3_header(data)) is not None:
        return header.end
    return len(data)


class Mp3Header(NamedTuple):
    """The numbers in the header of an MP3 file (Xing or Info)."""

    frames: int | None
    #: Where the sound ends, or the size of the file.
    end: int


def mp3_frame_size(frame: bytes) -> int | None:
    """Return the declared size in bytes of a frame of MPEG layer III; None if the header does not declare it."""
    header = int.from_bytes(frame[:4], "big")
    version, layer, bitrate, rate = header >> 19 & 3, header >> 17 & 3, header >> 12 & 15, header >> 10 & 3
    if header >> 21 != 0x7FF or version not in MP3_VERSIONS or layer != 1 or not 0 < bitrate < 15 or rate == 3:
        return None
    bytes_per_slot, divisor, bitrates = MP3_VERSIONS[version]
    return bytes_per_slot * 1000 * bitrates[bitrate - 1] // (MP3_RATES[rate] // divisor) + (header >> 9 & 1)


def read_mp3_header(data: bytes) -> Mp3Header | None:
    """Return the header of an MP3 file, or None."""
    start = 0
    if data[:3] == b"ID3":
        start = 10 + sum((byte & 127) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=False))
    found = next((at for word in (b"Xing", b"Info") if (at := data.find(word, start, start + 64)) >= 0), -1)
    if found < 0 or mp3_frame_size(data[start : start + 4]) is None:
        return None
    flags, *numbers = struct.unpack(">3I", data[found + 4 : found + 16].ljust(12, b"\0"))
    frames = numbers.pop(0) if flags & 1 else None
    end = start + numbers[0] if flags & 2 else len(data)
    # More sound, as in a file that was joined of several, is read, too.
    return Mp3Header(frames, end if end < len(data) and data[end] != 0xFF else len(data))


def _cut_error(what: str, start: int, declared: int, data: bytes) -> ValueError:
    found = max(0, len(data) - start)
    return ValueError(f"the file is cut: the {what} at byte {start} declares {declared} bytes, but {found} are there")


def _damage_error(start: int) -> ValueError:
    return ValueError(f"the file is damaged at byte {start}: its container is not continued there")


def _check_riff(data: bytes) -> None:
    """Check the sound of WAV, and the list of frames of AVI; what follows may be missing."""
    position = 12
    long_size = None
    while position + 8 <= len(data):
        name, size = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], "little")
        if name == b"ds64":  # RF64: sizes of 64 bits
            long_size = int.from_bytes(data[position + 16 : position + 24], "little")
        is_list = name == b"LIST" and data[position + 8 : position + 12] == b"movi"
        if name == b"data" and size == 0xFFFFFFFF and long_size is not None:
            size = long_size
        elif (name == b"data" or is_list) and (size >= UNKNOWN_SIZE or size == 0):
            return
        # Some programs write the size of the file.
        if (name == b"data" or is_list) and position + 8 + size > len(data) and size not in (len(data), len(data) - 8):
            raise _cut_error("WAV data" if name == b"data" else "AVI stream", position, 8 + size, data)
        if is_list:
            _check_movi(data, position + 12, position + 8 + size)
        if name == b"data" or is_list:
            return
        position += 8 + size + size % 2


def _check_movi(data: bytes, position: int, end: int) -> None:
    """Check the chunks of an AVI file."""
    while position + 8 <= end:
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        if not _is_chunk_name(data, position) or position + 8 + size > end:
            raise _damage_error(position)
        position += 12 if data[position : position + 4] == b"LIST" else 8 + size
        position += size % 2 and not _is_chunk_name(data, position)  # some programs write no padding


def _is_chunk_name(data: bytes, position: int) -> bool:
    return data[position : position + 4].replace(b"_", b"").strip(b" ").isalnum()


def _check_ogg(data: bytes) -> int:
    """Check the size and the CRC of each page, and return where the last one ends."""
    position = 0
    while data[position : position + 4] == b"OggS":
        segments = data[position + 26 : position + 27]
        content = position + 27 + (segments[0] if segments else 0)
        size = content - position + sum(data[position + 27 : content])
        if position + size > len(data) or content > len(data) or not segments:
            raise _cut_error("Ogg page", position, size, data)
        page = data[position : position + 22] + bytes(4) + data[position + 26 : position + size]
        reversed_crc = zlib.crc32(page.translate(REVERSED_BITS), 0xFFFFFFFF) ^ 0xFFFFFFFF
        if reversed_crc.to_bytes(4, "little").translate(REVERSED_BITS) != data[position + 22 : position + 26][::-1]:
            raise ValueError(f"the file is damaged: the CRC of the Ogg page at byte {position} is wrong")
        position += size
    if data.find(b"OggS", position) >= 0:
        raise _damage_error(position)
    return position


def _read_vint(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer of Matroska with its marker bit, and its length in bytes.

    Raises:
        ValueError: there is none, or it is cut.
    """
    first = data[position : position + 1]
    length = 9 - first[0].bit_length() if first else 1
    if position + length > len(data):
        raise _cut_error("Matroska element", position, length + 1, data)
    if length == 9:
        raise _damage_error(position)
    return int.from_bytes(data[position : position + length], "big"), length


def _check_elements(data: bytes, position: int, end: int, parent: int = 0) -> int:
    """Check the elements of a Matroska or WebM file up to a position, and return where they end."""
    while position < end:
        if not parent and data[position : position + 4] not in (EBML, SEGMENT.to_bytes(4, "big")):
            return position  # behind the segments
        name, length = _read_vint(data, position)
        if parent == CLUSTER and end == len(data) and name >= LONG_ID:
            return position  # what follows a cluster of unknown size
        size, size_length = _read_vint(data, position + length)
        content, most = position + length + size_length, (1 << 7 * size_length) - 1
        size &= most
        has_parts = (parent, name) in ((0, SEGMENT), (SEGMENT, CLUSTER))
        is_open = has_parts and size == most
        following = len(data) if is_open else content + size
        if following > len(data):
            raise _cut_error("Matroska element", position, following - position, data)
        if following > end:
            raise _damage_error(position)
        reached = _check_elements(data, content, following, name) if has_parts else following
        position = reached if is_open else following
    return position


def _check_boxes(data: bytes) -> int:
    """Check that the boxes of an MP4 or QuickTime file are complete."""
    position = 0
    while data[position + 4 : position + 8] in MP4_BOXES:
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0:  # to the end of the file
            break
        if size < 8:
            raise _damage_error(position)
        name = data[position + 4 : position + 8]
        if position + size > len(data) and name in MP4_MEDIA:
            raise _cut_error(f"{name.decode()} box", position, size, data)
        position += size
    return len(data)


def _check_asf(data: bytes) -> None:
    """Check the packets of an ASF file (WMA, WMV): all have one size, and nearly all begin with one byte."""
    start = int.from_bytes(data[16:24], "little")
    size = int.from_bytes(data[start + 16 : start + 24], "little")
    if start > len(data):
        raise _cut_error("ASF header", 0, start, data)
    if data[start : start + 16] == ASF_DATA and start + size > len(data):
        raise _cut_error("ASF data", start, size, data)
    properties = data.find(ASF_PROPERTIES, 0, start)
    least, packet_size = struct.unpack("<2I", data[properties + 92 : properties + 100].ljust(8, b"\0"))
    if properties >= 0 and least == packet_size > 0:
        first = start + ASF_DATA_HEADER
        for position in range(first, start + size, packet_size) if data[first : first + 1] == ASF_PACKET else ():
            if data[position : position + 1] != ASF_PACKET:
                raise _damage_error(position)


def _check_transport_stream(data: bytes) -> int:
    """Check that packets of an MPEG transport stream follow each other, and return where the last one ends."""
    syncs = data[::TS_PACKET]
    if (rest := len(data) % TS_PACKET) and syncs.count(TS_SYNC) == len(syncs):
        raise _cut_error("MPEG-TS packet", len(data) - rest, TS_PACKET, data)
    lost = TS_PACKET * (len(syncs) - len(syncs.lstrip(TS_SYNC)))
    for start in range(lost, min(len(data), lost + TS_SEARCH)):
        if data[start : start + 3 * TS_PACKET : TS_PACKET] == TS_SYNC * 3:
            raise _damage_error(lost)
    return min(lost, len(data))


def _check_sox(data: bytes) -> int:
    """Check the number of samples in the header of a file of SoX, and return where they end."""
    header, samples = struct.unpack(("<" if data[:1] == b"." else ">") + "IQ", data[4:16].ljust(12, b"\0"))
    return _check_samples(data, 4 + header, 4 * samples)


def _check_au(data: bytes) -> int:
    """Check the size of the samples in the header of an AU file, and return where they end."""
    start, size = struct.unpack(">2I", data[4:12].ljust(8, b"\0"))
    return _check_samples(data, start, 0 if size >= UNKNOWN_SIZE else size)


def _check_caf(data: bytes) -> None:
    """Check the size of the samples of a Core Audio file."""
    position = 8
    while data[position : position + 4] not in (b"data", b""):
        position += 12 + int.from_bytes(data[position + 4 : position + 12], "big")
    size = int.from_bytes(data[position + 4 : position + 12], "big", signed=True)
    if size >= 0:  # -1: to the end of the file
        _check_samples(data, position + 12, size)


def _check_pictures(data: bytes) -> None:
    """Check that the pictures of Motion JPEG follow each other; one may hold a smaller one."""
    depth, end = 0, 0
    for marker in re.finditer(b"\xff[\xd8\xd9]", data):
        between = data[end : marker.start()]
        is_start = data[marker.end() : marker.end() + 2] >= b"\xff\xc0" and len(between) <= MOST_PADDING
        if depth == 0 and (not is_start or between.strip(b"\0\xff")):
            raise _damage_error(end)
        depth += 1 if marker[0] == b"\xff\xd8" else -1
        end = marker.end()
    if depth:
        raise ValueError("the file is cut: a picture has no end")


def _check_samples(data: bytes, start: int, size: int) -> int:
    """Return where samples end; a size of 0 stands for an unknown one."""
    if start + size > len(data):
        raise _cut_error("sound", start, size, data)
    return start + size if size else len(data)
