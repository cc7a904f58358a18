"""Packing tiny HF folders: what is refused before any work, and what comes out of the rest."""

import json
import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from decodev2 import oracle, pack
from decodev2.chr0 import ChrFile, sidecar_path
from decodev2.errors import CodecError, ContainerError, DecodeError, ModelError
from decodev2.nf4 import Packed, decode_nf4, encode_nf4
from decodev2.plan import TINY_INTERNLM, TINY_LLAMA, ArchSpec, RopeScaling, spec_from_folder
from decodev2.tests.hf import (
    hf_config,
    hf_tensors,
    shard_name,
    to_bf16,
    write_hf_folder,
    write_raw,
    write_safetensors,
)

TIED = replace(TINY_LLAMA, tied=True)
QWEN = replace(TINY_LLAMA, model_type="qwen2", qkv_bias=True)
PROMPT = [1, 5, 9, 2]
INDEX = "model.safetensors.index.json"
SUFFIXES = ("BF16", "F16", "F32")


def folder_of(tmp_path, spec=TINY_LLAMA, name="m", seed=0, tensors=None, **options) -> Path:
    tensors = hf_tensors(spec, seed) if tensors is None else tensors
    return write_hf_folder(tmp_path / name, hf_config(spec), tensors, **options)


def packed(folder: Path, out: Path | None = None) -> ChrFile:
    out = out or folder.with_suffix(".chr")
    pack.pack(folder, out, progress=False)
    return ChrFile(out)


def model(folder: Path) -> SimpleNamespace:
    """What the oracle takes: the spec of the folder and the tensors of its `.chr`."""
    return SimpleNamespace(spec=spec_from_folder(folder), tensors=packed(folder))


def refused(folder: Path, *fragments: str, kind=ModelError, out: Path | None = None) -> str:
    """Packing fails with one line holding every fragment, and leaves no file of any name behind."""
    out = out or folder.with_suffix(".chr")
    before = sorted(out.parent.iterdir())
    with pytest.raises(kind) as caught:
        pack.pack(folder, out, progress=False)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for fragment in fragments:
        assert fragment in message, message
    assert sorted(out.parent.iterdir()) == before
    return message


@pytest.fixture
def no_reading(monkeypatch):
    """Fails the test when a weight is read: the refusal must come from headers alone."""

    def read(source, *_):
        pytest.fail(f"{source.name} was read")

    monkeypatch.setattr(pack, "_read", read)


