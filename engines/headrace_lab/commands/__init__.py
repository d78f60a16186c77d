"""Commands of the lab: `headrace lab conv`, `memory` and `overlap`."""
