"""A process that sleeps is woken, and one that is awake costs its peers nothing."""

import mmap
import threading
import time
from unittest.mock import patch

from lightning_shard.backends.shm.doorbell import Doorbell
from tests.patience import patient


def test_a_ring_wakes_the_sleeper() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    own, peers = Doorbell(memory), Doorbell(memory)
    woken = threading.Event()

    def sleep() -> None:
        word = own.listen()
        asleep.set()
        own.sleep(word, 30.0)
        own.end_sleep()
        woken.set()

    asleep = threading.Event()
    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert asleep.wait(patient(10))
    while not woken.is_set():  # it may not yet lie down at the first
        peers.ring()
        time.sleep(0.001)
    thread.join(patient(10))
    assert not thread.is_alive()


def test_a_ring_between_looking_and_sleeping_is_not_missed() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    own, peers = Doorbell(memory), Doorbell(memory)
    word = own.listen()
    peers.ring()
    begin = time.monotonic()
    own.sleep(word, 30.0)
    assert time.monotonic() - begin < 20
    own.end_sleep()


def test_nobody_rings_where_nobody_sleeps() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    doorbell = Doorbell(memory)
    word = doorbell.listen()
    doorbell.end_sleep()
    with patch.object(doorbell, "_futex") as futex:
        doorbell.ring()
    futex.assert_not_called()
    assert doorbell.listen() == word
    doorbell.end_sleep()
