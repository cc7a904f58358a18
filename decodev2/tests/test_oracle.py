"""The float32 oracle: its gates, its tools, and transformers on the same dequantised weights."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from decodev2 import oracle, rope
from decodev2.errors import ModelError, PromptError
from decodev2.nf4 import GROUP, Packed, bf16_bits, bf16_to_f32, decode_nf4
from decodev2.oracle import KVCache, diff, first_parting, format_diff, greedy, step_logits, trace
from decodev2.plan import (
    MEDIUM_LLAMA,
    REAL_SHAPES,
    TINY_INTERNLM,
    TINY_LLAMA,
    RopeScaling,
    layer_names,
    tensor_shapes,
    top_names,
)
from decodev2.synth import SynthModel, build, internlm_twin, random_packed

PROMPT = [0, 1, 2, 3, 4, 5, 6, 7]
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
WIDE_HEADS = replace(TINY_LLAMA, name="wide-heads", hidden=128, n_q=4, n_kv=2, head_dim=64)
SIX_HEADS = replace(TINY_LLAMA, name="six-heads", hidden=192, n_q=6, n_kv=2)
QWEN = replace(TINY_LLAMA, name="tiny-qwen", qkv_bias=True, model_type="qwen2")


def ids_of(spec, n, seed=9):
    return np.random.default_rng(seed).integers(0, spec.vocab, n).tolist()


def with_tensors(model, **by_name):
    return SynthModel(model.spec, {**model.tensors, **by_name})


# ---- gates ----


@pytest.mark.parametrize(
    ("spec", "seed", "want"),
    [
        (TINY_LLAMA, 0, [12, 12, 0, 31, 31, 31, 15, 1]),
        (TINY_INTERNLM, 1, [11, 6, 0, 16, 3, 31, 20, 31]),
    ],
    ids=["tiny-llama-0", "tiny-internlm-1"],
)
def test_greedy_ids_are_pinned(spec, seed, want):
    first, second = greedy(build(spec, seed), PROMPT, 8), greedy(build(spec, seed), PROMPT, 8)
    assert first == second == want
    # A pin is only portable if no other order of summation can flip an id.
    logits = np.sort(step_logits(build(spec, seed), PROMPT + want[:-1]), axis=1)
    assert (logits[:, -1] - logits[:, -2]).min() > 0.03


def test_dead_slots_have_no_weight_whatever_they_hold():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 16, 2, 16)).astype(np.float32)
    want = np.repeat(v[0], 2, axis=0).reshape(1, -1)  # one live slot: its value, per query head
    for poison in (1e4, -1e30, np.inf, np.nan):
        k[1:], v[1:] = poison, poison
        k[-1] = 1e4 if np.isfinite(poison) else poison
        weights = oracle.attention_weights(q, k, np.array([1]))
        assert (weights[..., 0] == 1.0).all() and (weights[..., 1:] == 0.0).all()
        np.testing.assert_array_equal(oracle.attention(q, k, v, np.array([1])), want)


def test_each_token_has_its_own_live_length():
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, 4, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 16, 2, 16)).astype(np.float32)
    together = oracle.attention(q, k, v, np.array([1, 5, 16]))
    for row, valid in enumerate((1, 5, 16)):
        alone = oracle.attention(q[row : row + 1], k[:valid], v[:valid], np.array([valid]))
        np.testing.assert_allclose(together[row], alone[0], atol=1e-6)
    k[5:16], v[5:16] = 0.0, 0.0  # zeros in the tail are not a mask
    masked, seen = (oracle.attention(q[:1], k, v, np.array([n])) for n in (5, 16))
    assert np.abs(masked - seen).max() > 0.05


def test_attention_is_grouped_query_attention():
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 6, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 9, 2, 16)).astype(np.float32)
    got = oracle.attention(q, k, v, np.array([4, 9])).reshape(2, 6, 16)
    for row, valid in enumerate((4, 9)):
        for head in range(6):
            keys, values = (x[:valid, head // 3].astype(np.float64) for x in (k, v))
            weight = np.exp(keys @ q[row, head] / 4.0)  # sqrt(16)
            want = weight @ values / weight.sum()
            np.testing.assert_allclose(got[row, head], want, atol=1e-5)


def test_very_negative_live_scores_beat_dead_ones():
    q = np.full((1, 1, 16), 200.0, np.float32)
    k = np.full((4, 1, 16), -125.0, np.float32)  # live scores are -1e5
    k[2:] = 125.0
    weights = oracle.attention_weights(q, k, np.array([2]))
    np.testing.assert_array_equal(weights.ravel(), [0.5, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("poison", [np.nan, 1e4])
def test_dirty_cache_changes_nothing(poison):
    model = build(TINY_LLAMA, 0)
    clean, dirty = KVCache.empty(TINY_LLAMA), KVCache.empty(TINY_LLAMA, poison)
    want = step_logits(model, PROMPT, 0, clean)
    np.testing.assert_array_equal(step_logits(model, PROMPT, 0, dirty), want)
    np.testing.assert_array_equal(
        step_logits(model, [9], 8, dirty), step_logits(model, [9], 8, clean)
    )
    for part in (dirty.k, dirty.v):
        assert np.isfinite(part[:, :9]).all()
        np.testing.assert_array_equal(part[:, 9:], np.full_like(part[:, 9:], poison))


@pytest.mark.parametrize("chunks", [[1] * 16, [5, 3, 8], [15, 1]], ids=str)
def test_incremental_agrees_with_one_pass(chunks):
    model = build(MEDIUM_LLAMA, 2)
    ids = ids_of(MEDIUM_LLAMA, 16)
    kv, at, parts = KVCache.empty(MEDIUM_LLAMA), 0, []
    for n in chunks:
        parts.append(step_logits(model, ids[at : at + n], at, kv))
        at += n
    np.testing.assert_allclose(np.concatenate(parts), step_logits(model, ids), atol=1e-4)


def test_later_tokens_do_not_change_earlier_logits_and_earlier_ones_do():
    model = build(TINY_LLAMA, 0)
    base = step_logits(model, PROMPT)
    other = step_logits(model, [*PROMPT[:5], 20, *PROMPT[6:]])
    np.testing.assert_allclose(other[:5], base[:5], atol=1e-6)
    assert (np.abs(other[5:] - base[5:]).max(axis=1) > 1e-2).all()


def test_decode_all_computes_the_same():
    for model in (build(TINY_LLAMA, 0), build(TINY_INTERNLM, 1), build(QWEN, 2)):
        dense = oracle.decode_all(model)
        assert not any(isinstance(value, Packed) for value in dense.tensors.values())
        np.testing.assert_allclose(
            step_logits(dense, PROMPT), step_logits(model, PROMPT), atol=1e-6
        )


def test_oracle_needs_no_torch():
    code = "import sys, decodev2.oracle, decodev2.synth; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- stopping and refusing ----


def test_greedy_stops_at_an_end_id_and_returns_it():
    model = build(TINY_LLAMA, 0)
    assert greedy(model, PROMPT, 8, eos_ids=(31, 5)) == [12, 12, 0, 31]
    assert greedy(model, PROMPT, 0) == []


@pytest.mark.parametrize(("prompt_len", "new"), [(8, 9), (15, 2), (16, 1)])
def test_greedy_stops_when_the_context_is_full(prompt_len, new):
    model = build(TINY_LLAMA, 0)
    prompt = ids_of(TINY_LLAMA, prompt_len)
    long = greedy(model, prompt, 100)
    assert len(long) == new
    assert greedy(model, prompt, 1) == long[:1]


@pytest.mark.parametrize(
    ("ids", "pos0", "message"),
    [
        ([], 0, "at least one integer"),
        ([1.0], 0, "at least one integer"),
        ([[1]], 0, "at least one integer"),
        ([1, 32], 0, r"token id 32 is outside this vocabulary's 0\.\.31"),
        ([-1], 0, "token id -1"),
        ([1] * 17, 0, r"positions 0\.\.16 do not fit the context of 16"),
        ([1], -1, "do not fit"),
        ([1], 3, "pos0 is 3 without a KV cache"),
    ],
)
def test_bad_ids_are_refused_in_one_line(ids, pos0, message):
    with pytest.raises(PromptError, match=message) as caught:
        step_logits(build(TINY_LLAMA, 0), ids, pos0)
    assert "\n" not in str(caught.value)


def test_greedy_refuses_a_prompt_that_does_not_fit():
    with pytest.raises(PromptError, match="context of 16"):
        greedy(build(TINY_LLAMA, 0), [1] * 17, 1)


def test_greedy_refuses_logits_that_are_not_finite():
    model = build(TINY_LLAMA, 0)
    bad = with_tensors(model, **{"model.norm": np.full(64, np.nan, np.float32)})
    with pytest.raises(ModelError, match="32 of 32 logits are not finite"):
        greedy(bad, PROMPT, 1)


def test_lowest_id_wins_a_tie():
    model = build(replace(TINY_LLAMA, vocab=1000), 0)
    head = model.tensors["lm_head"]
    codes, scales = head.codes.copy(), head.scales.copy()
    winner = int(np.argmax(step_logits(model, PROMPT)[-1]))
    for row in (5, 900):
        codes[row], scales[row] = codes[winner], scales[winner]
    if winner not in (5, 900):
        scales[winner] = 1e-6
    tied = with_tensors(model, lm_head=Packed(codes, scales, head.shape))
    logits = step_logits(tied, PROMPT)[-1]
    assert logits[5] == logits[900] == logits.max()
    assert greedy(tied, PROMPT, 1) == [5]


# ---- against transformers, which shares no code with this package ----


def rope_parameters(spec):
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    common = {"rope_type": scaling.kind, "rope_theta": spec.rope_theta, "factor": scaling.factor}
    if scaling.kind == "linear":
        return common
    return common | {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq,
    }


def transformers_logits(model, ids):
    """The same weights, dequantised, in transformers' own model: float32 [n, vocab]."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    spec = model.spec
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    config_class, model_class = kinds[spec.model_type]
    config = config_class(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_q,
        num_key_value_heads=spec.n_kv,
        head_dim=spec.head_dim,
        max_position_embeddings=max(256, spec.max_seq),
        rms_norm_eps=spec.rms_eps,
        rope_parameters=rope_parameters(spec),
        tie_word_embeddings=spec.tied,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    peer = model_class(config).to(torch.float32).eval()
    state = {}
    for name, value in model.tensors.items():
        key = name if name.endswith(".bias") else f"{name}.weight"
        state[key] = torch.from_numpy(decode_nf4(value) if isinstance(value, Packed) else value)
    if spec.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    peer.load_state_dict(state, strict=True)
    with torch.no_grad():
        return peer(torch.tensor([ids])).logits[0].numpy()


AGAINST_TRANSFORMERS = {
    "llama": (TINY_LLAMA, 16, {}),
    "medium": (MEDIUM_LLAMA, 32, {}),
    "six heads over two KV heads": (SIX_HEADS, 16, {}),
    "head_dim is not hidden / heads": (WIDE_HEADS, 16, {}),
    "tied": (replace(TINY_LLAMA, tied=True), 16, {}),
    "large q/k/v biases": (QWEN, 16, {"bias_std": 3.0}),
    "qwen2 tied, theta 1e6": (replace(QWEN, tied=True, rope_theta=1e6, max_seq=64), 48, {}),
    "linear": (replace(TINY_LLAMA, max_seq=64, rope_scaling=RopeScaling("linear", 4.0)), 64, {}),
    "llama3": (replace(TINY_LLAMA, max_seq=64, rope_scaling=LLAMA3), 64, {}),
    "eps 1e-2, embeddings 1e-3": (replace(TINY_LLAMA, rms_eps=1e-2), 16, {"embed_std": 1e-3}),
    "ragged widths": (replace(TINY_LLAMA, hidden=96, intermediate=172, head_dim=32), 16, {}),
}


@pytest.mark.parametrize("case", AGAINST_TRANSFORMERS)
def test_logits_match_transformers(case):
    spec, n, options = AGAINST_TRANSFORMERS[case]
    model = build(spec, 7, **options)
    ids = ids_of(spec, n)
    got, want = step_logits(model, ids), transformers_logits(model, ids)
    assert got.dtype == np.float32 and got.shape == (n, spec.vocab)
    assert want.std() > 0.1  # not degenerate
    assert np.abs(got - want).max() < 1e-4


def test_each_of_those_settings_matters():
    """The comparison above could not fail if these made no difference."""

    def logits(spec, n=16, seed=7, **options):
        return step_logits(build(spec, seed, **options), ids_of(spec, n))

    small = {"embed_std": 1e-3}
    gap = logits(replace(TINY_LLAMA, rms_eps=1e-2), **small) - logits(
        replace(TINY_LLAMA, rms_eps=1e-5), **small
    )
    assert np.abs(gap).max() > 0.5
    scaled = logits(replace(TINY_LLAMA, max_seq=64, rope_scaling=LLAMA3), 41)
    plain = logits(replace(TINY_LLAMA, max_seq=64), 41)
    assert np.abs(scaled[40] - plain[40]).max() > 0.1
    model = build(QWEN, 7, bias_std=3.0)
    for role in "qkv":
        name = layer_names(QWEN, 1)[f"{role}_bias"]
        without = with_tensors(model, **{name: np.zeros_like(model.tensors[name])})
        ids = ids_of(QWEN, 16)
        assert np.abs(step_logits(model, ids) - step_logits(without, ids)).max() > 0.05, role


# ---- InternLM2 ----


@pytest.mark.parametrize("spec", [TINY_LLAMA, SIX_HEADS, MEDIUM_LLAMA], ids=lambda s: s.name)
def test_internlm_twin_is_bit_equal(spec):
    model = build(spec, 4)
    twin = internlm_twin(model)
    assert {n: v.shape for n, v in twin.tensors.items()} == tensor_shapes(twin.spec)
    ids = ids_of(spec, 12)
    np.testing.assert_array_equal(step_logits(twin, ids), step_logits(model, ids))
    assert greedy(twin, ids, 4) == greedy(model, ids, 4)
    dense = (step_logits(oracle.decode_all(m), ids) for m in (twin, model))
    np.testing.assert_array_equal(*dense)


def test_block_wise_split_gives_other_logits(monkeypatch):
    model = build(SIX_HEADS, 4)
    twin = internlm_twin(model)
    monkeypatch.setattr(oracle, "split_internlm_wqkv", rope.split_concat_qkv)
    assert np.abs(step_logits(twin, PROMPT) - step_logits(model, PROMPT)).max() > 0.1


@pytest.mark.parametrize("pair", [("gate", "up"), ("q", "o"), ("k", "v")], ids="-".join)
def test_swapped_matrices_give_other_logits(pair):
    model = build(TINY_LLAMA, 0)  # q and o are both 64 x 64 here
    first, second = (layer_names(TINY_LLAMA, 0)[role] for role in pair)
    tensors = {first: model.tensors[second], second: model.tensors[first]}
    swapped = with_tensors(model, **tensors)
    assert np.abs(step_logits(swapped, PROMPT) - step_logits(model, PROMPT)).max() > 0.1


@pytest.mark.parametrize("spec", [TINY_INTERNLM, QWEN, replace(TINY_LLAMA, tied=True)])
def test_twin_refuses_what_has_none(spec):
    with pytest.raises(ModelError, match="InternLM2 twin needs"):
        internlm_twin(build(spec, 0))


# ---- synthetic models ----


@pytest.mark.parametrize("make", [build, random_packed])
@pytest.mark.parametrize(
    "spec",
    [TINY_LLAMA, TINY_INTERNLM, replace(QWEN, tied=True), replace(TINY_LLAMA, intermediate=97)],
    ids=["llama", "internlm", "qwen2-tied", "ragged"],
)
def test_synthetic_models_are_whole_finite_and_seeded(make, spec):
    model, same, other = make(spec, 5), make(spec, 5), make(spec, 6)
    shapes = tensor_shapes(spec)
    assert {name: value.shape for name, value in model.tensors.items()} == shapes
    for name, value in model.tensors.items():
        packed_embed = spec.tied or make is random_packed
        is_matrix = len(shapes[name]) == 2
        may_be_dense = name == top_names(spec)["embed"] and not packed_embed
        assert isinstance(value, Packed) == (is_matrix and not may_be_dense), name
        if isinstance(value, Packed):
            dense, again, different = (decode_nf4(m.tensors[name]) for m in (model, same, other))
        else:
            dense, again, different = (m.tensors[name] for m in (model, same, other))
            assert dense.dtype == np.float32
            np.testing.assert_array_equal(bf16_to_f32(bf16_bits(dense)), dense)
        assert np.isfinite(dense).all() and dense.std() > 0
        np.testing.assert_array_equal(dense, again)
        assert (dense != different).any()
    logits = step_logits(model, PROMPT)
    assert np.isfinite(logits).all() and logits.std() > 0.3


@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_INTERNLM, MEDIUM_LLAMA], ids=lambda s: s.name)
@pytest.mark.parametrize("tied", [False, True])
def test_synthetic_models_do_not_just_repeat_the_last_token(spec, tied):
    ids = ids_of(spec, 16)
    for seed in range(3):
        model = build(replace(spec, tied=tied), seed)
        chosen = step_logits(model, ids).argmax(axis=1)
        assert (chosen == ids).mean() < 0.3 and len(set(chosen.tolist())) >= 4
        # The same last token after another beginning: attention has a say in the choice.
        ends = [step_logits(model, [*ids_of(spec, 7, n), 3])[-1].argmax() for n in range(8)]
        assert len(set(ends)) >= 2


