"""Standard errors: they cover the population's value, whatever the order of the data, and leave out what they say."""

import numpy as np
import pytest
import torch

import netkin as nk
import transcriptions
from netkin.errors import InvalidValue
from netkin.statistics import layer_rows as rows_module
from refusals import refused
from table_worlds import sentences

MASK = 2**64 - 1
SALT = 0x6E65746B


def chunks_of(count, chunks):
    """Return the chunk of each example: the hash of its number, in plain integers."""
    found = []
    for number in range(count):
        z = (number + SALT * 0xD1342543DE82EF95) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 30)) * 0x94D049BB133111EB) & MASK
        found.append((z ^ (z >> 31)) % chunks)
    return np.array(found)


def direct(measure, X, Y, of, chunks):
    """Return the values without each chunk's examples in turn, by NumPy."""
    name, _, inside = measure.rstrip(")").partition("(")
    parameters = {key: float(value) for key, value in (one.split("=") for one in inside.split(",") if one)}
    formula = getattr(transcriptions, name)
    return [formula(X[of != chunk], Y[of != chunk], **parameters) for chunk in range(chunks)]


# --- replicates -------------------------------------------------------------------------------------------------------

SMOOTH = [
    "cka", "cka_debiased", "cka_uncentered", "angular_cka", "nbs", "nbs_uncentered", "procrustes_distance",
    "procrustes_angular", "procrustes_size_and_shape", "procrustes_disparity", "cca_mean", "cca_mean_squared",
    "cca_rms", "svcca", "linear_regression_r2", "shape_distance", "gulp", "magnitude_difference",
    "gaussian_mutual_information", "pwcca",
]  # fmt: skip


@pytest.mark.parametrize("n, p, q", [(120, 5, 4), (40, 70, 60)], ids=["moments", "rows"])
def test_replicates_are_the_values_without_a_chunks_examples(worlds, n, p, q):
    X, Y = worlds.related(n, p, q)
    trivial = ("cca", "mutual", "r2") if n < p else ()  # wherever there are fewer examples than features
    asked = [name for name in SMOOTH if not any(part in name for part in trivial)]
    found = nk.compare({"x": X}, {"y": Y}, measures=asked, errors=True, chunks=6)
    of = chunks_of(n, 6)
    for measure in asked:
        table = found[measure]
        if table.error_reasons.get(("x", "y"), "").endswith("does not serve"):
            continue
        assert table.chunk_sizes == tuple(np.bincount(of, minlength=6)), measure
        assert table.replicates[:, 0, 0] == pytest.approx(direct(measure, X, Y, of, 6), abs=1e-9), measure
    assert sum(found[measure].replicates is not None for measure in asked) >= len(asked) - 2


@pytest.mark.parametrize("layer_shape", [(3, 4, 4), (3, 2, 2)])
def test_an_examples_positions_are_in_one_chunk(worlds, layer_shape):
    x, y = (worlds.normal(30, *layer_shape) for _ in range(2))
    y = y + x
    table = nk.compare({"x": x}, {"y": y}, measures="cka", shape="positions", errors=True, chunks=4)["cka"]
    of, places = chunks_of(30, 4), layer_shape[1] * layer_shape[2]
    rows = [np.moveaxis(maps, 1, -1).reshape(-1, 3) for maps in (x, y)]
    assert table.chunk_sizes == tuple(np.bincount(of, minlength=4))
    assert table.replicates[:, 0, 0] == pytest.approx(direct("cka", *rows, np.repeat(of, places), 4), abs=1e-10)


def test_a_sentences_tokens_are_in_one_chunk(words, sentences):
    a, b = words().double(), words().double()
    asked = ["cka", "cka_debiased"]
    found = nk.compare(a, b, sentences, asked, layers="layer.1", shape="tokens", errors=True, chunks=4)
    rows = [nk.activations(m, "layer.1", sentences, shape="tokens")["layer.1"].numpy() for m in (a, b)]
    lengths = np.concatenate([batch["attention_mask"].sum(1).numpy() for batch in sentences])
    of = np.repeat(chunks_of(40, 4), lengths)
    for measure in asked:
        assert found[measure].chunk_sizes == tuple(np.bincount(chunks_of(40, 4), minlength=4))
        assert found[measure].replicates[:, 0, 0] == pytest.approx(direct(measure, *rows, of, 4), abs=1e-9)


