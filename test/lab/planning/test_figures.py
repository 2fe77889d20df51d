import pytest

import variable_batch_size as vbs


def planned(sizes, cores=4, **options):
    schedule = vbs.Schedule(vbs.Trace.of(sizes), dataset_size=1000, minibatch_size=32, num_replicas=cores)
    return vbs.planning.Plan.of(schedule, **options), schedule


def test_a_png_is_1200_pixels_wide(tmp_path):
    from matplotlib.image import imread

    vbs.planning.plot_plan(*planned([32, 64, 512, 96] * 20), tmp_path / "plan.png")
    assert imread(tmp_path / "plan.png").shape[:2] == (900, 1200)


def test_svg_contains_its_labels(tmp_path):
    vbs.planning.plot_plan(*planned([32, 64, 512, 96] * 20, ref_batchsize=128), tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    labels = [
        "batch size (samples)",
        "learning-rate factor",
        "(reference batch size 128)",
        "steps done",
        "samples done",
    ]
    for text in [*labels, "minibatches of a core in a step", "linear", "root", "constant", "core 0", "core 3"]:
        assert f"<!-- {text} -->" in drawn


@pytest.mark.parametrize(
    ("sizes", "cores", "options"),
    [
        ([32], 1, {}),
        (32, 1, {"num_epochs": 3}),
        ([32, 64] * 2000, 300, {}),
        ([32, 64], 2, {"rules": {}}),
        ([32, 960] * 60, 2, {"rules": {f"rule {n}": vbs.rules.RootRule() for n in range(12)}}),
    ],
)
def test_every_plan_can_be_drawn(tmp_path, sizes, cores, options):
    vbs.planning.plot_plan(*planned(sizes, cores, **options), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_other_file_types_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"^the file name of a plot must end in \.png or \.svg, got 'plan\.gif'$"):
        vbs.planning.plot_plan(*planned([32]), "plan.gif")
