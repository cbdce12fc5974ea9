"""What a claim's digest sees: its code and all that it reaches, at its own scale."""

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

from netkin.results import claim as netkin_claim
from reproductions import claims, digests, image_sets, laboratory, recipes

MODULE = '''
from torch import nn

from reproductions.laboratory import Lab, keep_result
from reproductions.claims import Finding, Measured, all_of, claim, verdict

SEEDS = {"cpu": 3, "gpu": 5}
MARK = 0.9
TABLE = {"a": 1}
TABLE |= {"b": 2}


class Shelf:
    """What is kept."""

    width: int = 2

    def used(self):
        return self.width


class Net(nn.Module):
    def forward(self, inputs):
        return 2 * inputs


class Term:
    def loss(self, model, inputs, outputs, step):
        return outputs.mean()


def unused(value):
    return 0


@keep_result
def helper(value: float) -> float:
    """Return more."""
    if value > 1:
        value += 1
        value *= 3
    return value + MARK + TABLE["a"]


def measure(lab: Lab):
    """Measure."""
    model = lab.settled(Net())
    runs = [lab.trained("resnet", seed) for seed in lab.seeds(3)]
    lab.train(model, "resnet", 0, hooks=[Term()])
    ours = Measured.over(helper(SEEDS[lab.scale]) for run in runs)
    return verdict(all_of(ours.above(Shelf().used())))  # why
'''


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Return the digest of `measure` in a module of the given text, with words of other modules replaced."""

    def made(text=MODULE, scale="cpu", changed=None, old="", new=""):
        name = "reproductions.made_up"
        path = tmp_path / "made_up.py"
        path.write_text(text)
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(text, str(path), "exec"), module.__dict__)
        if changed is not None:
            other = ModuleType(changed.__name__)
            other.__file__ = str(tmp_path / "changed.py")
            monkeypatch.setitem(sys.modules, changed.__name__, other)
            before = Path(changed.__file__).read_text()
            assert old in before
            Path(other.__file__).write_text(before.replace(old, new))
        forget()
        found = digests.code_digest(module.measure, scale)
        if changed is not None:
            monkeypatch.setitem(sys.modules, changed.__name__, changed)
        return found

    def forget():
        digests._source.cache_clear()
        digests._definition.cache_clear()

    yield made
    forget()


@pytest.mark.parametrize(
    "old, new",
    [
        ("Return more.", "Return much more."),
        ("  # why", "  # because"),
        ("value + MARK", "value  +  MARK"),
        ('return value + MARK + TABLE["a"]', "return (\n        value + MARK\n        + TABLE['a']  # one\n    )"),
        ("0, hooks=[Term()])", "0,\n        hooks=[Term()],\n    )"),
        ("if value > 1:\n        value += 1", "if value > 1:\n\n        # more\n        value += 1"),
        ("value: float) -> float", "value: int) -> int | float"),
        ('"gpu": 5', '"gpu": 7'),
        ("return 0", "return 1"),  # of a function that is not called
        ("@keep_result\n", ""),  # which only keeps what was found
    ],
)
def test_words_formatting_type_hints_and_what_is_not_reached_do_not_count(digest, old, new):
    assert old in MODULE
    assert digest(MODULE.replace(old, new)) == digest()


@pytest.mark.parametrize(
    "old, new",
    [
        ("value + MARK", "value - MARK"),
        ("MARK = 0.9", "MARK = 0.8"),
        ('"b": 2', '"b": 3'),  # of a statement that changes a table
        ('"cpu": 3', '"cpu": 4'),
        ("width: int = 2", "width: int = 3"),
        ("return self.width", "return -self.width"),
        ("(ours.above", "(ours.below"),
        ("        value *= 3", "    value *= 3"),  # out of its `if`
        ("2 * inputs", "3 * inputs"),  # `forward`, which torch calls
        ("outputs.mean()", "outputs.sum()"),  # `loss`, which a training calls
        ("Net(nn.Module)", "Net(nn.Sequential)"),
    ],
)
def test_code_constants_helpers_blocks_and_all_methods_count(digest, old, new):
    assert old in MODULE
    assert digest(MODULE.replace(old, new)) != digest()


@pytest.mark.parametrize(
    "module, old, new",
    [
        (laboratory, "[:1024]", "[:512]"),  # `lab.settled`
        (laboratory, "return range(count)", "return range(1, count + 1)"),
        (laboratory, "hooks=[keeping], save=saved", "save=saved"),  # reached by `lab.trained`
        (image_sets, '"cpu": (5_000, 2_000)', '"cpu": (4_000, 2_000)'),
        (image_sets, "scale_factor=4", "scale_factor=2"),
        (recipes, "0.9, 1.0)", "0.95, 1.0)"),  # PARTS
        (recipes, "self.history[-1]", "self.history[0]"),  # of a `Run`
        (claims, "IN_PART if True in parts", "IN_PART if None in parts"),
        (netkin_claim, "self.value - reach, self.value + reach", "self.value, self.value + reach"),
        (netkin_claim, "student_quantile(self.n)", "student_quantile(self.n + 1)"),
        (netkin_claim, "ddof=1", "ddof=0"),  # `Measured.over`
    ],
)
def test_the_laboratory_and_the_decisions_count(digest, module, old, new):
    assert digest(changed=module, old=old, new=new) != digest()


def test_the_quantiles_of_student_and_the_seeds_of_tasks_count(digest):
    text = MODULE.replace("lab.seeds(3)", "lab.over(helper, [1])")
    assert digest(text, changed=laboratory, old='[:4], "big"', new='[:5], "big"') != digest(text)
    values = sys.modules["netkin.results.values"]
    assert digest(changed=values, old="(1 + level) / 2", new="level") != digest()


@pytest.mark.parametrize(
    "module, old, new",
    [
        (recipes, "_SMALL = Recipe(epochs=10", "_SMALL = Recipe(epochs=11"),  # which a record holds in words
        (recipes, '"vit-tokens": Network(vit,', '"vit-tokens": Network(alexnet,'),
        (laboratory, "@note_result(note_images)\n    def images(", "def images("),
        (laboratory, "min(2_000, len", "min(3_000, len"),  # of the text, where no claim names it
        (laboratory, "TOGETHER = 10", "TOGETHER = 5"),
        (laboratory, "with self._counting(work.__name__, len(tasks), len(done)) as count:", "if True:"),
        (laboratory, "hexdigest()[:10]", "hexdigest()[:11]"),  # names of files
        (image_sets, '"gpu": (50_000, 10_000)', '"gpu": (50_000, 9_000)'),
        (image_sets, "labelled_digest(*own)", "'none'"),
        (netkin_claim, 'f" ± {', 'f" +- {'),  # how a number is written
        (netkin_claim, "FORMAT = 3", "FORMAT = 4"),
    ],
)
def test_recipes_notes_kept_parts_and_other_scales_do_not_count(digest, module, old, new):
    text = MODULE.replace('    lab.train(model, "resnet", 0, hooks=[Term()])\n', "").replace("lab.trained", "lab.fresh")
    assert digest(text, changed=module, old=old, new=new) == digest(text)


def test_code_that_keeps_and_notes_does_not_count(digest):
    from reproductions import keeping

    assert digest(changed=keeping, old="if job is None:", new="if not job:") == digest()
    assert digest(changed=keeping, old="note(found)", new="pass") == digest()


def test_the_scale_counts_where_it_says_something_else(digest):
    text = MODULE.replace('"gpu": 5', '"gpu": 3').replace("lab.", "given.").replace("lab: Lab", "given")
    other = text.replace('"gpu": 3', '"gpu": 5')
    assert digest(other) != digest(other, "gpu")
    assert digest(text) == digest(text, "gpu")


def test_a_definition_that_moves_to_another_module_stays_the_same():
    assert digests.digest_of({("a", "f"): "1"}) == digests.digest_of({("b", "f"): "1"})
    assert digests.digest_of({("a", "f"): "1"}) != digests.digest_of({("a", "g"): "1"})


def test_functions_inside_others_are_known_by_their_code():
    def made(step):
        return lambda lab: lab + step

    assert digests.code_digest(made(1), "cpu") == digests.code_digest(made(1), "cpu")
    assert digests.code_digest(made(1), "cpu") != digests.code_digest(made(2), "cpu")


def test_what_is_left_out_exists():
    for name in digests.LEFT_OUT:
        module = next(one for one in _prefixes(name) if one in sys.modules or digests._read(one))
        own = name[len(module) + 1 :]
        first, _, method = own.partition(".")
        assert not own or hasattr(sys.modules[module], first), name
        assert not method or hasattr(getattr(sys.modules[module], first), method), name


def test_every_laboratory_is_called_lab():
    for path in Path(digests.__file__).parent.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and getattr(node.annotation, "id", "") == "Lab":
                assert node.arg == "lab", f"{path}:{node.lineno}: methods are found by `lab.method`"


def test_f_strings_are_the_same_however_they_are_split():
    one, other = (ast.parse(text).body[0] for text in ('f"a{x}b" "c"', 'f"a{x}" f"" "bc"'))
    assert digests._text("", one) == digests._text("", other)


def _prefixes(name):
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