def test_random_packed_activations_keep_an_ordinary_size():
    spec = replace(REAL_SHAPES["qwen2.5-0.5b"], n_layers=6, vocab=2048, tied=False)
    model = random_packed(spec, 0)
    gate, up = (model.tensors[layer_names(spec, 0)[role]] for role in ("gate", "up"))
    assert (gate.codes != up.codes).mean() > 0.9  # each matrix starts elsewhere in the tile
    assert len(np.unique(gate.codes[:64], axis=0)) == 64
    assert all(value.shape[1] % GROUP == 0 for value in (gate, up))
    for name, value in trace(model, [3, 1000, 7]).items():
        rms = float(np.sqrt(np.mean(np.square(value))))
        assert 0.05 < rms < 50, name
        assert abs(value.mean()) < 0.5 * rms, name  # no common offset that swamps the signal


# ---- trace and diff ----


def test_trace_gives_every_buffer_in_order_and_they_fit_together():
    model = build(QWEN, 3)
    buffers = trace(model, PROMPT)
    per_layer = ["attn_in", "q", "k", "v", "attn", "resid_attn", "mlp_in", "act", "resid_mlp"]
    names = [f"layer {layer} {part}" for layer in range(2) for part in per_layer]
    assert list(buffers) == ["embed", *names, "final", "logits"] == oracle.buffer_names(QWEN)
    np.testing.assert_array_equal(buffers["logits"], step_logits(model, PROMPT))
    widths = [buffers[f"layer 0 {part}"].shape[1] for part in per_layer]
    assert widths == [64, 64, 32, 32, 64, 64, 64, 128, 64]
    assert all(len(value) == len(PROMPT) for value in buffers.values())

    x = buffers["embed"].astype(np.float64)
    for layer in range(2):
        part = {name: buffers[f"layer {layer} {name}"].astype(np.float64) for name in per_layer}
        w = {
            role: decode_nf4(value) if isinstance(value, Packed) else value
            for role, name in layer_names(QWEN, layer).items()
            for value in [model.tensors[name]]
        }
        norm = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + QWEN.rms_eps)
        np.testing.assert_allclose(part["attn_in"], norm * w["attn_norm"], atol=1e-4)
        np.testing.assert_allclose(part["v"], part["attn_in"] @ w["v"].T + w["v_bias"], atol=1e-4)
        np.testing.assert_allclose(  # position 0 is not rotated
            part["q"][0], w["q"] @ part["attn_in"][0] + w["q_bias"], atol=1e-4
        )
        np.testing.assert_allclose(part["resid_attn"], x + part["attn"] @ w["o"].T, atol=1e-4)
        gate, up = (part["mlp_in"] @ w[role].T for role in ("gate", "up"))
        np.testing.assert_allclose(part["act"], gate / (1 + np.exp(-gate)) * up, atol=1e-4)
        x = part["resid_mlp"]
        np.testing.assert_allclose(x, part["resid_attn"] + part["act"] @ w["down"].T, atol=1e-4)


