"""Running commands as people do."""

import shlex

import pytest
from click.testing import CliRunner

from netkin.cli import cli


@pytest.fixture
def netkin(tmp_path, monkeypatch):
    """Run a command line in an empty folder; what comes back has `exit_code`, `stdout` and `stderr`."""
    monkeypatch.chdir(tmp_path)
    return lambda line: CliRunner().invoke(cli, shlex.split(line), prog_name="netkin")
