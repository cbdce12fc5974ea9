"""Log-probabilities of tokens as an engine reports them, held against a model's own for the same tokens.

Read are files of JSON, JSON lines and npz, and what such files hold. A record is one sequence in plain form, or a
response of an engine: with `choices`, as servers of OpenAI's protocol give it, or with `outputs`, as vLLM's Python
interface does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.diff.floor import ABOVE, run_in_precision
from netkin.applications.diff.predictions import logits_of
from netkin.errors import FileError, InvalidValue, ShapeError
from netkin.progress import with_progress
from netkin.representations.hooks import inference_mode_of
from netkin.representations.inputs import dtype_of
from netkin.results.diff import THRESHOLD, LogprobDiff
from netkin.sources.names import require_file
from netkin.sources.recordings import MASKS, TOKENS, arrays_in

AT_ONCE = 8  # sequences that are run together
LEAST = 1e-12  # of a probability, below which it counts as this
# vLLM's server writes tokens so where `return_tokens_as_token_ids` is asked for. Its `prompt_logprobs` are None for the
# first token, then mappings from token ids to `logprob`, `rank` and `decoded_token`; see vllm/logprobs.py.
PLACEHOLDER = re.compile(r"token_id:(\d+)")
REMEDY = (
    "ask the engine for `return_token_ids` (or `return_tokens_as_token_ids`) and for `prompt_logprobs` or `logprobs`"
)


@dataclass(frozen=True)
class TokenSequence:
    """A sequence of tokens with their log-probabilities given those before; NaN where none was reported.

    Args:
        tokens: their ids.
        logprobs: of each of them.
        top: by position, those of several tokens; empty where only one was reported.
    """

    tokens: Sequence[int]
    logprobs: np.ndarray
    top: Mapping[int, Mapping[int, float]] = field(default_factory=dict)


# --- reading ----------------------------------------------------------------------------------------------------------


def is_logprobs(b: Any) -> bool:
    """Return whether something holds log-probabilities: a file of JSON, an npz file of such arrays, or records."""
    if isinstance(b, str):
        path = Path(b).expanduser()
        if path.suffix == ".npz" and path.is_file():
            return "logprobs" in arrays_in(path)
        return path.suffix in (".json", ".jsonl")
    return isinstance(b, (list, tuple)) and bool(b) and all(isinstance(record, Mapping) for record in b)


def sequences_of(b: Any) -> list[TokenSequence]:
    """Return the sequences in a file, or in records."""
    if isinstance(b, str) and b.endswith(".npz"):
        found = list(_of_arrays(Path(b).expanduser()))
    else:
        name = b if isinstance(b, str) else "the records"
        records = _records(Path(b).expanduser()) if isinstance(b, str) else b
        found = [one for place, record in enumerate(records) for one in _of_record(record, f"record {place} of {name}")]
    if not any(np.isfinite(one.logprobs).any() for one in found):
        raise InvalidValue(f"{b if isinstance(b, str) else 'b'!r} holds no log-probabilities; {REMEDY}.", argument="b")
    return found


def _records(path: Path) -> list[Any]:
    require_file(path, "file of log-probabilities")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        whole = json.loads(text)
    except (ValueError, OSError) as fault:
        raise FileError(f"{str(path)!r} is no JSON ({fault}); write one object, or one a line in a .jsonl.") from fault
    return whole if isinstance(whole, list) else [whole]


def _of_arrays(path: Path) -> Iterator[TokenSequence]:
    """Yield the sequences in an npz file: `token_ids` and `logprobs`, sequences × positions, and maybe a mask."""
    arrays = arrays_in(path)
    key = next((name for name in TOKENS if name in arrays), None)
    if key is None or arrays[key].shape != arrays["logprobs"].shape or len(arrays[key].shape) != 2:
        raise ShapeError(
            f"{str(path)!r} needs `token_ids` and `logprobs` of one shape, sequences × positions, where NaN stands for "
            "what was not reported.",
            argument="b",
        )
    tokens, logprobs = (arrays[name].read(0, arrays[name].shape[0]).numpy() for name in (key, "logprobs"))
    mask = next((arrays[name].read(0, len(tokens)).numpy() != 0 for name in MASKS if name in arrays), tokens >= 0)
    for ids, values, valid in zip(tokens, logprobs, mask, strict=True):
        yield TokenSequence(ids[valid].tolist(), values[valid].astype(np.float64))


def _of_record(record: Any, where: str) -> Iterator[TokenSequence]:
    """Yield the sequences of a record: that of the record itself, or one for each answer in it."""
    if not isinstance(record, Mapping):
        raise InvalidValue(f"{where} is no mapping.", argument="b")
    answers = record.get("choices", record.get("outputs"))
    for answer in [record] if answers is None else answers:
        whole = {**record, **answer}
        prompt, tokens = list(whole.get("prompt_token_ids") or []), whole.get("token_ids")
        given = whole.get("logprobs")
        if isinstance(given, Mapping):  # as the protocol of completions, or of chats, has them
            texts = given.get("tokens") or [item["token"] for item in given.get("content") or ()]
            tokens = _numbers(texts, where) if tokens is None else tokens
            given = given.get("token_logprobs") or given.get("content")
        tokens = list(tokens or [])
        items = list(given or [None] * len(tokens))
        if not (prompt and len(items) == len(prompt) + len(tokens)):  # else the prompt is echoed with the answer
            items = list(whole.get("prompt_logprobs") or [None] * len(prompt)) + items
        if len(items) != len(prompt) + len(tokens) or not items:
            raise ShapeError(
                f"{where} holds {len(prompt) + len(tokens):,} token ids and {len(items):,} log-probabilities; "
                f"{REMEDY}.",
                argument="b",
            )
        if items[0] is not None and not prompt:
            raise InvalidValue(
                f"{where} gives its first token a log-probability, so that what came before is missing; give "
                f"`prompt_token_ids`: {REMEDY}.",
                argument="b",
            )
        every = [*prompt, *tokens]
        read = [_of_item(item, token) for item, token in zip(items, every, strict=True)]
        top = {place: several for place, (_, several) in enumerate(read) if len(several) > 1}
        yield TokenSequence(every, np.array([value for value, _ in read], np.float64), top)


def _numbers(texts: Iterable[Any], where: str) -> list[int]:
    """Return the ids in placeholders of tokens."""
    found = [text if isinstance(text, int) else PLACEHOLDER.fullmatch(str(text)) for text in texts]
    if missing := [text for text, one in zip(texts, found, strict=True) if one is None]:
        raise InvalidValue(f"{where} has tokens as text, such as {missing[0]!r}, and no ids; {REMEDY}.", argument="b")
    return [one if isinstance(one, int) else int(one[1]) for one in found if one is not None]


def _of_item(item: Any, token: int) -> tuple[float, dict[int, float]]:
    """Return the log-probability of a token, and those of all tokens that were reported in its place."""
    if item is None:
        return math.nan, {}
    if isinstance(item, Mapping) and "logprob" not in item:  # by token id
        several = {
            int(key): float(value["logprob"] if isinstance(value, Mapping) else value) for key, value in item.items()
        }
        return several.get(int(token), math.nan), several
    return float(item["logprob"] if isinstance(item, Mapping) else item), {}


# --- comparing --------------------------------------------------------------------------------------------------------


def diff_of_logprobs(
    model: nn.Module, sequences: Sequence[TokenSequence], run: Callable[[nn.Module, Any], Any]
) -> LogprobDiff:
    """Return how the log-probabilities that were reported differ from a model's own.

    What rounding does to them is told by the model's own in another precision: bfloat16, or one up if it is that.
    """
    dtype = dtype_of(model)
    other = ABOVE.get(dtype, torch.float32) if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    rows: list[tuple[int, int, float, float, float]] = []  # sequence, position, reported, own, own otherwise
    bounds: list[float] = []
    starts = range(0, len(sequences), AT_ONCE)
    with inference_mode_of(model):
        for start in with_progress(starts, "comparing tokens", "batches", total=len(starts)):
            some = sequences[start : start + AT_ONCE]
            own = _known_logs(model, some, run)
            rounded = run_in_precision(model, other, partial(_known_logs, model, some, run))
            for (place, position), logs in own.items():
                token, value = int(some[place].tokens[position]), float(some[place].logprobs[position])
                rows.append((start + place, position, value, logs[token], rounded[place, position][token]))
                bounds.append(_least_kl(some[place].top.get(position, {token: value}), logs))
    return _summed(rows, bounds, sequences, str(other).removeprefix("torch."))


def _batch(some: Sequence[TokenSequence]) -> dict[str, Tensor]:
    longest = max(len(sequence.tokens) for sequence in some)
    ids = torch.zeros(len(some), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, sequence in enumerate(some):
        ids[place, : len(sequence.tokens)] = torch.tensor(list(sequence.tokens))
        mask[place, : len(sequence.tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _known_logs(
    model: nn.Module, some: Sequence[TokenSequence], run: Callable[[nn.Module, Any], Any]
) -> dict[tuple[int, int], dict[int, float]]:
    """Return a model's log-probabilities of the tokens that were reported, by sequence and position."""
    logits, found = _logits(model, _batch(some), run), dict[tuple[int, int], dict[int, float]]()
    for place, sequence in enumerate(some):
        for position in np.flatnonzero(np.isfinite(sequence.logprobs)).tolist():
            if position:  # before the first token there is nothing
                tokens = [int(sequence.tokens[position]), *sequence.top.get(position, ())]
                logs = logits[place, position - 1].double().log_softmax(-1)[tokens]  # of all it would take the memory
                found[place, position] = dict(zip(tokens, logs.tolist(), strict=True))
    return found