def test_trace_until_stops_there():
    model = build(TINY_LLAMA, 0)
    whole = trace(model, PROMPT)
    needed = {n: v for n, v in model.tensors.items() if "layers.1.mlp" not in n and n != "lm_head"}
    cut = trace(SynthModel(TINY_LLAMA, needed), PROMPT, until="layer 1 attn")
    assert list(cut) == list(whole)[: list(whole).index("layer 1 attn") + 1]
    for name, value in cut.items():
        np.testing.assert_array_equal(value, whole[name])
    with pytest.raises(ModelError, match="no buffer 'layer 2 attn'"):
        trace(model, PROMPT, until="layer 2 attn")


def test_trace_continues_from_a_cache():
    model, kv = build(TINY_LLAMA, 0), KVCache.empty(TINY_LLAMA, np.nan)
    step_logits(model, PROMPT[:5], 0, kv)
    rows = diff(
        trace(model, PROMPT[5:], 5, kv), {n: v[5:] for n, v in trace(model, PROMPT).items()}
    )
    assert max(row.max_abs for row in rows) < 1e-4


def test_diff_finds_the_first_wrong_buffer():
    model = build(TINY_LLAMA, 0)
    up, gate = (layer_names(TINY_LLAMA, 1)[role] for role in ("up", "gate"))
    wrong = with_tensors(model, **{up: model.tensors[gate]})
    rows = diff(trace(wrong, PROMPT), trace(model, PROMPT))
    assert next(row.name for row in rows if row.max_abs > 0) == "layer 1 act"
    assert rows[-1].name == "logits" and rows[-1].max_abs > 0.1


