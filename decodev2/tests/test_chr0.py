"""The CHR0 container: exact bytes, every refusal, atomic writing, checksums."""

import copy
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

import decodev2
from decodev2 import chr0
from decodev2.chr0 import ChrFile, TensorPlan, write_chr
from decodev2.errors import CodecError, ContainerError
from decodev2.nf4 import Packed, encode_nf4

Q, DOWN, NORM = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.norm"
ROOT = {
    "arch": "toy",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 1,
    "vocab_size": 0,
}
PLAN = [TensorPlan(Q, (64, 64)), TensorPlan(DOWN, (32, 128)), TensorPlan(NORM, (64,))]

# The worked example of the format, written out by hand.
HEADER = {
    "magic": "CHR0", "version": 1, **ROOT, "tile": {"row": 64, "col_group": 8},
    "tensors": {
        DOWN: {"layer": 0, "kind": "down", "codec": "nf4", "shape": [32, 128], "group_size": 64,
               "data": [2752, 4800], "scale": [4800, 4928]},
        Q: {"layer": 0, "kind": "q", "codec": "nf4", "shape": [64, 64], "group_size": 64,
            "data": [576, 2624], "scale": [2624, 2752]},
        NORM: {"kind": "norm", "codec": "bf16", "shape": [64], "data": [4928, 5056]},
    },
}  # fmt: skip


def tensors_of(plan, seed=0):
    rng = np.random.default_rng(seed)
    made = {}
    for item in plan:
        x = rng.standard_normal(item.shape).astype(np.float32)
        packed = len(item.shape) == 2 and item.codec != "bf16"
        made[item.name] = encode_nf4(x, item.name) if packed else x
    return made


def raw_file(header, payload=b"", size=5056):
    """A file from a header object or ready header bytes; zeros (or `payload`) fill the rest."""
    if not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    data = struct.pack("<Q", len(header)) + header
    return (data + bytes(-len(data) % 64) + payload).ljust(size, b"\0")


def written(folder, name="m.chr", seed=0, plan=PLAN, **more):
    path = Path(folder) / name
    tensors = tensors_of(plan, seed)
    write_chr(path, ROOT, plan, tensors.__getitem__, **more)
    return path, tensors


def refused(path, *parts):
    """Opening and reading everything must fail with one line that holds file name and parts."""
    with pytest.raises(ContainerError) as caught, ChrFile(path) as file:
        for name in file:
            file[name]
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    for part in (Path(path).name, *parts):
        assert part in message, message
    return message


def same(got, want):
    if isinstance(want, Packed):
        assert got.shape == want.shape
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.scales.view(np.uint16), want.scales.view(np.uint16))
    else:
        assert got.dtype == np.float32 and got.shape == want.shape
        np.testing.assert_array_equal(got.view(np.uint32), bf16_rounded(want).view(np.uint32))


def bf16_rounded(x):
    bits = x.view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


# ---- exact bytes ----


def test_worked_example_byte_for_byte(tmp_path):
    path, tensors = written(tmp_path)
    header = json.dumps(HEADER, separators=(",", ":")).encode()
    assert len(header) == 516
    q, down, norm = tensors[Q], tensors[DOWN], tensors[NORM]
    norm_bits = (bf16_rounded(norm).view(np.uint32) >> 16).astype("<u2")
    want = struct.pack("<Q", 516) + header + bytes(576 - 524)
    for blob in (q.codes, q.scales, down.codes, down.scales, norm_bits):
        want += blob.tobytes()
    assert len(want) == 5056
    assert path.read_bytes() == want
    prefix, entries, size = chr0.layout(ROOT, PLAN)
    assert prefix == want[:524] and size == 5056
    assert list(entries) == [DOWN, Q, NORM]


def test_read_back_bit_exact(tmp_path):
    widths = (1, 2, 65, 96, 576, 896, 1376)
    plan = [TensorPlan(f"model.layers.{i}.mlp.up_proj", (3, k)) for i, k in enumerate(widths)]
    plan += [TensorPlan("model.embed_tokens", (5, 33), codec="bf16"), TensorPlan("b.bias", (7,))]
    path, tensors = written(tmp_path, plan=plan)
    with ChrFile(path) as file:
        assert sorted(file) == sorted(tensors) and len(file) == len(plan)
        assert list(file) == sorted(file, key=str.encode)
        for name, want in tensors.items():
            same(file[name], want)
            assert name in file
        assert file.root == {"magic": "CHR0", "version": 1, "tile": chr0.TILE, **ROOT}
        entry = file.entries["model.layers.3.mlp.up_proj"]
        assert (entry.kind, entry.codec, entry.shape, entry.layer) == ("up", "nf4", (3, 96), 3)
        assert entry.data[0] % 64 == 0 and entry.data[1] - entry.data[0] == 3 * 64
        assert file.entries["b.bias"].layer is None and file.entries["b.bias"].scale is None
        assert "nothing" not in file
        with pytest.raises(KeyError):
            file["nothing"]
    assert path.stat().st_size % 64 == 0
    with pytest.raises(ContainerError, match="closed"):
        file["b.bias"]


