"""What each measure says and what it can't see, in a reader's words."""

from __future__ import annotations

from dataclasses import dataclass

from netkin.results import Values
from netkin.results.listings import is_worth


@dataclass(frozen=True)
class Meaning:
    """Two or three sentences on a measure: what a value says, and what stays hidden from it."""

    says: str
    blind: str


_FEW = "With fewer examples than features the values rise by themselves, whatever the layers hold."
_LEADING = "A few directions of large variance decide the value; what lies in small directions goes unseen."

MEANINGS = {
    "cka": Meaning(
        "How alike the two layers arrange the examples. 1 means a rotated, rescaled, shifted copy; 0 means that no "
        "direction of one goes with any direction of the other.",
        f"{_LEADING} Wide layers on few examples score high even when unrelated; cka_debiased does not.",
    ),
    "cka_debiased": Meaning(
        "How alike the two layers arrange the examples, with the bias of small samples taken off. Unrelated layers lie "
        "around 0, on either side of it; 1 means a rotated, rescaled, shifted copy.",
        f"{_LEADING} A value a little below 0 is chance and no opposite.",
    ),
    "cka_uncentered": Meaning(
        "The cosine of the two layers' Gram matrices as they are, without centring.",
        "A mean that both layers share counts as likeness: positive activations score high whatever they encode.",
    ),
    "cka_minibatch": Meaning(
        "Debiased CKA added up over mini-batches, so that layers of any width fit into memory. Unrelated layers lie "
        "around 0; 1 means a rotated, rescaled, shifted copy.",
        f"Relations between examples of different batches are not looked at, so the batch size matters. {_LEADING}",
    ),
    "atom_cosine": Meaning(
        "How alike the filter atoms of two layers are that share the coefficients by which atoms are mixed. 1 means "
        "the same filters up to a factor, 0 filters at right angles, -1 opposite ones.",
        "What the networks do with data. Networks from one start are alike by that alone; atoms under coefficients "
        "that are not orthonormal can be split in other ways, with other values.",
    ),
    "atom_angular": Meaning(
        "The angle between the filter atoms of two layers that share their coefficients, a metric: 0 means the same "
        "filters up to a factor, π/2 filters at right angles.",
        "What the networks do with data. Networks from one start are near by that alone.",
    ),
    "grassmann": Meaning(
        "How alike the spaces are that the filters of two layers span: the mean cosine of their principal angles. 1 "
        "means the same space, whatever the filters in it.",
        "How filters lie within their space. As many atoms as a kernel has numbers span everything, and give 1 always.",
    ),
    "weight_cosine": Meaning(
        "The cosine between all weights of two layers. 1 means the same weights up to a factor.",
        "That units may stand in another order: networks that compute the same can be at 0. Networks from one start "
        "are alike by that alone.",
    ),
    "kernel_cka": Meaning(
        "How alike the two layers arrange the examples, by features and by what the loss asks of each of them. With "
        "the kernel 'hadamard' two examples are close if their features are and if they are to move alike.",
        f"{_LEADING} Gradients are those of a prediction that is made flatter, not of the labels. Few examples score "
        "high by themselves.",
    ),
    "kernel_cka_uncentered": Meaning(
        "The cosine of the two layers' kernels of features and gradients as they are, as the paper prints it.",
        "A mean that both layers share counts as likeness: positive features score high whatever they encode.",
    ),
    "kernel_nbs": Meaning(
        "The cosine that is left between the two layers' features and gradients after the best rotation, as the paper "
        "prints it. Small directions count more than in CKA.",
        "A mean that both layers share counts as likeness, and on few examples unrelated layers score high.",
    ),
    "sketched_cka": Meaning(
        "How alike the kernels of two layers are whose data may differ: each data set is summed into random buckets, "
        "and the buckets are compared.",
        "Between different data sets no example belongs to another, so that shapes of spectra are compared and "
        "nothing else; the same data with other buckets fall to a fraction. It is random by its seed: repeat it.",
    ),
    "sketched_cka_by_buckets": Meaning(
        "The alignment of two sketched kernels, centred about the mean of the buckets, as the paper's own code does.",
        "The mean of the buckets is nearly zero by their signs, so that this centring takes little away. Random by "
        "its seed, and between different data sets the shapes of spectra decide.",
    ),
    "sketched_cka_uncentered": Meaning(
        "The cosine of two sketched kernels as they are, as the paper prints it.",
        "Random by its seed; between different data sets the shapes of spectra decide, and a large mean above all.",
    ),
    "sketched_nbs": Meaning(
        "The normalised Bures similarity of two sketched kernels, as the paper prints it.",
        "Random by its seed; between different data sets the shapes of spectra decide. Few buckets raise it.",
    ),
    "cka_rbf": Meaning(
        "How alike the two layers arrange near neighbours among the examples; a smaller fraction looks more locally.",
        "Distances much larger than the kernel's width all look the same. On few examples unrelated "
        "layers score above 0.",
    ),
    "cka_rbf_debiased": Meaning(
        "How alike the two layers arrange near neighbours, with the bias of small samples taken off. Unrelated layers "
        "lie around 0.",
        "Distances much larger than the kernel's width all look the same, and with a narrow kernel few pairs decide.",
    ),
    "angular_cka": Meaning(
        "The angle between the two layers' Gram matrices. 0 means a rotated, rescaled, shifted copy; π/2 means nothing "
        "in common. It is a metric, so that distances between many models fit together.",
        f"{_LEADING} Wide layers on few examples come out too close.",
    ),
    "nbs": Meaning(
        "The cosine that is left between the two layers after the best rotation. 1 means a rotated, rescaled, shifted "
        "copy. Small directions count more here than in CKA.",
        "Wide layers on few examples score high even when unrelated.",
    ),
    "nbs_uncentered": Meaning(
        "The cosine that is left between the two layers after the best rotation, without centring.",
        "A mean that both layers share counts as likeness, so positive activations score high whatever they encode.",
    ),
    "procrustes_distance": Meaning(
        "The distance that is left between the two layers after the best rotation. 0 means a rotated, rescaled, "
        "shifted copy; √2 means no linear structure in common.",
        "A linear map that is no rotation counts as a difference, even if the next layer could undo it.",
    ),
    "procrustes_angular": Meaning(
        "The angle that is left between the two layers after the best rotation: 0 for a rotated, rescaled, shifted "
        "copy, π/2 for nothing in common. It is a metric.",
        "A linear map that is no rotation counts as a difference, even if the next layer could undo it.",
    ),
    "procrustes_size_and_shape": Meaning(
        "The distance that is left after the best rotation, with the sizes of the layers kept. 0 means a rotated, "
        "shifted copy of the same size.",
        "It grows with the number of examples and with the scale of the layers, so compare it only within one picture.",
    ),
    "procrustes_disparity": Meaning(
        "The share of one layer that the other can't explain after the best rotation and scaling. 0 is a perfect fit.",
        "A linear map that is no rotation counts as a difference, even if the next layer could undo it.",
    ),
    "magnitude_difference": Meaning(
        "How much the lengths of the two layers' mean activations differ. 0 means means of equal length.",
        "It sees nothing of how the examples are arranged: two unrelated layers can be at 0.",
    ),
    "cca_mean": Meaning(
        "The mean canonical correlation: how well the directions of the narrower layer can be found in the other by a "
        "linear map. 1 means that they all can.",
        f"Every direction counts alike, so noise weighs as much as signal. {_FEW}",
    ),
    "cca_mean_squared": Meaning(
        "The mean squared canonical correlation: the share of variance, over whitened directions, that the layers "
        "explain in each other.",
        f"Every direction counts alike, so noise weighs as much as signal. {_FEW}",
    ),
    "cca_rms": Meaning(
        "The root mean square of the canonical correlations. 1 means that all directions of the narrower layer can be "
        "found in the other by a linear map.",
        f"Every direction counts alike, so noise weighs as much as signal. {_FEW}",
    ),
    "svcca": Meaning(
        "The mean canonical correlation of each layer's leading principal directions; what is left out is taken for "
        "noise. 1 means that the smaller set of directions lies within the other.",
        f"Directions below the cut are not looked at, and above it all count alike. {_FEW}",
    ),
    "svcca_by_sum": Meaning(
        "Like svcca, with the cut taken on the sum of singular values not of their squares; it keeps more directions.",
        f"Directions below the cut are not looked at, and above it all count alike. {_FEW}",
    ),
    "svcca_k": Meaning(
        "The mean canonical correlation of a fixed number of leading principal directions of each layer.",
        "Everything beyond those directions is not looked at, however much variance it holds.",
    ),
    "pwcca": Meaning(
        "The canonical correlations averaged by how much of the first layer (the row's) each accounts for. 1 means "
        "that what it mostly does can be found in the second (the column's).",
        f"Not symmetric: exchanging the models changes the values. {_FEW}",
    ),
    "linear_regression_r2": Meaning(
        "The share of the variance of the second layer (the column's) that a linear map of the first (the row's) "
        "predicts.",
        f"Not symmetric: a wide layer may predict a narrow one and not the other way round. {_FEW}",
    ),
    "eigenspace_overlap": Meaning(
        "How far the two layers span the same space over the examples. 1 means the same span; a span inside a larger "
        "one scores the ratio of their ranks.",
        f"How much the examples vary along each direction does not count at all. {_FEW}",
    ),
    "eigenspace_overlap_uncentered": Meaning(
        "How far the two layers span the same space over the examples, their means with it. 1 means the same span.",
        f"A mean that both layers have counts as likeness; how much the examples vary does not count at all. {_FEW}",
    ),
    "shape_distance": Meaning(
        "The angle that is left after partial whitening and the best rotation. 0 means the same shape; it is a metric.",
        f"Between no whitening and whole whitening the scale of the data counts, and unless it whitens by the "
        f"covariance the number of examples. {_FEW}",
    ),
    "gulp": Meaning(
        "How differently ridge regressions on the two layers can predict, at worst over all targets. 0 means that "
        "every linear task is solved alike.",
        "Its size depends on the ridge, so compare it only at one ridge; what no linear map reads out goes unseen.",
    ),
    "gaussian_mutual_information": Meaning(
        "The information that the two layers share, in nats, if they are jointly Gaussian. 0 means none.",
        f"Layers are not Gaussian, and nearly equal directions make it very large. {_FEW}",
    ),
}

