"""The guide to many machines works as written: its scripts run, with stand-ins for Slurm's commands."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import netkin as nk

PAGE = Path(__file__).parents[1] / "docs" / "many-machines.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
SOURCES = str(Path(nk.__file__).parents[1])
SBATCH = """
import os, re, subprocess, sys
*options, script = sys.argv[1:]
told = dict(one.removeprefix("--").partition("=")[::2] for one in options)
told = dict(re.findall(r"^#SBATCH --([\\w-]+)=(.*)$", open(script).read(), flags=re.M)) | told
environment = os.environ | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": told.get("nodes", "1")}
environment |= {"SLURM_JOB_NODELIST": "here[1-2]", "SLURM_CPUS_PER_TASK": told.get("cpus-per-task", "1")}
first, _, last = told.get("array", "0").partition("-")
tasks = [environment | {"SLURM_ARRAY_TASK_ID": str(task)} for task in range(int(first), int(last or first) + 1)]
started = [subprocess.Popen(["sh", "-e", script], env=task, stdout=sys.stderr) for task in tasks]
if any([one.wait() for one in started]):
    sys.exit("a task has failed")
print("17" if "parsable" in told else "Submitted batch job 17")
"""
SRUN = """
import os, subprocess, sys
started = [subprocess.Popen(sys.argv[1:]) for _ in range(int(os.environ["SLURM_NNODES"]))]
sys.exit(max([one.wait() for one in started]))
"""


@pytest.fixture(scope="module")
def page():
    """The blocks of code of the page: (language, text)."""
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def shell(tmp_path, page, quick_python):
    """Return a function that runs a script where the page's commands and files are."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "sbatch.py").write_text(SBATCH)
    (commands / "srun.py").write_text(SRUN)
    stand_ins = {"netkin": "-m netkin", "torchrun": "-m torch.distributed.run", "python": ""}
    stand_ins |= {"sbatch": commands / "sbatch.py", "srun": commands / "srun.py"}
    for name, what in stand_ins.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "$PYTHON_EXEC" {what} "$@"\n')
    (commands / "scontrol").write_text("#!/bin/sh\necho localhost\necho localhost\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    for language, text in page:
        if language == "python":
            (tmp_path / re.match(r"# (\w+\.py)\n", text).group(1)).write_text(text)

    def run(text, only_here=False):
        """Run a script; with `only_here` no process of it may listen to other machines."""
        environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": SOURCES}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_worker_niceness": "0"}
        environment["PYTHON_EXEC"] = sys.executable if only_here else str(quick_python)  # torchrun reads it, too
        with open(tmp_path / "said", "w+") as said, open(tmp_path / "printed", "w+") as printed:
            process = subprocess.Popen(
                ["sh", "-e", "-c", text], cwd=tmp_path, env=environment, stdout=printed, stderr=said
            )
            addresses, end = set(), time.monotonic() + 600
            while process.poll() is None:
                if time.monotonic() > end:
                    process.kill()
                addresses |= listening(process.pid) if only_here else set()
                time.sleep(0.1)
        told = (tmp_path / "said").read_text()
        assert process.returncode == 0, f"{text}\n{told}"
        assert not only_here or addresses == {"127.0.0.1"}
        return (tmp_path / "printed").read_text(), told

    return run


def listening(pid):
    """Return the addresses on which a process and those that it started listen."""
    psutil = pytest.importorskip("psutil")
    found = set()
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                ends = [end for end in one.net_connections("inet") if end.status == psutil.CONN_LISTEN]
                found |= {end.laddr.ip.removeprefix("::ffff:") for end in ends}
    return found


def blocks_with(page, *words):
    """Return the shell's blocks of the page that hold one of these words, as one script."""
    return "\n".join(text for language, text in page if language == "sh" and any(word in text for word in words))


def expected():
    """Return what one process gets of the data that the page's commands compare."""
    model = nk.load_model("netkin:digits")
    return nk.compare(model, data=nk.load_data("digits:test"), measures=["cka", "svcca"], layers="relu*", errors=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_the_array_job_gives_what_one_process_gives(page, shell, tmp_path):
    _, said = shell(blocks_with(page, "collect.sh", "rm part-3.stats"))
    assert "270 of 360 examples are present; missing: 180 to 269" in said
    found, whole = nk.load(tmp_path / "all.netkin"), expected()
    for measure in whole:
        assert found[measure].values == pytest.approx(whole[measure].values, abs=1e-6)
        assert found[measure].replicates == pytest.approx(whole[measure].replicates, abs=1e-6)
    assert (tmp_path / "all.html").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_torchrun_gives_what_one_process_gives(page, shell, tmp_path):
    printed, _ = shell(blocks_with(page, "--standalone", "ranks.sh"))
    assert printed.count("cka: similarity") == 1
    shell(blocks_with(page, "compare_by_file"), only_here=True)
    whole = expected()
    for name in ("digits.netkin", "by_file.netkin", "two.netkin"):
        assert nk.load(tmp_path / name)["cka"].values == pytest.approx(whole["cka"].values, abs=1e-6)
    assert nk.load(tmp_path / "digits.netkin")["svcca"].errors == pytest.approx(
        whole["svcca"].errors, abs=1e-6, nan_ok=True
    )
    assert nk.load(tmp_path / "ab.netkin").examples == 360


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_a_cluster_gives_what_one_process_gives(page, shell, tmp_path):
    pytest.importorskip("ray", reason="needs the extra netkin[ray]")
    printed, _ = shell(blocks_with(page, "compare_on_ray"), only_here=True)
    assert "forward passes: 9, one of each model on each batch" in printed
    assert "cluster: " in printed
    whole, data = expected(), nk.load_data("digits:test")
    assert nk.load(tmp_path / "ray.netkin")["cka"].values == pytest.approx(whole["cka"].values, abs=1e-6)
    models = [nk.load_model("netkin:digits", seed=seed) for seed in (0, 1)]
    two = nk.compare(*models, data, ["cka", "svcca"], layers="relu*", errors=True)
    for measure in two:
        found = nk.load(tmp_path / "seeds.netkin")["seed 0", "seed 1"][measure]
        assert found.errors == pytest.approx(two[measure].errors, abs=1e-6, nan_ok=True)
        assert found.values == pytest.approx(two[measure].values, abs=1e-6)
    assert nk.load(tmp_path / "two.netkin")["cka"].values == pytest.approx(two["cka"].values, abs=1e-6)


def test_every_block_of_the_page_is_run(page):
    run = blocks_with(page, "collect.sh", "rm part-3.stats", "compare_on_ray")
    run += blocks_with(page, "--standalone", "ranks.sh", "by_file")
    assert all(text in run for language, text in page if language == "sh")
    assert not re.search(r"^```(?!python$|sh$|$)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
