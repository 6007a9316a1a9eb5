"""`Channel`: JSON messages between machines that share a secret, each proven to be the other side's and the next in line.

It is not encrypted: who can listen on the network reads it, and cannot change it or say anything. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_HEAD = struct.Struct(">I32s")  # bytes, proof
_NONCE_BYTES = 32
MOST_BYTES = 64 << 20  # of a message
SEND_S = 10.0  # that the other side may take nothing in
AT_ONCE_BYTES = 8 << 20  # that are read before something else gets its turn
UNPROVEN_BYTES = 1 << 20  # of a first message
PING_S = 0.5
CONNECT_S = 3.0
STILL_S = 3 * PING_S  # between two pings of a process that stood still itself


class ChannelError(ConnectionError):
    """The other side is gone, silent, or not who it should be."""


class Channel:
    """One side of a connection. A thread of its own tells the other side that this process lives.

    Args:
        sock: connected. secret: that both sides have. leads: which of the two sides this is.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, leads: bool) -> None:
        self._sock, self._leads = sock, leads
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(_NONCE_BYTES)
        sock.settimeout(CONNECT_S)
        sock.sendall(mine)
        theirs = _exactly(sock, _NONCE_BYTES)
        both = mine + theirs if leads else theirs + mine
        self._key = hmac.digest(secret, both, hashlib.sha256)
        sock.setblocking(False)
        self._sent = self._received = 0
        self._unread, self._end, self._broken = b"", "", ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._heard = self._awake = time.monotonic()
        self._still_s = 0.0
        self.proven = False
        """the other side has shown that it has the secret"""
        threading.Thread(target=self._ping, daemon=True).start()

    @property
    def silent_s(self) -> float:
        """Seconds since a whole message of the other side came, or since this process went on after it stood still itself."""
        now = time.monotonic()
        return 0.0 if now - self._awake > STILL_S else now - self._heard

    @property
    def still_s(self) -> float:
        """The longest that this process stood still (stopped, or suspended) and the other side did not hear it; 0: never."""
        still_s = max(self._still_s, time.monotonic() - self._awake)
        return still_s if still_s > STILL_S else 0.0

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """
        Raises:
            ChannelError: the other side is gone, or takes nothing in.
        """
        payload = zlib.compress(json.dumps(message).encode(), 1)
        with self._lock:
            if self._broken:
                raise ChannelError(self._broken)
            proof = self._proof(self._leads, self._sent, payload)
            self._sent += 1
            try:
                self._send_all(_HEAD.pack(len(payload), proof) + payload)
            except ChannelError as error:
                self._broken = str(error)  # half a message may be under way
                raise

    def receive(self) -> list[dict[str, Any]]:
        """What has come, without waiting; pings are left out.

        Raises:
            ChannelError: the other side is gone, or what came is not from it.
        """
        self._take_in()
        found = []
        while len(self._unread) >= _HEAD.size:
            size, proof = _HEAD.unpack_from(self._unread)
            if size > (MOST_BYTES if self.proven else UNPROVEN_BYTES):
                raise ChannelError("what came is no message of shoal")
            if len(self._unread) < _HEAD.size + size:
                break
            payload = self._unread[_HEAD.size : _HEAD.size + size]
            self._unread = self._unread[_HEAD.size + size :]
            if not hmac.compare_digest(proof, self._proof(not self._leads, self._received, payload)):
                raise ChannelError("the other side does not have this run's token")
            self._received += 1
            self.proven, self._heard = True, time.monotonic()
            if message := json.loads(zlib.decompress(payload)):
                found.append(message)
        if self._end and not found:  # its last words come first
            raise ChannelError(self._end)
        return found

    def close(self) -> None:
        self._closed.set()
        self._sock.close()

    def _take_in(self) -> None:
        until = len(self._unread) + AT_ONCE_BYTES
        while not self._end and len(self._unread) < until:
            try:
                data = self._sock.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError as error:
                self._end = f"the connection ended: {error}"
                return
            if not data:
                self._end = "the connection was closed"
                return
            self._unread += data

    def _send_all(self, data: bytes) -> None:
        left, until = memoryview(data), time.monotonic() + SEND_S
        while left:
            try:
                left = left[self._sock.send(left) :]
            except BlockingIOError:
                if time.monotonic() > until or self._closed.is_set():
                    raise ChannelError("the other side takes nothing in") from None
                time.sleep(0.005)
            except (OSError, ValueError) as error:
                raise ChannelError(f"the connection ended: {error}") from error

    def _proof(self, leads: bool, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, b"%d %d " % (leads, number) + payload, hashlib.sha256)

    def _ping(self) -> None:
        while not self._closed.wait(PING_S):
            now = time.monotonic()
            if now - self._awake > STILL_S:
                self._still_s, self._heard = max(self._still_s, now - self._awake), now
            self._awake = float("inf")  # the other side may take nothing in for long
            try:
                self.send({})
            except ChannelError:
                return  # who reads finds out
            self._awake = time.monotonic()


class Door:
    """Where a leader listens: each connection is made a channel in a thread of its own, so that a stranger holds nobody up."""

    def __init__(self, address: str, secret: bytes, opened: Callable[[Channel], None]) -> None:
        self._server = socket.create_server((address, 0))
        self.port: int = self._server.getsockname()[1]
        self._secret, self._opened = secret, opened
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no files are left, or who connected is gone again
                continue
            threading.Thread(target=self._open, args=(sock,), daemon=True).start()

    def _open(self, sock: socket.socket) -> None:
        try:
            channel = Channel(sock, self._secret, leads=True)
        except OSError:
            sock.close()
            return
        self._opened(channel)


def connect(address: str, port: int, secret: bytes) -> Channel:
    """
    Raises:
        ChannelError: nobody answers.
        ConnectionRefusedError: the host answers, and nobody listens there.
    """
    try:
        sock = socket.create_connection((address, port), timeout=CONNECT_S)
    except ConnectionRefusedError:
        raise
    except OSError as error:
        raise ChannelError(f"{address}:{port} does not answer: {error}") from error
    try:
        return Channel(sock, secret, leads=False)
    except OSError as error:
        sock.close()
        raise ChannelError(f"{address}:{port} does not answer as it should: {error}") from error


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ChannelError("the connection was closed")
        data += part
    return data
