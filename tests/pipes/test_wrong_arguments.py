"""Invalid arguments of stages, classes and functions are refused at once, and the message says which are valid."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_datapipes


@pytest.mark.parametrize(
    ("stage", "arguments", "options", "message"),
    [
        ("load_wds_shards", (), {"end_marker": "none"}, 'end_marker must be "required", "optional" or "final", not'),
        ("load_wds_shards", (), {"on_error": "ignore"}, 'on_error must be "raise", "warn", "skip", an ErrorBudget or'),
        ("load_wds_shards", (), {"timeout_s": 0}, "timeout_s must be a positive number of seconds, not 0"),
        ("load_wds_shards", (), {"retries": -1}, "retries must be at least 0, not -1"),
        ("load_wds_shards", (), {"select_files": "*.txt"}, r"select_files must be a function .* not '\*\.txt'"),
        ("load_wds_shards", (), {"rename_files": {"a": "b"}}, "rename_files must be a function .* not {'a': 'b'}"),
        ("cache_samples", (5,), {}, "path must be a path or None, not 5"),
        ("cache_samples", (), {"seed": "a"}, "seed must be an integer, not 'a'"),
        ("cache_wds_shards", (5,), {}, "cache_dir must be a path, not 5"),
        ("cache_wds_shards", ("kept",), {"max_bytes": 0}, "max_bytes must be at least 1, not 0"),
        ("cache_wds_shards", ("kept",), {"prefetch": -1}, "prefetch must be at least 0, not -1"),
        ("group_samples", (), {"key_rule": "last_dot"}, "key_rule must be first_dot, last_dot or another .* not"),
        ("group_samples", (), {"fields": "jpg"}, "fields must be a collection of names, .* not the string 'jpg'"),
        ("group_samples", (), {"on_duplicate": "warn"}, 'on_duplicate must be "raise", "first" or "last", not'),
        ("group_samples", (), {"on_repeated_key": "skip"}, 'on_repeated_key must be "warn", "raise" or "ignore", not'),
        ("shuffle_samples", (5,), {"initial": 6}, "needs 1 <= initial <= buffer_size, not 6 and 5"),
        ("shuffle_samples", (5,), {"max_bytes": -1}, "max_bytes must be at least 0, not -1"),
        ("shuffle_samples", ("100",), {}, "buffer_size must be an integer, not '100'"),
        ("wds_encode", (), {"pts": {"quality": 9}}, r"options are for images.*not for 'pts'"),
        ("write_wds_shards", ("train.tar",), {}, "one placeholder for the number, as in .*, not 'train.tar'"),
        (
            "write_wds_shards",
            ("a-%d.tar",),
            {"compres": "gz"},
            r"'compres'. Did you mean options=WriteOptions\(compress='gz'\)\?",
        ),
        (
            "write_wds_shards",
            ("a-%d.tar",),
            {"encoder": 1},
            r"has no argument 'encoder': pass options=WriteOptions\(encoder=1\)",
        ),
        ("write_wds_shards", ("a-%d.tar",), {"share": None}, "has no argument 'share'"),
        ("wds_encode", (), {"jpg": 95}, r"function of a value, or a dict of options.*not 95"),
        ("wds_encode", (), {"on_error": "stop"}, r"on_error must be \"raise\""),
        (
            "wds_decode",
            ("rgb9",),
            {},
            r"no decoder 'rgb9'\. Did you mean 'rgb'\? Choose an image spec \(l l8 .* torch_video",
        ),
        ("wds_decode", (3,), {}, "a decoder must be a name or a function"),
        ("wds_decode", (), {"txt": "rgb"}, "a function of bytes, not 'rgb'"),
        ("wds_decode", (), {"on_error": "ignore"}, "on_error must be"),
        ("wds_decode", (), {"handler": print}, r"webdataset's handler= is called on_error= here; keywords are ext"),
        ("map_dict", (), {"handler": print, "txt": str}, r"handler= is called on_error= here; keywords are fields"),
        ("rename", (), {"handler": print, "a": "b"}, r"handler= is called on_error= here; keywords are new names"),
        ("with_epoch", (0,), {}, "n, the number of items in an epoch, must be at least 1, not 0"),
        ("with_length", (-1,), {}, "n, the number of items, must be at least 0, not -1"),
        ("resample_wds_shards", (0,), {}, "count must be at least 1, not 0"),
        ("resample_wds_shards", (), {"seed": "x"}, "seed must be an integer, not 'x'"),
        ("mix_samples", (["a.tar"],), {}, r"mix_samples mixes datapipes, not \['a.tar'\]"),
        ("mix_samples", (), {"stop": "longest"}, 'stop must be "first", "all" or "never", not'),
        ("mix_samples", (), {"weights": [1, 2]}, r"needs a weight for each of its 1 sources, not \[1, 2\]"),
        ("mix_samples", (), {"weights": [-1]}, "the weight of source 0 must be finite and not negative, not -1"),
        ("mix_samples", (), {"weights": ["1"]}, "the weight of source 0 must be a number, not '1'"),
        ("to_tuple", (), {}, "fields must be given as in"),
        ("to_tuple", (["jpg", "cls"],), {}, r"a field must be a string, .* not \['jpg', 'cls'\]"),
        ("to_tuple", ("jpg",), {"missing": "skip"}, 'missing must be "raise" or "none", not'),
        ("rename", (), {"image": "jpg cls"}, 'one field for each new name, as in image="jpg;png", not'),
        ("map_dict", (), {}, "needs a function for at least one field"),
        ("map_dict", (), {"cls": 5}, "applies a function to the field 'cls', not 5"),
        ("bucket_samples", ("txt",), {}, "needs batch_size, max_tokens, or both"),
        ("bucket_samples", (3,), {"batch_size": 2}, "length must be the name of a field or a function .* not 3"),
        ("bucket_samples", ("txt",), {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ("bucket_samples", ("txt",), {"max_tokens": 2.5}, "max_tokens must be an integer or None, not 2.5"),
        ("bucket_samples", ("txt",), {"batch_size": 2, "boundaries": [4, 4]}, "boundaries must be in ascending order"),
        ("bucket_samples", ("txt",), {"batch_size": 2, "boundaries": [-1]}, "each of boundaries must be at least 0"),
        ("pack_samples", ("txt", "cls"), {}, "max_length must be an integer, not 'txt'"),
        ("pack_samples", (8, ()), {}, "needs fields with distinct names"),
        ("pack_samples", (8, ("txt", "position_ids")), {}, "needs fields with distinct names, other than"),
        ("pack_samples", (8, 3), {}, "fields must be a string or a list, not 3"),
        ("pack_samples", (8, "txt"), {"long_samples": "cut"}, 'must be "raise", "truncate" or "split", not \'cut\''),
        ("pack_samples", (8, "txt"), {"open_rows": 0}, "open_rows must be at least 1, not 0"),
        ("pack_samples", (8, "txt"), {"layout": "mask"}, 'layout must be "segment_ids" or "cu_seqlens", not \'mask\''),
        ("pack_samples", (8, "txt"), {"layout": "cu_seqlens", "pad": 0}, "need no padding"),
        ("pack_samples", (8, "txt"), {"pad": {"cls": 0}}, "pad needs a value for each of the fields"),
        ("compose", (), {}, "compose needs a function from an iterator"),
        ("compose", ("sorted",), {}, "compose takes functions .* not 'sorted'"),
        ("map_samples", (3,), {}, "applies a function to each sample, not 3"),
        ("map_samples_with_rng", (3,), {}, "applies a function of a sample and a generator, not 3"),
        ("map_tuple", (None, "upper"), {}, "applies functions, or None .* not 'upper'"),
        ("associate", ("labels.json",), {}, "takes a mapping from keys to fields, or a function of a key, not 'labels"),
        ("associate", ({},), {"missing": "none"}, 'missing must be "raise", "keep" or "skip", not'),
        ("log_samples", (), {"first": -1}, "first must be at least 0, not -1"),
        ("log_samples", (), {"every": 0}, "every must be at least 1, not 0"),
        ("log_samples", (), {"logger": "keys.log"}, 'logger must be a logging.Logger, "stderr" or "stdout", not'),
        ("rsample", ("half",), {}, "probability must be a number, not 'half'"),
        ("rsample", (float("nan"),), {}, "probability must be a number from 0 to 1, not nan"),
        ("load_wds_shards", (), {"open_shards": 0}, "open_shards must be at least 1, not 0"),
        ("slice_samples", (), {}, r"takes stop, or start, stop and step: .* not \(\)"),
        ("slice_samples", (-1,), {}, r"non-negative .* not \(-1,\)\. Positions cannot"),
        ("slice_samples", (0, 5, 0), {}, "a step of at least 1, not"),
        ("rename_keys", (), {}, r'needs a new name and a pattern, as in rename_keys\(\("image", "\*\.jpg"\)\)'),
        ("rename_keys", ("image",), {}, "needs pairs of a new name and a pattern, .* not 'image'"),
        ("extract_keys", (), {}, "extract_keys needs at least one pattern"),
        ("extract_keys", (3,), {}, 'extract_keys needs patterns such as .*, "cls", or lists of them, not 3'),
        ("extract_keys", ("cls",), {"missing": "keep"}, 'missing must be "raise" or "none", not'),
        ("select_fields", ("cls", " ;"), {}, "select_fields got ' ;', which matches no field"),
        ("select_fields", ("cls",), {"missing": "none"}, 'missing must be "raise", "keep" or "skip", not'),
    ],
)
def test_wrong_arguments(stage: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    source: IterDataPipe[Any] = IterableWrapper([])
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(source, stage)(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "error", "message"),
    [
        ("MockSamples", ("a", 2.0), {}, TypeError, r"length must be an integer, not 2\.0"),
        ("DirectoryShards", ("nowhere",), {}, ValueError, "needs a directory, but there is none at 'nowhere'"),
        ("DirectoryShards", (".",), {"pattern": "a/*.tar"}, ValueError, r"a pattern of file names.* not 'a/\*\.tar'"),
        ("DirectoryShards", (".",), {"select": "newest"}, ValueError, 'select must be "oldest" or "random", not'),
        ("DirectoryShards", (".",), {"after": "unlink"}, ValueError, 'after must be "keep", "delete" or "return", not'),
        ("DirectoryShards", (".",), {"poll_s": 0}, ValueError, "poll_s must be a positive number of seconds, not 0"),
        ("DirectoryShards", (".",), {"timeout_s": -1}, ValueError, "a non-negative number of seconds or None, not -1"),
        ("ErrorBudget", (), {}, ValueError, "needs max_errors, max_rate, max_consecutive or quarantine"),
        ("ErrorBudget", (), {"max_consecutive": 1.5}, TypeError, "max_consecutive must be an integer or None, not 1.5"),
        ("ErrorBudget", (), {"max_rate": 1.5}, ValueError, "max_rate must be a fraction from 0 to 1, .* not 1.5"),
        ("ErrorBudget", (), {"max_rate": 0.1, "after": -1}, ValueError, "after must be at least 0, not -1"),
        ("RandomResizedCrop", (0,), {}, ValueError, "size must be at least 1 pixel"),
        ("RandomResizedCrop", (5,), {"scale": (0.5, 0.1)}, ValueError, "scale must be two fractions"),
        ("RandomResizedCrop", (5,), {"ratio": (0, 1)}, ValueError, "ratio must be two ratios"),
        ("RandomResizedCrop", (5,), {"flip_probability": 2}, ValueError, "flip_probability must be from 0 to 1"),
        ("CenterCrop", (5,), {"interpolation": "nearest"}, ValueError, "interpolation must be"),
        ("CenterCrop", (224,), {"resize": 200}, ValueError, "at least the size of the crop, 224 pixels, not 200"),
        ("ImageDecoder", ("rgb8",), {"crop": 224}, TypeError, "crop must be a RandomResizedCrop"),
        ("ImageDecoder", ("RGB",), {}, ValueError, "'RGB' is not an image spec"),
        ("ImageDecoder", ("rgb",), {"min_size": 0}, ValueError, "at least 1"),
        ("handle_extension", ("", len), {}, ValueError, "extensions must be"),
        ("handle_extension", (["."], len), {}, ValueError, "extensions must be"),
        ("handle_extension", ("json.gz", len), {}, ValueError, "decompressed first"),
        ("handle_extension", ("jpg", "rgb"), {}, TypeError, "function of bytes"),
        ("ShardWriter", ("s.tar",), {}, ValueError, "one placeholder .*, as in 'train-%06d.tar', not 's.tar'"),
        ("ShardWriter", ("100%-%d.tar",), {}, ValueError, "Double other percent signs"),
        ("ShardWriter", ("s-%d.tar",), {"maxcount": 0}, ValueError, "maxcount must be at least 1 sample, not 0"),
        ("ShardWriter", ("s-%d.tar",), {"maxsize": -1}, ValueError, "maxsize must be a positive number .*, not -1"),
        ("StatefulShards", ([1, 2],), {}, TypeError, "requires a pipeline"),
        ("StatefulShards", (wds_datapipes.ShardList("a.tar"),), {"seed": "7"}, TypeError, "seed must be an integer"),
        ("StatefulShards", (wds_datapipes.ShardList("a.tar"),), {"seed": -1}, ValueError, "at most 64 bits"),
        ("convert_shards", (dict, ["a/0.tar"], "out/"), {"compres": "gz"}, TypeError, "argument 'compres'"),
        (
            "convert_shards",
            (dict, ["a/0.tar"], "out/"),
            {"compress": "gz"},
            TypeError,
            r"pass options=WriteOptions\(compress='gz'\)",
        ),
        ("convert_shards", (dict, ["a/0.tar"], "out/"), {"retries": 0}, TypeError, r"pass job=JobOptions\(retries=0\)"),
        ("JobOptions", (), {"retries": -1}, ValueError, "must be at least 0, not -1"),
        ("WriteOptions", (), {"compress": "rar"}, ValueError, "rar"),
        ("convert_shards", (dict, ["a/0.tar"], "out/"), {"num_workers": -1}, ValueError, "with an executor, not -1"),
        ("convert_shards", (dict, ["a/0.tar"], "out/"), {"if_changed": "ask"}, ValueError, '"raise", "redo" or "keep"'),
        ("convert_shards", (dict, ["a/0.tar"], "out/"), {"on_error": "ignore"}, ValueError, "on_error must be"),
        ("convert_shards", ("odd", ["a/0.tar"], "out/"), {}, TypeError, "takes a function of a sample, not 'odd'"),
        ("convert_shards", (dict, ["a/0.tar", "b/0.tar"], "out/"), {}, ValueError, r"'out/0\.tar'\. Number them"),
        ("convert_shards", (dict, ["a/0.tar", "a/0.tar.gz"], "out/{name}.tar"), {}, ValueError, r"to 'out/0\.tar'"),
        ("convert_shards", (dict, ["a/0.tar", "a/1.tar"], "a/"), {}, ValueError, r"'a/0\.tar' would be overwritten"),
        (
            "convert_shards",
            (dict, ["%06d.tar", "000001.tar"], "./b/../%06d.tar"),
            {},
            ValueError,
            r"001\.tar' would be",
        ),
        ("convert_shards", (dict, ["pipe:cat a/0.tar"], "out/"), {}, ValueError, "no file name to use for its output"),
        ("convert_shards", (dict, ["a/0.tar"], "out.tar"), {}, ValueError, r"'out\.tar' is a single name"),
        ("convert_shards", (dict, ["a/0.tar"], "%d-%d.tar"), {}, ValueError, "must have exactly one placeholder"),
        ("convert_shards", (dict, ["a/0.tar"], "memory://out/"), {}, ValueError, "a journal must be a local file"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_arguments_of_classes_and_functions(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        getattr(wds_datapipes, name)(*arguments, **options)
    assert os.listdir() == []


class Marker(str, enum.Enum):
    FINAL = "final"


@pytest.mark.parametrize("value", [Marker.FINAL, np.str_("final")])
def test_a_choice_may_be_of_a_class_derived_from_str(value: str) -> None:
    wds_datapipes.ShardList("a.tar").load_wds_shards(end_marker=value)


@pytest.mark.parametrize("options", [{"maxcount": 1e4, "verbose": 0}, {"maxcount": float("inf"), "verbose": 1}])
def test_numbers_are_written_as_for_webdatasets_writer(options: Any, tmp_path: Path) -> None:
    with wds_datapipes.ShardWriter(tmp_path / "%d.tar", **options) as writer:
        writer.write({"__key__": "a", "cls": 1})
    assert [shard.samples for shard in writer.shards] == [1]


@pytest.mark.parametrize(("value", "error"), [(0.5, ValueError), (float("nan"), ValueError), ("9", TypeError)])
def test_shards_have_at_least_one_sample(value: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="maxcount must be"):
        wds_datapipes.ShardWriter(tmp_path / "%d.tar", maxcount=value)
