"""HF folder -> `.chr`: every linear and the embedding as NF4, norms and biases as bfloat16.

`inspect` decides everything from config and headers before any weight is read: which file holds
which tensor, that each shape is the one the config asks for, that nothing is missing or left over.
`pack` then streams one tensor at a time in shard order; a large matrix goes through in row chunks,
so memory does not grow with the model. `verify` reads a `.chr` back, alone or against its folder.

A ragged last group (width not a multiple of 64) is padded inside the `.chr`; a group never crosses
a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm.auto import tqdm

from .chr0 import ChrFile, TensorPlan, is_rotary, layout, write_chr
from .errors import CodecError, ContainerError, ModelError
from .nf4 import Packed, bf16_bits, bf16_to_f32, decode_nf4, encode_nf4, padded
from .plan import GROUP, ArchSpec, spec_from_folder, tensor_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
HEADER_LIMIT = 100_000_000  # the format's own limit
CHUNK_ELEMENTS = 1 << 19  # weights per chunk: 2 MiB as float32, larger ones are slower
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Source:
    """Where one tensor lies: safetensors dtype, shape, and byte range [start, end) of a file."""

    name: str  # in the checkpoint, `.weight` included
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A checked HF folder. `tensors`: CHR0 name -> Source, in shard order; `skipped`: the rest."""

    folder: Path
    spec: ArchSpec
    tensors: dict[str, Source]
    skipped: dict[str, str]  # name in the checkpoint -> why it is not packed


@dataclass(frozen=True)
class PackReport:
    """What `pack` wrote. Sizes in bytes; `weights` counts the elements of the packed matrices."""

    path: Path
    spec: ArchSpec
    tensors: int
    skipped: dict[str, str]
    source_bytes: int
    file_bytes: int
    weights: int
    seconds: float


# ---- checking, from headers alone ----


def inspect(folder: str | Path) -> Checkpoint:
    """Check an HF folder against its config without reading a weight.

    Every file the index lists must be there and be exactly as long as its header says; every tensor
    the model needs must be present once, with the right shape and a float dtype; none may be left
    over. With tied embeddings a head tensor is not needed; one that is there must equal the
    embedding (the only bytes compared here). Raises ModelError, one line, naming file or tensor.
    """
    folder = Path(folder)
    spec = spec_from_folder(folder)
    found: dict[str, Source] = {}
    for source in _sources(folder):
        name = source.name.removesuffix(".weight")
        if name in found:
            raise ModelError(f"{source.file}: {source.name} and {found[name].name} are one name")
        found[name] = source

    skipped = {s.name: "rotary table" for n, s in found.items() if is_rotary(n)}
    tensors = {n: s for n, s in found.items() if not is_rotary(n)}
    wanted = tensor_shapes(spec)
    head = tensors.pop(_head_name(spec), None) if spec.tied else None
    _need_same_names(folder, spec, wanted, tensors)
    for name, source in tensors.items():
        if source.shape != wanted[name]:
            raise ModelError(
                f"{source.file}: {source.name} is {list(source.shape)}, "
                f"config.json needs {list(wanted[name])}"
            )
    for source in (*tensors.values(), *([head] if head else [])):
        if source.dtype not in ITEM_BYTES:
            raise ModelError(
                f"{source.file}: {source.name} is {source.dtype}, needs {', '.join(ITEM_BYTES)}"
            )
    if head is not None:
        _need_equal_head(tensors[_embed_name(spec)], head)
        skipped[head.name] = "tied: equal to the embedding"
    return Checkpoint(folder, spec, tensors, skipped)


def _head_name(spec: ArchSpec) -> str:
    return "lm_head" if spec.family == "llama_swiglu" else "output"


def _embed_name(spec: ArchSpec) -> str:
    return "model.embed_tokens" if spec.family == "llama_swiglu" else "model.tok_embeddings"


