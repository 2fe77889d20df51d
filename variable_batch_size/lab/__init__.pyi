"""The public name of the lab."""

from . import planning as planning
