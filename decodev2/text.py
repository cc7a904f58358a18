"""Strings into token ids and back: tokenizer, chat template, streaming text. Knows no tensors.

`load_text(folder)` reads an HF folder (`tokenizer.json`, and where present `tokenizer_config.json`,
`special_tokens_map.json`, `chat_template.jinja`) and gives a `Text`. Raw text gets the begin and
end tokens that the tokenizer adds; chat text gets exactly those that its template wrote.

    text = load_text("models/smollm2-135m")
    ids = text.encode_chat([{"role": "user", "content": "Hello"}])
    stream = text.stream()
    for token_id in answer_ids:
        print(stream.push(token_id), end="")
    print(stream.flush())
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from .errors import ModelError, PromptError

REPLACEMENT = "\ufffd"  # what a byte that belongs to no character is shown as
LONGEST_REASON = 300  # characters of a template's or library's own words kept in an error


# ---- reading the folder ----


def load_text(folder: str | Path) -> Text:
    """Tokenizer and chat template of an HF folder.

    Raises ModelError naming the file that is missing or malformed. A folder without a template is
    fine (a base model): only `render_chat` and `encode_chat` then raise PromptError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; an HF model folder is needed")
    path = folder / "tokenizer.json"
    if not path.is_file():
        found = "tokenizer.model alone" if (folder / "tokenizer.model").is_file() else "none"
        raise ModelError(f"{folder}: no tokenizer.json (found {found}); text needs that file")
    source = _read_text(path)
    described = _parse_object(path, source)
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception for any misfit
        raise ModelError(f"{path}: not a tokenizer ({_one_line(error)})") from None
    # Both may be saved in the file from training; either would change a prompt without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    config_path = folder / "tokenizer_config.json"
    config = _read_object(config_path)
    map_path = folder / "special_tokens_map.json"
    named = _named_tokens(map_path, _read_object(map_path)) | _named_tokens(config_path, config)
    _mark_special(tokenizer, named.values())
    template, template_path = _find_template(folder, config_path, config)
    return Text(tokenizer, described.get("decoder"), template, named, template_path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text ({_one_line(error)})") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None


def _parse_object(path: Path, source: str) -> dict:
    try:
        value = json.loads(source)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({_one_line(error)})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, needs one JSON object")
    return value


def _read_object(path: Path) -> dict:
    """A JSON object from a file that may be absent (then empty)."""
    return _parse_object(path, _read_text(path)) if path.is_file() else {}


def _named_tokens(path: Path, config: dict) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like -> their text; each a string or {"content": string}."""
    named = {}
    for key, value in config.items():
        if not key.endswith("_token") or value is None or isinstance(value, bool):
            continue  # add_bos_token and its kind are switches, not tokens
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[key] = content
        elif key in ("bos_token", "eos_token"):
            raise ModelError(f"{path}: {key} is {value!r}, needs a string or {{content: string}}")
    return named


def _mark_special(tokenizer: Tokenizer, contents) -> None:
    """Mark the named tokens special, so that decoding hides them, as HF does.

    Some `tokenizer.json` files keep them as ordinary entries. A name the vocabulary does not hold
    is left alone: adding it would invent an id that the model has no embedding for.
    """
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    for content in dict.fromkeys(contents):
        if content not in special and tokenizer.token_to_id(content) is not None:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _find_template(folder: Path, config_path: Path, config: dict) -> tuple[str | None, Path]:
    """Template text (None: there is none) and the file it stands in. `chat_template.jinja` wins."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path), path
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value, config_path
    named = isinstance(value, list) and all(
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
        for item in value
    )
    if not named:
        raise ModelError(
            f"{config_path}: chat_template is a {type(value).__name__}, "
            "needs a string or a list of {name, template}"
        )
    templates = {item["name"]: item["template"] for item in value}
    if templates and "default" not in templates:
        raise ModelError(
            f"{config_path}: chat_template has {', '.join(templates)}, needs one named 'default'"
        )
    return templates.get("default"), config_path


def _one_line(reason: object) -> str:
    line = " ".join(str(reason).split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


# ---- chat templates ----


class _GenerationBlock(Extension):
    """`{% generation %}` marks the answer for training; for a prompt its body is plain text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _template_environment() -> ImmutableSandboxedEnvironment:
    """The names and settings that published chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _turns(*roles: str) -> list[dict]:
    return [{"role": role, "content": "text"} for role in roles]


# ---- the tokenizer ----


class Text:
    """Tokenizer and chat template of one model. Made by `load_text`; holds no conversation."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: dict | None,
        template: str | None,
        named_tokens: dict[str, str],
        template_path: Path,
    ):
        self.tokenizer = tokenizer
        self.template = template
        self.named_tokens = named_tokens  # "bos_token" -> "<s>", ...: what a template may write
        self.template_path = template_path
        self.special_ids = frozenset(
            i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        kinds = _decoder_kinds(decoder)
        self._only_byte_level = kinds == ["ByteLevel"]
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds

    @property
    def has_template(self) -> bool:
        return self.template is not None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id the tokenizer can produce; an embedding needs these rows."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    # -- text to ids --

    def encode_raw(self, text: str) -> list[int]:
        """Ids of plain text, with whatever begin and end tokens the tokenizer adds by itself."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation up to where the answer begins.

        The rendered text is encoded with no tokens added: the template wrote those it wants.
        Raises PromptError as `render_chat` does.
        """
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise PromptError(f"prompt is a {type(text).__name__}, needs a string")
        try:
            text.encode("utf-8")
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except UnicodeEncodeError as error:
            # Bytes of a command line that are not UTF-8 arrive as lone surrogates.
            raise PromptError(
                f"prompt has no valid character at position {error.start} "
                f"({text[error.start]!r}); needs text that UTF-8 can hold"
            ) from None
        except Exception as error:  # the library raises bare Exception, e.g. no unknown token
            raise PromptError(f"prompt cannot be encoded ({_one_line(error)})") from None

    # -- chat --

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        return _template_environment().from_string(self.template)

    def render_chat(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """Prompt text of a conversation: a list of {"role": str, "content": str}.

        `add_generation_prompt` ends the text with the header of the coming answer. Raises
        PromptError, one line, when there is no template, when it refuses these messages (with its
        own words), or when it is broken.
        """
        if self.template is None:
            raise PromptError(
                f"{self.template_path.parent}: this model has no chat template (a base model); "
                "use `generate --raw`"
            )
        roles = _check_messages(messages)
        try:
            return self._render(messages, add_generation_prompt)
        except _TemplateRefusal as refusal:
            said = _one_line(refusal) or "no reason given"
            raise PromptError(
                f"{self.template_path}: chat template refused turns {roles}: {said}"
                f"{self._allowed_turns()}"
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise PromptError(
                f"{self.template_path}: chat template is malformed at line {error.lineno} "
                f"({_one_line(error.message)})"
            ) from None
        except Exception as error:  # a template is foreign code: any operation in it may fail
            raise PromptError(
                f"{self.template_path}: chat template failed on turns {roles}: "
                f"{_one_line(error) or type(error).__name__}"
            ) from None

    def _render(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        return self._compiled_template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.named_tokens,
        )

    def _takes(self, *roles: str) -> bool:
        try:
            self._render(_turns(*roles))
        except Exception:  # only whether it renders matters here
            return False
        return True

    def _allowed_turns(self) -> str:
        """What the template takes, found by trying it: refusals often leave that unsaid."""
        if not self._takes("user", "assistant", "user"):
            return ""
        system = "" if self._takes("system", "user") else ", no system turn"
        order = "" if self._takes("user", "user") else " in alternation"
        return f" (it takes user and assistant turns{order}{system})"

    # -- ids to text --

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of a whole sequence. Ids unknown to the tokenizer (padding rows) give no text."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self) -> TextStream:
        """A new stream; its pieces, joined, equal `decode` of all ids pushed."""
        return ByteLevelStream(self) if self._only_byte_level else TextStream(self)

    def _token_to_show(self, token_id: int) -> str | None:
        if token_id in self.special_ids:
            return None
        return self.tokenizer.id_to_token(token_id)


def _decoder_kinds(decoder: dict | None) -> list[str]:
    """Type names in the `decoder` of a tokenizer.json, sequences flattened in order."""
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [kind for part in decoder.get("decoders", []) for kind in _decoder_kinds(part)]
    return [decoder.get("type", "")]


def _check_messages(messages: list[dict]) -> str:
    """The roles, for an error message. Raises PromptError for anything but plain text turns."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise PromptError(f"messages is {messages!r:.80}, needs a list with at least one turn")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            found = type(message).__name__
            raise PromptError(f"message {number} is a {found}, needs a dict of role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "missing"
                raise PromptError(f"message {number}: {key} is {found}, needs a string")
    return ", ".join(message["role"] for message in messages)


# ---- streaming ----


class TextStream:
    """Ids in, text out, for any decoder that works token by token (or on runs of byte tokens).

    Only a window is decoded: the tokens of the last piece (`context`) and those not shown yet. Text
    is held while a later token could still change it:
      * a byte inside a character that is not complete yet;
      * a run of `<0xNN>` byte tokens that is valid so far. The tokenizers library shows each byte
        of a run as U+FFFD if any is bad, so the run is certain when it ends or once it goes bad.
    """

    def __init__(self, text: Text):
        self._text = text
        self._start()

    def _start(self) -> None:
        self._window: list[int] = []
        self._n_context = 0
        self._context_text = ""
        self._cut = b""  # bytes so far of a character that is not complete
        self._run_is_bad = False

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; often empty. Special tokens show nothing."""
        token_id = int(token_id)
        token = self._text._token_to_show(token_id)
        return "" if token is None else self._push_shown(token_id, token)

    def flush(self) -> str:
        """The held tail, once; afterwards the stream is as new."""
        tail = self._certain()
        self._start()
        return tail

    def _push_shown(self, token_id: int, token: str) -> str:
        byte = _fallback_byte(token) if self._text._byte_fallback else None
        if byte is not None and self._run_is_bad:
            return REPLACEMENT
        self._window.append(token_id)
        if byte is not None:
            if self._continues_run(byte):
                return ""
            self._run_is_bad = True
        elif self._text._byte_level:
            self._cut = _cut_tail(self._cut + _level_bytes(token))
            if self._cut:
                return ""
        else:
            self._run_is_bad, self._cut = False, b""
        return self._certain()

    def _continues_run(self, byte: bytes) -> bool:
        """Whether a run of byte tokens, with this one, is still valid UTF-8 or the start of it."""
        data = self._cut + byte
        self._cut = _cut_tail(data)
        return self._cut == data or _is_utf8(data)

    def _certain(self) -> str:
        """Text of the window beyond the context; the tokens it came from become the context."""
        pending = self._window[self._n_context :]
        if not pending:
            return ""
        decode = self._text.tokenizer.decode
        window_text = decode(self._window, skip_special_tokens=False)
        piece = window_text[len(self._context_text) :]
        # Decoders may strip a space from the first text they see. A context that shows something
        # has that behind it; one that shows nothing does not, and has to keep its predecessor.
        pending_text = decode(pending, skip_special_tokens=False)
        if pending_text:
            self._window, self._context_text = pending, pending_text
        else:
            self._context_text = window_text
        self._n_context = len(self._window)
        return piece


class ByteLevelStream(TextStream):
    """For a byte-level decoder alone: tokens are bytes, so each goes through one UTF-8 decoder.

    At most three bytes are held, and a bad byte shows as U+FFFD as soon as it is known to be bad.
    """

    def _push_shown(self, token_id: int, token: str) -> str:
        data = self._cut + _level_bytes(token)
        self._cut = _cut_tail(data)
        return data[: len(data) - len(self._cut)].decode("utf-8", "replace")

    def flush(self) -> str:
        """The held tail, once; afterwards the stream is as new."""
        tail = self._cut.decode("utf-8", "replace")
        self._start()
        return tail


_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _fallback_byte(token: str) -> bytes | None:
    match = _FALLBACK.fullmatch(token)
    return bytes.fromhex(match.group(1)) if match else None


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes, in order, for
    the characters from U+0100 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(set(range(256)) - set(table.values()))
    return table | dict(zip(alphabet[len(table) :], others, strict=True))


_BYTE_OF = _byte_of_character()


def _level_bytes(token: str) -> bytes:
    """Bytes of one byte-level token. An added token with a character outside the alphabet (a space,
    a CJK mark) is its own UTF-8."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _cut_tail(data: bytes) -> bytes:
    """The last one to three bytes when they begin a character that is not complete, else none.

    They start with a lead byte, and no character continues over a lead byte: what stands before
    decodes by itself. (Python's incremental decoder would also hold ED A0, a surrogate's start,
    which nothing can complete.)
    """
    for count in range(1, min(3, len(data)) + 1):
        tail = data[-count:]
        if tail[0] < 0x80:
            return b""
        if tail[0] >= 0xC0:
            try:
                tail.decode("utf-8")
            except UnicodeDecodeError as error:
                return tail if error.reason == "unexpected end of data" else b""
            return b""
    return b""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# ---- a conversation ----


class Chat:
    """History of one conversation; only turns that were answered are kept.

    `ask` gives the prompt ids of a new user turn, `answer` keeps that turn and its reply. A turn
    that failed (refused by the template, too long, interrupted) is dropped by the next `ask`.
    """

    def __init__(self, text: Text, system: str | None = None):
        """Raises PromptError when there is no template, or it takes no system turn (if given)."""
        self.text = text
        self.messages: list[dict] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        text.render_chat([*self.messages, *_turns("user")])
        self._asked: dict | None = None

    def ask(self, content: str) -> list[int]:
        """Prompt ids of the history and this user turn, which is not kept yet."""
        self._asked = None
        turn = {"role": "user", "content": content}
        ids = self.text.encode_chat([*self.messages, turn])
        self._asked = turn
        return ids

    def answer(self, reply: str) -> None:
        """Keep the turn of the last `ask` and this reply. Raises PromptError when none is open."""
        if self._asked is None:
            raise PromptError("no user turn is open; `ask` comes before `answer`")
        if not isinstance(reply, str):
            raise PromptError(f"reply is a {type(reply).__name__}, needs a string")
        self.messages += [self._asked, {"role": "assistant", "content": reply}]
        self._asked = None

    def clear(self) -> None:
        """Forget all turns but the system turn."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self._asked = None
