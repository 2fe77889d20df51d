"""Prometheus: what a scrape of a run returns, read with the parser of the real package."""

import math
import sys
import urllib.request

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import variable_batch_size as vbs
from variable_batch_size.runs.sinks import Prometheus


def scraped(sink):
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: (sample.value, sample.labels) for family in families for sample in family.samples}


def test_a_scrape_has_the_numbers_of_the_latest_record_during_the_run():
    model, found = torch.nn.Linear(2, 1), []
    loader = vbs.DataLoader([torch.ones(2)] * 16, trace=[4, 8], minibatch_size=4)
    optimizer = vbs.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), loader, rule="linear", ref_batchsize=4)
    sink, records = Prometheus(0, labels={"run": "a"}), []
    optimizer.attach(vbs.Log(optimizer, every=1, to=[sink, records.append]))
    for _ in optimizer.epochs():
        for x in loader:
            loss = model(x).mean()
            loss.backward()
            if optimizer.step(loss=loss):
                found.append(scraped(sink))
    assert [len(one) for one in found] == [len(records[0])] * 2
    for one, record in zip(found, records, strict=True):
        assert one == {f"vbs_{name}": (pytest.approx(value), {"run": "a"}) for name, value in record.items()}
    with pytest.raises(OSError, match="refused"):  # closed with the log
        scraped(sink)


def test_numbers_that_are_not_finite_are_served_and_text_is_left_out():
    sink = Prometheus(0)
    sink({"step": 3, "loss": math.inf, "noise scale": math.nan, "why": "text", "is_late": True})
    found = {name: value for name, (value, _) in scraped(sink).items()}
    sink.close()
    assert math.isnan(found.pop("vbs_noise_scale"))
    assert found == {"vbs_step": 3, "vbs_loss": math.inf, "vbs_is_late": 1}


def test_an_occupied_port_is_named():
    first = Prometheus(0)
    first({"step": 1})
    with pytest.raises(OSError, match=rf"Prometheus cannot listen on 127.0.0.1:{first.port}: "):
        Prometheus(first.port)({"step": 1})
    first.close()


def test_it_raises_when_it_is_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ImportError, match=r"Prometheus needs prometheus_client: pip install 'variable_batch_size\[prom"
    ):
        Prometheus(9100)
