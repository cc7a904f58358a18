"""The `decodev2` command. Parses, calls one function of the package, prints; errors are one line,
exit 2."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from . import __version__
from .errors import BuildError, DecodeError

EPILOG = """\
examples:
  decodev2 doctor
  decodev2 fetch smollm2-135m -o models
  decodev2 pack models/smollm2-135m -o models/smollm2-135m.chr
  decodev2 verify models/smollm2-135m.chr --against models/smollm2-135m
  decodev2 generate --model models/smollm2-135m --prompt "What is the capital of France?"
  decodev2 run cpu_decode
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0 when done, 1 when a check failed, 2 for an error, 130 on Ctrl-C,
    141 when the reader of standard output is gone."""
    args = _parser().parse_args(argv)
    try:
        status = args.command(args) or 0
        sys.stdout.flush()  # a full disk must be reported here: at exit it is too late
        return status
    except (DecodeError, BuildError) as error:
        print(f"decodev2: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in `decodev2 list | head -1`
        _discard_stdout()
        return 141
    except OSError as error:
        _discard_stdout()
        where = f"{error.filename}: " if error.filename else ""
        print(f"decodev2: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("decodev2: interrupted", file=sys.stderr)
        return 130


def _discard_stdout() -> None:
    """What stdout still holds after an error of its own would fail again at exit, loudly."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):  # a stand-in has no file number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- commands ----


def _doctor(args) -> int:
    from .doctor import checks

    rows = checks()
    if args.json:
        print(json.dumps([vars(row) for row in rows], indent=1))
    else:
        print("\n".join(map(str, rows)))
    return 1 if any(row.state == "missing" for row in rows) else 0


def _fetch(args) -> None:
    from .fetch import fetch

    folder = fetch(args.name, args.out, progress=not args.quiet)
    print(json.dumps({"folder": str(folder)}) if args.json else folder)


def _pack(args) -> None:
    from .pack import pack

    out = (
        Path(args.out) if args.out else Path(args.folder).with_name(Path(args.folder).name + ".chr")
    )
    report = pack(args.folder, out, progress=not args.quiet)
    if args.json:
        fields = ("tensors", "source_bytes", "file_bytes", "weights", "seconds")
        print(json.dumps({"path": str(report.path)} | {f: getattr(report, f) for f in fields}))
        return
    for name, why in report.skipped.items():
        print(f"left out {name}: {why}")
    bits = 8 * report.file_bytes / report.weights
    print(
        f"{report.path}: {report.tensors} tensors, {report.file_bytes / 1e6:.1f} MB "
        f"({bits:.2f} bits per weight), {report.seconds:.1f} s"
    )


def _verify(args) -> int:
    from .pack import verify

    rows = verify(args.chr, args.against, progress=not args.quiet and not args.json)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(_verify_line(row))
        if not all(row["checked"] for row in rows):
            print("no side-car: checksums were not verified")
    faults = [row for row in rows if row["fault"]]
    for row in faults:
        print(f"decodev2: {row['fault']}", file=sys.stderr)
    return 1 if faults else 0


def _verify_line(row: dict) -> str:
    shape = "x".join(map(str, row["shape"]))
    line = (
        f"{row['name']:46s} {row['kind']:8s} {row['codec']:5s} {shape:>13s} "
        f"{row['bytes_per_weight']:6.4f} B/weight {row['bytes']:>10d} B"
    )
    if row.get("rmse") is not None:
        line += f"  rmse {row['rmse']:.3e}  max {row['max_abs']:.3e}"
    return f"{line}  FAULT" if row["fault"] else line


def _open(args):
    from .session import open_session

    return open_session(
        args.model, args.chr, args.executor, args.device, args.max_seq, step=args.step
    )


def _generate(args) -> None:
    from .session import answer

    _set_threads(args.threads)
    if args.max_new_tokens < 1:
        raise DecodeError(f"--max-new-tokens is {args.max_new_tokens}, needs at least 1")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    session = _open(args)
    prompt_ids = session.encode(prompt, args.raw)
    write = None if args.json else _write
    text, result = answer(session, prompt_ids, args.max_new_tokens, args.ignore_eos, write)
    rate = result.decode_tok_s
    if args.json:
        print(
            json.dumps(
                {
                    "ids": result.ids,
                    "text": text,
                    "stop_reason": result.stop_reason,
                    "prompt_len": result.prompt_len,
                    "executor": session.executor,
                    "device": session.device,
                    "load_s": session.load_s,
                    "warmup_s": session.warmup_s,
                    "prefill_s": result.prefill_s,
                    "decode_s": result.decode_s,
                    "decode_tok_s": rate,
                }
            )
        )
        return
    print(flush=True)
    speed = f"{rate:.1f} tok/s" if rate else "one token"
    print(
        f"[{session.executor} on {session.device}: load {session.load_s:.2f} s, "
        f"warm-up {session.warmup_s * 1e3:.0f} ms, prompt {result.prompt_len} tokens in "
        f"{result.prefill_s * 1e3:.0f} ms, {len(result.ids)} new tokens at {speed}; "
        f"{result.stop_reason}]",
        file=sys.stderr,
    )


