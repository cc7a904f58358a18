"""What a model is: shapes, tensor names and the few hyper-parameters the step needs.

`ArchSpec` is the frozen description that everything else reads: the oracle, the packer, the arena
and the step. It comes from one of the tables below or from an HF `config.json`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ModelError

GROUP = 64  # columns that share one NF4 scale
HEAD_DIMS = (16, 32, 64, 128)  # attention kernels exist for these
DEFAULT_MAX_SEQ = 2048
LIVE_MAX_N = 32  # prompt columns per prefill chunk
# The same on CUDA. A pass launches as much from Python whatever its width, and looks a weight up
# once for more columns if it is wide: on an H200 512 tokens of qwen2.5-3b take 54.6 ms in chunks of
# 32 and 32.7 in chunks of 256, and 48 tokens (one pass instead of two) 6.2 and 4.1.
CUDA_MAX_N = 256

# HF model_type -> family
FAMILIES = {
    "llama": "llama_swiglu",
    "mistral": "llama_swiglu",
    "qwen2": "llama_swiglu",
    "internlm2": "internlm_gqa",
}


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of the rotary table: `linear` (factor only) or `llama3` (three bands)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


@dataclass(frozen=True)
class ArchSpec:
    """Shapes and constants of one decoder. Sizes count elements; `eos_ids` may be empty."""

    name: str
    family: str
    n_layers: int
    hidden: int
    n_q: int
    n_kv: int
    head_dim: int
    intermediate: int
    vocab: int
    max_seq: int
    rms_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    tied: bool = False
    eos_ids: tuple[int, ...] = ()
    model_type: str = "llama"

    @property
    def q_dim(self) -> int:
        return self.n_q * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv * self.head_dim


# ---- frozen correctness shapes (section 2 of the contract) and the timing toy ----

TINY_LLAMA = ArchSpec("tiny-llama", "llama_swiglu", 2, 64, 4, 2, 16, 128, 32, 16)
TINY_INTERNLM = ArchSpec(
    "tiny-internlm", "internlm_gqa", 2, 64, 4, 2, 16, 128, 32, 16, model_type="internlm2"
)
MEDIUM_LLAMA = ArchSpec("medium-llama", "llama_swiglu", 4, 512, 8, 2, 64, 1024, 128, 32)


# ---- real shapes, from the published config.json of each model ----


def _qwen25(name, layers, hidden, n_q, n_kv, head_dim, intermediate, vocab, tied):
    return ArchSpec(
        name, "llama_swiglu", layers, hidden, n_q, n_kv, head_dim, intermediate, vocab,
        DEFAULT_MAX_SEQ, rms_eps=1e-6, rope_theta=1e6, qkv_bias=True, tied=tied,
        eos_ids=(151645, 151643), model_type="qwen2",
    )  # fmt: skip


REAL_SHAPES = {
    spec.name: spec
    for spec in (
        ArchSpec("smollm2-135m", "llama_swiglu", 30, 576, 9, 3, 64, 1536, 49152, DEFAULT_MAX_SEQ,
                 rms_eps=1e-5, rope_theta=1e5, tied=True, eos_ids=(2,)),
        _qwen25("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, True),
        _qwen25("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, True),
        _qwen25("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, True),
        _qwen25("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, False),
        _qwen25("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, False),
        _qwen25("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, False),
        ArchSpec("internlm2.5-20b", "internlm_gqa", 48, 6144, 48, 8, 128, 16384, 92544,
                 DEFAULT_MAX_SEQ, rms_eps=1e-5, rope_theta=5e7, eos_ids=(2, 92542),
                 model_type="internlm2"),
    )
}  # fmt: skip


def named_spec(name: str) -> ArchSpec:
    """Look up a frozen or real shape by name, e.g. `tiny-llama` or `qwen2.5-3b`."""
    table = {s.name: s for s in (TINY_LLAMA, TINY_INTERNLM, MEDIUM_LLAMA)} | REAL_SHAPES
    if name not in table:
        raise ModelError(f"shape {name!r} is unknown; known shapes: {', '.join(table)}")
    return table[name]


# ---- tensor names: HF names without the trailing `.weight` (CHR0's rule) ----

_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_INTERNLM_NAMES = {
    "attn_norm": "attention_norm",
    "wqkv": "attention.wqkv",
    "o": "attention.wo",
    "mlp_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}


def layer_names(spec: ArchSpec, layer: int) -> dict[str, str]:
    """Role -> tensor name for one layer. Roles: attn_norm, q, k, v (or wqkv), o, mlp_norm, gate,
    up, down and, with bias, q_bias, k_bias, v_bias."""
    table = _LLAMA_NAMES if spec.family == "llama_swiglu" else _INTERNLM_NAMES
    names = {role: f"model.layers.{layer}.{suffix}" for role, suffix in table.items()}
    if spec.qkv_bias:
        names |= {f"{role}_bias": f"{names[role]}.bias" for role in "qkv"}
    return names


def top_names(spec: ArchSpec) -> dict[str, str]:
    """Role -> tensor name outside the layers: embed, norm and, unless tied, lm_head."""
    if spec.family == "llama_swiglu":
        names = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
    else:
        names = {"embed": "model.tok_embeddings", "norm": "model.norm", "lm_head": "output"}
    if spec.tied:
        del names["lm_head"]
    return names


def tensor_shapes(spec: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the model must have, by name, with its logical shape ([rows, columns] or
    [n])."""
    by_role = {
        "attn_norm": (spec.hidden,),
        "q": (spec.q_dim, spec.hidden),
        "k": (spec.kv_dim, spec.hidden),
        "v": (spec.kv_dim, spec.hidden),
        "wqkv": (spec.q_dim + 2 * spec.kv_dim, spec.hidden),
        "q_bias": (spec.q_dim,),
        "k_bias": (spec.kv_dim,),
        "v_bias": (spec.kv_dim,),
        "o": (spec.hidden, spec.q_dim),
        "mlp_norm": (spec.hidden,),
        "gate": (spec.intermediate, spec.hidden),
        "up": (spec.intermediate, spec.hidden),
        "down": (spec.hidden, spec.intermediate),
        "embed": (spec.vocab, spec.hidden),
        "norm": (spec.hidden,),
        "lm_head": (spec.vocab, spec.hidden),
    }
    shapes = {name: by_role[role] for role, name in top_names(spec).items()}
    for layer in range(spec.n_layers):
        shapes |= {name: by_role[role] for role, name in layer_names(spec, layer).items()}
    return shapes


