import numpy as np
import pytest
from scipy import stats

from netkin.errors import InvalidValue
from netkin.results.values import jackknife_bias, jackknife_error, student_interval, student_quantile
from refusals import refused


def chunked(sizes, seed=0):
    """Numbers in chunks of those sizes."""
    generator = np.random.default_rng(seed)
    return [generator.gamma(2.0, size=size) for size in sizes]


def replicates_of(statistic, chunks):
    return np.array([statistic(np.concatenate(chunks[:j] + chunks[j + 1 :])) for j in range(len(chunks))])


def slow_error(value, replicates, sizes):
    """The delete-m_j jackknife of Busing, Meijer and van der Leeden (1999), number by number."""
    n, K = sum(sizes), len(sizes)
    jackknifed = K * value - sum((1 - m / n) * r for m, r in zip(sizes, replicates, strict=True))
    variance = 0.0
    for m, r in zip(sizes, replicates, strict=True):
        h = n / m
        pseudo = h * value - (h - 1) * r
        variance += (pseudo - jackknifed) ** 2 / (h - 1)
    return (variance / K) ** 0.5


def log_mean(x):
    return np.log(x.mean())


@pytest.mark.parametrize("sizes", [[3, 5, 8, 2], [7] * 6, [1, 1], [100, 1, 1]])
def test_unequal_chunks_follow_the_printed_formula(sizes):
    chunks = chunked(sizes)
    value, replicates = log_mean(np.concatenate(chunks)), replicates_of(log_mean, chunks)
    assert jackknife_error(value, replicates, sizes) == pytest.approx(slow_error(value, replicates, sizes), rel=1e-12)


def test_equal_chunks_give_the_delete_a_group_jackknife():
    chunks = chunked([6] * 9)
    value, replicates = log_mean(np.concatenate(chunks)), replicates_of(log_mean, chunks)
    plain = np.sqrt(8 / 9 * ((replicates - replicates.mean()) ** 2).sum())
    assert jackknife_error(value, replicates, [6] * 9) == pytest.approx(plain, rel=1e-12)
    assert jackknife_bias(value, replicates, [6] * 9) == pytest.approx(8 * (replicates.mean() - value), rel=1e-9)


def test_the_error_of_a_mean_is_its_standard_error():
    (data,) = chunked([40])
    replicates = replicates_of(np.mean, [np.array([x]) for x in data])
    assert jackknife_error(data.mean(), replicates, [1] * 40) == pytest.approx(stats.sem(data), rel=1e-12)
    assert jackknife_bias(data.mean(), replicates, [1] * 40) == pytest.approx(0, abs=1e-12)


def test_the_bias_of_the_plain_variance_is_found():
    (data,) = chunked([30])
    replicates = replicates_of(np.var, [np.array([x]) for x in data])
    assert jackknife_bias(data.var(), replicates, [1] * 30) == pytest.approx(-data.var(ddof=1) / 30, rel=1e-9)


def test_a_table_has_the_errors_of_its_numbers():
    generator, sizes = np.random.default_rng(1), (4, 6, 5)
    values, replicates = generator.random((2, 3)), generator.random((3, 2, 3))
    errors, biases = jackknife_error(values, replicates, sizes), jackknife_bias(values, replicates, sizes)
    for place in np.ndindex(2, 3):
        alone = values[place], replicates[(slice(None), *place)], sizes
        assert errors[place] == pytest.approx(slow_error(*alone), rel=1e-12)
        assert biases[place] == pytest.approx(jackknife_bias(*alone), rel=1e-12)


def test_a_missing_replicate_leaves_no_error():
    replicates = np.ones((3, 2))
    replicates[1, 0] = np.nan
    assert np.isnan(jackknife_error(np.ones(2), replicates, [5, 5, 5])).tolist() == [True, False]


def test_intervals_are_those_of_student():
    low, high = student_interval(np.array([0.5, np.nan]), np.array([0.1, 0.1]), 20, 0.9)
    assert (low[0], high[0]) == pytest.approx(stats.t.interval(0.9, 19, loc=0.5, scale=0.1), rel=1e-12)
    assert np.isnan([low[1], high[1]]).all()
    assert student_quantile(5) == pytest.approx(stats.t.ppf(0.975, 4), rel=1e-12)


def test_intervals_cover_the_truth_as_often_as_they_say():
    generator, chunks, met = np.random.default_rng(2), 10, 0
    for _ in range(2000):
        data = generator.normal(1.0, 1.0, (chunks, 5))
        replicates = [np.delete(data, j, axis=0).mean() for j in range(chunks)]
        low, high = student_interval(data.mean(), jackknife_error(data.mean(), replicates, [5] * chunks), chunks)
        met += bool(low <= 1.0 <= high)
    assert abs(met / 2000 - 0.95) < 0.02  # four standard errors


def test_a_level_that_is_none_is_refused():
    with refused(InvalidValue, "level"):
        student_quantile(5, 95)


def leaving_out(measure, X, Y, chunks):
    """Return the measure of two matrices, its replicates and the sizes of the chunks."""
    parts = np.array_split(np.arange(len(X)), chunks)
    replicates = [measure(np.delete(X, part, axis=0), np.delete(Y, part, axis=0)) for part in parts]
    return measure(X, Y), replicates, [len(part) for part in parts]


def test_the_error_of_a_correlation_is_fishers():
    generator, n, found = np.random.default_rng(3), 1000, []
    for _ in range(40):
        x = generator.normal(size=n)
        y = 0.6 * x + 0.8 * generator.normal(size=n)
        found.append(jackknife_error(*leaving_out(lambda x, y: np.corrcoef(x, y)[0, 1], x, y, 20)))
    spread = np.std(found) / len(found) ** 0.5
    assert np.mean(found) == pytest.approx((1 - 0.6**2) / n**0.5, abs=4 * spread)


@pytest.mark.parametrize("n, p, biased", [(40, 100, True), (200, 300, True), (2000, 20, False)])
def test_wide_layers_on_few_examples_give_cka_more_bias_than_error(n, p, biased):
    def cka(X, Y):
        X, Y = (Z - Z.mean(axis=0) for Z in (X, Y))
        return np.linalg.norm(X.T @ Y) ** 2 / np.linalg.norm(X.T @ X) / np.linalg.norm(Y.T @ Y)

    generator = np.random.default_rng(4)
    shared = np.pad(2 * generator.normal(size=(n, 5)), ((0, 0), (0, p - 5)))
    X, Y = (generator.normal(size=(n, p)) + shared for _ in range(2))
    told = leaving_out(cka, X, Y, 20)
    assert (jackknife_bias(*told) > jackknife_error(*told)) == biased
