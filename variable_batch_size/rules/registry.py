"""The rules by name: those that are built in, and those of other packages."""

from typing import Any

from variable_batch_size.checks import check_one_of
from variable_batch_size.plugins import Registry
from variable_batch_size.rules.adam import AdamRule
from variable_batch_size.rules.adascale import AdamScaleRule, AdaScaleRule, SurgeRule
from variable_batch_size.rules.rule import Rule
from variable_batch_size.rules.scaling import ConstantRule, LEGWRule, LinearMomentumRule, LinearRule, MuonRule, RootRule
from variable_batch_size.stability import is_experimental

RULES: Registry[type[Rule]] = Registry(
    "rules",
    {
        "linear": LinearRule,
        "root": RootRule,
        "constant": ConstantRule,
        "linear_momentum": LinearMomentumRule,
        "adascale": AdaScaleRule,
        "adam": AdamRule,
        "adamscale": AdamScaleRule,
        "muon": MuonRule,
        "surge": SurgeRule,
        "legw": LEGWRule,
    },
)


OTHER_NAMES = {"sqrt": "root", "square_root": "root", "none": "constant", "adamw": "adam"}  # for hints


def described_names() -> str:
    """The names of all rules for a help text, those of other packages not imported, with what is experimental."""
    found = [name for name, kind in RULES.builtin.items() if is_experimental(kind)]
    return f"{', '.join(RULES)} (experimental: {', '.join(found)}, adam:half-life)"


def make_rule(name: str, **settings: Any) -> Rule:
    """Create a rule by name; its ``text_setting`` may follow the name after a colon, as on a command line.

    >>> make_rule("legw", warmup_samples=1280).warmup_samples, make_rule("adam:half-life").form
    (1280, 'half-life')
    """
    plain_name, colon, text = str(name).partition(":")
    if plain_name in OTHER_NAMES:
        known = ", ".join(map(repr, RULES))
        raise ValueError(f"`rule` must be one of {known}, got {name!r} (did you mean {OTHER_NAMES[plain_name]!r}?)")
    check_one_of(RULES, rule=plain_name)
    kind = RULES[plain_name]
    if colon:
        if kind.text_setting is None:
            raise ValueError(f"`rule` {plain_name} takes no setting after a colon, got {name!r}")
        setting, parse = kind.text_setting
        try:
            settings[setting] = parse(text)
        except ValueError:
            raise ValueError(f"`rule` {plain_name} must be followed by an integer {setting}, got {name!r}") from None
    missing = [needed for needed in kind.needs if needed not in settings]
    if missing:
        raise ValueError(f"`rule` {plain_name} needs {missing[0]}, as in {plain_name}:5000, got {name!r}")
    return kind(**settings)
