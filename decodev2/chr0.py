"""The CHR0 v1 container (`.chr`): one strict reader, one streaming writer, and a checksum side-car.

    0        uint64 little-endian: N, the length of the JSON header
    8        N bytes of JSON (one object)
    8 + N    zeros to a multiple of 64, then payload blobs, each from a multiple of 64

The reader trusts nothing: a file is refused, with one line that says why, before a byte of memory
is taken on the word of a header number. Reading a tensor reads that tensor's bytes only.

The writer lays out the header first (blob sizes depend on shapes alone), then asks for one tensor
at a time, so the peak is one tensor, never the model. It writes under a temporary name in the same
folder and renames at the end: an interrupted run leaves no `.chr`.

CHR0 v1 has no checksum. `FILE.chr.sum.json` beside it holds the file size, the CRC-32 of the header
and of every tensor, and a free `source` object; a reader that finds it notices damage and swaps.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import reprlib
import secrets
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ContainerError
from .nf4 import GROUP, Packed, bf16_bits, bf16_to_f32, packed_nbytes, padded
from .plan import layer_of

ALIGN = 64
MAX_HEADER = 100_000_000  # bytes
TILE = {"row": 64, "col_group": 8}
SIDECAR_SUFFIX = ".sum.json"
_MAX_INT = 2**63 - 1
_ROOT_KEYS = (
    "magic", "version", "arch", "hidden_size", "intermediate_size", "num_layers", "vocab_size",
    "tile", "tensors",
)  # fmt: skip
_KINDS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
    "embed_tokens": "embed", "tok_embeddings": "embed", "wte": "embed",
    "lm_head": "lm_head", "output": "lm_head",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of the header. Ranges are [start, end) in file bytes; `scale` only with nf4."""

    name: str
    kind: str
    codec: str
    shape: tuple[int, ...]
    layer: int | None
    data: tuple[int, int]
    scale: tuple[int, int] | None = None


@dataclass(frozen=True)
class TensorPlan:
    """What will be written: a name and its logical shape, rank 1 or 2.

    `codec` left out follows the format's rule: rank 2 is packed (nf4), rank 1 is bf16.
    """

    name: str
    shape: tuple[int, ...]
    codec: str | None = None


def kind_of(name: str) -> str:
    """CHR0 kind of a tensor, from the last component of its name."""
    last = name.rsplit(".", 1)[-1]
    return _KINDS.get(last, "norm" if "norm" in last else "other")


def is_rotary(name: str) -> bool:
    """True for rotary tables, which a `.chr` leaves out: they follow from the config."""
    return "inv_freq" in name or "rotary_emb" in name or name.endswith((".sin", ".cos"))


# ---- errors: internal checks raise the bare text, the public functions put the file in front ----


def _refusal(where, text) -> ContainerError:
    """One printable line, whatever the file name or the header put into it."""
    line = " ".join(f"{where}: {text}".splitlines())
    return ContainerError(line.encode("utf-8", "backslashreplace").decode("utf-8"))


@contextlib.contextmanager
def _naming(where):
    try:
        yield
    except ContainerError as error:
        raise _refusal(where, error) from None
    except OSError as error:
        raise _refusal(where, error.strerror or error) from None


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 100


def _show(value) -> str:
    """A short repr of a header value, however large or deep it is."""
    return _shown.repr(value)


# ---- strict JSON ----


def _unique(pairs: list) -> dict:
    found = {}
    for key, value in pairs:
        if key in found:
            raise ContainerError(f"JSON key {_show(key)} appears twice")
        found[key] = value
    return found


def _bounded_int(digits: str) -> int:
    # Counted first: making an integer of a very long run of digits takes quadratic time.
    if len(digits) > 20 or not -_MAX_INT <= int(digits) <= _MAX_INT:
        raise ContainerError(f"JSON number {_show(digits)} is too large; needs to fit in 63 bits")
    return int(digits)


def _no_constant(word: str):
    raise ContainerError(f"JSON holds {word}; needs a number or null")


_decoder = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_bounded_int, parse_constant=_no_constant
)


