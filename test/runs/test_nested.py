"""mapped: parts of nested containers are changed, and nothing else."""

from collections import OrderedDict, namedtuple

import torch

from variable_batch_size.runs.state_file import mapped


def test_parts_are_changed_wherever_they_are_and_containers_stay_what_they_are_in_a_file():
    state = OrderedDict(model=[torch.ones(1), (2, "text")], pair=namedtuple("Pair", "a b")(1, {"c": 2}))
    state._metadata = {"": {"version": 1}}
    places = []

    def change(part, place):
        places.append(place)
        return 3 if part == 2 and not isinstance(part, torch.Tensor) else part

    found = mapped(state, change)
    assert found == OrderedDict(model=[torch.ones(1), (3, "text")], pair=(1, {"c": 3}))
    assert type(found) is OrderedDict
    assert found._metadata == {"": {"version": 1}}
    assert places[3:5] == ["['model'][1]", "['model'][1][0]"]
    assert places[-1] == "['pair'][1]['c']"
    assert state["model"][1] == (2, "text")
