"""The claims about the CKA sparsity loss, on small networks of made-up images: what they measure is what they say."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.applications.sparsity import masks_of
from netkin.errors import InvalidValue
from netkin.sources.architectures import ResNet, VisionTransformer
from netkin.training import Recipe, accuracy, train
from reproductions import laboratory
from reproductions.claims import Measured, named
from reproductions.laboratory import Images, Lab, Network
from reproductions.sparsity import (
    ablation,
    concentration,
    dropped_tokens,
    lower_cka,
    nets,
    pretraining,
    sparse_training,
    tickets,
)
from reproductions.sparsity.nets import Case

CLASSES = {"cifar10": 10, "cifar100": 20}
pytestmark = pytest.mark.slow


def made_up(name, seed, size=32):
    """Return 160 and 80 images, each a noisy picture of its class."""
    generator = torch.Generator().manual_seed(seed)
    classes = CLASSES[name]
    pictures = torch.randn(classes, 3, 4, 4, generator=generator)
    parts = []
    for count in (160, 80):
        labels = torch.randperm(count, generator=generator) % classes
        noise = torch.randn(count, 3, size, size, generator=generator)
        parts += [torch.nn.functional.interpolate(pictures[labels], scale_factor=size // 4) + noise, labels]
    return Images(name, tuple(map(str, range(classes))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of two made-up sets, with narrow networks that are trained for few steps, and few trials."""
    with pytest.MonkeyPatch.context() as patch:
        recipe = Recipe(steps=6, batch=16, lr=0.05, weight_decay=5e-4, drop_last=True)
        sparse = Network(lambda: ResNet((2, 2), (4, 8)), recipe)
        names = ("resnet20-sparse", "resnet56-sparse", "resnet18-pretrained")
        vit = Network(lambda: VisionTransformer(16, 4, 12, 4, 3, 10), recipe.but(optimizer="adamw", lr=1e-3))
        patch.setitem(laboratory.RECIPES, "cpu", dict.fromkeys(names, sparse) | {"vit-tokens": vit})
        patch.setitem(nets.SEEDS, "cpu", 2)
        patch.setitem(nets.HELD_OUT, "cpu", 60)
        for arm, strengths in nets.STRENGTHS.items():
            patch.setitem(nets.STRENGTHS, arm, strengths[:2])
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"), data=Path("nowhere"))
        lab.__dict__["_sets"] = {name: made_up(name, seed) for seed, name in enumerate(CLASSES)}
        yield lab


def with_sets(lab, change):
    """Return a laboratory whose sets of images are changed."""
    other = Lab("cpu", cache=lab.cache, data=Path("nowhere"))
    other.__dict__["_sets"] = {name: change(images) for name, images in lab.__dict__["_sets"].items()}
    return other


# --- the networks -----------------------------------------------------------------------------------------------------


def test_arms_of_one_seed_share_masks_start_and_batches(lab):
    base = Case(of="cifar100", sparsity=0.9)
    models = [nets.fresh(lab, base._replace(arm=arm, strength=0.1)) for arm in ("base", "stage", "random")]
    first, *others = (model.state_dict() for model in models)
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    other = nets.fresh(lab, base._replace(seed=1))
    assert any(not torch.equal(mask, masks_of(other)[name]) for name, mask in masks_of(models[0]).items())
    assert models[0].fc.out_features == 20
    total = sum(mask.numel() for mask in masks_of(other).values())
    assert sum(int((~mask).sum()) for mask in masks_of(other).values()) == round(0.9 * total)


def test_beta_zero_at_the_same_cost_is_training_without_the_term(lab):
    case = Case(sparsity=0.5)
    plain, images = nets.fresh(lab, case), nets.pictures(lab, "cifar10")
    train(plain, images.train, lab.recipe(case.net).recipe, seed=0, progress=False)
    assert nets.trained(lab, case)["accuracy"] == accuracy(plain, images.test)
    assert nets.trained(lab, case)["similarity"] == nets.interlayer(plain, images.test_images)


def test_every_arm_trains_another_network_and_leaves_no_hook_behind(lab):
    losses = {}
    for arm, strength in (("base", 0), ("stage", 1), ("augmented", 1), ("cca", 1), ("random", 1), ("decay", 0.3)):
        case = Case(sparsity=0.5, arm=arm, strength=strength, samples=16, every=1)
        model = nets.fresh(lab, case)
        with nets.term(model, case) as hook:
            recipe = (
                lab.recipe(case.net).recipe.but(weight_decay=strength)
                if arm == "decay"
                else lab.recipe(case.net).recipe
            )
            train(model, nets.pictures(lab, "cifar10").train, recipe, hooks=[hook], progress=False)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        losses[arm] = model.fc.weight.norm().item()
    assert len(set(losses.values())) == len(losses)