def _parse_object(data: bytes) -> dict:
    """Exactly one JSON object; only ASCII white space may follow it."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise ContainerError("JSON starts with a byte order mark; needs plain UTF-8")
    if not data.startswith(b"{"):
        raise ContainerError(f"JSON starts with {data[:1]!r}; needs one object")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContainerError(
            f"JSON byte {error.start} is 0x{data[error.start]:02X}; needs UTF-8"
        ) from None
    try:
        value, end = _decoder.raw_decode(text)
    except json.JSONDecodeError as error:
        raise ContainerError(f"JSON is malformed ({error.msg}, character {error.pos})") from None
    except RecursionError:
        raise ContainerError("JSON is nested too deeply; four levels are enough") from None
    rest = text[end:].lstrip(" \t\n\r\v\f")
    if rest:
        raise ContainerError(f"JSON needs to be one object, but {_show(rest)} follows it")
    return value


def _check_keys(found: dict, needed: Sequence[str], what: str) -> None:
    for key in found:
        if key not in needed:
            raise ContainerError(f"{what}: unknown key {_show(key)}; needs {', '.join(needed)}")
    for key in needed:
        if key not in found:
            raise ContainerError(f"{what}: key {key!r} is missing")


def _check_int(value, what: str, low: int) -> int:
    if type(value) is not int:  # bool is an int to isinstance, 1.0 equals 1: neither will do
        raise ContainerError(f"{what} is {_show(value)}, needs an integer")
    if value < low:
        raise ContainerError(f"{what} is {value}, needs at least {low}")
    return value


def _check_text(value, what: str) -> str:
    if type(value) is not str:
        raise ContainerError(f"{what} is {_show(value)}, needs a string")
    _utf8(value, what)
    return value


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise ContainerError(f"{what} {_show(text)} is not valid Unicode") from None


# ---- header ----


def _header_length(first: bytes, file_size: int) -> int:
    if file_size < 8 or len(first) < 8:
        raise ContainerError(f"file has {min(file_size, len(first))} bytes, needs at least 8")
    n = int.from_bytes(first[:8], "little")
    if n < 2:
        raise ContainerError(f"header length is {n}, needs at least 2")
    if n > MAX_HEADER:
        raise ContainerError(f"header length is {n}, needs at most {MAX_HEADER}")
    if 8 + n > file_size:
        raise ContainerError(f"header ends at byte {8 + n}, but the file has {file_size} bytes")
    return n


def parse_header(
    data: bytes, file_size: int, where: str | Path = "header"
) -> tuple[dict, dict[str, Entry]]:
    """Check everything a header says against a file of `file_size` bytes.

    `data` is the start of the file: the length prefix and at least the whole header. Returns (root
    keys without `tensors`, entries by name in file order). Raises ContainerError, one line naming
    `where`, the value found and the value needed.
    """
    with _naming(where):
        n = _header_length(data, file_size)
        if len(data) < 8 + n:
            raise ContainerError(f"header ends at byte {8 + n}, but only {len(data)} could be read")
        return _check_header(_parse_object(data[8 : 8 + n]), 8 + n, file_size)


def _check_header(header: dict, header_end: int, file_size: int) -> tuple[dict, dict[str, Entry]]:
    # Magic and version first: another version may well have other keys.
    if header.get("magic", "CHR0") != "CHR0":
        raise ContainerError(f"magic is {_show(header['magic'])}, needs 'CHR0'")
    if "version" in header and _check_int(header["version"], "version", 0) != 1:
        raise ContainerError(f"version {header['version']} is unknown; this reader knows 1")
    _check_keys(header, _ROOT_KEYS, "header")
    _check_text(header["arch"], "arch")
    _check_int(header["hidden_size"], "hidden_size", 1)
    for key in ("intermediate_size", "num_layers", "vocab_size"):
        _check_int(header[key], key, 0)
    tile = header["tile"]
    if type(tile) is not dict or tile != TILE or any(type(v) is not int for v in tile.values()):
        raise ContainerError(f"tile is {_show(tile)}, needs {TILE}")

    tensors = header["tensors"]
    if type(tensors) is not dict or not tensors:
        raise ContainerError(f"tensors is {_show(tensors)}, needs an object with at least one name")
    entries, previous = {}, b""
    for name, record in tensors.items():
        key = _utf8(name, "tensor name")
        if not key:
            raise ContainerError("a tensor name is empty")
        if key < previous:
            raise ContainerError(f"tensor {_show(name)} is out of order; names are sorted by bytes")
        previous = key
        entries[name] = _check_tensor(name, record, header_end, file_size)
    _check_overlaps(entries)
    return {key: value for key, value in header.items() if key != "tensors"}, entries


def _check_tensor(name: str, record, header_end: int, file_size: int) -> Entry:
    what = f"tensor {_show(name)}"
    if type(record) is not dict:
        raise ContainerError(f"{what} is {_show(record)}, needs an object")

    # With nf4 the only packed codec, "one codec for all quantised tensors" holds of itself.
    codec = record.get("codec")
    if codec in ("vq", "int4"):
        raise ContainerError(f"{what}: codec {codec!r} is not implemented; needs 'nf4' or 'bf16'")
    if codec not in ("bf16", "nf4"):
        raise ContainerError(f"{what}: codec is {_show(codec)}, needs 'nf4' or 'bf16'")
    layer = _layer(name)
    needed = ["kind", "codec", "shape", "data"]
    if layer is not None:
        needed.insert(0, "layer")
    if codec == "nf4":
        needed += ["group_size", "scale"]
    _check_keys(record, needed, what)

    if layer is not None and _check_int(record["layer"], f"{what}: layer", 0) != layer:
        raise ContainerError(f"{what}: layer is {record['layer']}, its name says {layer}")
    if record["kind"] != kind_of(name):
        raise ContainerError(f"{what}: kind is {_show(record['kind'])}, needs {kind_of(name)!r}")
    shape = record["shape"]
    if type(shape) is not list or len(shape) not in (1, 2):
        raise ContainerError(f"{what}: shape is {_show(shape)}, needs one or two integers")
    for size in shape:
        _check_int(size, f"{what}: shape: a dimension", 1)
    if codec == "bf16":
        sizes = (2 * math.prod(shape),)
    else:
        if len(shape) != 2:
            raise ContainerError(f"{what}: shape is {shape}, nf4 needs two dimensions")
        if _check_int(record["group_size"], f"{what}: group_size", 1) != GROUP:
            raise ContainerError(f"{what}: group_size is {record['group_size']}, needs {GROUP}")
        sizes = packed_nbytes(tuple(shape))

    ranges = {}
    for part, size in zip(("data", "scale"), sizes, strict=False):
        pair, label = record[part], f"{what}: {part}"
        if type(pair) is not list or len(pair) != 2:
            raise ContainerError(f"{label} is {_show(pair)}, needs [start, end]")
        start, end = (_check_int(value, label, 0) for value in pair)
        if start % ALIGN:
            raise ContainerError(f"{label} starts at {start}, needs a multiple of {ALIGN}")
        if end - start != size:
            raise ContainerError(
                f"{label} [{start}, {end}) has {end - start} bytes, shape {shape} needs {size}"
            )
        if start < header_end:
            raise ContainerError(f"{label} starts at {start}, inside the header")
        if end > file_size:
            raise ContainerError(f"{label} ends at {end}, but the file has {file_size} bytes")
        ranges[part] = (start, end)
    return Entry(name, record["kind"], codec, tuple(shape), layer, **ranges)


def _layer(name: str) -> int | None:
    try:
        return layer_of(name)
    except ValueError:  # Python refuses integers of thousands of digits
        raise ContainerError(f"tensor {_show(name)}: layer number is too large") from None


def _check_overlaps(entries: dict[str, Entry]) -> None:
    spans = sorted(
        (*span, name, part)
        for name, entry in entries.items()
        for part, span in (("data", entry.data), ("scale", entry.scale))
        if span
    )
    for (_, end, name, part), (start, _, other, other_part) in itertools.pairwise(spans):
        if start < end:
            raise ContainerError(
                f"tensor {_show(other)}: {other_part} starts at {start}, inside {part} of "
                f"{_show(name)}, which ends at {end}"
            )


# ---- reading ----


class ChrFile(Mapping):
    """An open `.chr`: a mapping from tensor name to Packed (nf4) or float32 array (bf16).

    Opening checks the header, and the side-car when there is one; `file[name]` then reads that one
    tensor from disk (a fresh array each time) and checks its CRC-32. Use as a context manager.

    path        Path of the file             root        header keys without `tensors`
    entries     {name: Entry}, file order    file_size   bytes
    sums        {name: crc32} or None        source      the side-car's free object, or {}

    Raises ContainerError for a file that is damaged, unknown or swapped; KeyError for a name that
    is not in the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = threading.Lock()  # seek and read belong together
        self._file = None
        with _naming(path):
            # Looked at before opening: opening a pipe would wait for its other end.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ContainerError("is not a regular file; needs a .chr")
            self._file = open(path, "rb", buffering=0)
        try:
            with _naming(path):
                self.file_size = os.fstat(self._file.fileno()).st_size
                first = self._read(0, min(8, self.file_size)).tobytes()
                n = _header_length(first, self.file_size)
                data = self._read(0, 8 + n).tobytes()
            self.root, self.entries = parse_header(data, self.file_size, path)
            self.sums, self.source = _read_sidecar(self, zlib.crc32(data))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Packed | np.ndarray:
        entry = self.entries[name]
        with _naming(self.path):
            blobs = [self._read(*span) for span in (entry.data, entry.scale) if span]
            crc = 0
            for blob in blobs if self.sums else ():
                crc = zlib.crc32(blob, crc)
            if self.sums and crc != self.sums[name]:
                raise ContainerError(_damaged(name, crc, self.sums[name]))
        if entry.codec == "bf16":
            return bf16_to_f32(blobs[0].view("<u2")).reshape(entry.shape)
        m, k = entry.shape
        codes = blobs[0].reshape(m, padded(k) // 2)
        scales = blobs[1].view("<f2").reshape(m, padded(k) // GROUP)
        return Packed(codes, scales, (m, k))

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name) -> bool:
        return name in self.entries  # the mix-in would read the tensor to find out

    def __enter__(self) -> ChrFile:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, start: int, end: int) -> np.ndarray:
        """File bytes [start, end) as uint8. The range has been checked against the file size."""
        out = np.empty(end - start, dtype=np.uint8)
        view, done = memoryview(out), 0
        with self._lock:
            if self._file is None:
                raise ContainerError("is closed; open it again to read")
            self._file.seek(start)
            while done < len(view):
                count = self._file.readinto(view[done:])
                if not count:
                    raise ContainerError(
                        f"file ends at byte {start + done} while reading [{start}, {end}); "
                        "it became shorter since it was opened"
                    )
                done += count
        return out