def _need_same_names(folder: Path, spec: ArchSpec, wanted: dict, tensors: dict) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        hint = " (tie_word_embeddings is not true)" if missing == [_head_name(spec)] else ""
        raise ModelError(f"{folder}: missing {_some(missing)}{hint}")
    extra = [source.name for name, source in tensors.items() if name not in wanted]
    if extra:
        raise ModelError(
            f"{folder}: {_some(extra)} not used by {spec.model_type} with {spec.n_layers} layers; "
            "needs a checkpoint without"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"


def _need_equal_head(embed: Source, head: Source) -> None:
    same = head.shape == embed.shape and all(
        np.array_equal(a, b)
        for (_, a), (_, b) in zip(read_rows(embed), read_rows(head), strict=True)
    )
    if not same:
        raise ModelError(
            f"{head.file}: {head.name} differs from {embed.name} but tie_word_embeddings is true; "
            "needs equal tensors, or false"
        )


def _sources(folder: Path) -> Iterator[Source]:
    """Every tensor of every shard, in shard order then file order, each shard checked."""
    index_path, single = folder / INDEX, folder / SINGLE
    if not index_path.exists():
        if not single.exists():
            others = sorted(p.name for p in folder.glob("*.safetensors")) or sorted(
                p.name for p in folder.glob("*.bin")
            )
            has = f"has {', '.join(others[:3])}; " if others else ""
            raise ModelError(f"{folder}: {has}needs {SINGLE} or {INDEX}")
        yield from read_header(single)
        return

    weight_map = _read_index(index_path)
    if single.exists() and SINGLE not in weight_map.values():
        raise ModelError(f"{folder}: {SINGLE} is not in {INDEX}; needs one of the two")
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ModelError(f"{folder / absent[0]}: is missing; {INDEX} lists {len(shards)} files")
    listed = set(weight_map)
    for shard in shards:
        for source in read_header(folder / shard):
            if weight_map.get(source.name) != shard:
                raise ModelError(
                    f"{source.file}: holds {source.name}, which {INDEX} puts in "
                    f"{weight_map.get(source.name, 'no file')}"
                )
            listed.discard(source.name)
            yield source
    if listed:
        name = min(listed)
        raise ModelError(f"{folder / weight_map[name]}: {name} is in {INDEX} but not in the file")


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        names = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: no usable weight_map ({type(error).__name__})") from None
    for tensor, shard in names:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.isprintable():
            raise ModelError(f"{path}: {tensor!r} is in {shard!r}, needs a file name")
        if not tensor.isprintable():
            raise ModelError(f"{path}: tensor name {tensor!r} holds unprintable characters")
    if not names:
        raise ModelError(f"{path}: weight_map is empty")
    return weight_map


def read_header(path: Path) -> list[Source]:
    """Tensors of one safetensors file in file order.

    The byte ranges must tile the file exactly: no overlap, no hole, nothing after the last.
    Raises ModelError naming the file with expected and actual sizes.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ModelError(f"{path}: {size} bytes, a safetensors file has at least 10")
        length = int.from_bytes(prefix, "little")
        if length < 2 or length > HEADER_LIMIT:
            raise ModelError(f"{path}: header length {length}, needs 2 to {HEADER_LIMIT}")
        if 8 + length > size:
            raise ModelError(f"{path}: {size} bytes, its header alone needs {8 + length}")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError("not one JSON object")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError too
        raise ModelError(f"{path}: header is not valid JSON ({error})") from None
    header.pop("__metadata__", None)
    for name in header:
        if not name.isprintable():  # it would break every message that names it
            raise ModelError(f"{path}: tensor name {name!r} holds unprintable characters")
    sources = [_source(path, name, entry, 8 + length) for name, entry in header.items()]
    sources.sort(key=lambda source: (source.start, source.end))
    needed = max((source.end for source in sources), default=8 + length)
    if needed != size:
        raise ModelError(f"{path}: {size} bytes, its header needs {needed}")
    position = 8 + length
    for source in sources:
        if source.start != position:
            what = "overlaps the tensor before it" if source.start < position else "follows a hole"
            raise ModelError(
                f"{path}: {source.name} starts at byte {source.start}, needs {position}; it {what}"
            )
        position = source.end
    return sources


def _source(path: Path, name: str, entry, base: int) -> Source:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise ModelError(f"{path}: {name} needs dtype, shape and two data_offsets") from None
    if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(dtype, str):
        raise ModelError(f"{path}: {name} has shape {shape} and data_offsets {[begin, end]}")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ModelError(
            f"{path}: {name} spans {end - begin} bytes, {dtype} {shape} needs "
            f"{math.prod(shape) * ITEM_BYTES[dtype]}"
        )
    if end < begin:
        raise ModelError(f"{path}: {name} ends at {end}, before its start {begin}")
    return Source(name, path, dtype, tuple(shape), base + begin, base + end)


def _unique_keys(pairs: list) -> dict:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} twice")
    return value


# ---- reading weights ----


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_rows(source: Source) -> Iterator[tuple[int, np.ndarray]]:
    """A tensor in pieces of about CHUNK_ELEMENTS along its first axis: (first row, float32)."""
    for first, last in _row_chunks(source):
        yield first, _read(source, first, last)


def _row_chunks(source: Source) -> list[tuple[int, int]]:
    rows = source.shape[0]
    step = max(1, CHUNK_ELEMENTS // max(1, math.prod(source.shape[1:])))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _read(source: Source, first: int, last: int) -> np.ndarray:
    """Rows [first, last) as float32, read, not mapped: resident memory stays small."""
    row = math.prod(source.shape[1:])
    item = ITEM_BYTES[source.dtype]
    with _opened(source.file) as file:
        file.seek(source.start + first * row * item)
        raw = file.read((last - first) * row * item)
    if len(raw) != (last - first) * row * item:
        raise ModelError(f"{source.file}: {source.name} became shorter while it was read")
    if source.dtype == "BF16":
        values = bf16_to_f32(np.frombuffer(raw, "<u2"))
    else:
        values = np.frombuffer(raw, "<f4" if source.dtype == "F32" else "<f2").astype(np.float32)
    return values.reshape(last - first, *source.shape[1:])


# ---- packing ----


def pack(folder: str | Path, out: str | Path, progress: bool = True) -> PackReport:
    """Pack an HF folder into the file `out` (`.chr`, plus its checksum side-car).

    Everything that can be refused is refused before a weight is read; an `out` that exists is
    replaced only when the new file is whole. The side-car's `source` holds the sha256 of
    config.json and tokenizer.json. Raises ModelError, ContainerError, or CodecError for weights
    that NF4 or bfloat16 cannot hold.
    """
    started = time.perf_counter()
    checkpoint = inspect(folder)
    out = Path(out)
    spec = checkpoint.spec
    plan = [TensorPlan(name, source.shape) for name, source in checkpoint.tensors.items()]
    root = {
        "arch": spec.model_type,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_layers": spec.n_layers,
        "vocab_size": spec.vocab,
    }
    _, _, file_bytes = layout(root, plan, out)
    _check_out(out, file_bytes)
    origin = {
        f"{name}_sha256": hashlib.sha256((checkpoint.folder / name).read_bytes()).hexdigest()
        for name in ("config.json", "tokenizer.json")
        if (checkpoint.folder / name).is_file()
    }

    total = sum(source.end - source.start for source in checkpoint.tensors.values())
    bar = tqdm(total=total, desc=out.name, unit="B", unit_scale=True, disable=not progress)
    with bar, ThreadPoolExecutor(THREADS) as pool:

        def produce(name: str) -> Packed | np.ndarray:
            source = checkpoint.tensors[name]
            return _encode(source, pool) if len(source.shape) == 2 else _dense(source)

        def on_written(name: str) -> None:
            source = checkpoint.tensors[name]
            bar.update(source.end - source.start)

        write_chr(out, root, plan, produce, on_written, origin)
    return PackReport(
        path=out,
        spec=spec,
        tensors=len(plan),
        skipped=checkpoint.skipped,
        source_bytes=total,
        file_bytes=file_bytes,
        weights=sum(math.prod(item.shape) for item in plan if len(item.shape) == 2),
        seconds=time.perf_counter() - started,
    )


def _check_out(out: Path, file_bytes: int) -> None:
    """Refuse, before any work, a place that the file cannot be written to."""
    if out.is_dir():
        raise ModelError(f"{out}: is a folder, needs a file name ending in .chr")
    if out.suffix != ".chr":
        raise ModelError(f"{out}: a packed file's name ends in .chr")
    folder = out.parent
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; make it first")
    for place in (folder, out):
        if place.exists() and not os.access(place, os.W_OK):
            raise ModelError(f"{place}: not writable")
    free = shutil.disk_usage(folder).free
    if free < file_bytes:
        raise ModelError(f"{folder}: {free} bytes free, {out.name} needs {file_bytes}")


def _encode(source: Source, pool: ThreadPoolExecutor) -> Packed:
    """NF4 of one matrix, a chunk of rows per thread; the float32 form never exists as a whole."""
    m, k = source.shape
    codes = np.empty((m, padded(k) // 2), dtype=np.uint8)
    scales = np.empty((m, padded(k) // GROUP), dtype=np.float16)
    chunks = _row_chunks(source)

    def encode(first: int, last: int) -> None:
        # an error counts rows from the chunk's first: name the chunk
        name = source.name if len(chunks) == 1 else f"{source.name}[{first}:{last}]"
        part = encode_nf4(_read(source, first, last), name)
        codes[first:last], scales[first:last] = part.codes, part.scales

    jobs = [pool.submit(encode, *chunk) for chunk in chunks]
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:  # after a failure the rest would run for nothing
            job.cancel()
    return Packed(codes, scales, (m, k))


def _dense(source: Source) -> np.ndarray:
    """A norm or bias as float32 that bfloat16 can hold."""
    values = _read(source, 0, source.shape[0])
    kept = bf16_to_f32(bf16_bits(values))
    if not np.isfinite(kept).all():
        index = int(np.argmin(np.isfinite(kept)))
        raise CodecError(
            f"{source.name}: element {index} is {values[index]}, needs a finite bfloat16"
        )
    return values


# ---- reading back ----


def verify(
    chr_path: str | Path, against: str | Path | None = None, progress: bool = False
) -> list[dict]:
    """Read every tensor of a `.chr`, one at a time, and report it; with `against`, compare.

    Returns one row per tensor in file order: name, kind, codec, shape, bytes, bytes_per_weight,
    bits_per_weight, checked (False without a side-car: then no checksum is known) and fault (None,
    or what is wrong: a checksum, or an original that is not finite). With an HF folder also rmse,
    max_abs and rel_rmse (rmse / rms of the original, None when that is zero), None when faulty.
    Raises ContainerError for a broken file, ModelError for a folder with other tensors or shapes.
    """
    with ChrFile(chr_path) as file:
        originals = None if against is None else _originals(file, inspect(against))
        checked = file.sums is not None
        rows = []
        for name, entry in tqdm(file.entries.items(), "verify", disable=not progress):
            size = sum(end - start for start, end in filter(None, (entry.data, entry.scale)))
            row = {
                "name": name,
                "kind": entry.kind,
                "codec": entry.codec,
                "shape": entry.shape,
                "bytes": size,
                "bytes_per_weight": size / math.prod(entry.shape),
                "bits_per_weight": 8 * size / math.prod(entry.shape),
                "checked": checked,
                "fault": None,
            }
            if originals is not None:
                row |= {"rmse": None, "max_abs": None, "rel_rmse": None}
            try:
                value = file[name]
            except ContainerError as error:
                row["fault"] = str(error)
            else:
                if originals is not None:
                    row |= _difference(value, originals[name])
            rows.append(row)
    return rows


def _originals(file: ChrFile, checkpoint: Checkpoint) -> dict[str, Source]:
    """The checkpoint's tensors, after checking that both hold the same names and shapes."""
    ours = {name: entry.shape for name, entry in file.entries.items()}
    theirs = {name: source.shape for name, source in checkpoint.tensors.items()}
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            here, there = (
                "no such tensor" if shape is None else str(list(shape))
                for shape in (ours.get(name), theirs.get(name))
            )
            raise ModelError(
                f"{file.path}: {name} is {here}, {checkpoint.folder} has {there}"
                "; needs the same model"
            )
    return checkpoint.tensors


def _difference(value: Packed | np.ndarray, source: Source) -> dict:
    """rmse, max |difference| and rmse / rms(original), accumulated in float64 over row chunks."""
    squares = energy = largest = 0.0
    for first, original in read_rows(source):
        rows = slice(first, first + len(original))
        ours = decode_nf4(value, rows) if isinstance(value, Packed) else value[rows]
        difference = ours - original  # float32, as decoded
        largest = max(largest, float(np.abs(difference).max()))  # a NaN is seen in `squares`
        squares += _sum_squares(difference)
        energy += _sum_squares(original)
    if not math.isfinite(squares):
        return {"fault": f"{source.file}: {source.name} holds values that are not finite"}
    count = math.prod(source.shape)
    return {
        "rmse": math.sqrt(squares / count),
        "max_abs": largest,
        "rel_rmse": math.sqrt(squares / energy) if energy else None,
    }


def _sum_squares(values: np.ndarray) -> float:
    flat = values.reshape(-1).astype(np.float64)
    return float(flat @ flat)