def test_special_bf16_values_survive(tmp_path):
    bits = [0x7F800000, 0xFF800000, 0x80000000, 1, 0x3F808000, 0x3F818000, 0x7F800001, 0x7FC00000]
    values = np.array(bits, np.uint32).view(np.float32)
    path = tmp_path / "m.chr"
    write_chr(path, ROOT, [TensorPlan(NORM, (8,))], lambda name: values)
    with ChrFile(path) as file:
        got = file[NORM]
    assert got.view(np.uint32)[:6].tolist() == [
        0x7F800000, 0xFF800000, 0x80000000, 0, 0x3F800000, 0x3F820000,
    ]  # fmt: skip
    assert np.isnan(got[6:]).all()


def test_header_length_is_stable_wherever_offsets_change_their_digits():
    seen = set()
    for count in range(1, 60):
        plan = [TensorPlan(f"t{i:03d}", (31 + i,)) for i in range(count)]
        prefix, entries, size = chr0.layout(ROOT, plan)
        n = struct.unpack("<Q", prefix[:8])[0]
        assert n == len(prefix) - 8
        first = min(entry.data[0] for entry in entries.values())
        assert first == -(-(8 + n) // 64) * 64
        assert size == -(-max(entry.data[1] for entry in entries.values()) // 64) * 64
        assert [entries[item.name].data[0] for item in plan] == sorted(
            entry.data[0] for entry in entries.values()
        )
        seen.add(len(str(first)))
    assert seen == {3, 4}  # the first offset itself changed its length on the way


def test_names_beyond_ascii_are_sorted_by_utf8_bytes(tmp_path):
    names = ["z", "é", "\U0001f600", "\uff5e", "a.norm"]  # UTF-16 order would differ
    path, tensors = written(tmp_path, plan=[TensorPlan(name, (4,)) for name in names])
    with ChrFile(path) as file:
        assert list(file) == ["a.norm", "z", "é", "\uff5e", "\U0001f600"]
        for name in names:
            same(file[name], tensors[name])
    assert "é".encode() in path.read_bytes()


def test_kinds():
    kinds = {
        "model.layers.0.self_attn.q_proj": "q", "model.layers.0.self_attn.k_proj": "k",
        "model.layers.0.self_attn.v_proj": "v", "model.layers.0.self_attn.o_proj": "o",
        "model.layers.0.mlp.gate_proj": "gate", "model.layers.0.feed_forward.w1": "gate",
        "model.layers.0.mlp.up_proj": "up", "model.layers.0.feed_forward.w3": "up",
        "model.layers.0.mlp.down_proj": "down", "model.layers.0.feed_forward.w2": "down",
        "model.embed_tokens": "embed", "model.tok_embeddings": "embed", "transformer.wte": "embed",
        "lm_head": "lm_head", "output": "lm_head", "model.norm": "norm",
        "model.layers.0.input_layernorm": "norm", "model.layers.0.ffn_norm": "norm",
        "model.layers.0.self_attn.q_norm": "norm", "model.layers.0.attention.wqkv": "other",
        "model.layers.0.attention.wo": "other", "model.layers.0.self_attn.q_proj.bias": "other",
    }  # fmt: skip
    assert {name: chr0.kind_of(name) for name in kinds} == kinds


def test_rotary_tables_are_left_out(tmp_path):
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "rope.sin", "rope.cos"):
        assert chr0.is_rotary(name)
        with pytest.raises(ContainerError, match="rotary"):
            chr0.layout(ROOT, [TensorPlan(name, (8,))])
    assert not chr0.is_rotary("model.cosine_proj") and not chr0.is_rotary("sinks")


# ---- what a reader accepts ----


@pytest.mark.parametrize("case", ["white space", "inner space", "extra", "pads", "no end pad"])
def test_tolerated_variations(tmp_path, case):
    path, tensors = written(tmp_path)
    chr0.sidecar_path(path).unlink()
    data = bytearray(path.read_bytes())
    if case == "white space":
        data[524:530] = b" \t\n\r\v\f"
        data[:8] = struct.pack("<Q", 522)
    elif case == "inner space":
        header = json.dumps(HEADER).encode()
        header = header.replace(b", ", b",", header.count(b", ") - 10)  # still before byte 576
        data[:576] = raw_file(header, size=576)
        assert len(header) > 516
    elif case == "extra":
        data += b"\xff" * 100
    elif case == "pads":
        data[524:576] = b"\xff" * 52
    else:
        shorter = [TensorPlan(Q, (64, 64)), TensorPlan(NORM, (60,))]
        path, tensors = written(tmp_path, plan=shorter)
        chr0.sidecar_path(path).unlink()
        data = path.read_bytes()[:-8]
    path.write_bytes(data)
    with ChrFile(path) as file:
        assert file.sums is None and file.source == {}
        for name, want in tensors.items():
            same(file[name], want)


def test_blobs_may_lie_in_any_order_with_gaps(tmp_path):
    header = copy.deepcopy(HEADER)
    header["tensors"][NORM]["data"] = [6400, 6528]
    header["tensors"][Q] |= {"data": [8192, 10240], "scale": [7040, 7168]}
    path = tmp_path / "m.chr"
    path.write_bytes(raw_file(header, size=10240))
    with ChrFile(path) as file:
        assert file.entries[Q].data == (8192, 10240)
        assert (file[NORM] == 0).all()


# ---- what a reader refuses ----


def edit(*path, to):
    def change(header):
        at = header
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return change


def drop(*path):
    def change(header):
        at = header
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


def reverse_names(header):
    header["tensors"] = dict(reversed(header["tensors"].items()))


def rename(old, new):
    def change(header):
        header["tensors"] = {
            new if name == old else name: entry for name, entry in header["tensors"].items()
        }

    return change


T = "tensors"
REFUSALS = {
    "magic": (edit("magic", to="CHR1"), "magic is 'CHR1', needs 'CHR0'"),
    "magic type": (edit("magic", to=["CHR0"]), "magic is ['CHR0']"),
    "version 2": (edit("version", to=2), "version 2 is unknown"),
    "version true": (edit("version", to=True), "version is True, needs an integer"),
    "version 1.0": (edit("version", to=1.0), "version is 1.0, needs an integer"),
    "unknown root key": (edit("rope_theta", to=1), "unknown key 'rope_theta'"),
    "missing root key": (drop("vocab_size"), "key 'vocab_size' is missing"),
    "missing version": (drop("version"), "key 'version' is missing"),
    "arch": (edit("arch", to=None), "arch is None, needs a string"),
    "hidden 0": (edit("hidden_size", to=0), "hidden_size is 0, needs at least 1"),
    "negative": (edit("num_layers", to=-1), "num_layers is -1, needs at least 0"),
    "float": (edit("vocab_size", to=0.0), "vocab_size is 0.0, needs an integer"),
    "bool": (edit("intermediate_size", to=False), "intermediate_size is False"),
    "string": (edit("hidden_size", to="64"), "hidden_size is '64'"),
    "huge": (edit("vocab_size", to=2**63), "'9223372036854775808' is too large"),
    "tile": (edit("tile", to={"row": 64, "col_group": 16}), "tile is "),
    "tile float": (edit("tile", "row", to=64.0), "tile is "),
    "tile key": (edit("tile", "x", to=1), "tile is "),
    "tile list": (edit("tile", to=[64, 8]), "tile is [64, 8]"),
    "no tensors": (edit(T, to={}), "tensors is {}"),
    "tensor list": (edit(T, to=[]), "tensors is []"),
    "order": (reverse_names, "out of order"),
    "empty name": (edit(T, to={"": HEADER[T][NORM]}), "name is empty"),
    "entry type": (edit(T, NORM, to=[]), f"tensor '{NORM}' is [], needs an object"),
    "vq": (edit(T, Q, "codec", to="vq"), f"tensor '{Q}': codec 'vq' is not implemented"),
    "int4": (edit(T, Q, "codec", to="int4"), "codec 'int4' is not implemented"),
    "all vq": (edit(T, to={Q: {"codec": "vq", "books": 3}}), "codec 'vq' is not implemented"),
    "codec": (edit(T, Q, "codec", to="fp8"), "codec is 'fp8', needs 'nf4' or 'bf16'"),
    "no codec": (drop(T, Q, "codec"), "codec is None"),
    "codec list": (edit(T, Q, "codec", to=["nf4"]), "codec is ['nf4']"),
    "tensor key": (edit(T, Q, "bias", to=1), f"tensor '{Q}': unknown key 'bias'"),
    "scale with bf16": (edit(T, NORM, "scale", to=[0, 0]), "unknown key 'scale'"),
    "no scale": (drop(T, Q, "scale"), "key 'scale' is missing"),
    "no data": (drop(T, NORM, "data"), "key 'data' is missing"),
    "no kind": (drop(T, NORM, "kind"), "key 'kind' is missing"),
    "no layer": (drop(T, Q, "layer"), "key 'layer' is missing"),
    "layer where none": (edit(T, NORM, "layer", to=0), "unknown key 'layer'"),
    "other layer": (edit(T, Q, "layer", to=1), "layer is 1, its name says 0"),
    "layer false": (edit(T, Q, "layer", to=False), "layer is False, needs an integer"),
    "kind": (edit(T, Q, "kind", to="k"), "kind is 'k', needs 'q'"),
    "kind type": (edit(T, Q, "kind", to=None), "kind is None"),
    "rank 0": (edit(T, NORM, "shape", to=[]), "shape is [], needs one or two"),
    "rank 3": (edit(T, Q, "shape", to=[8, 8, 64]), "shape is [8, 8, 64], needs one or two"),
    "rank 1 nf4": (edit(T, Q, "shape", to=[4096]), "nf4 needs two dimensions"),
    "zero rows": (edit(T, Q, "shape", to=[0, 64]), "dimension is 0, needs at least 1"),
    "negative dim": (edit(T, NORM, "shape", to=[-64]), "dimension is -64"),
    "float dim": (edit(T, NORM, "shape", to=[64.0]), "dimension is 64.0"),
    "shape type": (edit(T, NORM, "shape", to="64"), "shape is '64'"),
    "group size": (edit(T, Q, "group_size", to=128), "group_size is 128, needs 64"),
    "group float": (edit(T, Q, "group_size", to=64.0), "group_size is 64.0"),
    "range type": (edit(T, NORM, "data", to=4928), "data is 4928, needs [start, end]"),
    "range of 3": (edit(T, NORM, "data", to=[1, 2, 3]), "data is [1, 2, 3]"),
    "range null": (edit(T, NORM, "data", to=[None, 5056]), "data is None, needs an integer"),
    "negative start": (edit(T, NORM, "data", to=[-64, 64]), "data is -64, needs at least 0"),
    "unaligned": (edit(T, NORM, "data", to=[4896, 5024]), "starts at 4896, needs a multiple of 64"),
    "short": (edit(T, NORM, "data", to=[4928, 5054]), "has 126 bytes, shape [64] needs 128"),
    "long": (edit(T, Q, "data", to=[576, 2688]), "has 2112 bytes, shape [64, 64] needs 2048"),
    "backwards": (edit(T, NORM, "data", to=[4928, 4800]), "has -128 bytes"),
    "bad scale": (edit(T, Q, "scale", to=[2624, 2750]), "scale [2624, 2750) has 126 bytes"),
    "past the end": (edit(T, NORM, "data", to=[4992, 5120]), "5120, but the file has 5056 bytes"),
    "near 2^63": (
        edit(T, NORM, "data", to=[2**63 - 192, 2**63 - 64]),
        "but the file has 5056 bytes",
    ),
    "in the header": (edit(T, NORM, "data", to=[448, 576]), "starts at 448, inside the header"),
    "overlap": (
        edit(T, NORM, "data", to=[4864, 4992]),
        f"tensor '{NORM}': data starts at 4864, inside scale of '{DOWN}', which ends at 4928",
    ),
    "same blob": (edit(T, Q, "scale", to=[4800, 4928]), "inside scale of"),
    "huge shape": (edit(T, NORM, "shape", to=[2**62]), "needs 9223372036854775808"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_header_refusals(tmp_path, case):
    change, message = REFUSALS[case]
    header = copy.deepcopy(HEADER)
    change(header)
    path = tmp_path / "m.chr"
    path.write_bytes(raw_file(header))
    refused(path, message)


def test_the_unchanged_header_is_accepted(tmp_path):
    """Or every refusal above might have another reason."""
    path = tmp_path / "m.chr"
    path.write_bytes(raw_file(HEADER))
    with ChrFile(path) as file:
        assert list(file) == [DOWN, Q, NORM]


TEXT = json.dumps(HEADER, separators=(",", ":")).encode()
BYTE_REFUSALS = {
    "empty file": (b"", "file has 0 bytes, needs at least 8"),
    "seven bytes": (b"\x02" + bytes(6), "file has 7 bytes, needs at least 8"),
    "N 0": (struct.pack("<Q", 0) + bytes(100), "header length is 0, needs at least 2"),
    "N 1": (struct.pack("<Q", 1) + bytes(100), "header length is 1, needs at least 2"),
    "N past the cap": (struct.pack("<Q", 10**8 + 1) + bytes(99), "needs at most 100000000"),
    "N 2^64 - 1": (b"\xff" * 100, "header length is 18446744073709551615"),
    "N past the end": (struct.pack("<Q", 93) + bytes(92), "byte 101, but the file has 100 bytes"),
    "N of the cap": (struct.pack("<Q", 10**8) + bytes(92), "but the file has 100 bytes"),
    "no object": (raw_file(b"[1]"), "starts with b'['; needs one object"),
    "white space first": (raw_file(b" " + TEXT), "starts with b' '"),
    "byte order mark": (raw_file(b"\xef\xbb\xbf" + TEXT), "byte order mark"),
    "UTF-16": (raw_file(TEXT.decode().encode("utf-16-le")), "malformed"),
    "not UTF-8": (raw_file(TEXT.replace(b"toy", b"t\xffy")), "JSON byte 37 is 0xFF; needs UTF-8"),
    "cut": (raw_file(TEXT[:-1]), "malformed"),
    "two objects": (raw_file(TEXT + b"{}"), "needs to be one object, but '{}' follows"),
    "zeros inside N": (raw_file(TEXT + b"\0"), r"but '\x00' follows"),
    "no-break space": (raw_file(TEXT + "\u00a0".encode()), "follows it"),
    "root key twice": (raw_file(TEXT[:-1] + b',"version":1}'), "key 'version' appears twice"),
    "name twice": (
        raw_file(TEXT[:-2] + b',"model.norm":' + json.dumps(HEADER[T][NORM]).encode() + b"}}"),
        "key 'model.norm' appears twice",
    ),
    "key twice": (raw_file(TEXT.replace(b'"kind":"q"', b'"kind":"q","kind":"q"')), "appears twice"),
    "NaN": (raw_file(TEXT.replace(b'"vocab_size":0', b'"vocab_size":NaN')), "JSON holds NaN"),
    "Infinity": (raw_file(TEXT.replace(b"4928,5056", b"4928,-Infinity")), "JSON holds -Infinity"),
    "exponent": (raw_file(TEXT.replace(b'"hidden_size":64', b'"hidden_size":64e0')), "is 64.0"),
    "float range": (raw_file(TEXT.replace(b"4928,5056]}}", b"1e999,5056]}}")), "data is inf"),
    "long number": (raw_file(TEXT.replace(b"5056", b"9" * 5000), size=9000), "is too large"),
    "leading zero": (raw_file(TEXT.replace(b"5056", b"05056")), "malformed"),
    "nested lists": (raw_file(b'{"a":' + b"[" * 200_000, size=300_000), "nested too deeply"),
    "nested objects": (raw_file(b'{"a":' * 100_000, size=600_000), "nested too deeply"),
    "half a surrogate": (raw_file(TEXT.replace(b"model.norm", rb"\ud800")), "not valid Unicode"),
    "half in arch": (raw_file(TEXT.replace(b"toy", rb"\udfff")), "arch '\\udfff' is not valid"),
    "long layer": (
        raw_file(HEADER | {T: {Q.replace("0", "1" * 5000): HEADER[T][Q]}}, size=9000),
        "layer number is too large",
    ),
    "name with a newline": (
        raw_file(TEXT.replace(b'"model.norm":{"kind":"norm"', rb'"n\n\u2028":{"kind":"norm"')),
        r"'n\n\u2028': kind is 'norm'",
    ),
}


@pytest.mark.parametrize("case", BYTE_REFUSALS)
def test_byte_refusals(tmp_path, case):
    data, message = BYTE_REFUSALS[case]
    path = tmp_path / "m.chr"
    path.write_bytes(data)
    refused(path, message)


def test_a_file_name_with_a_newline_still_gives_one_line(tmp_path):
    path = tmp_path / "a\nb.chr"
    path.write_bytes(b"")
    with pytest.raises(ContainerError) as caught:
        ChrFile(path)
    assert "\n" not in str(caught.value) and "a b.chr" in str(caught.value)


def test_not_a_file(tmp_path):
    refused(tmp_path / "absent.chr", "No such file")
    refused(tmp_path, "not a regular file")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.chr")  # opening it would wait for ever
        refused(tmp_path / "pipe.chr", "not a regular file")


def test_header_numbers_allocate_nothing(tmp_path):
    big = copy.deepcopy(HEADER)
    big[T][NORM] |= {"shape": [2**40], "data": [4928, 4928 + 2**41]}
    cases = {
        "n.chr": struct.pack("<Q", 10**8) + bytes(1000),
        "t.chr": raw_file(big),
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        tracemalloc.start()
        refused(tmp_path / name, "but the file has")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1e6, peak


def test_reading_one_tensor_reads_only_its_bytes(tmp_path):
    """A sparse file of 3 GB: reading the norm must not touch, or make room for, the rest."""
    header = copy.deepcopy(HEADER)
    header[T][DOWN] |= {"shape": [2**16, 2**16], "data": [8192, 8192 + 2**31]}
    header[T][DOWN]["scale"] = [8192 + 2**31, 8192 + 2**31 + 2**27]
    path = tmp_path / "m.chr"
    path.write_bytes(raw_file(header, size=8192))
    with open(path, "r+b") as file:
        file.seek(4928)
        file.write(np.full(64, 0x3F80, "<u2").tobytes())
        file.truncate(3 << 30)
    tracemalloc.start()
    with ChrFile(path) as chr_file:
        assert (chr_file[NORM] == 1.0).all() and NORM in chr_file
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6, peak


def test_file_cut_while_open(tmp_path):
    path, _ = written(tmp_path)
    with ChrFile(path) as file:
        os.truncate(path, 5000)
        file[Q]
        with pytest.raises(ContainerError, match="became shorter"):
            file[NORM]


# ---- what a writer refuses ----


@pytest.mark.parametrize(
    ("root", "plan", "message"),
    [
        (ROOT, [], "tensors is {}"),
        (ROOT, [*PLAN, PLAN[0]], "planned twice"),
        (ROOT, [TensorPlan("a", (0,))], "dimension is 0"),
        (ROOT, [TensorPlan("a", (64.0,))], "dimension is 64.0"),
        (ROOT, [TensorPlan("a", (2, 2, 2))], "cannot be written"),
        (ROOT, [TensorPlan("a", ())], "cannot be written"),
        (ROOT, [TensorPlan("a", (2, 2), codec="vq")], "cannot be written"),
        (ROOT, [TensorPlan("a", (64,), codec="nf4")], "nf4 needs two dimensions"),
        (ROOT, [TensorPlan("\ud800", (64,))], "not valid Unicode"),
        (ROOT, [TensorPlan("", (64,))], "name is empty"),
        (ROOT | {"hidden_size": 0}, PLAN, "hidden_size is 0"),
        (ROOT | {"hidden_size": 64.0}, PLAN, "hidden_size is 64.0"),
        (ROOT | {"rope": 1}, PLAN, "unknown key 'rope'"),
        (ROOT | {"version": 2}, PLAN, "version 2"),
        (ROOT | {"arch": object()}, PLAN, "cannot be written as JSON"),
        (ROOT | {"vocab_size": float("nan")}, PLAN, "cannot be written as JSON"),
        ({"arch": "toy"}, PLAN, "is missing"),
    ],
)
def test_what_cannot_be_laid_out(tmp_path, root, plan, message):
    with pytest.raises(ContainerError) as caught:
        write_chr(tmp_path / "m.chr", root, plan, lambda name: pytest.fail("produced"))
    assert message in str(caught.value) and "m.chr" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_source_that_is_no_json_is_refused_before_any_work(tmp_path):
    with pytest.raises(ContainerError, match="source cannot be written as JSON"):
        written(tmp_path, source={"x": {1, 2}})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (Q, np.zeros((64, 64), np.float32), "produced bf16 [64, 64], needs nf4 [64, 64]"),
        (Q, encode_nf4(np.ones((64, 63))), "produced nf4 [64, 63], needs nf4 [64, 64]"),
        (NORM, np.zeros(63, np.float32), "produced bf16 [63], needs bf16 [64]"),
        (NORM, np.zeros(64, np.int32), "produced int32, needs float32"),
        (NORM, None, "produced object"),
    ],
)
def test_produced_value_that_does_not_fit_its_plan(tmp_path, name, value, message):
    tensors = tensors_of(PLAN) | {name: value}
    with pytest.raises(ContainerError) as caught:
        write_chr(tmp_path / "m.chr", ROOT, PLAN, tensors.__getitem__)
    assert message in str(caught.value) and name in str(caught.value)
    assert os.listdir(tmp_path) == []


# ---- interrupted writing ----


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, CodecError, OSError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("at", [Q, DOWN, NORM])
@pytest.mark.parametrize("where", ["produce", "on_written"])
def test_interrupted_run_leaves_nothing(tmp_path, error, at, where):
    tensors = tensors_of(PLAN)

    def fail(name):
        if name == at:
            raise error("stopped here")

    def produce(name):
        if where == "produce":
            fail(name)
        return tensors[name]

    with pytest.raises(error, match="stopped here"):
        write_chr(tmp_path / "m.chr", ROOT, PLAN, produce, on_written=fail)
    assert os.listdir(tmp_path) == []


def test_good_file_survives_a_failed_overwrite(tmp_path):
    path, tensors = written(tmp_path, source={"run": 1})
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        write_chr(path, ROOT, PLAN, lambda name: (_ for _ in ()).throw(KeyboardInterrupt))
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
    with ChrFile(path) as file:
        assert file.source == {"run": 1}
        for name in file:
            same(file[name], tensors[name])


def test_overwriting_replaces_file_and_side_car(tmp_path):
    written(tmp_path, seed=0, source={"run": 1})
    path, tensors = written(tmp_path, seed=1, source={"run": 2})
    assert sorted(os.listdir(tmp_path)) == ["m.chr", "m.chr.sum.json"]
    with ChrFile(path) as file:
        assert file.source == {"run": 2}
        for name in file:
            same(file[name], tensors[name])


def test_produce_is_called_in_plan_order_and_reported(tmp_path):
    calls = []
    tensors = tensors_of(PLAN)

    def produce(name):
        calls.append(("made", name))
        return tensors[name]

    on_written = lambda name: calls.append(("written", name))  # noqa: E731
    write_chr(tmp_path / "m.chr", ROOT, PLAN, produce, on_written)
    assert calls == [(step, p.name) for p in PLAN for step in ("made", "written")]


def test_peak_memory_of_writing_is_one_tensor(tmp_path):
    plan = [TensorPlan(f"t{i}", (1 << 20,)) for i in range(8)]  # 4 MiB each as float32
    tracemalloc.start()
    write_chr(tmp_path / "m.chr", ROOT, plan, lambda name: np.ones(1 << 20, np.float32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20, peak  # one tensor, its bf16 bits, and rounding work space


CHILD = """
import sys, time
import numpy as np
from decodev2.chr0 import TensorPlan, write_chr
plan = [TensorPlan(f"t{i}", (4096,)) for i in range(1000)]
root = dict(arch="toy", hidden_size=1, intermediate_size=0, num_layers=0, vocab_size=0)
def produce(name):
    if name == "t20":
        print("ready", flush=True)
        time.sleep(60)
    return np.ones(4096, np.float32)
write_chr(sys.argv[1], root, plan, produce)
"""


def child_environment():
    """The child must find the package this test runs against, installed or not."""
    folder = str(Path(decodev2.__file__).parent.parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_killed_process_leaves_no_chr(tmp_path, name):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "m.chr")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        # a job started in the background inherits an ignored SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        during = os.listdir(tmp_path)
        child.send_signal(getattr(signal, name))
        assert child.wait(30) != 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert len(during) == 1 and during[0].endswith(".tmp")
    left = os.listdir(tmp_path)
    assert left == [] if name == "SIGINT" else left == during


@pytest.mark.skipif(os.name != "posix", reason="file size limit of the process")
def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    code = """
    import resource, sys
    from decodev2.errors import ContainerError
    resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))
    try:
        exec(open(0).read())
    except ContainerError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "m.chr")],
        input=CHILD.replace("time.sleep(60)", "pass").replace('print("ready", flush=True)', "pass"),
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1 and "m.chr: File too large" in done.stdout, done.stdout
    assert os.listdir(tmp_path) == []


def test_synced_before_renamed_and_never_beside_an_old_side_car(tmp_path, monkeypatch):
    """Cut the power at any line: a `.chr` is whole, and never lies beside another one's sums."""
    path, _ = written(tmp_path)
    calls = []

    def recorded(owner, name):
        original = getattr(owner, name)

        def call(*args, **more):
            calls.append((name, path.exists(), chr0.sidecar_path(path).exists()))
            return original(*args, **more)

        monkeypatch.setattr(owner, name, call)

    recorded(os, "fsync")
    recorded(os, "replace")
    written(tmp_path, seed=1)
    order = [name for name, _, _ in calls]
    assert order[:4] == ["fsync", "fsync", "replace", "replace"]  # both files, then both names
    assert calls[2] == ("replace", True, False)  # old file, no side-car
    assert calls[3] == ("replace", True, False)  # new file, no side-car yet


def test_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ContainerError, match=r"m\.chr: No such file"):
        written(tmp_path / "absent")
    (tmp_path / "m.chr").mkdir()
    with pytest.raises(ContainerError, match="not a regular file"):
        written(tmp_path)
    assert os.listdir(tmp_path) == ["m.chr"]


# ---- side-car ----


def test_side_car_holds_sizes_sums_and_source(tmp_path):
    path, _ = written(tmp_path, source={"config_sha256": "ab", "n": [1, None]})
    data = path.read_bytes()
    side = json.loads((tmp_path / "m.chr.sum.json").read_text())
    entries = chr0.layout(ROOT, PLAN)[1]
    sums = {}
    for name, e in entries.items():
        blob = data[slice(*e.data)] + (data[slice(*e.scale)] if e.scale else b"")
        sums[name] = f"{zlib.crc32(blob):08x}"
    assert side == {
        "format": "chr0-sums",
        "version": 1,
        "file_size": 5056,
        "header_crc32": f"{zlib.crc32(data[:524]):08x}",
        "source": {"config_sha256": "ab", "n": [1, None]},
        "tensors": sums,
    }
    with ChrFile(path) as file:
        assert file.source == {"config_sha256": "ab", "n": [1, None]}
        assert {name: f"{crc:08x}" for name, crc in file.sums.items()} == sums
    assert chr0.verify_checksums(path) == []


def test_every_damaged_blob_is_noticed(tmp_path):
    path, tensors = written(tmp_path)
    good = path.read_bytes()
    for at, damaged in (
        (576, Q), (2623, Q), (2624, Q), (2751, Q), (2752, DOWN), (4927, DOWN), (4928, NORM),
        (5055, NORM),
    ):  # fmt: skip
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with ChrFile(path) as file:
            for name in file:
                if name == damaged:
                    with pytest.raises(ContainerError, match=rf"m\.chr: tensor '{name}' has CRC"):
                        file[name]
                else:
                    same(file[name], tensors[name])
        calls = []
        assert chr0.verify_checksums(path, calls.append) == [damaged]
        assert calls == [DOWN, Q, NORM]


def test_swapped_model_is_noticed(tmp_path):
    path, _ = written(tmp_path, "a.chr", seed=0)
    other, _ = written(tmp_path, "b.chr", seed=1)  # same shapes: same header, same size
    assert path.stat().st_size == other.stat().st_size
    path.write_bytes(other.read_bytes())
    refused(path, f"tensor '{DOWN}' has CRC-32")
    assert chr0.verify_checksums(path) == [DOWN, Q, NORM]

    longer, _ = written(tmp_path, "c.chr", plan=[*PLAN, TensorPlan("x.norm", (2,))])
    path.write_bytes(longer.read_bytes())
    refused(path, "a.chr.sum.json", "its size differs", "noted 5056")

    path.write_bytes(other.read_bytes().replace(b'"num_layers":1', b'"num_layers":2'))
    refused(path, "a.chr.sum.json", "its header differs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-1], "malformed"),
        (lambda text: "", "starts with b''"),
        (lambda text: "[]", "starts with b'['"),
        (lambda text: text.replace("chr0-sums", "sums"), "is 'sums' version 1"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2"),
        (lambda text: text.replace('"version": 1', '"version": 1.0'), "version is 1.0"),
        (lambda text: text.replace('"version": 1', '"version": 1, "x": 0'), "unknown key 'x'"),
        (lambda text: text.replace("5056", "5057"), "size differs (5056 bytes, noted 5057)"),
        (lambda text: text.replace('"model.norm"', '"model.norn"'), "its tensor list differs"),
        (lambda text: text.replace('"source": {}', '"source": 3'), "source is 3"),
        (lambda text: text.replace('"source": {}', '"source": NaN'), "holds NaN"),
        (lambda text: text.replace('norm": "', 'norm": "0x'), "needs 8 hex digits"),
        (lambda text: text.replace('"file_size"', '"version"'), "appears twice"),
    ],
)
def test_damaged_side_car(tmp_path, change, message):
    path, _ = written(tmp_path)
    side = chr0.sidecar_path(path)
    changed = change(side.read_text())
    assert changed != side.read_text()
    side.write_text(changed)
    refused(path, "m.chr.sum.json", message)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_side_car_that_is_no_file(tmp_path):
    path, _ = written(tmp_path)
    side = chr0.sidecar_path(path)
    side.unlink()
    os.mkfifo(side)  # reading it would wait for ever
    refused(path, "m.chr.sum.json", "regular file")
    side.unlink()
    side.mkdir()
    refused(path, "m.chr.sum.json", "regular file")


def test_verifying_without_a_side_car(tmp_path):
    path, _ = written(tmp_path)
    chr0.sidecar_path(path).unlink()
    with pytest.raises(ContainerError, match=r"no m\.chr\.sum\.json beside it"):
        chr0.verify_checksums(path)


def test_threads_may_share_one_file(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    path, tensors = written(tmp_path)
    with ChrFile(path) as file, ThreadPoolExecutor(4) as pool:
        names = list(tensors) * 100
        for name, got in zip(names, pool.map(file.__getitem__, names), strict=True):
            same(got, tensors[name])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
