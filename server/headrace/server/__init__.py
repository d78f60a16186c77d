"""The server as a whole: its parts put together, settings, processes, commands."""
