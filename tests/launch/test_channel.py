"""Messages between machines: only from who has the secret, in their order, and never a wait without an end."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Generator
from typing import Any

import pytest

from shoal.launch.nodes import channel as channels
from shoal.launch.nodes.channel import Channel, ChannelError, Door, connect

SECRET = b"s" * 32


@pytest.fixture
def door() -> Generator[tuple[Door, queue.SimpleQueue[Channel]]]:
    opened: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    made = Door("127.0.0.1", SECRET, opened.put)
    yield made, opened
    made.close()


def heard(channel: Channel, seconds: float = 5.0) -> list[dict[str, Any]]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := channel.receive():
            return found
        time.sleep(0.01)
    return []


def test_both_sides_hear_each_other_in_order(door: tuple[Door, queue.SimpleQueue[Channel]]) -> None:
    ours = connect("127.0.0.1", door[0].port, SECRET)
    theirs = door[1].get(timeout=5)
    for number in range(5):
        ours.send({"number": number})
    assert heard(theirs)[0] == {"number": 0}
    theirs.send({"large": "x" * 5_000_000})
    assert len(heard(ours)[0]["large"]) == 5_000_000
    time.sleep(1.2)
    ours.receive()
    assert ours.silent_s < 1.0  # pings
    theirs.send({"last": True})
    theirs.close()
    assert heard(ours) == [{"last": True}]
    with pytest.raises(ChannelError, match=r"closed|ended"):
        heard(ours)
    ours.close()


def test_who_stood_still_itself_takes_nobody_for_silent(
    door: tuple[Door, queue.SimpleQueue[Channel]],
) -> None:
    ours = connect("127.0.0.1", door[0].port, SECRET)
    door[1].get(timeout=5)
    assert ours.still_s == 0.0
    for clock in ("_heard", "_awake"):  # as after SIGSTOP and SIGCONT
        setattr(ours, clock, getattr(ours, clock) - 7.0)
    assert ours.silent_s == 0.0 and ours.still_s >= 7.0
    time.sleep(2 * channels.PING_S)
    assert ours.silent_s < 4 * channels.PING_S and 7.0 <= ours.still_s < 8.0


def test_another_secret_is_refused(door: tuple[Door, queue.SimpleQueue[Channel]]) -> None:
    stranger = connect("127.0.0.1", door[0].port, b"x" * 32)
    stranger.send({"join": {}})
    with pytest.raises(ChannelError, match="token"):
        heard(door[1].get(timeout=5))
    stranger.close()


def test_what_is_no_message_is_refused_before_it_is_read(
    door: tuple[Door, queue.SimpleQueue[Channel]],
) -> None:
    with socket.create_connection(("127.0.0.1", door[0].port)) as stranger:
        stranger.recv(32)
        stranger.sendall(b"n" * 32 + b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
        with pytest.raises(ChannelError, match="no message"):
            heard(door[1].get(timeout=5))


def test_a_message_that_is_said_again_is_refused(
    door: tuple[Door, queue.SimpleQueue[Channel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "PING_S", 60.0)
    ours = connect("127.0.0.1", door[0].port, SECRET)
    theirs = door[1].get(timeout=5)
    sent: list[bytes] = []
    real = ours._send_all
    monkeypatch.setattr(ours, "_send_all", lambda data: (sent.append(bytes(data)), real(data)))
    ours.send({"signal": 9})
    assert heard(theirs) == [{"signal": 9}]
    real(sent[0])
    with pytest.raises(ChannelError, match="token"):
        heard(theirs)


def test_one_that_connects_and_says_nothing_holds_nobody_up(
    door: tuple[Door, queue.SimpleQueue[Channel]],
) -> None:
    with socket.create_connection(("127.0.0.1", door[0].port)):
        began = time.monotonic()
        ours = connect("127.0.0.1", door[0].port, SECRET)
        assert time.monotonic() - began < 2.0
        ours.close()


def test_one_that_takes_nothing_in_is_given_up(
    door: tuple[Door, queue.SimpleQueue[Channel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SEND_S", 0.5)
    ours = connect("127.0.0.1", door[0].port, SECRET)
    with pytest.raises(ChannelError, match="takes nothing in"):
        for _ in range(100):
            ours.send({"noise": list(range(300_000))})
    ours.close()


def test_where_nobody_listens_is_told_from_where_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port, SECRET)
