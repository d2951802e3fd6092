"""Run chosen submodules of a PyTorch model through thunderfx, in place, and put everything back.

thunderpatch.apply(model, types=[nn.ReLU])        # patch
thunderpatch.restore(model)                       # undo
with thunderpatch.patched(model): ...             # both
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Load the public names when one of them is asked for.

        torch takes seconds to import; the command line is to answer `--help` and Ctrl-C before that.
        """
        # Whoever imports a submodule asks for it here first, and must not get the others in its midst.
        if name == "__all__" or not (name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}")):
            api = importlib.import_module(f"{__name__}.api")
            globals().update({public: getattr(api, public) for public in api.__all__}, __all__=api.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
