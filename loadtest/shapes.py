"""Number of users over time: a file for locust beside `loadtest/locustfile.py`.

python -m locust -f loadtest/locustfile.py,loadtest/shapes.py --headless --shape ramp --peak-users 50 --seconds 60
"""

from __future__ import annotations

from argparse import ArgumentParser

from locust import LoadTestShape, events

from loadtest.crowd import SHAPES, users_at


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="steady", help="how many users there are, and when")
    parser.add_argument("--peak-users", type=int, default=24, help="most users at a time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the whole test")


class Shape(LoadTestShape):
    """The shape of `--shape`."""

    def tick(self) -> tuple[int, float] | None:
        """Number of users now, and users started or stopped a second; None at the end."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        time = self.get_run_time() / options.seconds
        return None if time >= 1 else (users_at(options.shape, time, options.peak_users), float(options.peak_users))
