import json
import pickle
import shutil
import socket
import sys

import pytest
import torch

import netkin
from netkin.errors import MissingExtra, SourceError
from netkin.representations import layers
from netkin.sources import load_data, load_model
from netkin.sources.batches import sample
from quickly import slow_after


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="needs transformers: pip install 'netkin[hf]'")


@pytest.fixture(scope="module")
def berts(transformers, tmp_path_factory):
    """A folder with two small BERTs, `first` and `second`, and one for masked words, `masked`."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **sizes)
    folder = tmp_path_factory.mktemp("berts")
    kinds = {"first": transformers.BertModel, "second": transformers.BertModel, "masked": transformers.BertForMaskedLM}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for name, kind in kinds.items():
            kind(config).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def vit(transformers, tmp_path_factory):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **sizes)
    folder = tmp_path_factory.mktemp("vit")
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def bert(berts, tmp_path):
    """A copy of one BERT, to be damaged."""
    for file in (berts / "first").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def sentences(workshop):
    """The name of data that are sentences of different lengths, padded and masked."""
    workshop.write(
        "nk_sentences",
        "import torch\n"
        "def make():\n"
        "    generator = torch.Generator().manual_seed(0)\n"
        "    ids = torch.randint(1, 40, (60, 10), generator=generator)\n"
        "    mask = torch.arange(10) < torch.randint(3, 11, (60, 1), generator=generator)\n"
        "    both = {'input_ids': ids * mask, 'attention_mask': mask.long(), 'labels': ids[:, 0]}\n"
        "    return [{key: value[rows] for key, value in both.items()} for rows in (slice(0, 40), slice(40, 60))]\n",
    )
    return load_data("nk_sentences:make")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("shape", slow_after(1, ["tokens", "mean", "cls"]))
def test_two_berts_are_compared_on_masked_sentences(berts, sentences, shape):
    first, second = load_model(f"hf:{berts / 'first'}"), load_model(f"hf:{berts / 'second'}")
    comparison = netkin.compare(first, second, data=sentences, measures=["cka"], shape=shape)
    assert comparison.layers_a == ("embeddings", "encoder.layer.0", "encoder.layer.1", "pooler")
    assert comparison.shapes_a["encoder.layer.0"] == shape
    assert 0 < comparison["encoder.layer.1", "encoder.layer.1"] < 0.99


def test_what_is_padding_does_not_count(berts, sentences):
    model = load_model(f"hf:{berts / 'first'}")
    padded = [dict(batch) for batch in sentences]
    for batch in padded:
        batch["input_ids"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], 39)
    pair = [netkin.activations(model, ["encoder.layer.1"], data, shape="tokens") for data in (sentences, padded)]
    assert torch.allclose(pair[0]["encoder.layer.1"], pair[1]["encoder.layer.1"], atol=1e-5)


def test_a_vision_transformer_is_loaded_with_its_head_and_compared(vit):
    model = load_model(f"hf:{vit}")
    assert type(model).__name__ == "ViTForImageClassification"
    assert not model.training
    assert {"classifier", "vit.layernorm"} < set(layers(model))
    images = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    comparison = netkin.compare(model, data=[images], measures=["cka"], shape="cls")
    assert comparison["classifier", "classifier"] == pytest.approx(1)


def test_without_named_architectures_the_model_comes_without_a_head(bert):
    change_config(bert, architectures=None)
    assert type(load_model(f"hf:{bert}")).__name__ == "BertModel"


def test_a_pickled_state_dict_is_read_as_weights_only(bert, berts):
    torch.save(load_model(f"hf:{berts / 'first'}").state_dict(), bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    assert load_model(f"hf:{bert}").embeddings.word_embeddings.weight.shape == (40, 16)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_a_hostile_state_dict_is_refused_and_nothing_in_it_runs(bert, hostile, write):
    (bert / "model.safetensors").unlink()
    write({"embeddings.word_embeddings.weight": hostile}, bert / "pytorch_model.bin")
    with pytest.raises(SourceError, match="could not be loaded by transformers|is damaged or no weights file"):
        load_model(f"hf:{bert}")


def test_loading_asks_no_network_and_says_nothing(bert, monkeypatch, capfd):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(f"hf:{bert}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.99])
def test_weights_cut_short_are_refused(bert, kept):
    content = (bert / "model.safetensors").read_bytes()
    (bert / "model.safetensors").write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(SourceError, match="could not be loaded by transformers: ") as refusal:
        load_model(f"hf:{bert}")
    assert "\n" not in str(refusal.value)


def test_weights_that_leave_a_part_at_random_are_refused_with_the_keys(bert):
    change_config(bert, architectures=["BertForMaskedLM"])
    with pytest.raises(
        SourceError,
        match=r"do not fit BertForMaskedLM: \d+ missing: cls\.predictions.*`architectures` in its config.json",
    ):
        load_model(f"hf:{bert}")


def test_weights_of_another_shape_are_refused(bert):
    change_config(bert, hidden_size=32)
    with pytest.raises(SourceError, match="could not be loaded by transformers|of another shape: .*embeddings"):
        load_model(f"hf:{bert}")


def test_a_model_type_that_transformers_lacks_is_refused(bert):
    change_config(bert, architectures=["NoSuchModel"])
    with pytest.raises(SourceError, match=r"is a 'NoSuchModel', which transformers \S+ does not have"):
        load_model(f"hf:{bert}")
    change_config(bert, architectures=["pipeline"])
    with pytest.raises(SourceError, match="is a 'pipeline'"):
        load_model(f"hf:{bert}")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"auto_map": {"AutoModel": "code.Model"}}, r"brings code of its own \(auto_map\), and netkin does not run it"),
        ({"_attn_implementation": "some/kernel"}, r"names a kernel to be fetched \(some/kernel\); remove it"),
        ({"text_config": {"attn_implementation": "some/kernel"}}, "names a kernel to be fetched"),
    ],
)
def test_configurations_that_bring_code_are_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(changes))
    with pytest.raises(SourceError, match=message):
        load_model(f"hf:{tmp_path}")


def test_a_name_that_is_no_folder_is_refused_because_nothing_is_downloaded(tmp_path):
    (tmp_path / "bert-small").mkdir()
    with pytest.raises(
        SourceError, match=r"'bert-base-uncased' is no folder\. `hf:DIR` wants one .*netkin downloads nothing"
    ):
        load_model("hf:bert-base-uncased")
    with pytest.raises(SourceError, match=r"is no folder; did you mean 'bert-small'\?"):
        load_model(f"hf:{tmp_path / 'bert-smal'}")


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"holds no config.json; name the folder that `save_pretrained` wrote"):
        load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    "text, message", [("{", "config.json' is damaged"), ("[1]", "is damaged or no configuration of a model")]
)
def test_a_damaged_configuration_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceError, match=message):
        load_model(f"hf:{tmp_path}")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="holds no weights; there must be one of model.safetensors"):
        load_model(f"hf:{tmp_path}")


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"needs 'transformers' .*; `pip install 'netkin\[hf\]'` brings it"):
        load_model(f"hf:{tmp_path}")


# text and images as the model's folder says


@pytest.fixture
def words(bert):
    """The folder of a BERT with a tokenizer of nine words, beside a text of sixty."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers: pip install 'netkin[hf]'")
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'netkin[hf]'")
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(bert)
    (bert / "a.txt").write_text("the cat sat on the mat " * 10)
    return bert


