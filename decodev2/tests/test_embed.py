"""Embedding rows: packed tables stay packed, dense ones are for synthetic models only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decodev2.embed import embed_rows
from decodev2.linear import PackedLinear, from_packed
from decodev2.load import load_weights
from decodev2.nf4 import decode_nf4, encode_nf4
from decodev2.plan import TINY_LLAMA
from decodev2.synth import build, random_packed


def table(vocab, width, seed=0):
    rng = np.random.default_rng([seed, vocab, width])
    return encode_nf4(rng.standard_normal((vocab, width), dtype=np.float32))


@pytest.mark.parametrize("width", (1, 2, 16, 63, 64, 65, 96, 576, 1376))
@pytest.mark.parametrize("vocab", (1, 16, 17, 1000))
def test_packed_rows_equal_the_codec_bit_for_bit(vocab, width):
    packed = table(vocab, width)
    ids = np.random.default_rng(1).integers(0, vocab, 9)
    ids[:2] = 0, vocab - 1
    memory = torch.full((9 * width + 128,), -7.25e31)
    out = memory[64:-64].view(9, width)
    out.fill_(float("nan"))
    embed_rows(from_packed(packed), torch.from_numpy(ids), out)
    np.testing.assert_array_equal(out.numpy(), decode_nf4(packed, rows=ids))
    assert (memory[:64] == -7.25e31).all() and (memory[-64:] == -7.25e31).all()


@pytest.mark.parametrize("bad", (-1, -(2**62), 20, 31, 32, 2**40))
def test_an_id_outside_the_table_gives_zeros(bad):
    """20 rows are stored as two blocks of 16: rows 20 to 31 exist in memory, not in the table."""
    packed = table(20, 64)
    out = torch.full((3, 64), float("nan"))
    embed_rows(from_packed(packed), torch.tensor([19, bad, 0]), out)
    assert (out[1] == 0).all()
    np.testing.assert_array_equal(out[[0, 2]].numpy(), decode_nf4(packed, rows=np.array([19, 0])))


def test_dense_table():
    model = build(TINY_LLAMA, 0)
    weights = load_weights(model)
    assert isinstance(weights.embed, torch.Tensor) and weights.embed.dtype == torch.float32
    out = torch.full((3, 64), float("nan"))
    embed_rows(weights.embed, torch.tensor([31, 0, 31]), out)
    want = model.tensors["model.embed_tokens"][[31, 0, 31]]
    np.testing.assert_array_equal(out.numpy(), want)


def test_a_loaded_model_holds_no_dense_table():
    """Real `.chr` embeddings are packed; tied, head and embedding are one object, counted once."""
    spec = replace(TINY_LLAMA, vocab=1000)
    untied = load_weights(random_packed(spec, 0))
    assert isinstance(untied.embed, PackedLinear)
    per_token = untied.lm_head.nbytes
    for layer in untied.layers:
        matrices = (*layer.qkv, layer.o, *layer.gate_up, layer.down)
        assert layer.nbytes == sum(w.nbytes for w in matrices)
        per_token += layer.nbytes
    assert untied.bytes_per_token == per_token
    assert untied.nbytes == per_token + untied.embed.nbytes

    tied = load_weights(build(replace(spec, tied=True), 0))
    assert tied.embed is tied.lm_head
    assert tied.nbytes == tied.bytes_per_token == untied.bytes_per_token


def test_what_does_not_fit_is_refused():
    w = from_packed(table(20, 64))
    ids = torch.zeros(2, dtype=torch.int64)
    for bad_ids, out in (
        (ids, torch.zeros(1, 64)),
        (ids, torch.zeros(2, 65)),
        (ids, torch.zeros(128)),
        (ids.int(), torch.zeros(2, 64)),
        (ids, torch.zeros(2, 64).double()),
    ):
        with pytest.raises(ValueError) as caught:
            embed_rows(w, bad_ids, out)
        assert "\n" not in str(caught.value)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
