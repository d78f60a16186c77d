"""HTTP/2 server (RFC 9113) on asyncio transports, for many small calls on few connections; independent of gRPC.

frames      frame layout, encoding, decoding, protocol errors
hpack       HPACK (RFC 7541): decoding with a cache of repeated header blocks, encoding without a table
stream      streams, flow control in both directions, write buffer
connection  the asyncio protocol of a socket: frames to streams, timeouts, keep-alive, graceful shutdown
"""