# ---- side-car ----


def sidecar_path(path: str | Path) -> Path:
    """Where the checksums of a `.chr` lie."""
    return Path(f"{path}{SIDECAR_SUFFIX}")


def _sidecar_text(file_size: int, header_crc: int, sums: dict[str, int], source: dict) -> bytes:
    value = {
        "file_size": file_size,
        "format": "chr0-sums",
        "header_crc32": f"{header_crc:08x}",
        "source": source,
        "tensors": {name: f"{crc:08x}" for name, crc in sums.items()},
        "version": 1,
    }
    return _to_json(value, "source", sort_keys=True, indent=1)


def _read_sidecar(file: ChrFile, header_crc: int) -> tuple[dict[str, int] | None, dict]:
    side = sidecar_path(file.path)
    with _naming(side):
        try:
            status = side.stat()
        except FileNotFoundError:
            return None, {}
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_HEADER:
            raise ContainerError(f"needs to be a regular file of at most {MAX_HEADER} bytes")
        data = side.read_bytes()
        value = _parse_object(data)
        keys = ("format", "version", "file_size", "header_crc32", "source", "tensors")
        _check_keys(value, keys, "side-car")
        if value["format"] != "chr0-sums" or _check_int(value["version"], "version", 0) != 1:
            raise ContainerError(
                f"is {_show(value['format'])} version {_show(value['version'])}, "
                "needs 'chr0-sums' version 1"
            )
        for key in ("source", "tensors"):
            if type(value[key]) is not dict:
                raise ContainerError(f"{key} is {_show(value[key])}, needs an object")
        sums = {name: _crc_from(text, name) for name, text in value["tensors"].items()}
        found = (file.file_size, header_crc, sorted(file.entries))
        noted = (
            _check_int(value["file_size"], "file_size", 0),
            _crc_from(value["header_crc32"], "header"),
            sorted(sums),
        )
        for what, here, there in zip(("size", "header", "tensor list"), found, noted, strict=True):
            if here != there:
                detail = f" ({here} bytes, noted {there})" if what == "size" else ""
                raise ContainerError(
                    f"does not belong to {file.path.name}: its {what} differs{detail}; the .chr is "
                    "damaged or was swapped: pack it again, or remove this side-car to go unchecked"
                )
        return sums, value["source"]