# what stitches are worth; no measures, as they need the models themselves
STITCHES = {
    "relative_accuracy": Meaning(
        "What a stitched network can do: the first model up to its layer, a map, and the second model after its own. "
        "1 means that it gets as many right as the second model itself.",
        "How the layers look: activations that are very different, or very alike, may carry the same answers or not. "
        "A poor value may also mean that the method found a poor map.",
    ),
    "accuracy": Meaning(
        "The share of right answers of a stitched network: the first model up to its layer, a map, and the second "
        "model after its own.",
        "How good the second model is by itself; relative_accuracy takes that into account.",
    ),
    "agreement": Meaning(
        "How often a stitched network gives the answer of the second model itself, right or wrong. 1 means always.",
        "How sure the answers are, and whether they are right; a poor map may be the method's fault.",
    ),
    "cross_entropy": Meaning(
        "How far the answers of a stitched network are from the second model's own, in nats; the lowest value possible "
        "is the entropy of those answers, which is above 0 where the second model is unsure.",
        "Whether the answers are right. One example answered wrongly with certainty can outweigh many good ones.",
    ),
    "r2": Meaning(
        "How much of the second model's activations the mapped ones explain as they stand: 1 is all, 0 no more than "
        "their mean, and below 0 they are farther away than that.",
        "Whether what is explained matters to the answers: directions count by their variance alone.",
    ),
    "stitched_cka": Meaning(
        "How alike the mapped activations and the second model's own arrange the examples, place by place.",
        f"{_LEADING} A stitch that works may score low, and one that does not may score high.",
    ),
    "stitched_cca": Meaning(
        "The mean canonical correlation of the mapped activations and the second model's own, place by place.",
        "An invertible map does not change it, so it tells little of the map that was found.",
    ),
    "stitched_svcca": Meaning(
        "The mean canonical correlation of the leading directions of the mapped activations and of the second model's "
        "own, place by place.",
        "Directions below the cut are not looked at, and above it all count alike.",
    ),
}


def meaning_of(table: Values) -> Meaning:
    """Return what a table's measure means; for a measure of others, what its conventions tell."""
    known = STITCHES.get(table.name) if is_worth(table) else MEANINGS.get(table.name)
    if known:
        return known
    ends = "Higher values mean closer layers." if table.higher_is_closer else "Lower values mean closer layers."
    says = f"{table.conventions.rstrip('.')}. {ends}" if table.conventions else ends
    return Meaning(says, "This page knows no more about this measure; see its own documentation.")
