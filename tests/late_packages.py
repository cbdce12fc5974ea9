"""Packages that take seconds to import, for tests that need them: imported at first use, and not while collecting."""

import warnings

import pytest


class LatePackage:
    """A package that is imported when one of its names is first used; a test that uses it is skipped without it."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        if attribute.startswith(("_", "pytest")):  # pytest asks every name of a module for these while collecting
            raise AttributeError(attribute)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages about each other
            return getattr(pytest.importorskip(self.name), attribute)


lightning, transformers = LatePackage("lightning.pytorch"), LatePackage("transformers")
