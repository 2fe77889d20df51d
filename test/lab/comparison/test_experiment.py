"""The runs of an experiment, and its default traces."""

from variable_batch_size.lab.comparison.experiment import Run, default_traces, runs_of


def test_runs_are_every_combination_after_the_baseline():
    assert runs_of(["a", "b"], ["root"], 2) == [
        Run("reference", "constant", 0),
        Run("reference", "constant", 1),
        Run("a", "root", 0),
        Run("a", "root", 1),
        Run("b", "root", 0),
        Run("b", "root", 1),
    ]


def test_default_traces_hold_the_samples_and_fit_the_data():
    traces = default_traces(16, 14_400, 1440)
    assert {name: (int(t.sizes.min()), int(t.sizes.max())) for name, t in traces.items()} == {
        "ramp": (16, 256),
        "spot": (80, 256),
    }
    assert all(14_400 <= t.sizes.sum() < 14_400 + 5 * 256 for t in traces.values())
    assert all(t.sizes.max() == 96 for t in default_traces(32, 5000, 100).values())
