"""100,000 damaged headers and files: a clean refusal or a sound opening, never anything else.

Every case is drawn from a fixed seed, so a failure repeats; its message names the case. An accepted
header is checked by rules written again here, so that a refusal that is missing would show.
"""

import copy
import json
import random
import re
import struct
import time
import tracemalloc

import numpy as np
import pytest

from decodev2 import chr0
from decodev2.chr0 import ChrFile, TensorPlan, parse_header, write_chr
from decodev2.errors import ContainerError
from decodev2.nf4 import Packed, encode_nf4

HEADERS = 92_000
FILES = 5_000  # real ones, opened and read
SIDECARS = 3_000
TRACED = 2_000  # headers parsed under tracemalloc, which is slow
SLOWEST = 2.0  # seconds of CPU for one case

ROOT = {
    "arch": "toy",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 1,
    "vocab_size": 0,
}
PLANS = (
    [
        TensorPlan("model.layers.0.self_attn.q_proj", (64, 64)),
        TensorPlan("model.layers.0.mlp.down_proj", (32, 128)),
        TensorPlan("model.norm", (64,)),
    ],
    [
        TensorPlan("output", (3, 65)),
        TensorPlan("model.layers.11.attention.wqkv", (6, 64)),
        TensorPlan("model.layers.11.ffn_norm", (7,)),
        TensorPlan("é\U0001f600.bias", (1,)),
        TensorPlan("model.tok_embeddings", (2, 5), codec="bf16"),
    ],
)
ODD_NUMBERS = [
    b"0", b"1", b"-1", b"-0", b"2", b"63", b"64", b"65", b"128", b"1.0", b"1e2", b"1e999", b"-64",
    b"true", b"null", b"NaN", b"Infinity", b'"64"', b"[]", b"{}", b"[64]", b"01", b"0x40", b"",
    b"9223372036854775807", b"9223372036854775808", b"9223372036854775744", b"18446744073709551615",
    b"-9223372036854775808", b"9" * 19, b"9" * 30, b"7" * 5000, b"1" + b"0" * 400,
    b"2147483648", b"4294967296", b"1099511627776", b"0.5", b"6.4e1",
]  # fmt: skip
ODD_VALUES = [
    None, True, False, 0, 1, -1, 64, 64.0, 2**63, "", "nf4", "vq", "int4", "bf16", "norm",
    "x" * 5000, [], {}, [0, 64], [64, 0], [[]], {"codec": "nf4"}, "\ud800", "é", "\n",
]  # fmt: skip
ODD_BYTES = [
    b"", b"\0", b" ", b"\n", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\", b'"', b"{",
    b"}", b"[", b"]", b",", b":", b"\\ud800", b"\\u0000", b"/*x*/", b"'",
]  # fmt: skip


def headers():
    """The two starting points: (header bytes, entries, file size)."""
    return [chr0.layout(ROOT, plan) for plan in PLANS]


# An earlier mutation broke the object that the next one wanted to change: it is left as it is.
BROKEN = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


# ---- mutations of the file's first bytes; each takes and returns (prefix + header, file size) ----


def with_length(header):
    return struct.pack("<Q", len(header)) + header


def flip_bits(rng, data, size):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data), size


def cut(rng, data, size):
    at = rng.randrange(len(data) + 1)
    return data[:at], at if rng.random() < 0.7 else size


def other_length(rng, data, size):
    n = len(data) - 8
    near = (n - 1, n + 1, n + 7, n - rng.randrange(n + 1), size - 8, size - 7)
    far = (0, 1, 2, 10**8, 10**8 + 1, 2**31, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64))
    n = max(0, rng.choice(rng.choice((near, far))))
    return struct.pack("<Q", n) + data[8:], size


def other_size(rng, data, size):
    return data, rng.choice((0, 7, 8, size - 1, size - 64, size + 1, size + 4096, 2**62, len(data)))


def other_number(rng, data, size):
    numbers = list(re.finditer(rb"-?\d+", data[8:]))
    if not numbers:
        return data, size
    spot = rng.choice(numbers)
    new = rng.choice(ODD_NUMBERS)
    if rng.random() < 0.4:  # close to the old value
        new = str(int(spot[0][:18]) + rng.choice((-64, -1, 1, 64, 128, 2112))).encode()
    return with_length(data[8:][: spot.start()] + new + data[8:][spot.end() :]), size


def odd_bytes(rng, data, size):
    body = data[8:]
    at = rng.randrange(len(body) + 1)
    end = min(len(body), at + rng.choice((0, 0, 1, 2, 20)))
    return with_length(body[:at] + rng.choice(ODD_BYTES) + body[end:]), size