def test_a_network_is_judged_on_held_out_images_when_a_strength_is_chosen_and_sees_no_test_image(lab):
    blind = with_sets(lab, lambda own: replace(own, test_images=torch.full_like(own.test_images, torch.nan)))
    wanted = {"stage": (Case(sparsity=0.5), "stage"), "decay": (Case(sparsity=0.5), "decay")}
    assert {name: one.accuracies for name, one in nets.chosen(lab, wanted).items()} == {
        name: one.accuracies for name, one in nets.chosen(blind, wanted).items()
    }
    for name, one in nets.chosen(lab, wanted).items():
        assert tuple(one.accuracies) == nets.STRENGTHS[name]
        assert one.accuracies[one.strength] == max(one.accuracies.values())
        assert f"{one.strength:g} (" in one.words


def test_held_out_images_are_the_last_of_the_training_images_and_not_trained_on(lab):
    images = nets.pictures(lab, "cifar10")
    (inputs, _), (others, labels) = nets.parts(images, 60)
    assert (len(inputs), len(others)) == (100, 60)
    assert torch.equal(torch.cat([inputs, others]), images.train_images)
    assert torch.equal(labels, images.train_labels[-60:])
    assert images.train_images.shape[2:] == (16, 16)


def test_a_network_is_trained_once_for_all_claims_and_what_is_kept_of_it_is_fit_for_json(lab, monkeypatch):
    case = Case(sparsity=0.25)
    first = nets.measured(lab, [case, case])
    assert json.loads(json.dumps(first[case])) == first[case]

    def trained(lab, case):
        raise AssertionError("it is known")

    monkeypatch.setattr(nets, "trained", trained)
    assert nets.measured(lab, [case]) == first


def test_a_network_that_diverges_is_recorded_as_failed(lab, monkeypatch):
    usual, case = lab.recipe("resnet20-sparse"), Case(sparsity=0.5)
    failing = replace(usual, recipe=usual.recipe.but(lr=1e30))
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "resnet20-sparse", failing)
    found = nets.measured(lab, [case])[case]
    assert (found["accuracy"], "the mean loss of epoch" in found["failed"]) == (0.1, True)
    with pytest.raises(
        InvalidValue, match=r"1 of 1 networks .* is resnet20-sparse, base of strength 0, seed 0: the mean"
    ):
        nets.measured_whole(lab, [case])


def test_a_fault_that_is_none_of_training_is_not_taken_for_a_failure(lab):
    with pytest.raises(InvalidValue, match="`beta` is a number"):
        nets.trained(lab, Case(arm="stage", strength=-1.0))


def test_similarity_of_layers_is_the_debiased_cka_of_the_library(lab):
    model, images = nets.fresh(lab, Case(sparsity=0.5)).eval(), nets.pictures(lab, "cifar10").test_images
    names = [["layer1.0", "layer1.1"], ["layer2.0", "layer2.1"]]
    assert nets.stage_layers(model) == names
    layers = [name for stage in names for name in stage]
    table = nk.compare(model, model, images, "cka_debiased", layers=layers, shape="flatten", progress=False)
    wanted = np.mean([table[tuple(stage)] for stage in names])
    assert nets.interlayer(model, images) == pytest.approx(wanted, abs=1e-6)


def test_random_targets_are_layers_with_their_samples_in_another_order(lab):
    model, images = nets.fresh(lab, Case(sparsity=0.0)), nets.pictures(lab, "cifar10").train_images[:16]
    with nets.ShuffledTargets(model, 0.5, samples=8, every=2, seed=3) as term, nk.recording(model) as outputs:
        term.begin(model, None)
        value = term.loss(model, images, model(images), 1)
        seen = {name: own[:8].flatten(1).detach().double().numpy() for name, own in outputs.items()}
        term.after_step(model, 1)
        assert term.loss(model, images, model(images), 2) is None
    draw, wanted = torch.Generator().manual_seed(3), 0.0
    for stage in (["layer1.0", "layer1.1"], ["layer2.0", "layer2.1"]):
        order = torch.randperm(8, generator=draw).numpy()
        for one in stage:
            for other in stage:
                X, Y = (rows - rows.mean(0) for rows in (seen[one], seen[other][order]))
                norms = np.linalg.norm(X.T @ X) * np.linalg.norm(Y.T @ Y)
                wanted += 0.5 * np.linalg.norm(X.T @ Y) ** 2 / norms
    assert value.item() == pytest.approx(wanted, rel=1e-4)
    value.backward()
    assert model.conv1.weight.grad.abs().max() > 0


