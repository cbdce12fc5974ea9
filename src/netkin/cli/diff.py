"""`netkin diff`: the module at which two versions of a model part, and checks that guard a port or a quantisation."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from netkin.cli.options import DEVICE, EXAMPLES, NAMES, PLAN, SAMPLE_SEED, TRANSFORM, command, result_options
from netkin.cli.outputs import OutputFiles
from netkin.cli.running import (
    functions_of,
    load_batches,
    load_models,
    named_models,
    require_device,
    tell_random_weights,
)

if TYPE_CHECKING:
    from netkin.results.diff import Diff

FAILED = 3
RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
LIMITED = (
    *("kl", "agreement", "error", "ratio", "standing_out", "perplexity_a", "perplexity_b"),
    *("logprob", "logprob_worst", "kl_at_least"),
)


class Check(NamedTuple):
    """A condition on a number of the result, under which the command fails."""

    text: str
    name: str
    relation: str
    limit: float

    def holds(self, values: dict[str, float]) -> bool:
        """Return whether the number of that name is as the condition says."""
        return bool(RELATIONS[self.relation](values[self.name], self.limit))


class Condition(click.ParamType):
    """A condition such as kl>0.01."""

    name = "condition"

    def convert(self, value: Any, param: Any, ctx: Any) -> Check:
        """Return the condition that a text stands for."""
        found = re.fullmatch(r"\s*(\w+)\s*(<=|>=|<|>)\s*([-+.\de]+)\s*", str(value))
        try:
            limit = float(found[3]) if found else 0.0
        except ValueError:
            found = None
        if not found or found[1] not in LIMITED:
            self.fail(f"{value!r} is no condition such as 'kl>0.01'; the numbers are {', '.join(LIMITED)}.", param, ctx)
        return Check(str(value), found[1], found[2], limit)


@command(
    "diff netkin:digits@before.pt netkin:digits@after.pt --data digits:test --report ab.html",
    heading="Modules and limits",
)
@click.argument("a")
@click.argument("b", metavar="B|STATES|LOGPROBS")
@click.option("--data", metavar="DATA", help="Examples to run the models on; see `netkin list data`.")
@click.option(
    "--match",
    multiple=True,
    metavar="A=B",
    help="Modules of A that have another name in B, as in 'transformer.h.*=blocks.*'; can be repeated.",
)
@click.option(
    "--serve",
    type=click.Choice(["decode", "left", "right", "packed"]),
    help="How B gets the sequences that A gets in one pass: token after token with its cache, padded, or in one row.",
)
@click.option("--prefill", type=click.IntRange(min=1), metavar="N",
              help="Tokens in the first step of --serve decode, which it implies; by default half.")  # fmt: skip
@click.option(
    "--fail-if",
    "checks",
    multiple=True,
    type=Condition(),
    metavar="CONDITION",
    help=f"Exit with 3 if this holds, as in 'kl>0.01'; of {', '.join(LIMITED)}. Can be repeated.",
)
@EXAMPLES
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, metavar="N",
              help="Batch size; modules are compared on the first batch.")  # fmt: skip
@DEVICE
@SAMPLE_SEED
@NAMES
@TRANSFORM
@PLAN
@result_options("ab", "the result", "the errors of all modules")
def diff(a: str, b: str, plan: bool, checks: tuple[Check, ...], **options: Any) -> None:
    """Show at which module two versions of a model part, A and B: two precisions, ports, kernels or checkpoints.

    Each module of one model runs on the inputs of its counterpart in the other, and its error is held against what
    rounding alone does. The exit code is 3 if a condition of --fail-if holds.

    STATES are what an engine recorded at the ends of modules, such as the folder that vLLM's extract_hidden_states
    writes: a folder or file of safetensors, npz or npy. A's modules run on them. Where they hold the tokens, no --data
    are needed. LOGPROBS is a file of JSON, JSON lines or npz with tokens and their log-probabilities.
    """
    outputs = OutputFiles.of(options)
    models = named_models([a, b], options.pop("names"))
    if plan:
        outputs.show_plan(_call(models, plan=True, **options))
    found: Diff = _call(models, plan=False, **options)
    outputs.deliver(found, found.save)
    values = found.values()
    for check in checks:
        if check.name not in values:
            raise click.UsageError(f"--fail-if {check.text!r}: the models give no {check.name!r} on these data.")
    failed = [check for check in checks if check.holds(values)]
    for check in failed:
        click.echo(f"netkin: {check.text} holds: {check.name} is {values[check.name]:.6g}.", err=True)
    if failed:
        raise click.exceptions.Exit(FAILED)


def _call(
    models: dict[str, str],
    plan: bool,
    data: str | None,
    match: tuple[str, ...],
    serve: str | None,
    prefill: int | None,
    batch_size: int,
    examples: int | None,
    seed: int,
    device: str | None,
    transforms: tuple[str, ...],
) -> Any:
    """Load what was named and call the library."""
    from netkin.applications.diff import diff as find_difference
    from netkin.applications.diff import explain_diff, not_a_model

    require_device(device)
    renamed = {}
    for text in match:
        old, equals, new = text.partition("=")
        if not equals:
            raise click.UsageError(f"--match is written A=B, as in 'transformer.h.*=blocks.*'; got {text!r}.")
        renamed[old] = new
    specs = list(models.values())
    is_recorded = not_a_model(specs[1])
    if data is None and not is_recorded:
        raise click.UsageError("--data is missing: models need examples to run on.")
    if plan and is_recorded:
        raise click.UsageError("--plan is for two models; beside a recorded side A runs up to six times on one batch.")
    networks = load_models(specs[:1] if is_recorded else specs)
    batches = data and load_batches(data, batch_size, examples, seed, models=specs[:1] if is_recorded else specs)
    names = list(models)
    function = explain_diff if plan else find_difference
    made = function(
        networks[0], specs[1] if is_recorded else networks[1], batches, match=renamed or None, serve=serve,
        prefill=prefill,
        transform=functions_of(transforms, 1), names=(names[0], names[1]), device=device, seed=seed,
    )  # fmt: skip
    if not plan:
        tell_random_weights(networks)
    return made