def splice(rng, data, size):
    other = rng.choice(STARTS)[0][8:]
    body = data[8:]
    return with_length(
        body[: rng.randrange(len(body) + 1)] + other[rng.randrange(len(other)) :]
    ), size


def nest(rng, data, size):
    opener = rng.choice((b"[", b'{"a":', b'[{"":'))
    depth = rng.choice((1, 5, 100, 995, 3_000, 20_000))
    body = data[8:]
    at = rng.choice([spot.start() for spot in re.finditer(rb"[\[\d]", body)] or [0])
    closer = {b"[": b"]", b'{"a":': b"}", b'[{"":': b"}]"}[opener]
    inner = opener * depth + b"1" + (closer * depth if rng.random() < 0.7 else b"")
    return with_length(body[:at] + inner + b"," + body[at:]), size + len(inner)


def twice(rng, data, size):
    """Repeat one `"key":value` pair of the text, so that a key appears twice."""
    body = data[8:]
    pairs = list(re.finditer(rb'"[a-z_]+":("[^"]*"|\d+|\[[^\]]*\])', body))
    if not pairs:
        return data, size
    spot = rng.choice(pairs)
    return with_length(body[: spot.end()] + b"," + spot[0] + body[spot.end() :]), size


def restructure(rng, data, size):
    """One change of the parsed object: drop, add, replace, rename, reorder, swap."""
    try:
        header = json.loads(data[8:])
        tensors = header["tensors"]
        places = [header, header["tile"], tensors, *tensors.values()]
        at = rng.choice([place for place in places if place])
        key, other = rng.choice(list(at)), rng.choice(list(at))
        action = rng.choice(("drop", "add", "replace", "rename", "reorder", "swap", "shape"))
        if action == "drop":
            del at[key]
        elif action == "add":
            at[rng.choice(("layer", "scale", "x", "", "\ud800", "group_size"))] = 0
        elif action == "replace":
            at[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif action == "rename":
            at[rng.choice((key + "x", key.upper(), "a.layers.3.w1", "zz.norm"))] = at.pop(key)
        elif action == "reorder":
            at[key] = at.pop(key)
        elif action == "swap":
            at[key], at[other] = at[other], at[key]
        else:
            entry = rng.choice(list(tensors.values()))
            entry["shape"] = rng.choice(([64, 64], [64], [4096], [1, 1], [2**40, 2**40], [0], []))
        ascii_only = rng.random() < 0.5 or "\\ud800" in json.dumps(header)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=ascii_only)
        return with_length(text.encode()), size
    except BROKEN:
        return data, size


def move_blob(rng, data, size):
    """Put one blob elsewhere with its right length: sound, overlapping, or off the file."""
    try:
        header = json.loads(data[8:])
        entry = rng.choice(list(header["tensors"].values()))
        part = rng.choice([key for key in ("data", "scale") if key in entry])
        start, end = entry[part]
        new = rng.choice((start + 64, start - 64, size, size + 64, 0, start + 32, 64, 2**63 - 64))
        entry[part] = [new, new + end - start]
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        return with_length(text), size + rng.choice((0, 4096))
    except BROKEN:
        return data, size


def harmless(rng, data, size):
    """Changes that a reader has to accept when nothing else is wrong."""
    body = data[8:]
    kind = rng.randrange(5)
    if kind == 0:
        body = body.replace(b'"toy"', rng.choice((b'"qwen2"', b'"t\\u00e9"', b'""')))
    elif kind == 1:
        body += b" \t\r\n\v\f"[: rng.randint(1, 6)]
    elif kind == 2:
        size += rng.randrange(1000)
    elif kind == 3:
        body = re.sub(rb'"vocab_size":0', b'"vocab_size":%d' % rng.randrange(10), body)
    else:
        body = re.sub(rb'"hidden_size":64', b'"hidden_size":%d' % rng.randint(1, 99), body)
    return with_length(body), size


STARTS = headers()
MUTATIONS = (
    flip_bits, cut, other_length, other_size, other_number, other_number, odd_bytes, splice, twice,
    restructure, restructure, move_blob, harmless, harmless,
)  # fmt: skip


def damaged_header(case):
    rng = random.Random(case)
    data, _, size = rng.choice(STARTS)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = nest if rng.random() < 0.01 else rng.choice(MUTATIONS)
        if len(data) < 9:
            break
        data, size = change(rng, data, max(0, size))
    return data, max(0, size)


# ---- what must hold ----


