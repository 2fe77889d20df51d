"""Messages that are seen without a configuration of logging, and through logging alone with one."""

import logging


def show(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a message as INFO if that is logged at all, else as WARNING, which Python then writes to standard error.

    A configuration without a level, such as that of torch_xla's import, logs warnings only.
    """
    level = logging.INFO if logger.isEnabledFor(logging.INFO) and logger.hasHandlers() else logging.WARNING
    logger.log(level, message, *args, stacklevel=2)