def _crc_from(text, what: str) -> int:
    if type(text) is not str or not re.fullmatch("[0-9a-f]{8}", text):
        raise ContainerError(f"checksum of {_show(what)} is {_show(text)}, needs 8 hex digits")
    return int(text, 16)


def _damaged(name: str, found: int, needed: int) -> str:
    return (
        f"tensor {_show(name)} has CRC-32 {found:08x}, its side-car says {needed:08x}; the file is "
        "damaged or another model's: pack it again"
    )


def verify_checksums(
    path: str | Path, on_checked: Callable[[str], None] | None = None
) -> list[str]:
    """Check a whole `.chr` against its side-car, in pieces of 1 MiB: names of damaged tensors.

    `on_checked(name)` is called after each tensor. Raises ContainerError when the file cannot be
    opened or has no side-car.
    """
    damaged = []
    with ChrFile(path) as file:
        if file.sums is None:
            raise _refusal(path, f"no {sidecar_path(file.path).name} beside it to check against")
        for name, entry in file.entries.items():
            crc = 0
            with _naming(path):
                for start, end in filter(None, (entry.data, entry.scale)):
                    for at in range(start, end, 1 << 20):
                        crc = zlib.crc32(file._read(at, min(end, at + (1 << 20))), crc)
            if crc != file.sums[name]:
                damaged.append(name)
            if on_checked:
                on_checked(name)
    return damaged


