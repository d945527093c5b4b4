"""Arguments that make no sense are refused when a stage is built, and the message says which would."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper


@pytest.mark.parametrize(
    ("stage", "arguments", "options", "message"),
    [
        ("load_wds_shards", (), {"end_marker": "none"}, 'end_marker is "required" or "optional", not'),
        (
            "load_wds_shards",
            (),
            {"on_error": "ignore"},
            'on_error is "raise", "warn", "skip", an ErrorBudget or a function',
        ),
        ("load_wds_shards", (), {"select_files": "*.txt"}, r"select_files is a function .* not '\*\.txt'"),
        ("load_wds_shards", (), {"rename_files": {"a": "b"}}, "rename_files is a function .* not {'a': 'b'}"),
        ("cache_samples", (5,), {}, "expected str, bytes or os.PathLike object, not int"),
        ("cache_samples", (), {"max_bytes": -1}, "max_bytes is a number of bytes, not -1"),
        ("cache_samples", (), {"seed": "a"}, "seed is a whole number, not 'a'"),
        ("group_samples", (), {"key_rule": "last_dot"}, "key_rule is first_dot, last_dot or another .* not 'last_dot'"),
        ("group_samples", (), {"fields": "jpg"}, "fields is a collection of names, .* not the string 'jpg'"),
        ("group_samples", (), {"on_duplicate": "warn"}, 'on_duplicate is "raise", "first" or "last", not'),
        ("group_samples", (), {"on_returning_key": "skip"}, 'on_returning_key is "warn", "raise" or "ignore", not'),
        ("shuffle_samples", (0,), {}, "needs 1 <= initial <= buffer_size, not 0 and 0"),
        ("shuffle_samples", (5,), {"initial": 6}, "needs 1 <= initial <= buffer_size, not 6 and 5"),
        ("shuffle_samples", (5,), {"max_bytes": -1}, "max_bytes is a number of bytes, not -1"),
        ("shuffle_samples", ("100",), {}, "buffer_size is a number of samples, not '100'"),
        ("wds_encode", (), {"pts": {"quality": 9}}, r"options are for images.*'pts' is none of them"),
        ("wds_encode", (), {"jpg": 95}, r"function of a value, or a dict of options.*not 95"),
        ("wds_encode", (), {"on_error": "stop"}, r"on_error is \"raise\""),
        ("wds_decode", (), {"handler": print}, r"webdataset's handler= is called on_error= here"),
        ("with_epoch", (0,), {}, "n is the number of items in an epoch, from 1, not 0"),
        ("with_epoch", (2.5,), {}, "n is the number of items in an epoch, from 1, not 2.5"),
        ("with_epoch", (True,), {}, "n is the number of items in an epoch, from 1, not True"),
        ("with_length", (-1,), {}, "n is the number of items, from 0, not -1"),
        ("with_length", ("5",), {}, "n is the number of items, from 0, not '5'"),
        ("resample_wds_shards", (0,), {}, "count is a number of shards from 1, or None, not 0"),
        ("resample_wds_shards", (2.5,), {}, "count is a number of shards from 1, or None, not 2.5"),
        ("resample_wds_shards", (), {"seed": "x"}, "seed is a number, not 'x'"),
        ("mix_samples", (["a.tar"],), {}, r"mix_samples mixes datapipes, and \['a.tar'\] is none"),
        ("mix_samples", (), {"stop": "longest"}, 'stop is "first", "all" or "never", not'),
        ("mix_samples", (), {"weights": "equal"}, 'weights are numbers, "sizes" or None, not'),
        ("mix_samples", (), {"weights": [1, 2]}, "needs a weight for each of its 1 sources, not 2"),
        ("mix_samples", (), {"weights": [-1]}, "weights are numbers from 0, of which one at least is above 0"),
        ("to_tuple", (), {}, "fields are named as in"),
        ("to_tuple", (["jpg", "cls"],), {}, r"a field is named by a string, .* not by \['jpg', 'cls'\]"),
        ("to_tuple", ("jpg",), {"missing": "skip"}, 'missing is "raise" or "none", not'),
        ("rename", (), {"image": "jpg cls"}, 'one field for each new name, as in image="jpg;png", not'),
        ("rename", (), {"image": ["jpg", "png"]}, "a field is named by a string"),
        ("map_dict", (), {}, "needs a function for at least one field"),
        ("map_dict", (), {"cls": 5}, "applies a function to the field 'cls', and 5 is none"),
        ("compose", (), {}, "compose needs a function from an iterator"),
        ("compose", ("sorted",), {}, "compose takes functions .* not 'sorted'"),
        ("map_samples", (3,), {}, "applies a function to each sample, and 3 is none"),
        ("map_samples_with_rng", (3,), {}, "applies a function of a sample and a generator, and 3 is none"),
        ("map_tuple", (None, "upper"), {}, "applies functions, or None .* not 'upper'"),
        ("associate", ("labels.json",), {}, "takes a mapping from keys to fields, or a function of a key, not 'labels"),
        ("associate", ({},), {"missing": "none"}, 'missing is "raise", "keep" or "skip", not'),
        ("add_columns", ("labels",), {}, r"by a function, or by what to replace, .* not \'labels\'"),
        ("add_columns", ((),), {}, r"or takes a list of these, not \(\)"),
        ("add_columns", (("images", "labels", "masks"),), {}, r"or takes a list of these, not \('images', 'labels'"),
        ("add_columns", (("images", "images"),), {}, r"or takes a list of these, not \('images', 'images'\)"),
        ("add_columns", ([("a", "b"), 3],), {}, "or takes a list of these, not 3"),
        ("add_columns", (("a", "b"),), {"fields": "txt"}, "fields is a collection of names, .* not the string 'txt'"),
        ("add_columns", (("a", "b"),), {"key_rule": "last_dot"}, "key_rule is first_dot, .* not 'last_dot'"),
        ("add_columns", (("a", "b"),), {"rename_files": {}}, "rename_files is a function that gets a file's name"),
        ("log_samples", (), {"first": -1}, "first is a number from 0, not -1"),
        ("log_samples", (), {"every": 0}, "every is a number from 1, not 0"),
        ("log_samples", (), {"to": "keys.log"}, 'to is a logging.Logger, "stderr" or "stdout", not .keys.log.: for a'),
        ("rsample", ("half",), {}, "p is a probability from 0 to 1, not 'half'"),
        ("rsample", (1.5,), {}, "p is a probability from 0 to 1, not 1.5"),
        ("rsample", (float("nan"),), {}, "p is a probability from 0 to 1, not nan"),
        ("slice_samples", (), {}, "takes stop, or start, stop and step, not 0 numbers"),
        ("slice_samples", (1, 2, 3, 4), {}, "takes stop, or start, stop and step, not 4 numbers"),
        ("slice_samples", (-1,), {}, "the stop of slice_samples is a number from 0, not -1: a stream has no end"),
        ("slice_samples", (0, 5, 0), {}, "the step of slice_samples is a number from 1, not 0"),
        ("slice_samples", ("5",), {}, "the stop of slice_samples is a number or None, not '5'"),
        ("rename_keys", (), {}, r'needs a new name and a pattern, as in rename_keys\(\("image", "\*\.jpg"\)\)'),
        ("rename_keys", ("image",), {}, "takes pairs of a new name and a pattern, .* not 'image'"),
        ("rename_keys", (("image", ["jpg", "png"]),), {}, "takes pairs of a new name and a pattern, .* not"),
        ("rename_keys", (("x", "*.jpg"),), {"y": "*.JPG"}, r"has the pattern '\*\.jpg' twice"),
        ("extract_keys", (), {}, "extract_keys needs the fields"),
        ("extract_keys", (3,), {}, 'extract_keys takes patterns as in .*, "cls", or lists of them, not 3'),
        ("extract_keys", ("cls",), {"missing": "keep"}, 'missing is "raise" or "none", not'),
        ("select_fields", ("cls", " ;"), {}, "select_fields got ' ;', which matches no field"),
        ("select_fields", ("cls",), {"missing": "none"}, 'missing is "raise", "keep" or "skip", not'),
    ],
)
def test_wrong_arguments(stage: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    source: IterDataPipe[Any] = IterableWrapper([])
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(source, stage)(*arguments, **options)
