"""HTTP/1.1: connections, inference endpoint, control API and pages."""