def edit_header(path: Path, edit) -> None:
    """Rewrite a safetensors file's header through `edit(header)`, payload unchanged."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    edit(header)
    write_raw(path, json.dumps(header).encode(), data[8 + n :])


# ---- the reader and the writer of the tests against the safetensors library ----


@pytest.mark.parametrize("dtype", SUFFIXES)
def test_header_and_values_agree_with_the_safetensors_library(tmp_path, dtype):
    tensors = hf_tensors(TINY_LLAMA)
    path = tmp_path / "t.safetensors"
    if dtype == "BF16":
        write_safetensors(path, tensors, dtype)
        torch = pytest.importorskip("torch")
        with safe_open(path, "pt") as file:
            want = {name: file.get_tensor(name).to(torch.float32).numpy() for name in file.keys()}
    else:
        kept = {name: t.astype({"F16": "f2", "F32": "f4"}[dtype]) for name, t in tensors.items()}
        save_file(kept, path)  # orders the tensors in its own way
        want = {name: t.astype(np.float32) for name, t in kept.items()}
    found = {source.name: source for source in pack.read_header(path)}
    assert found.keys() == want.keys()
    for name, source in found.items():
        rows = [part for _, part in pack.read_rows(source)]
        assert np.array_equal(np.concatenate(rows), want[name])


@pytest.mark.parametrize("dtype", SUFFIXES)
def test_packed_tensors_are_the_codec_of_the_checkpoint(tmp_path, dtype):
    tensors = hf_tensors(TINY_LLAMA)
    report = pack.pack(folder_of(tmp_path, dtype=dtype), tmp_path / "m.chr", progress=False)
    with ChrFile(tmp_path / "m.chr") as file:
        assert {f"{name}.weight" for name in file} == tensors.keys()
        assert file.root["arch"] == "llama"
        for key, value in zip(
            ("hidden_size", "intermediate_size", "num_layers", "vocab_size"),
            (64, 128, 2, 32),
            strict=True,
        ):
            assert file.root[key] == value
        for name, value in file.items():
            original = tensors[f"{name}.weight"]
            if dtype == "F16":
                original = original.astype(np.float16).astype(np.float32)
            if original.ndim == 1:
                assert np.array_equal(value, to_bf16(original))
            else:
                want = encode_nf4(original)
                assert np.array_equal(value.codes, want.codes)
                assert np.array_equal(value.scales, want.scales)
        assert report.tensors == len(file) == len(tensors)
        assert report.file_bytes == file.file_size
        assert report.weights == sum(t.size for t in tensors.values() if t.ndim == 2)


def test_side_car_names_its_source(tmp_path):
    import hashlib

    folder = folder_of(tmp_path)
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    assert packed(folder).source == {"config.json_sha256": config}
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = hashlib.sha256(b"{}").hexdigest()
    assert packed(folder).source == {
        "config.json_sha256": config,
        "tokenizer.json_sha256": tokenizer,
    }


def test_blobs_follow_the_shards(tmp_path):
    folder = folder_of(tmp_path, shards=3)
    names = [f"{name}.weight" for name in sorted_by_place(packed(folder))]
    assert names == list(hf_tensors(TINY_LLAMA))


def sorted_by_place(file: ChrFile) -> list[str]:
    return sorted(file, key=lambda name: file.entries[name].data)


def test_sharding_does_not_change_the_tensors(tmp_path):
    one, three = packed(folder_of(tmp_path)), packed(folder_of(tmp_path, name="s", shards=3))
    for name in one:
        assert same(one[name], three[name])
    assert one.file_size == three.file_size


def same(a, b) -> bool:
    if isinstance(a, Packed):
        return np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)
    return np.array_equal(a, b)


def test_chunks_do_not_change_the_file(tmp_path, monkeypatch):
    spec = replace(TINY_LLAMA, intermediate=96)
    folder = folder_of(tmp_path, spec)
    packed(folder)
    whole = (tmp_path / "m.chr").read_bytes()
    monkeypatch.setattr(pack, "CHUNK_ELEMENTS", 7 * 64)  # not a divisor of any row count
    packed(folder)
    assert (tmp_path / "m.chr").read_bytes() == whole


def test_rotary_tables_are_left_out_and_said(tmp_path):
    tensors = hf_tensors(TINY_LLAMA)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.ones(8, np.float32)
    folder = folder_of(tmp_path, tensors=tensors)
    report = pack.pack(folder, tmp_path / "m.chr", progress=False)
    assert report.skipped == {name: "rotary table"}
    with ChrFile(tmp_path / "m.chr") as file:
        assert len(file) == len(tensors) - 1


# ---- A1: tied embeddings ----


def test_tied_without_head_gives_the_ids_of_the_untied_copy(tmp_path):
    tensors = hf_tensors(TIED)
    assert "lm_head.weight" not in tensors
    tied = model(folder_of(tmp_path, TIED, "tied", tensors=tensors))
    copy = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    untied = model(folder_of(tmp_path, TINY_LLAMA, "untied", tensors=copy))
    assert "lm_head" not in tied.tensors and tied.spec.tied
    assert same(untied.tensors["lm_head"], untied.tensors["model.embed_tokens"])
    assert same(untied.tensors["lm_head"], tied.tensors["model.embed_tokens"])
    assert oracle.greedy(tied, PROMPT, 8) == oracle.greedy(untied, PROMPT, 8)


def test_tied_with_an_equal_head_packs_it_once(tmp_path):
    tensors = hf_tensors(TIED)
    folder = folder_of(tmp_path, TIED, tensors=tensors)
    packed(folder)
    without = (tmp_path / "m.chr").read_bytes()
    copy = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    report = pack.pack(
        folder_of(tmp_path, TIED, "h", tensors=copy), tmp_path / "h.chr", progress=False
    )
    assert (tmp_path / "h.chr").read_bytes() == without
    assert list(report.skipped) == ["lm_head.weight"]


@pytest.mark.parametrize("row", [0, 17, 31])
def test_tied_with_another_head_is_refused(tmp_path, row):
    tensors = hf_tensors(TIED)
    head = tensors["model.embed_tokens.weight"].copy()
    head[row, 63] += 1
    folder = folder_of(tmp_path, TIED, tensors=tensors | {"lm_head.weight": head})
    refused(folder, "lm_head.weight", "tie_word_embeddings")


def test_tied_with_a_shorter_head_is_refused(tmp_path):
    tensors = hf_tensors(TIED)
    head = tensors["model.embed_tokens.weight"][:31]
    refused(folder_of(tmp_path, TIED, tensors=tensors | {"lm_head.weight": head}), "lm_head.weight")


def test_untied_without_head_is_refused_before_any_work(tmp_path, no_reading):
    tensors = hf_tensors(TINY_LLAMA)
    del tensors["lm_head.weight"]
    refused(folder_of(tmp_path, tensors=tensors), "missing tensor lm_head", "tie_word_embeddings")


# ---- A3: missing shard, cut-short file ----


def test_missing_shard(tmp_path, no_reading):
    folder = folder_of(tmp_path, shards=3)
    (folder / shard_name(1, 3)).unlink()
    refused(folder, shard_name(1, 3), "is missing", "3 files")


@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("change", ["one byte", "half", "ten more"])
def test_shard_of_another_length(tmp_path, no_reading, shard, change):
    folder = folder_of(tmp_path, shards=3)
    path = folder / shard_name(shard, 3)
    data = path.read_bytes()
    short = {"one byte": data[:-1], "half": data[: len(data) // 2], "ten more": data + bytes(10)}
    path.write_bytes(short[change])
    refused(folder, path.name, f"{len(short[change])} bytes", f"needs {len(data)}")


def test_file_cut_inside_its_header(tmp_path, no_reading):
    folder = folder_of(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    need = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[: need - 1])
    refused(folder, "model.safetensors", f"{need - 1} bytes", f"needs {need}")


@pytest.mark.parametrize(
    "data, fragments",
    [
        (b"", ["0 bytes"]),
        (bytes(7), ["7 bytes"]),
        (bytes(8), ["header length 0"]),
        ((10**6).to_bytes(8, "little") + b"{}", ["10 bytes", "needs 1000008"]),
        ((2**63).to_bytes(8, "little") + b"{}", ["header length 9223372036854775808"]),
        ((2).to_bytes(8, "little") + b"[]", ["JSON"]),
        ((2).to_bytes(8, "little") + b"\xff\xfe", ["JSON"]),
        ((2).to_bytes(8, "little") + b"{}", ["missing tensors model.embed_tokens"]),
        ((40000).to_bytes(8, "little") + b"[" * 40000, ["JSON"]),
    ],
    ids=["empty", "7 bytes", "length 0", "past end", "huge", "list", "not utf-8", "none", "deep"],
)
def test_file_that_is_no_safetensors(tmp_path, no_reading, data, fragments):
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, *fragments)


Q0 = "model.layers.0.self_attn.q_proj.weight"
K0 = "model.layers.0.self_attn.k_proj.weight"
O1 = "model.layers.1.self_attn.o_proj.weight"


def shift(key, by):
    def edit(header):
        header[key]["data_offsets"] = [offset + by for offset in header[key]["data_offsets"]]

    return edit


@pytest.mark.parametrize(
    "edit, fragments",
    [
        (shift(Q0, 2), [Q0]),
        (shift(Q0, -2), [Q0, "overlaps"]),
        (shift(O1, 10**9), ["bytes, its header needs 1000"]),
        (shift(Q0, -(10**9)), [Q0]),
        (lambda h: h[Q0].update(data_offsets=h[O1]["data_offsets"]), ["hole"]),
        (lambda h: h[Q0].update(shape=[64, 63]), [Q0, "8192 bytes", "needs 8064"]),
        (lambda h: h[Q0].update(shape=[64, -64]), [Q0]),
        (lambda h: h[Q0].update(shape=[64.0, 64]), [Q0]),
        (lambda h: h[Q0].update(shape=[True, 4096]), [Q0]),
        (lambda h: h[Q0].update(shape=7), [Q0]),
        (lambda h: h[Q0].update(data_offsets=[0]), [Q0]),
        (lambda h: h[Q0].update(data_offsets=["0", "8192"]), [Q0]),
        (lambda h: h[Q0].pop("dtype"), [Q0]),
        (lambda h: h.update({Q0: None}), [Q0]),
        (lambda h: h[Q0].update(dtype="F64"), [Q0, "F64", "BF16"]),
        (lambda h: h[Q0].update(dtype="F8_E4M3"), [Q0, "F8_E4M3"]),
        (lambda h: h[Q0].update(dtype="F32"), [Q0, "needs 16384"]),
        (lambda h: h[Q0].update(dtype=["BF16"]), [Q0]),
        (lambda h: h.update({"a\nb": h.pop(Q0)}), ["unprintable"]),
        (lambda h: h.update({"x.weight": h.pop(Q0)}), [Q0.removesuffix(".weight"), "missing"]),
        (lambda h: h.update({Q0.removesuffix(".weight"): h.pop(K0)}), ["one name"]),
    ],
)
def test_header_that_lies(tmp_path, no_reading, edit, fragments):
    folder = folder_of(tmp_path)
    edit_header(folder / "model.safetensors", edit)
    refused(folder, *fragments)


def test_header_with_a_name_twice(tmp_path, no_reading):
    folder = folder_of(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + n].decode()
    entry = text[text.index(f'"{Q0}"') :]
    entry = entry[: entry.index("}") + 1]
    write_raw(path, text.replace(entry, f"{entry}, {entry}").encode(), data[8 + n :])
    refused(folder, Q0, "twice")


def test_index_and_shards_must_say_the_same(tmp_path, no_reading):
    folder = folder_of(tmp_path, shards=3)
    path = folder / INDEX
    index = json.loads(path.read_text())

    def with_map(**changes):
        path.write_text(json.dumps({"weight_map": index["weight_map"] | changes}))

    with_map(**{Q0: shard_name(2, 3)})
    refused(folder, Q0, shard_name(2, 3))
    with_map(**{"extra.weight": shard_name(0, 3)})
    refused(folder, "extra.weight", shard_name(0, 3), "not in the file")
    with_map(**{Q0: "../m/" + shard_name(0, 3)})
    refused(folder, "needs a file name")
    with_map(**{Q0: 3})
    refused(folder, "needs a file name")
    index["weight_map"].pop(Q0)
    with_map()
    refused(folder, Q0, "no file")
    for data in (b"{", b"[]", b'{"weight_map": []}', b'{"weight_map": {}}', b"\xff\xfe{", b""):
        path.write_bytes(data)
        refused(folder, INDEX)


def test_shards_without_their_index(tmp_path, no_reading):
    folder = folder_of(tmp_path, shards=2)
    (folder / INDEX).unlink()
    refused(folder, shard_name(0, 2), INDEX)
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    refused(folder, ".bin", "needs model.safetensors")


def test_single_file_beside_an_index_of_others(tmp_path, no_reading):
    folder = folder_of(tmp_path, shards=2)
    write_safetensors(folder / "model.safetensors", hf_tensors(TINY_LLAMA, seed=1))
    refused(folder, INDEX)


def test_folder_in_place_of_a_shard(tmp_path, no_reading):
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused(folder, "model.safetensors")


def test_damaged_headers_never_escape_as_other_errors(tmp_path):
    """Random damage to the header gives one DecodeError line or, where it hits nothing, a model."""
    folder = folder_of(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(5)
    caught = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(end)] = rng.choice(b'0919{}[]",:-.eE \x00\xff')
        path.write_bytes(damaged)
        try:
            pack.inspect(folder)
        except DecodeError as error:
            caught += 1
            assert len(str(error).splitlines()) == 1
    assert caught > 200


def test_failure_midway_keeps_the_old_file(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    out = tmp_path / "m.chr"
    packed(folder)
    old = {path: path.read_bytes() for path in (out, sidecar_path(out))}
    tensors = hf_tensors(TINY_LLAMA, seed=3)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 70] = np.nan
    folder = folder_of(tmp_path, tensors=tensors)
    refused(folder, "model.layers.1.mlp.down_proj.weight", "row 3", "group 1", kind=CodecError)
    assert {path: path.read_bytes() for path in old} == old

    read = pack._read

    def interrupted(source, *rows):
        if source.name.startswith("lm_head"):
            raise KeyboardInterrupt
        return read(source, *rows)

    monkeypatch.setattr(pack, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack.pack(folder_of(tmp_path), out, progress=False)
    assert {path: path.read_bytes() for path in old} == old
    assert sorted(tmp_path.iterdir()) == sorted([folder, *old])


def test_shard_that_shrinks_while_packing(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    check_out = pack._check_out

    def cut(*args):  # the last step before the weights are read
        check_out(*args)
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(20000)

    monkeypatch.setattr(pack, "_check_out", cut)
    refused(folder, "model.safetensors", "shorter")


# ---- A5: every tensor is used or named ----


def test_qwen2_biases_are_kept_as_they_are(tmp_path):
    tensors = hf_tensors(QWEN)
    config = hf_config(QWEN)
    assert not [key for key in config if "bias" in key]
    folder = folder_of(tmp_path, QWEN, tensors=tensors)
    loaded = model(folder)
    biases = [name for name in tensors if name.endswith(".bias")]
    assert len(biases) == 6
    for name in biases:
        assert loaded.tensors.entries[name].codec == "bf16"
        assert np.array_equal(loaded.tensors[name], tensors[name])
    # and they matter: without them the oracle's logits are far away
    zeroed = {n: np.zeros_like(v) if n in biases else v for n, v in loaded.tensors.items()}
    without = SimpleNamespace(spec=loaded.spec, tensors=zeroed)
    difference = oracle.step_logits(loaded, PROMPT) - oracle.step_logits(without, PROMPT)
    assert np.abs(difference).max() > 0.1


@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_INTERNLM, QWEN], ids=lambda s: s.model_type)
def test_every_missing_tensor_is_named(tmp_path, no_reading, spec):
    tensors = hf_tensors(spec)
    for name in tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        folder = folder_of(tmp_path, spec, tensors=rest)
        refused(folder, f"missing tensor {name.removesuffix('.weight')}")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
    ],
)
def test_a_tensor_left_over_is_named(tmp_path, no_reading, name):
    tensors = hf_tensors(TINY_LLAMA) | {name: np.zeros(64, np.float32)}
    refused(folder_of(tmp_path, tensors=tensors), name, "not used by llama with 2 layers")


def test_o_bias_of_qwen2_is_not_dropped(tmp_path, no_reading):
    name = "model.layers.0.self_attn.o_proj.bias"
    tensors = hf_tensors(QWEN) | {name: np.zeros(64, np.float32)}
    refused(folder_of(tmp_path, QWEN, tensors=tensors), name)


def test_long_lists_of_names_stay_short(tmp_path, no_reading):
    deep = replace(TINY_LLAMA, n_layers=40)
    folder = write_hf_folder(tmp_path / "m", hf_config(deep), hf_tensors(TINY_LLAMA))
    assert len(refused(folder, "and 339 more")) < 300


@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_INTERNLM, QWEN], ids=lambda s: s.model_type)
def test_every_wrong_shape_is_named(tmp_path, no_reading, spec):
    tensors = hf_tensors(spec)
    for name, values in tensors.items():
        for wrong in (values[:-1], values[..., None], values.reshape(-1)[None]):
            folder = folder_of(tmp_path, spec, tensors=tensors | {name: wrong})
            refused(folder, name, str(list(wrong.shape)), str(list(values.shape)))


# ---- A7: head_dim ----

WIDE = ArchSpec("wide", "llama_swiglu", 1, 128, 4, 2, 64, 128, 32, 16)


def test_explicit_head_dim_wins(tmp_path):
    folder = folder_of(tmp_path, WIDE)
    loaded = model(folder)
    assert loaded.spec.head_dim == 64
    prefix = "model.layers.0.self_attn"
    shapes = {name: loaded.tensors.entries[f"{prefix}.{name}_proj"].shape for name in "qkvo"}
    assert shapes == {"q": (256, 128), "k": (128, 128), "v": (128, 128), "o": (128, 256)}


@pytest.mark.parametrize("head_dim", [None, ...], ids=["null", "absent"])
def test_without_head_dim_hidden_is_divided(tmp_path, head_dim):
    spec = replace(WIDE, head_dim=32)
    folder = write_hf_folder(tmp_path / "m", hf_config(spec, head_dim=head_dim), hf_tensors(spec))
    assert model(folder).spec.head_dim == 32
    # tensors of the wider heads do not fit a config that only divides
    wide = write_hf_folder(tmp_path / "w", hf_config(WIDE, head_dim=head_dim), hf_tensors(WIDE))
    refused(wide, "self_attn.q_proj.weight", "[256, 128]", "[128, 128]")


@pytest.mark.parametrize("head_dim", [80, 48, 256, 0, -64, "64", 64.5])
def test_head_dim_without_kernel_is_refused(tmp_path, no_reading, head_dim):
    folder = write_hf_folder(tmp_path / "m", hf_config(WIDE, head_dim=head_dim), hf_tensors(WIDE))
    refused(folder, "head_dim", str(head_dim))


# ---- A9, A12: what the config says, in both spellings ----

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("style", ["old", "old type key", "nested"])
@pytest.mark.parametrize(
    "scaling, want",
    [
        (None, None),
        ({"rope_type": "default"}, None),
        (LINEAR, RopeScaling("linear", 4.0)),
        (LLAMA3, RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    ],
    ids=["none", "default", "linear", "llama3"],
)
def test_rope_and_eps_from_both_spellings(tmp_path, style, scaling, want):
    changes = {"rms_norm_eps": 1e-2}
    if style == "nested":
        nested = {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}
        changes |= {"rope_theta": ..., "rope_parameters": nested}
    else:
        old = scaling and dict(scaling)
        if old and style == "old type key":
            old["type"] = old.pop("rope_type")
        changes |= {"rope_theta": 5e5, "rope_scaling": old}
    folder = write_hf_folder(
        tmp_path / "m", hf_config(TINY_LLAMA, **changes), hf_tensors(TINY_LLAMA)
    )
    spec = pack.pack(folder, tmp_path / "m.chr", progress=False).spec
    assert (spec.rope_theta, spec.rope_scaling, spec.rms_eps) == (5e5, want, 1e-2)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_other_rope_scaling_is_refused_by_name(tmp_path, no_reading, kind, key, name):
    config = hf_config(TINY_LLAMA, **{key: {name: kind, "factor": 2.0}})
    folder = write_hf_folder(tmp_path / "m", config, hf_tensors(TINY_LLAMA))
    refused(folder, kind, "not implemented")


@pytest.mark.parametrize(
    "spec, changes, fragment",
    [
        (TINY_LLAMA, {"model_type": "gemma3"}, "gemma3"),
        (TINY_LLAMA, {"model_type": ...}, "unknown"),
        (TINY_LLAMA, {"hidden_act": "gelu"}, "gelu"),
        (TINY_LLAMA, {"attention_bias": True}, "attention_bias"),
        (TINY_LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (TINY_LLAMA, {"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window"),
        (TINY_LLAMA, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (TINY_LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        (TINY_LLAMA, {"hidden_size": 0}, "hidden_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, no_reading, spec, changes, fragment):
    folder = write_hf_folder(tmp_path / "m", hf_config(spec, **changes), hf_tensors(spec))
    refused(folder, fragment)


def test_no_config_and_no_folder(tmp_path, no_reading):
    folder = folder_of(tmp_path)
    (folder / "config.json").unlink()
    refused(folder, "config.json")
    refused(tmp_path / "nowhere", "no such folder")


def test_end_tokens_of_both_files(tmp_path):
    folder = write_hf_folder(
        tmp_path / "m",
        hf_config(TINY_LLAMA, eos_token_id=3),
        hf_tensors(TINY_LLAMA),
        generation={"eos_token_id": [7, 3]},
    )
    assert pack.inspect(folder).spec.eos_ids == (7, 3)


# ---- A13: widths that are not whole groups ----


@pytest.mark.parametrize(
    "hidden, n_q, n_kv, head_dim, ffn",
    [
        (64, 4, 2, 16, 1376),
        (576, 9, 3, 64, 1536),
        (896, 14, 2, 64, 320),
        (64, 4, 2, 16, 96),
        (80, 5, 1, 16, 33),
    ],
)
def test_each_row_of_odd_widths(tmp_path, hidden, n_q, n_kv, head_dim, ffn):
    spec = ArchSpec("odd", "llama_swiglu", 1, hidden, n_q, n_kv, head_dim, ffn, 17, 16)
    tensors = hf_tensors(spec)
    file = packed(folder_of(tmp_path, spec, tensors=tensors))
    for name, value in file.items():
        original = tensors[f"{name}.weight"]
        if original.ndim == 1:
            continue
        m, k = original.shape
        groups = -(-k // 64)
        assert value.codes.shape == (m, groups * 32) and value.scales.shape == (m, groups)
        # each row alone packs to the same bytes: no group crosses a row
        for row in (0, m // 2, m - 1):
            alone = encode_nf4(original[row : row + 1])
            assert np.array_equal(alone.codes[0], value.codes[row])
            assert np.array_equal(alone.scales[0], value.scales[row])
        tail = np.stack([value.codes & 15, value.codes >> 4], axis=2).reshape(m, -1)[:, k:]
        assert (tail == 7).all()
        # half of the widest gap between levels is 0.152 of the group's largest value
        ends = np.arange(0, k, 64)
        largest = np.repeat(np.maximum.reduceat(np.abs(original), ends, axis=1), 64, axis=1)
        assert (np.abs(decode_nf4(value) - original) <= 0.153 * largest[:, :k]).all()


# ---- A14: InternLM2 ----

SIX = ArchSpec("six", "llama_swiglu", 2, 96, 6, 2, 16, 128, 32, 16)


def internlm_twin(tensors: dict, spec: ArchSpec) -> dict:
    """Rename, and regroup q, k, v per KV head with a plain loop over heads."""
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    twin = {
        "model.tok_embeddings.weight": tensors["model.embed_tokens.weight"],
        "output.weight": tensors["lm_head.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
    }
    per_kv, d = spec.n_q // spec.n_kv, spec.head_dim
    for layer in range(spec.n_layers):
        prefix = f"model.layers.{layer}"
        for old, new in names.items():
            twin[f"{prefix}.{new}.weight"] = tensors[f"{prefix}.{old}.weight"]
        q, k, v = (tensors[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv")
        rows = []
        for kv in range(spec.n_kv):
            for head in range(kv * per_kv, (kv + 1) * per_kv):
                rows.append(q[head * d : (head + 1) * d])
            rows += [k[kv * d : (kv + 1) * d], v[kv * d : (kv + 1) * d]]
        twin[f"{prefix}.attention.wqkv.weight"] = np.concatenate(rows)
    return twin


def test_internlm2_twin_gives_the_same_ids_and_logits(tmp_path):
    tensors = hf_tensors(SIX)
    llama = model(folder_of(tmp_path, SIX, "llama", tensors=tensors))
    spec = replace(SIX, family="internlm_gqa", model_type="internlm2")
    folder = folder_of(tmp_path, spec, "internlm2", tensors=internlm_twin(tensors, SIX))
    twin = model(folder)
    kinds = {name.rsplit(".", 1)[-1]: entry.kind for name, entry in twin.tensors.entries.items()}
    assert kinds == {
        "tok_embeddings": "embed",
        "output": "lm_head",
        "norm": "norm",
        "attention_norm": "norm",
        "ffn_norm": "norm",
        "wqkv": "other",
        "wo": "other",
        "w1": "gate",
        "w3": "up",
        "w2": "down",
    }
    assert twin.tensors.root["arch"] == "internlm2"
    assert np.array_equal(oracle.step_logits(llama, PROMPT), oracle.step_logits(twin, PROMPT))
    assert oracle.greedy(llama, PROMPT, 8) == oracle.greedy(twin, PROMPT, 8)


# ---- A15: zeros, and values that no scale can hold ----


def test_zero_groups_unpack_to_exact_zeros_in_silence(tmp_path):
    tensors = hf_tensors(TINY_LLAMA)
    gate = tensors["model.layers.0.mlp.down_proj.weight"]  # [64, 128]: two groups a row
    gate[2, 64:] = 0
    gate[5] = -0.0
    gate[7, :64] = 0
    gate[7, 13] = -1.5
    tensors["model.layers.1.self_attn.v_proj.weight"][:] = 0
    tensors["model.embed_tokens.weight"][30:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = packed(folder_of(tmp_path, tensors=tensors))
        decoded = {n: decode_nf4(v) for n, v in file.items() if isinstance(v, Packed)}
    down = decoded["model.layers.0.mlp.down_proj"]
    one = np.zeros(64, np.float32)
    one[13] = -1.5
    assert not down[2, 64:].any() and down[2, :64].any()
    assert not down[5].any()
    assert np.array_equal(down[7, :64], one)
    assert not decoded["model.layers.1.self_attn.v_proj"].any()
    assert not decoded["model.embed_tokens"][30:].any()
    value = file["model.layers.1.self_attn.v_proj"]
    assert (value.scales == 1).all() and (value.codes == 0x77).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e9, 1e-9])
def test_matrix_that_nf4_cannot_hold(tmp_path, value):
    tensors = hf_tensors(TINY_LLAMA)
    matrix = tensors["model.layers.1.mlp.gate_proj.weight"]
    matrix[4, :] = 0
    matrix[4, 1] = value
    folder = folder_of(tmp_path, tensors=tensors, dtype="F32")
    name = "model.layers.1.mlp.gate_proj.weight"
    refused(folder, name, "row 4", "group 0", kind=CodecError)


def test_chunk_is_named_when_rows_are_counted_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "CHUNK_ELEMENTS", 8 * 64)
    tensors = hf_tensors(TINY_LLAMA)
    tensors["lm_head.weight"][19, 5] = np.inf
    folder = folder_of(tmp_path, tensors=tensors)
    refused(folder, "lm_head.weight[16:24]: row 3", kind=CodecError)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_norm_that_bfloat16_cannot_hold(tmp_path, value):
    tensors = hf_tensors(TINY_LLAMA)
    tensors["model.norm.weight"][9] = np.float32(value)
    folder = folder_of(tmp_path, tensors=tensors, dtype="F32")
    if np.isfinite(value):
        assert np.isinf(to_bf16(np.float32([value]))[0])  # finite, but past the last bfloat16
    refused(folder, "model.norm.weight", "element 9", kind=CodecError)


# ---- where the file goes ----


def test_out_is_checked_before_any_work(tmp_path, no_reading, monkeypatch):
    folder = folder_of(tmp_path)
    (tmp_path / "d.chr").mkdir()
    refused(folder, "is a folder", out=tmp_path / "d.chr")
    refused(folder, "ends in .chr", out=folder / "model.safetensors")
    refused(folder, "ends in .chr", out=tmp_path / "packed")
    with pytest.raises(ModelError, match="no such folder"):
        pack.pack(folder, tmp_path / "nowhere" / "m.chr", progress=False)
    assert not (tmp_path / "nowhere").exists()
    with monkeypatch.context() as patch:
        usage = SimpleNamespace(total=10**6, used=10**6 - 1000, free=1000)
        patch.setattr(pack.shutil, "disk_usage", lambda _: usage)
        refused(folder, "1000 bytes free", "needs ")
    with monkeypatch.context() as patch:
        patch.setattr(pack.os, "access", lambda *_: False)
        refused(folder, "not writable")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_refused(tmp_path, no_reading):
    folder = folder_of(tmp_path)
    place = tmp_path / "locked"
    place.mkdir(mode=0o555)
    refused(folder, "not writable", out=place / "m.chr")


def test_disk_space_asked_for_is_the_size_of_the_file(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    packed(folder)
    size = (tmp_path / "m.chr").stat().st_size
    for free, enough in ((size - 1, False), (size, True)):
        usage = SimpleNamespace(total=size, used=0, free=free)
        monkeypatch.setattr(pack.shutil, "disk_usage", lambda _, usage=usage: usage)
        if enough:
            packed(folder)
        else:
            refused(folder, f"{size - 1} bytes free", f"needs {size}")


def test_progress_can_be_silent(tmp_path, capfd):
    folder = folder_of(tmp_path)
    packed(folder)
    assert capfd.readouterr() == ("", "")
    pack.pack(folder, tmp_path / "m.chr", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "m.chr" in err


# ---- verify ----


def test_verify_reports_sizes_and_errors(tmp_path):
    tensors = hf_tensors(QWEN)
    folder = folder_of(tmp_path, QWEN, tensors=tensors, shards=2)
    packed(folder)
    alone = pack.verify(tmp_path / "m.chr")
    assert all("rmse" not in row and row["checked"] and row["fault"] is None for row in alone)
    rows = {row["name"]: row for row in pack.verify(tmp_path / "m.chr", folder)}
    assert [row["name"] for row in alone] == list(rows)
    for name, original in tensors.items():
        row = rows[name.removesuffix(".weight")]
        assert row["shape"] == original.shape
        if original.ndim == 1:
            assert row["bits_per_weight"] == 16 and row["codec"] == "bf16"
            assert row["rmse"] == row["max_abs"] == row["rel_rmse"] == 0
            continue
        assert row["bits_per_weight"] == 4.25 and row["bytes"] == original.size * 17 // 32
        error = decode_nf4(encode_nf4(original)).astype(np.float64) - original
        rmse = np.sqrt((error**2).mean())
        assert row["rmse"] == pytest.approx(rmse, rel=1e-6)
        assert row["max_abs"] == pytest.approx(np.abs(error).max(), rel=1e-6)
        rms = np.sqrt((original.astype(np.float64) ** 2).mean())
        assert row["rel_rmse"] == pytest.approx(rmse / rms, rel=1e-6)
        assert 0.05 < row["rel_rmse"] < 0.15
    json.dumps(list(rows.values()), allow_nan=False)


def test_verify_flags_a_flipped_byte(tmp_path):
    folder = folder_of(tmp_path)
    with packed(folder) as file:
        entry = file.entries["model.layers.1.mlp.up_proj"]
    out = tmp_path / "m.chr"
    data = bytearray(out.read_bytes())
    data[entry.data[0] + 5] ^= 0x10
    out.write_bytes(data)
    for against in (None, folder):
        faulty = [row for row in pack.verify(out, against) if row["fault"]]
        assert [row["name"] for row in faulty] == [entry.name]
        assert entry.name in faulty[0]["fault"] and len(faulty[0]["fault"].splitlines()) == 1
    assert faulty[0]["rmse"] is None
    sidecar_path(out).unlink()
    rows = pack.verify(out)
    assert not any(row["checked"] or row["fault"] for row in rows)
    # without the checksum the comparison still sees it
    rmse = {row["name"]: row["rmse"] for row in pack.verify(out, folder)}[entry.name]
    original = hf_tensors(TINY_LLAMA)[f"{entry.name}.weight"]
    clean = np.sqrt(((decode_nf4(encode_nf4(original)) - original) ** 2).mean())
    assert rmse > 1.0001 * clean


def test_verify_refuses_another_model(tmp_path):
    packed(folder_of(tmp_path))
    other = folder_of(tmp_path, replace(TINY_LLAMA, intermediate=192), "other")
    deeper = folder_of(tmp_path, replace(TINY_LLAMA, n_layers=3), "deeper")
    tied = folder_of(tmp_path, TIED, "tied")
    for folder, name in ((other, "mlp"), (deeper, "model.layers.2"), (tied, "lm_head")):
        with pytest.raises(ModelError, match=name) as caught:
            pack.verify(tmp_path / "m.chr", folder)
        assert len(str(caught.value).splitlines()) == 1
    # the same shapes with other weights are another matter: a large error, not a refusal
    rows = pack.verify(tmp_path / "m.chr", folder_of(tmp_path, name="seed", seed=9))
    assert max(row["rel_rmse"] for row in rows) > 1


def test_verify_does_not_let_a_nan_pass(tmp_path):
    folder = folder_of(tmp_path)
    packed(folder)
    tensors = hf_tensors(TINY_LLAMA)
    tensors["model.norm.weight"][0] = np.nan
    tensors["lm_head.weight"][3, 3] = np.inf
    folder = folder_of(tmp_path, name="n", tensors=tensors)
    faulty = {row["name"]: row for row in pack.verify(tmp_path / "m.chr", folder) if row["fault"]}
    assert faulty.keys() == {"model.norm", "lm_head"}
    assert all(row["rmse"] is None and "not finite" in row["fault"] for row in faulty.values())


def test_verify_refuses_a_broken_file(tmp_path):
    folder = folder_of(tmp_path)
    packed(folder).close()
    data = (tmp_path / "m.chr").read_bytes()
    (tmp_path / "m.chr").write_bytes(data[:-100])
    with pytest.raises(ContainerError, match=r"m\.chr"):
        pack.verify(tmp_path / "m.chr")


# ---- memory ----

MEASURE = """
import sys