def check_sound(case, data, size, root, entries):
    """The format's rules for an accepted header, from the raw JSON, written a second time."""
    (n,) = struct.unpack("<Q", data[:8])
    raw = json.loads(data[8 : 8 + n].decode().rstrip("\v\f \t\r\n"))
    assert set(raw) == set(root) | {"tensors"} and len(root) == 8, case
    assert (raw["magic"], raw["version"], raw["tile"]) == ("CHR0", 1, {"row": 64, "col_group": 8})
    assert list(entries) == sorted(raw["tensors"], key=str.encode), case
    assert entries, case
    used = []
    for name, tensor in raw["tensors"].items():
        shape = tensor["shape"]
        numbers = [*shape, *tensor["data"], *tensor.get("scale", [])]
        assert all(type(x) is int and x >= 0 for x in numbers) and min(shape) > 0, case
        match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
        assert tensor.get("layer") == (int(match[1]) if match else None), case
        if tensor["codec"] == "nf4":
            groups = shape[0] * ((shape[1] + 63) // 64)
            want = {"data": 32 * groups, "scale": 2 * groups}
        else:
            assert tensor["codec"] == "bf16" and "scale" not in tensor, case
            want = {"data": 2 * int(np.prod(shape))}
        for part, length in want.items():
            start, end = tensor[part]
            assert getattr(entries[name], part) == (start, end), case
            assert start % 64 == 0 and end - start == length and 8 + n <= start, case
            assert end <= size, case
            used.append((start, end))
    used.sort()
    assert all(a[1] <= b[0] for a, b in zip(used, used[1:], strict=False)), case  # noqa: RUF007


def one_line(case, error, *parts):
    message = str(error)
    assert message.isprintable() and len(message) < 1000, (case, message)
    assert all(part in message for part in parts), (case, message)
    return message


def pattern(message):
    """A message without its values, to count how many different refusals were met."""
    message = re.sub(r"'(?:[^'\\]|\\.)*'|\"[^\"]*\"|\[[^\]]*[\])]|\{[^}]*\}", "V", message)
    return re.sub(r"0x\w+|-?\d+(\.\d+)?(e[+-]?\d+)?", "N", message)[:60]


def attempt(case, data, size):
    """Parse one damaged header: its refusal, or None when it was accepted and is sound."""
    start = time.process_time()
    try:
        root, entries = parse_header(data, size, "fuzz.chr")
    except ContainerError as error:
        refusal = one_line(case, error, "fuzz.chr: ")
    except BaseException as error:
        pytest.fail(f"case {case}: {type(error).__name__}: {error}")
    else:
        refusal = None
        check_sound(case, data, size, root, entries)
    assert time.process_time() - start < SLOWEST, case
    return refusal


NEEDED_REFUSALS = (
    "needs at least 8", "needs at least 2", "needs at most 100000000", "header ends at byte",
    "could be read", "byte order mark", "needs one object", "needs UTF-8", "malformed",
    "nested too deeply", "follows it", "appears twice", "too large; needs to fit", "JSON holds",
    "magic is", "is unknown; this reader", "unknown key", "is missing", "tile is", "tensors is",
    "not valid Unicode", "out of order", "needs an object", "is not implemented",
    "needs 'nf4' or 'bf16'", "its name says", "kind is", "needs one or two integers",
    "nf4 needs two dimensions", "group_size is", "needs [start, end]", "needs a multiple of 64",
    "bytes, shape", "inside the header", "but the file has", "inside data of", "needs a string",
    "needs an integer", "needs at least 1", "needs at least 0",
)  # fmt: skip


def test_the_starting_points_are_accepted():
    for data, _, size in STARTS:
        assert attempt("start", data, size) is None


def test_damaged_headers():
    accepted, changed, refusals = 0, 0, {}
    starts = {data for data, _, _ in STARTS}
    for case in range(HEADERS):
        data, size = damaged_header(case)
        refusal = attempt(case, data, size)
        if refusal is None:
            accepted += 1
            changed += data not in starts
        else:
            key = pattern(refusal)
            refusals.setdefault(key, []).append(refusal)
    refused = sum(map(len, refusals.values()))
    print(f"\n{accepted} accepted ({changed} changed), {refused} refused, {len(refusals)} kinds")
    assert accepted + refused == HEADERS
    assert changed > HEADERS // 20 and refused > HEADERS // 2
    assert len(refusals) > 40
    seen = [message for messages in refusals.values() for message in messages]
    for part in NEEDED_REFUSALS:
        assert any(part in message for message in seen), part


def test_memory_stays_in_proportion_to_the_bytes_given():
    tracemalloc.start()
    try:
        for case in range(TRACED):
            data, size = damaged_header(case)
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            attempt(case, data, size)
            peak = tracemalloc.get_traced_memory()[1] - held
            assert peak < 200_000 + 50 * len(data), (case, peak, len(data))
    finally:
        tracemalloc.stop()


# ---- real files ----


def start_files(folder):
    """(path, file bytes, side-car bytes, tensors read back) of both starting points."""
    found = []
    for number, plan in enumerate(PLANS):
        rng = np.random.default_rng(number)
        path = folder / f"start{number}.chr"

        def produce(name, plan=plan, rng=rng):
            item = next(item for item in plan if item.name == name)
            x = rng.standard_normal(item.shape).astype(np.float32)
            return encode_nf4(x) if len(item.shape) == 2 and item.codec is None else x

        write_chr(path, ROOT, plan, produce)
        with ChrFile(path) as file:
            tensors = {name: content(file[name]) for name in file}
        found.append((path, path.read_bytes(), chr0.sidecar_path(path).read_bytes(), tensors))
    return found


def content(tensor):
    if isinstance(tensor, Packed):
        return tensor.shape, tensor.codes.tobytes(), tensor.scales.tobytes()
    return tensor.shape, tensor.tobytes()


def damaged_file(rng, data):
    """Damage anywhere in a whole file: header, blobs, its end."""
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    kind = rng.randrange(6)
    if kind == 0:
        return flip_bits(rng, data, 0)[0]
    if kind == 1:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 2:  # one block overwritten
        at = rng.randrange(len(data))
        block = bytes(rng.getrandbits(8) for _ in range(rng.randint(1, 200)))
        return data[:at] + block + data[at + len(block) :]
    if kind == 3:  # another header in front of the same blobs
        change = rng.choice(MUTATIONS)
        header, size = change(rng, data[:header_end], len(data))
        body = data[-(-header_end // 64) * 64 :]
        whole = header + bytes(-len(header) % 64) + body
        return whole[:size] if size < len(whole) else whole + bytes(min(size - len(whole), 8192))
    if kind == 4:  # only padding behind the header, which nobody reads
        pad = -header_end % 64
        noise = bytes(rng.getrandbits(8) for _ in range(pad))
        return data[:header_end] + noise + data[header_end + pad :]
    return data + bytes(rng.randrange(300))


def open_and_read(case, path):
    """(tensor contents, None) or (contents read before it, refusal)."""
    read, start = {}, time.process_time()
    try:
        with ChrFile(path) as file:
            for name in file:
                read[name] = content(file[name])
        return read, None
    except ContainerError as error:
        return read, one_line(case, error, path.name)
    except BaseException as error:
        pytest.fail(f"file case {case}: {type(error).__name__}: {error}")
    finally:
        assert time.process_time() - start < SLOWEST, case


def test_damaged_files(tmp_path):
    starts = start_files(tmp_path)
    plain, guarded = tmp_path / "plain.chr", tmp_path / "guarded.chr"
    counts = {"plain read": 0, "plain refused": 0, "guarded same": 0, "guarded refused": 0}
    crc_refusals = 0
    for case in range(FILES):
        rng = random.Random(10**9 + case)
        _, good, side, tensors = rng.choice(starts)
        data = damaged_file(rng, good)
        path = guarded if case % 2 else plain
        path.write_bytes(data)
        if path is guarded:
            chr0.sidecar_path(path).write_bytes(side)
        read, refusal = open_and_read(case, path)
        if path is plain:
            counts["plain read" if refusal is None else "plain refused"] += 1
            continue
        # With a side-car, whatever could be read is what was written.
        assert read.items() <= tensors.items(), case
        counts["guarded same" if refusal is None else "guarded refused"] += 1
        crc_refusals += refusal is not None and "CRC-32" in refusal
        if refusal is None:
            assert read == tensors, case
    print(f"\n{counts}, {crc_refusals} by CRC-32")
    assert all(count > FILES // 50 for count in counts.values()), counts
    assert crc_refusals > FILES // 20


def test_damaged_side_cars(tmp_path):
    accepted, refused = 0, set()
    starts = start_files(tmp_path)
    for case in range(SIDECARS):
        rng = random.Random(2 * 10**9 + case)
        path, _, side, tensors = rng.choice(starts)
        change = rng.choice((flip_bits, cut, other_number, odd_bytes, twice))
        damaged = change(rng, bytes(8) + side, 0)[0][8:]
        if rng.random() < 0.1:
            damaged = side + b" \n"
        chr0.sidecar_path(path).write_bytes(damaged)
        read, refusal = open_and_read(case, path)
        assert read.items() <= tensors.items(), case
        if refusal is None:
            accepted += 1
        else:
            refused.add(pattern(refusal.split("start", 2)[-1]))
    print(f"\n{accepted} accepted, {len(refused)} kinds of refusal")
    assert accepted > SIDECARS // 20 and len(refused) > 8


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
