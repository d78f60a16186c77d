"""Keys, JSON web tokens and client certificates: implements `headrace.core.access` with files, network and threads."""
