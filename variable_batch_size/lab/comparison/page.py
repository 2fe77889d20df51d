"""Renders the pages of compare and recommend: a template that extends base.html, a script, and the charts it draws."""

from importlib.resources import files
from typing import Any

from variable_batch_size.checks import import_extra


def rendered(package: str, name: str, *, charts: dict[str, Any], **values: Any) -> str:
    """A page that needs no other file, of the template and the script called `name` in a package.

    `charts` is the data of the script, and `values` are those of the template.
    """

    def resource(name: str) -> str:
        """A file of the package, or one that all pages share."""
        places = (files(place) / name for place in (package, "variable_batch_size.lab.comparison"))
        return next(place for place in places if place.is_file()).read_text(encoding="utf-8")

    jinja2 = import_extra("jinja2", "the page needs jinja2", "compare")
    plotly = import_extra("plotly.offline", "the page needs plotly", "compare")
    # with autoescape, because names may contain HTML
    options = {"autoescape": True, "trim_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(resource), **options
    )
    environment.filters["count"] = "{:,.0f}".format
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    parts = {"style": resource("page.css"), "script": resource(f"{name}.js"), "library": plotly.get_plotlyjs()}
    return str(environment.get_template(f"{name}.html").render(charts=charts, **parts, **values))
