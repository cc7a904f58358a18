"""The persistent step: a whole token in one kernel (`csrc/persistent.cu`).

Same weights, same state, same buffers; only the hand-offs between its CTAs are its own. It runs on
sm_90 and newer, for shapes that `why_not` has nothing against; the graph is the way for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import native
from .errors import ModelError, StepError
from .load import ModelWeights
from .panels import PanelLinear
from .plan import ArchSpec
from .state import DecodeState

PATIENCE_CYCLES = 4_000_000_000  # about two seconds
LINE = 32  # words between the first entries of the hand-offs: launch, fault, sums ...


@dataclass(frozen=True)
class PersistentStep:
    """What `step` needs beside state and weights; the weights' pointers stay valid with them."""

    state: DecodeState
    weights: ModelWeights
    layers: torch.Tensor  # int64 [n_layers, 7], PersistentLayer of csrc/persistent.h
    tables: torch.Tensor  # uint8, who does what
    words: (
        torch.Tensor
    )  # int32, hand-offs; [0] the launch, [LINE] the place of a hand-off that failed
    patience: int = PATIENCE_CYCLES  # cycles before a hand-off counts as lost

    @property
    def fault(self) -> torch.Tensor:
        """[1] int32, 0 until a hand-off does not come."""
        return self.words[LINE : LINE + 1]


def why_not(spec: ArchSpec, device: str = "cuda") -> str | None:
    """Why the persistent step cannot run this shape on the current device; None if it can."""
    if torch.device(device).type != "cuda":
        return f"the device is {device}, needs cuda"
    return native.cuda("persistent").why_not(_dims(spec)) or None


def prepare(
    state: DecodeState, weights: ModelWeights, patience: int = PATIENCE_CYCLES
) -> PersistentStep:
    """Allocate the hand-offs of one state. Tools that slow kernels down need more `patience`.

    Raises ModelError where the shape does not fit, or the weights are no panels.
    """
    if reason := why_not(state.spec, str(state.logits.device)):
        raise ModelError(f"{state.spec.name}: no persistent step, {reason}")
    if not isinstance(weights.lm_head, PanelLinear):
        raise ModelError("the persistent step needs weights loaded with layout panels")
    layers = [
        [
            layer.qkv.panels.data_ptr(), layer.o.panels.data_ptr(), layer.gate_up.panels.data_ptr(),
            layer.down.panels.data_ptr(),
            0 if layer.qkv_bias is None else layer.qkv_bias.data_ptr(),
            layer.attn_norm.data_ptr(), layer.mlp_norm.data_ptr(),
        ]
        for layer in weights.layers
    ]  # fmt: skip
    device = state.logits.device
    module, dims = native.cuda("persistent"), _dims(state.spec)
    step = PersistentStep(
        state,
        weights,
        torch.tensor(layers, dtype=torch.int64, device=device),
        module.tables(dims).to(device),
        torch.empty(module.hand_off_words(dims), dtype=torch.int32, device=device),
        patience,
    )
    clear(step)
    return step


def clear(step: PersistentStep) -> None:
    """Bring the hand-offs into the state they have before the first launch, once the launches that
    are on their way have ended."""
    step.words.fill_(-1)
    step.words[: 2 * LINE].zero_()


def forward_decode(step: PersistentStep, timeline: torch.Tensor | None = None) -> None:
    """One column: reads `token` and `position`, writes `logits`, the candidates of their argmax and
    the cache. `timeline`, from `timeline_of`, gets cycle counts."""
    _launch(step, timeline, ())


def _launch(step: PersistentStep, timeline: torch.Tensor | None, commit: tuple) -> None:
    live, weights = step.state, step.weights
    c, embed = live.decode, weights.embed
    native.cuda("persistent").step(
        _dims(live.spec), step.layers, step.tables, weights.lm_head.panels, weights.norm,
        embed.panels if isinstance(embed, PanelLinear) else embed,
        c.token, c.position, c.valid_len, live.cos, live.sin, live.kv.k, live.kv.v, live.logits,
        *live.candidates, step.words, live.spec.rms_eps, step.patience, timeline,
        *(commit or (None,) * 4),
    )  # fmt: skip


def timeline_of(step: PersistentStep) -> torch.Tensor:
    """int64 [n_layers + 1, stamps, CTAs] for `forward_decode`: when the first warp of each CTA came
    to each of a layer's stages; the last row holds the start and the end of the head."""
    module, spec = native.cuda("persistent"), step.state.spec
    shape = (spec.n_layers + 1, module.stamps, module.ctas(_dims(spec)))
    return torch.zeros(shape, dtype=torch.int64, device=step.words.device)


def greedy_decode(step: PersistentStep) -> None:
    """One greedy token, as `step.greedy_decode`, in one launch; needs nothing from the host."""
    live = step.state
    _launch(step, None, (live.next_token, live.finished, live.eos_ids, live.history))


def check(step: PersistentStep) -> None:
    """Wait for the launches that are on their way, and raise StepError when a hand-off did not
    come; the step is usable again afterwards."""
    place = int(step.fault)
    if place:
        clear(step)
        raise StepError(
            f"the persistent step gave up waiting (hand-off {place - 1}); the step graph has none"
        )


def _dims(spec: ArchSpec) -> list[int]:
    return [
        spec.n_layers, spec.max_seq, spec.n_kv, spec.head_dim, spec.q_dim, spec.hidden,
        spec.intermediate, spec.vocab,
    ]  # fmt: skip