def test_diff_numbers_by_hand_and_nan_never_equal():
    a = {
        "near": np.array([1.0, 2.0]),
        "both nan": np.array([1.0, np.nan]),
        "both inf": np.array([np.inf, 1.0]),
        "shape": np.zeros(3),
        "zeros": np.zeros(3),
        "extra": np.zeros(1),
    }
    b = a | {"near": np.array([1.5, 2.0]), "shape": np.zeros((3, 1)), "late": np.zeros(1)}
    del b["extra"]
    rows = {row.name: row for row in diff(a, b)}
    assert list(rows) == [*a, "late"]
    assert rows["near"].max_abs == 0.5 and rows["near"].mean_rel == pytest.approx(0.5 / 3.5)
    assert rows["near"].non_finite == 0
    for name in ("both nan", "both inf"):
        assert rows[name].max_abs == np.inf and rows[name].non_finite == 1
    assert rows["zeros"].max_abs == 0.0 and rows["zeros"].mean_rel == 0.0
    for name in ("shape", "extra", "late"):
        assert rows[name].max_abs == np.inf and rows[name].note

    lines = format_diff(list(rows.values())).splitlines()
    assert len(lines) == 1 + len(rows)
    ends = {line.index(text) + len(text) for line, text in zip(lines, ["max abs"], strict=False)}
    ends |= {line.index("5.000e-01") + 9 for line in lines if line.startswith("near")}
    assert len(ends) == 1  # numbers end under their heading
    assert "[3] against [3, 1]" in lines[4] and "only in b" in lines[-1]


