"""Demo models, built by code: no model binary is committed.

`build` has the catalogue and writes the models into a model repository; the other modules are recipes. This package imports
nothing, so that a check of up-to-date models takes milliseconds.
"""
