"""Errors that a user can act on: each says what was given, what is needed and what to do."""


class FlintError(Exception):
    """Base of every error that flint_jax and loaders raise on purpose."""


class ConfigError(FlintError, ValueError):
    """A model configuration is contradictory, incomplete or asks for another architecture."""


class CheckpointError(FlintError, ValueError):
    """A checkpoint file is damaged, incomplete or in a form we do not read."""


class TokenizerError(FlintError, ValueError):
    """A tokenizer or chat template is missing, unknown or cannot be used."""


class RequestError(FlintError, ValueError):
    """A request is invalid. ``param`` names the offending field, ``code`` is the machine-readable reason."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code