# ---- first parting ----


def test_first_parting_reports_position_ids_and_margin():
    logits = np.array([[0.0, 1.0, 0.5], [3.0, 1.0, 2.75], [0.0, 0.0, 1.0]], np.float32)
    assert first_parting(logits, [1, 0, 2]) is None
    parting = first_parting(logits, [1, 2, 0])
    assert (parting.position, parting.oracle_id, parting.chosen_id) == (1, 0, 2)
    assert parting.margin == 0.25 and parting.max_abs is None and not parting.near_tie(1.0)
    assert "position 1: id 2 chosen, oracle has 0" in str(parting)

    near, far = logits + np.float32(0.125), logits + np.float32(0.0625)
    assert first_parting(logits, [1, 2, 0], near).near_tie(0.125)
    assert not first_parting(logits, [1, 2, 0], near).near_tie(0.1)
    assert first_parting(logits, [1, 2, 0], far).max_abs == 0.0625
    assert not first_parting(logits, [1, 2, 0], far).near_tie(1.0)


def test_first_parting_and_exact_ties_and_nan():
    logits = np.array([[1.0, 2.0, 2.0]], np.float32)
    assert first_parting(logits, [1]) is None
    parting = first_parting(logits, [2], logits)
    assert (parting.oracle_id, parting.margin, parting.max_abs) == (1, 0.0, 0.0)

    broken = np.array([[np.nan, 2.0, 2.0]], np.float32)
    assert first_parting(logits, [0], broken).max_abs == np.inf
    assert not first_parting(logits, [0], broken).near_tie(np.inf)
    with pytest.raises(ModelError, match="not finite"):
        first_parting(broken, [0])


