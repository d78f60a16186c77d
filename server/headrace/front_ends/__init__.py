"""Front-end processes that feed one engine process: data stream, table of versions, arena of shared memory."""
