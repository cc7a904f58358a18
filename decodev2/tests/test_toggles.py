"""The switches of the CUDA step: what they take and refuse; a block puts them back."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from decodev2 import toggles
from decodev2.errors import DecodeError


def test_every_switch_has_choices_and_a_default_among_them():
    assert {field.name for field in fields(toggles.Toggles)} == set(toggles.CHOICES)
    for field in fields(toggles.Toggles):
        assert field.default in toggles.CHOICES[field.name]


def test_a_block_puts_every_switch_back_whatever_happens():
    before = asdict(toggles.current)
    with pytest.raises(ZeroDivisionError), toggles.using(linear="rows", nr=8, pdl=False):
        assert (toggles.current.linear, toggles.current.nr, toggles.current.pdl) == (
            "rows",
            8,
            False,
        )
        raise ZeroDivisionError
    assert asdict(toggles.current) == before
    with pytest.raises(DecodeError), toggles.using(linear="rows", nr=3):
        pass
    assert asdict(toggles.current) == before


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("linear", "fast", "linear is 'fast', needs one of mma, gemv, rows"),
        ("nr", 3, "nr is 3, needs one of auto, 1, 2, 4, 8"),
        ("speed", 1, "toggle 'speed' is unknown; there are linear, "),
    ],
)
def test_what_does_not_exist_is_named(name, value, words):
    with pytest.raises(DecodeError) as caught:
        toggles.Toggles().set(name, value)
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", toggles.CHOICES["linear"])
def test_the_environment_picks_the_backend(name, monkeypatch):
    monkeypatch.setenv("CHR_NF4_DECODE", name)
    assert toggles._from_environment().linear == name


def test_an_unknown_backend_names_the_variable(monkeypatch):
    monkeypatch.setenv("CHR_NF4_DECODE", "fast")
    with pytest.raises(DecodeError) as caught:
        toggles._from_environment()
    assert str(caught.value) == "CHR_NF4_DECODE is 'fast', needs one of mma, gemv, rows"
    monkeypatch.delenv("CHR_NF4_DECODE")
    assert toggles._from_environment() == toggles.Toggles()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
