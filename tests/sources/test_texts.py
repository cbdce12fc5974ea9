"""Texts as people have them: lines, tables, folders, chats and lists become rows of tokens."""

import csv
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from late_packages import LatePackage, transformers
from netkin.comparing.engines.worker import data_identity
from netkin.errors import ForwardError, InvalidValue, SourceError, UnknownName
from netkin.sources import load_data, load_model, tokenized
from netkin.sources.batches import overlap_remark, sample

tokenizers, arrow, parquet = (LatePackage(name) for name in ("tokenizers", "pyarrow", "pyarrow.parquet"))

WORDS = [
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    "user",
    "bot",
    *["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far"],
]
TEMPLATE = "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %}"
LINES = [
    "the cat sat", "a dog ran far and the cat sat on the mat", "the mat", "the dog sat on a cat", "far and far",
    "a cat and a dog and a mat and a dog", "dog", "the cat ran", "on the mat the dog sat", "a far cat",
]  # fmt: skip


def numbers(line):
    """Return the tokens of a line with the special one at its start, looked up word by word."""
    return [2, *(WORDS.index(word) for word in line.split())]


def save_model(folder, seed=0, vocabulary=40, words=WORDS, template=TEMPLATE):
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sizes = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, max_position_embeddings=64, pad_token_id=0, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The names of two small language models with one tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return [f"hf:{save_model(folder / name, seed)}" for seed, name in enumerate("ab")]


def write_lines(folder):
    (folder / "lines.txt").write_text("\n".join(LINES) + "\n\n   \n", encoding="utf-8")
    return f"text,each=line:{folder / 'lines.txt'}"


def write_paragraphs(folder):
    broken = [line.replace(" ", "\r\n", 1) for line in LINES]
    (folder / "paragraphs.txt").write_bytes("\n".join(["", *(f"{text}\n \n" for text in broken)]).encode())
    return f"text,each=paragraph:{folder / 'paragraphs.txt'}"


def write_documents(folder):
    for number, line in enumerate(LINES):
        (folder / f"{number}.txt").write_text(line)
    return f"text,each=document:{folder}"


def write_json(folder):
    rows = [json.dumps({"id": number, "text": line}) for number, line in enumerate(LINES)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return f"text:{folder / 'rows.jsonl'}"


def write_csv(folder, delimiter=",", suffix="csv"):
    with (folder / f"rows.{suffix}").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([("id", "words"), *((str(n), line.replace(" ", "\n", 1)) for n, line in enumerate(LINES))])
    return f"text,column=words:{folder / f'rows.{suffix}'}"


def write_tsv(folder):
    return write_csv(folder, "\t", "tsv")


def table():
    return arrow.table({"id": list(range(len(LINES))), "prompt": LINES})


def write_parquet(folder):
    parquet.write_table(table(), folder / "rows.parquet", row_group_size=3)
    return f"text,column=prompt:{folder / 'rows.parquet'}"


def write_many_parquets(folder):
    for part, name in ((table()[:4], "0.parquet"), (table()[4:], "1.parquet")):
        parquet.write_table(part, folder / name)
    return f"text:{folder}"


def write_arrow(folder):
    with arrow.OSFile(str(folder / "rows.arrow"), "wb") as file, arrow.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table())
    return f"text:{folder / 'rows.arrow'}"


def write_saved_to_disk(folder):
    """Write what `save_to_disk` of `datasets` writes: streams of Arrow, and a state that names them in their order."""
    parts = {"data-00001-of-00002.arrow": table()[:4], "data-00000-of-00002.arrow": table()[4:]}
    for name, part in parts.items():
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, part.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in parts]}))
    return f"text,column=prompt:{folder}"


FORMS = [
    write_lines, write_paragraphs, write_documents, write_json, write_csv, write_tsv, write_parquet,
    write_many_parquets, write_arrow, write_saved_to_disk,
]  # fmt: skip