def test_gains_are_those_of_pairs_of_one_seed():
    ours, others = ([Case(arm=arm, seed=seed) for seed in range(3)] for arm in ("stage", "base"))
    accuracies = (0.5, 0.4, 0.7, 0.4, 0.2, 0.5)
    found = {case: {"accuracy": value} for case, value in zip([*ours, *others], accuracies, strict=True)}
    assert nets.gain(found, ours, others).value == pytest.approx(50 / 3)
    assert nets.gain(found, ours, others).above(0) is True
    with pytest.raises(InvalidValue, match="in pairs of one seed"):
        nets.gain(found, ours, others[::-1])


def test_what_exceeds_the_noise_is_told_with_its_value_and_the_rest_is_undecided():
    told = nets.noise_words({"a": Measured.over([1, 1.1, 0.9]), "b": Measured.over([1, -1, 0]), "c": Measured(1.0)})
    assert told == "Beyond the noise: a (+1). Undecided: b; c."
    assert nets.noise_words({"a": Measured.over([-2, -2.1, -1.9])}) == "Beyond the noise: a (-2)."


# --- the claims -------------------------------------------------------------------------------------------------------


def checked(lab, id):
    """Return what a claim finds, after what holds for all: controls and expected values have names of numbers."""
    [statement] = named(id)
    finding = statement.measure(lab)
    assert set(finding.controls) <= set(finding.measured)
    assert set(statement.expected) <= set(finding.measured)
    assert "Undecided: " in finding.note or "Beyond the noise: " in finding.note
    return finding


def test_random_sparse_training_is_compared_with_base_and_controls(lab):
    finding = checked(lab, "sparsity/random-sparse-training")
    name = "CIFAR-100 at 0.95: CKA-SR less β = 0"
    ours, base, random = (
        finding.measured[f"CIFAR-100 at 0.95: {arm}, test accuracy, %"].value
        for arm in ("CKA-SR", "β = 0", "random targets")
    )
    assert finding.measured[name].value == pytest.approx(ours - base)
    assert finding.measured[name].n == 2
    assert finding.controls[name].value == pytest.approx(random - base)
    assert finding.measured["networks trained to choose strengths"].value == 8
    assert finding.curves["Test accuracy on CIFAR-100, %"]["sparsity"] == [0.7, 0.85, 0.9, 0.95, 0.98, 0.998]


def test_larger_betas_are_compared_with_zero_and_with_random_targets(lab, monkeypatch):
    monkeypatch.setitem(concentration.SEEDS, "cpu", 2)
    finding = checked(lab, "sparsity/concentration")
    for net, betas in (("ResNet-20", "0.1"), ("ResNet-56", "0.01")):
        for what in concentration.NUMBERS.values():
            last, first = (finding.measured[f"{net}, β = {beta}: {what}"].value for beta in (betas, "0"))
            assert finding.measured[f"{net}: {what}, largest β less β = 0"].value == pytest.approx(last - first)
            assert f"{net}: {what}, largest β less β = 0" in finding.controls
    [curve, *_] = finding.curves.values()
    assert curve["ResNet-56"][-1] is None
    assert len(curve["ResNet-20"]) == 4


def test_a_strong_term_lowers_the_similarity_of_layers_of_the_same_stage(lab):
    recipe = {"steps": 60, "batch": 16, "lr": 0.05}
    found = {}
    for arm in ("base", "stage"):
        model = nets.fresh(lab, case := Case(sparsity=0.5, arm=arm, strength=0.5, every=1))
        with nets.term(model, case) as hook:
            train(model, nets.pictures(lab, "cifar10").train, hooks=[hook], progress=False, **recipe)
        found[arm] = nets.interlayer(model, nets.pictures(lab, "cifar10").test_images)
    assert found["stage"] < found["base"] - 0.1


