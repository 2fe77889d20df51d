"""Examples that no page runs: each trains."""

import runpy

from documents import ROOT


def example(name):
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def test_the_gan_updates_both_models():
    distance, num_updates = example("gan")["train"](1)
    assert num_updates == 8192 // 64
    assert 0.2 < distance < 5  # untrained 0.1; 0.9 after 12 epochs


def test_fine_tuning_learns_the_new_task():
    accuracy, num_updates = example("fine_tuning")["fine_tune"](2)
    assert num_updates == 96
    assert accuracy > 0.8  # 0.97; a coin has 0.5


def test_a_process_for_each_device_trains_the_plain_model():
    assert example("data_parallel")["train"]() < 1.65  # ln 5 = 1.61 for random labels
