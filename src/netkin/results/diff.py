"""`Diff`: at which module two versions of a model part, beyond what rounding explains; saved, printed and reported."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from netkin import __version__
from netkin.errors import UnknownName, did_you_mean
from netkin.results.caveats import Caveat
from netkin.results.labels import plural
from netkin.results.packing import Result
from netkin.results.quantity import Quantity
from netkin.results.records import FrozenRecord, now, optional
from netkin.results.text import aligned, cut_short, terminal_width, wrapped

THRESHOLD = 3.0  # of clean pairs none comes near; see docs/diff.md
OUTLYING = 5.0  # robust standard deviations, by which a module stands out among those of its kind
LISTED = 5
SLIPS = {"shifted", "zero"}  # what nothing does to all weights of a kind on purpose
SAME = ("equal", "cast", "transposed")  # relations of weights that hold the same numbers
DETAILS = 4  # of tensors in one relation, up to which all are said
FALLS = 0.01  # of the KL, below which a fall is none
SPREAD = 1.4826  # of a normal distribution, its standard deviation in median absolute deviations
# the least spread of logarithms, as few modules may have hardly any by chance: of roundings, and of what training does
LEAST_SPREAD, LEAST_SPREAD_TRAINED, LEAST_SPREAD_WEIGHTS = 0.15, 0.3, 0.2
TRAINED = ("changed", "low rank")

LOCAL_ERROR = Quantity(
    id="local_error",
    higher_is_closer=False,
    bounds=(0, math.inf),
    means="The relative difference of a module's output from its counterpart's on the same inputs: ‖B(x) − A(x)‖ / "
    "‖A(x)‖.",
    cannot_see="What inputs that these data don't give would show.",
)
END_TO_END = Quantity(
    id="end_to_end_error",
    higher_is_closer=False,
    bounds=(0, math.inf),
    means="The relative difference of a module's outputs in the two whole runs, with all that came before.",
    cannot_see="Where the difference arose.",
)
RATIO = Quantity(
    id="error_over_floor",
    higher_is_closer=False,
    bounds=(0, math.inf),
    means="The local error in units of the floor, what rounding alone does to the module's output on the same inputs.",
    cannot_see="Faults smaller than rounding.",
)
KL = Quantity(
    id="kl",
    higher_is_closer=False,
    bounds=(0, math.inf),
    unit="nats",
    means="The Kullback-Leibler divergence of the predicted distributions, KL(A ‖ B), its mean over predictions.",
    cannot_see="Which of the two predicts better.",
)
QUANTITIES = {one.id: one for one in (LOCAL_ERROR, END_TO_END, RATIO, KL)}


@dataclass(frozen=True, kw_only=True)
class ModuleDiff(FrozenRecord):
    """What one called module shows: its errors and its floor, relative to its output, and where they are worst.

    `local` is the error of its counterpart on the same inputs, `end_to_end` that of the outputs of the two whole runs,
    `floor` what rounding alone does. `ratio` is `local` over `floor`, or, if larger, that in the `worst_sequence`, the
    number of an example; `worst_position` is its position with the largest error. `changed` says how its weights
    differ, such as "quantised", where they do by more than their type. `code_ratio` is the ratio with the reference's
    weights in the places of those that were changed on purpose: that of its own code. `missing` says why it has no
    local error.
    """

    name: str
    kind: str  # its class
    caller: str | None = None
    local: float | None = None
    end_to_end: float | None = None
    floor: float | None = None
    ratio: float | None = None
    worst_sequence: int | None = None
    worst_position: int | None = None
    changed: str = ""
    code_ratio: float | None = None
    missing: str = ""

    @property
    def stem(self) -> str:
        """The module's name without the number of the call."""
        return re.sub(r"#\d+$", "", self.name)

    @property
    def place(self) -> str:
        """The name that it shares with modules in other blocks, such as ``layers.*.mlp``."""
        return _place(self.stem)


@dataclass(frozen=True, kw_only=True)
class ArgumentDiff(FrozenRecord):
    """An argument, such as a mask or positions, that two modules are told differently, first by this call."""

    name: str
    module: str
    how: str
    computed_in: str | None = None
    calls: int = 1  # in which it differs

    def __str__(self) -> str:
        where = "" if self.computed_in is None else f"; computed in {named(self.computed_in)}"
        return f"`{self.name}` given to {named(self.module)} differs ({self.how}){where}"


