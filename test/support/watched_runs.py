"""Logs of runs that the tests of vbs watch make, without training."""

import json


def record(step, **values):
    """A record of a step with 64 samples, at 1,280 samples per second."""
    position = {"epoch": 0, "step": step, "samples": 64 * step, "progress": 1.5 * step}
    numbers = {"loss": 2.0 - step / 1000, "batch_size": 64, "lr": 0.1, "factor": 2.0, "samples_per_second": 1280.0}
    noise = {"gain": 1.5, "gain_low": 1.2, "gain_high": 1.9, "efficiency": 0.75, "noise_scale": 300.0}
    noise |= {"noise_scale_low": 200.0, "noise_scale_high": 450.0}
    return {**position, **numbers, "idle_share": 0.0, "cores": 2, **noise, **values}


def line(step, **values):
    return json.dumps(record(step, **values)) + "\n"


def write_log(directory, steps, **values):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "log.jsonl").write_text("".join(line(step, **values) for step in steps))
    return directory
