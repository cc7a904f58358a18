"""The lab: machine card, timing, plates (recorded results), figures and experiments.

One measurement goes one way: `experiments.NAME.measure(params)` -> rows -> `plate.save` -> JSON ->
`plate.draw` -> PNG. `commands` holds what the command line calls. Nothing heavy is imported here.
"""

from .commands import (
    draw_command,
    lint_command,
    list_command,
    record,
    run_all_command,
    run_command,
)
from .gate_plate import gates_command

__all__ = [
    "draw_command",
    "gates_command",
    "lint_command",
    "list_command",
    "record",
    "run_all_command",
    "run_command",
]
