"""Phases of a start: they share out all of its time."""

import subprocess
import sys

import pytest

from flint_jax.phases import Phases


def test_the_sum_is_the_total():
    now = [100.0]
    phases = Phases(age=2.5, clock=lambda: now[0])
    for name, seconds in (("imports", 1.0), ("weights", 7.25), ("warm-up", 0.5)):
        now[0] += seconds
        phases.done(name, "beside it: programs 9 s" if name == "weights" else "")
    assert phases.seconds == {"imports": 3.5, "weights": 7.25, "warm-up": 0.5}
    assert sum(phases.seconds.values()) == phases.total == 11.25
    line = "ready after 11.2 s: imports 3.5 s, weights 7.2 s (beside it: programs 9 s), warm-up 0.5 s"
    assert str(phases) == line


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a process began")
def test_time_before_the_first_line_of_python_counts():
    program = "import time; time.sleep(0.5); from flint_jax.phases import process_age; print(process_age())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.45 < float(done.stdout) < 60
