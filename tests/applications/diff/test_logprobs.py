"""Log-probabilities of an engine: what is read of its files, and what they say of a model."""

import json
import math

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import FileError, ForwardError, InvalidValue, ShapeError
from recording_worlds import language
from refusals import refused

PROMPT, ANSWER = 4, 9


def generated(model, sequences=6):
    """Return token ids and the log-probabilities that a model gives them, computed token by token."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (sequences, PROMPT), generator=drawn)
    logprobs = [torch.full((sequences,), math.nan)]
    with torch.no_grad():
        for place in range(1, PROMPT):
            logs = model(ids[:, :place])[:, -1].double().log_softmax(-1)
            logprobs.append(logs[torch.arange(sequences), ids[:, place]])
        for _ in range(ANSWER):
            logs = model(ids)[:, -1].double().log_softmax(-1)
            token = torch.multinomial(logs.exp(), 1, generator=drawn)
            logprobs.append(logs.gather(1, token)[:, 0])
            ids = torch.cat([ids, token], 1)
    return ids.tolist(), torch.stack(logprobs, 1).tolist()


def plain(ids, logs):
    return {"token_ids": ids, "logprobs": [None, *logs[1:]]}


def completion(ids, logs):
    answer = {"tokens": [f"token_id:{token}" for token in ids[PROMPT:]], "token_logprobs": logs[PROMPT:]}
    return {"choices": [{"prompt_token_ids": ids[:PROMPT], "logprobs": answer}]}


def chat(ids, logs):
    content = [
        {"token": f"token_id:{token}", "logprob": value}
        for token, value in zip(ids[PROMPT:], logs[PROMPT:], strict=True)
    ]
    return {"prompt_token_ids": ids[:PROMPT], "choices": [{"logprobs": {"content": content}}]}


def with_prompt(ids, logs):
    prompt = [
        None,
        *(
            {str(token): {"logprob": value, "rank": 1}}
            for token, value in zip(ids[1:PROMPT], logs[1:PROMPT], strict=True)
        ),
    ]
    return {"choices": [{"prompt_token_ids": ids[:PROMPT], "prompt_logprobs": prompt, "token_ids": []}]}


def echoed(ids, logs):
    answer = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [None, *logs[1:]]}
    return {"choices": [{"prompt_token_ids": ids[:PROMPT], "token_ids": ids[PROMPT:], "logprobs": answer}]}


def offline(ids, logs):
    answer = [{token: {"logprob": value, "rank": 3}} for token, value in zip(ids[PROMPT:], logs[PROMPT:], strict=True)]
    return {"prompt_token_ids": ids[:PROMPT], "outputs": [{"token_ids": ids[PROMPT:], "logprobs": answer}]}


FORMS = {
    plain: PROMPT - 1 + ANSWER,
    echoed: PROMPT - 1 + ANSWER,
    completion: ANSWER,
    chat: ANSWER,
    with_prompt: PROMPT - 1,
    offline: ANSWER,
}


def records(model, form=plain):
    return [form(ids, logs) for ids, logs in zip(*generated(model), strict=True)]


def diff(a, b):
    return nk.diff(a, b, progress=False)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_models_own_log_probabilities_do_not_differ(tmp_path, form, ending):
    found = records(language(), form)
    text = json.dumps(found) if ending == "json" else "\n".join(map(json.dumps, found))
    (tmp_path / f"b.{ending}").write_text(text)
    result = diff(language(), str(tmp_path / f"b.{ending}")).logprobs
    assert (result.tokens, result.sequences) == (6 * FORMS[form], 6)
    assert abs(result.worst) < 1e-5
    assert (result.first_sequence, result.parted) == (None, 0)
    assert result.kl_at_least == pytest.approx(0, abs=1e-9)
    assert "differs beyond rounding" in diff(language(), found).sentence


def test_arrays_are_read_too(tmp_path):
    ids, logs = map(np.array, generated(language()))
    padded = np.concatenate([ids, np.full((6, 2), -1)], 1), np.concatenate([logs, np.full((6, 2), np.nan)], 1)
    np.savez(tmp_path / "b.npz", token_ids=padded[0], logprobs=padded[1])
    result = diff(language(), str(tmp_path / "b.npz")).logprobs
    assert (result.tokens, result.parted) == (6 * (PROMPT - 1 + ANSWER), 0)


def test_an_engine_in_bfloat16_is_no_fault():
    result = diff(language(), records(language().bfloat16())).logprobs
    assert result.parted == 0
    assert result.mean_absolute > 1e-4


def test_the_numbers_are_those_of_a_slow_transcription():
    other = language()
    other.blocks[1].scale = 1.5
    found, model = records(other), language()
    result, apart, bounds = diff(model, found).logprobs, [], []
    for sequence, record in enumerate(found):
        with torch.no_grad():
            own = model(torch.tensor([record["token_ids"]]))[0].double().log_softmax(-1)
        for place, (token, value) in enumerate(zip(record["token_ids"], record["logprobs"], strict=True)):
            if place:
                mine = own[place - 1, token].item()
                apart.append((value - mine, sequence, place, token))
                p, q = math.exp(value), math.exp(mine)
                bounds.append(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    worst = max(apart, key=lambda one: abs(one[0]))
    assert result.worst == pytest.approx(worst[0], abs=1e-4)
    assert (result.worst_sequence, result.worst_position, result.worst_token) == worst[1:]
    assert result.mean_absolute == pytest.approx(np.mean([abs(one[0]) for one in apart]), abs=1e-4)
    assert result.mean_b - result.mean_a == pytest.approx(np.mean([one[0] for one in apart]), abs=1e-4)
    assert result.kl_at_least == pytest.approx(np.mean(bounds), abs=1e-5)
    beyond = [one for one in apart if abs(one[0]) > 3 * result.rounding]
    assert (result.first_sequence, result.first_position) == beyond[0][1:3]
    assert result.parted == len(beyond)


def test_the_bound_lies_below_the_divergence_and_rises_with_what_is_reported():
    other = language()
    other.blocks[1].scale = 1.5
    ids, _ = generated(other)
    with torch.no_grad():
        theirs, own = (model(torch.tensor(ids)).double().log_softmax(-1)[:, :-1] for model in (other, language()))
    whole = (theirs.exp() * (theirs - own)).sum(-1).mean().item()
    bounds = []
    for count in (1, 5, 40):
        found = []
        for place, tokens in enumerate(ids):
            top = [theirs[place, position].topk(count).indices.tolist() for position in range(len(tokens) - 1)]
            kept = [{*several, token} for several, token in zip(top, tokens[1:], strict=True)]
            logprobs = [
                {str(token): {"logprob": theirs[place, position, token].item()} for token in several}
                for position, several in enumerate(kept)
            ]
            found.append({"token_ids": tokens, "logprobs": [None, *logprobs]})
        bounds.append(diff(language(), found).logprobs.kl_at_least)
    assert 0 < bounds[0] < bounds[1] < bounds[2] == pytest.approx(whole, rel=1e-4)


def test_a_fault_from_some_token_on_is_where_they_part():
    found = records(language())
    for value in range(8, PROMPT + ANSWER):
        found[2]["logprobs"][value] -= 0.7
    result = diff(language(), found)
    assert (result.logprobs.first_sequence, result.logprobs.first_position) == (2, 8)
    assert "part at position 8 of sequence 2: 5 tokens of 72 differ" in result.sentence


def test_the_result_is_saved_printed_and_reported(tmp_path):
    found = diff(language(), records(language()))
    found.save(tmp_path / "found.netkin")
    again = nk.load(tmp_path / "found.netkin")
    assert (again.logprobs, str(again)) == (found.logprobs, str(found))
    assert "KL(b ‖ a) is at least" in str(found)
    assert found.values().keys() == {"logprob", "logprob_worst", "kl_at_least"}
    nk.report(found, tmp_path / "found.html")
    assert "0 of 72" in (tmp_path / "found.html").read_text()


REFUSED = [
    ([{"token_ids": [1, 2, 3]}], InvalidValue, "holds no log-probabilities"),
    ([{"token_ids": [1, 2, 3], "logprobs": [None, -1.0]}], ShapeError, "3 token ids and 2 log-probabilities"),
    ([{"token_ids": [1, 2], "logprobs": [-2.0, -1.0]}], InvalidValue, "what came before is missing"),
    ([{"token_ids": [1], "logprobs": [None]}], InvalidValue, "no log-probabilities"),
    ([{"token_ids": [1, 99], "logprobs": [None, -1.0]}], ForwardError, "no embedding for some of the tokens"),
    (
        [{"choices": [{"logprobs": {"tokens": [" the"], "token_logprobs": [-1.0]}}]}], InvalidValue,
        "has tokens as text, such as ' the'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("found, error, said", REFUSED)
def test_what_is_missing_is_said(found, error, said):
    with pytest.raises(error, match=said):
        diff(language(), found)


@pytest.mark.parametrize("options", [{"data": "digits"}, {"match": {"blocks": "layers"}}])
def test_what_log_probabilities_do_not_need_is_refused(options):
    with refused(InvalidValue, *options):
        nk.diff(language(), records(language()), progress=False, **options)


def test_examples_are_the_first_sequences_and_their_digest_tells_them_apart():
    model = language()
    found = [nk.diff(model, records(model), examples=count, progress=False) for count in (2, 3)]
    assert [one.logprobs.sequences for one in found] == [2, 3]
    assert len({one.provenance["log-probabilities of b"] for one in found}) == 2


def test_a_model_that_runs_in_one_precision_alone_is_cast_whole():
    model = language()
    model.register_buffer("turn", torch.eye(model.head.in_features), persistent=False)
    model.head.register_forward_pre_hook(lambda module, inputs: inputs[0] @ model.turn)
    assert nk.diff(model, records(model), progress=False).logprobs.parted == 0


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"token_ids": [1')
    with pytest.raises(FileError, match="is no JSON"):
        diff(language(), str(tmp_path / "b.jsonl"))


def test_a_model_without_embedding_for_the_tokens_says_so():
    class Vision(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return torch.ones(len(input_ids), 5)

    with pytest.raises(ShapeError, match="language model") as refused:
        diff(Vision(), records(language()))
    assert refused.value.argument == "a"