def test_spectra_leave_out_the_maps_of_a_chunk(worlds):
    x, y = (worlds.normal(40, 3, 4, 4) for _ in range(2))
    table = nk.compare({"x": x}, {"y": x + y}, measures="cka", shape="dft", errors=True, chunks=4)["cka"]
    of = chunks_of(40, 4)
    for chunk in range(4):
        rest = nk.compare({"x": x[of != chunk]}, {"y": (x + y)[of != chunk]}, measures="cka", shape="dft")
        assert table.replicates[chunk, 0, 0] == pytest.approx(rest["x", "y"], abs=1e-10)


def test_the_unit_of_a_mini_batch_measure_is_the_mini_batch(worlds):
    X, Y = worlds.related(90, 5, 4)
    table = nk.compare({"x": X}, {"y": Y}, measures="cka_minibatch(batch=8)", errors=True, chunks=4)
    table = table["cka_minibatch(batch=8)"]
    of = chunks_of(12, 4)[:11]  # of mini-batches; the last, of 2 examples, is left out
    assert table.chunk_sizes == tuple(count for count in np.bincount(of, minlength=4) if count)
    for replicate, chunk in zip(table.replicates[:, 0, 0], np.unique(of), strict=True):
        stays = np.flatnonzero(np.repeat(of != chunk, 8))
        assert replicate == pytest.approx(transcriptions.cka_minibatch(X[stays], Y[stays], batch=8), abs=1e-10)


@pytest.mark.parametrize("times", [1e2, 1e4])
def test_a_chunk_with_an_example_far_away_is_left_out_to_the_last_digits(worlds, times):
    X, Y = worlds.related(60, 5, 4)
    of = chunks_of(60, 5)
    X[np.flatnonzero(of == 2)[0]] *= times
    found = nk.compare({"x": X}, {"y": Y}, measures=["cka", "nbs", "cka_debiased"], errors=True, chunks=5)
    for measure in found:
        without = transcriptions.__dict__[measure](X[of != 2], Y[of != 2])
        assert found[measure].replicates[2, 0, 0] == pytest.approx(without, abs=1e-16 * times**2 + 1e-14), measure


# --- values without an error ------------------------------------------------------------------------------------------


def test_a_measure_with_medians_has_the_reason(worlds):
    X, Y = worlds.related(60, 5, 4)
    found = nk.compare({"x": X}, {"y": Y}, measures=["cka_rbf", "cka"], errors=True, chunks=5)
    assert "the jackknife does not serve" in found["cka_rbf"].error_reasons["x", "y"]
    assert found["cka_rbf"].errors is None
    assert np.isfinite(found["cka"].errors).all()


def test_a_value_at_its_bound_has_none(worlds):
    X, Y = worlds.related(60, 5, 4)
    table = nk.compare({"x": X}, {"copy": 2 * X, "y": Y}, measures="cka", errors=True, chunks=5)["cka"]
    assert table.error_reasons == {("x", "copy"): "the value lies at the bound 1 of the measure"}
    assert np.isnan(table.errors[0, 0])
    assert table.errors[0, 1] > 0


