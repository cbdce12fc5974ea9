"""Which cases of a parametrised test run every day."""

import pytest


def slow_but(cases, *quick):
    """Return the cases of a parametrisation, all but the `quick` ones marked as slow."""
    return [case if any(case is one or case == one for one in quick) else _slow(case) for case in cases]


def _slow(case):
    return pytest.param(case, marks=pytest.mark.slow)
