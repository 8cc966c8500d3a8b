"""The error of the site's build."""


class SiteError(Exception):
    """The site cannot be built. The message names the page and the remedy."""