# ---- from an HF folder ----


def _read_json(path: Path, required: bool) -> dict:
    if not path.is_file():
        if required:
            raise ModelError(f"{path.parent}: no {path.name}; an HF model folder is needed")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, needs one JSON object")
    return value


def spec_from_folder(folder: str | Path, max_seq: int | None = None) -> ArchSpec:
    """Read `config.json` (and `generation_config.json` for end tokens) of an HF folder.

    `max_seq` is the static capacity of the KV cache; left out, it is the smaller of 2048 and the
    model's own limit. Raises ModelError for anything that is not implemented, by its name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; an HF model folder is needed")
    config = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    return spec_from_config(config, generation, max_seq=max_seq, name=folder.name)


def spec_from_config(
    config: dict, generation: dict | None = None, max_seq: int | None = None, name: str = "model"
) -> ArchSpec:
    """ArchSpec of a parsed HF config. See `spec_from_folder`."""
    model_type = config.get("model_type", "unknown")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"model_type {model_type!r} is not implemented; needs one of {', '.join(FAMILIES)}"
        )
    _refuse_unimplemented(config, model_type)

    hidden = _positive_int(config, "hidden_size")
    n_q = _positive_int(config, "num_attention_heads")
    n_kv = _positive_int(config, "num_key_value_heads", default=n_q)
    if n_q % n_kv:
        raise ModelError(
            f"num_attention_heads {n_q} is not a multiple of num_key_value_heads {n_kv}"
        )
    if config.get("head_dim") is None and hidden % n_q:
        raise ModelError(f"hidden_size {hidden} does not divide by num_attention_heads {n_q}")
    head_dim = _positive_int(config, "head_dim", default=hidden // n_q)
    if head_dim not in HEAD_DIMS:
        raise ModelError(f"head_dim {head_dim} has no attention kernel; needs one of {HEAD_DIMS}")

    limit = _positive_int(config, "max_position_embeddings", default=DEFAULT_MAX_SEQ)
    if max_seq is None:
        max_seq = min(DEFAULT_MAX_SEQ, limit)
    if not 1 <= max_seq <= limit:
        raise ModelError(f"max_seq {max_seq} is outside this model's 1..{limit}")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ModelError(f"config.json: tie_word_embeddings is {tied!r}, needs true or false")

    theta, scaling = _rope_from_config(config)
    return ArchSpec(
        name=name,
        family=FAMILIES[model_type],
        n_layers=_positive_int(config, "num_hidden_layers"),
        hidden=hidden,
        n_q=n_q,
        n_kv=n_kv,
        head_dim=head_dim,
        intermediate=_positive_int(config, "intermediate_size"),
        vocab=_positive_int(config, "vocab_size"),
        max_seq=max_seq,
        rms_eps=_positive_float(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=model_type == "qwen2",
        tied=tied,
        eos_ids=tuple(dict.fromkeys(_eos_ids(generation or {}) + _eos_ids(config))),
        model_type=model_type,
    )


def _positive_int(config: dict, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, needs a positive integer")
    return value


def _positive_float(table: dict, key: str, default: float | None = None) -> float:
    value = table.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} is {value!r}, needs a positive number")
    return float(value)


def _refuse_unimplemented(config: dict, model_type: str) -> None:
    """Refuse every switch that would change the arithmetic, by its name."""
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {act!r} is not implemented; needs 'silu'")
    for key in ("attention_bias", "mlp_bias", "bias"):
        if config.get(key):
            raise ModelError(
                f"{key}={config[key]!r} is not implemented for {model_type}; needs false"
            )
    if model_type == "mistral" and config.get("sliding_window"):
        raise ModelError(
            f"sliding_window {config['sliding_window']} is not implemented; needs null"
        )
    if model_type == "qwen2" and config.get("use_sliding_window"):
        raise ModelError("use_sliding_window=true is not implemented; needs false")
    if config.get("quantization_config"):
        raise ModelError("quantization_config present: packing needs an unquantised checkpoint")
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise ModelError(f"layer_types {kind!r} is not implemented; needs 'full_attention'")


def _rope_from_config(config: dict) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from the newer nested `rope_parameters` or the older top-level keys."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"config.json: {key} is {value!r}, needs an object or null")
        for inner in (value or {}).values():
            if isinstance(inner, dict):
                raise ModelError(f"{key} that differs between layers is not implemented")
    nested = config.get("rope_parameters") or {}
    raw = nested or config.get("rope_scaling") or {}
    for table in (config, raw):
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("partial_rotary_factor other than 1.0 is not implemented")
    theta = _positive_float(nested if "rope_theta" in nested else config, "rope_theta", 1e4)
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind in (None, "default"):
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"rope scaling {kind!r} is not implemented; needs 'linear' or 'llama3'")
    factor = _positive_float(raw, "factor")
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    return theta, RopeScaling(
        "llama3",
        factor,
        _positive_float(raw, "low_freq_factor"),
        _positive_float(raw, "high_freq_factor"),
        _positive_int(raw, "original_max_position_embeddings"),
    )


def _eos_ids(config: dict) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"eos_token_id is {value!r}, needs an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


_LAYER_PATTERN = re.compile(r"(?:^|\.)layers\.([0-9]+)(?:\.|$)")


def layer_of(name: str) -> int | None:
    """Layer number in a tensor name (`...layers.<n>...`), or None."""
    match = _LAYER_PATTERN.search(name)
    return int(match.group(1)) if match else None


def chunk_on(device: str) -> int:
    """Prompt columns per prefill chunk on a kind of device ("cpu", "cuda"), unless a caller says
    otherwise."""
    return LIVE_MAX_N if device == "cpu" else CUDA_MAX_N


def with_max_seq(spec: ArchSpec, max_seq: int) -> ArchSpec:
    """The same model with another static KV capacity."""
    return replace(spec, max_seq=max_seq)
