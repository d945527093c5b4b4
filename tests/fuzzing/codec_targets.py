"""Fields: each decoder gets untrusted bytes, under the name of its extension."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import resource
import struct
import warnings
import wave
from functools import cache
from typing import Any

import cbor2
import msgpack
import numpy as np
import torch
from harness import Finding, Target
from PIL import Image

from wds_datapipes.codecs import CODECS, IMAGE_FORMATS
from wds_datapipes.codecs.array_files import encode_npy, encode_npz, encode_pth
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.codecs.tenbin import encode_tenbin
from wds_datapipes.errors import DecodeError, UnsafeInputError

#: How much additional memory an input may take, in bytes, besides a thousand times its own size.
ROOM = 512 << 20

FIELDS = [*sorted(set(CODECS) - {"pickle", "pkl", "pyd"}), "json.gz", "npy.gz", "pkl"]
PICTURES = [*sorted(IMAGE_FORMATS), "gif", "bmp", "ico", "jp2", "avif", "psd", "qoi", "tga", "xpm", "dds", "icns"]
SPECS = ["rgb8", "l", "pil", "torchrgba"]
MEDIA = ["wav", "flac", "mp3", "ogg", "mp4", "mkv", "avi"]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def decode(field: str, data: bytes, chain: DecoderChain) -> None:
    """Decode one field: the result is a value or a `DecodeError`, and the memory stays in proportion."""
    before = peak()
    with warnings.catch_warnings(), contextlib.suppress(DecodeError, UnsafeInputError):
        warnings.simplefilter("ignore")
        list(convert_samples([{"__key__": "a", field: data}], chain))
    if (grown := peak() - before) > ROOM + 1000 * len(data):
        raise Finding(f"{len(data)} bytes of {field} took {grown} bytes of memory")


@cache
def basic() -> DecoderChain:
    return DecoderChain((), {})


@cache
def pictures(spec: str, more: bool) -> DecoderChain:
    decoder = ImageDecoder(spec, min_size=8) if more else ImageDecoder(spec)
    return DecoderChain((decoder,), {})


@cache
def media() -> DecoderChain:
    return DecoderChain(("torch_video", "torch_audio"), {})


def decode_value(data: bytes) -> None:
    decode(FIELDS[data[0] % len(FIELDS)] if data else "txt", data[1:], basic())


def decode_picture(data: bytes) -> None:
    head, content = data[:2].ljust(2, b"\0"), data[2:]
    decode(PICTURES[head[0] % len(PICTURES)], content, pictures(SPECS[head[1] % 4], bool(head[1] & 4)))


def decode_media(data: bytes) -> None:
    decode(MEDIA[data[0] % len(MEDIA)] if data else "wav", data[1:], media())


def value_seeds() -> list[bytes]:
    values = {"a": [1, 2.5, None, True, "x", {"b": [[0, 1]]}], "c": "é" * 20}
    arrays = {"x": np.arange(6).reshape(2, 3), "y": np.array(1.5)}
    cases: dict[str, list[bytes]] = {
        "json": [json.dumps(values).encode(), json.dumps(values).encode("utf-16")],
        "cbor": [
            cbor2.dumps(values),
            cbor2.dumps(2**70),
            b"\x9f\x01\xff",
            b"\xc1\x1a\x51\x4b\x67\xb0",
            b"\x9b" + b"\x7f" * 8,
        ],
        "msgpack": [msgpack.packb(values), b"\xdd\x7f\xff\xff\xff", b"\xd6\xff\0\0\0\0"],
        "npy": [
            encode_npy(arrays["x"]),
            encode_npy(np.array(["a", "bc"])),
            encode_npy(np.zeros(3, [("a", "f4"), ("b", "i2", 2)])),
        ],
        "npz": [encode_npz(arrays)],
        "tenbin": [encode_tenbin(list(arrays.values()))],
        "pth": [encode_pth({"a": torch.arange(3)}), encode_pth(torch.zeros(2, 2))],
        "cls": [b"7", b" 12\n", b"-1"],
        "txt": [b"caf\xc3\xa9"],
        "json.gz": [gzip.compress(b'{"a": 1}', mtime=0)],
        "npy.gz": [gzip.compress(encode_npy(np.zeros(100)), mtime=0)],
        "pkl": [b"\x80\x05N."],
    }
    return [bytes([FIELDS.index(field)]) + each for field, seeds in cases.items() for each in seeds]


VALUE_TOKENS = [b"\x93NUMPY\1\0", b"'descr': '|O'", b"'shape': (9999999999,)", b"'fortran_order': True", b"<f8"]
VALUE_TOKENS += [b"|V99999999", b"~TenBin~", b"PK\3\4", b"PK\5\6", b"\x1f\x8b\x08", b"\xdd\xff\xff\xff\xff"]
VALUE_TOKENS += [b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff", b"\xd9\x01\0\x80", b"\xd8\x1d\0", b"\xc2\x58\xff"]
VALUE_TOKENS += [b"\xd8\x23\x63(a)", b"NaN", b"1e999", b"[" * 3000, b"\x81" * 3000, b"1" * 5000, b"\\ud800", b"<M8[ns]"]
VALUE_TOKENS += [b"<U99999999"]


@cache
def picture_seeds() -> list[bytes]:
    """Create small pictures of each format that can be written."""
    found = []
    image = Image.fromarray(np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3))
    extensions = {"JPEG": "jpg", "PNG": "png", "PPM": "ppm", "TIFF": "tif", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
    extensions |= {"ICO": "ico", "TGA": "tga", "DDS": "dds", "JPEG2000": "jp2", "AVIF": "avif", "ICNS": "icns"}
    for number, (kind, extension) in enumerate(extensions.items()):
        file = io.BytesIO()
        (image.resize((16, 16)) if kind == "ICNS" else image).save(file, kind)
        found.append(bytes([PICTURES.index(extension), number]) + file.getvalue())
    for mode in ("1", "L", "P", "I;16", "RGBA"):
        file = io.BytesIO()
        (
            image.convert("L").point(lambda value: value * 200, "I").convert(mode)
            if mode == "I;16"
            else image.convert(mode)
        ).save(file, "PNG")
        found.append(bytes([PICTURES.index("png"), 4]) + file.getvalue())
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    return [*found, b"\0\0" + eps, b"\0\0" + b"P6 9 8 65535\n" + bytes(9 * 8 * 6), b"\0\0" + b"8BPS\0\1" + bytes(40)]


PICTURE_TOKENS = [b"\xff\xd8\xff\xe1", b"Exif\0\0II*\0", b"IHDR", b"IDAT", b"acTL", b"fdAT", b"GIF89a", b"RIFF"]
PICTURE_TOKENS += [b"WEBPVP8 ", b"II*\0", b"MM\0*", b"%!PS-Adobe", b"%%BoundingBox: 0 0 99999 99999\n"]
PICTURE_TOKENS += [b"P6 99999 99999 255\n", b"BM", b"8BPS", b"qoif", b"ftypavif", b"\xff\x4f\xff\x51", b"DDS "]


@cache
def media_seeds() -> list[bytes]:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(struct.pack("<200h", *range(200)))
    lists = [
        b"ffconcat version 1.0\nfile x.wav\n",
        b"#EXTM3U\n#EXTINF:1,\nx.wav\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
    ]
    return [b"\0" + file.getvalue(), *(b"\0" + each for each in lists), b"\4" + film()]


def film() -> bytes:
    """Create a film of four frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for number in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), number * 60, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


MEDIA_TOKENS = [b"ffconcat version 1.0\n", b"file ", b"#EXTM3U", b"RIFF", b"fLaC", b"OggS", b"moov", b"stts"]
MEDIA_TOKENS += [b"\x1aE\xdf\xa3"]

TARGETS = [
    Target("values", decode_value, value_seeds, 500, VALUE_TOKENS),
    Target("pictures", decode_picture, picture_seeds, 300, PICTURE_TOKENS),
    Target("media", decode_media, media_seeds, 30, MEDIA_TOKENS),
]
