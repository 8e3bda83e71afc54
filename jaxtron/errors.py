"""Errors that a user can act on.

Every command line entry point catches :class:`JaxtronError`, prints its message without a traceback
and exits with status 2. A message says what is wrong, the value, where it came from, and what would
be right.
"""


class JaxtronError(Exception):
    """Base class of every error that is the user's to fix."""


class ConfigError(JaxtronError):
    """A configuration key, value or combination of values that cannot work."""


class DataError(JaxtronError):
    """A dataset, tokenizer or input file that is missing, damaged or inconsistent."""


class CheckpointError(JaxtronError):
    """A checkpoint that is missing, incomplete, damaged or does not fit the model."""


class LaunchError(JaxtronError):
    """An environment in which the job cannot start: devices, processes, rendezvous."""
