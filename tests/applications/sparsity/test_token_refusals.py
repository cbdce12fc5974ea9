"""Vision transformers whose tokens can't be dropped, and settings out of range."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import netkin as nk
from netkin.errors import ForwardError, InvalidValue, ShapeError, UnknownName
from token_worlds import HF, hugging_face, mean_vit, pictures, small_vit


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, float("nan"), True, "half"])
def test_a_share_outside_0_and_1_is_refused(keep):
    with pytest.raises(InvalidValue, match="`keep` is the share of tokens that each stage keeps, above 0 and up to 1"):
        nk.sparsify_tokens(small_vit(), keep=keep)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ((1, 4), "names block 4, and the model has the blocks 0 to 3"),
        ((-1,), "names block -1"),
        ((2, 1), r"must rise, each once; got \(2, 1\)"),
        ((), "holds the numbers of blocks"),
        ((1.5,), "holds the numbers of blocks"),
    ],
)
def test_a_stage_that_does_not_exist_is_refused(at, said):
    with pytest.raises(InvalidValue, match=said):
        nk.sparsify_tokens(small_vit(), at=at)


@pytest.mark.parametrize(
    "options",
    [{"similarity": -1}, {"similarity": float("nan")}, {"similarity": "yes"}, {"prefix": -1}, {"prefix": 1.5}],
)
def test_other_settings_out_of_range_are_refused(options):
    with pytest.raises(InvalidValue, match=f"`{next(iter(options))}` (is|must be)"):
        nk.sparsify_tokens(small_vit(), **options)


def test_costs_of_no_image_are_refused():
    with pytest.raises(ShapeError, match="costs of one image are counted on one or more; got none"):
        nk.token_costs(small_vit(), torch.zeros(0, 3, 16, 16))


@pytest.mark.parametrize("name", ["resnet20", "char_lstm", "digits"])
def test_models_without_tokens_of_images_are_refused(name):
    with pytest.raises(InvalidValue, match="has no tokens of an image to drop"):
        nk.sparsify_tokens(nk.load_model(f"netkin:{name}"))


def test_a_model_that_drops_tokens_already_is_refused():
    with pytest.raises(InvalidValue, match="drops tokens already"):
        nk.sparsify_tokens(nk.sparsify_tokens(small_vit()))


def test_two_lists_of_blocks_ask_for_a_name():
    both = nn.Module()
    both.first, both.middle, both.second = small_vit(), nn.ReLU(), small_vit()
    with pytest.raises(InvalidValue, match="2 lists of blocks, first.blocks, second.blocks"):
        nk.sparsify_tokens(both)
    with pytest.raises(UnknownName, match="no list of blocks named 'first.block'; did you mean 'first.blocks'"):
        nk.sparsify_tokens(both, blocks="first.block")


class Mixing(nn.Module):
    """A block that mixes neighbouring tokens beside its attention."""

    def __init__(self, block):
        super().__init__()
        self.attention_block = block

    def forward(self, tokens):
        return self.attention_block(tokens) + tokens.roll(1, dims=1)


class Wordy(nn.Module):
    """A block whose attention is a product and a softmax."""

    def __init__(self, width=32):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, tokens):
        return self.attention(tokens, tokens, tokens)[0]


class Causal(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.attention = nn.Linear(width, width)

    def forward(self, tokens):
        parts = [self.attention(tokens)[:, None]] * 3
        return F.scaled_dot_product_attention(*parts, is_causal=True)[:, 0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Mixing, "tokens that stay depend on those that are gone"),
        (lambda block: Wordy(), "does not call torch's `scaled_dot_product_attention`, or hides it"),
        (lambda block: Causal(), "a causal order"),
    ],
)
def test_attention_that_can_not_be_masked_is_refused(make, said):
    model = small_vit()
    model.blocks = nn.Sequential(*(make(block) for block in model.blocks))
    with pytest.raises(ForwardError, match=rf"the attention of block 1 in 'blocks' \(\w+\) can't be masked: .*{said}"):
        nk.sparsify_tokens(model)


def test_an_input_with_a_mask_of_its_own_is_refused():
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sparse = nk.sparsify_tokens(hugging_face(HF[0]))
    mask = torch.ones(1, 17)
    mask[0, 3] = 0
    with pytest.raises(ForwardError, match="a mask of its own"):
        sparse(pictures(1), attention_mask=mask)


def test_gradient_checkpointing_is_refused_in_training():
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    model = hugging_face(HF[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later releases give it another name
        model.gradient_checkpointing_enable()
    with pytest.raises(ForwardError, match="gradient checkpointing"):
        nk.sparsify_tokens(model).train()(pictures(1))


def test_a_mean_before_the_norm_is_refused_without_class_token():
    model = mean_vit()
    type_ = type(model)

    class Late(type_):
        def forward(self, images):
            return self.head(self.norm(self.blocks(self.tokens(images)).mean(1)))

    model.__class__ = Late
    sparse = nk.sparsify_tokens(model)
    assert sparse.eval()(pictures()).shape == (3, 5)
    with pytest.raises(ForwardError, match="must norm its tokens, then pool them"):
        sparse.train()(pictures())
