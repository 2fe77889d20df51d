"""Renders the pages of compare and recommend: a template that extends base.html, a script, and the charts it draws."""

from importlib.resources import files
from typing import Any

from variable_batch_size.checks import import_extra


def _resource(name: str) -> str:
    return (files("variable_batch_size.comparison") / name).read_text(encoding="utf-8")


def rendered(template: str, script: str, *, charts: dict[str, Any], **values: Any) -> str:
    """A page that needs no other file; `charts` is the data of its script, and `values` are those of its template."""
    jinja2 = import_extra("jinja2", "the page needs jinja2", "compare")
    plotly = import_extra("plotly.offline", "the page needs plotly", "compare")
    # with autoescape, because names may contain HTML
    options = {"autoescape": True, "trim_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(_resource), **options
    )
    environment.filters["count"] = "{:,.0f}".format
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    parts = {"style": _resource("page.css"), "script": _resource(script), "library": plotly.get_plotlyjs()}
    return str(environment.get_template(template).render(charts=charts, **parts, **values))