@pytest.mark.parametrize(
    ("ids", "executor", "message"),
    [
        ([1], None, "1 ids against 2 rows"),
        ([1, 3], None, r"id 3 at position 1 is outside 0\.\.2"),
        ([1, -1], None, "id -1"),
        ([1, 1], np.zeros((2, 4)), "executor logits"),
    ],
)
def test_first_parting_refuses_what_does_not_fit(ids, executor, message):
    logits = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    with pytest.raises(ModelError, match=message):
        first_parting(logits, ids, executor)


def test_first_parting_on_a_wrong_executor():
    """Ids of a model with one wrong matrix: the oracle, forced along them, names the place."""
    model = build(TINY_LLAMA, 0)
    gate, up = (layer_names(TINY_LLAMA, 0)[role] for role in ("gate", "up"))
    wrong = with_tensors(model, **{gate: model.tensors[up], up: model.tensors[gate]})
    ids = greedy(wrong, PROMPT, 8)
    forced = PROMPT + ids[:-1]
    right, other = (step_logits(m, forced)[len(PROMPT) - 1 :] for m in (model, wrong))
    assert first_parting(other, ids) is None
    parting = first_parting(right, ids, other)
    assert (parting.position, parting.oracle_id, parting.chosen_id) == (2, 0, 12)
    assert parting.margin > 0.03 and parting.max_abs > 0.5
    assert not parting.near_tie(0.05)  # far off is no excuse, though margin < 2 max_abs


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
