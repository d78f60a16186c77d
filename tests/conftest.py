"""What every test here shares."""

from __future__ import annotations

import os

import hypothesis

# Two busy cores make single examples slow now and then; that says nothing about the code.
hypothesis.settings.register_profile("headrace", deadline=None)
# CI draws the same examples every time, so that a red build is the commit's fault.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "headrace")