def test_variants_of_samples_and_batches_are_compared_over_all_betas(lab, monkeypatch):
    monkeypatch.setitem(ablation.SEEDS, "cpu", 2)
    monkeypatch.setattr(ablation, "BETAS", (1e-4, 1e-2))
    finding = checked(lab, "sparsity/samples-and-batches")
    by_beta = [finding.measured[f"all samples, every batch: β = {beta}"].value for beta in ("0.0001", "0.01")]
    base = finding.measured["β = 0: test accuracy, %"].value
    assert finding.measured["all samples, every batch less β = 0"].value == pytest.approx(np.mean(by_beta) - base)
    cells = [one.value for name, one in finding.measured.items() if ": β = " in name]
    assert len(cells) == 6
    best = finding.measured["best of all on test less their mean"].value
    assert best == pytest.approx(max(cells) - np.mean(cells))


def test_cca_is_compared_with_cka_and_failures_are_counted(lab):
    finding = checked(lab, "sparsity/cca")
    base, cca, cka, random = (finding.measured[f"{arm}: test accuracy, %"].value for arm in ablation.ARMS.values())
    found = {"CKA-SR less CCA": cka - cca, "CCA less β = 0": cca - base, "failures to converge, %: CCA less CKA-SR": 0}
    assert {name: finding.measured[name].value for name in found} == pytest.approx(found)
    assert finding.controls["CKA-SR less CCA"].value == pytest.approx(random - cca)


def test_a_network_far_below_its_pair_counts_as_a_failure_too():
    ours, base = ([Case(arm=arm, seed=seed) for seed in range(3)] for arm in ("cca", "base"))
    own = [("", 0.5), ("not finite", 0.1), ("", 0.2)]
    found = {case: {"accuracy": value, "failed": fault} for case, (fault, value) in zip(ours, own, strict=True)}
    found |= {case: {"accuracy": 0.5, "failed": ""} for case in base}
    assert ablation.failures(found, ours, base) == [0, 100, 100]
    trial = Case(arm="cca", seed=nets.SEARCH, held_out=True)
    assert ablation.failures({**found, trial: {"accuracy": 0.24, "failed": ""}}, [trial], base) == [100]


def test_tickets_of_both_arms_begin_alike_and_end_at_the_sparsity(lab, monkeypatch):
    monkeypatch.setitem(tickets.SEEDS, "cpu", 2)
    finding = checked(lab, "sparsity/lottery-tickets")
    ours, base = (finding.measured[f"accuracy of the ticket at 0.95: {arm}"].value for arm in ("CKA-SR", "β = 0"))
    assert finding.measured[tickets.GAIN].value == pytest.approx(ours - base)
    curve = finding.curves["Test accuracy of tickets, %"]
    assert curve["sparsity"][0] == 0
    assert curve["sparsity"][-1] == pytest.approx(0.95, abs=1e-3)
    assert curve["β = 0"][-1] == pytest.approx(base)
    alone = tickets.rounds_of(lab, ("base", 0.0, 1))
    model = nets.fresh(lab, Case(sparsity=0.0, seed=1))
    images = nets.pictures(lab, "cifar10")
    train(model, images.train, lab.recipe("resnet20-sparse").recipe, seed=1, progress=False)
    assert alone["rounds"][0] == [0.0, 100 * accuracy(model, images.test)]


def test_dense_networks_are_compared_with_base_and_both_controls(lab, monkeypatch):
    monkeypatch.setitem(pretraining.SEEDS, "cpu", 2)
    finding = checked(lab, "sparsity/pretraining")
    ours, base = (finding.measured[f"{arm}: test accuracy, %"].value for arm in ("CKA-SR", "β = 0"))
    assert finding.measured[pretraining.GAIN].value == pytest.approx(ours - base)
    assert finding.measured["networks trained to choose strengths"].value == 4
    assert set(finding.controls) == {pretraining.GAIN, pretraining.SMALL}


def test_beta_is_the_smallest_that_lowers_the_similarity_on_held_out_images(lab, monkeypatch):
    fall = {0.0: 0.9, 0.1: 0.86, 0.3: 0.84, 1.0: 0.5}
    monkeypatch.setitem(lower_cka.BETAS, "stage", (0.1, 0.3, 1.0))
    asked = []

    def trained(lab, case):
        asked.append(case)
        return {"accuracy": 0.5, "failed": "", "similarity": fall[case.strength]}

    monkeypatch.setattr(nets, "trained", trained)
    beta, words = lower_cka.lowering(with_sets(lab, lambda own: own), Case(), "stage")
    assert (beta, words) == (0.3, "CKA-SR 0.3 (0: 0.900, 0.1: 0.860, 0.3: 0.840, 1: 0.500)")
    assert {(case.held_out, case.seed) for case in asked} == {(True, nets.SEARCH)}
    fall |= {0.3: 0.9, 1.0: 0.88}
    assert lower_cka.lowering(with_sets(lab, lambda own: own), Case(), "stage")[0] == 1.0