def test_text_is_split_by_the_tokenizer_in_the_folder_of_the_model(words):
    data = load_data(f"text,window=8:{words / 'a.txt'}", models=[f"hf:{words}"])
    assert data.stored.tolist() == [[2, 4, 5, 6, 7, 4, 8, 3]] * 10  # as the vocabulary numbers them
    assert data.labels is None
    assert f"tokenizer={words}" in data.name
    comparison = netkin.compare(load_model(f"hf:{words}"), data=data)
    assert comparison.examples == 10


def test_text_for_a_live_model_is_split_by_the_tokenizer_of_its_folder(words):
    model, text = load_model(f"hf:{words}"), f"text,window=8:{words / 'a.txt'}"
    named = netkin.compare(f"hf:{words}", data=text)
    for live in (netkin.compare(model, data=text), netkin.compare_many({"a": model, "b": model}, text)["a", "b"]):
        assert live.provenance["data digest"] == named.provenance["data digest"]
    model.name_or_path = "org/name"  # as one that was downloaded
    with pytest.raises(SourceError, match="BertModel is a Hugging Face model that was not loaded from a folder"):
        netkin.compare(model, data=text)
    chosen = netkin.compare(model, data=f"text,window=8,tokenizer={words}:{words / 'a.txt'}")
    assert chosen.provenance["data digest"] == named.provenance["data digest"]


