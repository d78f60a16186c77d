"""HTTP/2 server (RFC 9113) on asyncio transports, for many small calls on few connections; independent of gRPC.

frames      frame layout, encoding, decoding, protocol errors; HPACK (RFC 7541) with a cache of repeated header blocks
stream      streams, flow control in both directions, write buffer
connection  the asyncio protocol of a socket: frames to streams, timeouts, keep-alive, graceful shutdown
"""