@pytest.mark.parametrize("name", ["pretraining", "random-sparse-training"])
def test_the_similarity_of_layers_stands_beside_each_accuracy(lab, monkeypatch, name):
    for arm, betas in lower_cka.BETAS.items():
        monkeypatch.setitem(lower_cka.BETAS, arm, betas[-2:])
    finding = checked(lab, f"sparsity/{name}-at-lower-cka")
    accuracies = [words for words in finding.measured if words.endswith(": test accuracy, %")]
    assert len(accuracies) >= 4
    names = list(finding.measured)
    for words in accuracies:
        assert names[names.index(words) + 1] == words.replace("test accuracy, %", "interlayer `cka_debiased`")


def test_networks_that_drop_tokens_are_compared_by_pretraining_and_way(lab, monkeypatch):
    monkeypatch.setitem(dropped_tokens.SEEDS, "cpu", 2)
    monkeypatch.setitem(dropped_tokens.FINE, "cpu", {"steps": 3, "lr": 1e-3})
    finding = checked(lab, "sparsity/tokens")
    ours, plain, random = (
        finding.measured[f"{words}: test accuracy, %"].value
        for words in ("CKA-SR, keep 0.7, Eq. 13", "plain, keep 0.7, predicted", "CKA-SR, keep 0.7, random")
    )
    assert finding.measured[dropped_tokens.difference(0.7)].value == pytest.approx(ours - plain)
    assert finding.controls[dropped_tokens.difference(0.7)].value == pytest.approx(random - plain)
    costs = [
        finding.measured[f"{name}: multiply-adds an image"].value
        for name in ("all", "keep 0.9, Eq. 13", "keep 0.7, Eq. 13")
    ]
    assert costs == sorted(costs, reverse=True)
    assert "steps=3" in finding.note


def test_what_pretraining_and_two_readings_of_eq_13_add_is_taken_apart(lab, monkeypatch):
    monkeypatch.setitem(dropped_tokens.SEEDS, "cpu", 2)
    monkeypatch.setitem(dropped_tokens.FINE, "cpu", {"steps": 3, "lr": 1e-3})
    finding = checked(lab, "sparsity/tokens-apart")
    value = lambda words: finding.measured[f"{words}: test accuracy, %"].value  # noqa: E731
    plain = value("plain, keep 0.7, predicted")
    wanted = {
        "CKA-SR alone": value("CKA-SR, keep 0.7, predicted") - plain,
        "Eq. 13 alone": value("plain, keep 0.7, Eq. 13") - plain,
        "Eq. 13 as printed, alone": value("plain, keep 0.7, Eq. 13 as printed") - plain,
    }
    assert {name: finding.measured[f"keep 0.7: {name}"].value for name in wanted} == pytest.approx(wanted)
    random = value("random targets, keep 0.7, predicted")
    assert finding.controls["keep 0.7: CKA-SR alone"].value == pytest.approx(random - plain)
    assert len(finding.verdict.parts) == 6


def test_networks_that_two_claims_ask_for_are_trained_once(lab, monkeypatch):
    work, calls = lambda lab, task: calls.append(task) or {"task": task}, []
    assert nets.once(lab, work, [1, 2, 1]) == {1: {"task": 1}, 2: {"task": 2}}
    assert list(nets.once(lab, work, [2, 3])) == [2, 3]
    assert calls == [1, 2, 3]


def test_tokens_dropped_at_random_are_the_same_for_a_seed(lab):
    model = nk.sparsify_tokens(nets.fresh(lab, Case("vit-tokens", sparsity=0.0)), 0.5, predict=False, similarity=False)
    test = nets.pictures(lab, "cifar10").test
    state = torch.get_rng_state()
    assert dropped_tokens._judged(model, test, 1) == dropped_tokens._judged(model, test, 1)
    assert torch.equal(torch.get_rng_state(), state)


# --- the verdicts, on made-up numbers ---------------------------------------------------------------------------------


