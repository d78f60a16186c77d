"""Acceptor: no connection is lost while no front end takes one."""

from __future__ import annotations

import asyncio
import socket

from headrace.server.front_ends.acceptor import Acceptor

from tests.support.serving import HOST


def test_a_connection_that_is_not_taken_waits() -> None:
    passed: list[socket.socket] = []
    takes, all_passed = False, asyncio.Event()

    def pass_on(sock: socket.socket) -> bool:
        if takes:
            passed.append(sock)
            if len(passed) == 3:
                all_passed.set()
        return takes

    async def check() -> None:
        nonlocal takes
        listener = socket.create_server((HOST, 0))
        acceptor = Acceptor(listener, pass_on)
        acceptor.resume()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        for _ in range(3):
            acceptor.resume()  # nothing takes it yet
            await asyncio.sleep(0.01)
        assert passed == []
        takes = True
        acceptor.resume()
        await all_passed.wait()
        assert {sock.getpeername() for sock in passed} == {client.getsockname() for client in clients}
        for number, sock in enumerate(passed):
            sock.sendall(b"%d" % number)
        assert {client.recv(1) for client in clients} == {b"0", b"1", b"2"}
        takes = False
        clients.append(socket.create_connection(listener.getsockname()))
        await asyncio.sleep(0.01)
        acceptor.close()  # with a connection that nothing has taken
        for sock in (*clients, *passed):
            sock.close()

    asyncio.run(asyncio.wait_for(check(), 30))