@pytest.mark.parametrize("write", FORMS, ids=lambda write: write.__name__)
def test_texts_of_every_form_become_the_same_tokens(models, tmp_path, write):
    data = load_data(write(tmp_path), batch_size=4, models=models)
    found = [
        ids[mask == 1].tolist()
        for batch in data
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert found == [numbers(line) for line in LINES]
    assert data.examples == len(LINES)
    assert len(data) == 3


def test_the_rest_of_a_batch_is_padded_on_the_right_and_left_out_by_the_mask(models, tmp_path):
    batch = next(iter(load_data(write_lines(tmp_path), batch_size=2, models=models)))
    assert batch["input_ids"].tolist() == [numbers(LINES[0]) + [0] * 8, numbers(LINES[1])]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 8, [1] * 12]


@pytest.mark.parametrize("shape", ["mean", "last", "tokens"])
def test_what_is_padded_does_not_count_whatever_a_batch_holds(models, tmp_path, shape):
    model, spec = load_model(models[0]), write_lines(tmp_path)
    padded, alone = (
        netkin_rows(model, load_data(spec, batch_size=size, models=models), shape) for size in (len(LINES), 1)
    )
    assert padded.shape == alone.shape
    assert np.allclose(padded, alone, atol=1e-5)
    with torch.no_grad():  # another road: each text by itself, without a mask
        hidden = [model(torch.tensor([numbers(line)]), output_hidden_states=True).hidden_states[1][0] for line in LINES]
    wanted = {"mean": [h.mean(0) for h in hidden], "last": [h[-1] for h in hidden], "tokens": [*torch.cat(hidden)]}
    assert np.allclose(padded, torch.stack(wanted[shape]), atol=1e-5)


def netkin_rows(model, data, shape):
    return np.asarray(nk.activations(model, ["model.layers.0"], data, shape=shape)["model.layers.0"])


def test_parts_read_their_own_texts_and_merge_into_the_digest_of_the_whole(models, tmp_path):
    spec = write_lines(tmp_path)
    options = {"measures": ["cka"], "shape": "mean"}
    whole = nk.collect(*models, spec, **options)
    parts = [nk.collect(*models, load_data(spec, 4, models=models), part=(n, 3), **options) for n in (3, 1, 2)]
    merged = nk.merge(parts)
    assert merged.digest == whole.digest
    values = [one.compute("cka")["cka"].values for one in (merged, whole)]
    assert np.allclose(*values, atol=1e-6)
    assert merged.compute("cka").provenance["texts"] == whole.compute("cka").provenance["texts"]
    (tmp_path / "lines.txt").write_text("\n".join([*LINES[:-1], "a far dog"]))
    assert nk.collect(*models, spec, **options).digest != whole.digest


def test_a_part_reads_no_other_texts(models, tmp_path, monkeypatch):
    data = load_data(write_lines(tmp_path), models=models)
    read, before = [], type(data.prepare.texts).read
    monkeypatch.setattr(
        type(data.prepare.texts), "read", lambda self, places: read.extend(places) or before(self, places)
    )
    nk.collect(*models, data, ["cka"], part=(2, 2))
    assert set(read) == {5, 6, 7, 8, 9}


def test_a_sample_of_texts_is_drawn_without_reading_the_others(models, tmp_path):
    data = sample(load_data(write_lines(tmp_path), models=models), 4, seed=1)
    (batch,) = data
    assert len(batch["input_ids"]) == 4 == data.examples
    assert data.counts()["texts"] == 4


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_texts_are_found_wherever_the_blocks_that_are_read_end(tmp_path, monkeypatch, size):
    monkeypatch.setattr(tokenized, "BLOCK", size)
    drawn, path = random.Random(size), tmp_path / "a.txt"
    for _ in range(60):
        path.write_text("".join(drawn.choices(["a", " ", "\n", "\n\n", "é", "bc"], k=drawn.randrange(40))), "utf-8")
        held = path.read_bytes()
        lines = [line for line in held.split(b"\n") if line.strip()]  # another road: Python's own
        paragraphs = re.split(rb"\n(?:[ ]*\n)+", held)
        assert [held[start:stop] for start, stop in tokenized._spans(path)[0]] == lines
        wanted = [part.split() for part in paragraphs if part.strip()]
        assert [held[start:stop].split() for start, stop in tokenized._spans(path, by_paragraph=True)[0]] == wanted


