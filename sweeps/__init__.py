"""What is searched, and how one trial is measured."""

__version__ = "0.2.0"
"""Of the whole project: the wheel and the probe's dist-info carry the same."""


class SpecsweepError(Exception):
    """Root of every error that is raised for a user of the API: the message says what was wanted and what came."""
