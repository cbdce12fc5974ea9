"""Without any optional package every command works, or names the extra that it needs."""

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import netkin
from netkin.cli.checking import EXTRAS

MODEL = "netkin:digits"
PASS = "--data digits:test --examples 40 --layers relu1 --quiet"
LINES = {
    "demo": "demo --quiet",
    "compare": f"compare {MODEL} {PASS} --out ab.netkin --report ab.html",
    "diff": f"diff {MODEL} {MODEL} --data digits:test --examples 40 --report d.html",
    "train": f"train {MODEL} --data digits:train --epochs 1 --out net.safetensors",
    "collect": f"collect {MODEL} {PASS} --out part.stats",
    "merge": "merge part.stats --out all.stats",
    "dynamics": f"dynamics run --model {MODEL} {PASS} --report run.html",
    "atoms": f"atoms {MODEL} {MODEL} {MODEL} --atoms 4 --report networks.html",
    "stitch": f"stitch {MODEL} {MODEL} --at relu2 --data digits:train --examples 200 --report stitch.html",
    "classes": f"classes {MODEL} --data digits:test --examples 200 --layers relu1 --report classes.html",
    "tasks": f"tasks a={MODEL},digits:test b={MODEL},digits:train --examples 40 --layers relu1 --report tasks.html",
    "compress": f"compress {MODEL} --layer fc --k 4 --data digits:train --examples 200 --out small.netkin "
    "--report small.html",
    "sparsity": f"sparsity {MODEL} --data digits:test --examples 100 --report sparsity.html",
    "recommend": f"recommend {MODEL} --data digits:test --examples 200 --report which.html",
    "federate": f"federate {MODEL} --data digits:train --clients 3 --classes 2 --rounds 1 --report users.html",
    "continual": f"continual {MODEL} --data digits:train --test digits:test --tasks 2 --recipe epochs=1,batch=256 "
    "--report sequence.html",
    "report": "report ab.netkin --out again.html",
    "show": "show ab.netkin",
    "list measures": "list measures",
    "list layers": f"list layers {MODEL}",
    "list data": "list data",
    "list scores": "list scores",
    "jobs list": "jobs list",
    "doctor": "doctor",
    "completion": "completion bash",
}
NEEDY = {  # what needs a package that is not there, and the extra that brings it
    "compare --figure ab.png": (f"compare {MODEL} {PASS} --figure ab.png", "figures"),
    "dynamics --figure": (f"dynamics run --model {MODEL} {PASS} --figure run.svg", "figures"),
    "stitch --figure": (f"stitch {MODEL} {MODEL} --at relu2 --data digits:train --figure ab.pdf", "figures"),
    "tasks --figure": (f"tasks a={MODEL},digits:test --figure tasks.png", "figures"),
    "recommend --figure": (f"recommend {MODEL} --data digits:test --figure which.png", "figures"),
    "classes --figure": (f"classes {MODEL} --data digits:test --figure classes.png", "figures"),
    "compress --figure": (f"compress {MODEL} --layer fc --k 4 --data digits:train --figure small.png", "figures"),
    "sparsity --figure": (f"sparsity {MODEL} --figure sparsity.png", "figures"),
    "federate --figure": (f"federate {MODEL} --data digits:train --classes 2 --figure users.png", "figures"),
    "compare --engine ray": (f"compare {MODEL} {PASS} --engine ray", "ray"),
    "images": (f"compare {MODEL} --data images:pictures", "images"),
    "hf": ("list layers hf:bert", "hf"),
}
PROGRAM = """
import json, os, shlex, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

ABSENT = set(json.loads(sys.argv[1]))
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
os.chdir(sys.argv[3])
from click.testing import CliRunner
from netkin import training
from netkin.cli import cli
train = training.trained_digits_net
training.trained_digits_net = lambda seed, epochs=12, progress=None: train(seed, 1, progress)  # in a moment
found = {}
for name, line in json.loads(sys.argv[2]).items():
    done = CliRunner().invoke(cli, shlex.split(line), prog_name="netkin")
    found[name] = [done.exit_code, done.stderr, repr(done.exception)]
    assert not ABSENT & {module.partition(".")[0] for module in sys.modules}, line
print(json.dumps(found))
"""


def not_asked_for():
    """Return the packages installed here that `pip install netkin` would not have brought."""
    needed, waiting = set(), ["netkin"]
    while waiting:
        name = canonicalize_name(waiting.pop())
        for line in () if name in needed else metadata.requires(name) or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                waiting.append(wanted.name)
        needed.add(name)
    owners = metadata.packages_distributions().items()
    return [module for module, owned in owners if not needed & set(map(canonicalize_name, owned))]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    import torch
    from safetensors.torch import save_file

    from netkin.training import untrained_digits_net

    place = tmp_path_factory.mktemp("bare")
    for folder in ("run", "pictures/cat", "bert"):
        (place / folder).mkdir(parents=True)
    for step in (1, 2):
        torch.save(untrained_digits_net(step).state_dict(), place / f"run/step_{step}.pt")
    (place / "pictures/cat/one.png").write_bytes(b"")
    (place / "bert/config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, place / "bert/model.safetensors")
    absent = not_asked_for()
    assert {module for module in EXTRAS.values() if find_spec(module)} <= set(absent)
    lines = LINES | {name: line for name, (line, _) in NEEDY.items()}
    environment = os.environ | {"PYTHONPATH": str(Path(netkin.__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, json.dumps(absent), json.dumps(lines), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_command_is_tried():
    from netkin.cli import commands

    assert commands().keys() - {"jobs show", "jobs watch", "jobs cancel"} == LINES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_a_command_works_without_extras(outcomes, name):
    code, said, fault = outcomes[name]
    assert code == 0, (said, fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDY)
def test_what_needs_an_extra_names_it(outcomes, name):
    code, said, fault = outcomes[name]
    assert code == 1, (said, fault)
    assert f"pip install 'netkin[{NEEDY[name][1]}]'" in said
