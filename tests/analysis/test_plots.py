"""Every measure's figure shows its numbers, on labelled axes."""

import io

import numpy as np
import pytest

from kvjax import analysis
from kvjax.analysis import plots

pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'kvjax[experiments]'")

L, B, H, K, T = 3, 2, 4, 2, 60
RNG = np.random.default_rng(0)
LENGTHS, PROMPT = np.array([60, 40]), np.array([20, 10])


def by_query(heads: int) -> np.ndarray:
    """[L, B, heads, T] in [0, 1], NaN where nothing is measured."""
    values = RNG.uniform(size=(L, B, heads, T)).astype(np.float32)
    at = np.arange(T)
    return np.where((at >= PROMPT[:, None, None]) & (at < LENGTHS[:, None, None]), values, np.float32(np.nan))


def missed() -> analysis.MissRate:
    return analysis.MissRate(by_query(H), by_query(H))


def retained() -> analysis.Retained:
    last = np.broadcast_to(np.maximum(np.arange(T) + 7, 19), (L, B, K, T)).astype(np.int32)
    return analysis.Retained(last, LENGTHS, PROMPT)


def selected() -> analysis.Selected:
    """The first layer reads everything."""
    shares = by_query(K)
    shares[0] = np.nan
    return analysis.Selected(np.where(np.isnan(shares), -1, 9).astype(np.int32), shares, shares, shares)


def skew_effect() -> analysis.SkewEffect:
    shares = RNG.uniform(size=(2, 3, 2, L))
    shares[..., 0] = np.nan
    return analysis.SkewEffect(np.array([0.1, 0.3, 1.0]), *shares)


COSINES = np.where(np.arange(L)[:, None] == 0, np.nan, RNG.uniform(-1, 1, (4, L, B))).astype(np.float32)
MASS = -np.sort(-RNG.exponential(size=(L, B, H, T)).astype(np.float32))
STD = np.where(np.arange(T) < np.array([[0], [30]]), np.nan, 0.1).astype(np.float32)
FIGURES = {
    "sparsity": lambda: plots.plot_sparsity(RNG.uniform(size=(L, B, H))),
    "accumulated_attention": lambda: plots.plot_accumulated_attention(
        analysis.AccumulatedAttention(MASS, np.full((L, B, H), 1.5, np.float32))
    ),
    "keys_for_mass": lambda: plots.plot_keys_for_mass(RNG.integers(0, 50, (L, B, H, T))),
    "attention_std": lambda: plots.plot_attention_std(
        analysis.AttentionStd(np.array([0, 30]), np.broadcast_to(STD, (L, B, H, 2, T)), np.zeros((L, B, H, T)))
    ),
    "attention_cosine": lambda: plots.plot_attention_cosine(by_query(H)),
    "jaccard": lambda: plots.plot_jaccard({"h2o": by_query(K), "roco": by_query(K)}),
    "miss_rate": lambda: plots.plot_miss_rate(missed()),
    "miss_rate of policies": lambda: plots.plot_miss_rate({"h2o": missed(), "tova": missed()}),
    "retrieval_scores": lambda: plots.plot_retrieval_scores(
        analysis.RetrievalScores(RNG.uniform(size=(L, H)), RNG.uniform(size=(L, H)))
    ),
    "retained": lambda: plots.plot_retained(retained()),
    "selected": lambda: plots.plot_selected(selected()),
    "selected of specs": lambda: plots.plot_selected({"infinigen": selected(), "optimal": selected()}),
    "input_cosine": lambda: plots.plot_input_cosine(analysis.InputCosine(*COSINES)),
    "skew_effect": lambda: plots.plot_skew_effect(skew_effect()),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FIGURES)
def test_figures_can_be_read(name):
    figure = FIGURES[name]()
    for axes in figure.axes:
        # Only the lowest panel of a column has the label.
        assert axes.get_xlabel() or axes.get_label() == "<colorbar>" or not axes.get_subplotspec().is_last_row()
        assert axes.has_data()
    assert figure.axes[0].get_ylabel()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_every_measure_has_its_figure():
    others = {"plots", "retrieval_heads", "show", "submodular"}
    # Functions that choose the budgets, heads or ranks of a cache.
    others |= {"budgets", "density_weights", "divided", "entropy_weights", "head_gates", "passkeys", "replay_scores"}
    others |= {"search_ranks", "shortened", "train_directions"}
    # Measures that experiments.after_prompt puts in tables.
    others |= {"output_error", "recurrences"}
    # A prediction of drafts, not of attention.
    others |= {"acceptance"}
    measures = {name for name in analysis.__all__ if name.islower()} - others
    assert measures == {name.removeprefix("plot_") for name in dir(plots) if name.startswith("plot_")}
    assert {name.split()[0] for name in FIGURES} == measures


def test_lines_are_means():
    values = by_query(H)
    lines = plots.plot_attention_cosine(values).axes[0].get_lines()
    for layer, line in enumerate(lines):
        x, y = line.get_data()
        np.testing.assert_array_equal(x, np.arange(10, 60))
        np.testing.assert_allclose(y, np.nanmean(values[layer, :, :, 10:], axis=(0, 1)), rtol=1e-6)
    (line,) = plots.plot_jaccard({"h2o": values}).axes[0].get_lines()
    np.testing.assert_allclose(line.get_ydata(), np.nanmean(values[..., 10:], axis=(0, 1, 2)), rtol=1e-6)


def test_layers_that_read_everything_are_left_out():
    result = selected()
    number, share, overlap, mass = plots.plot_selected(result).axes
    assert [line.get_label() for line in overlap.get_lines()] == ["1", "2"]
    for line in number.get_lines():
        np.testing.assert_array_equal(line.get_ydata(), 9)
    for axes in (share, overlap, mass):
        for layer, line in enumerate(axes.get_lines(), start=1):
            x, y = line.get_data()
            np.testing.assert_array_equal(x, np.arange(10, 60))
            np.testing.assert_allclose(y, 100 * np.nanmean(result.mass[layer, :, :, 10:], axis=(0, 1)), rtol=1e-5)


def test_skews_are_compared_by_means_over_layers():
    result = skew_effect()
    axes = plots.plot_skew_effect(result).axes[0]
    bold = [line for line in axes.get_lines() if line.get_marker() == "o"]
    for kind, line in enumerate(bold):
        np.testing.assert_array_equal(line.get_xdata(), result.ratios)
        np.testing.assert_allclose(line.get_ydata(), 100 * result.overlap[:, kind, 1:].mean(axis=1))
    lines = plots.plot_input_cosine(analysis.InputCosine(*COSINES)).axes[0].get_lines()
    for line, values in zip(lines, COSINES, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [1, 2])
        np.testing.assert_allclose(line.get_ydata(), values[1:].mean(axis=1))


def test_a_map_shows_which_tokens_were_seen():
    image = plots.plot_retained(retained()).axes[0].get_images()[0].get_array()
    for query in range(60):
        for token in range(60):
            if token > query:
                assert np.ma.getmaskarray(image)[query, token]
            else:
                assert image[query, token] == (query <= max(token + 7, 19))
