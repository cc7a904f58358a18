"""Rotary tables against transformers and by hand; the order of fused QKV rows."""

from dataclasses import replace

import numpy as np
import pytest

from decodev2.errors import ModelError
from decodev2.plan import TINY_INTERNLM, TINY_LLAMA, ArchSpec, RopeScaling
from decodev2.rope import (
    apply_rope,
    fuse_internlm_wqkv,
    inverse_frequencies,
    rope_tables,
    rotate_half,
    split_concat_qkv,
    split_internlm_wqkv,
)

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
LLAMA31 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
LINEAR = RopeScaling("linear", 4.0)


def spec_with(head_dim=16, theta=1e4, scaling=None, max_seq=64) -> ArchSpec:
    return replace(
        TINY_LLAMA, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_seq=max_seq
    )


# ---- tables ----


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, LLAMA31], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 5e7])
def test_tables_match_transformers(head_dim, theta, scaling):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="transformers is not installed"
    )
    from transformers import LlamaConfig

    parameters = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq,
        }
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters=parameters,
    )
    reference = modeling.LlamaRotaryEmbedding(config)
    want = reference(torch.zeros(1), torch.arange(4096)[None])
    got = rope_tables(spec_with(head_dim, theta, scaling, max_seq=4096))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == np.float32 and ours.shape == (4096, head_dim)
        assert np.abs(ours - theirs[0].numpy()).max() < 1e-5


def test_tables_are_cos_and_sin_of_the_angle():
    spec = spec_with(head_dim=64, max_seq=200)
    cos, sin = rope_tables(spec)
    angle = np.arange(200)[:, None] * 1e4 ** (-np.arange(0, 64, 2) / 64)
    # 200 rad times the rounding of a float32 frequency and of the float32 product
    np.testing.assert_allclose(cos, np.tile(np.cos(angle), 2), atol=3e-5, rtol=0)
    np.testing.assert_allclose(sin, np.tile(np.sin(angle), 2), atol=3e-5, rtol=0)


def test_llama3_keeps_short_waves_blends_one_and_divides_the_rest():
    plain = inverse_frequencies(spec_with())
    multiplier = inverse_frequencies(spec_with(scaling=LLAMA3)) / plain
    np.testing.assert_allclose(multiplier, [1.0, 0.303, *[0.125] * 6], atol=1e-3)
    assert multiplier[0] == 1.0


def test_linear_scaling_divides_positions():
    cos, sin = rope_tables(spec_with(max_seq=16))
    cos4, sin4 = rope_tables(spec_with(scaling=LINEAR, max_seq=64))
    np.testing.assert_array_equal(cos4[::4], cos)  # exact: the factor is a power of two
    np.testing.assert_array_equal(sin4[::4], sin)
    assert np.abs(cos4[:16] - cos).max() > 0.5


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RopeScaling("yarn", 4.0), "'yarn' is not implemented"),
        (RopeScaling("linear", 0.0), "factor 0.0"),
        (RopeScaling("llama3", float("nan")), "factor nan"),
        (RopeScaling("llama3", 8.0, 4.0, 4.0), "low < high"),
    ],
)
def test_scaling_that_makes_no_sense_is_refused(scaling, message):
    with pytest.raises(ModelError, match=message):
        rope_tables(spec_with(scaling=scaling))


# ---- rotation ----


def test_rotate_half_by_hand():
    np.testing.assert_array_equal(rotate_half(np.array([1, 2, 3, 4])), [-3, -4, 1, 2])


def test_rotation_is_a_complex_product_of_paired_halves():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 3, 32)).astype(np.float32)
    cos, sin = rope_tables(spec_with(head_dim=32, max_seq=5))
    got = apply_rope(x, cos[:, None], sin[:, None])
    angle = np.arange(5)[:, None] * 1e4 ** (-np.arange(16) / 16)
    want = (x[..., :16] + 1j * x[..., 16:]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(got[..., :16], want.real, atol=1e-5)
    np.testing.assert_allclose(got[..., 16:], want.imag, atol=1e-5)


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((2, 16)).astype(np.float32)
    cos, sin = rope_tables(spec_with(max_seq=64))

    def score(i, j):
        return apply_rope(q, cos[i], sin[i]) @ apply_rope(k, cos[j], sin[j])

    assert score(7, 3) == pytest.approx(score(60, 56), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


# ---- fused QKV ----


def labelled_rows(spec: ArchSpec, order) -> np.ndarray:
    """One row per (kind, head, dimension) in the order of `order`, a list of (kind, head)."""
    kinds = {"q": 0, "k": 1, "v": 2}
    return np.array([(kinds[kind], head, d) for kind, head in order for d in range(spec.head_dim)])


@pytest.mark.parametrize(("n_q", "n_kv"), [(6, 2), (4, 2), (4, 4), (3, 1)])
def test_internlm_rows_are_grouped_per_kv_head(n_q, n_kv):
    spec = replace(TINY_INTERNLM, n_q=n_q, n_kv=n_kv)
    group = n_q // n_kv
    order = []
    for kv_head in range(n_kv):
        order += [("q", kv_head * group + i) for i in range(group)]
        order += [("k", kv_head), ("v", kv_head)]
    fused = labelled_rows(spec, order)
    parts = split_internlm_wqkv(fused, spec)
    for kind, heads, part in zip("qkv", (n_q, n_kv, n_kv), parts, strict=True):
        want = labelled_rows(spec, [(kind, head) for head in range(heads)])
        np.testing.assert_array_equal(part, want)
    np.testing.assert_array_equal(fuse_internlm_wqkv(*parts, spec), fused)


def test_concatenated_rows_are_three_blocks():
    spec = replace(TINY_LLAMA, n_q=6, n_kv=2)
    order = [("q", head) for head in range(6)] + [("k", 0), ("k", 1), ("v", 0), ("v", 1)]
    q, k, v = split_concat_qkv(labelled_rows(spec, order), spec)
    np.testing.assert_array_equal(q, labelled_rows(spec, order[:6]))
    np.testing.assert_array_equal(k, labelled_rows(spec, order[6:8]))
    np.testing.assert_array_equal(v, labelled_rows(spec, order[8:]))


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_split_keeps_type_and_takes_vectors(dtype):
    rows = TINY_INTERNLM.q_dim + 2 * TINY_INTERNLM.kv_dim
    for split in (split_internlm_wqkv, split_concat_qkv):
        parts = split(np.arange(rows, dtype=dtype), TINY_INTERNLM)
        assert [part.shape for part in parts] == [(64,), (32,), (32,)]
        assert all(part.dtype == dtype for part in parts)


@pytest.mark.parametrize("split", [split_internlm_wqkv, split_concat_qkv])
def test_split_refuses_another_number_of_rows(split):
    with pytest.raises(ModelError, match=r"127 rows.*need 128"):
        split(np.zeros((127, 4)), TINY_INTERNLM)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
