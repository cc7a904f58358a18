"""Errors a user can cause. Each message is one line: the thing, the value found, the value needed.

The command line prints the message alone and exits with status 2; a traceback means a bug in this
project.
"""


class DecodeError(ValueError):
    """Base of every error raised for something the caller can fix."""


class CodecError(DecodeError):
    """A matrix that NF4 cannot hold (NaN, infinite, or a scale outside float16)."""


class ContainerError(DecodeError):
    """A `.chr` file that is damaged, or holds something this reader does not know."""


class ModelError(DecodeError):
    """A checkpoint folder whose config, tensors or files do not fit each other or are not
    implemented."""


class PromptError(DecodeError):
    """Text or ids that the tokenizer, the template or the context cannot take."""


class StepError(DecodeError):
    """A step whose CTAs waited for each other in vain; the message names another way to take it."""


class PlateError(DecodeError):
    """A recorded result that is incomplete, malformed or out of date."""


class BuildError(RuntimeError):
    """A kernel that could not be compiled or loaded; the message names the missing tool or the log
    file."""
