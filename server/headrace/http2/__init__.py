"""An HTTP/2 server (RFC 9113) on asyncio transports, made for many small calls on few connections; knows nothing of gRPC.

frames      bytes <-> frames; the faults a peer can commit
hpack       HPACK (RFC 7541): decoding, with a memory for blocks that repeat; encoding without a table
stream      one request and its answer, to be subclassed by the application; windows in both directions, one write an iteration of
            the loop
connection  the protocol of a socket: frames in, calls to streams out; time-outs, dead peers, a graceful shutdown
"""
