"""Headrace's model builders."""