def test_characters_are_not_fed_to_a_model_that_takes_tokens(words):
    named, text = f"hf:{words}", f"text,window=8:{words / 'a.txt'}"
    data = load_data(f"poem={text}")
    for call in (
        lambda: netkin.compare(named, named, data),
        lambda: netkin.compare(named, data=sample(data, 5)),
        lambda: netkin.compare_many({"a": named, "b": named}, data),
    ):
        with pytest.raises(SourceError, match="'poem.*' holds characters, and 'hf:.*' takes tokens; give the"):
            call()
    assert netkin.compare(named, data=load_data(text, models=[named])).examples == 10


def test_what_is_left_of_a_text_is_dropped(words):
    (words / "a.txt").write_text("the cat sat on the mat the")
    assert load_data(f"text,window=5:{words / 'a.txt'}", tokenizer=str(words)).stored.tolist() == [
        [2, 4, 5, 6, 3],
        [2, 7, 4, 8, 3],
    ]


def test_a_text_or_a_window_too_short_for_tokens_is_refused(words):
    with pytest.raises(SourceError, match="a window of 64 tokens does not fit .* takes at most 16; choose another"):
        load_data(f"text:{words / 'a.txt'}", models=[f"hf:{words}"])
    (words / "short.txt").write_text("the cat sat on the mat")
    with pytest.raises(SourceError, match="holds 8 tokens; a window of 9 needs 9. Choose a shorter one"):
        load_data(f"text,window=9:{words / 'short.txt'}", models=[f"hf:{words}"])
    with pytest.raises(SourceError, match=r"a window of 2 tokens does not fit .* adds 2 special ones"):
        load_data(f"text,window=2:{words / 'a.txt'}", models=[f"hf:{words}"])


def test_a_model_without_a_tokenizer_gets_no_text(bert):
    (bert / "a.txt").write_text("the cat sat on the mat " * 10)
    with pytest.raises(SourceError, match="holds no tokenizer, which says what numbers .* `text,tokenizer=DIR:FILE`"):
        load_data(f"text:{bert / 'a.txt'}", models=[f"hf:{bert}"])
    assert load_data(f"text:{bert / 'a.txt'}", models=["netkin:char_lstm"]).labels is not None


@pytest.mark.slow
def test_functions_of_many_models_and_runs_split_a_text_by_the_tokenizer_too(words, tmp_path_factory):
    text, name, run = f"text,window=8:{words / 'a.txt'}", f"hf:{words}", tmp_path_factory.mktemp("run")
    for step in ("step_1", "step_2"):
        shutil.copytree(words, run / step)
    found = [
        netkin.dynamics(run, text, "cka", progress=False).comparisons[-1],
        netkin.dynamics(run, text, "cka", model=name, progress=False).comparisons[-1],
        netkin.compare_many({"a": name, "b": name}, text, "cka", progress=False)["a", "b"],
    ]
    assert [one.examples for one in found] == [10, 10, 10]  # of six words, not of eight characters
    assert "10 examples" in str(netkin.explain_dynamics(run, text, "cka"))
    (words / "tokenizer.json").unlink()
    (words / "tokenizer_config.json").unlink()
    for models in ({"a": name}, [name]):
        with pytest.raises(SourceError, match="holds no tokenizer"):
            netkin.sparsity_study(models, text)
    with pytest.raises(SourceError, match="holds no tokenizer"):
        netkin.dynamics(run, text, "cka", model=name, progress=False)


