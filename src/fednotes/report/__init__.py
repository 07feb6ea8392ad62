"""Pages of results. Called, as `fednotes.report(…)`, `html.write_report`."""

from fednotes import called

called(__name__, "html", "write_report")
