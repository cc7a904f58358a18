"""A model ready to answer: folder, packed weights, tokenizer, and one of three executors.

`text` turns strings into ids and back, the executors know only ids; a Session joins the two.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import native, oracle, persistent, runner, toggles, tokenloop
from .errors import BuildError, DecodeError, ModelError
from .graph import ChunkGraph, DecodeGraph, capture_or_none, capture_step, full_chunk
from .load import ChrModel, ModelWeights, load_weights, open_model
from .plan import ArchSpec
from .runner import OnToken, Result
from .state import DecodeState, allocate_state
from .text import Text, load_text

EXECUTORS = ("auto", "decodev2", "tokenloop", "oracle")
# on CUDA: a graph of the step's kernels, or one kernel for a token; auto: that where it can run
STEPS = ("auto", "graph", "persistent")
STEPS_PER_READ = 8  # graph replays per host read, as many again on their way meanwhile


@dataclass
class Session:
    """One loaded model. Make it with `open_session`; `generate` may be called any number of
    times."""

    spec: ArchSpec
    text: Text
    executor: str
    device: str
    model: ChrModel
    weights: ModelWeights | None  # None for the oracle, which reads the file itself
    state: DecodeState | None  # Decode V2 only
    load_s: float
    warmup_s: float
    graph: DecodeGraph | None = None  # CUDA: the captured step
    full: ChunkGraph | None = None  # CUDA: a full chunk of a prompt, captured when it comes again
    persistent: persistent.PersistentStep | None = None  # what it captured, if it is this one

    @property
    def packed_bytes(self) -> int:
        """Packed bytes one decode step reads."""
        return self.weights.bytes_per_token if self.weights else 0

    def encode(self, prompt: str, raw: bool = False) -> list[int]:
        """Prompt ids: through the chat template as one user turn, or the plain text with `raw`."""
        if raw:
            return self.text.encode_raw(prompt)
        return self.text.encode_chat([{"role": "user", "content": prompt}])

    def generate(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        ignore_eos: bool = False,
        on_token: OnToken | None = None,
    ) -> Result:
        """Greedy ids after `prompt_ids`; see `runner.Result`. Raises PromptError before any
        work."""
        eos_ids = () if ignore_eos else self.spec.eos_ids
        if self.executor == "decodev2":
            return self._decode(prompt_ids, max_new_tokens, eos_ids, on_token)
        if self.executor == "tokenloop":
            return tokenloop.generate(self.weights, prompt_ids, max_new_tokens, eos_ids, on_token)
        return _oracle_generate(self.model, prompt_ids, max_new_tokens, eos_ids, on_token)

    def _decode(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        eos_ids: tuple[int, ...],
        on_token: OnToken | None,
    ) -> Result:
        one = self.persistent
        try:
            return runner.generate(
                self.state,
                self.weights,
                prompt_ids,
                max_new_tokens,
                eos_ids,
                on_token,
                step=self.graph.replay if self.graph else None,
                steps_per_read=STEPS_PER_READ if self.graph else 1,
                full=self.full,
                watch=(one.fault, functools.partial(persistent.check, one)) if one else None,
            )
        except BaseException:
            # Steps may be on their way still, and one that failed leaves hand-offs of two layers.
            if one:
                persistent.clear(one)
            raise

    def close(self) -> None:
        self.model.tensors.close()


def open_session(
    folder: str | Path,
    chr_path: str | Path | None = None,
    executor: str = "auto",
    device: str = "auto",
    max_seq: int | None = None,
    chunk: int | None = None,
    step: str = "graph",
) -> Session:
    """Load a packed model and warm it up. `chr_path` defaults to FOLDER.chr beside the folder.

    `auto` picks Decode V2. `chunk` is prompt columns per pass, left to the device if None. `step`
    persistent takes the graph, with a notice on stderr, where one kernel cannot hold the model;
    auto takes one kernel where it can and no toggle asks for other kernels. Raises a DecodeError
    subclass, in one line, when folder and file do not fit.
    """
    if executor not in EXECUTORS:
        raise DecodeError(f"executor {executor!r} is unknown; needs one of {', '.join(EXECUTORS)}")
    if step not in STEPS:
        raise DecodeError(f"step {step!r} is unknown; needs one of {', '.join(STEPS)}")
    executor = "decodev2" if executor == "auto" else executor
    device = pick_device(device)
    folder = Path(folder)
    chr_path = Path(chr_path) if chr_path else folder.with_name(folder.name + ".chr")

    model = open_model(folder, chr_path, max_seq)
    try:
        return _loaded(model, load_text(folder), executor, device, chunk, step)
    except BaseException:
        model.tensors.close()
        raise


def _loaded(
    model: ChrModel, text: Text, executor: str, device: str, chunk: int | None, step: str
) -> Session:
    weights = state = None
    if executor != "oracle":
        build_kernels(device)  # a first build must not count as loading
    started = time.perf_counter()
    if executor != "oracle":
        by_rows = executor == "decodev2" and device != "cpu" and toggles.current.linear == "rows"
        weights = load_weights(model, device, "rows" if by_rows else "panels")
    if executor == "decodev2":
        state = allocate_state(model.spec, device, 1 if by_rows else chunk)
    loaded = time.perf_counter()
    session = Session(
        model.spec, text, executor, device, model, weights, state, loaded - started, 0.0
    )
    if executor != "oracle":  # first calls pay for page faults, thread start and graph capture
        session.generate([0], 2 if model.spec.max_seq > 1 else 1, ignore_eos=True)
        if state is not None and device != "cpu":
            session.full = full_chunk(state, weights)
            if step == "persistent" or (step == "auto" and _prefers_persistent(model.spec)):
                session.persistent, session.graph = _persistent_or_none(state, weights)
            session.graph = session.graph or capture_or_none(state, weights)
        elif step == "persistent":
            print("decodev2: no persistent step on the CPU; stepping by its ops", file=sys.stderr)
        session.warmup_s = time.perf_counter() - loaded
    return session


def _prefers_persistent(spec: ArchSpec) -> bool:
    """Whether one kernel, the faster one wherever it runs, does what the toggles ask for."""
    return toggles.current == toggles.Toggles(linear="gemv") and not persistent.why_not(spec)


def _persistent_or_none(state: DecodeState, weights: ModelWeights):
    """The persistent step and its graph; (None, None) with a notice where it does not fit, or where
    something else on the card leaves no room for all of its CTAs."""
    try:
        one = persistent.prepare(state, weights)
        return one, capture_step(state, functools.partial(persistent.greedy_decode, one))
    except (ModelError, RuntimeError) as error:
        if isinstance(error, BuildError):
            raise
        reason = str(error).split("\n", 1)[0]
        print(f"decodev2: {reason}; stepping by the graph", file=sys.stderr)
        return None, None


def build_kernels(device: str) -> None:
    """Compile what an executor on `device` needs, unless it is there. Raises BuildError.

    On CUDA one column goes to the GEMV unless $CHR_NF4_DECODE says otherwise.
    """
    if device == "cpu":
        native.cpu()
        return
    native.build_cuda()
    if "CHR_NF4_DECODE" not in os.environ:
        toggles.current.set("linear", "gemv")


def pick_device(device: str) -> str:
    """`auto` is CUDA where a device and nvcc are there, else the CPU. Raises ModelError naming what
    is missing."""
    if device == "cpu":
        return "cpu"
    if device not in ("auto", "cuda"):
        raise ModelError(f"device {device!r} is unknown; needs auto, cpu or cuda")
    missing = None
    if not torch.cuda.is_available():
        missing = "no CUDA device is visible" if torch.version.cuda else "this torch is a CPU build"
    elif torch.cuda.get_device_capability()[0] < 8:
        missing = f"{torch.cuda.get_device_name()} is older than sm_80"
    elif not native.find_nvcc():
        missing = "nvcc was not found"
    if missing is None:
        return "cuda"
    if device == "auto":
        return "cpu"
    raise ModelError(f"device cuda: {missing}; use --device cpu")


def answer(
    session: Session,
    prompt_ids: list[int],
    max_new_tokens: int,
    ignore_eos: bool = False,
    write: Callable[[str], object] | None = None,
) -> tuple[str, Result]:
    """Generate and decode. `write(piece)` gets text as soon as it is certain; end tokens are not
    shown.

    Returns the whole text (the pieces joined) and the Result.
    """
    stream = session.text.stream()
    hidden = () if ignore_eos else session.spec.eos_ids
    pieces: list[str] = []

    def show(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if write:
                write(piece)

    def on_token(token_id: int) -> None:
        if token_id not in hidden:
            show(stream.push(token_id))

    result = session.generate(prompt_ids, max_new_tokens, ignore_eos, on_token)
    show(stream.flush())
    return "".join(pieces), result


def _oracle_generate(
    model: ChrModel,
    prompt_ids: list[int],
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    on_token: OnToken | None,
) -> Result:
    """The float32 reference as an executor: slow, NumPy only, and right by definition."""
    runner.check_prompt(model.spec, prompt_ids, max_new_tokens)
    kv = oracle.KVCache.empty(model.spec)
    fed = 0
    last = 0

    def feed(ids: list[int]) -> int:
        nonlocal fed, last
        logits = oracle.step_logits(model, ids, fed, kv)
        fed += len(ids)
        last = oracle.argmax(logits[-1])
        return last

    return runner.run_loop(
        lambda: feed(prompt_ids),
        lambda: feed([last]),
        model.spec,
        len(prompt_ids),
        max_new_tokens,
        eos_ids,
        on_token,
    )