def test_texts_are_identified_by_their_content(models, tmp_path):
    spec, found = write_lines(tmp_path), []
    for line in ("the cat", "the cat", "the dog"):
        (tmp_path / "lines.txt").write_text(line)
        data = load_data(spec, models=models)
        found.append(data_identity(data))
        assert overlap_remark(data, data) == ""  # numbers of texts say nothing
    assert found[0] == found[1] != found[2]


# what is said


def test_how_many_texts_were_cut_is_said(models, tmp_path):
    spec = write_lines(tmp_path).replace("line:", "line,length=6:")
    comparison = nk.compare(*models, spec)
    lengths = [len(numbers(line)) for line in LINES]
    cut = sum(length > 6 for length in lengths)
    assert 0 < cut < len(LINES)
    assert comparison.provenance["texts"] == f"10 texts, {cut} of them cut at 6 tokens, padded on the right"
    assert [str(caveat) for caveat in comparison.caveats if caveat.code == "cut-texts"] == [
        f"10 texts, {cut} of them cut at 6 tokens, padded on the right."
    ]
    assert comparison.data == spec.replace(":", f",tokenizer={models[0][3:]}:", 1)
    (batch,) = load_data(spec, models=models)
    assert batch["attention_mask"].sum(1).tolist() == [min(length, 6) for length in lengths]
    assert batch["input_ids"][1].tolist() == numbers(LINES[1])[:6]
    some = nk.compare(*models, spec, examples=1)
    assert some.provenance["texts"] == "1 text, none cut at 6 tokens, padded on the right"


def test_nothing_is_warned_of_where_no_text_was_cut(models, tmp_path):
    comparison = nk.compare(*models, write_lines(tmp_path))
    assert comparison.provenance["texts"] == "10 texts, none cut at 64 tokens, padded on the right"
    assert not [caveat for caveat in comparison.caveats if caveat.code == "cut-texts"]


def test_rows_of_a_table_are_packed_with_the_token_for_the_end_between_texts(models, tmp_path):
    spec = write_json(tmp_path).replace("text:", "text,each=window,window=9:")
    data = load_data(spec, models=models)
    flat = [number for line in LINES for number in [*numbers(line)[1:], 3]][:-1]
    rows = len(flat) // 8
    assert data.stored.tolist() == [[2, *flat[start : start + 8]] for start in range(0, 8 * rows, 8)]
    said = nk.compare(*models, spec).provenance["texts"]
    assert said == f"{rows} rows of 9 tokens into which the texts were packed, {len(flat) - 8 * rows} tokens left over"
    assert f"2 of the {rows} rows" in nk.compare(*models, spec, examples=2).provenance["texts"]


# lists and chats


def test_a_list_of_texts_is_data_for_models_that_have_a_tokenizer(models, tmp_path):
    from_list, from_file = (nk.compare(*models, data) for data in (LINES, write_lines(tmp_path)))
    assert (from_list["cka"].values == from_file["cka"].values).all()
    assert from_list.provenance["data digest"] == from_file.provenance["data digest"]
    live = nk.compare(*map(load_model, models), LINES)
    assert (live["cka"].values == from_list["cka"].values).all()
    assert from_list.data.endswith(":a list of 10")
    assert nk.diff(*models, LINES, progress=False).examples == 10


def test_a_list_is_split_by_the_tokenizer_that_is_given(models):
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[0][3:])
    net = torch.nn.Sequential(torch.nn.Embedding(40, 4))
    data = load_data(LINES, tokenizer=tokenizer)
    comparison = nk.compare(net, data=data, forward=lambda model, batch: model(batch["input_ids"]), layers=["0"])
    assert comparison.examples == 10
    with pytest.raises(ForwardError, match="a batch holds text"):
        nk.compare(net, data=LINES)


def test_a_model_input_with_a_name_is_fed_by_its_tokenizer(models):
    layers = [nk.ModelInput(model, layers="model.layers.*") for model in models]
    found = nk.compare(*layers, LINES)
    assert (found["cka"].values == nk.compare(*models, LINES, layers="model.layers.*")["cka"].values).all()


def test_a_tokenizer_that_was_saved_again_is_the_same(models):
    folder = models[1][3:]
    config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config | {"is_local": True, "name_or_path": "x"}))
    assert nk.diff(*models, LINES, progress=False).examples == 10


