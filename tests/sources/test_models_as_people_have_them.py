"""Options of `hf:DIR`, and models that are offloaded by accelerate, quantised, or sharded over processes."""

import copy
import json

import pytest
import torch
from torch import nn

import netkin as nk
from late_packages import LatePackage, transformers
from netkin.errors import InvalidValue, SourceError, UnknownName
from netkin.identity import form_difference, form_of, weights_digest
from netkin.sources import load_data, load_model

accelerate, peft = LatePackage("accelerate"), LatePackage("peft")


def llama(seed=0, hidden=16, layers=2):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        sizes = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=40, hidden_size=hidden, num_hidden_layers=layers, **sizes)
        return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small Llama and others."""
    folder = tmp_path_factory.mktemp("llamas")
    for name, model in {"base": llama(), "other": llama(1), "wide": llama(hidden=32), "long": llama(layers=3)}.items():
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def adapted(folder):
    """The folder, in which there are an adapter of low rank for the first model, and what the two together give."""
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "base")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        torch.save(model(tokens()).logits, folder / "logits.pt")
    return folder


def tokens(count=12):
    return torch.randint(0, 40, (count, 8), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model):
    return model(tokens()).logits


# precision


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_is_loaded_in_the_precision_that_is_asked_for(folder, dtype):
    model = load_model(f"hf:{folder / 'base'},dtype={dtype}")
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    assert weights_digest(model) == weights_digest(llama().to(getattr(torch, dtype)))


def test_without_a_dtype_or_with_auto_the_precision_is_that_of_the_files(folder, tmp_path):
    llama().bfloat16().save_pretrained(tmp_path)
    for options in ("", ",dtype=auto"):
        assert load_model(f"hf:{tmp_path}{options}").dtype == torch.bfloat16
        assert load_model(f"hf:{folder / 'base'}{options}").dtype == torch.float32


def test_a_folder_may_have_a_comma_and_an_equals_sign_in_its_name(tmp_path):
    llama().save_pretrained(tmp_path / "a,step=3")
    assert load_model(f"hf:{tmp_path / 'a,step=3'},dtype=float16").dtype == torch.float16


# adapters


def test_a_model_with_an_adapter_computes_what_peft_computes_under_the_names_of_the_base(adapted):
    model = load_model(f"hf:{adapted / 'base'},adapter={adapted / 'adapter'}")
    assert torch.equal(logits(model), torch.load(adapted / "logits.pt"))
    assert nk.layers(model) == nk.layers(llama())
    assert weights_digest(model) != weights_digest(llama())


def test_a_model_and_its_adapted_copy_are_compared_by_name(adapted):
    base = f"hf:{adapted / 'base'}"
    both = nk.compare(base, f"{base},adapter={adapted / 'adapter'}", data=[tokens(40)])
    same = nk.compare(base, base, data=[tokens(40)], names=("a", "b"))
    assert same["model.layers.1", "model.layers.1"] == pytest.approx(1)
    assert both["model.embed_tokens", "model.embed_tokens"] == pytest.approx(1)
    assert both["model.layers.1", "model.layers.1"] < 0.9


def change_adapter(adapted, to, **changes):
    to.mkdir()
    for file in (adapted / "adapter").iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "adapter_config.json").read_text()) | changes
    (to / "adapter_config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("other", ["other", "wide", "long"])
def test_an_adapter_for_another_base_is_refused_by_the_folder_that_it_names(adapted, other):
    with pytest.raises(SourceError) as refusal:
        load_model(f"hf:{adapted / other},adapter={adapted / 'adapter'}")
    assert all(f"'{adapted / name}'" in str(refusal.value) for name in (other, "base", "adapter"))


@pytest.mark.parametrize("other, words", [("wide", "8 of another shape: "), ("long", "4 missing: ")])
def test_an_adapter_that_names_no_folder_is_refused_where_its_weights_do_not_fit(adapted, tmp_path, other, words):
    adapter = change_adapter(adapted, tmp_path / "adapter", base_model_name_or_path="people/base")
    with pytest.raises(SourceError) as refusal:
        load_model(f"hf:{adapted / other},adapter={adapter}")
    assert all(word in str(refusal.value) for word in (words, "'people/base'", f"'{adapted / other}'"))
    fitting = load_model(f"hf:{adapted / 'base'},adapter={adapter}")
    assert torch.equal(logits(fitting), torch.load(adapted / "logits.pt"))


def test_a_moved_copy_of_the_base_takes_the_adapter(adapted, tmp_path):
    llama().save_pretrained(tmp_path / "copy")
    model = load_model(f"hf:{tmp_path / 'copy'},adapter={adapted / 'adapter'}")
    assert torch.equal(logits(model), torch.load(adapted / "logits.pt"))


HOSTILE = [
    ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "of the kind 'PROMPT_TUNING'"),
    ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "names code of its own (megatron)"),
]


@pytest.mark.parametrize("changes, words", HOSTILE)
def test_an_adapter_that_would_run_code_is_refused(adapted, tmp_path, changes, words):
    adapter = change_adapter(adapted, tmp_path / "adapter", **changes)
    with pytest.raises(SourceError) as refusal:
        load_model(f"hf:{adapted / 'base'},adapter={adapter}")
    assert words in str(refusal.value)


def test_an_adapter_is_read_as_safetensors_only(adapted, tmp_path):
    adapter = change_adapter(adapted, tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(SourceError, match="adapters are read as safetensors only"):
        load_model(f"hf:{adapted / 'base'},adapter={adapter}")


def test_an_adapter_in_the_place_of_a_model_is_refused_as_transformers_would_load_what_it_names(adapted, tmp_path):
    both = change_adapter(adapted, tmp_path / "both")
    for file in (adapted / "base").iterdir():
        (both / file.name).write_bytes(file.read_bytes())
    for folder in (adapted / "adapter", both):
        with pytest.raises(SourceError, match="holds an adapter; name the folder of its model"):
            load_model(f"hf:{folder}")


REFUSED = [
    ("base,dtype=bf16", InvalidValue, "did you mean 'bfloat16'?"),
    ("base,dtpye=bfloat16", UnknownName, "did you mean 'dtype'?"),
    ("base,adapter=gone", SourceError, "holds no adapter_config.json"),
    ("base,memory=1GB", InvalidValue, "go with `device_map`"),
    ("base,device_map=everywhere", SourceError, "found everywhere"),
    ("base,device_map=auto,memory=much", SourceError, "much is not in a valid format"),
]


@pytest.mark.parametrize("name, error, words", REFUSED)
def test_options_that_make_no_sense_are_refused(folder, name, error, words):
    with pytest.raises(error) as refusal:
        load_model(f"hf:{folder / name}")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_shards_that_are_missing_are_named(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="8KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert weights_digest(load_model(f"hf:{tmp_path}")) == weights_digest(llama())
    shards[1].unlink()
    with pytest.raises(SourceError) as refusal:
        load_model(f"hf:{tmp_path}")
    assert f"names {len(shards)} files of weights, of which 1 are not there: {shards[1].name}" in str(refusal.value)


def test_the_tokenizer_is_found_whatever_the_options_of_the_model(folder):
    with pytest.raises(SourceError, match="holds no tokenizer"):  # and not: is no folder
        load_data("text:a.txt", models=[f"hf:{folder / 'base'},dtype=bfloat16"])


# offloaded


@pytest.fixture(scope="module")
def offloaded(folder):
    """Models whose weights lie on the host, and on disk, and one that is loaded so by name."""
    model = f"hf:{folder / 'base'},device_map=auto,memory=15KB,offload={folder / 'offload'}"
    return {
        "host": accelerate.cpu_offload(load_model(f"hf:{folder / 'base'}"), "cpu"),
        "disk": accelerate.disk_offload(load_model(f"hf:{folder / 'base'}"), str(folder / "disk"), "cpu"),
        "by name": load_model(model),
    }


PLACES = ["host", "disk", "by name"]


@pytest.fixture(scope="module")
def plain(folder):
    return load_model(f"hf:{folder / 'base'}")


@pytest.mark.parametrize("place", PLACES)
def test_an_offloaded_model_has_the_identity_of_one_that_is_not(offloaded, plain, place):
    model = offloaded[place]
    assert any(weight.is_meta for weight in model.parameters())
    assert weights_digest(model) == weights_digest(plain)
    assert form_difference(form_of(model), form_of(plain)) == ""


@pytest.mark.parametrize("place", PLACES)
def test_an_offloaded_model_is_compared_and_collected_with_the_same_numbers(offloaded, plain, place):
    wanted, model = nk.compare(plain, llama(1), data=[tokens(40)]), offloaded[place]
    assert (nk.compare(model, llama(1), data=[tokens(40)])["cka"].values == wanted["cka"].values).all()
    parts = [nk.collect(one, llama(1), data=[tokens(40)], part=(n, 2)) for n, one in ((1, model), (2, plain))]
    merged = nk.merge(parts).compute("cka")
    assert merged["model.norm", "model.norm"] == pytest.approx(wanted["model.norm", "model.norm"])
    assert "offloaded by accelerate" in nk.compare(model, data=[tokens(40)]).provenance["device a"]


@pytest.mark.parametrize("place", PLACES)
def test_weights_that_are_offloaded_are_read_by_measures_of_weights(offloaded, place):
    values = [
        nk.compare(one, llama(1), measures="weight_cosine", layers="**.q_proj")["weight_cosine"].values
        for one in (llama(), offloaded[place])
    ]
    assert (values[0] == values[1]).all()
    assert abs(values[0]).max() < 0.9


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_first", [True, False])
def test_two_offloaded_versions_differ_where_the_plain_ones_do(offloaded, place, is_first):
    changed = llama()
    changed.model.layers[1].mlp.up_proj.weight.data *= 1.01
    pair, plain = [offloaded[place], changed], [llama(), changed]
    found, wanted = (nk.diff(*(two if is_first else two[::-1]), tokens(), progress=False) for two in (pair, plain))
    assert found.first == wanted.first == "model.layers.1.mlp.up_proj"
    assert {n: m.ratio for n, m in found.modules.items()} == {n: m.ratio for n, m in wanted.modules.items()}
    assert found.weights == wanted.weights
    assert torch.equal(logits(offloaded[place]), logits(llama()))  # it is as before
    assert {weight.dtype for weight in offloaded[place].parameters()} == {torch.float32}


def test_an_offloaded_model_is_not_moved(offloaded):
    with pytest.raises(InvalidValue) as refusal:
        nk.compare(offloaded["host"], data=[tokens()], device="cpu")
    assert refusal.value.argument == "device"


def test_a_model_without_values_is_still_refused():
    with pytest.raises(InvalidValue, match="'meta' device"):
        nk.compare(nn.Linear(3, 2, device="meta"), data=[torch.ones(4, 3)])


# quantised


@pytest.fixture(scope="module")
def in_int8(folder):
    """Two models with weights in int8, as bitsandbytes has them, and the folder of the first."""
    pytest.importorskip("bitsandbytes")
    quantised = {}
    for name in ("base", "other"):
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
        model = transformers.LlamaForCausalLM.from_pretrained(folder / name, quantization_config=config).eval()
        quantised[name] = model
    quantised["base"].save_pretrained(folder / "int8")
    return quantised


def test_a_model_with_int8_weights_is_loaded_and_compared_with_its_original(folder, in_int8):
    loaded = load_model(f"hf:{folder / 'int8'}")
    assert loaded.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    assert weights_digest(loaded) == weights_digest(in_int8["base"]) != weights_digest(in_int8["other"])
    comparison = nk.compare(loaded, f"hf:{folder / 'base'}", data=[tokens(40)], names=("a", "b"))
    assert comparison["lm_head", "lm_head"] > 0.999
    assert nk.compare(in_int8["other"], llama(), data=[tokens(40)])["lm_head", "lm_head"] < 0.9
    assert nk.diff(llama(), loaded, tokens(), progress=False).weights["model.layers.0.mlp.up_proj.weight"].relation == (
        "quantised"
    )


def test_the_digest_of_quantised_weights_changes_with_their_scales(in_int8):
    model = copy.deepcopy(in_int8["base"])
    before = weights_digest(model)
    model.model.layers[0].mlp.up_proj.weight.SCB *= 2
    assert weights_digest(model) != before


@pytest.mark.filterwarnings("ignore")  # of torchao about itself
def test_weights_that_torchao_has_quantised_are_compared_by_what_they_stand_for(folder):
    quantization = pytest.importorskip("torchao.quantization")
    models = [load_model(f"hf:{folder / name}") for name in ("base", "base", "other")]
    for model in models:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    first, second, other = map(weights_digest, models)
    assert first == second != other
    assert nk.compare(llama(), models[0], data=[tokens(40)])["lm_head", "lm_head"] > 0.999
    weights = nk.diff(llama(), models[0], tokens(), progress=False).weights
    assert 0 < weights["model.layers.0.mlp.up_proj.weight"].error < 0.02
    cosine = nk.compare(llama(), models[0], measures="weight_cosine", layers="**.q_proj")
    assert cosine["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj"] > 0.999


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_the_packed_weights_of_torch_count_in_the_digest():
    digests = set()
    for seed in (0, 0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear})
        digests.add(weights_digest(model))
    assert len(digests) == 2


def test_a_weight_that_is_made_of_others_is_digested_by_all_of_them():
    from torch.testing._internal.two_tensor import TwoTensor

    codes, scales = torch.arange(12.0).reshape(4, 3), torch.ones(4, 3)
    digests = [weights_digest({"weight": TwoTensor(codes, scale)}) for scale in (scales, scales.clone(), 2 * scales)]
    assert digests[0] == digests[1] != digests[2]


# sharded


@pytest.fixture
def one_process():
    """A group of processes with this one alone."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_models_are_refused_with_what_to_do():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    net, mesh, data = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), init_device_mesh("cpu", (1,)), torch.ones(20, 4)
    sharded = fully_shard(copy.deepcopy(net), mesh=mesh)
    parallel = parallelize_module(copy.deepcopy(net), mesh, {"0": ColwiseParallel()})
    for model in (sharded, parallel):
        for call in (
            lambda model=model: nk.compare(model, net, data=data),
            lambda model=model: nk.collect(net, model, data=data),
            lambda model=model: nk.diff(net, model, data),
            lambda model=model: nk.activations(model, ["0"], data),
            lambda model=model: weights_digest(model),
        ):
            with pytest.raises(InvalidValue, match="load the full weights in each process"):
                call()