def _logits(model: nn.Module, batch: Mapping[str, Tensor], run: Callable[[nn.Module, Any], Any]) -> Tensor:
    logits = logits_of(run(model, batch))
    if logits is None or logits.shape[:-1] != batch["input_ids"].shape:
        got = "none" if logits is None else f"shape {tuple(logits.shape)}"
        raise ShapeError(
            f"log-probabilities are those of a language model, which gives logits of sequences × tokens × vocabulary; "
            f"got {got}.",
            argument="a",
        )
    largest = int(batch["input_ids"].max())
    if largest >= logits.shape[-1]:
        raise InvalidValue(
            f"b has the token {largest:,}, and a knows {logits.shape[-1]:,}; take the model whose tokenizer made them.",
            argument="b",
        )
    return logits


def _least_kl(reported_by: Mapping[int, float], own: Mapping[int, float]) -> float:
    """Return what KL(B ‖ A) is at least, from some tokens' probabilities; all other tokens count as one."""
    theirs = np.exp([min(value, 0.0) for value in reported_by.values()])
    mine = np.exp([own[token] for token in reported_by])
    p, q = np.append(theirs, max(1 - theirs.sum(), 0.0)), np.append(mine, max(1 - mine.sum(), 0.0))
    p, q = p / p.sum(), np.maximum(q / q.sum(), LEAST)
    return float(np.sum(np.where(p > 0, p * np.log(np.maximum(p, LEAST) / q), 0.0)))


