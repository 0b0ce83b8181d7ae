"""Learning-rate schedules with warm-up: a pure function of the step."""

import math

from megacore.config import ScheduleConfig


def learning_rate(step: int, schedule: ScheduleConfig, base: float, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, which is 1 for the first, as in metrics.jsonl.

    Warm-up rises in a straight line and arrives at `base` on step `warmup_steps`. The decay leaves from `base` on its
    first step, so that no step is wasted at the floor before its time, and is at `min_ratio * base` after its last:

        cosine    half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983), from the end of the warm-up
        linear    a straight line, from the end of the warm-up
        wsd       `base` throughout, then a straight line that ends with the run: warm-up, stable, decay
                  (Hu et al. 2024, arXiv 2404.06395)
        constant  `base` throughout

    Args:
        schedule: Its name and lengths; see `length_of_decay` for what null stands for.
    """
    done = step - 1
    if done < schedule.warmup_steps:
        return base * step / schedule.warmup_steps
    length = schedule.length_of_decay(total_steps)
    start = total_steps - length if schedule.name == "wsd" else schedule.warmup_steps
    progress = min(max((done - start) / length, 0.0), 1.0) if length else 0.0
    height = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return base * (schedule.min_ratio + (1 - schedule.min_ratio) * height)
