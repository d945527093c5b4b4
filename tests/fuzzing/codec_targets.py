"""Fields: each decoder gets untrusted bytes, under the name of its extension."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import resource
import warnings
from functools import cache

import cbor2
import msgpack
import numpy as np
import torch
from fuzz_loop import Finding, Target
from media_files import AUDIO_FILES, VIDEO_FILES, audio_file, tone, video_file
from PIL import Image

from wds_datapipes.codecs import CODECS, IMAGE_FORMATS
from wds_datapipes.codecs.array_files import encode_npy, encode_npz, encode_pth, encode_tenbin
from wds_datapipes.codecs.containers import find_end
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.errors import DecodeError, UnsafeInputError
from wds_datapipes.io.read_limits import ReadLimits

#: The memory that decoding an input may use in addition to a thousand times its size, in bytes.
ROOM = 512 << 20

FIELDS = [*sorted(set(CODECS) - {"pickle", "pkl", "pyd"}), "json.gz", "npy.gz", "pkl"]
PICTURES = [*sorted(IMAGE_FORMATS), "gif", "bmp", "ico", "jp2", "avif", "psd", "qoi", "tga", "xpm", "dds", "icns"]
SPECS = ["rgb8", "l", "pil", "torchrgba"]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def decode(field: str, data: bytes, chain: DecoderChain) -> None:
    """Decode one field: the result is a value or a `DecodeError`, and memory use stays proportional to its size."""
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
    return DecoderChain((decoder,), {}, limits=ReadLimits(image_pixels=1 << 24))


def decode_value(data: bytes) -> None:
    decode(FIELDS[data[0] % len(FIELDS)] if data else "txt", data[1:], basic())


def decode_picture(data: bytes) -> None:
    head, content = data[:2].ljust(2, b"\0"), data[2:]
    decode(PICTURES[head[0] % len(PICTURES)], content, pictures(SPECS[head[1] % 4], bool(head[1] & 4)))


def value_seeds() -> list[bytes]:
    values = {"a": [1, 2.5, None, True, "x", {"b": [[0, 1]]}], "c": "é" * 20}
    arrays = {"x": np.arange(6).reshape(2, 3), "y": np.array(1.5)}
    cases: dict[str, list[bytes]] = {
        "json": [json.dumps(values).encode(), json.dumps(values).encode("utf-16")],
        "cbor": [cbor2.dumps(values), cbor2.dumps(2**70), b"\xc1\x1a\x51\x4b\x67\xb0", b"\x9b" + b"\x7f" * 8],
        "msgpack": [msgpack.packb(values), b"\xdd\x7f\xff\xff\xff", b"\xd6\xff\0\0\0\0"],
        "npy": [encode_npy(np.array(["a", "bc"])), encode_npy(np.zeros(3, [("a", "f4"), ("b", "i2", 2)]))],
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
VALUE_TOKENS += [b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff", b"NaN", b"1e999", b"[" * 3000, b"\x81" * 3000, b"<U99999999"]


@cache
def picture_seeds() -> list[bytes]:
    """Create small pictures in each writable format."""
    deep = b"P6 9 8 65535\n" + bytes(9 * 8 * 6)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    found = [b"\0\0" + each for each in (eps, deep, b"8BPS\0\1" + bytes(40))]
    image = Image.fromarray(np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3))
    extensions = {"JPEG": "jpg", "PNG": "png", "PPM": "ppm", "TIFF": "tif", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
    extensions |= {"ICO": "ico", "TGA": "tga", "DDS": "dds", "JPEG2000": "jp2", "AVIF": "avif", "ICNS": "icns"}
    for number, (kind, extension) in enumerate(extensions.items()):
        file = io.BytesIO()
        (image.resize((16, 16)) if kind == "ICNS" else image).save(file, kind)
        found.append(bytes([PICTURES.index(extension), number]) + file.getvalue())
    for mode in ("1", "L", "P", "RGBA"):
        file = io.BytesIO()
        image.convert(mode).save(file, "PNG")
        found.append(bytes([PICTURES.index("png"), 4]) + file.getvalue())
    return found


PICTURE_TOKENS = [b"\xff\xd8\xff\xe1", b"Exif\0\0II*\0", b"IHDR", b"IDAT", b"GIF89a", b"WEBPVP8 ", b"MM\0*"]
PICTURE_TOKENS += [b"%!PS-Adobe", b"%%BoundingBox: 0 0 99999 99999\n", b"P6 99999 99999 255\n", b"BM", b"8BPS", b"qoif"]


def read_container(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        end = find_end(data)
        if not 0 <= end <= len(data):
            raise Finding(f"the container of {len(data)} bytes ends at {end}")


@cache
def container_seeds() -> list[bytes]:
    """Create short sounds and videos in each container."""
    sound = tone(2, 0.02)
    sounds = [audio_file(form, codec, sound) for form, codec, _ in AUDIO_FILES.values()]
    others = [audio_file("caf", "pcm_s16le", sound), audio_file("au", "pcm_s16be", sound)]
    forms = [*VIDEO_FILES.values(), ("mpegts", "mpeg2video")]
    return [*sounds, *others, *(video_file(form, codec, frames=2, size=(16, 16)) for form, codec in forms)]


CONTAINER_TOKENS = [b"RIFF", b"WAVE", b"data", b"LIST", b"movi", b"OggS", b"moov", b"mdat", b"caff", b".snd", b".SoX"]
CONTAINER_TOKENS += [
    b"\x1a\x45\xdf\xa3",
    b"\x18\x53\x80\x67",
    b"\x1f\x43\xb6\x75",
    b"\x01" + b"\xff" * 7,
    b"Xing",
    b"ID3",
]


TARGETS = [
    Target("values", decode_value, value_seeds, 500, VALUE_TOKENS),
    Target("pictures", decode_picture, picture_seeds, 300, PICTURE_TOKENS),
    Target("containers", read_container, container_seeds, 300, CONTAINER_TOKENS),
]