# ---- writing ----


def _to_json(value, what: str, **style) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, **style)
    except (TypeError, ValueError, RecursionError) as error:
        raise ContainerError(f"{what} cannot be written as JSON ({error})") from None
    return _utf8(text, what)


def _align(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def layout(
    root: dict, plan: Sequence[TensorPlan], where: str | Path = "layout"
) -> tuple[bytes, dict[str, Entry], int]:
    """Everything about a `.chr` except its payload, from shapes alone.

    `root` holds `arch`, `hidden_size`, `intermediate_size`, `num_layers`, `vocab_size`; `magic`,
    `version` and `tile` may be left out. Blobs follow each other in the order of `plan`. Returns
    (length prefix + header, entries in header order, file size in bytes). The header is read back
    by the reader's own rules: ContainerError for whatever it would refuse.
    """
    with _naming(where):
        sizes = {}
        for item in plan:
            what = f"tensor {_show(item.name)}"
            if item.name in sizes:
                raise ContainerError(f"{what} is planned twice")
            if is_rotary(item.name):
                raise ContainerError(f"{what} is a rotary table, which a .chr leaves out")
            _utf8(item.name, "tensor name")
            shape = tuple(_check_int(size, f"{what}: a dimension", 1) for size in item.shape)
            codec = item.codec or ("nf4" if len(shape) == 2 else "bf16")
            if len(shape) not in (1, 2) or codec not in ("nf4", "bf16"):
                raise ContainerError(f"{what}: {codec} {list(shape)} cannot be written")
            if codec == "nf4" and len(shape) != 2:
                raise ContainerError(f"{what}: shape is {list(shape)}, nf4 needs two dimensions")
            sizes[item.name] = packed_nbytes(shape) if codec == "nf4" else (2 * math.prod(shape),)

        # A longer header moves the blobs, which may lengthen their offsets. Both only ever grow, so
        # this ends at the first length that reproduces itself.
        text, length = b"", -1
        while len(text) != length:
            length = len(text)
            ranges, offset = {}, _align(8 + length)
            for name, parts in sizes.items():
                ranges[name] = []
                for size in parts:
                    ranges[name].append([offset, offset + size])
                    offset = _align(offset + size)
            text = _header_text(root, plan, ranges)
    prefix = len(text).to_bytes(8, "little") + text
    _, entries = parse_header(prefix, offset, where)
    return prefix, entries, offset


def _header_text(root: dict, plan: Sequence[TensorPlan], ranges: dict) -> bytes:
    tensors = {}
    for item in sorted(plan, key=lambda item: item.name.encode("utf-8")):
        layer, spans = _layer(item.name), ranges[item.name]
        tensors[item.name] = {
            **({} if layer is None else {"layer": layer}),
            "kind": kind_of(item.name),
            "codec": "nf4" if len(spans) == 2 else "bf16",
            "shape": list(item.shape),
            **({"group_size": GROUP} if len(spans) == 2 else {}),
            **dict(zip(("data", "scale"), spans, strict=False)),
        }
    header = {"magic": "CHR0", "version": 1, "tile": TILE, **root, "tensors": tensors}
    ordered = {key: header[key] for key in _ROOT_KEYS if key in header} | header
    return _to_json(ordered, "header", separators=(",", ":"))


def write_chr(
    path: str | Path,
    root: dict,
    plan: Sequence[TensorPlan],
    produce: Callable[[str], Packed | np.ndarray],
    on_written: Callable[[str], None] | None = None,
    source: dict | None = None,
) -> None:
    """Write a `.chr` and its checksum side-car, one tensor at a time, all or nothing.

    `root`, `plan`: see `layout`. `produce(name)` is called once per tensor in the order of `plan`
    and returns Packed (nf4) or a float array of the planned shape (bf16, rounded to nearest even);
    `on_written(name)` is called after each. `source` is any JSON object to keep in the side-car.

    Whatever interrupts it (an exception of `produce`, Ctrl-C, a full disk) leaves the folder as it
    was. Raises ContainerError for what cannot be laid out, a value that does not fit its plan, and
    disk errors; exceptions of `produce` pass through.
    """
    path, side = Path(path), sidecar_path(path)
    plan = list(plan)
    header, entries, file_size = layout(root, plan, path)
    with _naming(path):
        _sidecar_text(0, 0, {}, source or {})  # refused now rather than after hours of packing
        if path.exists() and not path.is_file():
            raise ContainerError("is not a regular file; a .chr cannot replace it")
    token = f".decodev2-{os.getpid()}-{secrets.token_hex(4)}"
    temp, side_temp = path.with_name(f"{token}.tmp"), path.with_name(f"{token}-sum.tmp")
    sums = {}
    try:
        with _naming(path):
            out = open(temp, "xb", buffering=0)
        with out:
            _put(out, path, header)
            for item in plan:
                entry = entries[item.name]
                value = produce(item.name)
                with _naming(path):
                    blobs = _blobs(entry, value)
                crc = 0
                for (start, _), blob in zip((entry.data, entry.scale), blobs, strict=False):
                    _put(out, path, bytes(start - out.tell()))
                    _put(out, path, blob)
                    crc = zlib.crc32(blob, crc)
                sums[item.name] = crc
                del value, blobs, blob  # or two tensors would be held while the next one is made
                if on_written:
                    on_written(item.name)
            _put(out, path, bytes(file_size - out.tell()))
            with _naming(path):
                os.fsync(out.fileno())
        text = _sidecar_text(file_size, zlib.crc32(header), sums, source or {})
        with _naming(path):
            with open(side_temp, "xb", buffering=0) as out:
                _put(out, side, text)
                os.fsync(out.fileno())
            # Were the machine to stop between these lines, the new file would have no side-car,
            # which is allowed; it never has the old one, which would refuse it.
            side.unlink(missing_ok=True)
            os.replace(temp, path)
            os.replace(side_temp, side)
        _sync_folder(path.parent)
    finally:
        for leftover in (temp, side_temp):
            with contextlib.suppress(OSError):
                leftover.unlink()


def _put(out, where, data) -> None:
    """Write all of `data`; an unbuffered file may take only part of it at a time."""
    view = memoryview(data)
    with _naming(where):
        while len(view):
            view = view[out.write(view) :]


def _blobs(entry: Entry, value) -> list[np.ndarray]:
    """Payload of one tensor as flat uint8 arrays, checked against its entry."""
    if isinstance(value, Packed):
        codec, shape = "nf4", tuple(value.shape)
        parts = [value.codes, value.scales.astype("<f2", copy=False)]
    else:
        value = np.asarray(value)
        codec, shape = "bf16", value.shape
        if value.dtype.kind != "f":
            raise ContainerError(
                f"tensor {_show(entry.name)}: produced {value.dtype}, needs float32 or Packed"
            )
    if (codec, shape) != (entry.codec, entry.shape):
        raise ContainerError(
            f"tensor {_show(entry.name)}: produced {codec} {list(shape)}, "
            f"needs {entry.codec} {list(entry.shape)}"
        )
    if codec == "bf16":
        parts = [bf16_bits(value).astype("<u2", copy=False)]
    return [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]


def _sync_folder(folder: Path) -> None:
    """Make the renames durable where the system allows a folder to be synced."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
