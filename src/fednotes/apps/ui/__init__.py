"""The local page. Called, as `fednotes.apps.ui(…)`, `pages.ui`."""

from fednotes import called

called(__name__, "pages", "ui")