def test_a_diff_says_which_texts_were_cut(models):
    found = nk.diff(*models, load_data(LINES, tokenizer=models[0][3:], length=4), progress=False)
    assert found.provenance["texts"].startswith("10 texts, ")
    assert [one.code for one in found.caveats if "cut" in one.code] == ["cut-texts"]


CHATS = [[{"role": "user", "content": line}, {"role": "bot", "content": "the mat"}] for line in LINES]


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet"])
def test_chats_are_rendered_by_the_template_of_the_tokenizer(models, tmp_path, kind):
    place = CHATS
    if kind == "jsonl":
        (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS))
        place = f"text:{tmp_path / 'chats.jsonl'}"
    elif kind == "parquet":
        parquet.write_table(arrow.table({"id": range(10), "messages": CHATS}), tmp_path / "chats.parquet")
        place = f"text:{tmp_path / 'chats.parquet'}"
    (batch,) = load_data(place, models=models)
    wanted = [numbers(f"user {line} bot the mat") for line in LINES]
    assert [ids[: len(row)].tolist() for ids, row in zip(batch["input_ids"], wanted, strict=True)] == wanted
    assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in wanted]


def test_a_template_from_a_strangers_folder_runs_no_code(tmp_path):
    touch = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% set x = cycler.__init__.__globals__.os.system('touch ran') %}"
    )
    folder = save_model(tmp_path / "model", template=touch)
    with pytest.raises(SourceError, match="can't be rendered by the chat template of .*SecurityError"):
        list(load_data(CHATS, tokenizer=str(folder)))


# two tokenizers


@pytest.fixture(scope="module")
def strangers(models, tmp_path_factory):
    """The names of two language models that number the words in different ways."""
    words = [*WORDS[:4], *reversed(WORDS[4:])]
    return models[0], f"hf:{save_model(tmp_path_factory.mktemp('other') / 'b', 1, words=words)}"


@pytest.mark.parametrize("shape", ["mean", "last"])
def test_models_with_different_tokenizers_get_the_same_texts_each_in_its_own_tokens(strangers, tmp_path, shape):
    spec = write_lines(tmp_path)
    comparison = nk.compare(*strangers, spec, shape=shape)
    rows = [netkin_rows(load_model(name), load_data(spec, models=[name]), shape) for name in strangers]
    x, y = (np.asarray(matrix, float) - matrix.mean(0) for matrix in rows)
    wanted = np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    assert comparison["model.layers.0", "model.layers.0"] == pytest.approx(wanted, rel=1e-4)
    assert wanted < 0.9
    assert comparison.data.count("text,each=line,tokenizer=") == 2
    assert {key for key in comparison.provenance if key.startswith("texts")} == {f"texts {name}" for name in strangers}
    live = nk.compare(*map(load_model, strangers), spec, shape=shape)
    assert np.allclose(live["cka"].values, comparison["cka"].values)


def test_many_models_with_different_tokenizers_are_compared_by_text(models, strangers, tmp_path):
    names = [*models, strangers[1]]
    many = nk.compare_many(names, write_lines(tmp_path), shape="mean")
    two = nk.compare(*strangers, LINES, shape="mean")
    assert np.allclose(many[names[0], names[2]]["cka"].values, two["cka"].values)


def test_a_sample_holds_the_same_texts_for_both_tokenizers(strangers, tmp_path):
    own = sample(load_data(write_lines(tmp_path), models=strangers), 4, seed=3)
    places = [one.stored.tolist() for one in own.of]
    assert places[0] == places[1]
    assert len(places[0]) == 4
    assert nk.compare(*strangers, own, shape="mean").examples == 4


OTHER_TOKENS = [
    (lambda models, spec: nk.compare(*models, spec, shape="tokens"), InvalidValue),
    (lambda models, spec: nk.explain(*models, spec, shape="tokens"), InvalidValue),
    (lambda models, spec: nk.compare(*(nk.ModelInput(m, data=spec) for m in models), shape="tokens"), InvalidValue),
    (lambda models, spec: nk.compare(*models, spec.replace("each=line", "window=9")), SourceError),
    (lambda models, spec: list(load_data(spec, models=models)), SourceError),
    (lambda models, spec: nk.diff(*models, spec, progress=False), InvalidValue),
    (lambda models, spec: nk.diff(*models, LINES, progress=False), InvalidValue),
]