def verdict_of(lab, monkeypatch, claim, **effects):
    """Return the verdict of a claim on networks whose numbers are those of their seed, plus effects of their arms."""

    def trained(lab, case):
        moved = effects.get(case.arm, 0.0) + Random(repr(case)).gauss(0, 1e-3)
        own = {"accuracy": 0.5 + 0.01 * (case.seed % 10) + moved, "seconds": 1.0, "failed": ""}
        return own | {"similarity": 0.9 - moved, "small": 0.1 + moved, "relatively small": 0.1 + moved}

    monkeypatch.setattr(nets, "trained", trained)
    for module in (ablation, concentration, pretraining):
        monkeypatch.setitem(module.SEEDS, "cpu", 3)
    monkeypatch.setitem(nets.SEEDS, "cpu", 3)
    return claim(with_sets(lab, lambda images: images)).verdict


CLAIMS = {
    "sparse training": sparse_training.random_sparse_training,
    "concentration": concentration.concentration,
    "pretraining": pretraining.pretraining,
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize(
    "effects, verdict",
    [
        ({"stage": 0.05, "augmented": 0.05}, "holds"),
        ({}, "undecided"),
        ({"stage": -0.05, "augmented": -0.05}, "does not hold"),
    ],
)
def test_a_claim_holds_where_the_term_does_something_and_only_there(lab, monkeypatch, claim, effects, verdict):
    assert verdict_of(lab, monkeypatch, claim, **effects) == verdict


@pytest.mark.parametrize(
    "effects, verdict",
    [
        ({"stage": 0.05, "augmented": 0.05, "random": 0.05}, "undecided"),
        ({"stage": 0.05, "augmented": 0.05, "random": 0.1}, "holds in part"),
        ({"stage": 0.05, "augmented": 0.05, "decay": 0.1}, "holds in part"),
    ],
)
def test_sparse_training_does_not_hold_where_a_control_does_as_much(lab, monkeypatch, effects, verdict):
    assert verdict_of(lab, monkeypatch, sparse_training.random_sparse_training, **effects) == verdict


def test_random_targets_that_lower_similarity_as_much_leave_concentration_undecided(lab, monkeypatch):
    assert verdict_of(lab, monkeypatch, concentration.concentration, stage=0.05, random=0.05) == "undecided"


def test_weight_decay_that_does_more_takes_the_gain_of_pretraining(lab, monkeypatch):
    assert verdict_of(lab, monkeypatch, pretraining.pretraining, stage=0.05, decay=0.1) == "holds in part"


def falling(lab, monkeypatch, claim, similarity, accuracy):
    """Return the verdict of a claim on networks whose term changes similarities and accuracies by so much."""

    def trained(lab, case):
        has_term, noise = case.arm in ("stage", "augmented"), Random(repr(case)).gauss(0, 1e-3)
        own = {"accuracy": 0.5 + noise + accuracy * has_term, "seconds": 1.0, "failed": "", "small": 0.1}
        return own | {"similarity": 0.9 + noise + similarity * has_term, "relatively small": 0.1 + noise}

    monkeypatch.setattr(nets, "trained", trained)
    return claim(with_sets(lab, lambda images: images)).verdict


@pytest.mark.parametrize(
    "similarity, accuracy, pretrained, sparse",
    [
        (-0.1, 0.05, "undecided", "holds"),  # shares of small weights are all the same
        (-0.1, -0.05, "holds in part", "does not hold"),
        (0.1, 0.05, "holds in part", "does not hold"),
        (0.0, 0.05, "undecided", "undecided"),
    ],
)
def test_accuracy_counts_only_where_the_similarity_falls(lab, monkeypatch, similarity, accuracy, pretrained, sparse):
    assert falling(lab, monkeypatch, lower_cka.pretraining_at_lower_cka, similarity, accuracy) == pretrained
    assert falling(lab, monkeypatch, lower_cka.random_sparse_training_at_lower_cka, similarity, accuracy) == sparse


def test_samples_and_batches_need_more_than_random_targets(lab, monkeypatch):
    claim = ablation.samples_and_batches
    assert verdict_of(lab, monkeypatch, claim, stage=0.05) == "undecided"  # all variants do the same
    assert verdict_of(lab, monkeypatch, claim, stage=0.05, random=0.1) == "holds in part"


@pytest.mark.parametrize(
    "effects, verdict",
    [
        ({"stage": 0.1, "cca": 0.05}, "undecided"),  # no training failed
        ({"stage": 0.1, "cca": -0.4}, "holds in part"),  # all of CCA failed
        ({"stage": -0.4, "cca": 0.05}, "holds in part"),  # all of CKA failed
    ],
)
def test_cca_is_judged_by_accuracy_and_by_failures(lab, monkeypatch, effects, verdict):
    assert verdict_of(lab, monkeypatch, ablation.cca_and_cka, **effects) == verdict
