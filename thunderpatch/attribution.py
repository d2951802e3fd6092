"""Finds the module on whose behalf Dynamo is at work, and answers for it when Dynamo fails."""

from __future__ import annotations

from typing import Any

import torch

from . import capture
from .errors import interrupted
from .forward import CALL
from .record import Record, compile_error, first_line, log


class Attribution(capture.Watch):
    """Finds the module on whose behalf Dynamo is at work, by the patched call that is running."""

    def owner(self) -> str | None:
        """Return the name of that module."""
        record = self._record()
        return record.name if record is not None else None

    def failed(self, frame: Any, error: Exception) -> Any:
        if interrupted(error):
            raise KeyboardInterrupt from error
        record = self._record()
        if record is None:
            return None
        options = record.compiler.options
        soft = isinstance(error, torch._dynamo.exc.Unsupported) and not options.fullgraph
        if soft and not record.misled and str(error).startswith("Observed exception"):
            # The forward raises: let it, as in eager, and do not give up on its other calls.
            record.raises = "Dynamo expected it to raise"
            return capture.run_this_frame_uncompiled()
        if soft:
            self.skipped(frame, f"Dynamo cannot trace it: {first_line(error)}")
            return None
        if isinstance(error, torch._dynamo.exc.TorchRuntimeError) and not options.fullgraph:
            # Most likely the caller's own mistake, which eager reports better, or the forward catches it.
            why = f"Dynamo cannot trace it: {first_line(error)}"
            if record.misled:
                self.skipped(frame, why)
                return capture.run_uncompiled_from_now_on()
            record.raises = why
            return capture.run_this_frame_uncompiled()
        if options.on_error == "raise":
            raise compile_error(record, error) from error
        record.error = error
        return capture.run_this_frame_uncompiled()

    def skipped(self, frame: Any, reason: str) -> None:
        record = self._record()
        if record is None or record.lane is None:
            return
        reason = reason.strip().partition("\n")[0]  # after that Dynamo tells of the frame
        record.reasons.append(reason)
        if record.lane.owns(frame.f_code):
            record.lane.skipped = reason

    def traced(self, frame: Any, seconds: float, misfit: str | None) -> None:
        record = self._record()
        if record is None:
            return
        record.compilations += 1
        record.seconds["dynamo"] += seconds
        if misfit is not None:
            record.recompiled.append(misfit)
            log.debug("%s: traced again, since this did not hold: %s", record.name, misfit)

    @staticmethod
    def _record() -> Record | None:
        proxy = capture.caller(CALL)
        return proxy._self_record if proxy is not None else None


watch = Attribution()
