"""Small models for the tests: one whose answers are known beforehand, and folders the command line
can open."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from hf import hf_config, hf_name, write_hf_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from decodev2.nf4 import Packed, decode_nf4, encode_nf4
from decodev2.pack import pack
from decodev2.plan import TINY_LLAMA, ArchSpec, layer_names, top_names
from decodev2.synth import SynthModel, build

USER, ANSWER, END = "<|user|>", "<|answer|>", "<|end|>"
USER_ID, ANSWER_ID, END_ID = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system turn here') }}{% endif %}"
    "<|{{ 'user' if m['role'] == 'user' else 'answer' }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}"
)
# A vocabulary of 256 bytes and three special tokens.
BYTES = replace(TINY_LLAMA, name="tiny-bytes", vocab=259, max_seq=64, eos_ids=(END_ID,))
# The same with room for one dimension per id, for `chain`.
WIDE_BYTES = replace(BYTES, name="tiny-chain", hidden=320, n_q=2, n_kv=1)


def chain(spec: ArchSpec, successor: dict[int, int]) -> SynthModel:
    """A model whose next id is `successor[id]` (0 for any other), whatever came before.

    Row i of the embedding is unit vector i, the layers add nothing, and row j of the head has ones
    at the ids that j follows. Every weight survives NF4 exactly. Needs hidden >= vocab.
    """
    assert spec.hidden >= spec.vocab and not spec.tied
    tensors = dict(build(spec, 0).tensors)
    top = top_names(spec)
    head = np.zeros((spec.vocab, spec.hidden), np.float32)
    for token_id in range(spec.vocab):
        head[successor.get(token_id, 0), token_id] = 1.0
    tensors[top["embed"]] = np.eye(spec.vocab, spec.hidden, dtype=np.float32)
    tensors[top["norm"]] = np.ones(spec.hidden, np.float32)
    tensors[top["lm_head"]] = encode_nf4(head)
    for layer in range(spec.n_layers):
        for role in ("o", "down"):
            name = layer_names(spec, layer)[role]
            tensors[name] = encode_nf4(np.zeros(tensors[name].shape, np.float32))
    return SynthModel(spec, tensors)


def run_of(*ids: int) -> dict[int, int]:
    """Successors along a sequence, for `chain`."""
    return dict(itertools.pairwise(ids))


def dense_tensors(model: SynthModel) -> dict[str, np.ndarray]:
    """The tensors of a model under their names in a checkpoint, decoded to float32."""
    return {
        hf_name(name): decode_nf4(value) if isinstance(value, Packed) else value
        for name, value in model.tensors.items()
    }


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """A byte-level tokenizer: id = byte, then `<|user|>`, `<|answer|>` and `<|end|>`."""
    shown = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {c: ord(c) for c in shown if ord(c) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    vocab = printable | dict(zip(shown[len(printable) :], others, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([USER, ANSWER, END])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    spec: ArchSpec,
    tensors: dict[str, np.ndarray],
    template: str | None = TEMPLATE,
    **config,
) -> Path:
    """An HF folder with tokenizer, and FOLDER.chr packed beside it. Returns the folder."""
    write_hf_folder(folder, hf_config(spec, **config), tensors, dtype="F32")
    write_tokenizer(folder, template)
    pack(folder, folder.with_name(folder.name + ".chr"), progress=False)
    return folder