def _summed(
    rows: Sequence[tuple[int, int, float, float, float]],
    bounds: Sequence[float],
    sequences: Sequence[TokenSequence],
    precision: str,
) -> LogprobDiff:
    if not rows:
        raise InvalidValue("only first tokens have a log-probability, before which there is nothing.", argument="b")
    table = np.array(rows)
    reported_by, own = table[:, 2], table[:, 3]
    apart, rounding = reported_by - own, np.abs(table[:, 4] - own)
    worst = int(np.abs(apart).argmax())
    parted = np.flatnonzero(np.abs(apart) > THRESHOLD * rounding.max())
    sequence, position = (int(table[worst, place]) for place in (0, 1))
    return LogprobDiff(
        tokens=len(table),
        sequences=len(sequences),
        mean_a=float(own.mean()),
        mean_b=float(reported_by.mean()),
        mean_absolute=float(np.abs(apart).mean()),
        worst=float(apart[worst]),
        worst_sequence=sequence,
        worst_position=position,
        worst_token=int(sequences[sequence].tokens[position]),
        first_sequence=int(table[parted[0], 0]) if len(parted) else None,
        first_position=int(table[parted[0], 1]) if len(parted) else None,
        parted=len(parted),
        rounding=float(rounding.max()),
        mean_rounding=float(rounding.mean()),
        precision=precision,
        kl_at_least=float(np.mean(np.maximum(bounds, 0.0))),
    )
