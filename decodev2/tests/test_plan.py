"""Shapes, tensor names, and what a config.json may and may not say."""

from __future__ import annotations

import pytest

from decodev2 import plan
from decodev2.errors import ModelError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def spec(**changes) -> plan.ArchSpec:
    config = {k: v for k, v in (LLAMA | changes).items() if v != "absent"}
    return plan.spec_from_config(config)


def test_frozen_shapes_keep_the_contract():
    for tiny in (plan.TINY_LLAMA, plan.TINY_INTERNLM, plan.MEDIUM_LLAMA):
        assert tiny.hidden == tiny.q_dim and tiny.n_q % tiny.n_kv == 0
        assert tiny.hidden % plan.GROUP == 0 and tiny.intermediate % plan.GROUP == 0
    named = {s.name for s in plan.REAL_SHAPES.values()}
    assert {"qwen2.5-3b", "qwen2.5-32b", "internlm2.5-20b", "smollm2-135m"} <= named


@pytest.mark.parametrize("name", [*plan.REAL_SHAPES, "tiny-llama", "tiny-internlm"])
def test_every_tensor_of_a_named_shape_has_a_shape(name):
    shapes = plan.tensor_shapes(plan.named_spec(name))
    assert all(dims and all(n >= 1 for n in dims) for dims in shapes.values())


def test_weights_of_the_real_shapes_add_up():
    """Parameters in billions as published (embedding counted once when tied)."""
    published = {"qwen2.5-0.5b": 0.494, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616,
                 "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76, "internlm2.5-20b": 19.86}  # fmt: skip
    for name, billions in published.items():
        total = 0
        for dims in plan.tensor_shapes(plan.named_spec(name)).values():
            count = 1
            for n in dims:
                count *= n
            total += count
        assert total / 1e9 == pytest.approx(billions, rel=0.005), name


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"head_dim": 80}, "80"),
        ({"head_dim": 64.0}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 130}, "hidden_size"),
        ({"hidden_size": "128"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_scaling": [8]}, "rope_scaling"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, word):
    with pytest.raises(ModelError) as caught:
        spec(**changes)
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_head_dim():
    assert spec(head_dim=64).q_dim == 256  # wins over hidden / heads
    assert spec(head_dim=None).head_dim == 32
    assert spec().head_dim == 32


def test_rope_in_both_spellings():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    old = spec(rope_theta=5e5, rope_scaling=scaling)
    new = spec(rope_parameters={"rope_theta": 5e5, **scaling})
    assert old == new and old.rope_scaling == plan.RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    linear = spec(rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope_scaling == plan.RopeScaling("linear", 2.0)
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def test_end_tokens_come_from_both_files():
    config = LLAMA | {"eos_token_id": 3}
    assert plan.spec_from_config(config, {"eos_token_id": [7, 3]}).eos_ids == (7, 3)
    assert plan.spec_from_config(config).eos_ids == (3,)
    assert plan.spec_from_config(LLAMA).eos_ids == ()


def test_max_seq_is_bounded_by_the_model():
    assert spec().max_seq == 64
    assert plan.spec_from_config(LLAMA, max_seq=16).max_seq == 16
    for bad in (0, -1, 65):
        with pytest.raises(ModelError, match=str(bad)):
            plan.spec_from_config(LLAMA, max_seq=bad)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