def kib(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

from decodev2 import pack
before = kib("VmHWM")
if sys.argv[1] == "pack":
    pack.pack(sys.argv[2], sys.argv[3], progress=False)
else:
    pack.verify(sys.argv[3], sys.argv[2])
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
print(kib("VmHWM") - before, ",".join(heavy))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_is_one_packed_tensor_and_a_few_chunks(tmp_path):
    """Embedding 200k x 512: 205 MB as bf16, 410 MB as float32, 54 MB packed."""
    spec = ArchSpec("big", "llama_swiglu", 1, 512, 8, 2, 64, 128, 200_000, 16, tied=True)
    tensors = hf_tensors(replace(spec, vocab=2000))
    small = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = np.broadcast_to(small, (100, *small.shape)).reshape(
        spec.vocab, spec.hidden
    )
    folder = folder_of(tmp_path, spec, tensors=tensors)
    out = tmp_path / "m.chr"
    root = str(Path(pack.__file__).parents[1])
    packed_kib = spec.vocab * spec.hidden * 17 // 32 // 1024
    for step in ("pack", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, step, str(folder), str(out)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": root},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        grown, _, heavy = done.stdout.strip("\n").partition(" ")
        assert heavy == ""
        # room for the chunks of each thread and the side buffers; a float32 copy would take 400 MB
        assert packed_kib < int(grown) < packed_kib + 80 * 1024, step
    with ChrFile(out) as file:
        want = encode_nf4(small)
        value = file["model.embed_tokens"]
        assert np.array_equal(value.codes[-2000:], want.codes)
        assert np.array_equal(value.codes[2000:4000], want.codes)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
