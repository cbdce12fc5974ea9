"""What a claim's digest sees: its code and all that it reaches, at its own scale."""

import sys
from types import ModuleType

import pytest

from reproductions import digests

MODULE = '''
from reproductions.laboratory import Lab
from reproductions.claims import verdict

SEEDS = {"cpu": 3, "gpu": 5}
MARK = 0.9


class Shelf:
    """What is kept."""

    width: int = 2

    def used(self):
        return self.width

    def unused(self):
        return 0


def helper(value):
    """Return more."""
    return value + MARK


def measure(lab: Lab):
    """Measure."""
    return verdict(helper(SEEDS[lab.scale]) > Shelf().used())  # why
'''


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Return the digest of `measure` in a module of the given text."""

    def made(text, scale="cpu"):
        name = "reproductions.made_up"
        path = tmp_path / "made_up.py"
        path.write_text(text)
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(text, str(path), "exec"), module.__dict__)
        digests._source.cache_clear()
        return digests.code_digest(module.measure, scale)

    yield made
    digests._source.cache_clear()


@pytest.mark.parametrize(
    "old, new",
    [
        ("Return more.", "Return much more."),
        ("  # why", "  # because"),
        ("value + MARK", "value  +  MARK"),
        ('"gpu": 5', '"gpu": 7'),
        ("return 0", "return 1"),  # a method that is not called
    ],
)
def test_words_and_what_is_not_reached_do_not_count(digest, old, new):
    assert digest(MODULE.replace(old, new)) == digest(MODULE)


@pytest.mark.parametrize(
    "old, new",
    [
        ("value + MARK", "value - MARK"),
        ("MARK = 0.9", "MARK = 0.8"),
        ('"cpu": 3', '"cpu": 4'),
        ("width: int = 2", "width: int = 3"),
        ("return self.width", "return -self.width"),
        ("> Shelf()", "< Shelf()"),
    ],
)
def test_code_constants_helpers_and_methods_count(digest, old, new):
    assert digest(MODULE.replace(old, new)) != digest(MODULE)


def test_the_scale_counts_where_it_says_something_else(digest):
    assert digest(MODULE) != digest(MODULE, "gpu")
    assert digest(MODULE.replace('"gpu": 5', '"gpu": 3')) == digest(MODULE.replace('"gpu": 5', '"gpu": 3'), "gpu")


def test_functions_inside_others_are_known_by_their_code():
    def made(step):
        return lambda lab: lab + step

    assert digests.code_digest(made(1), "cpu") == digests.code_digest(made(1), "cpu")
    assert digests.code_digest(made(1), "cpu") != digests.code_digest(made(2), "cpu")