def _chat(args) -> None:
    from .session import answer
    from .text import Chat

    _set_threads(args.threads)
    session = _open(args)
    chat = Chat(session.text, args.system)
    print("One line is one turn; an empty line or Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            line = ""
        if not line:
            return
        try:
            text, _ = answer(session, chat.ask(line), args.max_new_tokens, write=_write)
            chat.answer(text)
        except DecodeError as error:  # the turn is dropped, the chat goes on
            print(f"decodev2: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(turn dropped)", file=sys.stderr)
        print(flush=True)


def _run(args) -> int:
    from . import lab

    if bool(args.name) == args.all:
        raise DecodeError("run needs the name of an experiment, or --all; `decodev2 list` has them")
    if args.stale and not args.all:
        raise DecodeError("--stale goes with --all")
    _set_threads(args.threads)
    if args.all:
        return lab.run_all_command(args.param, args.runs, as_json=args.json, stale=args.stale)
    return lab.run_command(args.name, args.param, args.runs, as_json=args.json)


def _gates(args) -> int:
    from . import lab

    _set_threads(args.threads)
    return lab.gates_command(args.device, args.runs, as_json=args.json)


def _list(args) -> None:
    from . import lab

    lab.list_command(args.runs, as_json=args.json)


def _draw(args) -> None:
    from . import lab

    lab.draw_command(args.paths or [args.runs], as_json=args.json)


def _lint(args) -> int:
    from . import lab

    return lab.lint_command(args.paths or [args.runs], as_json=args.json)


def _notebooks(args) -> int:
    from .lab import notebooks

    if args.param or args.output:
        if not args.output or len(args.paths) != 1 or args.remake or args.check:
            raise DecodeError("a run with parameters needs one page and -o FILE")
        return notebooks.run_command(args.paths[0], args.param, args.output, args.folder)
    return notebooks.notebooks_command(
        args.paths, args.folder, args.remake, args.check, as_json=args.json
    )


def _regress(args) -> int:
    from .lab import notebooks

    return notebooks.regress_command(
        args.names, args.mode, args.runs, tuple(args.bound), args.folder, as_json=args.json
    )


def _readme(args) -> int:
    from .lab import readme

    return readme.readme_command(args.path, args.runs, args.check, as_json=args.json)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise DecodeError(f"--threads is {threads}, needs at least 1")
    import torch

    torch.set_num_threads(threads)


# ---- the parser ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="decodev2",
        description="Greedy batch-1 LLM decoding with packed NF4 weights, and the lab around it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"decodev2 {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function, text: str, json_help: str = "one JSON value on stdout"):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        sub.add_argument("--json", action="store_true", help=json_help)
        return sub

    command(
        "doctor", _doctor, "Check compilers, devices and optional parts, with the fix for each."
    )

    sub = command(
        "fetch", _fetch, "Make an HF model folder from a known name, a hub id or a GGUF file."
    )
    sub.add_argument("name", help="smollm2-135m, qwen2.5-coder-0.5b, org/name, or FILE.gguf")
    sub.add_argument("-o", "--out", default="models", help="folder to put it in (default: models)")
    sub.add_argument("-q", "--quiet", action="store_true", help="no progress")

    sub = command(
        "pack", _pack, "Pack an HF model folder into one .chr file (NF4, 4.25 bits per weight)."
    )
    sub.add_argument("folder", help="HF folder: config.json and safetensors")
    sub.add_argument("-o", "--out", help="the .chr to write (default: FOLDER.chr)")
    sub.add_argument("-q", "--quiet", action="store_true", help="no progress")

    sub = command(
        "verify", _verify, "Read a whole .chr back: shapes, bytes per weight, checksums, errors."
    )
    sub.add_argument("chr", help="the .chr file")
    sub.add_argument(
        "--against", metavar="FOLDER", help="HF folder to compare with: rmse per tensor"
    )
    sub.add_argument("-q", "--quiet", action="store_true", help="no progress")

    sub = command(
        "generate", _generate, "Answer one prompt; text streams to stdout, times go to stderr.",
        "one JSON object and nothing else on stdout: ids, text, stop_reason, prompt_len, times",
    )  # fmt: skip
    _model_arguments(sub)
    sub.add_argument("--prompt", required=True, help="the text, or - to read it from stdin")
    sub.add_argument("--ignore-eos", action="store_true", help="go on past end tokens")
    sub.add_argument("--raw", action="store_true", help="plain text, no chat template")

    sub = commands.add_parser("chat", help="Talk to a model in the terminal.")
    sub.set_defaults(command=_chat)
    _model_arguments(sub)
    sub.add_argument("--system", help="system turn, where the template has one")

    sub = command(
        "run", _run, "Run an experiment and record it as a plate (JSON and PNG) in runs/."
    )
    sub.add_argument("name", nargs="?", help="an experiment; `decodev2 list` names them")
    sub.add_argument("--all", action="store_true", help="every experiment this machine can run")
    sub.add_argument(
        "--stale", action="store_true", help="with --all: only plates made by other kernels"
    )
    sub.add_argument(
        "-p", "--param", action="append", default=[], metavar="KEY=VALUE", help="repeatable"
    )
    sub.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    _runs_argument(sub)
    sub = command(
        "gates",
        _gates,
        "Check every executor against the oracle and record the plate; 1 on failure.",
    )
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    sub.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    _runs_argument(sub)
    _runs_argument(
        command("list", _list, "List experiments, their parameters and recorded plates.")
    )
    for name, function, text in (
        ("draw", _draw, "Draw plates again: the PNG is a pure function of the JSON."),
        (
            "lint",
            _lint,
            "Check plates: schema, units, hashes, rates below the card's ceiling, fresh PNG.",
        ),
    ):
        sub = command(name, function, text)
        sub.add_argument("paths", nargs="*", help="plates or folders (default: all in runs/)")
        _runs_argument(sub)

    sub = command(
        "notebooks",
        _notebooks,
        "List the pages of the workbook; remake them, check their form, or run one with parameters "
        "(-p MODE=measure -o FILE).",
    )
    sub.add_argument("paths", nargs="*", help="pages by path, name or number (default: all)")
    sub.add_argument("--remake", action="store_true", help="run afresh, write back, then check")
    sub.add_argument("--check", action="store_true", help="print what is wrong; 1 if anything is")
    sub.add_argument(
        "-p", "--param", action="append", default=[], metavar="KEY=VALUE",
        help="run one page with a parameter of its own; repeatable",
    )  # fmt: skip
    sub.add_argument("-o", "--output", metavar="FILE", help="where that run is written")
    sub.add_argument("--folder", default="notebooks", help="folder of pages (default: notebooks)")

    sub = command(
        "regress",
        _regress,
        "Run pages on this machine; facts must be as committed, times near the recorded ones.",
    )
    sub.add_argument("names", nargs="*", help="pages by path, name or number (default: all)")
    sub.add_argument("--mode", default="measure", choices=("measure", "replay"))
    sub.add_argument(
        "--bound", nargs=2, type=float, default=(0.7, 1.4), metavar=("LOW", "HIGH"),
        help="of a time over the recorded one (default: 0.7 1.4)",
    )  # fmt: skip
    sub.add_argument("--folder", default="notebooks", help="folder of pages (default: notebooks)")
    _runs_argument(sub)

    sub = command(
        "readme", _readme, "Write the tables of README.md that plates and pages make; 1 if not so."
    )
    sub.add_argument("path", nargs="?", default="README.md", help="default: README.md")
    sub.add_argument("--check", action="store_true", help="write nothing, print what is wrong")
    _runs_argument(sub)
    return parser


def _model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model", required=True, metavar="FOLDER", help="HF folder: config and tokenizer"
    )
    sub.add_argument("--chr", metavar="FILE", help="packed weights (default: FOLDER.chr)")
    sub.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default 256")
    sub.add_argument(
        "--max-seq", type=int, metavar="N", help="KV capacity (default: 2048 or the model's limit)"
    )
    sub.add_argument(
        "--executor", default="auto", choices=("auto", "decodev2", "tokenloop", "oracle"),
        help="auto picks decodev2; tokenloop is the plain baseline, oracle the float32 reference",
    )  # fmt: skip
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    sub.add_argument(
        "--step", default="auto", choices=("auto", "graph", "persistent"),
        help="on CUDA: a graph of the step's kernels, or one kernel for the whole token; "
        "auto takes the latter where it can",
    )  # fmt: skip
    sub.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")


def _runs_argument(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--runs", default="runs", help="folder of plates (default: runs)")