@dataclass(frozen=True, kw_only=True)
class WeightDiff(FrozenRecord):
    """How a tensor of the second model follows from the first's.

    `relation` is "equal", "cast", "scaled", "shifted", "zero", "quantised", "sparse", "low rank", "permuted",
    "transposed", "changed", "new" or "gone"; `error` the relative difference, `detail` the types, a factor, the bits
    and what shares a scale, a share of zeros, a rank, how many rows differ, or what the tensor is tied to.
    """

    relation: str
    error: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class RoutingDiff(FrozenRecord):
    """For how many tokens, of how many, a router chooses the same experts in both whole runs."""

    same: int
    tokens: int

    @property
    def agreement(self) -> float:
        """The share of tokens with the same experts."""
        return self.same / self.tokens if self.tokens else 1.0


@dataclass(frozen=True, kw_only=True)
class OutputDiff(FrozenRecord):
    """How the predictions of the two models differ: means over `predictions` positions of the data.

    `kl` is KL(A ‖ B) of the predicted distributions in nats, `agreement` the share of predictions with the same first
    choice. Perplexities are there where the data hold what is to be predicted.
    """

    kl: float
    agreement: float
    predictions: int
    perplexity_a: float | None = None
    perplexity_b: float | None = None


def blocks_among(called: Iterable[str]) -> list[str]:
    """Return the blocks of a model: the modules that a list holds, of the longest list that lies in no other.

    Example:
        >>> blocks_among(["", "embed", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "norm"])
        ['layers.0', 'layers.1']
    """
    lists: dict[str, list[str]] = {}
    for name in called:
        if found := re.fullmatch(r"((?:.*\.)?[^.\d][^.]*)\.\d+", name):
            lists.setdefault(found[1], []).append(name)
    outer = {name: own for name, own in lists.items() if not re.search(r"\.\d+(\.|$)", name)}
    return max(outer.values(), key=len, default=[])


@dataclass(frozen=True, kw_only=True)
class LogprobDiff(FrozenRecord):
    """How log-probabilities of tokens that an engine reported, B's, differ from a model's own, A's.

    `mean_a` and `mean_b` are means over `tokens`; `worst` is B's minus A's where that is largest in size. `rounding` is
    the largest change that another `precision` makes to A's own. Tokens part where they differ by more than the
    threshold times that; the `first` of them comes first. `kl_at_least` is a lower bound of KL(B ‖ A), its mean over
    tokens: all that was not reported counts as one token.
    """

    tokens: int
    sequences: int
    mean_a: float
    mean_b: float
    mean_absolute: float
    worst: float
    worst_sequence: int
    worst_position: int
    worst_token: int
    rounding: float
    mean_rounding: float
    precision: str
    kl_at_least: float
    parted: int = 0
    first_sequence: int | None = None
    first_position: int | None = None

    @property
    def sentence(self) -> str:
        """What they say, in one sentence."""
        rounding = f"{self.precision} changes a's own by up to {self.rounding:.3g}"
        if self.first_sequence is None:
            return (
                f"No token's log-probability differs beyond rounding: the largest difference is {abs(self.worst):.3g}, "
                f"and {rounding}."
            )
        count = f"{plural(self.parted, 'token')} of {self.tokens:,} {'differs' if self.parted == 1 else 'differ'}"
        return (
            f"The log-probabilities part at position {self.first_position} of sequence {self.first_sequence}: {count} "
            f"beyond rounding, the worst by {self.worst:+.3g} at position {self.worst_position} of sequence "
            f"{self.worst_sequence}; {rounding}."
        )

    def lines(self) -> list[str]:
        """Return the numbers in words."""
        return [
            f"log-probabilities of {plural(self.tokens, 'token')} in {plural(self.sequences, 'sequence')}: mean "
            f"{self.mean_b:.4g} reported and {self.mean_a:.4g} of a, mean difference in size {self.mean_absolute:.3g}, "
            f"by rounding {self.mean_rounding:.3g}",
            f"KL(b ‖ a) is at least {self.kl_at_least:.3g} per token; if the tokens were sampled from b at temperature "
            f"1, {self.mean_b - self.mean_a:.3g} estimates it",
        ]


