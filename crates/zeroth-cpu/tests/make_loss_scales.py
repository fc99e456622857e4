"""Writes loss-scales.json: what DeepSpeed's own scaler makes of sequences of overflows.

    python tests/make_loss_scales.py

Needs deepspeed (0.19.8 wrote the file that is here). Each case: the settings, a sequence of overflows ("x") and clean
steps ("."), and the scale after each step; where the scaler gives up, the list ends at the step before.
"""

import json
import logging
import random
from pathlib import Path

from deepspeed.runtime.fp16 import loss_scaler

# The scaler asks for the rank before it logs; nothing else of the library is started.
loss_scaler.dist.get_rank = lambda: 0
logging.disable(logging.CRITICAL)


def run(steps, settings):
    scaler = loss_scaler.DynamicLossScaler(
        init_scale=settings["loss_scale"],
        scale_window=settings["window"],
        min_scale=settings["min_scale"],
        delayed_shift=settings["hysteresis"],
        consecutive_hysteresis=settings["consecutive"],
    )
    scales = []
    for step in steps:
        try:
            scaler.update_scale(step == "x")
        except Exception as error:
            assert "already at minimum" in str(error)
            break
        scales.append(scaler.cur_scale)
    return {**settings, "steps": steps, "scales": scales}


def main():
    draw = random.Random(5)
    cases = []
    for window in range(1, 6):
        for hysteresis in (1, 2, 3):
            for consecutive in (False, True):
                for rarely in (0.05, 0.3, 0.7):
                    settings = {
                        "window": window,
                        "hysteresis": hysteresis,
                        "consecutive": consecutive,
                        "loss_scale": 2.0 ** draw.choice([0, 4, 8, 16]),
                        "min_scale": draw.choice([0.25, 1.0, 3.0]),
                    }
                    steps = "".join("x" if draw.random() < rarely else "." for _ in range(40))
                    cases.append(run(steps, settings))
    # The named behaviours: all clean, all overflows, and the defaults.
    defaults = {"window": 1000, "hysteresis": 2, "consecutive": False, "loss_scale": 2.0**16, "min_scale": 1.0}
    cases.append(run("." * 2002, defaults))
    cases.append(run("x" * 40, defaults))
    cases.append(run("." * 9, {**defaults, "window": 2, "hysteresis": 1}))
    for case in cases:
        # Runs of equal scales as [scale, steps].
        runs = []
        for scale in case["scales"]:
            if runs and runs[-1][0] == scale:
                runs[-1][1] += 1
            else:
                runs.append([scale, 1])
        case["scales"] = runs
    lines = ",\n".join(json.dumps(case) for case in cases)
    (Path(__file__).parent / "loss-scales.json").write_text(f"[\n{lines}\n]\n")


main()
