"""A ranking of pretrained models for some data by a named score, and how certain it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from netkin.errors import NoValue, require_listed
from netkin.results.caveats import Caveat
from netkin.results.labels import HOLE, plural, short_names
from netkin.results.packing import LongForm, Result
from netkin.results.records import now, optional
from netkin.results.text import grid, number_text, number_texts, terminal_width, wrapped
from netkin.results.values import Difference, Match, Values

COLUMNS = ("model", "score", "value", "error", "behind", "behind_error", "clear", "reason")  # of the long form
SENTENCE = 40  # letters of a name of a model, up to which sentences hold it whole


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Ranking(Result):
    """Pretrained models, ranked for some data by `score`: frozen, labelled, and with its provenance.

    `tables` holds a table for each score, whose one row is the data and whose columns are the models; where a score
    does not serve a model there is a hole with the reason. `costs` says how many forward passes over the examples a
    score takes, a backward pass counted as two; scores share them. `parameters` are the weights of each model.
    `reliability` holds Kendall's τ of the order by a score with the order after fine-tuning, and its standard error, as
    measured in trials on other data.

    `ranking.models` are the models from the first to the last, `ranking["model"]` is the value of one, and
    `ranking["model", "knn"]` that of another score. `ranking.by("knn")` ranks by another score.
    """

    kind: ClassVar[str] = "ranking"

    score: str
    tables: Mapping[str, Values]
    costs: Mapping[str, float]
    parameters: Mapping[str, int]
    data: str
    examples: int
    classes: int
    version: str
    created: str = field(default_factory=now)
    caveats: tuple[Caveat, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    reliability: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """The models by rank, the best first; those without a value come last."""
        values, sign = self._row(self.score), 1 if self.tables[self.score].higher_is_closer else -1
        order = np.where(np.isnan(values), np.inf, -sign * values).argsort(kind="stable")
        return tuple(self._unranked[place] for place in order)

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of the scores, that of the rank first."""
        return self.score, *(name for name in self.tables if name != self.score)

    @property
    def best(self) -> str:
        """The model that is ranked first."""
        return self.lead.layer

    @property
    def lead(self) -> Match:
        """The first model and its value; `second`, `margin`, `margin_error` and `clear` are its lead over the next."""
        matches = self.tables[self.score].best_matches()
        if not matches:
            raise NoValue(f"{self.score!r} has a value for none of the {len(self._unranked)} models.")
        return matches[self.data]

    def __getitem__(self, key: str | tuple[str, str]) -> float:
        """Return a model's value by the score of the rank, or by another of the scores."""
        model, score = (key, self.score) if isinstance(key, str) else key
        require_listed("model", model, self._unranked)
        return self.table(score)[self.data, model]

    def __len__(self) -> int:
        return len(self._unranked)

    def __iter__(self) -> Iterator[str]:
        return iter(self.models)

    def __repr__(self) -> str:
        return f"Ranking({self.score!r}, {list(self.models)}, data={self.data!r}, {self.examples:,} examples)"

    def table(self, score: str | None = None) -> Values:
        """Return the table of a score, by default that of the rank."""
        name = self.score if score is None else score
        require_listed("score", name, self.tables)
        return self.tables[name]

    def by(self, score: str) -> Ranking:
        """Return the ranking of the same models by another of its scores."""
        return replace(self, score=self.table(score).id)

    def behind(self, score: str | None = None) -> dict[str, Difference]:
        """Return how far each model with a value is behind the first of that score, which is 0 behind."""
        ranking = self if score is None else self.by(score)
        if np.isnan(ranking._row(ranking.score)).all():
            return {}
        table, best = ranking.table(), self._unranked.index(ranking.best)
        differences = {model: table.difference(0, best, self._unranked.index(model)) for model in ranking.models}
        return {model: behind for model, behind in differences.items() if not math.isnan(behind.value)}

    def unclear(self) -> tuple[str, ...]:
        """Return the models, by rank, that the score does not separate from the first."""
        return tuple(model for model, behind in self.behind().items() if model != self.best and not behind.clear)

    @property
    def conclusion(self) -> str:
        """Which model comes first, whether its lead exceeds its error, and whether the other scores agree."""
        return " ".join(filter(None, [self.lead_in_words, self.agreement]))

    @property
    def lead_in_words(self) -> str:
        """Two sentences: which model comes first by the score of the rank, and whether its lead exceeds its error."""
        if not self.behind():
            return f"{self.score} has a value for none of the {len(self)} models."
        lead, rest = self.lead, self.unclear()
        names = short_names(self._unranked, SENTENCE)
        first = f"Of {plural(len(self), 'model')} {names[lead.layer]!r} comes first by {self.score}"
        if lead.second is None:
            return f"{first}, the only one with a value." if len(self) > 1 else f"{first}; there is no other."
        margin = number_text(lead.margin or 0.0, lead.margin_error)
        by = f"its lead over {names[lead.second]!r} by this score is {margin}"
        if lead.clear is None:
            return f"{first}: {by}. Without standard errors nothing tells whether that is more than chance."
        if rest:
            shown = [repr(names[model]) for model in (rest if len(rest) <= 4 else rest[:3])]
            named = ", ".join(shown) + (f" and {len(rest) - len(shown)} more" if len(rest) > len(shown) else "")
            within = "more" if lead.clear else "not more"
            return f"{first}; {by}, {within} than its error. These examples cannot distinguish it from {named}."
        others = ", and so are its leads over all other models" if len(self.behind()) > 2 else ""
        return f"{first}; {by}, more than its error over these examples (95 % interval){others}."

    @property
    def agreement(self) -> str:
        """Whether the other scores put the same model first; empty if there is no other score with a value for it."""
        if not self.behind():
            return ""
        names, same, apart = short_names(self._unranked, SENTENCE), list[str](), list[str]()
        for score in self.scores[1:]:
            behind = self.behind(score).get(self.best)
            if behind is None:
                continue
            if behind.value <= 0:
                same.append(score)
                continue
            first, by = names[self.by(score).best], number_text(behind.value, behind.error)
            within = {True: ", more than its error", False: ", not more than its error", None: ""}[behind.clear]
            apart.append(f"by {score} {first!r} comes first, {by} before {names[self.best]!r}{within}")
        agree = f"{names[self.best]!r} comes first by {', '.join(same)}, too." if same else ""
        return " ".join(filter(None, [agree, f"Scores disagree: {'; '.join(apart)}." if apart else ""]))

    @property
    def reliability_in_words(self) -> str:
        """How well the orders by these scores agreed with those after fine-tuning, where that was measured."""
        known = [f"{self.reliability_text(score)} by {score}" for score in self.scores if score in self.reliability]
        if not known:
            return ""
        return (
            "In netkin's trials the order by a score agreed with the order after fine-tuning with Kendall's τ = "
            f"{', '.join(known)} (1: the same order, 0: random ranks). These are means over data sets; on one data "
            "set, with few models, τ can be much lower, even below 0."
        )

    def reliability_text(self, score: str) -> str:
        """Return τ of a score with its standard error as text; empty where it was not measured."""
        tau, error = self.reliability.get(score, (math.nan, math.nan))
        return "" if math.isnan(tau) else f"{tau:.2f} ± {error:.2f}"

    @property
    def title(self) -> str:
        """The title: which models were ranked for which data."""
        return f"{plural(len(self), 'model')} for {self.data}"

    def __str__(self) -> str:
        width = terminal_width()
        lines = [wrapped(f"{self.title}: {plural(self.examples, 'example')}, {self.classes} classes", width)]
        lines += ["", *grid(self.models, self.columns(), self.cells(), width), "", wrapped(self.conclusion, width)]
        notes = [*filter(None, [self.reliability_in_words]), *self.reasons(), self.cost_in_words]
        lines += [wrapped(line, width) for line in notes]
        return "\n".join([*lines, *(wrapped(f"warning: {caveat}", width) for caveat in self.caveats)])

    def reasons(self) -> Iterator[str]:
        """Yield why values and standard errors are missing, each reason once for a model, with its scores."""
        scores_of: dict[tuple[str, str, str], list[str]] = {}
        for score in self.scores:
            table = self.tables[score]
            for what, missing in (("no value", table.missing), ("no standard error", table.error_reasons)):
                for (_, model), why in missing.items():
                    scores_of.setdefault((model, what, why), []).append(score)
        for (model, what, why), scores in scores_of.items():
            named = "any score" if len(scores) == len(self.tables) else ", ".join(scores)
            yield f"{model!r} has {what} by {named}: {why}"

    @property
    def cost_in_words(self) -> str:
        """What the ranking took of each model."""
        most = max(self.costs.values(), default=0.0)
        return f"cost: {most:g} forward pass{'es' if most != 1 else ''} of each model over the examples, for all scores"

    def columns(self) -> list[str]:
        """Return the heads of the columns that a table of the ranking shows beside its models."""
        return [self.score, "behind", *self.scores[1:], "parameters"]

    def cells(self) -> list[list[str]]:
        """Return the content of these columns, a row for each model by rank."""
        order = [self._unranked.index(model) for model in self.models]
        known = self.behind()
        behind = [known.get(model, Difference(math.nan)) for model in self.models]
        differences = number_texts([each.value for each in behind], [each.error for each in behind])
        first, *others = (number_texts(self._row(s)[order], self.tables[s].to_errors()[0][order]) for s in self.scores)
        parameters = [f"{self.parameters[model]:,}" if model in self.parameters else HOLE for model in self.models]
        columns = [first, differences, *others, parameters]
        return [list(row) for row in zip(*columns, strict=True)]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield `COLUMNS` for each score and each model by its rank; what is not known is None."""
        for score in self.scores:
            table, ranking = self.tables[score], self.by(score)
            behind = ranking.behind()
            for model in ranking.models:
                place = self._unranked.index(model)
                value, error = float(table.values[0, place]), float(table.to_errors()[0, place])
                why = table.missing.get((self.data, model), table.error_reasons.get((self.data, model), ""))
                difference = behind.get(model, Difference(math.nan))
                known = (None if math.isnan(number) else number for number in (value, error, difference.value))
                yield model, score, *known, difference.error, difference.clear, why

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: the conclusion, and a row for each score and model."""
        return {"conclusion": self.conclusion, "ranks": [dict(zip(COLUMNS, row, strict=True)) for row in self.rows()]}

    def to_pandas(self, *, long: bool = False) -> Any:
        """Return a data frame with a row for each model by rank and a column for each score.

        With `long` there is a row for each score and model, with standard errors and differences to the first.
        """
        pandas = optional("pandas")
        if long:
            return pandas.DataFrame(list(self.rows()), columns=COLUMNS)
        order = [self._unranked.index(model) for model in self.models]
        columns = {score: self._row(score)[order] for score in self.scores}
        return pandas.DataFrame(columns, index=pandas.Index(self.models, name="model"))

    def long_form(self) -> LongForm:
        """Return a row for each score and each model by its rank."""
        return COLUMNS, self.rows()

    @property
    def _unranked(self) -> tuple[str, ...]:
        """The models in the order in which they were given, that of the tables."""
        return self.tables[self.score].layers_b

    def _row(self, score: str) -> np.ndarray:
        return self.tables[score].values[0]
