"""Which cases of a parametrised test run every day: others are slow, as those see most of what they would."""

import pytest


def slow_but(cases, *quick):
    """Return the cases of a parametrisation, all but the `quick` ones marked as slow."""
    return [case if any(case is one or case == one for one in quick) else _slow(case) for case in cases]


def slow_after(count, cases, several=False):
    """Return the cases of a parametrisation, those after the first `count` marked as slow; of `several` arguments."""
    return [case if place < count else _slow(case, several) for place, case in enumerate(cases)]


def _slow(case, several=False):
    """Return a case as slow: a value, those of `several` arguments, or what `pytest.param` gave."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if several else [case]), marks=pytest.mark.slow)