@pytest.mark.parametrize("p, q", [(5, 4), (80, 70)], ids=["moments", "rows"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_that_a_chunk_alone_makes_has_none(worlds, p, q, dtype):
    X, Y = (Z.astype(dtype) for Z in worlds.related(60, p, q))
    X[chunks_of(60, 5) != 2] = 1.1  # constant without the chunk
    found = nk.compare({"x": X}, {"y": Y}, measures=["cka", "nbs", "cka_debiased"], errors=True, chunks=5)
    for measure in found:
        assert found[measure].error_reasons["x", "y"] == "no value with 1 of the 5 chunks left out", measure


def test_a_unit_that_a_chunk_alone_moves_is_idle_without_it(worlds):
    X, Y = worlds.related(60, 5, 4)
    of = chunks_of(60, 5)
    X[of != 2, 0] = 1.1
    table = nk.compare({"x": X}, {"y": Y}, measures="cca_mean", errors=True, chunks=5)["cca_mean"]
    assert table.replicates[2, 0, 0] == pytest.approx(transcriptions.cca_mean(X[of != 2, 1:], Y[of != 2]), abs=1e-10)


@pytest.mark.parametrize("chunks", [1, 0, True, 2.0, "5"])
def test_fewer_than_two_chunks_are_refused(worlds, chunks):
    with pytest.raises(InvalidValue, match="`chunks` is the number of chunks for standard errors, 2 or more; got "):
        nk.compare({"x": worlds.normal(30, 3)}, errors=True, chunks=chunks)


def test_more_chunks_than_examples_are_refused(worlds):
    with refused(InvalidValue, "chunks"):
        nk.compare({"x": worlds.normal(30, 3)}, errors=True, chunks=31)


def test_more_chunks_than_a_stream_has_examples_are_refused():
    model, images = torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.randn(30, 4)
    with refused(InvalidValue, "chunks"):
        nk.compare(model, data=(batch for batch in images.split(10)), layers="0", errors=True, chunks=31)


def test_chunks_without_examples_are_told(worlds):
    X, Y = worlds.related(25, 4, 3)
    found = nk.compare({"x": X}, {"y": Y}, measures=["cka", "cka_debiased"], errors=True)
    held = len(np.unique(chunks_of(25, 20)))
    assert found["cka"].replicates.shape[0] == held < 20
    (told,) = (text for text in sentences(found) if "rest on" in text)
    assert told == (
        f"the standard errors of cka, cka_debiased rest on {held} chunks, as 25 examples do not fill all of the 20; "
        "take more examples or fewer `chunks=`."
    )


def test_chunks_change_no_value(maps, images, layers):
    a, b, asked = maps(), maps(), ["cka", "cca_mean", "cka_minibatch(batch=16)", "cka_rbf"]
    plain = nk.compare(a, b, images, asked, layers=layers)
    found = nk.compare(a, b, images, asked, layers=layers, errors=True, chunks=7)
    for measure in asked:
        assert found.to_numpy(measure) == pytest.approx(plain.to_numpy(measure), abs=1e-5)
        assert plain[measure].errors is None


def test_a_sample_counts_the_examples_it_kept(worlds, monkeypatch):
    monkeypatch.setattr(rows_module, "CAP", 20)
    registered = nk.measures.measures()["cka_rbf"]
    assert registered.jackknife_reason
    X, Y = worlds.related(80, 4, 3)
    statistics = nk.collect({"x": X}, {"y": Y}, measures="cka_rbf", errors=True, chunks=4)
    assert sum(statistics.collector(registered).chunk_sizes) == 20


def test_recorded_tensors_and_arrays_have_the_same_errors(worlds):
    X, Y = worlds.related(60, 5, 4)
    one, two = (
        nk.compare({"x": kind(X)}, {"y": kind(Y)}, errors=True, chunks=5)["cka"].errors
        for kind in (np.asarray, torch.as_tensor)
    )
    assert one == pytest.approx(two)


# --- do they tell the truth? ------------------------------------------------------------------------------------------

SCALES = np.array([1.5, 1.0, 0.7])
MIXING = np.array([[1.0, 0.3, 0.0], [0.0, 0.8, 0.2], [0.1, 0.0, 0.4]])
JUDGED = ["cka_debiased", "procrustes_distance", "cca_mean"]
TOGETHER = 25  # layers of a comparison, of which each is a case of its own


def population():
    """Return the measures' values of the covariances themselves."""
    x = np.diag(SCALES**2)
    cross = x @ MIXING
    y = MIXING.T @ x @ MIXING + np.eye(3)
    inverse = np.linalg.inv(np.linalg.cholesky(y)).T
    nuclear = np.linalg.svd(cross, compute_uv=False).sum()
    return {
        "cka_debiased": (cross**2).sum() / np.sqrt((x**2).sum() * (y**2).sum()),
        "procrustes_distance": np.sqrt(2 - 2 * nuclear / np.sqrt(np.trace(x) * np.trace(y))),
        "cca_mean": np.linalg.svd(cross / SCALES[:, None] @ inverse, compute_uv=False).mean(),
    }


@pytest.mark.slow
def test_intervals_cover_the_populations_value():
    rng, cases, n = np.random.default_rng(0), 600, 800
    covered, truth = dict.fromkeys(JUDGED, 0), population()
    for _ in range(0, cases, TOGETHER):
        X = {str(case): rng.normal(size=(n, 3)) * SCALES for case in range(TOGETHER)}
        Y = {case: rows @ MIXING + rng.normal(size=(n, 3)) for case, rows in X.items()}
        found = nk.compare(X, Y, measures=JUDGED, pairs="corresponding", errors=True, chunks=10, progress=False)
        for measure in JUDGED:
            low, high = map(np.diag, found[measure].interval(0.95))
            covered[measure] += int(((low <= truth[measure]) & (truth[measure] <= high)).sum())
    for measure, count in covered.items():
        assert 0.92 <= count / cases <= 0.98, (measure, count / cases)


@pytest.mark.slow
def test_intervals_of_cut_spectra_cover_where_the_table_gives_an_error():
    """Of a direction that may be exchanged and that only one layer has, errors covered the mean in 2 of 3 draws."""
    rng, spectrum, covered, known = np.random.default_rng(3), STEEP.copy(), {}, {}
    shared = np.array([1, 1, 1, 1, 1, 0, 1, 1, 1, 1]) * 0.8
    for gap in (0.02, 0.4):
        spectrum[5], values, errors = spectrum[4] * (1 - gap), [], []
        for _ in range(12):
            X = {str(case): rng.normal(size=(2000, 10)) for case in range(25)}
            Y = {
                case: (shared * rows + np.sqrt(1 - shared**2) * rng.normal(size=rows.shape)) * np.sqrt(STEEP)
                for case, rows in X.items()
            }
            X = {case: rows * np.sqrt(spectrum) for case, rows in X.items()}
            table = nk.compare(X, Y, measures="svcca_k(k=5)", pairs="corresponding", errors=True, progress=False)
            values.append(np.diag(table["svcca_k(k=5)"].values))
            errors.append(np.diag(table["svcca_k(k=5)"].errors))
        values, errors = np.concatenate(values), np.concatenate(errors)
        held = np.isfinite(errors)
        inside = np.abs(values - values.mean()) <= 1.96 * errors
        covered[gap], known[gap] = inside[held].mean(), held.mean()
    assert covered[0.02] > 0.84, covered  # 0.70 with all errors
    assert known[0.02] < 0.8, known
    assert covered[0.4] > 0.92, covered
    assert known[0.4] > 0.98, known


@pytest.mark.slow
def test_errors_of_data_sorted_by_class_are_the_true_spread():
    rng, cases, n = np.random.default_rng(1), 250, 600
    centres, values, errors = rng.normal(size=(5, 6)) * 2, [], []
    for _ in range(0, cases, TOGETHER):
        X, Y = {}, {}
        for case in range(TOGETHER):
            classes = np.sort(rng.integers(0, 5, n))  # drawn at random, and sorted
            X[str(case)] = centres[classes, :3] + rng.normal(size=(n, 3))
            Y[str(case)] = centres[classes, 3:] + rng.normal(size=(n, 3))
        found = nk.compare(X, Y, measures=JUDGED, pairs="corresponding", errors=True, chunks=20, progress=False)
        values.append([np.diag(found[measure].values) for measure in JUDGED])
        errors.append([np.diag(found[measure].errors) for measure in JUDGED])
    values, errors = (np.concatenate(each, axis=1) for each in (values, errors))
    spread, told = np.std(values, axis=1, ddof=1), np.sqrt(np.mean(np.square(errors), axis=1))
    assert (told / spread >= 0.8).all(), told / spread
    assert (told / spread <= 1.2).all(), told / spread


# --- what makes standard errors rough ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_far_example_spoils_no_replicate_without_it(worlds, dtype):
    X, Y = (Z.astype(dtype) for Z in worlds.related(600, 6, 5))
    X[17] *= 1e6
    of = chunks_of(600, 6)
    replicates = nk.compare({"x": X}, {"y": Y}, measures="cka_debiased", errors=True, chunks=6)[
        "cka_debiased"
    ].replicates
    chunk = of[17]
    without = transcriptions.cka_debiased(X[of != chunk].astype(float), Y[of != chunk].astype(float))
    assert replicates[chunk, 0, 0] == pytest.approx(without, abs=1e-9 if dtype == np.float64 else 1e-5)


def test_a_cut_that_jumps_between_chunks_is_told(worlds):
    draw = np.random.default_rng(0)
    X = draw.normal(size=(200, 12)) * 0.7 ** np.arange(12)
    Y = X @ draw.normal(size=(12, 8)) + draw.normal(size=(200, 8))
    of = chunks_of(200, 10)

    def shares(Z):
        values = np.linalg.svd(Z - Z.mean(0), compute_uv=False) ** 2
        return np.cumsum(values) / values.sum()

    share = round(float(shares(X)[4]), 4)  # about which leaving a chunk out decides
    counts = {int(np.searchsorted(shares(X[of != chunk]), share)) for chunk in range(10)}
    assert len(counts) > 1
    measure = f"svcca(variance={share})"
    found = nk.compare({"x": X}, {"y": Y}, measures=[measure, "svcca_k", "cka"], errors=True, chunks=10)
    told = [text for text in sentences(found) if "another number of directions" in text]
    assert len(told) == 1
    assert told[0].startswith(f"without some chunk {measure} keeps another number of directions, of 1 pairs")
    assert "svcca_k" not in told[0]  # whose directions at the cut jump as well


def turned(rng, spectrum, n, count, noise=0.02):
    """Return layers with these variances, and rotated copies with noise, by number."""
    X, Y = {}, {}
    for case in map(str, range(count)):
        X[case] = rng.normal(size=(n, len(spectrum))) * np.sqrt(spectrum)
        Q = np.linalg.qr(rng.normal(size=(len(spectrum), len(spectrum))))[0]
        Y[case] = X[case] @ Q + noise * rng.normal(size=X[case].shape)
    return X, Y


DENSE, STEEP = np.arange(1, 33) ** -0.5, 2.0 ** -np.arange(10)
CUTS = ["svcca_k(k=20)", "svcca(variance=0.9)", "svcca_by_sum(variance=0.9)"]


@pytest.mark.slow
def test_a_direction_at_the_cut_that_a_near_one_may_replace_leaves_no_error():
    """Eigenvalues 2.5 % apart, which 5,000 examples tell to 2 %: intervals hold the mean of all draws in 2 of 3."""
    X, Y = turned(np.random.default_rng(0), DENSE, 5000, 10)
    found = nk.compare(X, Y, measures=[*CUTS, "cca_mean"], pairs="corresponding", errors=True, progress=False)
    for measure in CUTS:
        reasons = [found[measure].error_reasons.get((case, case), "") for case in X]
        assert sum("too near to each other" in reason for reason in reasons) >= 8, measure
        assert found[measure].bias().shape == (10, 10)  # replicates stay
    assert np.isfinite(np.diag(found["cca_mean"].errors)).all()  # which keeps all directions


def test_a_cut_in_a_gap_has_its_error():
    X, Y = turned(np.random.default_rng(1), STEEP, 2000, 10)
    asked = ["svcca_k(k=5)", "svcca(variance=0.95)"]
    found = nk.compare(X, Y, measures=asked, pairs="corresponding", errors=True, progress=False)
    for measure in asked:
        assert np.isfinite(np.diag(found[measure].errors)).all(), found[measure].error_reasons


def test_a_number_of_directions_that_other_samples_change_leaves_no_error():
    draw = np.random.default_rng(2)
    X = draw.normal(size=(2000, 10)) * np.sqrt(STEEP)
    Y = draw.normal(size=(2000, 10))
    Y[:, :4] = X[:, :4] / np.sqrt(STEEP[:4]) + 0.1 * Y[:, :4]  # the fifth direction is X's alone
    share = float(np.cumsum(np.linalg.svd(X - X.mean(0), compute_uv=False) ** 2)[3] / ((X - X.mean(0)) ** 2).sum())
    values = []
    for cut in (share - 1e-3, share + 1e-3):  # on either side of the fourth
        measure = f"svcca(variance={cut:.6f})"
        table = nk.compare({"x": X}, {"y": Y}, measures=measure, errors=True)[measure]
        assert "one direction more or fewer" in table.error_reasons["x", "y"]
        values.append(table["x", "y"])
    assert values[0] > 0.98
    assert values[1] < 0.85


def test_an_error_that_one_chunk_makes_is_left_out(worlds):
    X, Y = worlds.related(200, 5, 4)
    Y[:, 0] = worlds.normal(200)
    of = chunks_of(200, 10)
    far = np.flatnonzero(of == 3)[0]
    X[far, 0] = Y[far, 0] = 1e3  # one example makes two features one
    table = nk.compare({"x": X}, {"y": Y}, measures="cca_mean", errors=True, chunks=10)["cca_mean"]
    assert "one of the 10 chunks alone" in table.error_reasons["x", "y"]
    assert np.isnan(table.errors[0, 0])
    assert np.ptp(np.delete(table.replicates[:, 0, 0], 3)) < abs(table.replicates[3, 0, 0] - table["x", "y"]) / 2


@pytest.mark.slow
def test_jumps_of_the_cut_make_no_error():
    """A few replicates cut another direction off: the jackknife gave 0.01 and 0.06 where values spread by 0.003."""
    X, Y = turned(np.random.default_rng(2), np.arange(1, 17) ** -0.5, 1000, 30)
    table = nk.compare(X, Y, measures=CUTS[1], pairs="corresponding", errors=True, progress=False)[CUTS[1]]
    assert np.diag(table.values).std() < 0.003
    assert all((case, case) in table.error_reasons for case in X)


def test_a_margin_to_a_value_without_an_error_has_none():
    X, Y = turned(np.random.default_rng(0), DENSE, 5000, 1)
    Y["other"] = np.random.default_rng(1).normal(size=(5000, 32))
    table = nk.compare(X, Y, measures=CUTS[0], errors=True, progress=False)[CUTS[0]]
    match = table.best_matches()["0"]
    assert (match.layer, match.second, match.error, match.margin_error, match.clear) == ("0", "other", None, None, None)


def test_values_at_other_cuts_are_those_of_the_directions_themselves(worlds):
    X, Y = worlds.related(80, 6, 5)
    moments = nk.Moments.of(X, Y)
    nk.svcca_k(moments, k=3)
    U, V = (np.linalg.svd(Z - Z.mean(0), full_matrices=False) for Z in (X, Y))

    def value(left, right):
        return np.linalg.svd(U[0][:, left].T @ V[0][:, right], compute_uv=False).mean()

    first, other = [0, 1, 2], [0, 1, 3]
    exchanged = [value(other, first), value(first, other), value(other, other)]
    assert moments.cut.other_values(moments)[:, 0] == pytest.approx(exchanged, abs=1e-10)
    assert np.isnan(moments.cut.other_values(moments)[:, 1:]).all()  # the number is fixed
    assert moments.cut.margins((3, 3))[0, 0] == pytest.approx(2 * np.log(U[1][2] / U[1][3]))
    nk.svcca(moments, variance=0.9)
    k, l = moments.cut.counts
    more, fewer = moments.cut.other_values(moments)[:, 1], moments.cut.other_values(moments)[:, 2]
    assert more[0] == pytest.approx(value(range(k + 1), range(l)), abs=1e-10)
    assert fewer[1] == pytest.approx(value(range(k), range(l - 1)), abs=1e-10)
    held = np.cumsum(U[1] ** 2) / (U[1] ** 2).sum()
    assert moments.cut.margins((k, l))[0, 1:] == pytest.approx([held[k - 1] - 0.9, 0.9 - held[k - 2]])


def test_a_cut_between_conjugate_frequencies_has_its_error():
    """Their eigenvalues are equal in every sample, so that none exchanges them."""
    draw, of = np.random.default_rng(4), np.array([0, 1, 2, 1])
    sizes = 2.0 ** -(of[:, None] + 1.7 * of)  # 1, then 0.5 of a frequency and its conjugate, then 0.3 of two
    x = np.fft.ifft2(np.fft.fft2(draw.normal(size=(800, 1, 4, 4))) * sizes).real
    y = x + 0.05 * draw.normal(size=x.shape)
    measure = "svcca_k(k=2)"
    table = nk.compare({"x": x}, {"y": y}, measures=measure, shape="dft", errors=True)[measure]
    assert np.isfinite(table.errors).all(), table.error_reasons


def test_few_chunks_of_mini_batches_are_told(worlds):
    X, Y = worlds.related(60, 5, 4)
    measure = "cka_minibatch(batch=16)"
    found = nk.compare({"x": X}, {"y": Y}, measures=measure, errors=True)
    held = len(found[measure].chunk_sizes)
    assert 1 < held <= 4
    assert (
        f"the standard errors of {measure} rest on {held} chunks, as 4 mini-batches do not fill" in sentences(found)[0]
    )
    many = nk.compare({"x": np.tile(X, (20, 1))}, {"y": np.tile(Y, (20, 1))}, measures=measure, errors=True)
    assert not any("rest on" in text for text in sentences(many))