@pytest.mark.parametrize("call, error", OTHER_TOKENS)
def test_tokens_of_different_tokenizers_are_not_paired(strangers, tmp_path, call, error):
    with pytest.raises(error, match="different tokenizers"):
        call(strangers, write_lines(tmp_path))


# refusals


REFUSED = [
    ("text,each=lines:lines.txt", UnknownName, "did you mean 'line'?"),
    ("text,each=document:lines.txt", InvalidValue, "is one document"),
    ("text,each=row:lines.txt", InvalidValue, "has no rows"),
    ("text,each=line,column=a:lines.txt", InvalidValue, "has no column 'a'"),
    ("text,length=9:lines.txt", InvalidValue, "say what `each` is"),
    ("text,each=line,length=65:lines.txt", InvalidValue, "takes at most 64 tokens"),
    ("text,each=line,length=1:lines.txt", InvalidValue, "give more, as in `length=17`"),
    ("text,each=line:gone.txt", SourceError, "found no text file"),
    ("text,each=line:empty.txt", SourceError, "holds no text"),
    ("text,each=line:latin.txt", SourceError, "byte 4 fits no character"),
    ("text,each=line:rows.jsonl", InvalidValue, "is a table"),
    ("text,column=word:rows.jsonl", UnknownName, "did you mean 'words'?"),
    ("text:rows.jsonl", UnknownName, "has several columns"),
    ("text,column=words:rows.jsonl", SourceError, "row 2 of 'rows.jsonl' has no 'words'"),
    ("text,column=id:rows.jsonl", SourceError, "number 1 of 'rows.jsonl' is no text"),
    ("text:broken.jsonl", SourceError, "row 1 of 'broken.jsonl' is no object of JSON"),
    ("text,column=b:uneven.csv", SourceError, "row 3 of 'uneven.csv' has 1 values and the first has 2 names"),
    ("text:broken.parquet", SourceError, "'broken.parquet' is damaged"),
    ("text:splits", SourceError, "holds test, train; name one of them"),
    ("text:nothing", SourceError, "holds no texts that are known"),
]


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """A current directory with files that can't be read in one way or another."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path)
    rows = [{"id": 1, "words": "the cat"}, {"id": 2}]
    files = {
        "empty.txt": b"\n \n", "latin.txt": "the ätna".encode("latin1"), "broken.jsonl": b"{",
        "broken.parquet": b"PAR1", "rows.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "uneven.csv": b"a,b\n1,2\n3\n",
    }  # fmt: skip
    for name, held in files.items():
        (tmp_path / name).write_bytes(held)
    for name in ("splits/train", "splits/test", "nothing"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("spec, error, words", REFUSED)
def test_texts_that_cannot_be_read_are_refused(models, spec, error, words):
    if "parquet" in spec:
        arrow.table({})
    with pytest.raises(error) as refusal:
        list(load_data(spec, models=models))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_is_refused_where_a_text_needs_them(tmp_path):
    folder = save_model(tmp_path / "small", vocabulary=12)
    name = f"hf:{folder}"
    assert nk.compare(name, data=["the cat sat", "the cat"]).examples == 2
    for data in (["the cat", "a mat and"], f"text,window=8:{folder.parent / 'a.txt'}"):
        (folder.parent / "a.txt").write_text("the cat sat and ran " * 9)
        for model in (name, load_model(name)):
            with pytest.raises(SourceError, match=r"gives the id \d+ \('(and|ran)'\), and the embedding of .* has 12"):
                nk.compare(model, data=data)


def test_a_text_without_tokens_is_refused(models):
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[0][3:])
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(SourceError, match="1 texts of 'the list of texts' give no tokens, the first of them number 2"):
        list(load_data(["the cat", " ", "a dog"], tokenizer=tokenizer))


def test_texts_and_chats_do_not_mix(models):
    with pytest.raises(InvalidValue, match="a list of texts or of chats"):
        load_data([LINES[0], CHATS[0]], models=models)