def named(module: str) -> str:
    """Return a module's name for a sentence."""
    return module or "the model itself"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Diff(Result):
    """Two versions of a model, module by module: immutable, with the provenance.

    `modules` are by name in the order of their calls, `arguments` those that differ, `routing` by router, `weights` by
    name. `reference` is the more precise model, on whose inputs the modules of the other were run. `serve` says how b
    was served; then the modules of a were run on what b's were given. Where modules differ by more than rounding,
    `patched` holds, by block, the KL that is left where a's output takes the place of b's after the block, on the first
    batch, and `unpatched` that KL without any. `way` says how the second one was seen: its modules "replayed", its
    states "recorded", a "program" that shows the ends of modules, or "log-probabilities" alone.
    """

    kind: ClassVar[str] = "diff"

    a: str
    b: str
    modules: Mapping[str, ModuleDiff]
    arguments: tuple[ArgumentDiff, ...] = ()
    outputs: OutputDiff | None = None
    logprobs: LogprobDiff | None = None
    routing: Mapping[str, RoutingDiff] = field(default_factory=dict)
    weights: Mapping[str, WeightDiff] = field(default_factory=dict)
    patched: Mapping[str, float] = field(default_factory=dict)
    unpatched: float | None = None
    reference: str = "a"
    serve: str = ""
    precision: tuple[str, str] = ("", "")
    threshold: float = THRESHOLD
    way: str = "replayed"
    data: str = ""
    examples: int = 0
    seed: int = 0
    version: str = __version__
    created: str = field(default_factory=now)
    caveats: tuple[Caveat, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, module: str) -> ModuleDiff:
        if module not in self.modules:
            hint = did_you_mean(module, self.modules) or "."
            raise UnknownName(f"no module named {module!r} was called{hint}", argument="module", value=module)
        return self.modules[module]

    # --- the verdict ---

    @cached_property
    def by_design(self) -> frozenset[str]:
        """The calls whose weights were changed on purpose, as by a quantisation or further training, and their callers.

        A weight is taken to be changed on purpose where more than one of those in other blocks are, and most of them,
        all in the same way; but not where they only lost their values or were shifted as a whole, as a port does by
        mistake. What is in no block is held against the modules of its class, or if it is the only one of them, against
        all that have weights.
        """
        changed = set()
        for one in self.modules.values():
            # by module, as its calls share their weights
            alike = {own.stem: own.changed == one.changed != "" for own in self._alike(one)}
            if not SLIPS.issuperset(one.changed.split(", ")) and 1 < sum(alike.values()) > len(alike) / 2:
                changed.add(one.name)
        return frozenset(changed | {name for name in self.modules if any(self._encloses(name, own) for own in changed)})

    def _alike(self, one: ModuleDiff) -> list[ModuleDiff]:
        """Return the calls that one is held against, itself among them."""
        if "*" in one.place:
            return self._by_place[one.place]
        of_class = [own for own in self.modules.values() if own.kind == one.kind]
        return of_class if len(of_class) > 1 or one not in self._with_weights else self._with_weights

    @cached_property
    def _by_place(self) -> dict[str, list[ModuleDiff]]:
        places: dict[str, list[ModuleDiff]] = {}
        for one in self.modules.values():
            places.setdefault(one.place, []).append(one)
        return places

    @cached_property
    def _with_weights(self) -> list[ModuleDiff]:
        owners = {name.rpartition(".")[0] for name in self.weights}
        return [one for one in self.modules.values() if one.stem in owners]

    def _exceeds(self, one: ModuleDiff) -> bool:
        ratio = one.code_ratio if one.name in self.by_design else one.ratio
        return ratio is not None and ratio > self.threshold

    def _encloses(self, outer: str, inner: str) -> bool:
        stem = self.modules[outer].stem
        return outer != inner and (not stem or self.modules[inner].stem.startswith(f"{stem}."))

    @cached_property
    def standing_out(self) -> tuple[str, ...]:
        """The calls whose error exceeds the floor by more than the threshold; of those by design that of their code."""
        return tuple(name for name, one in self.modules.items() if self._exceeds(one))

    @cached_property
    def first(self) -> str | None:
        """The earliest call that stands out while nothing inside it does: the fault is in its own code or weights."""
        alone = (
            name for name in self.standing_out if not any(self._encloses(name, other) for other in self.standing_out)
        )
        return next(alone, None)

    @cached_property
    def ranking(self) -> tuple[tuple[str, float], ...]:
        """The calls from the most outlying one among its kind to the least, by robust z.

        That of the logarithm of the ratio, or of the error of weights that were changed by design, if that is larger.
        """
        weights = self._outlying_weights()
        scores = {
            one.name: max(_robust_z(one, self._alike(one)), weights.get(one.stem, -math.inf))
            for one in self.modules.values()
            if one.ratio is not None
        }
        return tuple(sorted(scores.items(), key=lambda item: -item[1]))

    def _outlying_weights(self) -> dict[str, float]:
        """Return the largest robust z of the changed weights that a module holds, among those of the same place."""
        places: dict[str, list[tuple[str, float]]] = {}
        for name, one in self.weights.items():
            module = name.rpartition(".")[0]
            if module in self.by_design and one.relation not in SAME and 0 < one.error < math.inf:
                places.setdefault(_place(name), []).append((module, math.log(one.error)))
        found: dict[str, float] = {}
        for own in places.values():
            for k, (module, value) in enumerate(own):
                others = [other for j, (_, other) in enumerate(own) if j != k]
                if len(others) > 1:
                    found[module] = max(found.get(module, -math.inf), _z(value, others, LEAST_SPREAD_WEIGHTS))
        return found

    @property
    def outlying(self) -> tuple[str, ...]:
        """The calls that differ much more than their kind, where a kind differs by design."""
        return tuple(name for name, z in self.ranking if z > OUTLYING) if self.by_design else ()

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.logprobs is not None:
            return self.logprobs.sentence
        if self.first is not None:
            return self._about(self.modules[self.first])
        largest = max((one.ratio for one in self.modules.values() if one.ratio is not None), default=0.0)
        if self.by_design:
            said = f"{plural(len(self.by_design), 'module')} {'differs' if len(self.by_design) == 1 else 'differ'} by "
            said += f"{'its' if len(self.by_design) == 1 else 'their'} weights ({self._changes_in_words()})"
            top = self.ranking[0] if self.ranking else ("", 0.0)
            return said + (
                f"; {named(top[0])} differs most for its kind (z = {top[1]:.1f})."
                if top[1] > OUTLYING
                else f", none of them much more than its kind (z at most {top[1]:.1f})."
            )
        rerouted = {name: one.tokens - one.same for name, one in self.routing.items() if one.same < one.tokens}
        if rerouted:
            total = sum(one.tokens for one in self.routing.values())
            count, router = f"{sum(rerouted.values()):,} of {total:,}", named(next(iter(rerouted)))
            return f"No module differs beyond rounding, by which {count} choices of experts differ, first in {router}."
        if self.arguments:
            return f"No module differs beyond rounding; {self.arguments[0]}."
        if not largest and any(one.ratio is not None for one in self.modules.values()):
            return "No module differs at all."
        return (
            f"No module differs beyond rounding: the largest error is {largest:.2g} × its floor, below the "
            f"{self.threshold:g} × from which a module stands out."
        )

    def _changes_in_words(self) -> str:
        counts = {relation: len(own) for relation, own in self.weights_by_relation().items() if relation not in SAME}
        return ", ".join(f"{count} {relation}" for relation, count in counts.items())

    def _about(self, one: ModuleDiff) -> str:
        local, ratio = one.local or 0.0, one.ratio or 0.0
        times = "where rounding does nothing" if math.isinf(ratio) else f"{ratio:.3g} × what rounding does"
        where = "" if one.worst_sequence is None else f", most in example {one.worst_sequence}"
        place = "" if one.worst_position is None else f" at position {one.worst_position}"
        by = f"differs by {local:.3g}, {times}" if math.isfinite(local) else "gives numbers that are not finite"
        more = len(self.standing_out) - 1
        also = f" {plural(more, 'other module')} {'stands' if more == 1 else 'stand'} out." if more else ""
        return f"{named(one.name)} ({one.kind}) {by}{where}{place}.{also}"

    def top(self, count: int = LISTED) -> list[ModuleDiff]:
        """Return the modules that matter most: the verdict's first, then by ratio, or by rank where all differ."""
        by_ratio = sorted(self.modules.values(), key=lambda one: -(one.ratio if one.ratio is not None else -1.0))
        chosen = [self.modules[name] for name, _ in self.ranking] if self.by_design else by_ratio
        head = [] if self.first is None else [self.modules[self.first]]
        return (head + [one for one in chosen if one.name != self.first])[:count]

    # --- in words ---

    @property
    def title(self) -> str:
        """What was compared."""
        return f"{self.a} and {self.b}"

    @property
    def served(self) -> str:
        """How the second model was served, in words."""
        return {"decode": "decoding with its cache", "left": "padded at the left", "right": "padded at the right",
                "packed": "packed"}.get(self.serve, self.serve)  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each called module, in the order of the calls."""
        names = ("name", "kind", "local", "end_to_end", "floor", "ratio", "worst_sequence", "worst_position", "missing")
        return [{name: getattr(one, name) for name in names} for one in self.modules.values()]

    def to_pandas(self) -> Any:
        """Return `rows` as a data frame, with the modules as its index."""
        return optional("pandas").DataFrame(self.rows()).set_index("name")

    def values(self) -> dict[str, float]:
        """Return the numbers that a check may limit, by name; `ratio` is the largest of the modules."""
        ratios = [one.ratio for one in self.modules.values() if one.ratio is not None]
        found = {"ratio": max(ratios, default=0.0), "standing_out": float(len(self.standing_out))} if ratios else {}
        if self.logprobs is not None:
            own = self.logprobs
            found |= {"logprob": own.mean_absolute, "logprob_worst": abs(own.worst), "kl_at_least": own.kl_at_least}
        root = self.modules.get("")
        if root is not None and root.end_to_end is not None:
            found["error"] = root.end_to_end
        if self.outputs is not None:
            found |= {"kl": self.outputs.kl, "agreement": self.outputs.agreement}
            for side in "ab":
                perplexity = getattr(self.outputs, f"perplexity_{side}")
                found |= {} if perplexity is None else {f"perplexity_{side}": perplexity}
        return found

    def __str__(self) -> str:
        width = terminal_width()
        served = f" ({self.served})" if self.serve else ""
        lines = [wrapped(f"{self.title}{served} on {self.data}: {plural(self.examples, 'example')}", width)]
        lines += ["", wrapped(self.sentence, width), "", *self._table(width)]
        said = (*self.output_lines(), self.patched_in_words(), *self.routing_lines())
        lines += [wrapped(line, width) for line in said if line]
        lines += [wrapped(str(one), width) for one in self.arguments[:LISTED]]
        lines += [wrapped(self.weights_in_words(), width)] if self.weights else []
        lines += [wrapped(f"warning: {caveat}", width) for caveat in self.caveats]
        return "\n".join(lines)

    def _table(self, width: int) -> list[str]:
        head = ["module", "local", "floor", "ratio", "end to end"]
        rows = [[cut_short(named(one.name), max(width - 44, 16)), *number_cells(one)] for one in self.top()]
        return [*aligned([head, *rows]), ""] if rows else []

    def output_lines(self) -> list[str]:
        """Return what is said of the predictions."""
        out = self.outputs
        if out is None:
            return [] if self.logprobs is None else self.logprobs.lines()
        made = "outputs that a makes of b's last states" if self.way == "recorded" else "outputs"
        said = f"{made}: KL {out.kl:.3g}, same first choice in {out.agreement:.2%} of {out.predictions:,} predictions"
        if out.perplexity_a is not None and out.perplexity_b is not None:
            said += f"; perplexity {out.perplexity_a:.4g} and {out.perplexity_b:.4g}"
        return [said]

    def patched_in_words(self) -> str:
        """Return at which block the KL falls most where a's outputs take the places of b's; nothing if not measured."""
        if self.unpatched is None or not self.patched:
            return ""
        left = [self.unpatched, *self.patched.values()]
        falls = [before - after for before, after in pairwise(left)]
        most = max(range(len(falls)), key=lambda k: falls[k])
        head = f"patched: of KL {self.unpatched:.3g} on the first batch"
        if falls[most] <= FALLS * self.unpatched:
            return f"{head} no block's output takes a part away"
        name = [*self.patched][most]
        return f"{head} {left[most + 1]:.3g} is left with a's output after {named(name)}, where it falls most" + (
            f", from {left[most]:.3g}" if most else ""
        )

    def routing_lines(self) -> list[str]:
        """Return what is said of mixtures of experts: how many choices agree, and the first router that differs."""
        if not self.routing:
            return []
        same, tokens = (sum(getattr(one, name) for one in self.routing.values()) for name in ("same", "tokens"))
        apart = [(name, one) for name, one in self.routing.items() if one.same < one.tokens]
        said = f"routing: the same experts in {same:,} of {tokens:,} choices"
        if apart:
            name, one = apart[0]
            said += f"; the first that differ, {one.tokens - one.same:,} of {one.tokens:,} tokens, are of {named(name)}"
        return [said]

    def weights_in_words(self) -> str:
        """Return how many tensors stand in which relation, with what says more of it where that is the same for all."""
        said = [f"{len(own)} {relation}{_shared_detail(own)}" for relation, own in self.weights_by_relation().items()]
        return "weights: " + ", ".join(said)

    def weights_by_relation(self) -> dict[str, list[WeightDiff]]:
        """Return the tensors by their relations."""
        found: dict[str, list[WeightDiff]] = {}
        for one in self.weights.values():
            found.setdefault(one.relation, []).append(one)
        return found

    def __repr__(self) -> str:
        return f"Diff({self.a!r}, {self.b!r}, first={self.first!r}, {len(self.modules)} modules)"

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields."""
        return {
            "first": self.first, "sentence": self.sentence, "standing_out": self.standing_out,
            "by_design": sorted(self.by_design), "ranking": [list(place) for place in self.ranking],
            "outlying": self.outlying, "values": self.values(), "quantities": QUANTITIES,
        }  # fmt: skip


