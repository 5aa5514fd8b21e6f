"""TCP proxies that cut a connection in one direction or both, slow it down, or let it hang, as networks do.

A cut loses nothing that was sent: like TCP, the proxy delivers it when the network is back, unless one side has given
up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Literal

Direction = Literal["up", "down"]
_PIECE = 16 * 1024


class TcpProxy:
    """Listens on ``port`` and passes bytes on to ``target``, another port of this machine. A context manager.

    ``up`` is from clients to the server, ``down`` from the server to clients. ``passed`` counts the bytes.
    """

    def __init__(self, target: int, port: int = 0) -> None:
        self.target, self.port = target, port
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self._open: dict[Direction, asyncio.Event] = {}
        self._rate: float | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self, *directions: Direction) -> None:
        """Deliver nothing in these directions (by default, in both) until :meth:`heal`. New connections hang open."""
        self._set(directions or ("up", "down"), is_open=False)

    def slow(self, bytes_per_second: float) -> None:
        """Deliver no more than this, for each connection and direction."""
        self._rate = bytes_per_second

    def heal(self) -> None:
        """Deliver everything again."""
        self._rate = None
        self._set(("up", "down"), is_open=True)

    def reset(self) -> None:
        """End all connections, in the middle of whatever they carry."""

        async def abort() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        self._do(abort())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _set(self, directions: tuple[Direction, ...], *, is_open: bool) -> None:
        async def change() -> None:
            for direction in directions:
                self._open[direction].set() if is_open else self._open[direction].clear()

        self._do(change())

    async def _listen(self) -> None:
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        for event in self._open.values():
            event.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for task in asyncio.all_tasks(self._loop) - {asyncio.current_task()}:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            await self._open["up"].wait()
            back, there = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(there)
            ways = [
                asyncio.ensure_future(self._pump(reader, there, "up")),
                asyncio.ensure_future(self._pump(back, writer, "down")),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the server is not there: its clients see that
        finally:
            for one in (writer, there):
                if one is not None:
                    self._writers.discard(one)
                    one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                if self._rate is not None:
                    await asyncio.sleep(len(data) / self._rate)
                await self._open[direction].wait()
                writer.write(data)
                self.passed[direction] += len(data)
                await writer.drain()
