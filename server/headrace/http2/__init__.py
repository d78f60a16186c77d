"""An HTTP/2 server (RFC 9113) on asyncio transports, made for many small calls on few connections; knows nothing of gRPC.

frames      bytes <-> frames; the faults a peer can commit
headers     HPACK (RFC 7541): decoding, with a memory for blocks that repeat; encoding without a table
flow        what a peer may still send: windows, grants for large bodies, the allowance for frames that carry no work
outbox      what we may still send: windows, blocked bodies, one write an iteration of the loop
stream      one request and its answer, to be subclassed by the application
connection  the protocol of a socket: frames in, calls to streams out
patience    reading on later, where reading on now would refuse an honest peer
lifetime    what ends a connection: time-outs, dead peers, a graceful shutdown
"""