def _shared_detail(weights: Sequence[WeightDiff]) -> str:
    """Return what is said of most of these tensors and of how many, in brackets."""
    counts = Counter(one.detail for one in weights if one.detail)
    if not counts or len(counts) > DETAILS:
        return ""
    if counts.total() == len(weights) and len(counts) == 1:
        return f" ({next(iter(counts))})"
    return f" ({'; '.join(f'{count} × {detail}' for detail, count in counts.most_common())})"


def number_cells(one: ModuleDiff) -> list[str]:
    """Return the numbers of a module as texts."""
    values = (one.local, one.floor, one.ratio, one.end_to_end)
    styles = (".2e", ".2e", ".3g", ".2e")
    return ["–" if value is None else f"{value:{style}}" for value, style in zip(values, styles, strict=True)]


def _robust_z(one: ModuleDiff, family: Sequence[ModuleDiff]) -> float:
    """Return how far a call lies from the others of its family, by the logarithms of the ratios."""
    others = [_log_ratio(own) for own in family if own.name != one.name and own.ratio is not None]
    is_trained = any(relation in TRAINED for relation in one.changed.split(", "))
    return _z(_log_ratio(one), others, LEAST_SPREAD_TRAINED if is_trained else LEAST_SPREAD)


def _z(value: float, others: Sequence[float], least: float) -> float:
    """Return how far a value lies from the median of others, in robust standard deviations.

    The others alone count, so that one of few does not hide in the spread.
    """
    if not others:
        return 0.0
    median = float(np.median(others))
    spread = SPREAD * float(np.median(np.abs(np.array(others) - median)))
    return (value - median) / max(spread, least)


def _place(name: str) -> str:
    """Return a name without the numbers in it, as those in other blocks have it."""
    return re.sub(r"\b\d+\b", "*", name)


def _log_ratio(one: ModuleDiff) -> float:
    return math.log(min(max(one.ratio or 0.0, 1e-3), 1e12))
