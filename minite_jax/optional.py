"""Packages that only some uses need: imported when used, and when missing, with the way to install them."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Imports and returns `module`, which belongs to the installation extra `extra`.

    Args:
        module: dotted module name, such as `"matplotlib.pyplot"`.
        extra: name of the extra in `setup.cfg` that installs it.

    Raises:
        ImportError: the package is not installed; the message says which extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there but lacks something of its own is another fault: leave that message alone.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        message = f"{module} is needed here and is not installed: pip install 'minite_jax[{extra}]'"
        raise ImportError(message, name=error.name) from None