def test_models_with_different_tokenizers_are_not_fed_the_same_numbers(words, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for file in words.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    text = f"text,window=8:{words / 'a.txt'}"
    assert load_data(text, models=[f"hf:{words}", f"hf:{other}"]).examples == 10
    (other / "tokenizer.json").write_text((words / "tokenizer.json").read_text().replace('"cat"', '"dog"'))
    with pytest.raises(SourceError, match="have different tokenizers, so their models do not take the same inputs"):
        load_data(text, models=[f"hf:{words}", f"hf:{other}"])


def test_a_model_without_a_tokenizer_is_named_beside_one_that_has_it(words, berts):
    for pair in ((words, berts / "first"), (berts / "first", words)):
        with pytest.raises(SourceError, match="first' holds no tokenizer, which says"):
            load_data(f"text,window=8:{words / 'a.txt'}", models=[f"hf:{folder}" for folder in pair])


@pytest.mark.parametrize("network", ["netkin:char_lstm,width=8", load_model("netkin:char_lstm,width=8")])
def test_tokens_are_not_fed_to_the_network_of_characters_unasked(words, network):
    text = f"text,window=8:{words / 'a.txt'}"
    with pytest.raises(
        SourceError, match=r"(?i)reads text as tokens and .*char_?lstm.* as characters.*`text,tokenizer="
    ):
        netkin.compare(f"hf:{words}", network, text)
    chosen = load_data(f"text,window=8,tokenizer={words}:{words / 'a.txt'}", models=[f"hf:{words}", network])
    assert chosen.examples == 10


@pytest.fixture
def sights(vit, tmp_path):
    """A copy of a ViT's folder that says how images are prepared, beside a folder of one image."""
    pillow = pytest.importorskip("PIL.Image", reason="image files need Pillow: pip install 'netkin[images]'")
    for file in vit.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 16, "width": 16},
                "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.25, 0],
                "image_std": [0.5, 0.25, 0.125], "resample": 2}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "photos").mkdir()
    pillow.new("RGB", (8, 8), (51, 102, 204)).save(tmp_path / "photos" / "a.png")
    return tmp_path


def test_a_model_without_a_processor_is_named_beside_one_that_has_it(sights, vit):
    for pair in ((sights, vit), (vit, sights)):
        with pytest.raises(SourceError, match=f"'{vit}' holds no preprocessor_config.json"):
            load_data(f"images:{sights / 'photos'}", models=[f"hf:{folder}" for folder in pair])


def test_images_are_prepared_as_the_folder_of_the_model_says(transformers, sights):
    if getattr(transformers.AutoImageProcessor, "is_dummy", False):
        pytest.skip("this version of transformers prepares images with torchvision alone")
    data = load_data(f"images:{sights / 'photos'}", models=[f"hf:{sights}"])
    (images,) = data
    assert images.shape == (1, 3, 16, 16)
    expected = [(0.2 - 0.5) / 0.5, (0.4 - 0.25) / 0.25, 0.8 / 0.125]  # (x / 255 - mean) / std
    assert images.mean(dim=(0, 2, 3)).tolist() == pytest.approx(expected, abs=1e-5)
    assert f"processor={sights}" in data.name
    assert load_model(f"hf:{sights}")(images).logits.shape == (1, 3)


def test_a_normalisation_that_is_asked_for_comes_before_that_of_the_folder(sights):
    (images,) = load_data(f"images,normalise=none:{sights / 'photos'}", models=[f"hf:{sights}"])
    assert images.shape == (1, 3, 8, 8)
    assert images.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.2, 0.4, 0.8])


def test_a_model_whose_folder_says_nothing_of_images_is_given_none(sights):
    (sights / "preprocessor_config.json").unlink()
    with pytest.raises(SourceError, match="holds no preprocessor_config.json, .* choose the preprocessing yourself"):
        load_data(f"images:{sights / 'photos'}", models=[f"hf:{sights}"])
