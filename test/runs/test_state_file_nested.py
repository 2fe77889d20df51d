"""tree_map: parts of nested containers are changed, and nothing else."""

from collections import OrderedDict, namedtuple

import torch

from variable_batch_size.runs.state_file import tree_map


def test_nested_leaves_are_mapped_and_container_types_are_kept():
    state = OrderedDict(model=[torch.ones(1), (2, "text")], pair=namedtuple("Pair", "a b")(1, {"c": 2}))
    state._metadata = {"": {"version": 1}}
    places = []

    def change(part, place):
        places.append(place)
        return 3 if part == 2 and not isinstance(part, torch.Tensor) else part

    found = tree_map(state, change)
    assert found == OrderedDict(model=[torch.ones(1), (3, "text")], pair=(1, {"c": 3}))
    assert type(found) is OrderedDict
    assert found._metadata == {"": {"version": 1}}
    of_model = ["", "['model']", "['model'][0]", "['model'][1]", "['model'][1][0]", "['model'][1][1]"]
    of_pair = ["", "['pair']", "['pair'][0]", "['pair'][1]", "['pair'][1]", "['pair'][1]['c']"]
    of_metadata = ["", "", "['']", "['']", "['']['version']"]
    assert places == ["", *of_model, *of_pair, *of_metadata]
    assert state["model"][1] == (2, "text")
