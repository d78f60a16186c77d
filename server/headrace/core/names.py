"""What names may look like that clients give."""

# Of a shared memory region; the same over every protocol, so that what one has registered the other can name.
REGION_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9_.:@+=, -]{0,127}$"

# Of a client, in a header: visible ASCII, without a blank.
CLIENT_PATTERN = "^[!-~]{1,128}$"
# ... and the header itself, unless the operator names another.
CLIENT_HEADER = "x-headrace-client"
