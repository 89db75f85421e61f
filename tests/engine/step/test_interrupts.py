"""Ctrl-C waits for the end of a step, the second one does not."""

import signal
import threading

import pytest

from engine.step.interrupts import uninterrupted


def test_the_first_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done == [1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_does_not():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_gives_the_handler_back():
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_and_other_threads_are_left_alone():
    heard, own = [], signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert heard == [1]
    finally:
        signal.signal(signal.SIGINT, own)

    def inside():
        with uninterrupted():
            heard.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert heard == [1, signal.default_int_handler]
