"""Train PyTorch models with a variable global batch size, on XLA cores, torch.distributed processes or one process."""

import difflib
import importlib
from typing import Any

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__ or name.startswith("__"):
        return _attribute(name)
    try:
        return importlib.import_module(f"{__name__}.{name}")  # as in vbs.integrations
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"variable_batch_size has no attribute {name!r}{_hint(name)}", name=name)


def _hint(name: str) -> str:
    """The public name that is nearest to a wrong one, here or in a submodule."""
    places = {public: f"vbs.{public}" for public in __all__}
    for folder in ("planning", "policies", "rules", "traces"):
        for public in _attribute(folder).__all__:
            places.setdefault(public, f"vbs.{folder}.{public}")
    by_case = {public.casefold(): place for public, place in places.items()}
    found = difflib.get_close_matches(name.casefold(), by_case, n=1, cutoff=0.7)
    return f": did you mean {by_case[found[0]]}?" if found else ""
