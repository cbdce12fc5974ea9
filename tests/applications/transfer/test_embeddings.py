"""Mean embeddings of data sets at a model's layers."""

import numpy as np
import pytest
import torch
from torch import nn

import fisher_worlds
import netkin as nk
from netkin.applications.transfer.evidence import adaptation_score, layer_embeddings, mean_embedding_norm
from netkin.errors import ForwardError, InvalidValue, NoValue, ShapeError, UnknownName
from refusals import refused


@pytest.fixture
def convnet():
    return fisher_worlds.convnet()


@pytest.fixture
def pictures():
    return fisher_worlds.pictures()


def test_at_the_logits_the_norm_is_known(convnet, pictures):
    convnet.eval()
    f = convnet(pictures.clone()).detach()
    g = f.softmax(1) - (0.5 * f).softmax(1)
    K = ((f @ f.T) * (g @ g.T)).numpy()
    assert mean_embedding_norm(convnet, pictures, "5") == {"5": pytest.approx(np.sqrt(K.mean()), rel=1e-12)}
    score = adaptation_score(convnet, pictures, "5")["5"]
    assert score == pytest.approx(np.log(np.sqrt(K.mean()) * 81 / np.linalg.norm(K)), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"shape": "flatten"}, {"beta": 0.2}, {"target": "predicted"}])
def test_norms_are_those_of_features_and_gradients(convnet, pictures, options):
    found = mean_embedding_norm(convnet, [pictures[:5], pictures[5:]], **options)
    shape = {"shape": options.get("shape")}
    f, g = nk.activations(convnet, None, pictures, **shape), nk.gradients(convnet, None, pictures, **options)
    assert list(found) == ["0", "1", "2", "3", "4", "5"]
    for name, norm in found.items():
        mu = np.mean([np.outer(b, a) for a, b in zip(f[name], g[name], strict=True)], 0)
        assert norm == pytest.approx(np.linalg.norm(mu), rel=1e-10)


def test_labels_may_give_the_loss(convnet, pictures):
    labels = torch.arange(9) % 4
    found = mean_embedding_norm(convnet, [(pictures, labels)], "5", target="labels")["5"]
    f = convnet.eval()(pictures.clone()).detach()
    g = f.softmax(1) - torch.eye(4, dtype=torch.float64)[labels]
    assert found == pytest.approx(float((g.T @ f / 9).norm()), rel=1e-12)


def test_the_model_is_left_as_it_was(convnet, pictures):
    convnet.train()
    weights, state = {k: v.clone() for k, v in convnet.state_dict().items()}, torch.get_rng_state()
    layer_embeddings(convnet, pictures, buckets=4)
    assert all(torch.equal(v, weights[k]) for k, v in convnet.state_dict().items())
    assert all(module.training for module in convnet.modules())
    assert all(one.grad is None and one.requires_grad for one in convnet.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_one_pass_gives_all_numbers(convnet, pictures):
    made = layer_embeddings(convnet, pictures, ["0", "5"], buckets=4, sample=6, examples=8)
    assert made.names == ["0", "5"]
    assert made.embedding("0").examples == made.sketched("0").examples == 8
    assert made.embedding("0").exactness == "exact, but ‖K‖ from pairs of 6 of 8 examples"
    assert made.sketched("0").norm != made.embedding("0").norm


def test_sketched_norms_do_not_depend_on_the_order_or_the_batches(convnet, pictures):
    orders = ([pictures], [pictures[5:], pictures[:5]], [pictures.flip(0)])
    made = [nk.layer_embeddings(convnet, data, buckets=4) for data in orders]
    for name in made[0].names:
        norms = [one.sketched(name).norm for one in made]
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-10)
        assert norms[0] != pytest.approx(made[0].embedding(name).norm, rel=1e-3)  # buckets are shared


@pytest.mark.slow
def test_inference_mode_around_a_call_changes_nothing():
    torch.manual_seed(0)
    model, inputs, labels = fisher_worlds.Twice(), torch.randn(12, 4), torch.arange(12) % 3
    calls = [
        lambda data: nk.gradients(model, None, data)["first"].sum().item(),
        lambda data: nk.layer_embeddings(model, data, buckets=8).sketched("first").norm,
        lambda data: float(nk.kernel_ridge(model, data).fits["first"].coefficients.sum()),
        lambda data: nk.transfer_scores(model, data, ["kernel_ridge"])["kernel_ridge"],
        lambda data: nk.task2vec(model, data).values.sum(),
        lambda data: nk.fisher_rao_norm(model, data, labels="labels"),
    ]
    plain = [call([(inputs, labels)]) for call in calls]
    with torch.inference_mode():
        inside = [call([(inputs.clone(), labels.clone())]) for call in calls]
    assert inside == pytest.approx(plain, rel=1e-12)


def test_a_hugging_face_classifier_is_taken():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20, num_labels=3,
        max_position_embeddings=8,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    batch = {"input_ids": torch.arange(15).reshape(3, 5), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    found = mean_embedding_norm(model, [batch])
    assert list(found)[-1] == "classifier"
    assert all(norm > 0 for norm in found.values())


class Aside(nn.Module):
    """Computes something that its output does not need."""

    def __init__(self):
        super().__init__()
        self.first, self.aside, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, batch):
        self.aside(batch)
        return self.head(self.first(batch))


def test_layers_without_a_path_to_the_loss_are_left_out_or_refused():
    model, rows = Aside(), torch.ones(3, 4)
    assert list(mean_embedding_norm(model, rows)) == ["first", "head"]
    with pytest.raises(ForwardError, match="no path leads from layer 'aside' to the loss; choose layers"):
        mean_embedding_norm(model, rows, ["aside", "head"])


@pytest.mark.parametrize(
    "options, kind, argument",
    [
        ({"shape": "positions"}, ShapeError, ""),
        ({"sample": 1}, InvalidValue, "sample"),
        ({"beta": 1.0}, InvalidValue, "beta"),
        ({"layers": "nine"}, UnknownName, "layers"),
        ({"target": "labels"}, InvalidValue, "data"),
    ],
)
def test_what_has_no_embedding_is_told(convnet, pictures, options, kind, argument):
    with refused(kind, argument):
        mean_embedding_norm(convnet, pictures, **options)


def test_a_prediction_without_preference_has_no_score():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with pytest.raises(NoValue, match="zero at this layer"):
        adaptation_score(model, torch.ones(3, 4), "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same(convnet, pictures):
    wanted = layer_embeddings(convnet, pictures, buckets=4, sample=6)
    found = layer_embeddings(convnet.cuda(), pictures, buckets=4, sample=6)
    for name in wanted.names:
        for read in ("embedding", "sketched"):
            mine, theirs = (getattr(one, read)(name) for one in (found, wanted))
            assert mine.norm == pytest.approx(theirs.norm, rel=1e-9)
            assert mine.kernel_norm == pytest.approx(theirs.kernel_norm, rel=1e-9)
