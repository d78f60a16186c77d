"""The demo models, built by code: no model binary is ever committed.

`catalogue` names them, `build` writes them into a model repository, one module each knows a recipe. This package imports
nothing by itself, so that finding everything up to date costs milliseconds.
"""
