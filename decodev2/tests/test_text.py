"""Tokenizer, chat template and streaming text, against the tokenizers library and transformers.

The tokenizers are built here. The last section needs real models: folders under $DECODEV2_MODELS
(default: `models/` at the repository root), skipped with a reason when absent.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from decodev2.errors import DecodeError, ModelError, PromptError
from decodev2.text import Chat, load_text

BAD = "\ufffd"
USER = [{"role": "user", "content": "hi"}]

# ---- tokenizers of several kinds, written as HF folders ----

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_SHIFTED = [b for b in range(256) if b not in _PRINTABLE]


def level(data: bytes) -> str:
    """Bytes in the byte-level alphabet, by the published rule (independent of text.py)."""
    return "".join(chr(b) if b in _PRINTABLE else chr(256 + _SHIFTED.index(b)) for b in data)


def fallback(byte: int) -> str:
    return f"<0x{byte:02X}>"


def add_common(tokenizer: Tokenizer) -> Tokenizer:
    """Special tokens, and ordinary added tokens that byte-level decoding treats in two ways."""
    tokenizer.add_special_tokens(["<s>", "</s>"])
    plain = ["<tool>", "é", "日本", "two words"]
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in plain])
    return tokenizer


def byte_level(decoder=None) -> Tokenizer:
    emoji = "🎉".encode()
    pieces = [b" x", b" world", b"hello", emoji[:3], emoji[1:], emoji[:2], "é!".encode()]
    pieces += [b"\x80\xe6\x97", b"\xa5\xe6", b"\xa5\xff", "日".encode()]  # cut across characters
    tokens = [level(bytes([b])) for b in range(256)] + [level(piece) for piece in pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    return add_common(tokenizer)


LLAMA_DECODER = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def byte_fallback(decoder=None) -> Tokenizer:
    tokens = ["<unk>"] + [fallback(b) for b in range(256)]
    tokens += ["▁", "▁▁", "▁▁▁", "▁a", "▁hello", "a", "b", "é", "日", "▁x▁", "hello", "!", "<0xGG>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoder or decoders.Sequence(LLAMA_DECODER)
    return add_common(tokenizer)


def words(decoder=None) -> Tokenizer:
    tokens = ["<unk>", "hello", "world", "##ing", ",", "n't", "é", "日本", "🎉", ".", "a</w>", "b"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    return add_common(tokenizer)


KINDS = {
    "byte-level": byte_level,
    "byte-level in a sequence": lambda: byte_level(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ),
    "byte-fallback (llama)": byte_fallback,
    "byte-fallback, no strip (gemma)": lambda: byte_fallback(decoders.Sequence(LLAMA_DECODER[:3])),
    "byte-fallback, strip of two": lambda: byte_fallback(
        decoders.Sequence([*LLAMA_DECODER[:3], decoders.Strip(" ", 2, 0)])
    ),
    "byte-fallback and metaspace": lambda: byte_fallback(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    ),
    "metaspace": lambda: byte_fallback(decoders.Metaspace(prepend_scheme="first")),
    "word-level": words,
    "word-piece": lambda: words(decoders.WordPiece(cleanup=True)),
    "bpe suffix": lambda: words(decoders.BPEDecoder("</w>")),
}
BYTE_KINDS = [kind for kind in KINDS if kind.startswith("byte")]


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load_kind(tmp_path: Path, kind: str):
    """(our Text, the library's own tokenizer) of one kind."""
    folder = write_folder(tmp_path, KINDS[kind]())
    return load_text(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids_of(library: Tokenizer, *tokens: str) -> list[int]:
    ids = [library.token_to_id(token) for token in tokens]
    missing = [token for token, i in zip(tokens, ids, strict=True) if i is None]
    if missing:
        raise KeyError(missing)
    return ids


def stream_pieces(text, ids: list[int]) -> list[str]:
    """What each push gave, and the flush last."""
    stream = text.stream()
    return [stream.push(i) for i in ids] + [stream.flush()]


def random_ids(rng: random.Random, size: int, n_ids: int, low: range) -> list[int]:
    """Ids of the whole range and past it, with runs out of `low` (the bytes) far more often."""
    ids = []
    while len(ids) < size:
        if rng.random() < 0.5:
            ids += [rng.choice(low) for _ in range(rng.randint(1, 6))]
        else:
            ids.append(rng.randrange(n_ids + 3))
    return ids[:size]


def byte_range(library: Tokenizer) -> range:
    first = library.token_to_id(fallback(0)) or 0
    return range(first, min(first + 256, library.get_vocab_size()))


# ---- B5: streaming ----


@pytest.mark.parametrize("kind", KINDS)
def test_stream_joins_to_decode_of_random_ids(tmp_path, kind):
    text, library = load_kind(tmp_path, kind)
    rng = random.Random(kind)
    n_ids = library.get_vocab_size()
    for case in range(1500):
        ids = random_ids(rng, rng.randint(0, 24), n_ids, byte_range(library))
        wanted = library.decode(ids, skip_special_tokens=True)
        assert "".join(stream_pieces(text, ids)) == wanted, (case, ids)
        assert text.decode(ids) == wanted


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_stream_of_bytes_near_utf8_borders(tmp_path, kind):
    """Overlong, surrogate, past U+10FFFF and cut sequences: where decoders tend to disagree."""
    text, library = load_kind(tmp_path, kind)
    first = byte_range(library)[0]
    borders = bytes.fromhex("41 7F 80 8F 90 9F A0 BF C0 C2 E0 E2 82 AC ED EF F0 9F F4 F5 FF")
    rng = random.Random(5)
    for _ in range(3000):
        ids = [first + rng.choice(borders) for _ in range(rng.randint(1, 9))]
        ids += ids_of(library, "é")[: rng.randint(0, 1)]
        assert "".join(stream_pieces(text, ids)) == library.decode(ids), ids


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_valid_text_never_shows_a_replacement_mark(tmp_path, kind):
    text, library = load_kind(tmp_path, kind)
    rng = random.Random(7)
    for _ in range(300):
        written = "".join(rng.choice("ab ü日本🎉👩‍💻\n ") for _ in range(rng.randint(1, 20)))
        ids = library.encode(written, add_special_tokens=False).ids
        pieces = stream_pieces(text, ids)
        assert BAD not in "".join(pieces)
        assert "".join(pieces) == library.decode(ids)


@pytest.mark.parametrize(
    "pieces", [(3, 4), (1, 2, 3, 4), (2, 3, 4), (1, 4)], ids=["3+1", "1+1+1+1", "2+1+1", "1+3"]
)
def test_emoji_cut_over_byte_level_tokens(tmp_path, pieces):
    text, library = load_kind(tmp_path, "byte-level")
    emoji = "🎉".encode()
    cuts = zip((0, *pieces), pieces, strict=False)
    ids = ids_of(library, *(level(emoji[start:end]) for start, end in cuts))
    assert stream_pieces(text, ids) == [""] * (len(ids) - 1) + ["🎉", ""]


def test_emoji_over_fallback_bytes_shows_with_the_next_token_or_the_flush(tmp_path):
    text, library = load_kind(tmp_path, "byte-fallback (llama)")
    ids = ids_of(library, *(fallback(b) for b in "🎉".encode()))
    assert stream_pieces(text, ids) == ["", "", "", "", "🎉"]
    spaced = ids + ids_of(library, "▁hello")
    assert stream_pieces(text, spaced) == ["", "", "", "", "🎉 hello", ""]


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_character_cut_by_the_token_limit_is_flushed_once(tmp_path, kind, kept):
    text, library = load_kind(tmp_path, kind)
    first = byte_range(library)[0]
    ids = [first + b for b in "🎉".encode()[:kept]]
    stream = text.stream()
    assert "".join(stream.push(i) for i in ids) == ""
    assert stream.flush() == library.decode(ids) != ""
    assert stream.flush() == ""
    # after the flush the stream is as new: the cut bytes are gone, a first space is a first space
    after = ids_of(library, level(b" x") if kind.startswith("byte-level") else "▁a")
    assert stream.push(after[0]) + stream.flush() == library.decode(after)


@pytest.mark.parametrize("kind", ["byte-level", "byte-level in a sequence"])
def test_emoji_then_token_starting_with_a_space(tmp_path, kind):
    text, library = load_kind(tmp_path, kind)
    emoji = "🎉".encode()
    ids = ids_of(library, level(emoji[:3]), level(emoji[3:]), level(b" x"), level(b" world"))
    assert stream_pieces(text, ids) == ["", "🎉", " x", " world", ""]


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_lone_bad_byte_does_not_stall(tmp_path, kind):
    text, library = load_kind(tmp_path, kind)
    first = byte_range(library)[0]
    space = level(b" x") if kind.startswith("byte-level") else "▁a"
    ids = [first + 0xFF, *ids_of(library, space, "two words")]
    pieces = stream_pieces(text, ids)
    assert pieces[0] == BAD and pieces[-1] == ""
    assert pieces[1] in (" x", " a") and "".join(pieces) == library.decode(ids)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_bad_bytes_show_one_by_one(tmp_path, kind):
    text, library = load_kind(tmp_path, kind)
    first = byte_range(library)[0]
    stream = text.stream()
    assert [stream.push(first + 0xFF) for _ in range(40)] == [BAD] * 40
    # an incomplete character that the next token cuts off
    stream = text.stream()
    ids = [first + 0xE2, first + 0x82, *ids_of(library, "two words")]
    assert [stream.push(ids[0]), stream.push(ids[1])] == ["", ""]
    assert stream.push(ids[2]) == library.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_certain_is_held_back(tmp_path, kind):
    """After every token the stream shows all that no later token can change."""
    text, library = load_kind(tmp_path, kind)
    byte_ids = set(byte_range(library)) if kind.startswith("byte-fallback") else set()
    specials = {i for i, t in library.get_added_tokens_decoder().items() if t.special}
    rng = random.Random(11)
    for _ in range(200):
        ids = random_ids(rng, 20, library.get_vocab_size(), byte_range(library))
        stream, shown, run = text.stream(), "", b""
        for count, token_id in enumerate(ids, start=1):
            shown += stream.push(token_id)
            whole = library.decode(ids[:count])
            if byte_ids:
                if token_id in byte_ids:
                    run += bytes([token_id - min(byte_ids)])
                elif token_id not in specials and library.id_to_token(token_id) is not None:
                    run = b""
                if run and utf8_state(run) != "bad":
                    continue  # a later bad byte would turn the whole run into replacement marks
                assert shown == whole, ids[:count]
            elif kind == "byte-level":
                assert whole in (shown, shown + BAD), ids[:count]
            elif not kind.startswith("byte-level"):
                assert shown == whole, ids[:count]


def utf8_state(data: bytes) -> str:
    """'whole', 'cut' (the start of something valid) or 'bad'."""
    try:
        data.decode("utf-8")
        return "whole"
    except UnicodeDecodeError as error:
        return "cut" if error.reason == "unexpected end of data" else "bad"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_the_middle_are_not_shown(tmp_path, kind):
    text, library = load_kind(tmp_path, kind)
    begin, end = ids_of(library, "<s>", "</s>")
    plain = ids_of(library, "é", "two words", "é")
    mixed = [begin, plain[0], end, plain[1], begin, end, plain[2], end]
    pieces = stream_pieces(text, mixed)
    assert [pieces[i] for i in (0, 2, 4, 5, 7)] == [""] * 5
    assert "".join(pieces) == library.decode(plain)
    assert "<s>" in text.decode(mixed, skip_special=False)


def test_special_token_inside_a_character(tmp_path):
    """Specials vanish before bytes are joined, so the character around one survives."""
    for kind in ("byte-level", "byte-fallback (llama)"):
        text, library = load_kind(tmp_path / kind, kind)
        first, end = byte_range(library)[0], library.token_to_id("</s>")
        ids = [first + 0xC3, end, first + 0xA9]
        assert "".join(stream_pieces(text, ids)) == library.decode(ids) == "é"


class CountingTokenizer:
    """Counts the ids given to each decode."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.sizes: list[int] = []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **options):
        self.sizes.append(len(ids))
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_work_per_token_does_not_grow(tmp_path, kind):
    text, library = load_kind(tmp_path, kind)
    text.tokenizer = CountingTokenizer(text.tokenizer)
    ids = ids_of(library, "é", "two words", "</s>") * 700
    assert "".join(stream_pieces(text, ids)) == library.decode(ids)
    sizes = text.tokenizer.sizes
    assert max(sizes, default=0) <= 4
    assert len(sizes) <= 2 * len(ids)


# ---- B2: begin token twice ----

BEGIN = AddedToken("<s>", special=True, normalized=False)
WITH_BEGIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BEGIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("adds", [True, False], ids=["tokenizer adds", "tokenizer adds none"])
@pytest.mark.parametrize("template", [WITH_BEGIN, WITHOUT_BEGIN], ids=["with", "without"])
def test_begin_token_is_the_templates_in_chat_and_the_tokenizers_in_raw(tmp_path, adds, template):
    tokenizer = byte_level()
    begin = tokenizer.token_to_id("<s>")
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", begin)]
        )
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    text = load_text(write_folder(tmp_path, tokenizer, config))
    body = [ord(c) for c in "hi"]
    chat, raw = text.encode_chat(USER), text.encode_raw("hi")
    assert chat == [begin] * (template == WITH_BEGIN) + body
    assert raw == [begin] * adds + body


# ---- B3: templates that refuse, break, or are not there ----

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role\nnot supported') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def text_with(tmp_path: Path, template, **config):
    folder = write_folder(tmp_path, byte_level(), {"chat_template": template, **config})
    return load_text(folder)


def refusal(error, action) -> str:
    """The message of the one error that `action` must raise: one line."""
    with pytest.raises(DecodeError) as caught:
        action()
    assert type(caught.value) is error
    message = str(caught.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message


def turns(*roles: str) -> list[dict]:
    return [{"role": role, "content": f"turn {i}"} for i, role in enumerate(roles)]


def test_template_refusing_system_says_what_it_takes(tmp_path):
    text = text_with(tmp_path, NO_SYSTEM)
    message = refusal(PromptError, lambda: text.render_chat(turns("system", "user")))
    assert "System role not supported" in message and "system, user" in message
    assert "it takes user and assistant turns, no system turn" in message
    assert text.render_chat(USER) == "[user]hi[assistant]"
    assert text.render_chat(USER, add_generation_prompt=False) == "[user]hi"


def test_template_demanding_alternation_says_so(tmp_path):
    text = text_with(tmp_path, ALTERNATING)
    message = refusal(PromptError, lambda: text.encode_chat(turns("user", "user")))
    assert "roles must alternate" in message and "in alternation" in message
    assert text.encode_chat(turns("user", "assistant", "user"))


def test_no_template_points_to_generate(tmp_path):
    text = load_text(write_folder(tmp_path, byte_level(), {}))
    assert not text.has_template
    message = refusal(PromptError, lambda: text.encode_chat(USER))
    assert "no chat template" in message and "generate --raw" in message
    refusal(PromptError, lambda: Chat(text))
    assert text.encode_raw("hi") == [ord("h"), ord("i")]


@pytest.mark.parametrize(
    "template, words",
    [
        ("a\n{% for m in messages %}{{ m.content }}", "malformed at line 2"),
        ("{{ messages[0].tools.name }}", "has no attribute"),
        ("{{ missing.part }}", "'missing' is undefined"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ raise_exception('') }}", "no reason given"),
        ("{{ raise_exception('x' * 5000) }}", "xxx..."),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
    ],
)
def test_broken_template_is_one_short_line_naming_its_file(tmp_path, template, words):
    text = text_with(tmp_path, template)
    message = refusal(PromptError, lambda: text.render_chat(USER))
    assert words in message and "tokenizer_config.json" in message
    assert len(message) < 600 + len(str(tmp_path))
    assert text.encode_raw("hi") == [ord("h"), ord("i")]  # raw text does not need the template


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        ["hi"],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
def test_malformed_messages(tmp_path, messages):
    text = text_with(tmp_path, PLAIN)
    assert "needs" in refusal(PromptError, lambda: text.encode_chat(messages))


def test_failed_turn_is_not_kept(tmp_path):
    template = (
        "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('not that') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = text_with(tmp_path, template)
    chat = Chat(text, system="S")
    chat.ask("one")
    chat.answer("1")
    kept = list(chat.messages)
    assert "not that" in refusal(PromptError, lambda: chat.ask("no"))
    assert chat.messages == kept
    refusal(PromptError, lambda: chat.answer("reply to the failed turn"))
    chat.ask("never answered")
    refusal(PromptError, lambda: chat.ask("no again"))
    refusal(PromptError, lambda: chat.answer("reply to the failed turn"))
    assert chat.messages == kept
    chat.ask("never answered either")
    assert text.decode(chat.ask("two")) == "[system]S[user]one[assistant]1[user]two"
    refusal(PromptError, lambda: chat.answer(None))
    chat.answer("2")
    assert [m["content"] for m in chat.messages] == ["S", "one", "1", "two", "2"]
    refusal(PromptError, lambda: chat.answer("twice"))
    chat.clear()
    assert [m["content"] for m in chat.messages] == ["S"]


def test_chat_with_a_system_turn_that_is_refused_fails_at_once(tmp_path):
    text = text_with(tmp_path, NO_SYSTEM)
    assert "no system turn" in refusal(PromptError, lambda: Chat(text, system="S"))
    chat = Chat(text)
    assert text.decode(chat.ask("hi")) == "[user]hi[assistant]"


# ---- where templates come from, and what they may use ----


def test_jinja_file_wins(tmp_path):
    write_folder(tmp_path, byte_level(), {"chat_template": "from the config"})
    (tmp_path / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    text = load_text(tmp_path)
    assert text.render_chat(USER) == "from the file é"
    (tmp_path / "chat_template.jinja").write_text("{{ x.y }}", encoding="utf-8")
    text = load_text(tmp_path)
    assert "chat_template.jinja" in refusal(PromptError, lambda: text.render_chat(USER))


def test_named_templates(tmp_path):
    tool = {"name": "tool_use", "template": "tool"}
    text = text_with(tmp_path, [tool, {"name": "default", "template": "plain"}])
    assert text.render_chat(USER) == "plain"
    assert not text_with(tmp_path, []).has_template
    assert not text_with(tmp_path, None).has_template
    assert "tool_use" in refusal(ModelError, lambda: text_with(tmp_path, [tool]))
    for malformed in (5, ["x"], [{"name": "default"}], {"default": "x"}):
        message = refusal(ModelError, lambda value=malformed: text_with(tmp_path, value))
        assert "tokenizer_config.json" in message


def test_named_tokens_reach_the_template(tmp_path):
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    bos = {"content": "<s>", "lstrip": False, "normalized": False, "special": True}
    config = {"bos_token": bos, "eos_token": None, "add_bos_token": True}
    write_folder(tmp_path, byte_level(), {**config, "chat_template": template})
    assert load_text(tmp_path).render_chat(USER) == "<s>||"
    token_map = {"bos_token": "wrong", "eos_token": {"content": "</s>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(token_map), encoding="utf-8")
    assert load_text(tmp_path).render_chat(USER) == "<s>|</s>|"


def test_named_token_that_is_not_marked_special_is_hidden_but_not_invented(tmp_path):
    config = {"eos_token": "world", "pad_token": "<never seen>"}
    text = load_text(write_folder(tmp_path, words(), config))
    ids = ids_of(text.tokenizer, "hello", "world")
    assert text.decode(ids) == "hello" == "".join(stream_pieces(text, ids))
    assert text.decode(ids, skip_special=False) == "hello world"
    assert text.tokenizer.token_to_id("<never seen>") is None
    assert text.vocab_size == max(words().get_vocab().values()) + 1


TEMPLATES = {
    "plain": PLAIN,
    "whitespace control": (
        "{%- for m in messages %}\n    {% if loop.first %}\n  first\n    {% endif %}\n"
        "{{ m.role + ': ' + m.content | trim }}\n{%- endfor %}\nend\n"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
        "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ '<é&>' | tojson }}",
    "generation block": (
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}"
        "{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ dict(a=1)['a'] }}{{ '<b>' }}"
    ),
    "absent extras": (
        "{% if tools is none and documents is none %}none{% endif %}"
        "{% if not tools %}{{ undefined_name }}{{ bos_token }}{% endif %}"
    ),
    "year": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_and_ids_as_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    text = text_with(tmp_path, TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in (
        USER,
        turns("system", "user"),
        turns("user", "assistant", "user", "assistant", "user"),
        [{"role": "user", "content": " <s>é 日本\n🎉 <b> \"q\" "}],
    ):  # fmt: skip
        for prompt in (True, False):
            wanted = peer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert text.render_chat(messages, add_generation_prompt=prompt) == wanted
        wanted = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert text.encode_chat(messages) == wanted


# ---- loading ----


def test_missing_and_malformed_files_are_named(tmp_path):
    assert "no such folder" in refusal(ModelError, lambda: load_text(tmp_path / "absent"))
    assert "tokenizer.json" in refusal(ModelError, lambda: load_text(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert "tokenizer.model alone" in refusal(ModelError, lambda: load_text(tmp_path))

    whole = write_folder(tmp_path, byte_level(), {}).joinpath("tokenizer.json").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"[1]", b"{}", b'{"model": 3}', b"\xff\xfe"):
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        assert "tokenizer.json" in refusal(ModelError, lambda: load_text(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(whole)
    load_text(tmp_path)

    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for damaged in (b"{", b"[]", b"\xff", b'{"bos_token": 3}'):
            (tmp_path / name).write_bytes(damaged)
            assert name in refusal(ModelError, lambda: load_text(tmp_path))
        (tmp_path / name).unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja" in refusal(ModelError, lambda: load_text(tmp_path))


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=6)
    folder = write_folder(tmp_path, tokenizer)
    kept = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abcdefgh").ids
    assert len(kept) == 6  # the file really does both
    text = load_text(folder)
    assert text.encode_raw("abcdefgh") == [ord(c) for c in "abcdefgh"]
    assert text.encode_raw("ab") == [ord(c) for c in "ab"]


def test_text_that_cannot_be_encoded(tmp_path):
    text = load_text(write_folder(tmp_path, byte_level()))
    assert "position 2" in refusal(PromptError, lambda: text.encode_raw("ab\udcff"))
    assert "needs a string" in refusal(PromptError, lambda: text.encode_raw(b"ab"))
    assert text.encode_raw("") == []
    tokenizer = Tokenizer(
        models.WordLevel({"a": 0}, "<unk>")
    )  # unknown token not in the vocabulary
    text = load_text(write_folder(tmp_path, tokenizer))
    assert "cannot be encoded" in refusal(PromptError, lambda: text.encode_raw("b"))


def test_vocab_size_covers_the_largest_id(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7}, "a"))
    assert load_text(write_folder(tmp_path, tokenizer)).vocab_size == 8


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys, decodev2.text; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    root = str(Path(__file__).resolve().parents[2])
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


# ---- real models ----

MODELS = Path(os.environ.get("DECODEV2_MODELS") or Path(__file__).resolve().parents[2] / "models")
REAL = ("smollm2-135m", "qwen2.5-coder-0.5b")
LONG = "Die Größe 日本語のテキスト 한국어 ไทย 👩‍💻🎉🇫🇷 naïve\n\n\tx = 'a'  # ok\r\n"


@pytest.fixture(scope="module", params=REAL)
def real(request):
    """(our Text, the library's tokenizer, the folder) of one real model."""
    folder = MODELS / request.param
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no {request.param}/tokenizer.json under $DECODEV2_MODELS ({MODELS})")
    return load_text(folder), Tokenizer.from_file(str(folder / "tokenizer.json")), folder


def test_real_ids_as_transformers(real):
    text, _, folder = real
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    conversations = [
        USER,
        [{"role": "system", "content": "Be brief."}, *USER],
        turns("user", "assistant", "user"),
        turns("system", "user", "assistant", "user", "assistant", "user"),
        [{"role": "user", "content": LONG}],
        [{"role": "user", "content": "a <|im_end|> inside"}],
        turns("user", "user"),
    ]
    for messages in conversations:
        wanted = peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.render_chat(messages) == wanted
        wanted = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert text.encode_chat(messages) == wanted
    for written in ("The capital of France is", LONG, " leading", ""):
        assert text.encode_raw(written) == peer(written).input_ids
        ids = peer(written).input_ids
        assert text.decode(ids) == peer.decode(ids, skip_special_tokens=True)


def test_real_stream_joins_to_decode(real):
    text, library, _ = real
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(text.vocab_size + 200) for _ in range(rng.randint(1, 40))]
        assert "".join(stream_pieces(text, ids)) == library.decode(ids, skip_special_tokens=True)
    ids = library.encode(LONG * 3, add_special_tokens=False).ids
    pieces = stream_pieces(text, ids)
    assert "".join(pieces) == LONG * 3
    assert BAD not in "".join(pieces) and sum(map(bool, pieces)) > len(ids) // 4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
